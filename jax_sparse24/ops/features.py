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
    x_Tn: jax.Array,
    share: float,
    rank: str,
    implementation: str | None = None,
    counts_n: jax.Array | None = None,
    over: tuple[str, ...] = (),
) -> jax.Array:
    """The features that a 2:4 cut along tokens hurts most.

    x_Tn: (T, n), T a multiple of 4; float32, bfloat16 or float16.
    share: of the features, how many are chosen; from 0 to 1.
    rank: by what: "density", the number of non-zeros, or "lost", the energy outside the two largest of every
        four.
    implementation: as in `mask24`.
    counts_n: int32 (n,), `non_zeros(x_Tn)`, if something has counted them.
    over: manual mesh axes over whose shards of tokens the choice is made together.

    Returns: int32 (`dense_count(n, share)`,), ascending."""
    if rank == "density":
        counts_n = non_zeros(x_Tn) if counts_n is None else counts_n
        counts_n = jax.lax.psum(counts_n, over) if over else counts_n
        tokens = x_Tn.shape[0] * (jax.lax.axis_size(over) if over else 1)
        return top_features(counts_n, share, tokens, implementation=implementation)
    score_n = _energy(x_Tn) - _energy(prune24(x_Tn, 0, implementation=implementation))
    score_n = jax.lax.psum(score_n, over) if over else score_n
    return _sorted_places(score_n, dense_count(x_Tn.shape[1], share))


def non_zeros(x_Tn: jax.Array) -> jax.Array:
    """How many tokens are not zero in each feature.

    x_Tn: (T, n); float32, bfloat16 or float16. A subnormal is not zero.

    Returns: int32 (n,)."""
    return jnp.sum(magnitude_bits(x_Tn) != 0, axis=0, dtype=jnp.int32)


def top_features(
    score_n: jax.Array, share: float, most: int, *, implementation: str | None = None
) -> jax.Array:
    """The features of the largest scores; of equal ones the first.

    score_n: int32 (n,), from 0 to `most`.
    share: of the features, how many are chosen; from 0 to 1.
    most: the largest score that there can be.
    implementation: as in `mask24`.

    Returns: int32 (`dense_count(n, share)`,), ascending."""
    count = dense_count(score_n.size, share)
    return TOP_FEATURES(score_n, count=count, most=most, implementation=implementation)


def _sorted_places(score_n, count: int):
    return jnp.sort(jax.lax.top_k(score_n, count)[1])  # a GPU gathers columns faster in their order


TOP_FEATURES = Operation(
    "top_features",
    reference=lambda score_n, count, most: _sorted_places(score_n, count),
    cuda=Kernel(
        "s24_features",
        lambda score_n, count, most: jax.ShapeDtypeStruct((count,), jnp.int32),
        lambda count, most: {"bits": most.bit_length()},
    ),
)


def set_columns(x_Rn: jax.Array, places_k: jax.Array, columns_Rk: jax.Array) -> jax.Array:
    """A matrix with some of its columns replaced.

    x_Rn: (R, n), of any dtype.
    places_k: int32 (k,), which columns; ascending and different.
    columns_Rk: (R, k), the new ones, in the dtype of `x_Rn`.

    Returns: (R, n) in that dtype."""

    def scattered(x_Rn, places_k, columns_Rk):
        return x_Rn.at[:, places_k].set(columns_Rk, **ASCENDING)

    def selected(x_Rn, places_k, columns_Rk):
        # A GPU would scatter single elements; whole rows pass at the speed of its memory.
        ranks_n = rank_of(places_k, x_Rn.shape[1])
        return jnp.where(ranks_n >= 0, jnp.take(columns_Rk, ranks_n, axis=1, mode="clip"), x_Rn)

    return jax.lax.platform_dependent(x_Rn, places_k, columns_Rk, cuda=selected, default=scattered)


def rank_of(places_k: jax.Array, n: int) -> jax.Array:
    """Where each number stands among chosen ones.

    places_k: int32 (k,), ascending and different, all below n.
    n: how many numbers are asked for, those from 0 on.

    Returns: int32 (n,), the index of each in `places_k`, or -1 if it is not there."""
    ranks_k = jnp.arange(places_k.size, dtype=jnp.int32)
    return jnp.full(n, -1, jnp.int32).at[places_k].set(ranks_k, **ASCENDING)


def dense_count(n: int, share: float) -> int:
    """How many features stay dense.

    n: the number of features.
    share: of them; from 0 to 1.

    Returns: share * n, rounded up; from 128 on it is rounded to a multiple of 16, as GPUs multiply several
        times slower without."""
    count = math.ceil(share * n)
    return count if count < 128 or count == n else min(n, round(count / 16) * 16)


def _energy(x_Tn):
    return jnp.sum(jnp.square(x_Tn.astype(jnp.float32)), axis=0)


def causal_mask24(x_Tn: jax.Array) -> jax.Array:
    """A mask of at most two of every four along tokens and features, in which no token depends on later ones.

    The four tokens of a tile take turns. The first two take their largest |x|, the others their two largest,
    among the features that fewer than two of them have taken. Of equal ones the lower feature is taken; NaN
    outranks everything.

    x_Tn: (T, n), both multiples of 4; float32, bfloat16 or float16.

    Returns: bool (T, n).
    Source: 2503.16672, whose kernels let the tokens take one, one, two and two."""
    tiles = x_Tn.reshape(x_Tn.shape[0] // 4, 4, x_Tn.shape[1] // 4, 4)
    size = jnp.where(jnp.isnan(tiles), jnp.inf, jnp.abs(tiles.astype(jnp.float32)))
    taken, rows = jnp.zeros((size.shape[0], *size.shape[2:]), jnp.int32), []
    for token, budget in enumerate((1, 1, 2, 2)):
        free = jnp.where(taken < 2, size[:, token], -1)
        row = (_rank(free) < budget) & (taken < 2)
        taken += row.astype(jnp.int32)
        rows.append(row)
    return jnp.stack(rows, axis=1).reshape(x_Tn.shape)


def _rank(x):
    """How many of the last axis come before each element, the larger and at equal size the lower index."""
    here, there = x[..., :, None], x[..., None, :]
    before = jnp.tri(x.shape[-1], k=-1, dtype=bool)
    return jnp.sum((there > here) | ((there == here) & before), axis=-1)
