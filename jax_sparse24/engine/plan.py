"""Plans: which operand of which product is sparse, and by which sparsifier.

A *plan* is a table with one row per product. A product without a row is dense. The products and their
contraction axes are fixed by the mathematics; flax kernels are (in, out):

    linear   Y = X W                fwd, dgrad, wgrad
    FFN      Y1 = X W1, Y2 = act(Y1), Y3 = Y2 W2      F1, F2 forward; B1 = dY2, B2 = dW2, B3 = dX, B4 = dW1
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax

from jax_sparse24.dispatch.decision import Form
from jax_sparse24.engine.operand import Order, Sparsifier
from jax_sparse24.ops.order import collect, regroup

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
# The names that operands and products of the two linear layers have inside an FFN.
LINEAR_IN_FFN = {
    "w1": {"x": "x", "w": "w1", "dy": "dy1", "fwd": "F1", "dgrad": "B3", "wgrad": "B4"},
    "w2": {"x": "y2", "w": "w2", "dy": "dy3", "fwd": "F2", "dgrad": "B1", "wgrad": "B2"},
}

# The products whose results are gradients of weights -> the weight.
WEIGHT_GRADIENTS = {"wgrad": "w", "B2": "w2", "B4": "w1"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One product of a plan.

    operand: name of the one that goes sparse.
    by: the sparsifier of that operand.
    other: a sparsifier for the other operand, which stays an array; None to leave that as it is.
    eight_bits: the forms in which `by`, a `Float8` like `other`, makes its operand of e4m3, which hardware
        multiplies; () where 8 bits are only simulated.
    The remaining fields are for products that contract tokens:
    tokens: which tokens make a group (see `ops.order.regroup`).
    gather_features: features i, i + m, i + 2m, ... of the operand are moved next to each other before the
    cut, m being the size of a group.
    dense_share: the share of the operand's features whose part of the result comes from a small dense product
    instead.
    rank: which features these are: those with the most non-zeros ("density"), or those of which the cut takes
    the most energy ("lost"). If B2 and B4 have equal share and rank, both use the features chosen from Y2."""

    operand: str
    by: Sparsifier
    other: Sparsifier | None = None
    eight_bits: tuple[Form, ...] = ()
    tokens: Order = "consecutive"
    gather_features: bool = False
    dense_share: float = 0.0
    rank: Literal["density", "lost"] = "density"

    def arranged(self, x: jax.Array) -> jax.Array:
        """The operand with tokens and features moved into the order in which it is cut.

        x: a matrix whose rows are tokens, (T, n).

        Returns: an array of x's shape and dtype."""
        x = regroup(x, self.tokens, self.by.group)
        return collect(x, x.shape[-1] // self.by.group, -1) if self.gather_features else x

    @property
    def strides(self) -> bool:
        """Whether the sparsifier finds strided tokens by itself, which spares a pass that moves them."""
        return self.tokens == "strided" and not self.gather_features and self.by.strides

    @property
    def history(self) -> str:
        """The entry of the weight's state that observes the other operand; "" for none."""
        return "" if self.other is None else self.other.history

    def __str__(self):
        parts = [str(self.by)]
        if self.tokens != "consecutive":
            parts.append(f"{self.tokens} tokens")
        if self.gather_features:
            parts.append("features collected")
        if self.dense_share:
            parts.append(f"the {self.dense_share:.0%} of most {self.rank.replace('lost', 'loss')} dense")
        if self.other is not None:
            parts.append(f"times {self.other}")
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A table: product name -> Row. Products that are not named are dense.

    rows: pairs of a product and its Row.
    save_packed: the packed Y2 of F2 is saved for the backward pass in place of Y1, and dY1 is zero outside of
    its support. On CUDA the counts of its non-zeros, int32 (f,), are saved too, if dense features are chosen
    by them.
    gradient_mask: the entry of a weight's state, bool (in, out), outside of which its gradient is zero: the
    result of the product that makes it is masked, whatever its operands are; "" for none."""

    rows: tuple[tuple[str, Row], ...] = ()
    save_packed: bool = False
    gradient_mask: str = ""

    @classmethod
    def of(
        cls, products: Mapping[str, tuple], *, save_packed: bool = False, gradient_mask: str = "", **rows: Row
    ) -> "Plan":
        """A plan, with every row checked against the products of the engine.

        products: `LINEAR` or `FFN`.
        save_packed, gradient_mask: see `Plan`.
        rows: a `Row` for every product that is not dense, by its name.

        Returns: a `Plan`.
        Raises: ValueError for a row that its product cannot have."""
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
            if not over_tokens and (row.tokens, row.gather_features, row.dense_share) != (
                "consecutive",
                False,
                0.0,
            ):
                raise ValueError(
                    f"plan: product {name} does not contract tokens, so tokens={row.tokens!r}, "
                    f"gather_features={row.gather_features!r} and dense_share={row.dense_share!r} mean "
                    f"nothing there; leave them at their defaults."
                )
        if save_packed and ("F2" not in rows or rows["F2"].operand != "y2"):
            raise ValueError(
                "plan: save_packed=True saves the packed y2 of F2; add a row of F2 with operand 'y2'."
            )
        return cls(tuple(rows.items()), save_packed, gradient_mask)

    def row(self, product: str) -> Row | None:
        """The row of a product.

        product: its name.

        Returns: a `Row`; None if the product is dense."""
        return dict(self.rows).get(product)

    def describe(self, product: str) -> str:
        """How a product is sparse, in words.

        product: its name.

        Returns: a phrase; "" if the product is dense."""
        row = self.row(product)
        parts = [str(row)] if row else []
        if self.gradient_mask and product in WEIGHT_GRADIENTS:
            parts.append("masked result")
        return "; ".join(parts)

    @property
    def observes(self) -> bool:
        """Whether a product's operand is observed in a history."""
        return any(row.history for _, row in self.rows)

    @property
    def stochastic(self) -> bool:
        """Whether a product draws random numbers."""
        return any(by.stochastic for _, row in self.rows for by in (row.by, row.other) if by is not None)


def ffn_plan(linear: Plan) -> Plan:
    """The plan of an FFN in which both matrices are treated as in a single linear layer.

    linear: a plan of the products of `LINEAR`.

    Returns: a plan of the products of `FFN`."""
    rows = {}
    for names in LINEAR_IN_FFN.values():
        for product, row in linear.rows:
            rows[names[product]] = dataclasses.replace(row, operand=names[row.operand])
    return Plan.of(FFN, gradient_mask=linear.gradient_mask, **rows)
