"""Which elements to keep: boolean masks."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import decide, run
from jax_sparse24.ops.reference import select, transposable


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

    return run("mask24", x.dtype, implementation, kernel, lambda x: select.mask24(x, axis), x)


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


_mask_nm = partial(jax.jit, static_argnums=(1, 2, 3), inline=True)(select.mask_nm)


def transposable_mask24(w, exact: bool = True, *, implementation: str | None = None) -> jax.Array:
    """Mask that is 2:4 along both of the last two axes and keeps the most |w| in every 4x4 tile.

    w: (..., rows, columns), both multiples of 4; float32, bfloat16, float16. Returns bool of the same shape.
    exact=True finds the best of the 90 tiles with two per row and two per column (2102.08124; 2404.01847,
    section 5); scores are float32 sums `(row 0 + row 1) + (row 2 + row 3)` and ties go to the tile that keeps
    lower columns in upper rows. In a tile with NaN or Inf as many of these as possible are kept. exact=False
    takes the entries of a tile in descending |w|, ties from the lower row-major index on, wherever row and
    column still have room (2102.08124's 2-approximation): of a tile it may keep seven only, and there is no
    kernel for it. Not differentiable (no gradient flows). Raises like `mask24`."""
    patterns.check_flag("transposable_mask24", "exact", exact)
    w = patterns.as_array("transposable_mask24", "w", w)
    patterns.check_matrix("transposable_mask24", w)
    w = lax.stop_gradient(w)
    if exact:
        return _transposable(w, implementation)
    decide("transposable_mask24 with exact=False", w.dtype, implementation)
    return _greedy(w)


_greedy = partial(jax.jit, inline=True)(transposable.greedy_transposable_mask24)


@partial(jax.jit, static_argnums=(1,), inline=True)
def _transposable(w, implementation):
    search = transposable.transposable_mask24
    return run("transposable_mask24", w.dtype, implementation, search_kernel, search, w)


def search_kernel(w):
    return native.call("s24_transposable_mask", like(w, jnp.bool_), w)
