"""float64 under x64: by the reference alone, with the same rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from tests.ops import oracle
from tests.ops.cases import CASES, KEY
from tests.ops.data import adversarial, assert_same_bits, assert_within, device


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def x():
    return adversarial((60, 36), "float64")


def test_selection_and_thresholds(x64, x):
    w = jnp.asarray(x)
    assert w.dtype == jnp.float64
    for axis in (-1, -2):
        assert_same_bits(s24.mask24(w, axis), oracle.mask24(x, axis))
        assert_same_bits(s24.prune24(w, axis), oracle.prune24(x, axis))
        assert_same_bits(s24.soft24(w, axis), oracle.soft24(x, axis))
        assert_same_bits(s24.double_prune24(w, axis), oracle.double_prune24(x, axis))


def test_packing(x64, x):
    packed = s24.pack24(jnp.asarray(x), 0)
    values, metadata = oracle.pack24(x, -2)
    assert_same_bits(packed, s24.Packed24(values, metadata, -2))
    assert_same_bits(packed.todense(), oracle.prune24(x, 0))
    values, metadata = oracle.pack24(oracle.squared_relu(x), -1)
    assert_same_bits(s24.squared_relu24(jnp.asarray(x)), s24.Packed24(values, metadata, -1))


def test_tiles(x64, rng):
    w = rng.normal(size=(40, 80))
    mask = np.asarray(s24.transposable_mask24(jnp.asarray(w)))
    scores = oracle.tile_scores(oracle.tiles(np.abs(w)))
    ours = (np.abs(oracle.tiles(w)) * oracle.tiles(mask)).sum((-1, -2))
    assert_within(ours, scores.max(-1), 1e-14)


def test_differences_below_float32_are_seen(x64):
    x = jnp.asarray([[1.0, 1.0 + 1e-12, 1.0, 1.0 + 2e-12]])
    assert np.asarray(s24.mask24(x, 1)).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("exact", [True, False])
def test_estimators(x64, exact, rng):
    x = rng.normal(size=(50, 8)) * 10.0 ** rng.integers(-200, 200, (50, 1))
    drawn = np.asarray(s24.mvue24(KEY, jnp.asarray(x), 1, exact))
    assert drawn.dtype == np.float64
    a = np.abs(oracle.groups(x, 1))
    pi = oracle.optimal_inclusion(a) if exact else oracle.sequential_inclusion(a)
    want = oracle.groups(x, 1) / pi
    kept = oracle.groups(drawn, 1) != 0
    assert (kept.sum(-1) == 2).all()
    assert_within((oracle.groups(drawn, 1) / want)[kept], np.ones(kept.sum()), 1e-13)


def test_product_and_gradients(x64, rng):
    w, d = rng.normal(size=(9, 16)), rng.normal(size=(16, 5))
    mask = oracle.mask24(w, 1)

    def f(w, d):
        return jnp.sum(jnp.sin(s24.matmul(s24.pack24(w, 1), d)))

    def g(w, d):
        return jnp.sum(jnp.sin(jnp.where(mask, w, 0) @ d))

    for got, want in zip(jax.grad(f, (0, 1))(w, d), jax.grad(g, (0, 1))(w, d), strict=True):
        assert got.dtype == jnp.float64
        assert_within(got, want, 1e-13)


def test_kernels_refuse_float64(x64):
    for call in (
        lambda: s24.prune24(jnp.ones((4, 8)), 1, implementation="ffi"),
        lambda: s24.matmul(s24.pack24(jnp.ones((4, 8)), 1), jnp.ones((8, 4)), implementation="ffi"),
    ):
        with pytest.raises(RuntimeError, match=r"'ffi' cannot run.*float64.*reference"):
            call()


@pytest.mark.parametrize("case", [c for c in CASES if not c.sums], ids=str)
def test_x64_changes_nothing_for_float32(case):
    x = adversarial((20, 24), "float32", seed=4)
    expected = case.call(device(x), "ffi")
    with jax.enable_x64(True):
        assert_same_bits(case.call(jnp.asarray(x), "ffi"), expected)


def test_without_x64_float64_arrays_become_float32():
    assert s24.prune24(np.ones((4, 8)), 1).dtype == jnp.float32
