"""Features that stay dense where tokens are cut, and a cut of tokens that is causal."""

import math

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch.operation import Kernel, Operation
from jax_sparse24.ops.reference.bits import magnitude_bits
from jax_sparse24.ops.select import prune24

# Of indices in a scatter.
ASCENDING = {"indices_are_sorted": True, "unique_indices": True, "mode": "promise_in_bounds"}


def densest(
    x: jax.Array,
    share: float,
    rank: str,
    implementation: str | None = None,
    counts: jax.Array | None = None,
) -> jax.Array:
    """int32 (`dense_count(n, share)`,), ascending: the features of `x` (T, n) that a 2:4 cut along tokens
    hurts most.

    rank: "density", the number of non-zeros, or "lost", the energy outside the two largest of every four.
    counts: `non_zeros(x)`, if something has counted them."""
    if rank == "density":
        counts = non_zeros(x) if counts is None else counts
        return top_features(counts, share, x.shape[0], implementation=implementation)
    score = _energy(x) - _energy(prune24(x, 0, implementation=implementation))
    return _sorted_places(score, dense_count(x.shape[1], share))


def non_zeros(x: jax.Array) -> jax.Array:
    """int32 (n,): how many of each column of `x` (T, n) are not zero; a subnormal is not."""
    return jnp.sum(magnitude_bits(x) != 0, axis=0, dtype=jnp.int32)


def top_features(
    score: jax.Array, share: float, most: int, *, implementation: str | None = None
) -> jax.Array:
    """int32 (`dense_count(n, share)`,), ascending: the places of the largest of `score`, int32 (n,) from 0 to
    `most`; of equal ones the first."""
    count = dense_count(score.size, share)
    return TOP_FEATURES(score, count=count, most=most, implementation=implementation)


def _sorted_places(score, count: int):
    return jnp.sort(jax.lax.top_k(score, count)[1])  # a GPU gathers columns faster in their order


TOP_FEATURES = Operation(
    "top_features",
    reference=lambda score, count, most: _sorted_places(score, count),
    cuda=Kernel(
        "s24_features",
        lambda score, count, most: jax.ShapeDtypeStruct((count,), jnp.int32),
        lambda count, most: {"bits": most.bit_length()},
    ),
)


def set_columns(x: jax.Array, places: jax.Array, columns: jax.Array) -> jax.Array:
    """`x` (m, n) with its columns at `places`, ascending and different, replaced by `columns` (m, k)."""

    def scattered(x, places, columns):
        return x.at[:, places].set(columns, **ASCENDING)

    def selected(x, places, columns):
        # A GPU would scatter single elements; whole rows pass at the speed of its memory.
        ranks = rank_of(places, x.shape[1])
        return jnp.where(ranks >= 0, jnp.take(columns, ranks, axis=1, mode="clip"), x)

    return jax.lax.platform_dependent(x, places, columns, cuda=selected, default=scattered)


def rank_of(places: jax.Array, n: int) -> jax.Array:
    """int32 (n,): where each number below n stands in `places`, ascending and different; -1: not there."""
    return jnp.full(n, -1, jnp.int32).at[places].set(jnp.arange(places.size, dtype=jnp.int32), **ASCENDING)


def dense_count(n: int, share: float) -> int:
    """How many of `n` features stay dense: share * n, rounded up, or, from 128 on, to a multiple of 16, as
    GPUs multiply several times slower without."""
    count = math.ceil(share * n)
    return count if count < 128 or count == n else min(n, round(count / 16) * 16)


def _energy(x):
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=0)


def causal_mask24(x: jax.Array) -> jax.Array:
    """bool like `x` (T, n), both multiples of 4: at most two of every four along both axes, where no token's
    mask depends on later tokens.

    The four tokens of a tile take turns; the first two take their largest |x|, the others their two largest,
    among the features that fewer than two of them have taken (the budgets 1, 1, 2, 2 of 2503.16672's
    kernels). Ties: the lower feature; NaN outranks everything."""
    tiles = x.reshape(x.shape[0] // 4, 4, x.shape[1] // 4, 4)
    size = jnp.where(jnp.isnan(tiles), jnp.inf, jnp.abs(tiles.astype(jnp.float32)))
    taken, rows = jnp.zeros((size.shape[0], *size.shape[2:]), jnp.int32), []
    for token, budget in enumerate((1, 1, 2, 2)):
        free = jnp.where(taken < 2, size[:, token], -1)
        row = (_rank(free) < budget) & (taken < 2)
        taken += row.astype(jnp.int32)
        rows.append(row)
    return jnp.stack(rows, axis=1).reshape(x.shape)


def _rank(x):
    """How many of the last axis come before each element, the larger and at equal size the lower index."""
    here, there = x[..., :, None], x[..., None, :]
    before = jnp.tri(x.shape[-1], k=-1, dtype=bool)
    return jnp.sum((there > here) | ((there == here) & before), axis=-1)
