"""Soft thresholds: 2:4 arrays that are continuous in what they are made of."""

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch.operation import Kernel, Operation, Reverse, like, trailing
from jax_sparse24.ops.packed24 import UNPACK24, Packed24
from jax_sparse24.ops.reference import soft as reference
from jax_sparse24.ops.reference.bits import join, key, rank_below_two, split


def soft24(x: jax.typing.ArrayLike, axis: int, *, implementation: str | None = None) -> jax.Array:
    """Soft-thresholded 2:4: `sign(x) max(|x| - t, 0)`, `t` the second-smallest magnitude of each group.

    It is continuous in `x`, has at most two non-zeros per group, and is not rescaled. It is computed in
    float32, whose subnormals count as zero. NaN passes and zeroes the rest of its group; Inf passes. The
    derivative is the true one almost everywhere, through the threshold too; S-STE trains with a
    straight-through gradient instead, which `methods` applies.

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16 or float16.
    axis: along which elements are grouped.
    implementation: as in `mask24`.

    Returns: an array of x's shape and dtype.
    Raises: as `mask24`.
    Source: S-STE, 2409.09099."""
    x = patterns.as_array("soft24", "x", x)
    axis = patterns.check_grouped("soft24", x, axis)
    return scaled_soft24(x, jnp.ones((), x.dtype), axis, implementation)


def scaled_soft24(x, scale, axis: int, implementation: str | None = None) -> jax.Array:
    """`soft24` times a scale, in one pass. Differentiable in `x`; the scale is a constant.

    x, axis, implementation: as in `soft24`, the axis counted from the end.
    scale: a scalar of x's dtype.

    Returns: an array of x's shape and dtype."""
    return SOFT24(x, scale, axis=axis, implementation=implementation)


def soft_pack24(x, scale, axis: int, implementation: str | None = None) -> Packed24:
    """`scaled_soft24`, packed in the same pass: of every four the two that the threshold leaves.
    Differentiable in reverse mode in `x`; the scale is a constant.

    x, scale, axis, implementation: as in `scaled_soft24`.

    Returns: a Packed24."""
    return Packed24(*SOFT_PACK24(x, scale, axis=axis, implementation=implementation), axis)


def _soft_jvp(primals, tangents, *, axis, implementation):
    (x, scale), (dx, _) = primals, tangents
    y = SOFT24(x, scale, axis=axis, implementation=implementation)
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
    return y, jnp.where(y != 0, join(slopes, axis) * scale, jnp.zeros_like(dx))


def _soft_pack_backward(saved, cotangents, *, axis, implementation):
    x, scale, metadata = saved
    options = {"axis": axis, "implementation": implementation}
    _, soft_vjp = jax.vjp(lambda x: SOFT24(x, scale, **options), x)
    return *soft_vjp(UNPACK24(cotangents[0], metadata, **options)), None


SOFT24 = Operation("soft24", reference.soft24, kernel=Kernel("s24_soft", like, trailing), jvp=_soft_jvp)
SOFT_PACK24 = Operation(
    "soft24",
    reference.soft_pack24,
    kernel=Kernel("s24_soft_pack", lambda x, scale, axis: Packed24.types(x, axis), trailing),
    vjp=Reverse(lambda operands, results, **_: (*operands, results[1]), _soft_pack_backward),
)
