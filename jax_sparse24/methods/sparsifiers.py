"""Sparsifiers that the tables of the methods are made of."""

import dataclasses
from typing import ClassVar

from jax_sparse24.engine import Sparsifier
from jax_sparse24.ops.mvue import mvue_pack24
from jax_sparse24.ops.pack import pack24


@dataclasses.dataclass(frozen=True)
class Top2:
    """The two largest magnitudes of every four along the contraction axis."""

    divides: ClassVar = (0,)
    stochastic: ClassVar = False
    needs: ClassVar = ()

    def __call__(self, x, axis, state, key, implementation):
        return pack24(x, axis, implementation=implementation)

    def __str__(self):
        return "top-2 of 4"


@dataclasses.dataclass(frozen=True)
class Masked:
    """The entries of a mask kept in the layer's state."""

    entry: str = "mask"
    label: str = "stored mask"
    divides: ClassVar = (0,)
    stochastic: ClassVar = False

    @property
    def needs(self):
        return (self.entry,)

    def __call__(self, x, axis, state, key, implementation):
        return pack24(x, axis, state[self.entry], implementation=implementation)

    def __str__(self):
        return self.label


@dataclasses.dataclass(frozen=True)
class MVUE:
    """Minimum-variance unbiased estimate along the contraction axis."""

    exact: bool = True
    divides: ClassVar = (0,)
    stochastic: ClassVar = True
    needs: ClassVar = ()

    def __call__(self, x, axis, state, key, implementation):
        return mvue_pack24(key, x, axis, self.exact, implementation=implementation)

    def __str__(self):
        return f"MVUE, {'exact' if self.exact else 'approximate'}"


@dataclasses.dataclass(frozen=True)
class DenseValues:
    """The values another sparsifier gives along a fixed axis, in a dense product: what was multiplied
    forward, where its groups do not lie along this product's contraction axis."""

    of: Sparsifier
    axis: int

    @property
    def divides(self):
        return tuple(d or self.axis for d in self.of.divides)

    @property
    def stochastic(self):
        return self.of.stochastic

    @property
    def needs(self):
        return self.of.needs

    def __call__(self, x, axis, state, key, implementation):
        return self.of(x, self.axis, state, key, implementation).todense(implementation=implementation)

    def __str__(self):
        return f"values of {self.of}, dense product"
