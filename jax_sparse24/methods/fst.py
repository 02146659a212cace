"""FST: fully sparse training with transposable weights and MVUE gradients (2404.01847)."""

import dataclasses

from jax_sparse24.methods.base import Method, check_choice, check_positive, check_share, check_steps, phases
from jax_sparse24.methods.sparsifiers import Estimator, Masked, weight_gradient
from jax_sparse24.ops.mask import transposable_mask24
from jax_sparse24.plan import LINEAR, Plan, Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class FST(Method):
    """All three products of a linear layer 2:4, from step 0, with a dense phase at the end.

    decay: rate of masked decay on gradients (section 4; the paper's GPT-2 uses 6e-5 to 2e-4; it must be tuned
    per model). refresh_every: optimiser steps between searches for the transposable mask; the values are read
    anew in every step. mvue: "exact", "approximate" (what the paper's code runs), or None for a dense
    weight-gradient product. dense_fraction: share of the steps, at the end, in which every product is dense
    (the paper: 1/6)."""

    when = "Pre-training faster with all three products of every layer sparse, and a dense model at the end."

    decay: float = 6e-5
    refresh_every: int = 40
    mvue: Estimator | None = "exact"
    dense_fraction: float = 1 / 6

    def __post_init__(self):
        check_choice(self, "mvue", "exact", "approximate", None)
        check_positive(self, "decay")
        check_steps(self, "refresh_every")
        check_share(self, "dense_fraction")

    def linear_plan(self):
        transposable = Row("w", Masked("mask", "transposable mask"))
        return Plan.of(LINEAR, fwd=transposable, dgrad=transposable, **weight_gradient(self.mvue))

    def init(self, w, role="w"):
        return {"mask": transposable_mask24(w)}

    def refresh(self, state, w, role="w"):
        return {"mask": transposable_mask24(w)}

    def fresh_mask(self, w):
        return transposable_mask24(w)

    def schedule(self, total_steps):
        dense = round(total_steps * self.dense_fraction)
        return phases(sparse=total_steps - dense, dense=dense)
