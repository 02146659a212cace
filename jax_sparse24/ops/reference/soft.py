"""Soft thresholds (S-STE, 2409.09099)."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import (
    GROUP,
    any_of,
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


def soft24(x, axis):
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
