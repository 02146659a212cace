"""What a sparsifier is asked for (`Request`), what it is (`Sparsifier`), and the operands of a product."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax

from jax_sparse24 import patterns
from jax_sparse24.dispatch.decision import Decision, Form
from jax_sparse24.engine.pieces import Axes
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.matmul_pointwise import squared_relu
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.packed_vnm import PackedVNM
from jax_sparse24.ops.reference.gated import GATES

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "squared_relu": squared_relu,
    "relu": jax.nn.relu,
    **GATES,
}


def check_activation(op: str, activation: str) -> None:
    """Raises ValueError for an unknown activation.

    op: the operation or layer, for the message.
    activation: from a caller, any object."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}.")


Packed = Packed24 | PackedVNM | Compressed24


@dataclasses.dataclass(frozen=True)
class Request:
    """What a sparsifier is asked to make of its operand.

    state: the arrays that the method keeps for this operand, by name.
    key: the key of what it draws, see `ops.mvue.key_words`; None if it draws nothing.
    implementation: as in the public functions.
    form: an array with zeros ("dense"), `Packed24` or `PackedVNM` ("packed"), or, of sparsifiers that have
    it, `Compressed24` ("compressed").
    activation: the name of what is still to be applied to the operand, so that one pass can do both; "" for
    nothing.
    strided: whether groups are made of rows a quarter of the operand apart (see `pack24_strided`); asked of
    sparsifiers that have `strides`, for a form that is not dense.
    counts: whether the result is a pair, the packed operand and int32 (f,), how many elements of each feature
    are not zero in it; asked of `Top2` alone, for Y2 (T, f) packed along features.
    saved: this operand at the support of F2's packed Y2, where the plan saves that; None elsewhere.
    allowed: bool, of the operand's shape: what routing lets Y2 keep along features; None for everything.
    cuts: the mesh axes over which the operand is cut along axis -2 and along -1."""

    state: Mapping[str, jax.Array]
    key: jax.Array | None
    implementation: str | None
    form: Form = "dense"
    activation: str = ""
    strided: bool = False
    counts: bool = False
    saved: Packed | None = None
    allowed: jax.Array | None = None
    cuts: tuple[Axes, Axes] = ((), ())

    @property
    def packed(self) -> bool:
        """Whether anything but an array is asked for."""
        return self.form != "dense"

    def activate(self, x: jax.Array) -> jax.Array:
        """The operand with the activation that is still to be applied to it.

        x: the operand, any shape.

        Returns: an array of x's shape and dtype."""
        return ACTIVATIONS[self.activation](x) if self.activation else x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of one product, as it multiplies them.

    left, right: arrays, at most one of them packed.
    decision: what multiplies them; None if both were never meant to be sparse.
    uncut: the sparse operand before elements were dropped, in its first order; None if nothing needs it.
    scales: those by which each 8-bit operand was multiplied, float32 (1, 1), or one for each row or column of
        the product.
    dense_features: (k, T), the features that stay dense, with tokens in the order of the groups, to which
        `strided` operands are not moved; None if they are yet to be gathered.
    counts: see `Request.counts`.
    strided: whether the groups of the packed operand are strided ones of the dense one, see `contract`. It is
        static."""

    left: Any
    right: Any
    decision: Decision | None = None
    uncut: jax.Array | None = None
    scales: tuple[jax.Array, ...] = ()
    dense_features: jax.Array | None = None
    counts: jax.Array | None = None
    strided: bool = dataclasses.field(default=False, metadata={"static": True})


class Sparsifier:
    """Turns a matrix into the sparse operand of one product.

    A subclass is a frozen dataclass, so that a plan is hashable. This base has groups of four along the
    contraction axis.

    stochastic: whether it draws random numbers and needs a key.
    pattern: of the operand, as in measured tables, such as "2:4".
    group: how many consecutive elements along the contraction axis are one group.
    rows: how many consecutive rows, across the contraction axis, choose together what they keep.
    forms: what it can make (see `Request.form`).
    strides: whether it finds strided groups by itself, which saves a pass that moves rows.
    multiplied: for values that are never packed, what multiplies them, in words; "" if that is decided.
    history: the entry of a weight's state that observes what it is given, as the other operand of the weight;
        "" for none."""

    stochastic: ClassVar[bool] = False
    pattern: ClassVar[str] = "2:4"
    group: ClassVar[int] = 4
    rows: ClassVar[int] = 1
    forms: ClassVar[tuple[Form, ...]] = ("dense", "packed")
    strides: ClassVar[bool] = False
    multiplied: ClassVar[str] = ""
    history: ClassVar[str] = ""

    @property
    def producer(self) -> str:
        """Its name among the producers of packed operands in measured tables."""
        return str(self)

    def chosen(self, axis: int) -> tuple["Sparsifier", int]:
        """What chooses which elements are kept.

        axis: the contracted axis, -1 or -2.

        Returns: the sparsifier that chooses, and the axis along which its groups lie."""
        return self, axis

    def kept(self, w: jax.Array, axis: int, state: Mapping[str, jax.Array]) -> jax.Array:
        """Which elements of a weight it keeps.

        w: a matrix.
        axis: along which its groups lie, -1 or -2.
        state: of the method, of this weight.

        Returns: bool, of w's shape."""
        return self(w, axis, Request(state, None, "reference")) != 0

    def check(self, op: str, shape: tuple[int, ...], axis: int, what: str) -> None:
        """Raises ValueError if an operand does not divide into groups.

        op, what: the operation and the operand, for the message.
        shape: of the operand.
        axis: along which groups lie."""
        patterns.check_divides(op, shape, axis, what=what)

    def piecewise(self, shape: tuple[int, ...], axis: int) -> bool:
        """Whether what it makes of pieces of a weight, given the pieces of the weight's state, is what it
        makes of the whole: groups lie in pieces, and no choice depends on other groups.

        shape: of a piece.
        axis: of the call."""
        return False

    def __call__(self, x: jax.Array, axis: int, request: Request) -> Packed | jax.Array:
        """The operand that `request` asks for.

        x: a matrix, any floating dtype.
        axis: along which its groups lie, -1 or -2."""
        raise NotImplementedError


class Route(NamedTuple):
    """The order in which an FFN sees its tokens, and what they may keep.

    order: int32 (R,), the token of each row; T, the number of tokens, for a row of zeros. Every token has
        exactly one row.
    allowed: bool (R, f), which elements each row of Y2 may keep; None for those that its sparsifier chooses.
    """

    order: jax.Array
    allowed: jax.Array | None = None


Order = Literal["consecutive", "strided", "random"]
