"""SLoPe: static 2:4 weights, pruned twice for the backward pass, and late low-rank adapters (2405.16325)."""

import dataclasses
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp

from jax_sparse24.engine.plan import LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import Masked
from jax_sparse24.methods.base import (
    Method,
    check_choice,
    check_field,
    check_whole,
    is_number,
    mask_like,
    where_finite,
)
from jax_sparse24.ops.select import mask24
from jax_sparse24.patterns import check_size
from jax_sparse24.schedule import Phase, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class SLoPe(Method):
    """A 2:4 mask along `in` that is chosen before the first step and never changes.

    The product of the input gradient prunes the masked weight once more, along `out`, which biases it (a
    share of 3/32 of a random matrix is lost, section 2.1). The weight gradient is a dense product of which
    only the unmasked entries are taken, so that pruned weights do not move (decoupled weight decay still
    shrinks them; no sparse product reads them). Adapters are parameters from the start, without a gradient
    until they take part, so Adam's bias correction is over by then: their first updates are smaller than a
    new optimiser's. Evaluate sparse, or dense after `s24.nn.merge_adapters`: the pruned weights mean nothing.

    mask: "magnitude" for the two largest of every four initial weights (what the paper's code does), or
        "random", drawn with a key made of the weight's bits.
    refresh_every: optimiser steps between two choices of the second mask within the first.
    rank: of the adapters `x L R / rank`, as a share of the smaller side of the weight (the paper's tables:
        0.0156 and 0.0625) or a number (its code: 40); 0 for none. L starts standard normal, R zero.
    adapter_share: share of the steps, at the end, in which adapters take part and train; 1 for all steps.

    Raises: ValueError for an option outside these.
    Source: 2405.16325."""

    when = (
        "Masks must not change (no search, no flips) and the input gradient must be sparse without 4x4 tiles."
    )
    tiles = (4, 4)
    adapter_axes = MappingProxyType({"left": (-2, None), "right": (None, -1)})

    mask: Literal["magnitude", "random"] = "magnitude"
    refresh_every: int = 100
    rank: int | float = 0.0625
    adapter_share: float = 0.01

    def __post_init__(self):
        check_choice(self, "mask", "magnitude", "random")
        check_whole(self, "refresh_every")
        number = isinstance(self.rank, int) and not isinstance(self.rank, bool) and self.rank >= 0
        share = isinstance(self.rank, float) and 0 <= self.rank <= 1
        check_field(self, "rank", number or share, "must be a whole number >= 0 or a share in [0, 1]")
        some = is_number(self.adapter_share) and 0 < self.adapter_share <= 1
        check_field(self, "adapter_share", some, "must lie in (0, 1]; rank=0 for none")

    def linear_plan(self):
        return Plan.of(
            LINEAR,
            gradient_mask="mask",
            fwd=Row("w", Masked("mask", "static mask")),
            dgrad=Row("w", Masked("twice", "static mask, pruned again")),
        )

    def init(self, w, role="w"):
        scores = jax.random.uniform(_own_key(w, 0), w.shape) if self.mask == "random" else w
        return _pruned_twice(mask24(scores, -2), w)

    def state_shapes(self, shape, role="w"):
        return dict.fromkeys(("mask", "twice"), mask_like(shape))

    def refresh(self, state, w, role="w"):
        return where_finite(w, _pruned_twice(state["mask"], w), state)

    def fresh_mask(self, w):
        return mask24(w, -2)

    @property
    def trains_adapters(self) -> bool:
        return bool(self.rank)

    def adapters(self, w, role="w"):
        side = min(w.shape[-2:])
        rank = max(round(self.rank * side), 1) if isinstance(self.rank, float) and self.rank else self.rank
        if not rank:
            return {}
        check_field(self, "rank", rank <= side, f"exceeds the smaller side of a weight of shape {w.shape}")
        *stack, wide, out = w.shape
        left = jax.random.normal(_own_key(w, 1), (*stack, wide, rank), w.dtype)
        return {"left": left, "right": jnp.zeros((*stack, rank, out), w.dtype)}

    def adapt(self, x, adapters):
        return (x @ adapters["left"]) @ adapters["right"] / adapters["left"].shape[-1]

    def schedule(self, total_steps):
        check_size(f"{type(self).__name__}.schedule", "total_steps", total_steps)
        last = max(round(total_steps * self.adapter_share), 1) if self.rank else 0
        first = total_steps - last
        sparse = Phase("sparse", first, sparse=True, adapters=False) if first else None
        adapters = Phase("adapters", last, sparse=True) if last else None
        return Schedule(tuple(phase for phase in (sparse, adapters) if phase))


def _pruned_twice(mask, w):
    return {"mask": mask, "twice": mask & mask24(jnp.where(mask, w, jnp.zeros_like(w)), -1)}


def _own_key(w, purpose: int):
    """A key made of the weight's bits: every matrix draws its own numbers, the same ones from equal seeds."""
    words = jax.lax.bitcast_convert_type(w.astype(jnp.float32), jnp.uint32)
    return jax.random.fold_in(jax.random.key(purpose), jnp.sum(words, dtype=jnp.uint32))
