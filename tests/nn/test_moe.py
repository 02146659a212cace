"""The mixture of experts against a loop over tokens and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.methods import FST, SSTE, STE, Activation24, Dense, Venom

T, d, f, E = 64, 16, 32, 4


def build(method=None, **options):
    f_ = options.pop("f", f)
    return s24.nn.MoE(d, f_, **({"experts": E, "top_k": 2, "method": method} | options), rngs=nnx.Rngs(0))


def tokens(count=T):
    return jax.random.normal(jax.random.key(1), (count, d))


def expert(moe, index):
    graphdef, state = nnx.split(moe.experts)
    return nnx.merge(graphdef, jax.tree.map(lambda v: v[index], state))


def by_hand(moe, x, capacity):
    """Token after token; an expert that is full adds nothing."""
    p = np.asarray(jax.nn.softmax(x @ moe.router.kernel[...]), np.float64)
    outputs = [np.asarray(expert(moe, e)(x), np.float64) for e in range(E)]
    room, y, dropped = [capacity] * E, np.zeros(x.shape), 0
    for t in range(len(x)):
        chosen = np.argsort(-p[t], kind="stable")[: moe.top_k]
        for e in chosen:
            if room[e]:
                y[t] += p[t, e] / p[t, chosen].sum() * outputs[e][t]
                room[e] -= 1
            else:
                dropped += 1
    return y, dropped / (len(x) * moe.top_k)


@pytest.mark.slow
@pytest.mark.parametrize("capacity_factor", [None, 2.0, 0.5])
@pytest.mark.parametrize("method", [None, STE()], ids=str)
def test_output_is_the_gated_sum_of_the_experts(method, capacity_factor):
    moe, x = build(method, capacity_factor=capacity_factor), tokens()
    y, routing = jax.jit(lambda x: moe(x))(x)
    want, dropped = by_hand(moe, x, moe.capacity(T))
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(routing.dropped, dropped, atol=1e-6)
    assert (dropped > 0) == (capacity_factor == 0.5)
    assert moe(x.reshape(4, T // 4, d))[0].shape == (4, T // 4, d)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [Dense(), FST(), SSTE(), Activation24(), Venom(v=16, m=8, clusters=4)],
    ids=lambda m: type(m).__name__,
)
def test_experts_train_with_any_method(method):
    moe, x = build(method, activation="squared_relu"), tokens()
    if s24.nn.arrange(moe):
        assert bool(moe.experts.up.state["arranged"][...].all())
    graphdef, params, state = nnx.split(moe, nnx.Param, ...)

    @jax.jit
    def gradient(params, state, step):
        model = nnx.merge(graphdef, params, state)
        s24.refresh(model, step)
        params, rest = nnx.split(model, nnx.Param, ...)[1:]

        def loss(params):
            y, routing = nnx.merge(graphdef, params, rest)(x)
            return jnp.mean((y - x) ** 2) + 0.01 * routing.load_balancing_loss

        return jax.value_and_grad(loss)(params)

    losses = []
    for step in range(20):
        value, grads = gradient(params, state, step)
        losses.append(float(value))
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    flat = dict(nnx.to_flat_state(grads))
    assert all((np.abs(g[...]) > 0).any() for g in flat.values())


def test_every_expert_has_its_own_masks_and_noise():
    moe = build(FST())
    masks = np.asarray(moe.experts.up.state["mask"][...])
    assert masks.shape == (E, d, f)
    for e in range(E):
        np.testing.assert_array_equal(masks[e], s24.transposable_mask24(moe.experts.up.kernel[e]))
    keys = np.asarray(moe.experts.up.key[...])
    assert len({tuple(k) for k in keys}) == E
    assert len(s24.nn.sparse_layers(moe)) == 2


def test_experts_with_the_state_of_another_kernel_or_phase_are_refused():
    """A call of experts is mapped over them, where their values are not known."""
    loaded, x = build(FST()), tokens()
    loaded.experts.up.kernel[...] = -loaded.experts.up.kernel[...][:, ::-1]
    with pytest.raises(ValueError, match=r"masks of this layer.*weights were loaded.*Call s24.refresh"):
        loaded(x)
    s24.refresh(loaded)
    s24.nn.set_sparse(loaded, False)
    restored = build(FST())
    nnx.update(restored, nnx.state(loaded))
    with pytest.raises(ValueError, match="written in a dense phase, but the layer is in sparse mode"):
        restored(x)
    assert restored(x[:0])[1] == (0, 0)


def test_load_balancing_loss():
    moe, x = build(), tokens()
    moe.router.kernel[...] = jnp.zeros((d, E))
    assert moe(x)[1].load_balancing_loss == pytest.approx(1.0)
    moe.router.kernel[...] = jnp.zeros((d, E)).at[0, :2].set(50.0)
    assert moe(x.at[:, 0].set(1.0))[1].load_balancing_loss == pytest.approx(2.0, abs=1e-3)


def test_capacity_is_a_multiple_of_what_the_method_needs():
    assert build(capacity_factor=1.0).capacity(64) == 32
    assert build(capacity_factor=1.1).capacity(64) == 36
    assert build(Venom(v=16, m=6, clusters=4), f=48, capacity_factor=1.0).capacity(64) == 48
    assert build(capacity_factor=None).capacity(62) == 64


def test_bad_sizes():
    with pytest.raises(ValueError, match="top_k=5 must lie between 1 and experts=4"):
        build(top_k=5)
    with pytest.raises(ValueError, match="capacity_factor=0 must be finite and positive, or None"):
        build(capacity_factor=0)
    with pytest.raises(ValueError, match="capacity_factor=inf must be finite"):
        build(capacity_factor=float("inf"))
    with pytest.raises(TypeError, match=r"top_k=1.5 must be an int"):
        build(top_k=1.5)
    with pytest.raises(ValueError, match="size 30 along axis"):
        build(FST(), f=30)


@pytest.mark.parametrize("capacity_factor", [1.25, None])
@pytest.mark.parametrize(
    "method",
    [None, FST(), Activation24(), Venom(v=16, m=8, clusters=4, routing="learned")],
    ids=lambda m: type(m).__name__,
)
def test_no_tokens_give_zeros(method, capacity_factor):
    """Output, routing and gradients."""
    moe = build(method, capacity_factor=capacity_factor)

    def loss(moe, x):
        y, routing = moe(x)
        assert y.shape == x.shape
        return jnp.sum(y) + routing.load_balancing_loss + routing.dropped

    value, gradients = nnx.value_and_grad(loss)(moe, jnp.ones((2, 0, d)))
    assert value == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))
