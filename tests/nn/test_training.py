"""Training steps in both styles of NNX, and stacked layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from tests.nn.models import FST, METHODS, Net, arrays, assert_same, d, f, inputs, noise

EVERY = FST.refresh_every
RATE = 0.05


def optimiser():
    return optax.chain(optax.clip_by_global_norm(1.0), s24.optim.masked_decay(RATE), optax.adamw(1e-2))


def batch(step):
    return inputs(seed=100 + step)


def loss_of(model, x):
    return ((model(x) - jnp.flip(x, 1)) ** 2).mean()


@functools.cache
def compiled_step(sparse):
    """The functional loop: split, jit, donate. One compilation per mode."""
    model, tx = Net(rngs=nnx.Rngs(0)), optimiser()
    s24.nn.set_sparse(model, sparse)
    graphdef = nnx.graphdef(model)

    def step(params, state, moments, index, x):
        model = nnx.merge(graphdef, params, state)
        s24.refresh(model, index)
        params, state = nnx.state(model, nnx.Param), nnx.state(model, s24.nn.SparseState)
        loss, gradient = jax.value_and_grad(lambda p: loss_of(nnx.merge(graphdef, p, state), x))(params)
        updates, moments = tx.update(gradient, moments, params, masks=s24.nn.masks(model))
        return optax.apply_updates(params, updates), state, moments, loss

    return jax.jit(step, donate_argnums=(0, 1, 2))


def train_functionally(steps, start=0, carry=None, sparse=True):
    model = Net(rngs=nnx.Rngs(0))
    params, state = nnx.state(model, nnx.Param), nnx.state(model, s24.nn.SparseState)
    carry, losses = carry or (params, state, optimiser().init(params)), []
    for index in range(start, start + steps):
        *carry, loss = compiled_step(sparse)(*carry, jnp.int32(index), batch(index))
        losses.append(float(loss))
    return carry, losses


def test_the_object_style_and_the_functional_style_agree():
    """nnx.jit, nnx.grad and nnx.Optimizer with masks, against split, jax.grad and optax."""
    model = Net(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optimiser(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, index, x):
        s24.refresh(model, index)
        loss, gradient = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, gradient, masks=s24.nn.masks(model))
        return loss

    losses = [float(step(model, optimizer, jnp.int32(i), batch(i))) for i in range(EVERY + 2)]
    (params, state, _), functional = train_functionally(EVERY + 2)
    np.testing.assert_allclose(losses, functional, rtol=1e-5)
    got, want = arrays(nnx.state(model, (nnx.Param, s24.nn.SparseState))), arrays(params) | arrays(state)
    assert got.keys() == want.keys()
    for path, value in want.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(got[path], value, rtol=1e-3, atol=1e-4)
        else:
            np.testing.assert_array_equal(got[path], value)


def test_training_lowers_the_loss_and_moves_the_masks():
    (_, state, _), losses = train_functionally(10 * EVERY)
    assert np.mean(losses[-EVERY:]) < 0.7 * np.mean(losses[:EVERY])
    start = arrays(nnx.state(Net(rngs=nnx.Rngs(0)), s24.nn.SparseState))
    end = arrays(state)
    for path, value in end.items():
        if path[-1] == "mask":
            assert not np.array_equal(value, start[path])
        if path[-1] == "step":
            assert value == 10 * EVERY - 1
        if path[-1] == "key":
            np.testing.assert_array_equal(value, start[path])


def test_stopping_and_going_on_is_the_same_as_not_stopping():
    """Parameters, state and moments are all there is: masks, keys and steps are in the state. To the bit."""
    whole, _ = train_functionally(EVERY + 3)
    half, _ = train_functionally(EVERY - 1)
    saved = jax.tree.map(np.asarray, half)  # what a checkpoint would hold
    rest, _ = train_functionally(4, start=EVERY - 1, carry=jax.tree.map(jnp.asarray, saved))
    for a, b in zip(whole, rest, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_a_switch_to_dense_keeps_moments_and_ends_the_decay():
    """At the switch every stored value takes part as it is; afterwards nothing pulls at pruned weights."""
    sparse, _ = train_functionally(EVERY)
    stored = [jax.tree.map(np.asarray, part) for part in sparse]
    carry = jax.tree.map(jnp.asarray, stored)
    (params, state, moments), losses = train_functionally(1, EVERY, carry, sparse=False)
    twin = Net(METHODS["Dense"], rngs=nnx.Rngs(0))
    nnx.update(twin, jax.tree.map(jnp.asarray, stored[0]))
    want, gradient = nnx.jit(nnx.value_and_grad(loss_of))(twin, batch(EVERY))
    np.testing.assert_allclose(losses[0], want, rtol=1e-5)
    plain = optax.chain(optax.clip_by_global_norm(1.0), s24.optim.masked_decay(0.0), optax.adamw(1e-2))
    before = jax.tree.map(jnp.asarray, stored[0])
    updates, _ = plain.update(gradient, jax.tree.map(jnp.asarray, stored[2]), before, masks=None)
    expected = arrays(optax.apply_updates(before, updates))
    for path, value in arrays(params).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-5, err_msg=str(path))
    masks = {p: v for p, v in arrays(state).items() if p[-1] == "mask"}
    for path, value in masks.items():
        np.testing.assert_array_equal(value, arrays(stored[1])[path])
    assert [int(c) for c in jax.tree.leaves(moments) if np.ndim(c) == 0] == [EVERY + 1]


@pytest.mark.parametrize("method", METHODS)
def test_both_kinds_of_gradient_are_the_same(method):
    """nnx.grad on the object and jax.grad over the split parameters."""
    model, x = Net(METHODS[method], rngs=nnx.Rngs(0)), inputs()
    graphdef, params, state = nnx.split(model, nnx.Param, s24.nn.SparseState)
    functional = jax.grad(lambda p: loss_of(nnx.merge(graphdef, p, state), x))(params)
    assert_same(functional, nnx.grad(loss_of)(model, x))
    assert jax.tree.structure(functional) == jax.tree.structure(params)


def test_micro_batches_average_to_independent_noise():
    """With folded keys two micro-batches of the same data differ; without, they are equal."""
    model, x = Net(rngs=nnx.Rngs(0)), inputs()
    graphdef, params, state = nnx.split(model, nnx.Param, s24.nn.SparseState)

    @jax.jit
    def accumulate(params, state, fold):
        def one(index):
            own = jax.tree.map(lambda a, b: jnp.where(fold, a, b), s24.nn.fold_key(state, index), state)
            return jax.grad(lambda p: loss_of(nnx.merge(graphdef, p, own), x))(params)

        return jax.lax.map(one, jnp.arange(2))

    for fold in (True, False):
        gradients = arrays(accumulate(params, state, fold))["head", "kernel"]
        assert np.array_equal(*gradients) != fold


# ---- stacked layers

LAYERS = 3


class Stacked(nnx.Module):
    """`LAYERS` blocks with a leading axis, run by one scan; with `remat`, each is recomputed."""

    def __init__(self, remat=False, *, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return s24.nn.FFN(d, f, method=FST, activation="gelu", use_bias=True, rngs=rngs)

        self.blocks = blocks(rngs)
        self.remat = remat

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x):
            return x + (nnx.remat(lambda b, x: b(x)) if self.remat else lambda b, x: b(x))(block, x)

        return run(self.blocks, x)


def unstacked(model, i):
    """Block `i` as a module of its own."""
    block = s24.nn.FFN(d, f, method=FST, activation="gelu", use_bias=True, rngs=nnx.Rngs(9))
    return nnx.merge(nnx.graphdef(block), jax.tree.map(lambda a: a[i], nnx.state(model.blocks)))


def test_stacked_layers_have_state_and_noise_of_their_own():
    model = Stacked(rngs=nnx.Rngs(0))
    state = arrays(nnx.state(model, s24.nn.SparseState))
    assert {p[1:]: v.shape for p, v in state.items()} == {
        ("up", "state", "mask"): (LAYERS, d, f),
        ("down", "state", "mask"): (LAYERS, f, d),
        **{(half, "key"): (LAYERS, 2) for half in ("up", "down")},
        **{
            (half, name): (LAYERS,)
            for half in ("up", "down")
            for name in ("step", "refreshed", "dense_from", "checksum")
        },
    }
    keys = np.concatenate([v for p, v in state.items() if p[-1] == "key"])
    assert len({k.tobytes() for k in keys}) == 2 * LAYERS
    kernels = np.asarray(model.blocks.up.kernel[...])
    assert not np.array_equal(kernels[0], kernels[1])
    np.testing.assert_array_equal(state["blocks", "up", "state", "mask"], s24.transposable_mask24(kernels))


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_over_stacked_layers_is_the_loop(remat):
    """Also the noise: every layer draws with its own key, at its own step."""
    model, x = Stacked(remat, rngs=nnx.Rngs(0)), inputs()
    s24.refresh(model, 5)
    blocks = nnx.List([unstacked(model, i) for i in range(LAYERS)])

    def loop(blocks):
        y = x
        for block in blocks:
            y = y + block(y)
        return (y**2).mean()

    want_loss, want = nnx.jit(nnx.value_and_grad(loop))(blocks)
    loss, got = nnx.jit(nnx.value_and_grad(lambda m: (m(x) ** 2).mean()))(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for path, value in arrays(got).items():
        per_layer = np.stack([arrays(want)[(i, *path[1:])] for i in range(LAYERS)])
        assert np.linalg.norm(value - per_layer) <= 1e-5 * np.linalg.norm(per_layer), path


def test_stacked_layers_are_refreshed_at_multiples():
    model = Stacked(rngs=nnx.Rngs(0))
    graphdef = nnx.graphdef(model)

    @jax.jit
    def compiled(state, step):
        model = nnx.merge(graphdef, state)
        s24.refresh(model, step)
        return nnx.state(model)

    for how in (compiled, None):
        for step in (EVERY, EVERY + 1):
            old = arrays(model)
            for part in (model.blocks.up, model.blocks.down):
                part.kernel[...] = -part.kernel[...][:, ::-1] * jnp.arange(1.0, part.kernel.shape[-1] + 1)
            params = arrays(nnx.state(model, nnx.Param))
            if how:
                nnx.update(model, how(nnx.state(model), jnp.int32(step)))
            else:
                s24.refresh(model, step)
            for name in ("up", "down"):
                part = getattr(model.blocks, name)
                np.testing.assert_array_equal(part.step[...], np.full(LAYERS, step))
                want = s24.transposable_mask24(part.kernel[...])
                if step % EVERY:
                    want = old["blocks", name, "state", "mask"]
                np.testing.assert_array_equal(part.state["mask"][...], want)
            for path, value in params.items():
                np.testing.assert_array_equal(arrays(model)[path], value)


def test_modes_masks_and_folding_reach_stacked_layers():
    model, x = Stacked(rngs=nnx.Rngs(0)), inputs()
    masks = s24.nn.masks(model)
    assert jax.tree.structure(masks) == jax.tree.structure(nnx.state(model, nnx.Param))
    assert arrays(masks)["blocks", "up", "kernel"].shape == (LAYERS, d, f)
    assert [path for path, _ in s24.nn.sparse_layers(model)] == [("blocks", "down"), ("blocks", "up")]
    state = nnx.state(model, s24.nn.SparseState)
    key, folded = (
        arrays(state)["blocks", "up", "key"],
        arrays(s24.nn.fold_key(state, 4))["blocks", "up", "key"],
    )
    for i in range(LAYERS):
        want = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key[i]), 4))
        np.testing.assert_array_equal(folded[i], want)
    y = model(x)
    s24.nn.set_sparse(model, False)
    assert not np.allclose(model(x), y)


def test_noise_of_stacked_layers_follows_the_step():
    model = Stacked(rngs=nnx.Rngs(0))
    runs = []
    for step in (1, 2, 1):
        s24.refresh(model, step)
        runs.append(noise(model)["blocks", "up", "kernel"])
    for i in range(LAYERS):
        assert not np.array_equal(runs[0][i], runs[1][i])
    np.testing.assert_array_equal(runs[0], runs[2])


@pytest.mark.parametrize("method", [s24.methods.SSTE(), s24.methods.FST(fp8="tensor")], ids=["SSTE", "fp8"])
def test_stacked_layers_are_merged_as_each_alone(method):
    """The scales of a stack were not those of its matrices: one of 8 bits was that of all of them."""

    @nnx.vmap(in_axes=(0,), out_axes=0)
    def made(kernel):
        layer = s24.nn.Linear(d, f, method=method, use_bias=False, rngs=nnx.Rngs(0))
        layer.kernel[...] = kernel
        s24.nn.reset(layer)
        return layer

    kernels = jax.random.normal(jax.random.key(0), (LAYERS, d, f)) * jnp.array([1.0, 30, 0.01])[:, None, None]
    merged = s24.nn.merge_adapters(made(kernels)).kernel[...]
    each = [s24.nn.merge_adapters(made(kernel[None])).kernel[0] for kernel in kernels]
    np.testing.assert_array_equal(merged, np.stack(each))
