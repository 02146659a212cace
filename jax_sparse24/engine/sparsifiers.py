"""The sparsifiers that the tables of the methods are made of.

Where a product runs dense, a sparsifier returns the same values as an array."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.engine.operand import Request, Sparsifier
from jax_sparse24.engine.plan import Row
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.features import causal_mask24
from jax_sparse24.ops.matmul import with_values
from jax_sparse24.ops.mvue import mvue24, mvue_pack24, mvue_pack24_strided, random24
from jax_sparse24.ops.packed24 import pack24, pack24_strided, squared_relu24
from jax_sparse24.ops.packed_vnm import pack_vnm, squared_relu_vnm, vnm_mask
from jax_sparse24.ops.saved import pack_counted
from jax_sparse24.ops.select import mask_nm, prune24
from jax_sparse24.ops.soft import soft24
from jax_sparse24.patterns import VNM

# Cuts of the output gradient: MVUE of least variance, or as the code of 2404.01847 draws it; the two largest
# of four; two of four at random; one of each two neighbours at random.
Estimator = Literal["exact", "approximate"]
GradientCut = Literal["exact", "approximate", "biased", "uniform", "paired"]


ALL_FORMS = ("dense", "packed", "compressed")


@dataclasses.dataclass(frozen=True)
class Top2(Sparsifier):
    """The two largest magnitudes of every four along the contraction axis."""

    forms: ClassVar = ALL_FORMS
    strides: ClassVar = True

    def __call__(self, x, axis, request: Request):
        implementation = request.implementation
        if request.counts:
            squared = request.activation == "squared_relu"
            return pack_counted(
                x if squared else request.activate(x),
                squared,
                compressed=request.form == "compressed",
                implementation=implementation,
            )
        if request.form == "compressed":
            if request.activation == "squared_relu" and not request.strided:
                return compressed24.squared_relu(x, axis)
            return compressed24.pack(request.activate(x), axis, strided=request.strided)
        if request.strided:
            return pack24_strided(request.activate(x), implementation=implementation)
        if not request.packed:
            return prune24(request.activate(x), axis, implementation=implementation)
        if request.activation == "squared_relu":
            return squared_relu24(x, axis, implementation=implementation)
        return pack24(request.activate(x), axis, implementation=implementation)

    def __str__(self):
        return "top-2 of 4"


@dataclasses.dataclass(frozen=True)
class TopN(Sparsifier):
    """The n largest magnitudes of every m along the contraction axis, as an array: hardware has no
    such format."""

    n: int
    m: int
    forms: ClassVar = ("dense",)

    @property
    def pattern(self):
        return f"{self.n}:{self.m}"

    @property
    def group(self):
        return self.m

    def check(self, op, shape, axis, what):
        patterns.check_divides(op, shape, axis, self.m, what)

    def __call__(self, x, axis, request: Request):
        x = request.activate(x)
        return jnp.where(mask_nm(x, self.n, self.m, axis), x, jnp.zeros_like(x))

    def __str__(self):
        return f"top-{self.n} of {self.m}, which nothing packs"


@dataclasses.dataclass(frozen=True)
class CausalBothWays(Sparsifier):
    """2:4 along features and along four consecutive tokens at once, without looking at later tokens."""

    def check(self, op, shape, axis, what):
        for both in (-1, -2):
            super().check(op, shape, both, what)

    def __call__(self, x, axis, request: Request):
        x = request.activate(x)
        mask = causal_mask24(x)
        if request.packed:
            return pack24(x, axis, mask, implementation=request.implementation)
        return jnp.where(mask, x, jnp.zeros_like(x))

    def __str__(self):
        return "top of 4 both ways, causal"


@dataclasses.dataclass(frozen=True)
class Blocks(Sparsifier):
    """V:2:M: blocks of V rows share four of every M columns along the contraction axis (2310.02065).

    Where the request says what is `allowed`, it takes that. exact: whether the best set of columns is
    searched, see `vnm_mask`."""

    v: int
    m: int
    exact: bool = False

    @property
    def pattern(self):
        return str(VNM(self.v, self.m))

    @property
    def group(self):
        return self.m

    def check(self, op, shape, axis, what):
        VNM(self.v, self.m).check(op, shape, axis, what, ("tokens", "neurons"))

    def __call__(self, x, axis, request: Request):
        chosen = axis == -1 and request.allowed is not None
        squares = request.activation == "squared_relu" and axis == -1
        if request.packed and squares and not (chosen or self.exact):
            return squared_relu_vnm(x, self.v, self.m, implementation=request.implementation)
        x = request.activate(x)
        make = {"axis": axis, "exact": self.exact, "implementation": request.implementation}
        if chosen:
            if request.packed:
                return pack_vnm(x, self.v, self.m, **{**make, "exact": False}, mask=request.allowed)
            x = jnp.where(request.allowed, x, jnp.zeros_like(x))
        if request.packed:
            return pack_vnm(x, self.v, self.m, **make)
        return jnp.where(vnm_mask(x, self.v, self.m, **make), x, jnp.zeros_like(x))

    def __str__(self):
        return f"{self.pattern}{', best columns' if self.exact else ''}"


@dataclasses.dataclass(frozen=True)
class Masked(Sparsifier):
    """The entries of a mask kept in the layer's state, read as `pack24` reads it: of a group with more than
    two the two of largest magnitude stay."""

    entry: str = "mask"
    label: str = "stored mask"
    forms: ClassVar = ALL_FORMS

    def __call__(self, x, axis, request: Request):
        mask = request.state[self.entry]
        if request.form == "compressed":
            return compressed24.pack(x, axis, mask)
        if request.packed:
            return pack24(x, axis, mask, implementation=request.implementation)
        return prune24(jnp.where(mask, x, jnp.zeros_like(x)), axis, implementation=request.implementation)

    def __str__(self):
        return self.label


@dataclasses.dataclass(frozen=True)
class Soft(Sparsifier):
    """Soft threshold along the contraction axis, times the scale in the layer's state (2409.09099)."""

    entry: str = "scale"
    forms: ClassVar = ALL_FORMS

    def __call__(self, x, axis, request: Request):
        soft = soft24(x, axis, implementation=request.implementation)
        scale = request.state[self.entry].astype(x.dtype)
        if not request.packed:
            return soft * scale
        if request.form == "compressed":
            packed = compressed24.pack(soft, axis)
        else:
            packed = pack24(soft, axis, implementation=request.implementation)
        return with_values(packed, packed.values * scale)

    def __str__(self):
        return "soft threshold, scaled"


