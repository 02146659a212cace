"""Features that stay dense, which and how many, and a causal cut of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse24.ops.features import causal_mask24, dense_count, densest, set_columns, top_features
from tests.ops.data import adversarial, device, words

KEY = jax.random.key(7)
FEATURES = np.array([2, 3, 11, 23], np.int32)


def test_densest_features():
    x = np.zeros((8, 5), np.float32)
    x[:, 3], x[::2, 1], x[0, 4] = 1, [5, 4, 3, 2], 9
    np.testing.assert_array_equal(densest(jnp.asarray(x), 0.4, "density"), [1, 3])
    # Feature 3 loses 2 of 4 ones per group, feature 1 nothing: two of each four are zero.
    np.testing.assert_array_equal(densest(jnp.asarray(x), 0.2, "lost"), [3])


def test_the_causal_mask():
    x = jax.random.normal(KEY, (64, 32))
    mask = np.asarray(causal_mask24(x)).reshape(16, 4, 8, 4)
    np.testing.assert_array_equal(mask.sum(3)[:, :2], 1)
    assert mask.sum(3).max() == 2 and mask.sum(1).max() == 2
    assert (mask.sum(3)[:, 2:] >= 1).all()
    changed = x.at[2::4].multiply(-3).at[3::4].set(100.0)
    after = np.asarray(causal_mask24(changed)).reshape(mask.shape)
    np.testing.assert_array_equal(after[:, :2], mask[:, :2])
    first = np.asarray(jnp.argmax(jnp.abs(x[0::4]).reshape(16, 8, 4), -1))
    np.testing.assert_array_equal(mask[:, 0].argmax(-1), first)


def test_many_dense_features_come_in_sixteens():
    assert [dense_count(n, 0.05) for n in (5, 512, 2560, 8192, 14336)] == [1, 26, 128, 416, 720]
    assert dense_count(130, 1.0) == 130


def test_columns_are_set_on_either_platform(monkeypatch):
    """By a scatter, and by a selection as on CUDA."""
    x, columns = (device(adversarial((6, n), "float32", n)) for n in (24, FEATURES.size))
    want = words(x).copy()
    want[:, FEATURES] = words(columns)
    np.testing.assert_array_equal(words(set_columns(x, device(FEATURES), columns)), want)
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    np.testing.assert_array_equal(words(set_columns(x, device(FEATURES), columns)), want)


def test_the_features_with_the_most():
    scores = np.random.default_rng(0).integers(0, 5, 300, np.int32)
    for share in (0.1, 1.0):
        want = np.sort(np.argsort(-scores, kind="stable")[: dense_count(300, share)])
        np.testing.assert_array_equal(top_features(jnp.asarray(scores), share, 4), want)
