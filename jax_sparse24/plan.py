"""Plans: which operand of which product is sparse, and by which sparsifier.

A *plan* is a table with one row per product. A product without a row is dense. The products and their
contraction axes are fixed by the mathematics; flax kernels are (in, out):

    linear   Y = X W                fwd, dgrad, wgrad
    FFN      Y1 = X W1, Y2 = act(Y1), Y3 = Y2 W2      F1, F2 forward; B1 = dY2, B2 = dW2, B3 = dX, B4 = dW1
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_sparse24.formats import Compressed24, Packed24, PackedVNM
from jax_sparse24.ops.reference import GATES
from jax_sparse24.ops.tokens import collect, regroup

# Product -> ((operand, contracted axis), (operand, contracted axis)). The result has the free axis of
# the first operand, then that of the second.
LINEAR = {
    "fwd": (("x", -1), ("w", -2)),
    "dgrad": (("dy", -1), ("w", -1)),
    "wgrad": (("x", -2), ("dy", -2)),
}
FFN = {
    "F1": (("x", -1), ("w1", -2)),
    "F2": (("y2", -1), ("w2", -2)),
    "B1": (("dy3", -1), ("w2", -1)),
    "B2": (("y2", -2), ("dy3", -2)),
    "B3": (("dy1", -1), ("w1", -1)),
    "B4": (("x", -2), ("dy1", -2)),
}
# How the products of the two linear layers inside an FFN are called there.
LINEAR_IN_FFN = {
    "w1": {"x": "x", "w": "w1", "dy": "dy1", "fwd": "F1", "dgrad": "B3", "wgrad": "B4"},
    "w2": {"x": "y2", "w": "w2", "dy": "dy3", "fwd": "F2", "dgrad": "B1", "wgrad": "B2"},
}

# The products whose results are gradients of weights, and of which.
WEIGHT_GRADIENTS = {"wgrad": "w", "B2": "w2", "B4": "w1"}

ACTIVATIONS = {
    "squared_relu": lambda y: jnp.square(jax.nn.relu(y)),
    "relu": jax.nn.relu,
    **GATES,
}


@dataclasses.dataclass(frozen=True)
class Context:
    """What a sparsifier may read besides its operand.

    packed: the product takes a packed operand; otherwise an array of the same values spares the unpacking.
    activation: what is still to be applied to the operand, so that one pass can do both; "" for nothing.
    kept: this operand with the support of F2's sparse Y2, in the backward pass of a plan that keeps it.
    strided: groups are made of rows a quarter of the operand apart, see `pack24_strided`; only where it
    packs, and only of sparsifiers with `strides`.
    compressed: cuSPARSELt multiplies, so the result is to be a `Compressed24`; only where it packs, and only
    of sparsifiers with `compresses`.
    counted: the result is to be a pair: the packed operand, and how many elements of each feature are not
    zero in it, int32 (f,); only of Y2 (T, f) along features, where it packs, and only of sparsifiers with
    `largest`."""

    state: Mapping[str, jax.Array]
    key: jax.Array | None
    implementation: str | None
    packed: bool
    activation: str = ""
    kept: Packed24 | PackedVNM | Compressed24 | None = None
    strided: bool = False
    compressed: bool = False
    counted: bool = False

    def activate(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.activation](x) if self.activation else x


class Cut(NamedTuple):
    """Operands of one product, one of them sparse, that one before it was cut and put in order, and what the
    others were multiplied by if they are in 8 bits. few: the features (n, T) that stay dense, tokens in the
    order of the product, if something has made them. counts: see `Context.counted`."""

    left: Any
    right: Any
    uncut: jax.Array | None = None
    scales: tuple[jax.Array, ...] = ()
    few: jax.Array | None = None
    counts: jax.Array | None = None


class Sparsifier(Protocol):
    """Turns a matrix into the sparse operand of one product. Hashable; frozen dataclasses are."""

    stochastic: bool  # needs a key
    pattern: str  # of what it packs, as in measured tables
    group: int  # how many elements along the contraction axis share their places

    def check(self, op: str, shape: tuple[int, ...], axis: int, what: str) -> None:
        """Raises ValueError if an operand of this shape does not divide into groups along `axis`."""

    def __call__(
        self, x: jax.Array, axis: int, context: Context
    ) -> Packed24 | PackedVNM | Compressed24 | jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Row:
    """One product of a plan: `operand` goes sparse through `by`.

    other: what becomes of the other operand, which stays an array. eight_bits: `by` and `other` round to e4m3
    with a scale per tensor and have `quantised(x, axis, context)`, which gives the rounded operand (packed
    by `by`) and its scale, so that hardware may multiply those.
    For products that contract tokens: tokens, which of them make a group (see `ops.tokens.regroup`);
    collected, that the operand's features, dealt over groups of as many, are cut side by side; dense_share,
    the share of its features whose part of the result comes from a small dense product instead; rank, which
    features these are: those with the most non-zeros ("density") or those of which the cut takes the most
    energy ("lost"); if B2 and B4 keep as many by one rank, those of Y2 in both."""

    operand: str
    by: Sparsifier
    other: Sparsifier | None = None
    eight_bits: bool = False
    tokens: Literal["consecutive", "strided", "random"] = "consecutive"
    collected: bool = False
    dense_share: float = 0.0
    rank: Literal["density", "lost"] = "density"

    def arranged(self, x: jax.Array) -> jax.Array:
        """The sparse operand in the order in which it is cut."""
        x = regroup(x, self.tokens, self.by.group)
        return collect(x, x.shape[-1] // self.by.group, -1) if self.collected else x

    @property
    def strides(self) -> bool:
        """Whether the sparsifier finds strided tokens by itself, which spares a pass that moves them."""
        return self.tokens == "strided" and not self.collected and getattr(self.by, "strides", False)

    @property
    def compresses(self) -> bool:
        """Whether the sparsifier packs in cuSPARSELt's form, which spares a copy."""
        return getattr(self.by, "compresses", False)

    def __str__(self):
        parts = [str(self.by)]
        if self.tokens != "consecutive":
            parts.append(f"{self.tokens} tokens")
        if self.collected:
            parts.append("features collected")
        if self.dense_share:
            parts.append(f"the {self.dense_share:.0%} of most {self.rank.replace('lost', 'loss')} dense")
        if self.other is not None:
            parts.append(f"times {self.other}")
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A table: product name -> Row. Products that are not named are dense.

    keep: the backward pass keeps the support of F2's sparse Y2: dY1 is zero elsewhere, and the packed Y2 is
    saved in place of Y1; on CUDA with counts of its non-zeros, int32 (f,), if dense features are chosen by
    them.
    gradient_mask: the entry of a weight's state, bool (in, out), outside of which its gradient is zero: the
    result of the product that makes it is masked, whatever its operands are; "" for none."""

    rows: tuple[tuple[str, Row], ...] = ()
    keep: bool = False
    gradient_mask: str = ""

    @classmethod
    def of(
        cls, products: Mapping[str, tuple], *, keep: bool = False, gradient_mask: str = "", **rows: Row
    ) -> "Plan":
        """Checks every row against the products of the engine; raises ValueError for an impossible one."""
        for name, row in rows.items():
            if name not in products:
                raise ValueError(
                    f"plan: product {name!r} does not exist; the products are {', '.join(products)}."
                )
            axes = dict(products[name])
            if row.operand not in axes:
                raise ValueError(
                    f"plan: product {name} has operands {' and '.join(axes)}, not {row.operand!r}."
                )
            over_tokens = all(axis == -2 for axis in axes.values())
            if not over_tokens and (row.tokens, row.collected, row.dense_share) != (
                "consecutive",
                False,
                0.0,
            ):
                raise ValueError(
                    f"plan: product {name} does not contract tokens, so tokens={row.tokens!r}, "
                    f"collected={row.collected!r} and dense_share={row.dense_share!r} mean nothing there; "
                    f"leave them at their defaults."
                )
        if keep and ("F2" not in rows or rows["F2"].operand != "y2"):
            raise ValueError("plan: keep=True keeps the support of a sparse y2 in F2; add that row.")
        return cls(tuple(rows.items()), keep, gradient_mask)

    def row(self, product: str) -> Row | None:
        return dict(self.rows).get(product)

    @property
    def shared_split(self) -> Row | None:
        """B2's row, if it and B4 keep as many features dense by one rank: then one choice serves both, as Y2
        and dY1 have their non-zeros in the same places (2503.16672)."""
        first, second = self.row("B2"), self.row("B4")
        if not (first and second and first.operand == "y2" and second.operand == "dy1"):
            return None
        same = (first.dense_share, first.rank) == (second.dense_share, second.rank)
        return first if same and first.dense_share else None

    def describe(self, product: str) -> str:
        """How a product is sparse, in words; "" if it is not."""
        row = self.row(product)
        parts = [str(row)] if row else []
        if self.gradient_mask and product in WEIGHT_GRADIENTS:
            parts.append("masked result")
        return "; ".join(parts)

    @property
    def stochastic(self) -> bool:
        return any(by.stochastic for _, row in self.rows for by in (row.by, row.other) if by is not None)


def ffn_plan(linear: Plan) -> Plan:
    """The FFN plan that treats both matrices as `linear` does."""
    rows = {}
    for names in LINEAR_IN_FFN.values():
        for product, row in linear.rows:
            rows[names[product]] = dataclasses.replace(row, operand=names[row.operand])
    return Plan.of(FFN, gradient_mask=linear.gradient_mask, **rows)
