"""AdamW with a second moment that can be frozen, and decay on weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_sparse24 as s24

W = {"kernel": jnp.linspace(-1, 2, 12).reshape(3, 4), "bias": jnp.array([0.5, -0.5])}
B1, B2, EPS, LR, WD = 0.9, 0.75, 1e-8, 1e-2, 0.1  # the window is four steps


def gradients(step, scale=1.0):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda w: jnp.asarray(scale * rng.normal(size=w.shape), jnp.float32), W)


def make(**options):
    mask = {"kernel": True, "bias": False}
    return s24.optim.step_adamw(LR, B1, B2, EPS, WD, mask, **options)


def test_while_it_is_not_frozen_it_is_adamw():
    mask = {"kernel": True, "bias": False}
    txs = make(), optax.adamw(LR, B1, B2, EPS, weight_decay=WD, mask=mask)
    params, states = [W, W], [tx.init(W) for tx in txs]
    for step in range(6):
        for i, (tx, extra) in enumerate(zip(txs, ({"frozen": False}, {}), strict=True)):
            updates, states[i] = tx.update(gradients(step), states[i], params[i], **extra)
            params[i] = optax.apply_updates(params[i], updates)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), *params)


def test_frozen_steps_divide_by_the_moment_as_it_was():
    """m goes on with its bias correction; v* is not corrected and its denominator adds eps^(3/4)."""
    tx = make()
    w, m, v = (np.zeros((3, 4)) for _ in range(3))
    params, state = W, tx.init(W)
    w = np.asarray(W["kernel"], np.float64)
    update = jax.jit(tx.update, static_argnames="frozen")
    for t in range(1, 8):
        frozen = t > 4
        updates, state = update(gradients(t), state, params, frozen=frozen)
        params = optax.apply_updates(params, updates)
        g = np.asarray(gradients(t)["kernel"], np.float64)
        m = B1 * m + (1 - B1) * g
        if frozen:
            scale = np.sqrt(v) + EPS**0.75
        else:
            v = B2 * v + (1 - B2) * g**2
            scale = np.sqrt(v / (1 - B2**t)) + EPS
        w = w - LR * (m / (1 - B1**t) / scale + WD * w)
        np.testing.assert_allclose(params["kernel"], w, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(optax.tree.get(state, "nu")["kernel"], v, rtol=1e-5)


@pytest.mark.parametrize("settles", ["arithmetic", "geometric"])
@pytest.mark.parametrize("earliest", [0, 9])
def test_it_settles_when_the_mean_change_over_a_window_is_below_eps(settles, earliest):
    """Gradients shrink until the moment stands still; afterwards it moves again, which changes nothing."""
    tx = make(settles=settles, earliest=earliest)
    state, v, changes, expected = tx.init(W), jax.tree.map(np.zeros_like, W), [], False
    seen = []
    for step in range(14):
        g = gradients(step, scale=1e-4 if step < 2 else 1e-7 if step < 12 else 1.0)
        _, state = tx.update(g, state, W, frozen=False)
        new = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * np.asarray(g, np.float64) ** 2, v, g)
        moved = np.concatenate([np.abs(new[n] - v[n]).ravel() for n in W])
        v = new
        changes.append(moved.mean() if settles == "arithmetic" else math.exp(np.log(moved).mean()))
        expected |= step + 1 >= max(4, earliest) and bool(np.mean(changes[-4:]) < EPS)
        seen.append(bool(s24.optim.settled(state)))
        assert seen[-1] == expected
    assert not seen[2] and seen[-1]
    assert earliest == 0 or not seen[7]


def test_nothing_is_watched_without_settles_or_while_frozen():
    tx = make(settles=None)
    state = tx.init(W)
    for step in range(6):
        _, state = tx.update(gradients(step, 0.0), state, W, frozen=False)
    assert not s24.optim.settled(state)
    assert all(leaf.size for leaf in jax.tree.leaves(state))  # empty arrays cannot be saved
    tx = make()
    state = tx.init(W)
    for step in range(6):
        _, state = tx.update(gradients(step, 0.0), state, W, frozen=True)
    assert not s24.optim.settled(state)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="settles='mean' is unknown; use 'arithmetic', 'geometric' or None"):
        s24.optim.step_adamw(LR, settles="mean")
    tx = make()
    for bad in ({}, {"frozen": jnp.asarray(True)}):
        with pytest.raises(ValueError, match=r"needs frozen=False \(dense steps\) or frozen=True"):
            tx.update(gradients(0), tx.init(W), W, **bad)


@pytest.mark.parametrize(
    "options",
    [
        {"b2": 1.0},
        {"b2": 1.0, "settles": None},
        {"b1": -0.1},
        {"b1": float("nan")},
        {"b2": jnp.float32(0.9)},
        {"eps": float("inf")},
        {"weight_decay": float("nan")},
        {"earliest": 2.5},
        {"earliest": -1},
    ],
    ids=str,
)
def test_options_are_refused_where_they_are_written(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=rf"step_adamw: {name}=.* must"):
        s24.optim.step_adamw(LR, **options)


def test_a_part_of_the_parameters_or_none_of_them():
    """Inside `optax.partition` the mean change is that of its own parameters, and 0 without any."""
    labels = {"kernel": "step", "bias": "rest"}
    tx = optax.partition({"step": s24.optim.step_adamw(LR, B1, B2), "rest": optax.sgd(LR)}, labels)
    alone = s24.optim.step_adamw(LR, B1, B2)
    only = {"kernel": W["kernel"]}
    got, state = tx.update(gradients(0), tx.init(W), W, frozen=False)
    expected, other = alone.update({"kernel": gradients(0)["kernel"]}, alone.init(only), only, frozen=False)
    np.testing.assert_array_equal(got["kernel"], expected["kernel"])
    np.testing.assert_array_equal(optax.tree.get(state, "changes"), optax.tree.get(other, "changes"))
    none = optax.masked(s24.optim.step_adamw(LR, B1, B2), {"kernel": False, "bias": False})
    got, state = none.update(gradients(0), none.init(W), W, frozen=False)
    jax.tree.map(np.testing.assert_array_equal, got, gradients(0))


def test_settled_needs_the_state_of_step_adamw():
    with pytest.raises(ValueError, match=r"settled: .* holds no s24.optim.step_adamw"):
        s24.optim.settled(optax.adamw(LR).init(W))


def test_decay_on_weights_is_decoupled_and_times_the_learning_rate():
    """w <- w - lr (adam + rate (1 - M) w): Adam's moments do not see it."""
    rate, lr, mask = 0.3, 0.01, {"kernel": s24.mask24(W["kernel"], 1), "bias": jnp.asarray(True)}
    adam = optax.adam(lr, B1, B2)
    tx = optax.chain(
        optax.scale_by_adam(B1, B2), s24.optim.masked_decay(rate), optax.scale_by_learning_rate(lr)
    )
    g, state = gradients(1), tx.init(W)
    got, state = tx.update(g, state, W, masks=mask)
    plain, adam_state = adam.update(g, adam.init(W), W)
    np.testing.assert_array_equal(got["bias"], plain["bias"])
    pull = np.where(mask["kernel"], 0, lr * rate * np.asarray(W["kernel"]))
    np.testing.assert_allclose(got["kernel"], plain["kernel"] - pull, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, optax.tree.get(state, "nu"), optax.tree.get(adam_state, "nu"))
