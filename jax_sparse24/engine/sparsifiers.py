"""The sparsifiers from which methods make their plans.

Where a product runs dense, a sparsifier returns an array with the same values as its packed operand."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch.decision import FORMS
from jax_sparse24.engine.operand import Packed, Request, Sparsifier
from jax_sparse24.engine.plan import Row
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.features import causal_mask24
from jax_sparse24.ops.mvue import mvue24, mvue_pack24, mvue_pack24_strided, random24
from jax_sparse24.ops.packed24 import pack24, pack24_strided, squared_relu24
from jax_sparse24.ops.packed_vnm import pack_vnm, squared_relu_vnm, vnm_mask
from jax_sparse24.ops.saved import pack_counted
from jax_sparse24.ops.select import mask_nm, prune24
from jax_sparse24.ops.soft import scaled_soft24, soft_pack24
from jax_sparse24.patterns import VNM

# How the output gradient is made 2:4: "exact" is the unbiased estimate of least variance, "approximate" that
# of the code of 2404.01847, "biased" the two largest of four, "uniform" two of four at random, "paired"
# one of each two neighbours at random.
Estimator = Literal["exact", "approximate"]
GradientCut = Literal["exact", "approximate", "biased", "uniform", "paired"]


class GroupByGroup(Sparsifier):
    """Decides for each group of four along the contraction axis by that group alone."""

    def piecewise(self, shape, axis):
        return shape[axis] % self.group == 0


@dataclasses.dataclass(frozen=True)
class Top2(GroupByGroup):
    """Keeps the two largest magnitudes of every four elements along the contraction axis."""

    forms: ClassVar = FORMS
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
    """Keeps the n largest magnitudes of every m elements along the contraction axis.

    The result is always an array, because hardware has no such format.

    n, m: 1 <= n <= m."""

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
    """2:4 along features and along four consecutive tokens at once; no choice depends on later tokens."""

    rows: ClassVar[int] = 4

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
    """V:2:M: blocks of V rows share four of every M columns along the contraction axis.

    Where the request says which elements are `allowed`, it keeps these.

    v, m: size of a block.
    exact: whether the best set of columns is searched, see `vnm_mask`.

    Source: 2310.02065."""

    v: int
    m: int
    exact: bool = False

    @property
    def pattern(self):
        return str(VNM(self.v, self.m))

    @property
    def producer(self):
        return f"pack_vnm {self.pattern}"

    @property
    def group(self):
        return self.m

    @property
    def rows(self):
        return self.v

    def check(self, op, shape, axis, what):
        VNM(self.v, self.m).check(op, shape, axis, what, ("tokens", "neurons"))

    def __call__(self, x, axis, request: Request):
        given = axis == -1 and request.allowed is not None
        squares = request.activation == "squared_relu" and axis == -1
        if request.packed and squares and not (given or self.exact):
            return squared_relu_vnm(x, self.v, self.m, implementation=request.implementation)
        x = request.activate(x)
        options = {"axis": axis, "exact": self.exact, "implementation": request.implementation}
        if given:
            if request.packed:
                return pack_vnm(x, self.v, self.m, **{**options, "exact": False}, mask=request.allowed)
            x = jnp.where(request.allowed, x, jnp.zeros_like(x))
        if request.packed:
            return pack_vnm(x, self.v, self.m, **options)
        return jnp.where(vnm_mask(x, self.v, self.m, **options), x, jnp.zeros_like(x))

    def __str__(self):
        return f"{self.pattern}{', best columns' if self.exact else ''}"


@dataclasses.dataclass(frozen=True)
class Masked(GroupByGroup):
    """Keeps the elements of a mask in the layer's state.

    The mask is read as `pack24` reads it: of a group with more than two elements, the two of largest
    magnitude stay.

    entry: name of the mask in the state.
    label: its description in tables."""

    entry: str = "mask"
    label: str = "stored mask"
    forms: ClassVar = FORMS
    producer: ClassVar = "stored mask"

    def kept(self, w, axis, state):
        return state[self.entry]

    def __call__(self, x, axis, request: Request):
        mask = request.state[self.entry]
        if request.form == "compressed":
            return compressed24.pack(x, axis, mask)
        if request.packed:
            return pack24(x, axis, mask, implementation=request.implementation)
        return prune24(jnp.where(mask, x, jnp.zeros_like(x)), axis, implementation=request.implementation)

    def both_ways(self, x: jax.Array, request: Request) -> tuple[Packed, Packed]:
        """What calls along axis -1 and along axis -2 make, from one pass over x.

        x: a matrix, any floating dtype.
        request: for a form that is not dense.

        Returns: the operand packed along axis -1, and along axis -2."""
        mask = request.state[self.entry]
        if request.form == "compressed":
            return compressed24.pack_both(x, mask)
        return pack24(x, (-1, -2), mask, implementation=request.implementation)

    def __str__(self):
        return self.label


@dataclasses.dataclass(frozen=True)
class Soft(GroupByGroup):
    """Soft threshold along the contraction axis, times a scale in the layer's state.

    entry: name of the scale in the state.

    Source: 2409.09099."""

    entry: str = "scale"
    forms: ClassVar = FORMS

    def __call__(self, x, axis, request: Request):
        scale = request.state[self.entry].astype(x.dtype)
        if request.form == "compressed":
            return compressed24.soft_pack(x, scale, axis)
        make = soft_pack24 if request.packed else scaled_soft24
        return make(x, scale, axis, request.implementation)

    def __str__(self):
        return "soft threshold, scaled"


@dataclasses.dataclass(frozen=True)
class MVUE(Sparsifier):
    """Minimum-variance unbiased estimate along the contraction axis, see `mvue24`.

    exact: whether variance is least; otherwise the estimate is that of the code of 2404.01847."""

    exact: bool = True
    stochastic: ClassVar = True
    forms: ClassVar = FORMS
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
    """Keeps two of every four elements at random, unbiased, by another law than MVUE; see `random24`.

    law: "uniform", any two, or "paired", one of each two neighbours."""

    law: Literal["uniform", "paired"]
    stochastic: ClassVar = True

    def __call__(self, x, axis, request: Request):
        estimate = random24(request.key, x, axis, self.law)
        return pack24(estimate, axis, implementation=request.implementation) if request.packed else estimate

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
    """The row of wgrad in a linear plan, whose operand dY is made sparse along tokens.

    cut: a name in `GRADIENT_CUTS`; None for a dense product.

    Returns: {"wgrad": Row}; {} for a dense product."""
    return {} if cut is None else {"wgrad": Row("dy", GRADIENT_CUTS[cut])}


@dataclasses.dataclass(frozen=True)
class SavedSupport(Sparsifier):
    """The operand at the support of F2's sparse Y2, in the backward pass of a plan that saves the packed Y2.

    of: the sparsifier of F2."""

    of: Sparsifier
    forms: ClassVar = FORMS

    @property
    def pattern(self):
        return self.of.pattern

    def check(self, op, shape, axis, what):
        """Does nothing, because F2 has checked the same groups."""

    def __call__(self, x, axis, request: Request):
        return request.saved if request.packed else x

    def __str__(self):
        return "support of F2"


@dataclasses.dataclass(frozen=True)
class DenseValues(Sparsifier):
    """The values that another sparsifier gives along a fixed axis, multiplied by a dense product.

    It serves a product that uses the values of the forward pass, where their groups do not lie along this
    product's contraction axis.

    of: the other sparsifier.
    axis: along which its groups lie, -1 or -2."""

    of: Sparsifier
    axis: int
    forms: ClassVar = ("dense",)
    multiplied: ClassVar = "XLA dense product"

    def chosen(self, axis):
        return self.of, self.axis

    @property
    def stochastic(self):
        return self.of.stochastic

    def check(self, op, shape, axis, what):
        self.of.check(op, shape, self.axis, what)

    def piecewise(self, shape, axis):
        return self.of.piecewise(shape, self.axis)

    def __call__(self, x, axis, request: Request) -> jax.Array:
        values = self.of(x, self.axis, dataclasses.replace(request, form="dense"))
        return (
            values if isinstance(values, jax.Array) else values.todense(implementation=request.implementation)
        )

    def __str__(self):
        return f"values of {self.of}, dense product"
