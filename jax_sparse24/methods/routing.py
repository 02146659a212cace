"""Neurons in clusters, and tokens in the order of clusters (2602.06183, section 3).

V:N:M blocks keep few of the neurons of V neighbouring tokens. They lose little if neighbouring tokens fire
the same neurons, and if these neurons lie in different groups of M. So neurons are clustered by what they
respond to, each cluster is dealt over the groups, and tokens are sorted by the cluster they are nearest to.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.ops.order import collect

Metric = Literal["cosine", "l2"]
Layout = Literal["spread", "adjacent", "none"]
ITERATIONS = 25


class Clusters(NamedTuple):
    """assignment: (f,) the cluster of each neuron, all of the same size. centroids: (d, K) float32."""

    assignment: np.ndarray
    centroids: np.ndarray


def cluster_neurons(w1, clusters: int, metric: Metric = "cosine") -> Clusters:
    """Balanced k-means of the columns of an up-projection (d, f), on the host.

    cosine: unit columns and unit centroids (spherical k-means); l2: as they are. Starts from the columns that
    are farthest from all chosen before, so that the result depends on w1 only. Raises ValueError if f is no
    multiple of `clusters`, or for non-finite weights."""
    w1 = np.asarray(w1, np.float32)
    d, f = w1.shape
    if clusters < 1 or f % clusters:
        raise ValueError(
            f"cluster_neurons: {clusters} clusters do not divide {f} neurons; all have the same size."
        )
    if not np.isfinite(w1).all():
        raise ValueError(f"cluster_neurons: the weights of shape {w1.shape} hold NaN or Inf.")
    points = _unit(w1.T) if metric == "cosine" else w1.T
    centroids = points[_farthest(points, clusters)]
    assignment = None
    for _ in range(ITERATIONS):
        closeness = points @ centroids.T - (0 if metric == "cosine" else (centroids**2).sum(1) / 2)
        previous, assignment = assignment, _balanced(closeness)
        if previous is not None and (previous == assignment).all():
            break
        sums = np.zeros((clusters, d), np.float32)
        np.add.at(sums, assignment, points)
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
    """Every point to a cluster, the same number to each: points propose to the nearest cluster with room,
    which takes the closest of them."""
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
    """(f,) the old index of the neuron at each new place.

    spread: the neurons of a cluster are dealt over the groups of `m`, one to each in turn. adjacent: they lie
    next to each other. none: nothing moves."""
    f = len(assignment)
    by_cluster = np.argsort(assignment, kind="stable")
    if layout == "spread":
        place = np.arange(f)
        return by_cluster[place % m * (f // m) + place // m]
    return by_cluster if layout == "adjacent" else np.arange(f)


def route(x_Td: jax.Array, centroids_dK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 (T,) tokens in the order of their clusters (stable), and their clusters in that order. A token's
    cluster has the largest inner product with it; ties go to the lower index."""
    closeness = jnp.asarray(x_Td, jnp.float32) @ centroids_dK
    cluster = jnp.argmax(closeness, axis=1).astype(jnp.int32)
    order = jnp.argsort(cluster, stable=True).astype(jnp.int32)
    return order, cluster[order]


def padded_rows(tokens: int, clusters: int, v: int, m: int) -> int:
    """How many rows `in_blocks` makes of so many tokens, a multiple of `v` and of `m`."""
    most = (tokens + min(clusters, tokens) * (v - 1)) // v * v
    multiple = math.lcm(v, m)
    return -(-most // multiple) * multiple


def in_blocks(order_T: jax.Array, cluster_T: jax.Array, clusters: int, v: int, m: int):
    """Sorted tokens with rows of padding after each cluster, so that no block of `v` rows holds two clusters:
    what a block is then depends on none of its other tokens.

    order_T, cluster_T: of `route`. Returns int32 (R,), R = `padded_rows`: the token of each row, T for
    padding; and int32 (R / v,), the cluster of each block."""
    T = order_T.size
    rows = padded_rows(T, clusters, v, m)
    count = jnp.zeros(clusters, jnp.int32).at[cluster_T].add(1)
    ends = jnp.cumsum(-(-count // v))  # in blocks
    first = jnp.cumsum(count) - count
    start = v * (ends - -(-count // v))
    place = start[cluster_T] + jnp.arange(T, dtype=jnp.int32) - first[cluster_T]
    padded = jnp.full(rows, T, jnp.int32).at[place].set(order_T)
    block = jnp.searchsorted(ends, jnp.arange(rows // v), side="right")
    return padded, jnp.minimum(block, clusters - 1).astype(jnp.int32)


@jax.custom_vjp
def observe(y, norms_Kf: jax.Array, x_nd: jax.Array, cluster_n: jax.Array, w1_df: jax.Array):
    """`y`, where the gradient of `norms_Kf` is no gradient: whatever is done with `y`, it is how much the
    tokens `x_nd` of each cluster activate each neuron, sums of squared ReLU. `s24.nn.observe` adds them."""
    return y


def _observe_fwd(y, norms_Kf, x_nd, cluster_n, w1_df):
    return y, (jax.nn.one_hot(cluster_n, norms_Kf.shape[0], dtype=jnp.float32), x_nd, w1_df)


def _observe_bwd(saved, dy):
    cluster_nK, x_nd, w1_df = saved
    fired_nf = jnp.square(jax.nn.relu(x_nd @ w1_df)).astype(jnp.float32)
    return dy, cluster_nK.T @ fired_nf, None, None, None


observe.defvjp(_observe_fwd, _observe_bwd)


@jax.custom_vjp
def teach(y, router_dK: jax.Array, x_nd: jax.Array, cluster_n: jax.Array):
    """`y`, with a gradient for the router as a classifier of tokens: that of 0.01 times the mean
    cross-entropy between softmax(x router) and the clusters, whatever is done with `y`."""
    return y


def _teach_fwd(y, router_dK, x_nd, cluster_n):
    return y, (router_dK, x_nd, cluster_n)


def _teach_bwd(saved, dy):
    router_dK, x_nd, cluster_n = saved
    x_nd = x_nd.astype(jnp.float32)
    error_nK = jax.nn.softmax(x_nd @ router_dK) - jax.nn.one_hot(cluster_n, router_dK.shape[1])
    return dy, 0.01 / len(x_nd) * x_nd.T @ error_nK, None, None


teach.defvjp(_teach_fwd, _teach_bwd)


def fired_cluster(y2_nf: jax.Array, clusters: int, m: int, layout: Layout) -> jax.Array:
    """int32 (n,): the cluster of neurons that activations give most to. m, layout: of `neuron_order`."""
    if layout == "spread":
        y2_nf = collect(y2_nf, y2_nf.shape[1] // m, -1)
    return jnp.argmax(y2_nf.reshape(len(y2_nf), clusters, -1).sum(-1), axis=1).astype(jnp.int32)


def responses(w1: jax.Array, centroids_dK: jax.Array) -> jax.Array:
    """float32 (K, f): what each neuron gets from a token at each centroid, before the activation."""
    return centroids_dK.T @ w1.astype(jnp.float32)


def four_largest(norms_Kf: jax.Array, m: int) -> jax.Array:
    """bool (K, f): the four of every `m` neurons that are largest, of equal ones the first."""
    groups = norms_Kf.reshape(norms_Kf.shape[0], -1, m)
    rank = jnp.argsort(jnp.argsort(-groups, axis=-1, stable=True), axis=-1)
    return (rank < 4).reshape(norms_Kf.shape)
