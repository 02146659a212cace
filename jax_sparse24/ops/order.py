"""The order of tokens and features: which of them make a group, and permutations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.dispatch import shards


def regroup(x_Tn: jax.Array, order: str, group: int = 4) -> jax.Array:
    """Tokens in the order in which they are cut, `group` after `group`.

    Neighbouring tokens activate the same features, so that groups of consecutive ones have more large values
    in a feature than the two that a cut keeps. A sum over tokens does not depend on their order, so that
    nothing is put back.

    x_Tn: (T, n), T a multiple of `group`; any dtype.
    order: "consecutive" leaves the tokens, "strided" groups those T / group apart, "random" uses one
        permutation for each T.
    group: how many tokens are cut together.

    Returns: an array of the same shape and dtype.
    Source: 2503.16672."""
    T = x_Tn.shape[0]
    if order == "consecutive":
        return x_Tn
    if order == "strided":
        return x_Tn.reshape(group, T // group, x_Tn.shape[1]).swapaxes(0, 1).reshape(x_Tn.shape)
    return x_Tn[np.random.default_rng(T).permutation(T)]


def collect(x: jax.Array, groups: int, axis: int) -> jax.Array:
    """Puts the first columns of all groups side by side, then the second ones, and so on.

    x: a matrix, of any dtype.
    groups: into how many groups of consecutive columns it is divided; a divisor of the size.
    axis: -1 for columns, -2 for rows in their place.

    Returns: an array of the same shape and dtype. With size / groups in place of `groups` it is undone."""
    if axis == -2:
        return collect(x.T, groups, -1).T
    return x.reshape(x.shape[0], groups, x.shape[1] // groups).swapaxes(1, 2).reshape(x.shape)


COUNTED = 256  # neighbours that are counted by one small product
# Places times numbers, for each of which counting takes eight bytes; float32 has all integers up to there.
MOST_COUNTED = 2**24


def stable_order(numbers_T: jax.Array, count: int) -> jax.Array:
    """The order that sorts small numbers; of equal ones the first stays first.

    On CUDA it counts, unless that would take much memory: how many of each number stand before a place is a
    product with a triangle of ones, and sums over blocks of places. That takes a few small kernels, where a
    sort takes several passes.

    numbers_T: int32 (T,), from 0 to count - 1.
    count: how many numbers there are.

    Returns: int32 (T,), `jnp.argsort(numbers_T, stable=True)`."""

    def sorted_order(numbers_T):
        return shards.varying_as(jnp.argsort(numbers_T, stable=True).astype(jnp.int32), numbers_T)

    if numbers_T.size * count >= MOST_COUNTED:
        return sorted_order(numbers_T)
    return jax.lax.platform_dependent(
        numbers_T, cuda=partial(counted_order, count=count), default=sorted_order
    )


def counted_order(numbers_T: jax.Array, count: int) -> jax.Array:
    """What `stable_order` computes on CUDA.

    numbers_T, count: as in `stable_order`, T below 2^24.

    Returns: int32 (T,), the same."""
    T = numbers_T.size
    blocks_nb = jnp.pad(numbers_T, (0, -T % COUNTED), constant_values=count).reshape(-1, COUNTED)
    is_nbk = (blocks_nb[..., None] == jnp.arange(count)).astype(jnp.float32)
    before_bb = jnp.tri(COUNTED, k=-1, dtype=jnp.float32)
    within_nbk = jnp.einsum("ij,njk->nik", before_bb, is_nbk)  # exact in any precision: zeros and ones
    of_block_nk = is_nbk.sum(1)
    until_nk, all_k = jnp.cumsum(of_block_nk, axis=0), of_block_nk.sum(0)
    first_k = jnp.cumsum(all_k) - all_k
    places_nbk = within_nbk + (first_k + until_nk - of_block_nk)[:, None]
    places_T = jnp.where(is_nbk == 1, places_nbk, 0).sum(-1).astype(jnp.int32).reshape(-1)[:T]
    return shards.varying_as(inverse_of(places_T, T), numbers_T)


@jax.custom_vjp
def permute(x_Tn: jax.Array, order_R: jax.Array, inverse_T: jax.Array) -> jax.Array:
    """Tokens in another order, with tokens of zeros between them where groups are filled up.

    `permute(y, inverse_T, order_R)` undoes it. The derivative is a gather too.

    x_Tn: (T, n), of any dtype.
    order_R: int32 (R,), R >= T; it holds every number below T once, and T itself for a token of zeros.
    inverse_T: int32 (T,), `inverse_of(order_R, T)`.

    Returns: an array (R, n) of the same dtype."""
    return _rows(x_Tn, order_R)


def _rows(x_Tn, order_R):
    if order_R.size <= x_Tn.shape[0]:
        return x_Tn[order_R]
    return jnp.take(x_Tn, order_R, axis=0, mode="fill", fill_value=0)


permute.defvjp(
    lambda x_Tn, order_R, inverse_T: (_rows(x_Tn, order_R), inverse_T),
    lambda inverse_T, ct_Rn: (_rows(ct_Rn, inverse_T), None, None),
)


def inverse_of(order_R: jax.Array, T: int) -> jax.Array:
    """The places of the tokens in an order, for `permute`.

    order_R: int32 (R,), as `permute` takes it.
    T: the number of tokens.

    Returns: int32 (T,), the place of each number below T in `order_R`."""
    places = jnp.arange(order_R.size, dtype=order_R.dtype)
    return jnp.zeros(T, order_R.dtype).at[order_R].set(places, mode="drop")
