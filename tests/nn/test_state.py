"""refresh, modes, masks and noise of a model."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from tests.nn.models import FST, METHODS, Net, T, arrays, assert_same, d, f, inputs, noise

EVERY = FST.refresh_every


def layer(seed=0, method=FST):
    return s24.nn.Linear(d, f, method=method, use_bias=False, rngs=nnx.Rngs(seed))


def nudge(model, scale=1.0):
    """Moves every kernel so far that masks change."""
    for _, sparse in s24.nn.sparse_layers(model):
        sparse.kernel[...] = sparse.kernel[...] + scale * jax.random.normal(
            jax.random.key(1), sparse.kernel.shape
        )


def mask_is_fresh(sparse):
    return np.array_equal(sparse.state["mask"][...], s24.transposable_mask24(sparse.kernel[...]))


# ---- refresh


@pytest.mark.parametrize("traced", [False, True])
def test_masks_are_refreshed_at_multiples_only(traced):
    """The step is recorded always, parameters and keys are never touched."""
    model = Net(rngs=nnx.Rngs(0))
    graphdef, _ = nnx.split(model)

    @jax.jit
    def compiled(state, step):
        model = nnx.merge(graphdef, state)
        s24.refresh(model, step)
        return nnx.state(model)

    s24.refresh(model, 0)
    before = arrays(model)
    nudge(model)
    moved = arrays(nnx.state(model, nnx.Param))
    for step in (1, EVERY - 1, EVERY + 1, 3 * EVERY, 3 * EVERY + 2, 2 * EVERY, 0):
        if traced:
            nnx.update(model, compiled(nnx.state(model), jnp.int32(step)))
        else:
            s24.refresh(model, step)
        for _, sparse in s24.nn.sparse_layers(model):
            assert int(sparse.step[...]) == step
            assert sparse.step[...].dtype == jnp.int32
            assert mask_is_fresh(sparse) == (step % EVERY == 0)
        for path, value in arrays(model).items():
            if path in moved:
                np.testing.assert_array_equal(value, moved[path])
            elif path[-1] == "key":
                np.testing.assert_array_equal(value, before[path])
        if step % EVERY == 0:  # make masks stale again
            nudge(model, scale=2.0 + step)
            moved = arrays(nnx.state(model, nnx.Param))
    if traced:
        assert compiled._cache_size() == 1


def test_the_caller_may_say_whether_a_refresh_is_due():
    model = Net(rngs=nnx.Rngs(0))
    graphdef = nnx.graphdef(model)

    def refreshed(state, step, due):
        model = nnx.merge(graphdef, state)
        s24.refresh(model, step, due=due)
        return nnx.state(model)

    nudge(model)
    compiled = jax.jit(refreshed, static_argnames="due")
    for due in (False, True):
        nnx.update(model, compiled(nnx.state(model), jnp.int32(EVERY * (1 - due) + due), due=due))
        for _, sparse in s24.nn.sparse_layers(model):
            assert mask_is_fresh(sparse) == due
            assert int(sparse.step[...]) == (1 if due else EVERY)


def test_refresh_outside_jit_compiles_nothing_anew(caplog):
    """A loop may call it in every step: after one round of refreshing and keeping, all is compiled."""
    model = Net(rngs=nnx.Rngs(0))

    def steps():
        for step in range(EVERY + 1):
            s24.refresh(model, step)
            s24.refresh(model, jnp.int32(step))

    steps()
    with caplog.at_level(logging.WARNING, logger="jax"), jax.log_compiles():
        steps()
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
        jax.jit(lambda x: x + 3)(1.0)
    assert [r for r in caplog.records if "Compiling" in r.getMessage()], "the log must be seen"


def test_without_a_step_masks_are_refreshed_now():
    model = Net(rngs=nnx.Rngs(0))
    s24.refresh(model, 7)
    nudge(model)
    s24.refresh(model)
    for _, sparse in s24.nn.sparse_layers(model):
        assert mask_is_fresh(sparse)
        assert int(sparse.step[...]) == 7


def test_the_values_are_the_masters_in_every_step_under_a_cached_mask():
    """What FST rests on: a mask may be stale, a value never is; 2:4 along both axes at all times."""
    model = layer()
    s24.refresh(model, 0)
    cached = np.asarray(model.state["mask"][...])
    for step in range(1, 2 * EVERY + 1):
        model.kernel[...] = model.kernel[...] - 0.5 * jax.random.normal(jax.random.key(step), (d, f))
        s24.refresh(model, step)
        if step % EVERY == 0:
            new = np.asarray(model.state["mask"][...])
            assert not np.array_equal(new, cached)
            cached = new
        forward = np.asarray(model(jnp.eye(d)))
        _, vjp = jax.vjp(model, jnp.zeros((f, d)))
        backward = np.asarray(vjp(jnp.eye(f))[0]).T
        want = np.where(cached, model.kernel[...], 0)
        np.testing.assert_array_equal(forward, want)
        np.testing.assert_array_equal(backward, want)
        assert (cached.reshape(d // 4, 4, f).sum(1) == 2).all()
        assert (cached.reshape(d, f // 4, 4).sum(2) == 2).all()


def test_dense_mode_records_the_step_and_leaves_the_masks():
    model = Net(rngs=nnx.Rngs(0))
    s24.nn.set_sparse(model, False)
    nudge(model)
    before = arrays(model)
    s24.refresh(model, EVERY)
    s24.refresh(model)
    for path, value in arrays(model).items():
        if path[-1] == "refreshed":
            assert value == -1, "due as soon as the layer is sparse again"
        elif path[-1] != "checksum":
            want = np.int32(EVERY) if path[-1] == "step" else before[path]
            np.testing.assert_array_equal(value, want)


@pytest.mark.parametrize("method", ["Dense", "STE"])
def test_refresh_changes_nothing_but_steps_where_there_is_no_state(method):
    model = Net(METHODS[method], rngs=nnx.Rngs(0))
    before = arrays(model)
    s24.refresh(model, 8)
    s24.refresh(model)
    for path, value in arrays(model).items():
        if path[-1] != "step":
            np.testing.assert_array_equal(value, before[path])


# ---- modes


def test_a_switch_changes_the_mode_and_nothing_else():
    model, x = Net(rngs=nnx.Rngs(0)), inputs()
    sparse_graph, before, sparse_y = nnx.graphdef(model), arrays(model), model(x)
    s24.nn.set_sparse(model, False)
    dense_graph, dense_y = nnx.graphdef(model), model(x)
    assert dense_graph != sparse_graph, "a compiled step must not be reused across a switch"
    assert not np.allclose(dense_y, sparse_y)
    twin = Net(METHODS["Dense"], rngs=nnx.Rngs(0))
    np.testing.assert_allclose(dense_y, twin(x), rtol=1e-6, atol=1e-6)
    for path, value in arrays(model).items():
        if path[-1] == "dense_from":
            assert value and not before[path]
        else:
            np.testing.assert_array_equal(value, before[path])
    s24.nn.set_sparse(model, True)
    for path, value in arrays(model).items():
        np.testing.assert_array_equal(value, before[path])
    assert nnx.graphdef(model) == sparse_graph
    np.testing.assert_array_equal(model(x), sparse_y)


@pytest.mark.parametrize("dense", ["up", "down"])
def test_half_of_a_block_may_be_dense(dense):
    """Whoever switches one matrix of a block gets that, not a block that goes on as before."""
    block, x = s24.nn.FFN(d, f, method=FST, activation="relu", rngs=nnx.Rngs(0)), inputs()
    s24.nn.set_sparse(getattr(block, dense), False)
    used = {}
    for name in ("up", "down"):
        part = getattr(block, name)
        used[name] = (
            part.kernel[...] if name == dense else jnp.where(part.state["mask"][...], part.kernel[...], 0)
        )
    want = jax.nn.relu(x @ used["up"]) @ used["down"]
    np.testing.assert_allclose(block(x), want, rtol=1e-5, atol=1e-6)


def test_one_compilation_per_mode():
    model, x = Net(rngs=nnx.Rngs(0)), inputs()
    traces = []

    @nnx.jit
    def forward(model, x):
        traces.append(model.block.up.sparse)
        return model(x)

    for mode in (True, True, False, False, True):
        s24.nn.set_sparse(model, mode)
        forward(model, x)
    assert traces == [True, False]


def test_sparse_layers_are_found_wherever_they_are():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Net(rngs=rngs), Net(METHODS["Dense"], rngs=rngs)])
            self.named = nnx.Dict({"a": s24.nn.GatedFFN(d, f, method=METHODS["STE"], rngs=rngs)})

    found = s24.nn.sparse_layers(Deep(nnx.Rngs(0)))
    assert {path for path, _ in found} == {
        ("blocks", 0, "block", "up"),
        ("blocks", 0, "block", "down"),
        ("blocks", 0, "head"),
        *(("named", "a", name) for name in ("gate", "up", "down")),
    }
    assert all(isinstance(found_layer, s24.nn.Linear) for _, found_layer in found)
    assert [path for path, _ in s24.nn.sparse_layers(layer())] == [()]


# ---- masks


def test_masks_are_a_tree_like_the_parameters():
    model = Net(rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    masks = s24.nn.masks(model)
    assert jax.tree.structure(masks) == jax.tree.structure(params)
    flat = arrays(masks)
    in_use = {(*path, "kernel"): found.state["mask"][...] for path, found in s24.nn.sparse_layers(model)}
    assert len(in_use) == 3
    for path, mask in flat.items():
        assert mask.dtype == np.bool_
        np.testing.assert_array_equal(mask, in_use.get(path, np.True_))
        np.broadcast_to(mask, arrays(params)[path].shape)
    # The masks in use, not fresh ones; and the model itself is left as it was.
    nudge(model)
    for path, mask in arrays(s24.nn.masks(model)).items():
        np.testing.assert_array_equal(mask, flat[path])
    assert all(v.dtype == np.float32 for v in arrays(nnx.state(model, nnx.Param)).values())


@pytest.mark.parametrize("method", [s24.methods.STE(), s24.methods.SRSTE(n=1, m=8)], ids=str)
def test_masks_that_are_not_stored_are_fresh(method):
    model = Net(method, rngs=nnx.Rngs(0))
    nudge(model)
    flat = arrays(s24.nn.masks(model))
    for path, found in s24.nn.sparse_layers(model):
        np.testing.assert_array_equal(flat[*path, "kernel"], method.fresh_mask(found.kernel[...]))


@pytest.mark.parametrize("how", ["dense mode", "Dense"])
def test_where_no_mask_is_in_use_everything_is_kept(how):
    model = Net(METHODS.get(how, FST), rngs=nnx.Rngs(0))
    if how == "dense mode":
        s24.nn.set_sparse(model, False)
    masks = s24.nn.masks(model)
    assert jax.tree.structure(masks) == jax.tree.structure(nnx.state(model, nnx.Param))
    assert all(v.shape == () and v for v in arrays(masks).values())


# ---- noise


def changed(a, b):
    return {path for path in a if not np.array_equal(a[path], b[path])}


WEIGHTS = {("block", "up", "kernel"), ("block", "down", "kernel"), ("head", "kernel")}


def test_noise_differs_from_step_to_step_and_repeats():
    """Only weight gradients of sparse layers hold noise; the same step draws the same."""
    model = Net(rngs=nnx.Rngs(0))
    runs = []
    for step in (1, 2, 1):
        s24.refresh(model, step)
        runs.append(noise(model))
    assert changed(runs[0], runs[1]) == WEIGHTS
    assert not changed(runs[0], runs[2])


def test_noise_differs_from_layer_to_layer():
    """Two layers with the same weights, input and cotangent."""

    class Twins(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = (s24.nn.Linear(d, f, method=FST, rngs=rngs) for _ in range(2))
            self.second.kernel[...] = self.first.kernel[...]
            s24.refresh(self)

        def __call__(self, x):
            return self.first(x) + self.second(x)

    gradient = noise(Twins(nnx.Rngs(0)))
    assert not np.array_equal(gradient["first", "kernel"], gradient["second", "kernel"])
    np.testing.assert_array_equal(gradient["first", "bias"], gradient["second", "bias"])


def test_the_noise_is_that_of_key_and_step():
    model = layer()
    x = jnp.eye(d)
    s24.refresh(model, 5)
    key = jax.random.fold_in(jax.random.wrap_key_data(model.key[...]), 5)
    dy = inputs(d, f)
    gradient = nnx.grad(lambda m: (m(x) * dy).sum())(model)
    want = s24.mvue24(jax.random.fold_in(key, 2), dy, 0)  # the third product of a linear layer
    np.testing.assert_array_equal(gradient["kernel"][...], want)


def test_keys_follow_the_seed():
    keys = [np.asarray(layer(seed).key[...]).tobytes() for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("traced", [False, True])
def test_fold_key_changes_the_noise_and_only_that(traced):
    model, x = Net(rngs=nnx.Rngs(0)), inputs()
    graphdef, params, state = nnx.split(model, nnx.Param, s24.nn.SparseState)
    before = arrays(state)
    fold = jax.jit(s24.nn.fold_key) if traced else s24.nn.fold_key
    folded = [fold(state, i) for i in (0, 1)]
    for path, value in before.items():
        np.testing.assert_array_equal(arrays(state)[path], value)  # the original is kept
        copies = [arrays(state_i)[path] for state_i in folded]
        if path[-1] == "key":
            words = [
                jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(value), i)) for i in (0, 1)
            ]
            np.testing.assert_array_equal(copies, words)
        else:
            np.testing.assert_array_equal(copies, [value, value])

    def gradient(state):
        loss = lambda params: (nnx.merge(graphdef, params, state)(x) ** 2).mean()  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(params)
        return arrays(gradient) | {"loss": np.asarray(value)}

    runs = [gradient(s) for s in (state, *folded)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert changed(runs[a], runs[b]) == WEIGHTS
    assert nnx.merge(graphdef, params, folded[0])(x).shape == (T, d)


def test_fold_key_leaves_other_variables_named_key_alone():
    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.key = nnx.Param(jnp.zeros((2,), jnp.uint32))
            self.dropout = nnx.Dropout(0.5, rngs=rngs)  # holds an RngKey called key
            self.out = s24.nn.Linear(d, d, method=FST, rngs=rngs)

    model = Attention(nnx.Rngs(0))
    state = nnx.state(model)
    folded = s24.nn.fold_key(state, 3)
    different = changed(arrays(state), arrays(folded))
    assert different == {("out", "key")}


def test_wrong_calls_change_nothing_and_say_so():
    """refresh(state) did nothing, set_sparse(model, "dense") switched to sparse, step 2.5 was cut to 2."""
    model = s24.nn.Linear(8, 8, method=s24.methods.FST(), rngs=nnx.Rngs(0))
    for call in (s24.refresh, s24.nn.masks, lambda m: s24.nn.set_sparse(m, True)):
        for value in (None, nnx.state(model)):
            with pytest.raises(TypeError, match=r"needs the model, an nnx.Module, got"):
                call(value)
    for step in (2.5, -1, jnp.arange(2), "2", {}):
        with pytest.raises(ValueError, match=r"refresh: step=.* must be the number of the optimiser step"):
            s24.refresh(model, step)
    for due in ("no", 1):
        with pytest.raises(TypeError, match=r"refresh: due=.* must be True, False, None, or a frozenset"):
            s24.refresh(model, 2, due=due)
    for call, name in ((s24.nn.set_sparse, "sparse"), (s24.nn.set_adapting, "adapting")):
        with pytest.raises(TypeError, match=rf"{name} must be True or False, got 'dense'"):
            call(model, "dense")
    s24.refresh(model, jnp.int32(4), due=jnp.asarray(True))
    assert int(model.step[...]) == 4


def test_what_is_no_state_and_no_index_is_not_folded():
    model = s24.nn.Linear(8, 8, method=s24.methods.FST(), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"fold_key: needs a state, such as nnx.state\(.*, got Linear"):
        s24.nn.fold_key(model, 1)
    for data in (1.5, jnp.arange(2)):
        with pytest.raises(TypeError, match="fold_key: data must be one integer"):
            s24.nn.fold_key(nnx.state(model, s24.nn.SparseState), data)


@pytest.mark.parametrize(
    "method", [FST, s24.methods.SSTE(), s24.methods.BiMask()], ids=["FST", "SSTE", "BiMask"]
)
def test_arrays_of_numpy_are_those_of_a_model(method):
    """A state from the host was read-only, and one that is not would have been written into."""
    model, twin = (s24.nn.FFN(d, f, method=method, rngs=nnx.Rngs(seed)) for seed in range(2))
    s24.refresh(model, 0)
    host = jax.device_get(nnx.state(model))
    nnx.update(twin, host)
    np.testing.assert_array_equal(twin(inputs()), model(inputs()))
    for each in (model, twin):
        s24.refresh(each, 1)
        s24.nn.set_sparse(s24.nn.set_sparse(each, False), True)
        s24.refresh(each, 2)
    assert_same(model, twin)
    assert_same(s24.nn.masks(model), s24.nn.masks(twin))
    assert not host["up"]["step"][...].any()
    before = model(inputs())
    nnx.update(twin, jax.device_get(nnx.state(model)))
    np.testing.assert_allclose(s24.nn.merge_adapters(twin)(inputs()), before, rtol=1e-5, atol=1e-6)
