"""Soft thresholds: 2:4 arrays that are continuous in what they are made of."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import run
from jax_sparse24.ops.reference import soft as reference
from jax_sparse24.ops.reference.bits import join, key, rank_below_two, split
from jax_sparse24.ops.select import like


def soft24(x, axis: int, *, implementation: str | None = None) -> jax.Array:
    """Soft-thresholded 2:4: `sign(x) max(|x| - t, 0)`, `t` the second-smallest magnitude of each group
    (S-STE, 2409.09099).

    Shapes, dtypes and errors as `mask24`; no rescaling. Continuous in `x`; at most two non-zeros per group.
    Computed in float32, whose subnormals count as zero. NaN passes and zeroes the rest of its group; Inf
    passes. The derivative is the true one almost everywhere, through the threshold too; S-STE trains with a
    straight-through gradient instead, which `methods` applies."""
    x = patterns.as_array("soft24", "x", x)
    return _soft(x, patterns.check_grouped("soft24", x, axis), implementation)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _soft(x, axis, implementation):
    def kernel(x):
        return native.call("s24_soft", like(x), x, trailing=-1 - axis)

    return run("soft24", x.dtype, implementation, kernel, lambda x: reference.soft24(x, axis), x)


@_soft.defjvp
def _soft_jvp(axis, implementation, primals, tangents):
    (x,), (dx,) = primals, tangents
    y = _soft(x, axis, implementation)
    members, slopes = split(x, axis), split(dx, axis)
    slopes = [jnp.where(jnp.signbit(m), -s, s) for m, s in zip(members, slopes, strict=True)]  # of |x|
    # The threshold is the largest magnitude outside the top two; at zero it has no slope.
    kept = rank_below_two([key(m) for m in members])
    top, threshold_slope = jnp.zeros_like(key(members[0])), jnp.zeros_like(slopes[0])
    for m, k, s in zip(members, kept, slopes, strict=True):
        larger = ~k & (key(m) > top)
        top, threshold_slope = jnp.where(larger, key(m), top), jnp.where(larger, s, threshold_slope)
    slopes = [s - threshold_slope for s in slopes]
    slopes = [jnp.where(jnp.signbit(m), -s, s) for m, s in zip(members, slopes, strict=True)]
    return y, jnp.where(y != 0, join(slopes, axis), jnp.zeros_like(dx))
