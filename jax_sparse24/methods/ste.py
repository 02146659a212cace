"""Straight-through estimator, the plain baseline (2102.04010 with no decay)."""

import dataclasses

from jax_sparse24.engine.plan import LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import DenseValues, Top2
from jax_sparse24.methods.base import Method
from jax_sparse24.ops.select import mask24


@dataclasses.dataclass(frozen=True)
class STE(Method):
    """2:4 weights, pruned anew in every forward pass.

    The dense master weight gets the gradient of the pruned one. The input gradient uses the same pruned
    values; they are 2:4 along `in` only, so that product is dense.

    Source: 2102.04010, without its decay."""

    when = "The simplest weight method, to compare with: no state, no option, one of three products sparse."
    tiles = (4, 1)

    def linear_plan(self):
        return Plan.of(LINEAR, fwd=Row("w", Top2()), dgrad=Row("w", DenseValues(Top2(), axis=-2)))

    def fresh_mask(self, w):
        return mask24(w, -2)
