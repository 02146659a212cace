"""Packing V:2:M arrays and unpacking them.

An array is seen as blocks (..., blocks, V, groups, M), whatever the axis of its columns."""

import itertools

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference import packed24
from jax_sparse24.ops.reference.bits import (
    bits,
    compute_format,
    flush,
    is_nan,
    key,
    magnitude_bits,
    rank_below_two,
    scaled_scores,
)

LANES = 16  # partial sums of a column


def _blocks(x, v, m, axis):
    """Elements that only move are given as integers: `bits` says why."""
    x = x if axis == -1 else jnp.swapaxes(x, -1, -2)
    *lead, rows, depth = x.shape
    return x.reshape(*lead, rows // v, v, depth // m, m)


def _unblock(blocks, axis):
    *lead, n, v, groups, m = blocks.shape
    x = blocks.reshape(*lead, n * v, groups * m)
    return x if axis == -1 else jnp.swapaxes(x, -1, -2)


def _float_blocks(x, v, m, axis):
    return lax.bitcast_convert_type(_blocks(bits(x), v, m, axis), x.dtype)


def _sum_rows(addends):
    """Sum over the V rows, axis -3, in the order that all implementations share: partial sum l adds rows l,
    l + 16, ...; the 16 are added by halves."""
    *lead, v, groups, m = addends.shape
    lanes = addends.reshape(*lead, v // LANES, LANES, groups, m)
    sums = lanes[..., 0, :, :, :]
    for i in range(1, v // LANES):
        sums = sums + lanes[..., i, :, :, :]
    half = LANES // 2
    while half:
        sums = sums[..., :half, :, :] + sums[..., half:, :, :]
        half //= 2
    return sums[..., 0, :, :]


def _column_keys(blocks, allowed):
    """Integers (..., blocks, groups, M) that order columns: by whether any element is allowed, then by their
    sum of magnitudes, then, for columns of subnormals, by the largest."""
    fmt = compute_format(blocks.dtype)
    wide = blocks.astype(fmt.dtype)
    magnitudes = magnitude_bits(wide)
    if allowed is not None:
        magnitudes = jnp.where(allowed, magnitudes, 0)
    sums = _sum_rows(flush(lax.bitcast_convert_type(magnitudes, fmt.dtype)))
    keys = jnp.where(is_nan(sums), fmt.uint(fmt.sign - 1), magnitude_bits(sums))
    keys = jnp.where(keys == 0, jnp.max(magnitudes, axis=-3, initial=0), keys)
    return keys if allowed is None else keys | jnp.where(jnp.any(allowed, axis=-3), fmt.uint(fmt.sign), 0)


def _largest_four(keys):
    """Positions (..., 4) of the four largest along the last axis, ascending; ties go to the lower one."""
    mine, other = keys[..., :, None], keys[..., None, :]
    lower = jnp.arange(keys.shape[-1])[None, :] < jnp.arange(keys.shape[-1])[:, None]
    ahead = jnp.where(lower, other >= mine, other > mine)
    stays = jnp.sum(ahead, axis=-1) < 4
    return jnp.argsort(~stays, axis=-1, stable=True)[..., :4].astype(jnp.uint8)


def _searched_columns(blocks):
    """The first set of four columns, in lexicographic order, whose kept magnitudes add up to most."""
    fmt = compute_format(blocks.dtype)
    magnitudes = magnitude_bits(blocks.astype(fmt.dtype))
    scores = scaled_scores(magnitudes, (-3, -1), fmt, nan=1024.0, infinity=1.0)
    sets = jnp.asarray(list(itertools.combinations(range(blocks.shape[-1]), 4)), jnp.uint8)

    def better(i, best):
        score, columns = best
        a, b, c, d = jnp.moveaxis(jnp.take(scores, sets[i], axis=-1), -1, 0)
        high = jnp.maximum(a, b), jnp.maximum(c, d)
        low = jnp.maximum(jnp.minimum(a, b), jnp.minimum(c, d))
        kept = jnp.maximum(*high) + jnp.maximum(jnp.minimum(*high), low)
        total = _sum_rows(kept[..., None])[..., 0]
        wins = total > score
        return jnp.where(wins, total, score), jnp.where(wins[..., None], sets[i], columns)

    shape = (*blocks.shape[:-3], blocks.shape[-2])
    start = jnp.full(shape, -1, fmt.dtype), jnp.zeros((*shape, 4), jnp.uint8)
    return lax.fori_loop(0, len(sets), better, start)[1]


def _chosen(blocks, columns):
    """The elements (..., blocks, V, groups, 4) of the columns that stay, by bits or as booleans."""
    index = jnp.minimum(columns, blocks.shape[-1] - 1)[..., None, :, :].astype(jnp.int32)
    return jnp.take_along_axis(blocks, jnp.broadcast_to(index, (*blocks.shape[:-1], 4)), axis=-1)


def _spread(four, columns, m):
    """Inverse of `_chosen`: zeros elsewhere. Of equal columns, which no packing has, the last counts."""
    index = jnp.minimum(columns, m - 1)[..., None, :, :]
    out = jnp.zeros((*four.shape[:-1], m), four.dtype)
    for k in range(4):
        here = index[..., k, None] == jnp.arange(m, dtype=jnp.uint8)
        out = jnp.where(here, four[..., k, None], out)
    return out


def _columns(x, v, m, axis, exact, allowed=None):
    blocks = _float_blocks(x, v, m, axis)
    if exact:
        return _searched_columns(blocks)
    return _largest_four(_column_keys(blocks, allowed))


def _four(x, columns, v, m, axis):
    """The chosen columns as a matrix (..., R, 4 K / M), whose groups of four are those of a 2:4 array."""
    chosen = _chosen(_blocks(x if x.dtype == jnp.bool_ else bits(x), v, m, axis), columns)
    flat = _unblock(chosen, -1)
    return flat if x.dtype == jnp.bool_ else lax.bitcast_convert_type(flat, x.dtype)


def vnm_mask(x, v, m, axis, exact):
    columns = _columns(x, v, m, axis, exact)
    four = _float_blocks(_four(x, columns, v, m, axis), v, 4, -1)
    keep = jnp.stack(rank_below_two([key(four[..., i]) for i in range(4)]), axis=-1)
    return _unblock(_spread(keep, columns, m), axis)


def pack_vnm(x, v, m, axis, exact):
    columns = _columns(x, v, m, axis, exact)
    return *packed24.pack24(_four(x, columns, v, m, axis), -1), columns


def pack_vnm_masked(x, mask, v, m, axis):
    columns = _columns(x, v, m, axis, False, _blocks(mask, v, m, axis))
    four, allowed = (_four(y, columns, v, m, axis) for y in (x, mask))
    return *packed24.pack24_masked(four, allowed, -1), columns


def unpack_vnm(values, metadata, columns, v, m, axis):
    four = packed24.unpack24(values, metadata, -1)
    blocks = _spread(_blocks(bits(four), v, 4, -1), columns, m)
    return lax.bitcast_convert_type(_unblock(blocks, axis), four.dtype)


def gather_vnm(x, metadata, columns, v, m, axis):
    """The values of `x` at the positions that metadata and columns name."""
    return packed24.gather24(_four(x, columns, v, m, axis), metadata, -1)
