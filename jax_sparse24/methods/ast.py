"""AST: retraining a trained dense model to 2:4 weights (2407.20584)."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.engine.plan import LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import DenseValues, Masked
from jax_sparse24.methods.base import (
    Decay,
    Method,
    Training,
    check_field,
    check_flag,
    check_positive,
    check_share,
    check_whole,
    is_number,
    mask_like,
    where_finite,
)
from jax_sparse24.ops.select import mask24


@dataclasses.dataclass(frozen=True, kw_only=True)
class AST(Method):
    """2:4 weights along `in` by masks of the current weights; start it from trained parameters.

    The dense master weight gets the gradient of the pruned one.

    decay: rate of masked decay. It is added to the momentum-smoothed gradient
        (`s24.optim.adam_masked_decay`), so that the first moment holds the gradient of the loss alone.
    decay_steps: optimiser steps within which the rate rises linearly from 0.
    refresh_every: optimiser steps between two choices of the masks (10 in the paper's code).
    distill: share of the loss that is the Kullback-Leibler divergence from the dense model which training
        started from; the rest is cross entropy (the paper: 0.67).
    temperature: of both distributions; the divergence is multiplied by its square.
    slorb: width k of the blocks of inputs whose sums feed the adapters SLoRB, `y += (block sums of x) S`; S
        (in / k, out) starts from the mean pruned weight of every block (the paper: 16). 0 for no adapters.
    train_projection: whether the projection (in, in / k) that forms the sums is trained, too.

    Raises: ValueError for an option outside these.
    Source: 2407.20584."""

    when = "A trained dense model is to become a 2:4 one for inference."
    tiles = (4, 1)

    decay: float = 1e-4
    decay_steps: int = 10_000
    refresh_every: int = 10
    distill: float = 0.67
    temperature: float = 2.0
    slorb: int = 0
    train_projection: bool = False

    def __post_init__(self):
        check_positive(self, "decay")
        check_whole(self, "decay_steps", least=0)
        check_whole(self, "refresh_every")
        check_share(self, "distill")
        warm = is_number(self.temperature) and self.temperature > 0
        check_field(self, "temperature", warm, "must be positive, a finite number")
        check_whole(self, "slorb", least=0, of="inputs")
        check_flag(self, "train_projection")
        possible = bool(self.slorb) or not self.train_projection
        check_field(self, "train_projection", possible, "needs slorb > 0")

    def training(self, total_steps):
        decay = Decay(self.decay, on="momentum", rise=self.decay_steps)
        if not self.distill:
            return Training(decay=decay)
        return Training(decay=decay, loss=self.distilled, teacher="distill")

    def distilled(self, cross_entropy: jax.Array, logits_BLV: jax.Array, taught_BLV: jax.Array) -> jax.Array:
        """The loss: a weighted sum of the cross entropy and the divergence from the teacher's distribution.

        cross_entropy: a scalar.
        logits_BLV, taught_BLV: logits of the model and of the teacher.

        Returns: a scalar.
        Source: 2407.20584, section 3.3."""
        share, t = self.distill, self.temperature
        own_BLV, goal_BLV = (jax.nn.log_softmax(x / t) for x in (logits_BLV, taught_BLV))
        divergence = jnp.sum(jnp.exp(goal_BLV) * (goal_BLV - own_BLV), axis=-1).mean()
        return (1 - share) * cross_entropy + share * t**2 * divergence

    def linear_plan(self):
        masked = Masked("mask", "2:4 mask")
        return Plan.of(LINEAR, fwd=Row("w", masked), dgrad=Row("w", DenseValues(masked, axis=-2)))

    def init(self, w, role="w"):
        return {"mask": mask24(w, -2)}

    def state_shapes(self, shape, role="w"):
        return {"mask": mask_like(shape)}

    def refresh(self, state, w, role="w"):
        return where_finite(w, self.init(w), state)

    def fresh_mask(self, w):
        return mask24(w, -2)

    @property
    def trains_adapters(self) -> bool:
        return bool(self.slorb)

    @property
    def adapter_axes(self):
        if self.train_projection:  # which sums over the shards of the inputs, so that its results are whole
            return {"projection": (-2, None), "sums": (None, -1)}
        return {"sums": (-2, -1)}

    def adapters(self, w, role="w"):
        if not self.slorb:
            return {}
        patterns.check_divides("AST", w.shape, -2, self.slorb, what="kernel for slorb")
        pruned = jnp.where(mask24(w, -2), jnp.zeros_like(w), w)
        *stack, wide, out = w.shape
        blocks = wide // self.slorb
        sums = pruned.reshape(*stack, blocks, self.slorb, out).mean(-2)
        if not self.train_projection:
            return {"sums": sums}
        projection = jnp.repeat(jnp.eye(blocks, dtype=w.dtype), self.slorb, axis=0)
        return {"sums": sums, "projection": jnp.broadcast_to(projection, (*stack, wide, blocks))}

    def adapt(self, x, adapters):
        if self.train_projection:
            return (x @ adapters["projection"]) @ adapters["sums"]
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.slorb, self.slorb).sum(-1) @ adapters["sums"]
