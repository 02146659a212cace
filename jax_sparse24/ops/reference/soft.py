"""Soft thresholds, times a scale (S-STE, 2409.09099)."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import (
    FORMATS,
    GROUP,
    any_of,
    bits,
    compute_format,
    flush,
    is_nan,
    join_floats,
    key,
    magnitude_bits,
    rank_below_two,
    select,
    split_floats,
    with_sign,
)
from jax_sparse24.ops.reference.packed24 import pack24


def soft24(x, scale, axis):
    return scaled(threshold24(x, axis), scale)


def soft_pack24(x, scale, axis):
    values, metadata = pack24(threshold24(x, axis), axis)
    return scaled(values, scale), metadata


def scaled(y, scale):
    """Results times a scale. The product is computed in float32, in which subnormals count as zero, with its
    sign, and rounded once. A NaN passes with its bits; another NaN has all bits set but the sign.

    y: results of a soft threshold, any shape.
    scale: a scalar of the same dtype.

    Returns: an array of y's shape and dtype."""
    fmt, own = compute_format(y.dtype), FORMATS[y.dtype]
    made = y.astype(fmt.dtype) * flush(scale.astype(fmt.dtype))
    small = magnitude_bits(made) < fmt.uint(1 << fmt.mantissa)
    words = jnp.where(small, (bits(y) ^ bits(scale)) & own.uint(own.sign), bits(made.astype(y.dtype)))
    other = jnp.where(is_nan(y), bits(y), own.uint(own.sign - 1))
    return lax.bitcast_convert_type(jnp.where(is_nan(made), other, words), y.dtype)


def threshold24(x, axis):
    fmt = compute_format(x.dtype)
    inputs = split_floats(x, axis)
    members = [m.astype(fmt.dtype) for m in inputs]
    a = [flush(jnp.abs(m)) for m in members]
    # Integer minima and maxima order NaN and Inf too and never flush.
    k = [key(m) for m in a]
    low = jnp.minimum(jnp.maximum(k[0], k[1]), jnp.maximum(k[2], k[3]))
    threshold_key = jnp.minimum(jnp.maximum(jnp.minimum(k[0], k[1]), jnp.minimum(k[2], k[3])), low)
    infinite = threshold_key >= fmt.uint(fmt.infinity << 1)
    threshold = jnp.where(infinite, 0, lax.bitcast_convert_type(threshold_key >> 1, fmt.dtype))
    kept = rank_below_two(k)
    has_nan = any_of([is_nan(m) for m in members])
    out = []
    for i in range(GROUP):
        finite = magnitude_bits(a[i]) < fmt.uint(fmt.infinity)
        r = flush(jnp.where(finite & ~infinite, a[i] - threshold, 0))
        r = jnp.where(k[i] > threshold_key, r, 0)
        y = with_sign(r, members[i]).astype(x.dtype)
        passes = jnp.where(has_nan, is_nan(members[i]), ~finite) & kept[i]
        y = jnp.where(has_nan, jnp.zeros_like(y), y)
        out.append(select(passes, inputs[i], y))
    return join_floats(out, axis)
