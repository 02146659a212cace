"""Which elements to keep: boolean masks, and arrays in which the others are zero."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch.operation import Kernel, Operation, like, mask_like, trailing
from jax_sparse24.ops.reference import select as reference


def mask24(x: jax.typing.ArrayLike, axis: int, *, implementation: str | None = None) -> jax.Array:
    """Keep mask of the two largest |x| in every four consecutive elements along an axis.

    Ties keep the lower index, NaN outranks everything, and a subnormal outranks zero. No gradient flows.

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16 or float16.
    axis: along which elements are grouped.
    implementation: None to choose, or "reference", "ffi" or "cusparselt".

    Returns: bool, x's shape, exactly two per group.
    Raises: TypeError (dtype, axis type), ValueError (axis, size not a multiple of 4), RuntimeError
        (implementation).
    Source: 2104.08378."""
    x = patterns.as_array("mask24", "x", x)
    axis = patterns.check_grouped("mask24", x, axis)
    return MASK24(lax.stop_gradient(x), axis=axis, implementation=implementation)


MASK24 = Operation("mask24", reference.mask24, kernel=Kernel("s24_mask", mask_like, trailing))


def mask_nm(
    x: jax.typing.ArrayLike, n: int, m: int, axis: int, *, implementation: str | None = None
) -> jax.Array:
    """Keep mask of the n largest |x| in every m consecutive elements along an axis.

    For 2:4 it is `mask24`. For other patterns there is only the reference, and no hardware packs them.

    x: any shape whose `axis` is a multiple of m; dtypes, ties and NaN as in `mask24`.
    n, m: how many of how many elements are kept, 1 <= n <= m.
    axis: along which elements are grouped.
    implementation: as in `mask24`.

    Returns: bool, x's shape.
    Raises: as `mask24`; TypeError or ValueError for n and m."""
    patterns.check_nm("mask_nm", n, m)
    x = patterns.as_array("mask_nm", "x", x)
    axis = patterns.negative_axis("mask_nm", x.shape, axis)
    patterns.check_divides("mask_nm", x.shape, axis, m)
    x = lax.stop_gradient(x)
    if (n, m) == (patterns.KEPT, patterns.GROUP):
        return MASK24(x, axis=axis, implementation=implementation)
    return MASK_NM(x, n=int(n), m=int(m), axis=axis, implementation=implementation)


MASK_NM = Operation("mask_nm", reference.mask_nm)


def prune24(x: jax.typing.ArrayLike, axis: int, *, implementation: str | None = None) -> jax.Array:
    """`x` where `mask24(x, axis)` holds, else +0.

    Kept elements keep their bits; a pruned NaN or Inf leaves no trace. The derivative is that of the kept
    elements, in both modes.

    x, axis, implementation: as in `mask24`.

    Returns: an array of x's shape and dtype.
    Raises: as `mask24`.
    Source: 2104.08378."""
    x = patterns.as_array("prune24", "x", x)
    axis = patterns.check_grouped("prune24", x, axis)
    return PRUNE24(x, axis=axis, implementation=implementation)


def _prune_jvp(primals, tangents, *, axis, implementation):
    (x,), (dx,) = primals, tangents
    mask = MASK24(lax.stop_gradient(x), axis=axis, implementation=implementation)
    return jnp.where(mask, x, jnp.zeros_like(x)), jnp.where(mask, dx, jnp.zeros_like(dx))


PRUNE24 = Operation("prune24", reference.prune24, kernel=Kernel("s24_prune", like, trailing), jvp=_prune_jvp)


def double_prune24(w: jax.typing.ArrayLike, axis: int, *, implementation: str | None = None) -> jax.Array:
    """`w` pruned 2:4 along an axis, then pruned again along the other of its last two axes.

    Of random weights 40.6 % stay. The derivative is that of `prune24`.

    w: (..., rows, columns), both multiples of 4; dtypes as in `mask24`.
    axis: that of the first cut, one of the last two.
    implementation: as in `mask24`.

    Returns: an array of w's shape and dtype.
    Raises: as `mask24`; ValueError for another axis.
    Source: SLoPe, 2405.16325."""
    w = patterns.as_array("double_prune24", "w", w)
    patterns.check_matrix("double_prune24", w)
    axis = patterns.negative_axis("double_prune24", w.shape, axis)
    if axis < -2:
        raise ValueError(
            f"double_prune24: axis must be one of the last two, got axis {axis} of shape {w.shape}."
        )
    return DOUBLE_PRUNE24(w, axis=axis, implementation=implementation)


def _double_prune_jvp(primals, tangents, *, axis, implementation):
    (w,), (dw,) = primals, tangents
    first = mask24(w, axis, implementation=implementation)
    once = jnp.where(first, w, jnp.zeros_like(w))
    mask = first & mask24(once, -3 - axis, implementation=implementation)
    return jnp.where(mask, w, jnp.zeros_like(w)), jnp.where(mask, dw, jnp.zeros_like(dw))


DOUBLE_PRUNE24 = Operation(
    "double_prune24",
    reference.double_prune24,
    kernel=Kernel("s24_double_prune", like, lambda axis: {"first": axis + 2}),
    jvp=_double_prune_jvp,
)
