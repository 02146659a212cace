"""transposable_mask24: the best of the 90 tiles, always, or greedy tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24 import patterns
from tests.ops import oracle
from tests.ops.data import NUMPY, adversarial, assert_same_bits, device, from_words, special_words


def test_there_are_90_tiles_in_one_order():
    from jax_sparse24 import _cpu

    assert len(oracle.TILES) == 90
    assert list(patterns.TILES) == oracle.TILES
    assert [tuple(tile) for tile in _cpu.tile_patterns()] == oracle.TILES


def assert_transposable(mask):
    tiles = oracle.tiles(np.asarray(mask))
    assert (tiles.sum(-1) == 2).all()
    assert (tiles.sum(-2) == 2).all()


@pytest.mark.parametrize("law", ["normal", "lognormal"])
def test_every_tile_reaches_the_optimum(implementation, dtype, law, rng):
    w = getattr(rng, law)(size=(2, 120, 204)).astype(NUMPY[dtype])
    mask = np.asarray(s24.transposable_mask24(device(w), implementation=implementation))
    assert_transposable(mask)
    a = oracle.tiles(np.abs(oracle.wide(w)))
    best = oracle.tile_scores(a).max(-1)
    ours = (a * oracle.tiles(mask)).sum((-1, -2))
    # A float32 sum in three levels is off by at most 3 u of itself, on either side of a comparison.
    assert (ours >= best * (1 - 6 * 2.0**-24)).all()
    assert (ours <= best).all()


def test_ties_go_to_the_first_tile(implementation, dtype, rng):
    """Small integers add up exactly, so that the first best tile is the only right one."""
    for largest in (1, 3, 8):
        w = rng.integers(-largest, largest + 1, (160, 204))
        mask = s24.transposable_mask24(device(w, dtype), implementation=implementation)
        assert_same_bits(mask, oracle.transposable_mask24(np.abs(w)))


def test_equal_entries_give_the_first_tile(implementation, dtype):
    want = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    for value in (0.0, 1.0, -2.0):
        mask = s24.transposable_mask24(device(np.full((4, 4), value), dtype), implementation=implementation)
        assert_same_bits(mask, np.array(want, bool))


@pytest.mark.parametrize("power", [-126, -60, 60, 126])
def test_scaling_by_a_power_of_two_changes_nothing(implementation, power, rng):
    w = rng.uniform(1, 2, (40, 36)).astype(np.float32)
    expected = s24.transposable_mask24(device(w), implementation=implementation)
    scaled = s24.transposable_mask24(device(w * np.float32(2.0) ** power), implementation=implementation)
    assert_same_bits(scaled, expected)


def test_subnormals_are_compared(implementation, dtype, rng):
    w = from_words(rng.integers(0, 9, (80, 84)), dtype)
    mask = s24.transposable_mask24(device(w), implementation=implementation)
    assert_same_bits(mask, oracle.transposable_mask24(np.asarray(w).view(f"u{w.itemsize}").astype(float)))


def test_nothing_overflows(implementation):
    w = device(np.full((4, 4), np.finfo(np.float32).max) * np.float32(oracle.TILE_MASKS[50] * 0.25 + 0.75))
    mask = s24.transposable_mask24(w, implementation=implementation)
    assert_same_bits(mask, oracle.TILE_MASKS[50])


def test_non_finite_entries_are_kept_first(implementation, dtype, rng):
    """As many NaN as possible, then as many Inf; the finite entries of such a tile do not count."""
    values = rng.choice(special_words(dtype), (160, 164)).view(NUMPY[dtype])
    w = np.where(rng.random(values.shape) < 0.3, values, NUMPY[dtype].type(1))
    mask = s24.transposable_mask24(device(w), implementation=implementation)
    assert_transposable(mask)
    wide = oracle.wide(w)
    score = np.where(np.isnan(wide), 256.0, np.where(np.isinf(wide), 16.0, 0.0))
    broken = (oracle.tiles(score) > 0).any((-1, -2))
    assert broken.mean() > 0.5
    expected = oracle.transposable_mask24(score)
    assert_same_bits(oracle.tiles(np.asarray(mask))[broken], oracle.tiles(expected)[broken])


def test_any_bits_give_a_transposable_mask(implementation, dtype):
    w = device(adversarial((120, 132), dtype, seed=30))
    assert_transposable(s24.transposable_mask24(w, implementation=implementation))


def test_mask_of_the_transpose_scores_the_same(implementation, rng):
    w = rng.normal(size=(80, 60)).astype(np.float32)
    here = np.asarray(s24.transposable_mask24(device(w), implementation=implementation))
    there = np.asarray(s24.transposable_mask24(device(w.T), implementation=implementation))
    assert_same_bits(there.T, here)  # continuous data: the optimum is unique


def greedy(tile):
    """One tile (4, 4), entry by entry."""
    a = np.abs(oracle.wide(tile)).ravel()
    order = np.lexsort([-np.where(np.isnan(a), 0, a), ~np.isnan(a)])
    mask = np.zeros((4, 4), bool)
    for place in order:
        row, column = divmod(place, 4)
        if mask[row].sum() < 2 and mask[:, column].sum() < 2:
            mask[row, column] = True
    return mask


def test_greedy_tiles(dtype):
    w = adversarial((2, 24, 32), dtype)
    mask = np.asarray(s24.transposable_mask24(w, exact=False))
    for tile, found in zip(
        oracle.tiles(w).reshape(-1, 4, 4), oracle.tiles(mask).reshape(-1, 4, 4), strict=True
    ):
        np.testing.assert_array_equal(found, greedy(tile))


def test_ties_of_greedy_tiles_go_to_the_lower_index():
    half = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], bool)
    np.testing.assert_array_equal(s24.transposable_mask24(jnp.ones((4, 4)), exact=False), half)


def test_greedy_tiles_have_no_kernel():
    w = jnp.ones((4, 4))
    assert s24.transposable_mask24(w, exact=False, implementation="reference").dtype == bool
    with pytest.raises(RuntimeError, match=r"implementation 'ffi' cannot run: .* has no kernel"):
        s24.transposable_mask24(w, exact=False, implementation="ffi")
