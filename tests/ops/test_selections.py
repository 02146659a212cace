"""Selections without a kernel: n of m, greedy tiles, and random twos of four."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import random24
from tests.ops import oracle
from tests.ops.data import NUMPY, adversarial, words

KEY = jax.random.key(5)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize(("n", "m"), [(1, 2), (3, 4), (2, 8), (4, 16), (8, 8)])
def test_n_of_m(n, m, axis, dtype):
    x = adversarial((32, 48), dtype)
    moved = np.moveaxis(x, axis, -1).reshape(-1, m)
    a = np.abs(oracle.wide(moved))
    order = np.lexsort([-np.where(np.isnan(a), 0, a), ~np.isnan(a)], axis=-1)  # stable: the lower index
    keep = np.zeros(a.shape, bool)
    np.put_along_axis(keep, order[:, :n], True, axis=-1)
    shape = np.moveaxis(x, axis, -1).shape
    want = np.moveaxis(keep.reshape(shape), -1, axis)
    np.testing.assert_array_equal(s24.mask_nm(x, n, m, axis), want)


def test_two_of_four_is_mask24(implementation, dtype):
    x = adversarial((16, 32), dtype)
    got = s24.mask_nm(x, 2, 4, 0, implementation=implementation)
    np.testing.assert_array_equal(got, s24.mask24(x, 0))


@pytest.mark.parametrize(
    ("n", "m", "error", "message"),
    [
        (3, 2, ValueError, "n=3 of every m=2 cannot be kept; use 1 <= n <= m"),
        (0, 4, ValueError, "n=0 of every m=4 cannot be kept"),
        (1.0, 4, TypeError, "n must be an int, got 1.0"),
        (True, 4, TypeError, "n must be an int, got True"),
        (2, 6, ValueError, r"shape \(8, 8\) has size 8 along axis -1, which is not a multiple of 6"),
    ],
)
def test_what_cannot_be_selected(n, m, error, message):
    with pytest.raises(error, match="mask_nm: .*" + message):
        s24.mask_nm(jnp.ones((8, 8)), n, m, 1)


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


def test_ties_go_to_the_lower_index():
    half = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], bool)
    np.testing.assert_array_equal(s24.transposable_mask24(jnp.ones((4, 4)), exact=False), half)
    np.testing.assert_array_equal(s24.mask_nm(jnp.ones(8), 3, 8, 0), np.arange(8) < 3)


@pytest.mark.parametrize("law", ["uniform", "paired"])
def test_random_cuts_are_unbiased_twos(law, dtype):
    """Five standard errors; each kept value is x over the probability of its law."""
    x = np.array([5, 4, 3, -2, 1, 0, -3, 1.5, 9, 0.25, -0.5, 4, 0, 0, 0, 0]).astype(NUMPY[dtype])
    repeats = 10_000
    drawn = oracle.wide(random24(KEY, jnp.asarray(np.tile(x, (repeats, 1))), 1, law))
    a = np.abs(oracle.wide(x)).reshape(-1, 2)
    total = a.sum(-1, keepdims=True)
    pi = np.full(x.shape, 0.5) if law == "uniform" else (a / np.where(total, total, 1)).ravel()
    kept = drawn != 0
    assert (kept.reshape(repeats, -1, 4).sum(-1) <= 2).all()
    if law == "paired":
        assert (kept.reshape(repeats, -1, 2).sum(-1) == (total > 0).ravel()).all()
    values = oracle.wide(x) / np.where(pi > 0, pi, 1)
    np.testing.assert_allclose(drawn[kept], np.broadcast_to(values, drawn.shape)[kept], rtol=2**-7)
    error = np.sqrt(pi * (1 - pi) / repeats)
    nonzero = x != 0
    assert (np.abs(kept.mean(0) - pi)[nonzero] <= 5 * error[nonzero] + 2**-20).all()


@pytest.mark.parametrize("law", ["uniform", "paired"])
def test_random_cuts_pass_what_is_not_finite(law):
    x = jnp.array([[1.0, jnp.nan, 2.0, 3.0], [jnp.inf, 1.0, -jnp.inf, 0.0]])
    got = random24(KEY, x, 1, law)
    np.testing.assert_array_equal(words(got), words(s24.prune24(x, 1)))


def test_random_cuts_are_checked():
    with pytest.raises(ValueError, match="random24: law 'biased' is unknown; use 'uniform' or 'paired'"):
        random24(KEY, jnp.ones(4), 0, "biased")
    with pytest.raises(TypeError, match="random24: key must be one PRNG key"):
        random24(3, jnp.ones(4), 0, "paired")
    with pytest.raises(TypeError, match="random24 estimate gradients and have no derivative"):
        jax.grad(lambda x: random24(KEY, x, 0, "uniform").sum())(jnp.ones(4))


@pytest.mark.parametrize(
    "call",
    [
        lambda **kw: s24.mask_nm(jnp.ones(8), 1, 4, 0, **kw),
        lambda **kw: s24.transposable_mask24(jnp.ones((4, 4)), exact=False, **kw),
    ],
)
def test_there_is_no_kernel(call):
    assert call(implementation="reference").dtype == bool
    with pytest.raises(RuntimeError, match=r"implementation 'ffi' cannot run: .* has no kernel"):
        call(implementation="ffi")
