"""FST: fully sparse training with transposable weights and MVUE gradients (2404.01847)."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jax_sparse24.engine.float8 import HISTORY_AXES, Scales, histories, in_float8
from jax_sparse24.engine.plan import LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import (
    GRADIENT_CUTS,
    DenseValues,
    GradientCut,
    Masked,
    weight_gradient,
)
from jax_sparse24.methods.base import (
    Decay,
    Method,
    Training,
    begun,
    check_choice,
    check_positive,
    check_share,
    check_whole,
    mask_like,
    phases,
    where_finite,
)
from jax_sparse24.methods.search_decay import search_decay
from jax_sparse24.ops.select import mask24
from jax_sparse24.ops.transposable import transposable_mask24
from jax_sparse24.patterns import check_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class FST(Method):
    """All three products of a linear layer 2:4 from step 0, with a dense phase at the end; and variants.

    decay: rate of masked decay on gradients (section 4; the paper's GPT-2 uses 6e-5 to 2e-4; it must be tuned
        per model).
    refresh_every: optimiser steps between two searches for the mask; the masked values are read anew in every
        step.
    mask: "transposable", the best mask that is 2:4 along both axes, for both products of the weight;
        "greedy", an approximation of it that may keep one weight less in a tile (2102.08124);
        "double-pruned", top-2 along `in` forward, and of these top-2 along `out` for the input gradient
        (2405.16325, there with a mask that never changes); "top-2", along `in` only, with a dense product of
        the same values for the input gradient.
    mvue: how the output gradient becomes 2:4 for the weight gradient: by "exact" or "approximate" MVUE (the
        paper's code runs the latter), or None for a dense product; to compare, "biased" (its top-2),
        "uniform" (any two, doubled) and "paired" (MVUE 1:2 of either half of a group).
    dense_fraction: share of the steps, at the end, in which every product is dense (the paper: 1/6).
    fp8: None, or both operands of the products of weights, forward and for the input gradient, are rounded to
        e4m3, with a scale per "tensor" or per "row", see `SSTE`, or "delayed"; the product of the weight
        gradient keeps the model's dtype. They run in 8 bits on Hopper, 2:4 where cuSPARSELt is chosen for
        them (`implementation="cusparselt"`, or a measured table), else dense; elsewhere they are simulated.
        "delayed" gives activations and gradients powers of two by the largest magnitudes of the last 16
        optimiser steps, which are in the state (`s24.nn.observe`); what is larger by a factor that is 1.75
        to 3.5 saturates, once. The first step has only its own magnitudes, and so has an operand whose
        exponent is smaller by more than 8, as after a step of outliers: by theirs it would round to zeros.
        In such steps, and in an evaluation after them, the rounding of a token depends on later ones, so that
        the loss counts as no language model's (`causal`). Weights have a scale per tensor.

    Raises: ValueError for an option outside these.
    Source: 2404.01847."""

    when = "Pre-training faster with all three products of every layer sparse, and a dense model at the end."
    tiles = (4, 4)
    state_axes = HISTORY_AXES

    decay: float = 6e-5
    refresh_every: int = 40
    mask: Literal["transposable", "greedy", "double-pruned", "top-2"] = "transposable"
    mvue: GradientCut | None = "exact"
    dense_fraction: float = 1 / 6
    fp8: Scales | None = None

    search_decay = staticmethod(search_decay)

    def __post_init__(self):
        check_choice(self, "mask", "transposable", "greedy", "double-pruned", "top-2")
        check_choice(self, "mvue", *GRADIENT_CUTS, None)
        check_positive(self, "decay")
        check_whole(self, "refresh_every")
        check_share(self, "dense_fraction")
        check_choice(self, "fp8", "tensor", "row", "delayed", None)

    @property
    def causal(self):
        # A scale per tensor depends on all tokens, and rounds each of them; a delayed one does so in a first
        # step and after outliers, of which an evaluation may be one, too.
        return self.fp8 in (None, "row")

    def training(self, total_steps):
        return Training(decay=Decay(self.decay))

    def linear_plan(self):
        names = {"transposable": "transposable", "greedy": "greedy transposable"}
        forward = Masked("mask", f"{names.get(self.mask, 'top-2 of 4')} mask")
        backward = {
            "double-pruned": Masked("backward", "top-2 of 4 mask, pruned again along out"),
            "top-2": DenseValues(forward, axis=-2),
        }.get(self.mask, forward)
        rows = {"fwd": Row("w", forward), "dgrad": Row("w", backward)}
        if self.fp8:
            rows = in_float8(rows, self.fp8, dict.fromkeys(rows, "e4m3"))
        return Plan.of(LINEAR, **rows, **weight_gradient(self.mvue))

    def init(self, w, role="w"):
        return self._masks(w) | begun(self._histories(w.shape))

    def _masks(self, w):
        mask = self.fresh_mask(w)
        if self.mask != "double-pruned":
            return {"mask": mask}
        return {"mask": mask, "backward": mask & mask24(jnp.where(mask, w, 0), -1)}

    def state_shapes(self, shape, role="w"):
        names = ("mask", "backward") if self.mask == "double-pruned" else ("mask",)
        return dict.fromkeys(names, mask_like(shape)) | self._histories(shape)

    @property
    def histories(self):
        return tuple(self._histories(()))

    def _histories(self, shape):
        return histories(self.fp8, shape[:-2]) if self.fp8 else {}

    def refresh(self, state, w, role="w"):
        return state | where_finite(w, self._masks(w), state)

    def fresh_mask(self, w):
        if self.mask in ("transposable", "greedy"):
            return transposable_mask24(w, exact=self.mask == "transposable")
        return mask24(w, -2)

    def schedule(self, total_steps):
        check_size(f"{type(self).__name__}.schedule", "total_steps", total_steps)
        dense = round(total_steps * self.dense_fraction)
        return phases(sparse=total_steps - dense, dense=dense)
