"""Neurons in clusters, and tokens in the order of clusters (2602.06183, section 3).

V:N:M blocks keep few of the neurons of V neighbouring tokens. They lose little if neighbouring tokens fire
the same neurons, and if these neurons lie in different groups of M. So neurons are clustered by what they
respond to, each cluster is dealt over the groups, and tokens are sorted by the cluster they are nearest to.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.ops.tokens import collect

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


def cluster_columns(w1: jax.Array, centroids_dK: jax.Array, m: int) -> jax.Array:
    """bool (K, f): the four of every `m` neurons that respond most to each centroid."""
    response = centroids_dK.T @ w1.astype(jnp.float32)  # (K, f)
    groups = response.reshape(response.shape[0], -1, m)
    rank = jnp.argsort(jnp.argsort(-groups, axis=-1, stable=True), axis=-1)
    return (rank < 4).reshape(response.shape)
