"""Masks that are 2:4 along both axes of a matrix."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import GROUP, compute_format, key, magnitude_bits, scaled_scores
from jax_sparse24.patterns import KEPT, PAIRS, TILES


def transposable_mask24(w):
    """Score of a tile: `(row 0 + row 1) + (row 2 + row 3)` of the kept |w|, after an exact scaling by a power
    of two."""
    fmt = compute_format(w.dtype)
    *lead, rows, cols = w.shape
    tiles = w.astype(fmt.dtype).reshape(*lead, rows // GROUP, GROUP, cols // GROUP, GROUP)
    tiles = jnp.swapaxes(tiles, -3, -2)  # (..., R/4, C/4, row, column)
    score = scaled_scores(magnitude_bits(tiles), (-2, -1), fmt, nan=256.0, infinity=16.0)
    first, second = (jnp.asarray([pair[k] for pair in PAIRS]) for k in (0, 1))
    pairs = score[..., first] + score[..., second]  # (..., R/4, C/4, row, pair)
    upper = pairs[..., 0, :, None] + pairs[..., 1, None, :]
    lower = pairs[..., 2, :, None] + pairs[..., 3, None, :]
    codes = jnp.asarray(TILES).T
    best = jnp.argmax(upper[..., codes[0], codes[1]] + lower[..., codes[2], codes[3]], axis=-1)
    masks = jnp.asarray([[[c in PAIRS[p] for c in range(GROUP)] for p in tile] for tile in TILES], bool)
    return jnp.swapaxes(masks[best], -3, -2).reshape(w.shape)


def greedy_transposable_mask24(w):
    *lead, rows, cols = w.shape
    tiles = jnp.swapaxes(key(w).reshape(*lead, rows // GROUP, GROUP, cols // GROUP, GROUP), -3, -2)
    order = jnp.argsort(~tiles.reshape(*tiles.shape[:-2], GROUP * GROUP), axis=-1)
    places = jnp.arange(GROUP * GROUP).reshape(GROUP, GROUP)

    def take(i, mask):
        full = (mask.sum(-1, keepdims=True) >= KEPT) | (mask.sum(-2, keepdims=True) >= KEPT)
        return mask | ((order[..., i, None, None] == places) & ~full)

    mask = lax.fori_loop(0, GROUP * GROUP, take, jnp.zeros(tiles.shape, bool))
    return jnp.swapaxes(mask, -3, -2).reshape(w.shape)
