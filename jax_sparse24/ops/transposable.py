"""Masks that are 2:4 along both axes of a matrix, and matrices packed by them."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import decide, run
from jax_sparse24.ops.packed24 import (
    Packed24,
    _both_kernel,
    _both_reference,
    _both_types,
    _of_both,
    _pack_masked_both_bwd,
)
from jax_sparse24.ops.reference import transposable as reference
from jax_sparse24.ops.select import like


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


_greedy = partial(jax.jit, inline=True)(reference.greedy_transposable_mask24)


@partial(jax.jit, static_argnums=(1,), inline=True)
def _transposable(w, implementation):
    search = reference.transposable_mask24
    return run("transposable_mask24", w.dtype, implementation, search_kernel, search, w)


def search_kernel(w):
    return native.call("s24_transposable_mask", like(w, jnp.bool_), w)


def transposable_pack24(w, *, implementation: str | None = None) -> tuple[jax.Array, Packed24, Packed24]:
    """`transposable_mask24(w)`, and `w` packed by it along axis -1 and along axis -2; on CUDA from one pass
    over `w`.

    w: as there, and the same errors. Both packed arrays are differentiable in `w`, at kept positions."""
    w = patterns.as_array("transposable_pack24", "w", w)
    patterns.check_matrix("transposable_pack24", w)
    return _transposable_pack(w, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
@partial(jax.jit, static_argnums=(1,), inline=True)
def _transposable_pack(w, implementation):
    def one_pass(w):
        types = (jax.ShapeDtypeStruct(w.shape, jnp.bool_), *_both_types(w))
        mask, *packed = native.call("s24_transposable_pack", types, w)
        return mask, *_of_both(*packed)

    def search_first(search, pack, w):
        mask = search(w)
        return mask, *pack(w, mask)

    def kernel(w):
        two_kernels = partial(search_first, search_kernel, _both_kernel)
        return jax.lax.platform_dependent(w, cuda=one_pass, default=two_kernels)

    fallback = partial(search_first, reference.transposable_mask24, _both_reference)
    return run("transposable_pack24", w.dtype, implementation, kernel, fallback, w)


def _transposable_pack_fwd(w, implementation):
    mask, *packed = _transposable_pack(w, implementation)
    return (mask, *packed), ([p.metadata for p in packed], mask)


def _transposable_pack_bwd(implementation, residuals, cts):
    return _pack_masked_both_bwd(implementation, residuals, cts[1:])[:1]


_transposable_pack.defvjp(_transposable_pack_fwd, _transposable_pack_bwd)
