"""Flip rate, density and kept share, by hand and against known numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24


def mask(*bits):
    return jnp.array(bits, bool)


@pytest.mark.parametrize(
    ("old", "new", "rate"),
    [
        (mask(1, 1, 0, 0), mask(1, 1, 0, 0), 0.0),
        (mask(1, 1, 0, 0), mask(0, 0, 1, 1), 1.0),
        (mask(1, 1, 0, 0), mask(1, 0, 1, 0), 0.5),
        (mask(1, 0, 0, 0), mask(0, 0, 0, 0), 0.25),
        # Over all elements of the tree, not a mean of rates: (1 + 0) / (2 + 6).
        ({"a": mask(1, 0), "b": mask(*[1] * 6)}, {"a": mask(0, 0), "b": mask(*[1] * 6)}, 0.125),
        ([mask(1), {"x": mask(1, 0, 1)}], [mask(0), {"x": mask(0, 1, 0)}], 1.0),
    ],
)
def test_flip_rate_by_hand(old, new, rate):
    got = s24.flip_rate(old, new)
    assert (got.dtype, got.shape, float(got)) == (jnp.float32, (), rate)
    assert float(jax.jit(s24.flip_rate)(old, new)) == rate
    assert float(s24.flip_rate(new, old)) == rate


def test_flip_rate_counts_changes_of_a_24_mask():
    """Swapping the order of one group changes two or four of its entries."""
    w = jnp.array([[3.0, 2.0, 1.0, 0.5], [1.0, 2.0, 3.0, 4.0]])
    moved = w.at[0].set(jnp.array([3.0, 1.0, 2.0, 0.5]))
    assert float(s24.flip_rate(s24.mask24(w, 1), s24.mask24(moved, 1))) == 2 / 8


def test_flip_rate_counts_beyond_the_integers_of_float32():
    """2**25 flips: a running float32 sum of ones would stop at 2**24."""
    old = jnp.zeros(2**25 + 4, bool)
    assert float(s24.flip_rate(old, ~old)) == 1.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (mask(1, 0), mask(1, 0, 0), r"bool of equal shape, got bool \(2,\) and bool \(3,\)"),
        (mask(1, 0), jnp.array([1.0, 0.0]), r"got bool \(2,\) and float32 \(2,\)"),
        (jnp.array([1, 0]), mask(1, 0), r"got int32 \(2,\)"),
        ({"a": mask(1)}, {"b": mask(1)}, "same structure"),
        ([mask(1)], [mask(1), mask(1)], "same structure"),
        ({}, {}, "non-empty"),
    ],
)
def test_flip_rate_rejects_what_does_not_match(old, new, message):
    with pytest.raises(ValueError, match=message):
        s24.flip_rate(old, new)


@pytest.mark.parametrize(
    ("x", "share"),
    [
        ([1.0, 0.0, 2.0, 0.0], 0.5),
        ([0.0, -0.0], 0.0),
        ([jnp.nan, 0.0, jnp.inf, 0.0], 0.5),
        ([[True, False], [True, True]], 0.75),
        ([1, 0, 0, 0], 0.25),
    ],
)
def test_density(x, share):
    got = s24.density(jnp.array(x))
    assert (got.dtype, float(got)) == (jnp.float32, share)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_density_of_pruned_weights(dtype):
    w = jax.random.normal(jax.random.key(0), (64, 64)).astype(dtype)
    assert float(s24.density(s24.prune24(w, 0))) == 0.5
    assert abs(float(s24.density(s24.double_prune24(w, 0))) - 0.40625) < 0.02


def test_kept_share_by_hand():
    w, m = jnp.array([3.0, -1.0, 0.0, 4.0]), mask(1, 0, 1, 0)
    assert float(s24.kept_share(w, m)) == 0.375
    assert float(s24.kept_share(w, ~m)) == 0.625
    tree = {"a": (jnp.array([1.0, -1.0]), mask(1, 0)), "b": (jnp.array([-6.0]), mask(1))}
    assert (
        float(s24.kept_share({k: v[0] for k, v in tree.items()}, {k: v[1] for k, v in tree.items()})) == 0.875
    )
    assert float(s24.kept_share(jnp.zeros(4), m)) == 1.0
    with pytest.raises(ValueError):
        s24.kept_share([w, w], [m])


@pytest.mark.parametrize(
    ("choose", "share"), [(s24.transposable_mask24, 0.702), (lambda w: s24.mask24(w, 0), 0.745)]
)
def test_kept_share_of_gaussian_weights(choose, share):
    """Known shares of the L1 norm; 65,536 tiles leave a standard error of 1e-4."""
    w = jax.random.normal(jax.random.key(0), (1024, 1024))
    assert abs(float(s24.kept_share(w, choose(w))) - share) < 1e-3


def test_kept_share_of_16_bit_weights_is_summed_in_float32():
    w = jnp.ones((64, 64), jnp.bfloat16)
    got = s24.kept_share(w, s24.mask24(w, 0))
    assert (got.dtype, float(got)) == (jnp.float32, 0.5)


def test_monitors_do_not_depend_on_the_scale_of_the_weights():
    w = jax.random.normal(jax.random.key(1), (16, 16))
    m = s24.transposable_mask24(w)
    np.testing.assert_allclose(s24.kept_share(w, m), s24.kept_share(w * 1024, m), rtol=1e-6)


def test_kept_share_compares_like_with_like():
    """A tree under other names or a mask that broadcasts would give a share of something else."""
    w = jnp.ones((8, 4))
    for weights, mask, message in (
        ({"a": w}, {"b": w > 0}, "same structure"),
        (w, jnp.ones((8, 1), bool), r"bool of its weight's shape \(8, 4\), got bool \(8, 1\)"),
        (w, w, r"got float32 \(8, 4\)"),
    ):
        with pytest.raises(ValueError, match=rf"kept_share: .*{message}"):
            s24.kept_share(weights, mask)
    with pytest.raises(ValueError, match=r"flip_rate: masks must be arrays, got bool and bool"):
        s24.flip_rate([True, False], [True, True])


def test_arrays_without_elements_have_no_density_and_no_flips():
    """They gave NaN."""
    empty = jnp.zeros((0, 4), bool)
    assert float(s24.density(empty)) == float(s24.flip_rate(empty, empty)) == 0
