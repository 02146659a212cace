"""AST: its products, its adapters, its place of the decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.methods import AST
from tests.engine import oracle

T, d, f = 8, 32, 24


def test_products_are_those_of_a_straight_through_mask():
    x, w, dy = oracle.matrices(0, "float32", (T, d), (d, f), (T, f))
    method = AST()
    state = method.init(w)
    y, vjp = jax.vjp(lambda x, w: s24.sparse_dot(x, w, method, state), x, w)
    kept = jnp.asarray(oracle.top2(oracle.wide(w), 0), jnp.float32)
    want_y, dense = jax.vjp(lambda x, w: x @ (w + jax.lax.stop_gradient(kept - w)), x, w)
    for got, want in zip((y, *vjp(dy)), (want_y, *dense(dy)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    later = -2 * w[::-1]
    np.testing.assert_array_equal(method.refresh(state, later)["mask"], s24.mask24(later, 0))


@pytest.mark.parametrize("train_projection", [False, True])
def test_slorb_starts_from_the_mean_pruned_weight_of_each_block(train_projection):
    method = AST(slorb=16, train_projection=train_projection)
    layer = s24.nn.Linear(d, f, method=method, use_bias=False, rngs=nnx.Rngs(0))
    (x,) = oracle.matrices(1, "float32", (T, d))
    w = np.asarray(layer.kernel[...])
    pruned = w - oracle.top2(w, 0)
    sums = pruned.reshape(2, 16, f).mean(1)
    blocks = np.asarray(x).reshape(T, 2, 16).sum(-1)
    np.testing.assert_allclose(layer.adapters["sums"][...], sums, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer(x), x @ (w - pruned) + blocks @ sums, rtol=1e-4, atol=1e-4)
    names = {"sums", "projection"} if train_projection else {"sums"}
    assert set(layer.adapters) == names
    # A trained kernel replaces the first one: state and adapters follow.
    layer.kernel[...] = jnp.asarray(w[::-1] * 3)
    s24.nn.reset(layer)
    np.testing.assert_array_equal(layer.state["mask"][...], s24.mask24(layer.kernel[...], 0))
    np.testing.assert_allclose(
        layer.adapters["sums"][...], method.adapters(layer.kernel[...])["sums"], rtol=1e-6
    )


def test_slorb_blocks_must_fit():
    with pytest.raises(ValueError, match=r"AST: the kernel for slorb of shape .* is not a multiple of 12"):
        s24.nn.Linear(d, f, method=AST(slorb=12), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": -1.0}, "decay=-1.0 must be 0 or positive"),
        ({"decay_steps": -1}, "decay_steps=-1 must be a whole number of optimiser steps, >= 0"),
        ({"distill": 1.5}, r"distill=1.5 must lie in \[0, 1\]"),
        ({"temperature": 0.0}, "temperature=0.0 must be positive"),
        ({"slorb": -16}, "slorb=-16 must be a whole number of inputs"),
        ({"train_projection": True}, "train_projection=True needs slorb > 0"),
    ],
)
def test_bad_options(arguments, message):
    with pytest.raises(ValueError, match=f"AST: {message}"):
        AST(**arguments)


# ---- the optimiser


def test_the_decay_is_added_between_the_moments():
    """m holds gradients alone; m + rate (1 - M) w is squared into v and divided by it; others: plain Adam."""
    rate, b1, b2, eps = 0.3, 0.9, 0.95, 1e-8
    schedule = optax.linear_schedule(0.0, rate, 2)
    tx = s24.optim.adam_masked_decay(schedule, b1, b2, eps)
    rng = np.random.default_rng(0)
    w = {"a": rng.normal(size=(4, 8)), "b": rng.normal(size=(3,))}
    masks = {"a": rng.random((4, 8)) < 0.5, "b": np.ones((), bool)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), w)
    state, plain = tx.init(params), optax.scale_by_adam(b1, b2, eps)
    reference = plain.init(params)
    m, v = np.zeros((4, 8)), np.zeros((4, 8))
    update = jax.jit(lambda g, state: tx.update(g, state, params, masks=masks))
    for t in range(1, 5):
        g = {name: rng.normal(size=x.shape) for name, x in w.items()}
        gradients = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), g)
        got, state = update(gradients, state)
        m = b1 * m + (1 - b1) * g["a"]
        s = m + min((t - 1) / 2, 1) * rate * np.where(masks["a"], 0, w["a"])
        v = b2 * v + (1 - b2) * s**2
        want = (s / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        np.testing.assert_allclose(got["a"], want, rtol=1e-4)
        np.testing.assert_allclose(state.mu["a"], m, rtol=1e-4, atol=1e-6)
        other, reference = plain.update(gradients, reference)
        np.testing.assert_allclose(got["b"], other["b"], rtol=1e-5)
    with pytest.raises(ValueError, match="needs the masks"):
        tx.update(gradients, state, params)


@pytest.mark.parametrize("masks", [None, {}])
def test_a_dense_phase_is_plain_adam(masks):
    w = {"a": jnp.arange(8.0).reshape(2, 4)}
    tx, plain = s24.optim.adam_masked_decay(0.5), optax.scale_by_adam()
    got, _ = tx.update(w, tx.init(w), w, masks=masks)
    want, _ = plain.update(w, plain.init(w))
    np.testing.assert_allclose(got["a"], want["a"], rtol=1e-5)
