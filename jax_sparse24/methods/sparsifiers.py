"""Sparsifiers that the tables of the methods are made of.

Where a product runs dense, they return the same values as an array."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.ops import compressed
from jax_sparse24.ops.kept import pack_counted, squared_relu_vnm
from jax_sparse24.ops.mask import mask_nm
from jax_sparse24.ops.matmul import with_values
from jax_sparse24.ops.mvue import mvue24, mvue_pack24, mvue_pack24_strided, random24
from jax_sparse24.ops.pack import pack24, pack24_strided
from jax_sparse24.ops.prune import prune24, soft24
from jax_sparse24.ops.squared_relu import squared_relu24
from jax_sparse24.ops.tokens import causal_mask24
from jax_sparse24.ops.vnm import pack_vnm, vnm_mask
from jax_sparse24.patterns import VNM
from jax_sparse24.plan import Context, Row, Sparsifier

# Cuts of the output gradient: MVUE of least variance, or as the code of 2404.01847 draws it; the two largest
# of four; two of four at random; one of each two neighbours at random.
Estimator = Literal["exact", "approximate"]
GradientCut = Literal["exact", "approximate", "biased", "uniform", "paired"]


@dataclasses.dataclass(frozen=True)
class Groups24:
    """Base of the sparsifiers with groups of four along the contraction axis."""

    stochastic: ClassVar = False
    pattern: ClassVar = "2:4"
    group: ClassVar = 4
    strides: ClassVar = False  # whether it can pack as `pack24_strided` does
    compresses: ClassVar = False  # whether it can pack for cuSPARSELt at once
    largest: ClassVar = False  # whether it packs what `pack24` does

    def check(self, op, shape, axis, what):
        patterns.check_divides(op, shape, axis, what=what)


@dataclasses.dataclass(frozen=True)
class Top2(Groups24):
    """The two largest magnitudes of every four along the contraction axis."""

    strides: ClassVar = True
    compresses: ClassVar = True
    largest: ClassVar = True

    def __call__(self, x, axis, context: Context):
        implementation = context.implementation
        if context.counted:
            squared = context.activation == "squared_relu"
            how = {"compressed": context.compressed, "implementation": implementation}
            return pack_counted(x if squared else context.activate(x), squared, **how)
        if context.compressed:
            if context.activation == "squared_relu" and not context.strided:
                return compressed.squared_relu(x, axis)
            return compressed.pack(context.activate(x), axis, strided=context.strided)
        if context.strided:
            return pack24_strided(context.activate(x), implementation=implementation)
        if not context.packed:
            return prune24(context.activate(x), axis, implementation=implementation)
        if context.activation == "squared_relu":
            return squared_relu24(x, axis, implementation=implementation)
        return pack24(context.activate(x), axis, implementation=implementation)

    def __str__(self):
        return "top-2 of 4"


@dataclasses.dataclass(frozen=True)
class TopN:
    """The n largest magnitudes of every m along the contraction axis, as an array: hardware has no
    such format."""

    n: int
    m: int
    stochastic: ClassVar = False

    def check(self, op, shape, axis, what):
        patterns.check_divides(op, shape, axis, self.m, what)

    def __call__(self, x, axis, context: Context):
        x = context.activate(x)
        return jnp.where(mask_nm(x, self.n, self.m, axis), x, jnp.zeros_like(x))

    def __str__(self):
        return f"top-{self.n} of {self.m}, which nothing packs"


@dataclasses.dataclass(frozen=True)
class CausalBothWays(Groups24):
    """2:4 along features and along four consecutive tokens at once, without looking at later tokens."""

    def check(self, op, shape, axis, what):
        for both in (-1, -2):
            super().check(op, shape, both, what)

    def __call__(self, x, axis, context: Context):
        x = context.activate(x)
        mask = causal_mask24(x)
        if context.packed:
            return pack24(x, axis, mask, implementation=context.implementation)
        return jnp.where(mask, x, jnp.zeros_like(x))

    def __str__(self):
        return "top of 4 both ways, causal"


@dataclasses.dataclass(frozen=True)
class Blocks:
    """V:2:M: blocks of V rows share four of every M columns along the contraction axis (2310.02065).

    If the operand's state names which columns are `allowed`, bool (rows / V, columns), it takes those, and
    nothing of rows that are not `real`, bool (rows,)."""

    v: int
    m: int
    exact: bool = False
    stochastic: ClassVar = False
    repacks: ClassVar = True  # whether `repack_vnm` cuts as it does

    @property
    def pattern(self):
        return str(VNM(self.v, self.m))

    @property
    def group(self):
        return self.m

    def check(self, op, shape, axis, what):
        VNM(self.v, self.m).check(op, shape, axis, what, ("tokens", "neurons"))

    def __call__(self, x, axis, context: Context):
        chosen = axis == -1 and "allowed" in context.state
        squares = context.activation == "squared_relu" and axis == -1
        if context.packed and squares and not (chosen or self.exact):
            return squared_relu_vnm(x, self.v, self.m, implementation=context.implementation)
        x = context.activate(x)
        make = {"axis": axis, "exact": self.exact, "implementation": context.implementation}
        if chosen:
            allowed = jnp.repeat(context.state["allowed"], self.v, axis=0) & context.state["real"][:, None]
            if context.packed:
                return pack_vnm(x, self.v, self.m, **{**make, "exact": False}, mask=allowed)
            x = jnp.where(allowed, x, jnp.zeros_like(x))
        if context.packed:
            return pack_vnm(x, self.v, self.m, **make)
        return jnp.where(vnm_mask(x, self.v, self.m, **make), x, jnp.zeros_like(x))

    def __str__(self):
        return f"{self.pattern}{', best columns' if self.exact else ''}"


@dataclasses.dataclass(frozen=True)
class Masked(Groups24):
    """The entries of a mask kept in the layer's state, read as `pack24` reads it: of a group with more than
    two the two of largest magnitude stay."""

    entry: str = "mask"
    label: str = "stored mask"
    compresses: ClassVar = True

    def __call__(self, x, axis, context: Context):
        mask = context.state[self.entry]
        if context.compressed:
            return compressed.pack(x, axis, mask)
        if context.packed:
            return pack24(x, axis, mask, implementation=context.implementation)
        return prune24(jnp.where(mask, x, jnp.zeros_like(x)), axis, implementation=context.implementation)

    def __str__(self):
        return self.label


@dataclasses.dataclass(frozen=True)
class Soft(Groups24):
    """Soft threshold along the contraction axis, times the scale in the layer's state (2409.09099)."""

    entry: str = "scale"
    compresses: ClassVar = True

    def __call__(self, x, axis, context: Context):
        soft = soft24(x, axis, implementation=context.implementation)
        scale = context.state[self.entry].astype(x.dtype)
        if not context.packed:
            return soft * scale
        if context.compressed:
            packed = compressed.pack(soft, axis)
        else:
            packed = pack24(soft, axis, implementation=context.implementation)
        return with_values(packed, packed.values * scale)

    def __str__(self):
        return "soft threshold, scaled"


