"""Bi-Mask: separate masks for the forward and the backward product (2302.06058)."""

import dataclasses
import math
from types import MappingProxyType

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.engine.operand import Request
from jax_sparse24.engine.plan import LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import DenseValues, Top2
from jax_sparse24.engine.tiles import total, whole_columns
from jax_sparse24.methods.base import Decay, Method, Training, check_positive, check_whole, where_finite
from jax_sparse24.ops.select import mask24
from jax_sparse24.patterns import GROUP, KEPT


@dataclasses.dataclass(frozen=True)
class Reordered(DenseValues):
    """The values of the forward pass, `of` along `in`, pruned by `of` again along `out`.

    Groups along `out` are formed in the order that the layer's state holds. The result has the order of the
    weight, in which the members of a group are no neighbours, so it is multiplied by a dense product.

    blocks: see `Method.feature_blocks`."""

    blocks: int = 1

    def check(self, op, shape, axis, what):
        for both in (-1, -2):
            self.of.check(op, shape, both, what)

    def piecewise(self, shape, axis):
        return False  # an order is of all columns

    def __call__(self, x, axis, request: Request):
        order, over = request.state["order"], request.cuts[-1]
        if over:
            shards = math.prod(jax.lax.axis_size(name) for name in over)
            if self.blocks % shards:
                raise ValueError(
                    f"BiMask: the columns of a weight are cut into {shards} shards ({' * '.join(over)}), but "
                    f"with feature_blocks={self.blocks} its order puts columns of several shards into one "
                    f"group. Use BiMask(feature_blocks={shards}), or another multiple of {shards}, from the "
                    "start of the training, or leave columns whole."
                )
            order = order - jax.lax.axis_index(over) * x.shape[1]
        request = dataclasses.replace(request, form="dense")
        values = jnp.take(self.of(x, -2, request), order, axis=-1)
        return jnp.take(self.of(values, -1, request), jnp.argsort(order), axis=-1)

    def __str__(self):
        return f"values of {self.of}, {self.of} again along out in the stored order, dense product"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiMask(Method):
    """2:4 weights along `in` forward; the same, pruned to 2:4 along `out` as well, for the input gradient.

    The output neurons are put into groups of four such that the second pruning loses few weights; the state
    holds that order of neurons. Masks are chosen anew in every step. A kernel would permute dY and the weight
    together; here the input gradient is a dense product of the same values.

    decay: rate of masked decay on gradients, by the forward mask. This and the other defaults are those of
        2404.01847's comparison.
    refresh_every: optimiser steps between two searches for an order.
    trials: random orders per search; the best of them and of the present order is taken, by the number of
        weights left. The random numbers follow from the number of the search.
    feature_blocks: neurons change places within each of so many blocks, see `Method.feature_blocks`.

    Raises: ValueError for an option outside these.
    Source: 2302.06058."""

    when = "To compare with FST: a forward mask that need not be transposable; one of three products sparse."
    tiles = (4, 1)
    state_axes = MappingProxyType({"order": (-1,)})

    decay: float = 2e-4
    refresh_every: int = 100
    trials: int = 100
    feature_blocks: int = 1

    def __post_init__(self):
        check_positive(self, "decay")
        check_whole(self, "refresh_every")
        check_whole(self, "trials", of="orders to try")
        check_whole(self, "feature_blocks", of="blocks")

    def training(self, total_steps):
        return Training(decay=Decay(self.decay))

    def linear_plan(self):
        reordered = Reordered(Top2(), axis=-1, blocks=self.feature_blocks)
        return Plan.of(LINEAR, fwd=Row("w", Top2()), dgrad=Row("w", reordered))

    def init(self, w, role="w"):
        if self.feature_blocks > 1:
            what = f"weight in feature_blocks={self.feature_blocks}"
            patterns.check_divides("BiMask", w.shape, -1, GROUP * self.feature_blocks, what=what)
        identity = jnp.broadcast_to(jnp.arange(w.shape[-1], dtype=jnp.int32), (*w.shape[:-2], w.shape[-1]))
        return self.refresh({"order": identity, "searches": jnp.zeros(w.shape[:-2], jnp.int32)}, w)

    def state_shapes(self, shape, role="w"):
        *stack, _, out = shape
        return {
            "order": jax.ShapeDtypeStruct((*stack, out), jnp.int32),
            "searches": jax.ShapeDtypeStruct((*stack,), jnp.int32),
        }

    def refresh(self, state, w, role="w"):
        search = self._better_order
        for _ in w.shape[:-2]:
            search = jax.vmap(search)
        order = search(state["order"], state["searches"], w)
        return where_finite(w, {"order": order, "searches": state["searches"] + 1}, state)

    def _better_order(self, order, searches, w):
        kept = whole_columns(mask24(w, -2))

        def left(order):
            """The number of weights that the second pruning leaves."""
            groups = kept[:, order].reshape(w.shape[0], -1, GROUP)
            return total(jnp.minimum(groups.sum(-1), KEPT).sum(), axes=(-2,))

        def trial(best, key):
            new = self._within_blocks(jax.random.permutation(key, order))
            count = left(new)
            return jax.tree.map(lambda n, b: jnp.where(count > best[0], n, b), (count, new), best), None

        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), searches), self.trials)
        return jax.lax.scan(trial, (left(order), order), keys)[0][1]

    def _within_blocks(self, order):
        """The columns of each block in the sequence in which they stand in an order of all."""
        if self.feature_blocks == 1:
            return order
        return order[jnp.argsort(order // (len(order) // self.feature_blocks))]

    def fresh_mask(self, w):
        return mask24(w, -2)
