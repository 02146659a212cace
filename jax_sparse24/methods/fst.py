"""FST: fully sparse training with transposable weights and MVUE gradients (2404.01847)."""

import dataclasses

from jax_sparse24.engine import LINEAR, Plan, Row
from jax_sparse24.methods.base import Method
from jax_sparse24.methods.sparsifiers import MVUE, Masked
from jax_sparse24.ops.mask import transposable_mask24
from jax_sparse24.schedule import Phase, Schedule

_ESTIMATORS = {"exact": True, "approximate": False, None: None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FST(Method):
    """All three products of a linear layer 2:4, from step 0, with a dense phase at the end.

    decay: rate of masked decay on gradients (section 4; the paper's GPT-2 uses 6e-5 to 2e-4; it must be tuned
    per model). refresh_every: optimiser steps between searches for the transposable mask; the values are read
    anew in every step. mvue: "exact", "approximate" (what the paper's code runs), or None for a dense
    weight-gradient product. dense_fraction: share of the steps, at the end, in which every product is dense
    (the paper: 1/6)."""

    decay: float = 6e-5
    refresh_every: int = 40
    mvue: str | None = "exact"
    dense_fraction: float = 1 / 6

    def __post_init__(self):
        if self.mvue not in _ESTIMATORS:
            raise ValueError(f"FST: mvue={self.mvue!r} is unknown; use 'exact', 'approximate' or None.")
        if not self.decay >= 0:
            raise ValueError(
                f"FST: decay={self.decay!r} must be 0 or positive; it pulls pruned weights towards zero."
            )
        if (
            isinstance(self.refresh_every, bool)
            or not isinstance(self.refresh_every, int)
            or self.refresh_every < 1
        ):
            raise ValueError(
                f"FST: refresh_every={self.refresh_every!r} must be a whole number of optimiser steps, >= 1."
            )
        if not 0 <= self.dense_fraction <= 1:
            raise ValueError(f"FST: dense_fraction={self.dense_fraction!r} must lie in [0, 1].")

    def linear_plan(self):
        transposable = Masked("mask", "transposable mask")
        rows = {"fwd": Row("w", transposable), "dgrad": Row("w", transposable)}
        if self.mvue is not None:
            rows["wgrad"] = Row("dy", MVUE(_ESTIMATORS[self.mvue]))
        return Plan.of(LINEAR, **rows)

    def init(self, w):
        return {"mask": transposable_mask24(w)}

    def refresh(self, state, w):
        return {"mask": transposable_mask24(w)}

    def fresh_mask(self, w):
        return transposable_mask24(w)

    def schedule(self, total_steps):
        dense = round(total_steps * self.dense_fraction)
        steps = {"sparse": total_steps - dense, "dense": dense}
        return Schedule(tuple(Phase(name, n, sparse=name == "sparse") for name, n in steps.items() if n))
