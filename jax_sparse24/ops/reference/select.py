"""Which elements to keep, and arrays in which the others are zero."""

import jax.numpy as jnp

from jax_sparse24.ops.reference.bits import join, key, rank_below_two, select, split_floats


def mask24(x, axis):
    return join(rank_below_two([key(m) for m in split_floats(x, axis)]), axis)


def mask_nm(x, n, m, axis):
    place = x.ndim + axis
    groups = key(x).reshape(*x.shape[:place], x.shape[place] // m, m, *x.shape[place + 1 :])
    rank = jnp.argsort(jnp.argsort(~groups, axis=place + 1), axis=place + 1)  # stable: the lower index first
    return (rank < n).reshape(x.shape)


def prune24(x, axis):
    return select(mask24(x, axis), x)


def double_prune24(w, axis):
    return prune24(prune24(w, axis), -3 - axis)
