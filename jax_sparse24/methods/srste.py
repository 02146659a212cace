"""SR-STE: sparse-refined straight-through estimation (2102.04010)."""

import dataclasses
from typing import Literal

from jax_sparse24.engine.plan import LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import DenseValues, TopN
from jax_sparse24.methods.base import Decay, Method, Training, check_choice, check_positive
from jax_sparse24.methods.ste import STE
from jax_sparse24.ops.select import mask_nm
from jax_sparse24.patterns import check_nm


@dataclasses.dataclass(frozen=True, kw_only=True)
class SRSTE(Method):
    """`STE` with a decay of the pruned weights; masks are chosen anew in every step.

    Models are trained and evaluated sparse. The paper trains with momentum SGD and subtracts `lr (g + decay
    (1 - M) w)` (section 4.2; its code adds the term to the gradient). Without momentum that is decay on
    gradients and on weights at once; with Adam the two differ (2404.01847, section 4). Only 2:4 has a packed
    format; every other pattern runs dense products of the masked values.

    decay: rate of the decay, 2e-4 in the paper.
    decay_on: "gradients", where both Adam moments see it, or "weights", after Adam and times the learning
        rate.
    n, m: n of every m weights along `in` stay.

    Raises: ValueError for an option outside these; TypeError for n or m that is no int.
    Source: 2102.04010."""

    when = "The baseline of dynamic 2:4 weights, and the method for other n:m; one of three products sparse."

    decay: float = 2e-4
    decay_on: Literal["gradients", "weights"] = "gradients"
    n: int = 2
    m: int = 4

    def __post_init__(self):
        check_positive(self, "decay")
        check_choice(self, "decay_on", "gradients", "weights")
        check_nm("SRSTE", self.n, self.m)

    @property
    def tiles(self) -> tuple[int, int]:
        return self.m, 1

    def training(self, total_steps):
        return Training(decay=Decay(self.decay, on=self.decay_on))

    def linear_plan(self):
        if (self.n, self.m) == (2, 4):
            return STE().linear_plan()
        values = Row("w", DenseValues(TopN(self.n, self.m), axis=-2))
        return Plan.of(LINEAR, fwd=values, dgrad=values)

    def fresh_mask(self, w):
        return mask_nm(w, self.n, self.m, -2)
