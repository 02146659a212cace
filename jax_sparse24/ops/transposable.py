"""Masks that are 2:4 along both axes of a matrix, and matrices packed by them."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch.operation import Kernel, Operation, Reverse, mask_like
from jax_sparse24.ops.packed24 import (
    PACK24_MASKED_BOTH,
    Packed24,
    along_both,
    both_types,
    masked_both_backward,
)
from jax_sparse24.ops.reference import transposable as reference


def transposable_mask24(
    w: jax.typing.ArrayLike, exact: bool = True, *, implementation: str | None = None
) -> jax.Array:
    """Mask that is 2:4 along both of the last two axes and keeps the most |w| in every 4x4 tile.

    Scores of tiles are float32 sums `(row 0 + row 1) + (row 2 + row 3)`, and ties go to the tile that keeps
    lower columns in upper rows. In a tile with NaN or Inf as many of these as possible are kept. No gradient
    flows.

    w: (..., rows, columns), both multiples of 4; float32, bfloat16 or float16.
    exact: True finds the best of the 90 tiles with two per row and two per column. False takes the entries of
        a tile in descending |w|, ties from the lower row-major index on, wherever row and column still have
        room: of a tile it may keep seven only, and there is no kernel for it.
    implementation: as in `mask24`.

    Returns: bool, w's shape.
    Raises: as `mask24`.
    Source: 2102.08124, also for the 2-approximation of exact=False; 2404.01847, section 5."""
    patterns.check_flag("transposable_mask24", "exact", exact)
    w = patterns.as_array("transposable_mask24", "w", w)
    patterns.check_matrix("transposable_mask24", w)
    return (SEARCH if exact else GREEDY)(lax.stop_gradient(w), implementation=implementation)


SEARCH = Operation(
    "transposable_mask24",
    reference.transposable_mask24,
    kernel=Kernel("s24_transposable_mask", mask_like),
)
GREEDY = Operation("transposable_mask24 with exact=False", reference.greedy_transposable_mask24)


def transposable_pack24(
    w: jax.typing.ArrayLike, *, implementation: str | None = None
) -> tuple[jax.Array, Packed24, Packed24]:
    """`transposable_mask24(w)`, and `w` packed by it along axis -1 and along axis -2.

    On CUDA it takes one pass over `w`. Both packed arrays are differentiable in `w`, at kept positions.

    w, implementation: as in `transposable_mask24`.

    Returns: the mask, and a Packed24 along each axis.
    Raises: as `transposable_mask24`."""
    w = patterns.as_array("transposable_pack24", "w", w)
    patterns.check_matrix("transposable_pack24", w)
    mask, *parts = SEARCH_PACK(w, implementation=implementation)
    return mask, *along_both(parts)


def _search_first(search, pack, w):
    mask = search(w)
    return mask, *pack(w, mask)


def _backward(saved, cotangents, *, implementation):
    return masked_both_backward(saved, cotangents[1:], implementation=implementation)[:1]


SEARCH_PACK = Operation(
    "transposable_pack24",
    reference=lambda w: _search_first(SEARCH.reference, PACK24_MASKED_BOTH.reference, w),
    kernel=lambda w: _search_first(SEARCH.kernel, PACK24_MASKED_BOTH.kernel, w),
    cuda=Kernel(
        "s24_transposable_pack", lambda w: (jax.ShapeDtypeStruct(w.shape, jnp.bool_), *both_types(w))
    ),
    vjp=Reverse(lambda operands, results, **_: (results[2], results[4], results[0]), _backward),
)
