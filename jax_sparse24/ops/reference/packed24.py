"""Packing 2:4 arrays and unpacking them, and the squared ReLU that is packed in the same pass."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import (
    GROUP,
    bits,
    compute_format,
    flush,
    is_nan,
    join_floats,
    key,
    rank_below_two,
    select,
    split,
    split_floats,
)


def _positions(keep):
    """First and second kept index of each group, from four masks of which exactly two hold."""
    first = jnp.where(keep[0], 0, jnp.where(keep[1], 1, 2)).astype(jnp.uint8)
    second = jnp.where(keep[3], 3, jnp.where(keep[2], 2, 1)).astype(jnp.uint8)
    return first, second


def bytes_of(nibbles):
    if nibbles.shape[-1] % 2:
        nibbles = jnp.pad(nibbles, [(0, 0)] * (nibbles.ndim - 1) + [(0, 1)], constant_values=4)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def nibbles_of(metadata, groups):
    halves = jnp.stack([metadata & 15, metadata >> 4], axis=-1)
    return halves.reshape(*metadata.shape[:-1], 2 * metadata.shape[-1])[..., :groups]


def _pick(members, index):
    return select(
        index == 0,
        members[0],
        select(index == 1, members[1], select(index == 2, members[2], members[3])),
    )


def _pack(members, keep, axis):
    first, second = _positions(keep)
    metadata = bytes_of(jnp.moveaxis(first | second << 2, axis, -1))
    values = jnp.moveaxis(join_floats([_pick(members, first), _pick(members, second)], axis), axis, -1)
    return values, metadata


def pack24(x, axis):
    members = split_floats(x, axis)
    return _pack(members, rank_below_two([key(m) for m in members]), axis)


def pack24_masked(x, mask, axis):
    members, allowed = split_floats(x, axis), split(mask, axis)
    keys = [key(m) for m in members]
    keep = []
    for i in range(GROUP):
        ahead = []
        for j in range(GROUP):
            if j == i:
                continue
            beats = keys[j] >= keys[i] if j < i else keys[j] > keys[i]
            ahead.append(jnp.where(allowed[i] == allowed[j], beats, allowed[j]).astype(jnp.uint8))
        keep.append(sum(ahead) < 2)
    kept = [select(a, m) for m, a in zip(members, allowed, strict=True)]
    return _pack(kept, keep, axis)


def _unpack_positions(metadata, groups):
    nibbles = nibbles_of(metadata, groups)
    return nibbles & 3, nibbles >> 2


def unpack24(values, metadata, axis):
    first, second = _unpack_positions(metadata, values.shape[-1] // 2)
    v0, v1 = (lax.bitcast_convert_type(bits(values)[..., i::2], values.dtype) for i in range(2))
    members = [select(first == i, v0, select(second == i, v1)) for i in range(GROUP)]
    return jnp.moveaxis(join_floats(members, -1), -1, axis)


def gather24(x, metadata, axis):
    """The values of `x` at the positions that `metadata` names."""
    members = [jnp.moveaxis(m, axis, -1) for m in split_floats(x, axis)]
    first, second = _unpack_positions(metadata, members[0].shape[-1])
    return join_floats([_pick(members, first), _pick(members, second)], -1)


def squared_relu(x):
    fmt = compute_format(x.dtype)
    y = x.astype(fmt.dtype)
    a = jnp.where(bits(y) < fmt.uint(fmt.sign), flush(y), 0)
    return select(is_nan(x), x, flush(a * a).astype(x.dtype))


def squared_relu24(x, axis):
    return pack24(squared_relu(x), axis)