@dataclasses.dataclass(frozen=True)
class MVUE(Groups24):
    """Minimum-variance unbiased estimate along the contraction axis."""

    exact: bool = True
    stochastic: ClassVar = True
    strides: ClassVar = True
    compresses: ClassVar = True

    def __call__(self, x, axis, context: Context):
        if context.compressed:
            return compressed.mvue_pack(context.key, x, axis, self.exact, strided=context.strided)
        if context.strided:
            return mvue_pack24_strided(context.key, x, self.exact, implementation=context.implementation)
        estimate = mvue_pack24 if context.packed else mvue24
        return estimate(context.key, x, axis, self.exact, implementation=context.implementation)

    def __str__(self):
        return f"MVUE, {'exact' if self.exact else 'approximate'}"


@dataclasses.dataclass(frozen=True)
class Random(Groups24):
    """Two of four along the contraction axis by another unbiased law than MVUE, see `random24`."""

    law: Literal["uniform", "paired"]
    stochastic: ClassVar = True

    def __call__(self, x, axis, context: Context):
        drawn = random24(context.key, x, axis, self.law)
        return pack24(drawn, axis, implementation=context.implementation) if context.packed else drawn

    def __str__(self):
        return {"uniform": "two of 4 at random, doubled", "paired": "MVUE 1:2, twice"}[self.law]


GRADIENT_CUTS = {
    "exact": MVUE(),
    "approximate": MVUE(exact=False),
    "biased": Top2(),
    "uniform": Random("uniform"),
    "paired": Random("paired"),
}


def weight_gradient(cut: GradientCut | None) -> dict[str, Row]:
    """The row of wgrad in a linear plan: dY cut along tokens, or none."""
    return {} if cut is None else {"wgrad": Row("dy", GRADIENT_CUTS[cut])}


@dataclasses.dataclass(frozen=True)
class Kept:
    """The support of F2's sparse Y2, `of` which it is, in the backward pass of a plan with `keep`."""

    of: Sparsifier
    stochastic: ClassVar = False
    group: ClassVar = 4

    @property
    def pattern(self):
        return self.of.pattern

    def check(self, op, shape, axis, what):
        """F2 has checked it."""

    def __call__(self, x, axis, context: Context):
        return context.kept if context.packed else x

    def __str__(self):
        return "support of F2"


@dataclasses.dataclass(frozen=True)
class DenseValues:
    """The values another sparsifier gives along a fixed axis, in a dense product: what was multiplied
    forward, where its groups do not lie along this product's contraction axis."""

    of: Sparsifier
    axis: int
    pattern: ClassVar = "2:4"
    group: ClassVar = 4

    @property
    def stochastic(self):
        return self.of.stochastic

    def check(self, op, shape, axis, what):
        self.of.check(op, shape, self.axis, what)

    def __call__(self, x, axis, context: Context) -> jax.Array:
        values = self.of(x, self.axis, dataclasses.replace(context, packed=False))
        return (
            values if isinstance(values, jax.Array) else values.todense(implementation=context.implementation)
        )

    def __str__(self):
        return f"values of {self.of}, dense product"
