"""Dense arrays with a 2:4 support: hard and soft pruning."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import run
from jax_sparse24.ops.mask import _mask, like, mask24
from jax_sparse24.ops.reference import select, soft
from jax_sparse24.ops.reference.bits import join, key, rank_below_two, split


def prune24(x, axis: int, *, implementation: str | None = None) -> jax.Array:
    """`x` where `mask24(x, axis)` holds, else +0.

    Shapes, dtypes and errors as `mask24`. Kept elements keep their bits; a pruned NaN or Inf leaves no trace.
    Derivative: that of the kept elements, in both modes."""
    x = patterns.as_array("prune24", "x", x)
    return _prune(x, patterns.check_grouped("prune24", x, axis), implementation)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _prune(x, axis, implementation):
    def kernel(x):
        return native.call("s24_prune", like(x), x, trailing=-1 - axis)

    return run("prune24", x.dtype, implementation, kernel, lambda x: select.prune24(x, axis), x)


@_prune.defjvp
def _prune_jvp(axis, implementation, primals, tangents):
    (x,), (dx,) = primals, tangents
    mask = _mask(jax.lax.stop_gradient(x), axis, implementation)
    return jnp.where(mask, x, jnp.zeros_like(x)), jnp.where(mask, dx, jnp.zeros_like(dx))


def double_prune24(w, axis: int, *, implementation: str | None = None) -> jax.Array:
    """`w` pruned 2:4 along `axis`, then pruned again along the other of the last two axes (SLoPe,
    2405.16325).

    w: (..., rows, columns), both multiples of 4; `axis` is one of the last two. Dtypes, errors and derivative
    as `prune24`. Of random weights 40.6 % stay."""
    w = patterns.as_array("double_prune24", "w", w)
    patterns.check_matrix("double_prune24", w)
    axis = patterns.negative_axis("double_prune24", w.shape, axis)
    if axis < -2:
        raise ValueError(
            f"double_prune24: axis must be one of the last two, got axis {axis} of shape {w.shape}."
        )
    return _double_prune(w, axis, implementation)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _double_prune(w, axis, implementation):
    def kernel(w):
        return native.call("s24_double_prune", like(w), w, first=axis + 2)

    return run("double_prune24", w.dtype, implementation, kernel, lambda w: select.double_prune24(w, axis), w)


@_double_prune.defjvp
def _double_prune_jvp(axis, implementation, primals, tangents):
    (w,), (dw,) = primals, tangents
    first = mask24(w, axis, implementation=implementation)
    once = jnp.where(first, w, jnp.zeros_like(w))
    mask = first & mask24(once, -3 - axis, implementation=implementation)
    return jnp.where(mask, w, jnp.zeros_like(w)), jnp.where(mask, dw, jnp.zeros_like(dw))


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

    return run("soft24", x.dtype, implementation, kernel, lambda x: soft.soft24(x, axis), x)


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