@dataclasses.dataclass(frozen=True)
class MVUE(Sparsifier):
    """Minimum-variance unbiased estimate along the contraction axis."""

    exact: bool = True
    stochastic: ClassVar = True
    forms: ClassVar = ALL_FORMS
    strides: ClassVar = True

    def __call__(self, x, axis, request: Request):
        if request.form == "compressed":
            return compressed24.mvue_pack(request.key, x, axis, self.exact, strided=request.strided)
        if request.strided:
            return mvue_pack24_strided(request.key, x, self.exact, implementation=request.implementation)
        estimate = mvue_pack24 if request.packed else mvue24
        return estimate(request.key, x, axis, self.exact, implementation=request.implementation)

    def __str__(self):
        return f"MVUE, {'exact' if self.exact else 'approximate'}"


@dataclasses.dataclass(frozen=True)
class Random(Sparsifier):
    """Two of four along the contraction axis by another unbiased law than MVUE, see `random24`."""

    law: Literal["uniform", "paired"]
    stochastic: ClassVar = True

    def __call__(self, x, axis, request: Request):
        drawn = random24(request.key, x, axis, self.law)
        return pack24(drawn, axis, implementation=request.implementation) if request.packed else drawn

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
class SavedSupport(Sparsifier):
    """The operand at the support of F2's sparse Y2, in the backward pass of a plan that saves the packed Y2.

    of: the sparsifier of F2."""

    of: Sparsifier
    forms: ClassVar = ALL_FORMS

    @property
    def pattern(self):
        return self.of.pattern

    def check(self, op, shape, axis, what):
        """F2 has checked it."""

    def __call__(self, x, axis, request: Request):
        return request.saved if request.packed else x

    def __str__(self):
        return "support of F2"


@dataclasses.dataclass(frozen=True)
class DenseValues(Sparsifier):
    """The values another sparsifier gives along a fixed axis, in a dense product: what was multiplied
    forward, where its groups do not lie along this product's contraction axis.

    of: the other sparsifier. axis: along which its groups lie, -1 or -2."""

    of: Sparsifier
    axis: int
    forms: ClassVar = ("dense",)

    @property
    def stochastic(self):
        return self.of.stochastic

    def check(self, op, shape, axis, what):
        self.of.check(op, shape, self.axis, what)

    def __call__(self, x, axis, request: Request) -> jax.Array:
        values = self.of(x, self.axis, dataclasses.replace(request, form="dense"))
        return (
            values if isinstance(values, jax.Array) else values.todense(implementation=request.implementation)
        )

    def __str__(self):
        return f"values of {self.of}, dense product"
