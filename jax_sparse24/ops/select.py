"""Which elements to keep: boolean masks, and arrays in which the others are zero."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import decide, run
from jax_sparse24.ops.reference import select as reference


def like(x, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def mask24(x, axis: int, *, implementation: str | None = None) -> jax.Array:
    """Keep mask of the two largest |x| in every four consecutive elements along `axis`.

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16, float16. Returns bool of the same shape,
    exactly two per group: ties keep the lower index, NaN outranks everything, a subnormal outranks zero. Not
    differentiable (no gradient flows). Raises TypeError (dtype, axis type), ValueError (axis, size not a
    multiple of 4), RuntimeError (implementation)."""
    x = patterns.as_array("mask24", "x", x)
    return _mask(lax.stop_gradient(x), patterns.check_grouped("mask24", x, axis), implementation)


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _mask(x, axis, implementation):
    def kernel(x):
        return native.call("s24_mask", like(x, jnp.bool_), x, trailing=-1 - axis)

    return run("mask24", x.dtype, implementation, kernel, lambda x: reference.mask24(x, axis), x)


def mask_nm(x, n: int, m: int, axis: int, *, implementation: str | None = None) -> jax.Array:
    """Keep mask of the n largest |x| in every m consecutive elements along `axis`.

    x: any shape whose `axis` is a multiple of m; 1 <= n <= m. Dtypes, ties, NaN and errors as `mask24`, which
    it is for 2:4; of the others there is only the reference, and no hardware packs them."""
    patterns.check_nm("mask_nm", n, m)
    x = patterns.as_array("mask_nm", "x", x)
    axis = patterns.negative_axis("mask_nm", x.shape, axis)
    patterns.check_divides("mask_nm", x.shape, axis, m)
    x = lax.stop_gradient(x)
    if (n, m) == (patterns.KEPT, patterns.GROUP):
        return _mask(x, axis, implementation)
    decide("mask_nm", x.dtype, implementation)
    return _mask_nm(x, int(n), int(m), axis)


_mask_nm = partial(jax.jit, static_argnums=(1, 2, 3), inline=True)(reference.mask_nm)


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

    return run("prune24", x.dtype, implementation, kernel, lambda x: reference.prune24(x, axis), x)


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

    return run(
        "double_prune24", w.dtype, implementation, kernel, lambda w: reference.double_prune24(w, axis), w
    )


@_double_prune.defjvp
def _double_prune_jvp(axis, implementation, primals, tangents):
    (w,), (dw,) = primals, tangents
    first = mask24(w, axis, implementation=implementation)
    once = jnp.where(first, w, jnp.zeros_like(w))
    mask = first & mask24(once, -3 - axis, implementation=implementation)
    return jnp.where(mask, w, jnp.zeros_like(w)), jnp.where(mask, dw, jnp.zeros_like(dw))
