"""Clusters of neurons, and tokens in the order of clusters (2602.06183, section 3).

V:N:M blocks keep few of the neurons of V neighbouring tokens. They lose little if neighbouring tokens
activate the same neurons, and if these neurons lie in different groups of M. So neurons are clustered by what
they respond to, the neurons of each cluster are spread over the groups in turn, and tokens are sorted by the
cluster that they are nearest to."""

import dataclasses
import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.dispatch import shards
from jax_sparse24.engine.operand import Route
from jax_sparse24.engine.partition import Partition
from jax_sparse24.engine.pieces import Axes, whole
from jax_sparse24.ops.order import collect, stable_order
from jax_sparse24.patterns import check_divides

Metric = Literal["cosine", "l2"]
Layout = Literal["spread", "adjacent", "none"]
Sorting = Literal["centroid", "learned", "none"]
Columns = Literal["data", "statistic", "cluster"]
ITERATIONS = 25


class Clusters(NamedTuple):
    """Neurons in clusters of one size.

    assignment: int (f,), the cluster of each neuron.
    centroids: float32 (d, K)."""

    assignment: np.ndarray
    centroids: np.ndarray


def cluster_neurons(w1, clusters: int, metric: Metric = "cosine") -> Clusters:
    """Balanced k-means of the columns of an up-projection, on the host.

    It starts from the columns that are farthest from all chosen before, so that the result depends on w1
    only.

    w1: (d, f).
    clusters: number of clusters, a divisor of f.
    metric: "cosine" for unit columns and unit centroids (spherical k-means), "l2" for columns as they are.

    Returns: `Clusters`.
    Raises: ValueError if f is no multiple of `clusters`, or for weights with NaN or Inf."""
    w1 = np.asarray(w1, np.float32)
    f = w1.shape[1]
    if clusters < 1 or f % clusters:
        raise ValueError(
            f"cluster_neurons: {clusters} clusters do not divide {f} neurons; all have the same size."
        )
    if not np.isfinite(w1).all():
        raise ValueError(f"cluster_neurons: the weights of shape {w1.shape} hold NaN or Inf.")
    points = _unit(w1.T) if metric == "cosine" else w1.T
    centroids = points[_farthest(points, clusters)]
    rows, assignment = np.ascontiguousarray(points), None  # a column of w1 is far apart in memory
    for _ in range(ITERATIONS):
        closeness = points @ centroids.T - (0 if metric == "cosine" else (centroids**2).sum(1) / 2)
        previous, assignment = assignment, _balanced(closeness)
        if previous is not None and (previous == assignment).all():
            break
        members = np.argsort(assignment, kind="stable").reshape(clusters, -1)
        sums = np.stack([rows[own].sum(0) for own in members])
        centroids = _unit(sums) if metric == "cosine" else sums / (f // clusters)
    return Clusters(assignment, np.ascontiguousarray(centroids.T))


def _unit(x):
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    return np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)


def _farthest(points, count: int) -> list[int]:
    chosen = [int(np.argmax((points**2).sum(1)))]
    distance = np.full(len(points), np.inf, np.float32)
    while len(chosen) < count:
        distance = np.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(1))
        distance[chosen] = -1
        chosen.append(int(np.argmax(distance)))
    return chosen


