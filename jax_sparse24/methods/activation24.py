"""2:4 squared-ReLU activations, forward and backward (2503.16672)."""

import dataclasses
from typing import Literal

from jax_sparse24.engine.plan import FFN, LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import MVUE, CausalBothWays, DenseValues, SavedSupport, Soft, Top2
from jax_sparse24.methods.base import (
    Method,
    check_choice,
    check_field,
    check_flag,
    check_share,
    check_whole,
    phases,
    scale_like,
)
from jax_sparse24.methods.sste import soft_scale
from jax_sparse24.patterns import check_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation24(Method):
    """Four of the six products of a non-gated FFN with 2:4 activations; the weights stay dense.

    F2 keeps the two largest of every four features of Y2. B3 takes dY1 on the same support. B2 and B4
    contract tokens: they keep the two largest of every four tokens of the sparser features, and compute the
    densest features in a small dense product. F1 and B1 have no sparse activation. The defaults follow the
    paper where it is known (dense warm-up, 95/5 split, one fixed permutation of tokens); its ranking
    statistic and the scope of its permutation are not known.

    dense_warmup: optimiser steps with dense products at the start; squared ReLU is half zeros at
        initialisation and needs some hundred steps to become sparse.
    backward_mask: "keep" takes dY1 on the forward support and saves the packed Y2 in place of Y1; "redraw"
        makes every operand sparse from the whole array.
    forward: "top2", or "causal", whose mask is 2:4 along features and along four consecutive tokens at once
        and never looks at later tokens; B2 and B4 then lose nothing more and need no split and no
        permutation.
    token_cut: how B2 and B4 choose tokens: "top2", "mvue" (unbiased), or None for dense B2 and B4.
    tokens, dense_share, rank: see `engine.plan.Row`.
    input_gradient: B3 takes dY1 with the entries "kept" forward, or, by "token_cut", a dense product of dY1
        made 2:4 along consecutive tokens.
    soft_weights: whether weights are soft-thresholded 2:4, too, sparse in F1 (W1) and B1 (W2), as in
        2602.06183.
    token_blocks: groups of tokens lie within each of so many blocks, see `Method.token_blocks`.

    Raises: ValueError for an option outside these.
    Source: 2503.16672."""

    when = "Non-gated squared-ReLU models whose weights must stay dense; saves activation memory too."
    positive = ("scale",)

    dense_warmup: int = 1000
    backward_mask: Literal["keep", "redraw"] = "keep"
    forward: Literal["top2", "causal"] = "top2"
    token_cut: Literal["top2", "mvue"] | None = "top2"
    tokens: Literal["consecutive", "strided", "random"] = "strided"
    dense_share: float = 0.05
    rank: Literal["density", "lost"] = "density"
    input_gradient: Literal["kept", "token_cut"] = "kept"
    soft_weights: bool = False
    token_blocks: int = 1

    def __post_init__(self):
        check_whole(self, "dense_warmup", least=0)
        check_choice(self, "backward_mask", "keep", "redraw")
        check_choice(self, "forward", "top2", "causal")
        check_choice(self, "token_cut", "top2", "mvue", None)
        check_choice(self, "tokens", "consecutive", "strided", "random")
        check_choice(self, "rank", "density", "lost")
        check_choice(self, "input_gradient", "kept", "token_cut")
        check_share(self, "dense_share")
        check_flag(self, "soft_weights")
        check_whole(self, "token_blocks", of="blocks")
        possible = self.input_gradient == "kept" or self.token_cut is not None
        check_field(self, "input_gradient", possible, "needs a token_cut")

    def ffn_plan(self):
        keep = self.backward_mask == "keep"
        forward = CausalBothWays() if self.forward == "causal" else Top2()
        rows = {"F2": Row("y2", forward), "B3": Row("dy1", SavedSupport(forward) if keep else Top2())}
        if self.token_cut is not None:
            cut = MVUE() if self.token_cut == "mvue" else Top2()
            options = {"tokens": self.tokens, "dense_share": self.dense_share, "rank": self.rank}
            if self.forward == "causal":
                options = {}
            rows["B2"], rows["B4"] = Row("y2", cut, **options), Row("dy1", cut, **options)
            if self.input_gradient == "token_cut":
                rows["B3"] = Row("dy1", DenseValues(cut, axis=-2))
        if self.soft_weights:
            rows |= soft_weights(rows)
        return Plan.of(FFN, save_packed=keep, **rows)

    def linear_plan(self):
        return Plan.of(LINEAR)

    def init(self, w, role="w"):
        if not self.soft_weights or role == "w":
            return {}
        return {"scale": soft_scale(w, -2 if role == "w1" else -1)}  # groups along the model width

    def state_shapes(self, shape, role="w"):
        return {"scale": scale_like(shape)} if self.soft_weights and role != "w" else {}

    @property
    def token_multiple(self):
        return 4 * self.token_blocks

    def schedule(self, total_steps):
        check_size(f"{type(self).__name__}.schedule", "total_steps", total_steps)
        check_field(
            self,
            "dense_warmup",
            self.dense_warmup < total_steps,
            f"leaves no sparse step in a run of {total_steps} steps; shorten it",
        )
        return phases(dense_warmup=self.dense_warmup, sparse=total_steps - self.dense_warmup)


def soft_weights(rows: dict[str, Row], everywhere: bool = True) -> dict[str, Row]:
    """The rows that make W1 sparse in F1 and W2 in B1, with groups along the model width.

    rows: the plan's other rows, by product.
    everywhere: whether F2 and B3, whose sparse operand is the activation, multiply the soft-thresholded
        weights, too, so that the gradient is that of the forward pass.

    Source: 2602.06183."""
    found = {"F1": Row("w1", Soft()), "B1": Row("w2", Soft())}
    if everywhere:
        found["F2"] = dataclasses.replace(rows["F2"], other=DenseValues(Soft(), axis=-1))
        found["B3"] = dataclasses.replace(rows["B3"], other=DenseValues(Soft(), axis=-2))
    return found
