"""2:4 weights and V:N:M activations with neuron-level routing (2602.06183)."""

import dataclasses
import math
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp

from jax_sparse24.engine.plan import FFN, LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import Blocks, SavedSupport
from jax_sparse24.methods.activation24 import soft_weights
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
from jax_sparse24.methods.routing import Columns, Layout, Metric, Router, Sorting
from jax_sparse24.methods.sste import soft_scale
from jax_sparse24.patterns import VNM, check_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Venom(Method):
    """All six products of a non-gated FFN sparse, by 2:4 weights and V:2:M activations.

    F1 and B1 have soft-thresholded 2:4 weights. F2, B2, B3 and B4 have V:2:M activations of tokens that are
    sorted by the cluster of neurons they are nearest to: F2 prunes Y2 in blocks of `v` tokens by `m` neurons,
    B3 takes dY1 on the same support, and B2 and B4 prune both again within it, in blocks of `v` neurons by
    `m` tokens. At the first sparse step, after a dense warm-up that makes the activations sparse,
    `s24.nn.arrange` clusters the neurons and permutes them, which changes no output. The FFN width must be a
    multiple of `v` and of `m`, and with columns="data" so must the number of tokens. B1 is needed at the
    entries of Y2 alone, 4 / `m` of all. Where computing only these was measured to be faster, dense products
    with the same weights compute them (sampled dense-dense products), and nothing else changes.

    The paper leaves much open: its body names no V, M, number or metric of clusters, nor which values F2 and
    B3 multiply. Every field is one of these choices.

    v, m: block size, V = 16 to 256 and M = 4 to 32.
    clusters: number of clusters of neurons, all of one size.
    metric: of the clustering, "cosine" or "l2".
    layout: the neurons of a cluster go to the groups of M in turn ("spread"), lie side by side ("adjacent"),
        or are left in place ("none").
    routing: tokens are sorted by the nearest "centroid"; by a "learned" linear router, a parameter of the FFN
        that starts from the centroids and is taught which cluster a sixteenth of the tokens activates most;
        or are left in order ("none").
    columns: which four of every `m` neurons a block keeps. "data": those that its tokens activate most; a
        token's mask then depends on later tokens, and a loss under it is no language model's loss (`causal`).
        "statistic": those that tokens of its cluster activated most in earlier steps, by a running statistic
        of a sixteenth of the tokens (`s24.nn.observe`). "cluster": those that respond most to the centroid,
        by the weights alone. Under the last two, what a token keeps depends on no other token: every block
        holds one cluster and is filled up with rows of zeros, which adds less than `clusters` * `v` rows to
        all products.
    transposed: B2 and B4 need the opposite order, tokens of different clusters in a group of M and neurons of
        one cluster in a block of V. Both are "regrouped" there (the sum over tokens does not depend on their
        order, and gradients are put back in order), or left as in F2 ("plain").
    exact: whether columns are found by exhaustive search.
    weights: in F1 and B1, "soft" 2:4 or "dense".
    dense_operand: F2 and B3 multiply "soft" weights, too, so that the gradient is that of the forward pass,
        or "dense" ones.
    arrange_every: optimiser steps between two arrangements of neurons in the sparse phase; 0 for one at its
        start.
    dense_warmup: dense optimiser steps at the start.
    sparse_share: share of the steps after the warm-up that are sparse; the rest, at the end, is dense.
    token_blocks: tokens are sorted, and groups of them found, in each of so many blocks, see
        `Method.token_blocks`.

    Raises: TypeError or ValueError for an option outside these.
    Source: 2602.06183; V:N:M is that of 2310.02065."""

    when = "All six products sparse, where activations are sparse already: long runs of squared-ReLU models."

    state_axes = MappingProxyType({"centroids": (None, None), "norms": (None, -1)})
    positive = ("scale",)

    v: int = 64
    m: int = 16
    clusters: int = 32
    metric: Metric = "cosine"
    layout: Layout = "spread"
    routing: Sorting = "centroid"
    columns: Columns = "data"
    transposed: Literal["regrouped", "plain"] = "regrouped"
    exact: bool = False
    weights: Literal["soft", "dense"] = "soft"
    dense_operand: Literal["soft", "dense"] = "soft"
    arrange_every: int = 0
    dense_warmup: int = 1000
    sparse_share: float = 0.5
    token_blocks: int = 1

    def __post_init__(self):
        VNM(self.v, self.m)
        check_flag(self, "exact")
        if self.exact:
            VNM(self.v, self.m).check_search("Venom")
        check_choice(self, "metric", "cosine", "l2")
        check_choice(self, "layout", "spread", "adjacent", "none")
        check_choice(self, "routing", "centroid", "learned", "none")
        check_choice(self, "columns", "data", "statistic", "cluster")
        check_choice(self, "transposed", "regrouped", "plain")
        check_choice(self, "weights", "soft", "dense")
        check_choice(self, "dense_operand", "soft", "dense")
        check_whole(self, "clusters", of="clusters")
        check_whole(self, "dense_warmup", least=0)
        check_whole(self, "arrange_every", least=0)
        check_share(self, "sparse_share")
        check_whole(self, "token_blocks", of="blocks")
        routed = self.columns == "data" or self.routing != "none"
        check_field(self, "columns", routed, "needs tokens to be routed")
        ordered = self.routing != "learned" or self.layout != "none"
        check_field(self, "layout", ordered, "leaves clusters without a place, which routing='learned' needs")

    def ffn_plan(self):
        cut = Blocks(self.v, self.m, self.exact)
        over_tokens = {}
        if self.transposed == "regrouped":
            over_tokens = {"tokens": "strided", "gather_features": self.layout == "spread"}
        rows = {
            "F2": Row("y2", cut),
            "B2": Row("y2", cut, **over_tokens),
            "B3": Row("dy1", SavedSupport(cut)),
            "B4": Row("dy1", cut, **over_tokens),
        }
        if self.weights == "soft":
            rows |= soft_weights(rows, everywhere=self.dense_operand == "soft")
        return Plan.of(FFN, save_packed=True, **rows)

    def linear_plan(self):
        return Plan.of(LINEAR)

    def init(self, w, role="w"):
        if role == "w":
            return {}
        state = {"scale": soft_scale(w, -2 if role == "w1" else -1)} if self.weights == "soft" else {}
        if role == "w1":
            self._check_clusters(w.shape)
            shapes = self.router.state_shapes(w.shape)
            state |= {name: jnp.zeros(like.shape, like.dtype) for name, like in shapes.items()}
        return state

    def _check_clusters(self, shape) -> None:
        """Raises ValueError unless the neurons of w1 (..., d, f) make clusters of one size."""
        rule = f"does not divide the {shape[-1]} neurons of a weight of shape {shape}; use a divisor of them"
        check_field(self, "clusters", shape[-1] % self.clusters == 0, rule)

    def state_shapes(self, shape, role="w"):
        if role == "w":
            return {}
        shapes = {"scale": scale_like(shape)} if self.weights == "soft" else {}
        return shapes | (self.router.state_shapes(shape) if role == "w1" else {})

    @property
    def causal(self):
        return self.columns != "data"

    @property
    def router(self):
        return Router(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Router)})

    @property
    def token_multiple(self):
        return self.token_blocks * (math.lcm(self.v, self.m) if self.columns == "data" else 1)

    def schedule(self, total_steps):
        check_size(f"{type(self).__name__}.schedule", "total_steps", total_steps)
        rest = total_steps - self.dense_warmup
        sparse = round(rest * self.sparse_share)
        check_field(
            self,
            "dense_warmup",
            sparse > 0,
            f"leaves no sparse step in a run of {total_steps} steps; shorten it",
        )
        return phases(dense_warmup=self.dense_warmup, sparse=sparse, dense=rest - sparse)