def _balanced(closeness) -> np.ndarray:
    """Assigns the same number of points to each cluster.

    Points propose to the nearest cluster with room, and it takes the closest of them.

    closeness: float32 (points, clusters), larger is nearer.

    Returns: int (points,)."""
    points, clusters = closeness.shape
    room = np.full(clusters, points // clusters)
    assignment = np.full(points, -1)
    while (assignment < 0).any():
        free = np.flatnonzero(assignment < 0)
        wish = np.argmax(np.where(room > 0, closeness[free], -np.inf), axis=1)
        for cluster in np.unique(wish):
            mine = free[wish == cluster]
            nearest = mine[np.argsort(-closeness[mine, cluster], kind="stable")[: room[cluster]]]
            assignment[nearest] = cluster
            room[cluster] -= len(nearest)
    return assignment


def neuron_order(assignment, m: int, layout: Layout) -> np.ndarray:
    """An order of neurons in which clusters lie as `layout` says.

    assignment: int (f,), the cluster of each neuron.
    m: neurons in a group.
    layout: "spread": the neurons of a cluster go to the groups of `m` in turn, one to each; "adjacent": they
        lie next to each other; "none": nothing moves.

    Returns: int (f,), the old index of the neuron at each new place."""
    f = len(assignment)
    by_cluster = np.argsort(assignment, kind="stable")
    if layout == "spread":
        place = np.arange(f)
        return by_cluster[place % m * (f // m) + place // m]
    return by_cluster if layout == "adjacent" else np.arange(f)


def sort_by_cluster(x_Td: jax.Array, centroids_dK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorts tokens by their clusters.

    A token's cluster is the one whose centroid has the largest inner product with it. Ties between clusters
    go to the lower index, and tokens of one cluster keep their order.

    x_Td: tokens, any floating dtype.
    centroids_dK: float32.

    Returns: int32 (T,), the tokens in the new order, and int32 (T,), their clusters in that order."""
    closeness = jnp.asarray(x_Td, jnp.float32) @ centroids_dK
    cluster = jnp.argmax(closeness, axis=1).astype(jnp.int32)
    order = stable_order(cluster, centroids_dK.shape[1])
    return order, cluster[order]


def padded_rows(tokens: int, clusters: int, v: int, m: int) -> int:
    """How many rows `in_blocks` makes.

    tokens, clusters: their numbers.
    v, m: rows and columns of a block.

    Returns: int, a multiple of `v` and of `m`."""
    most = (tokens + min(clusters, tokens) * (v - 1)) // v * v
    multiple = math.lcm(v, m)
    return -(-most // multiple) * multiple


def in_blocks(order_T: jax.Array, cluster_T: jax.Array, clusters: int, v: int, m: int):
    """Adds rows of padding after each cluster of the sorted tokens, so that no block holds two clusters.

    What a token keeps then depends on no other token of its block.

    order_T, cluster_T: of `sort_by_cluster`.
    clusters: number of clusters.
    v, m: rows and columns of a block.

    Returns: int32 (R,), the token of each row, T for padding, with R = `padded_rows`; and int32 (R / v,), the
        cluster of each block."""
    T = order_T.size
    rows = padded_rows(T, clusters, v, m)
    count = jnp.zeros(clusters, jnp.int32).at[cluster_T].add(1)
    ends = jnp.cumsum(-(-count // v))  # counted in blocks
    first = jnp.cumsum(count) - count
    start = v * (ends - -(-count // v))
    place = start[cluster_T] + jnp.arange(T, dtype=jnp.int32) - first[cluster_T]
    padded = jnp.full(rows, T, jnp.int32).at[place].set(order_T)
    block = jnp.searchsorted(ends, jnp.arange(rows // v), side="right")
    return padded, jnp.minimum(block, clusters - 1).astype(jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def learned(router: "Router", cut: Partition | None, of: int, y, learners, x_Td, w1_df, b1_f, state):
    """Returns `y` unchanged, with gradients of what a router learns from a sixteenth of the tokens, whatever
    is done with `y`. Of a cut call each shard takes its own tokens.

    The gradient of "norms" is no gradient but an observation: how strongly the tokens of each cluster
    activate each neuron, sums of squared ReLU, which `s24.nn.observe` adds to the statistics. That of
    "centroids" trains them as a classifier of tokens: it is the gradient of 0.01 times the mean cross entropy
    between softmax(x centroids) and the clusters of neurons that tokens activate most.

    router: whose they are.
    cut: how the call is cut; None if it is not.
    of: over how many shards, besides those of `cut`, the gradients are summed, so that the sum is the mean
        over all tokens.
    y: any shape.
    learners: float32 arrays by name, "norms" (K, f), "centroids" (d, K) or both.
    x_Td: tokens.
    w1_df, b1_f: the up-projection and its bias, or None.
    state: of w1."""
    return y


def _learned_fwd(router, cut, of, y, learners, x_Td, w1_df, b1_f, state):
    found = _in_shards(cut, lambda arrays, *_: ({"some": arrays["x"][::16]}, None), {"x": x_Td}, {}, ["some"])
    return y, (learners, found["some"], w1_df, b1_f, state)


def _learned_bwd(router, cut, of, saved, dy):
    learners, some_nd, w1_df, b1_f, state = saved
    over = () if cut is None else cut.over("w1", -1)
    shards_of_tokens = of if cut is None else of * cut.token_shards

    def body(arrays, states, *_):
        some_nd, w1_df, b1_f, found = arrays["some"], whole(arrays["w1"]), arrays.get("b1", 0), {}
        if "norms" in learners:
            order, cluster = sort_by_cluster(some_nd, states["w1"]["centroids"])
            fired_nf = jnp.square(jax.nn.relu(some_nd[order] @ w1_df + b1_f)).astype(jnp.float32)
            found["norms"] = jax.nn.one_hot(cluster, router.clusters, dtype=jnp.float32).T @ fired_nf
        if "centroids" in learners:
            fired_nf = jnp.square(jax.nn.relu(some_nd @ w1_df + b1_f))
            wanted_n = fired_cluster(fired_nf, router.clusters, router.m, router.layout, over)
            x_nd = some_nd.astype(jnp.float32)
            given_nK = jax.nn.softmax(x_nd @ states["w1"]["centroids"])
            error_nK = given_nK - jax.nn.one_hot(wanted_n, router.clusters, dtype=jnp.float32)
            found["centroids"] = 0.01 / (shards_of_tokens * len(x_nd)) * x_nd.T @ error_nK
        return found, None

    arrays = {"some": some_nd, "w1": w1_df, **({} if b1_f is None else {"b1": b1_f})}
    gradients = _in_shards(cut, body, arrays, {"w1": state}, list(learners))
    if jax.sharding.get_abstract_mesh().explicit_axes:
        types = {name: jax.typeof(learners[name]).sharding for name in gradients}
        gradients = jax.tree.map(jax.sharding.reshard, gradients, types)
    return dy, gradients, None, None, None, None


learned.defvjp(_learned_fwd, _learned_bwd)


def _in_shards(cut: Partition | None, body, arrays, state, results):
    """What a body finds, on the shards of every device if the call is cut."""
    if cut is None:
        return body(arrays, state)[0]
    arrays, state = cut.resharded(arrays, state)
    return cut.run(body, arrays, state, None, results=results)[0]


def fired_cluster(y2_nf: jax.Array, clusters: int, m: int, layout: Layout, over: Axes = ()) -> jax.Array:
    """The cluster of neurons that each token activates most.

    y2_nf: activations, those of the neurons of this shard.
    clusters: number of clusters.
    m, layout: as in `neuron_order`.
    over: the mesh axes that cut neurons, over which the clusters' sums are summed.

    Returns: int32 (n,)."""
    if over:
        n, f = y2_nf.shape[1], y2_nf.shape[1] * jax.lax.axis_size(over)
        place = jax.lax.axis_index(over) * n + jnp.arange(n)
        if layout == "spread":
            place = place % m * (f // m) + place // m
        members_fK = jax.nn.one_hot(place // (f // clusters), clusters, dtype=jnp.float32)
        own_nK = jnp.matmul(y2_nf.astype(jnp.float32), members_fK, precision=jax.lax.Precision.HIGHEST)
        sums_nK = jax.lax.psum(own_nK, over)
    else:
        if layout == "spread":
            y2_nf = collect(y2_nf, y2_nf.shape[1] // m, -1)
        sums_nK = y2_nf.reshape(len(y2_nf), clusters, -1).sum(-1)
    return jnp.argmax(sums_nK, axis=1).astype(jnp.int32)


def responses(w1: jax.Array, centroids_dK: jax.Array) -> jax.Array:
    """The value of each neuron before the activation, for a token that equals a centroid.

    w1: (d, f).
    centroids_dK: float32.

    Returns: float32 (K, f)."""
    return centroids_dK.T @ w1.astype(jnp.float32)


def four_largest(norms_Kf: jax.Array, m: int) -> jax.Array:
    """The four largest of every `m` neurons; of equal ones the first.

    norms_Kf: float32.
    m: neurons in a group.

    Returns: bool (K, f)."""
    groups = norms_Kf.reshape(norms_Kf.shape[0], -1, m)
    rank = jnp.argsort(jnp.argsort(-groups, axis=-1, stable=True), axis=-1)
    return (rank < 4).reshape(norms_Kf.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """Puts neurons into the order of their clusters, and tokens into that of the cluster they are nearest to.

    A method that routes has one as `Method.router`. Its arrays are entries of w1's state: "centroids" is
    float32 (d, K), and "arranged", a bool, says whether the neurons were put in order. With
    columns="statistic" there is also "norms", float32 (K, f), a running statistic of how strongly the tokens
    of each cluster activate each neuron.

    v, m, clusters, metric, layout, routing, columns: as in `s24.methods.Venom`.
    arrange_every: optimiser steps of a sparse phase between two arrangements of neurons; 0 for a single one.
    """

    v: int
    m: int
    clusters: int
    metric: Metric
    layout: Layout
    routing: Sorting
    columns: Columns
    arrange_every: int

    @property
    def sorts(self) -> bool:
        """Whether tokens are put into another order."""
        return self.routing != "none"

    @property
    def chooses(self) -> bool:
        """Whether `route` says what tokens may keep."""
        return self.columns != "data"

    @property
    def learned(self) -> str:
        """Name of the entry of w1's state that a parameter of the FFN, `router`, replaces; "" for none."""
        return "centroids" if self.routing == "learned" else ""

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the entries of w1's state that are running statistics of activations."""
        return ("norms",) if self.columns == "statistic" else ()

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the entries of w1's state, which are zeros until the neurons are arranged.

        shape: of w1, (..., d, f).

        Returns: a `jax.ShapeDtypeStruct` for every entry, by name."""
        *stack, d, f = shape
        shapes = {
            "centroids": jax.ShapeDtypeStruct((*stack, d, self.clusters), jnp.float32),
            "arranged": jax.ShapeDtypeStruct((*stack,), bool),
        }
        if self.observed:
            shapes["norms"] = jax.ShapeDtypeStruct((*stack, self.clusters, f), jnp.float32)
        return shapes

    def arrange(self, w1) -> tuple[np.ndarray, dict[str, jax.Array]]:
        """A new order of the neurons of an FFN; it runs on the host, see `s24.nn.arrange`.

        w1: (d, f), one column per neuron.

        Returns: int (f,), the old index of the neuron at each new place, and the new entries of w1's state.
        Raises: ValueError as `cluster_neurons`."""
        found = cluster_neurons(w1, self.clusters, self.metric)
        order = neuron_order(found.assignment, self.m, self.layout)
        centroids = jnp.asarray(found.centroids)
        state = {"centroids": centroids, "arranged": jnp.asarray(True)}
        if self.observed:  # statistics start as if one token had been observed at each centroid
            state["norms"] = jnp.square(jax.nn.relu(responses(jnp.asarray(w1)[:, order], centroids)))
        return order, state

    def route(self, x_Td: jax.Array, w1_df: jax.Array, state) -> Route | None:
        """The order in which the products see the tokens.

        x_Td: input of the FFN.
        w1_df: the up-projection.
        state: of w1.

        Returns: a `Route`; None for the order in which tokens come.
        Raises: ValueError if neurons are chosen in groups that do not divide f."""
        if not self.sorts:
            return None
        if self.chooses:
            check_divides("Venom", w1_df.shape, -1, self.m, what="kernel w1")
        order, cluster = sort_by_cluster(x_Td, state["centroids"])
        if not self.chooses:
            return Route(order)
        norms = state["norms"] if self.observed else responses(w1_df, state["centroids"])
        order, of_block = in_blocks(order, cluster, self.clusters, self.v, self.m)
        allowed_Rf = jnp.repeat(four_largest(norms, self.m)[of_block], self.v, axis=0)
        return Route(order, allowed_Rf & (order < len(x_Td))[:, None])

    def learn(
        self,
        y,
        state,
        router_dK: jax.Array | None,
        x_Td: jax.Array,
        w1_df: jax.Array,
        b1_f: jax.Array | None = None,
        cut: Partition | None = None,
    ):
        """Returns `y` unchanged, with gradients for what the router learns from a sixteenth of the tokens:
        of the statistics `observed`, and of the parameter, see `learned`.

        y: output of the FFN, (T, d) or with more axes in front.
        state: of w1.
        router_dK: the parameter; None without one.
        x_Td: input of the FFN.
        w1_df, b1_f: the up-projection and its bias, or None.
        cut: how the call is cut; None if it is not."""
        learners = {name: state[name] for name in self.observed}
        if router_dK is not None:
            learners["centroids"] = router_dK
        if not learners:
            return y
        given = jax.lax.stop_gradient((x_Td, w1_df, b1_f, dict(state)))
        summed = shards.shards_summed(router_dK, (y, *given))
        y, learners, *given = shards.alike((y, learners, *given))
        return learned(self, cut, summed, y, learners, *given)
