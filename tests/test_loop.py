"""`s24.Loop`: what it does in which order, for modules and for pytrees."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from tests.nn.models import arrays

T, d, f = 32, 16, 32
STEPS = 8
METHODS = {
    "FST": s24.methods.FST(refresh_every=3, dense_fraction=0.25, decay=1e-2),
    "Venom": s24.methods.Venom(v=16, m=8, clusters=4, dense_warmup=3, sparse_share=0.6),
}


def batch(step):
    x = jax.random.normal(jax.random.key(step), (T, d))
    return {"x": x, "y": jnp.roll(x, 1, -1)}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def ffn(method):
    return s24.nn.FFN(d, f, method=method, rngs=nnx.Rngs(0))


def tx_of(method):
    return s24.optim.for_method(method, 1e-2, STEPS)


def loop_of(method, tx=None, schedule=STEPS, **options):
    return s24.Loop(ffn(method), loss, tx or tx_of(method), schedule, **options)


def tree_loop(method, tx=None, schedule=STEPS, **options):
    module = ffn(method)
    params = {"block": {"w1": module.up.kernel[...], "w2": module.down.kernel[...]}}
    tree = s24.Tree(params, method, ["block"], jax.random.key(7))

    def tree_loss(model, batch):
        y = model.ffn(batch["x"], model.params["block"], model.sparse["block"])
        return jnp.mean((y - batch["y"]) ** 2)

    return s24.Loop(tree, tree_loss, tx or tx_of(method), schedule, **options)


@functools.cache
def run(kind, name):
    """The state after every step, on the host."""
    loop = (loop_of if kind == "module" else tree_loop)(METHODS[name], accumulate=2, debug=True)
    state, states = loop.init(), []
    for step in range(STEPS):
        state, metrics = loop.advance(state, batch(step), step)
        assert jnp.isfinite(metrics["loss"])
        states.append(jax.tree.map(np.asarray, state))
    return loop, states


@pytest.mark.parametrize("kind", ["module", "tree"])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_due_is_done(kind, name):
    """Masks at multiples, neurons at the switch, modes and ages in the state; and debug finds all well."""
    loop, states = run(kind, name)
    assert int(states[-1]["step"]) == STEPS
    for step, state in enumerate(states):
        sparse = loop.schedule.phase_at(step).sparse
        modes = loop.view.entries(state["sparse"], "dense_from").values()
        assert {bool((mark != 0).any()) for mark in modes} == {not sparse}
        for age in loop.view.entries(state["sparse"], "refreshed").values():
            assert age == (step - step % 3 if sparse else -1)
        if loop.arranges:
            assert loop.arranged(state) == (step >= 3)
    evaluated = loop.evaluate(jax.tree.map(jnp.asarray, states[-1]), [batch(99)])
    assert evaluated["dense"] != evaluated["sparse"]


def test_a_tree_and_a_module_train_alike():
    """Without noise, which has other keys."""
    method = s24.methods.FST(mvue=None, refresh_every=2, dense_fraction=0.25, decay=1e-2)
    ends = []
    for make in (loop_of, tree_loop):
        loop = make(method)
        state = loop.init()
        for step in range(4):
            state, _ = loop.advance(state, batch(step), step)
        ends.append(sorted(jax.tree.leaves(state["params"]), key=lambda w: w.shape))
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_going_on_from_any_state_is_the_same_as_not_stopping(name):
    """In the same loop: a state that a checkpoint held goes on to the last bit, whatever the phase."""
    loop, states = run("module", name)
    for stop in (2, 5):
        state = loop.restore(jax.tree.map(jnp.asarray, states[stop]))
        state, _ = loop.advance(state, batch(stop + 1), stop + 1)
        jax.tree.map(np.testing.assert_array_equal, state, states[stop + 1])


def test_a_state_of_another_run_is_refused():
    loop, states = run("module", "FST")
    state = states[5]
    with pytest.raises(ValueError, match=r"of the checkpoint is absent; this loop needs"):
        loop.restore({**state, "params": {}})
    with pytest.raises(ValueError, match=r"step 80, outside \[0, 8\]"):
        loop.restore({**state, "step": np.int32(80)})
    other = s24.Schedule((s24.Phase("dense", 8, sparse=False),))
    with pytest.raises(
        ValueError, match=r"step 5 was sparse, but by this schedule it was dense: give the loop"
    ):
        s24.Loop(ffn(METHODS["FST"]), loss, tx_of(METHODS["FST"]), other).restore(state)
    venom, states = run("module", "Venom")
    flat = nnx.to_flat_state(states[4]["sparse"])
    blank = [(p, v.replace(np.zeros_like(v[...])) if p[-1] == "arranged" else v) for p, v in flat]
    with pytest.raises(ValueError, match="neurons were never arranged"):
        venom.restore({**states[4], "sparse": nnx.from_flat_state(blank)})


@pytest.mark.parametrize("made", [loop_of, tree_loop])
def test_a_state_with_a_scale_that_no_method_makes_is_refused(made):
    """Of any weight of a block."""
    loop = made(s24.methods.SSTE(mvue=None))
    state = loop.init()
    assert loop.restore(state) is state
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    scales = [n for n, (path, _) in enumerate(leaves) if "scale" in jax.tree_util.keystr(path)]
    assert len(scales) == 2
    for n in scales:
        values = [-x if m == n else x for m, (_, x) in enumerate(leaves)]
        with pytest.raises(ValueError, match=r"Loop: state.*'scale'.* is -1\..*must be finite and greater"):
            loop.restore(jax.tree.unflatten(tree, values))


@dataclasses.dataclass(frozen=True)
class Signed(s24.methods.STE):
    """Keeps a number under the name of one that another method keeps positive."""

    def init(self, w, role="w"):
        return super().init(w, role) | {"scale": jnp.zeros(w.shape[:-2])}

    def state_shapes(self, shape, role="w"):
        return {**super().state_shapes(shape, role), "scale": jax.ShapeDtypeStruct(shape[:-2], jnp.float32)}

    def refresh(self, state, w, role="w"):
        return super().refresh(state, w, role) | {"scale": state["scale"]}


def test_a_state_is_asked_what_its_own_method_keeps_positive():
    """A number of another method by the same name was refused in a state that `init` made."""
    methods = s24.methods.SSTE(mvue=None), Signed()
    blocks = nnx.Sequential(*(s24.nn.FFN(d, f, method=method, rngs=nnx.Rngs(0)) for method in methods))
    loop = s24.Loop(blocks, loss, tx_of(methods[0]), STEPS, method=methods[0])
    state = loop.init()
    assert loop.restore(state) is state
    flat = nnx.to_flat_state(state["sparse"])
    scales = [(path, value) for path, value in flat if path[-1] == "scale"]
    negative = [(p, v.replace(v[...] - 2)) if p[-1] == "scale" else (p, v) for p, v in flat]
    assert {float(value[...]) for _, value in scales} > {0.0}
    with pytest.raises(ValueError, match=r"layers.*\[0\].*'scale'.* must be finite and greater than 0"):
        loop.restore({**state, "sparse": nnx.from_flat_state(negative)})


def test_debug_says_what_does_not_hold():
    loop, states = run("module", "FST")
    with pytest.raises(RuntimeError, match=r"was told step 4, but this is step 5: its noise is not new"):
        loop.check(states[4], 5)
    with pytest.raises(RuntimeError, match=r"masks of (up|down) are \d steps old at step 5.* every 3 steps"):
        loop.check(states[2], 5)


def test_debug_compares_the_age_of_masks_with_the_period_of_their_own_method():
    """Another layer's longer period excuses nothing, and the message names the layer's own method."""

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.up = s24.nn.Linear(d, f, method=s24.methods.FST(refresh_every=2, mvue=None), rngs=rngs)
            self.down = s24.nn.Linear(f, d, method=s24.methods.SLoPe(refresh_every=50), rngs=rngs)

        def __call__(self, x):
            return self.down(jax.nn.relu(self.up(x)))

    model = Two(nnx.Rngs(0))
    schedule = s24.Schedule((s24.Phase("sparse", 60, sparse=True),))
    loop = s24.Loop(model, loss, optax.sgd(1e-2), schedule, method=model.down.method)
    state, _ = loop.advance(loop.init(), batch(0), 0)

    def told(step):
        own = loop.view.refresh(state["params"], state["sparse"], step, sparse=True, due=False)
        return {**state, "sparse": own}

    loop.check(told(1), 1)
    with pytest.raises(RuntimeError, match="up are 8 steps old at step 8; FST refreshes them every 2 steps"):
        loop.check(told(8), 8)


class Wrapped(nnx.Module):
    def __init__(self):
        self.block = nnx.List([ffn(METHODS["FST"])])
        self.last = s24.nn.Linear(d, d, method=METHODS["FST"], rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(self.block[0](x))


@pytest.mark.parametrize(("rows", "place"), [(30, "block.0"), (T, "last")])
def test_an_error_of_a_call_names_the_layer(rows, place):
    def cut(model, batch):
        y = model.block[0](batch["x"][:rows])
        return model.last(y[: rows - 2]).sum()

    loop = s24.Loop(Wrapped(), cut, tx_of(METHODS["FST"]), STEPS)
    with pytest.raises(ValueError, match=rf"^{place}: .*\(30, 16\)"):
        loop.advance(loop.init(), batch(0), 0)


class Reader(Wrapped):
    """Multiplies by a kernel itself."""

    def __call__(self, x):
        return self.block[0](x) @ self.last.kernel[...]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_layers_that_the_loss_does_not_call_are_warned_of_once(accumulate):
    def mean(model, batch):
        return model(batch["x"]).mean()

    kind = type("Reader", (Reader,), {})  # one that no loop has had
    loop = s24.Loop(kind(), mean, tx_of(METHODS["FST"]), STEPS, accumulate=accumulate)
    with pytest.warns(UserWarning, match=r"1 sparse layers did not run in the loss: last\. .*layer\(x\)"):
        state, _ = loop.advance(loop.init(), batch(0), 0)
    with warnings.catch_warnings(action="error"):
        loop.advance(state, batch(1), 1)
        right = s24.Loop(Wrapped(), mean, tx_of(METHODS["FST"]), STEPS, accumulate=accumulate)
        right.advance(right.init(), batch(0), 0)


def test_a_function_that_is_traced_once_for_all_is_no_idle_layer():
    """jax.jit keeps what it traced in an evaluation, and for another loop."""
    mean = jax.jit(lambda model, batch: model(batch["x"]).mean())
    for evaluated in (True, False):
        loop = s24.Loop(Wrapped(), mean, tx_of(METHODS["FST"]), STEPS)
        state = loop.init()
        if evaluated:
            loop.evaluate(state, [batch(0)])
        with warnings.catch_warnings(action="error"):
            loop.advance(state, batch(0), 0)


@pytest.mark.parametrize("method", [s24.methods.STE(), s24.methods.FST()])
def test_a_model_that_is_a_layer_itself_runs(method):
    model = s24.nn.Linear(d, d, method=method, rngs=nnx.Rngs(0))
    loop = s24.Loop(model, lambda model, batch: model(batch["x"]).mean(), tx_of(method), STEPS)
    with warnings.catch_warnings(action="error"):
        loop.advance(loop.init(), batch(0), 0)


SOFT = s24.methods.Activation24(soft_weights=True, dense_warmup=2)


@pytest.mark.parametrize(
    ("method", "by_sparse"),
    [
        (s24.methods.STE(), [False, True, True]),
        (s24.methods.FST(dense_fraction=0.5), [False, True, False]),
        (s24.methods.Activation24(dense_warmup=2), [False, False, False]),
        (SOFT, [False, False, True]),
    ],
    ids=["STE", "FST", "Activation24", "soft weights"],
)
def test_the_model_of_a_state_has_the_weights_that_its_last_step_multiplied(method, by_sparse):
    loop = s24.Loop(ffn(method), loss, tx_of(method), STEPS)
    state, found = loop.init(), [loop.model(loop.init()).up.sparse]
    for step in range(STEPS):
        state, _ = loop.advance(state, batch(step), step)
        if step in (1, STEPS - 1):
            found.append(loop.model(state).up.sparse)
    assert found == by_sparse


def test_the_dense_model_of_a_sparse_phase_knows_that_its_masks_may_become_old():
    """It was in dense mode, but its state told of sparse mode: a switch back took masks of other kernels."""
    loop, states = run("module", "FST")
    model = loop.model(states[3], sparse=False)
    s24.nn.set_sparse(model, True)
    model(batch(0)["x"])  # nothing has moved
    model = loop.model(states[3], sparse=False)
    model.up.kernel[...] = -model.up.kernel[...].T.reshape(d, f)
    s24.nn.set_sparse(model, True)
    with pytest.raises(ValueError, match=r"those of another kernel.*Call s24.refresh"):
        model(batch(0)["x"])


def test_inside_of_jit_the_model_of_a_state_needs_its_mode():
    loop = s24.Loop(ffn(SOFT), loss, tx_of(SOFT), STEPS)
    x = batch(0)["x"]
    assert jax.jit(lambda state: loop.model(state, sparse=True)(x))(loop.init()).shape == x.shape
    with pytest.raises(TypeError, match=r"Loop\.model: inside of jit say sparse=True or sparse=False"):
        jax.jit(lambda state: loop.model(state)(x))(loop.init())


@pytest.mark.parametrize("kind", ["module", "tree"])
def test_the_sparse_model_of_a_state_of_a_dense_phase(kind):
    """It has masks for the weights as they are, whatever the mode of the last step was."""
    loop, states = run(kind, "FST")
    assert not loop.schedule.phase_at(STEPS - 1).sparse
    data = batch(0)
    model = loop.model(states[-1], sparse=True)
    got = (
        model(data["x"])
        if kind == "module"
        else model.ffn(data["x"], model.params["block"], model.sparse["block"])
    )
    expected = loop.evaluate(states[-1], [data])["sparse"]
    np.testing.assert_allclose(jnp.mean((got - data["y"]) ** 2), expected, rtol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_state_on_the_host_goes_on_as_that_on_the_device(name):
    """Arrays of NumPy, as of a pickled checkpoint: the order of neurons, and their moments, follow."""
    loop, states = run("module", name)
    state = states[0]
    for step in range(1, 5):
        state, _ = loop.advance(jax.device_get(state), batch(step), step)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), states[4])


@pytest.mark.parametrize("kind", ["module", "tree"])
def test_noise_needs_no_default_kind_of_keys(kind):
    """`jax_default_prng_impl` may be another one than that of the words that layers keep."""
    with jax.default_prng_impl("rbg"):
        loop = (loop_of if kind == "module" else tree_loop)(METHODS["FST"], accumulate=2, debug=True)
        state = loop.init()
        for step in range(STEPS):
            state, metrics = loop.advance(state, batch(step), step)
    assert jnp.isfinite(metrics["loss"])


def test_soft_weights_of_a_block_are_merged_into_its_kernels():
    loop = s24.Loop(ffn(SOFT), loss, tx_of(SOFT), STEPS)
    state = loop.init()
    for step in range(STEPS):
        state, _ = loop.advance(state, batch(step), step)
    model, x = loop.model(state), batch(0)["x"]
    up, down = model.up, model.down
    want = [
        np.asarray(layer.state["scale"][...]) * s24.soft24(layer.kernel[...], axis)
        for layer, axis in ((up, -2), (down, -1))
    ]
    s24.nn.merge_adapters(model)
    for layer, kernel in zip((up, down), want, strict=True):
        assert (kernel == 0).mean() >= 0.5 and not layer.sparse
        np.testing.assert_allclose(layer.kernel[...], kernel, rtol=1e-5)
    assert np.isfinite(model(x)).all()


def test_a_finished_state_is_written_to_module_and_optimizer():
    method = METHODS["FST"]
    model = ffn(method)
    optimizer = nnx.Optimizer(model, tx_of(method), wrt=nnx.Param)
    loop = s24.Loop(model, loss, optimizer, STEPS)
    _, states = run("module", "FST")
    state = jax.tree.map(jnp.asarray, states[5])
    loop.write(state, model, optimizer)
    assert int(optimizer.step[...]) == 6
    for path, value in arrays(state["params"]).items():
        np.testing.assert_array_equal(arrays(model)[path], value)
    x = batch(0)["x"]
    dense = nnx.merge(loop.view.graphdef(False), state["params"], state["sparse"])
    np.testing.assert_array_equal(loop.model(state, sparse=False)(x), dense(x))
    assert not np.array_equal(loop.model(state)(x), dense(x))


def test_a_state_that_advance_took_is_refused():
    """JAX said "Array has been deleted with shape=int32[]" and no more."""
    model = ffn(METHODS["FST"])
    loop = s24.Loop(model, loss, tx_of(METHODS["FST"]), STEPS)
    taken = loop.init()
    kept = jax.tree.map(jnp.copy, taken)
    state, _ = loop.advance(taken, batch(0), 0)
    for name, call in {
        "advance": lambda: loop.advance(taken, batch(0), 0),
        "evaluate": lambda: loop.evaluate(taken, [batch(0)]),
        "model": lambda: loop.model(taken),
        "write": lambda: loop.write(taken, model),
    }.items():
        with pytest.raises(ValueError, match=rf"Loop\.{name}: the arrays of this state are gone: .* copy"):
            call()
    again, _ = loop.advance(kept, batch(0), 0)
    jax.tree.map(np.testing.assert_array_equal, again["params"], state["params"])


class Dropped(nnx.Module):
    def __init__(self):
        self.ffn, self.drop = ffn(METHODS["FST"]), nnx.Dropout(0.1, rngs=nnx.Rngs(0))


def test_what_a_loop_cannot_run_is_refused():
    method = METHODS["FST"]
    tx, params = tx_of(method), {"block": {"w1": jnp.ones((d, f)), "w2": jnp.ones((f, d))}}
    cases = [
        (lambda: s24.Loop(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), loss, tx, 8), "has 0 sparse layers"),
        (lambda: s24.Loop(ffn(method), None, tx, 8), "loss must be a function"),
        (lambda: s24.Loop(ffn(method), loss, "adam", 8), "tx must be an optax transformation"),
        (
            lambda: s24.Loop(ffn(method), loss, optax.MultiSteps(tx, 2), 8),
            "MultiSteps.*accumulate=. the number",
        ),
        (
            lambda: loop_of(method, optax.MultiSteps(tx, 2).gradient_transformation()).init(),
            "MultiSteps.*accumulate=. the number",
        ),
        (
            lambda: loop_of(
                method,
                optax.chain(optax.clip(1.0), optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()),
            ).init(),
            "MultiSteps.*accumulate=. the number",
        ),
        (lambda: s24.Loop(ffn(method), loss, tx, 8, accumulate=0), "accumulate=0 must be at least 1"),
        (lambda: s24.Loop(Dropped(), loss, tx, 8), "variables of type .*dropout, batch statistics"),
        (lambda: loop_of(method, accumulate=3).micro_batches(batch(0)), "32 examples does not split"),
        (lambda: s24.Loop(ffn(method), loss, tx, 0), "schedule=0 must be at least 1"),
        (lambda: s24.Loop(ffn(method), loss, tx, [8]), r"schedule must be an s24.Schedule, or .* got \[8\]"),
        (lambda: loop_of(method, sum_over="dp"), "sum_over='dp' must be a list of names"),
        (lambda: loop_of(method, jit=False), "jit must be a function such as jax.jit, or None"),
        (
            lambda: s24.Loop(ffn(method), loss, tx, 8, method=s24.methods.STE()),
            r"method=STE\(\) is none of the layers' methods",
        ),
        (lambda: s24.Loop(ffn(method), loss, tx, 8, method=type(method)), r"is none of the layers' methods"),
        (lambda: loop_of(method).advance(batch(0), batch(0), 0), "this dict has no 'step'"),
        (
            lambda: loop_of(method).evaluate(None, [batch(0)]),
            "Loop.evaluate: .* this NoneType has no 'params'",
        ),
        (lambda: loop_of(method).restore({}), "Loop.restore: .* this dict has no 'step'"),
        (lambda: s24.Tree(params, method, [], jax.random.key(0)), "ffns names 0 blocks"),
        (lambda: s24.Tree(params, method, ["blok"], jax.random.key(0)), "parameters have no 'blok'"),
        (lambda: s24.Tree(params, method, [""], jax.random.key(0)), "it lacks 'w1'"),
        (lambda: s24.Tree(params, s24.methods.SLoPe(), ["block"], jax.random.key(0)), "use s24.nn.FFN"),
        (lambda: s24.Tree(params, method, None, jax.random.key(0)), "ffns=None must be a list"),
        (lambda: s24.Tree(params, method, ["block"], 0), "Tree: key must be one PRNG key"),
    ]
    for call, match in cases:
        with pytest.raises((TypeError, ValueError), match=match):
            call()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w2": jnp.ones((12, d))}, r"w2 of 'block' has shape \(12, 16\); beside w1 .* must be \(32, 16\)"),
        ({"w1": jnp.ones((3, d, f))}, r"w2 of 'block' has shape \(32, 16\); .* must be \(3, 32, 16\)"),
        ({"w1": jnp.ones(f)}, r"w1 of 'block' must be a matrix \(..., in, out\), got shape \(32,\)"),
        ({"w1": [[1.0] * f] * d}, "w1 of 'block' must be an array, got list"),
        ({"w1": None}, "w1 of 'block' must be an array, got NoneType"),
        ({"w2": jnp.ones((f, d), int)}, "w2 of 'block' has dtype int32; supported are"),
        ({"b1": jnp.ones(d)}, r"b1 of 'block' has shape \(16,\), which must end in 32"),
        ({"b2": jnp.ones(f)}, r"b2 of 'block' has shape \(32,\), which must end in 16"),
        ({"w1": jnp.ones((d, 30)), "w2": jnp.ones((30, d))}, "Tree: 'block': .* size 30 along axis"),
    ],
)
def test_the_arrays_of_a_block_of_a_tree_fit_each_other(change, words):
    """Steps failed on them, if at all, in words of functions that the caller had not called."""
    block = {"w1": jnp.ones((d, f)), "w2": jnp.ones((f, d)), "b1": None} | change
    with pytest.raises((TypeError, ValueError), match=words):
        s24.Tree({"block": block}, METHODS["FST"], ["block"], jax.random.key(0))


@pytest.mark.parametrize("switch", [s24.nn.set_sparse, s24.nn.set_adapting])
def test_a_layer_in_a_mode_of_its_own_is_refused(switch):
    """The loop switched it with all others."""
    model = ffn(METHODS["FST"])
    switch(model.down, False)
    with pytest.raises(ValueError, match=r"Loop: up is in another mode than down, .* by method=None"):
        s24.Loop(model, loss, tx_of(METHODS["FST"]), 8)
    switch(model, False)
    s24.Loop(model, loss, tx_of(METHODS["FST"]), 8)


def test_the_options_of_a_method_count_in_its_optimiser():
    """`FST(decay=)` counted only in the launcher."""
    model = ffn(METHODS["FST"])
    params, masks = nnx.state(model, nnx.Param), s24.nn.masks(model)
    zero = jax.tree.map(jnp.zeros_like, params)

    def first_moment(method):
        tx = s24.optim.for_method(method, 1e-3, STEPS, clip=None)
        _, state = tx.update(zero, tx.init(params), params, masks=masks, frozen=True)
        return optax.tree.get(state, "mu")["up"]["kernel"][...]

    kernel, mask = model.up.kernel[...], model.up.mask()
    decayed = first_moment(METHODS["FST"])
    np.testing.assert_allclose(decayed, jnp.where(mask, 0, 0.1 * 1e-2 * kernel), rtol=1e-5)
    assert not first_moment(s24.methods.FST(decay=0)).any()
    for wrong in ("FST", s24.methods.FST):
        with pytest.raises(TypeError, match=r"for_method: method must be one of s24.methods"):
            s24.optim.for_method(wrong, 1e-3, STEPS)


def test_layers_of_several_methods():
    """Each has masks of its own period; the loop follows the phases of one."""

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.up = s24.nn.Linear(d, f, method=s24.methods.FST(refresh_every=3, mvue=None), rngs=rngs)
            self.down = s24.nn.Linear(f, d, method=s24.methods.FST(refresh_every=2, mvue=None), rngs=rngs)

        def __call__(self, x):
            return self.down(jax.nn.relu(self.up(x)))

    model = Two(nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"several methods, down: FST.*give method=, that of them whose phases"
    ):
        s24.Loop(model, loss, optax.sgd(1e-2), STEPS)
    schedule = s24.Schedule((s24.Phase("sparse", STEPS, sparse=True),))
    loop = s24.Loop(model, loss, optax.sgd(0.5), schedule, method=model.up.method, debug=True)
    assert loop.method is model.up.method and not loop.refreshes_within
    state, kernels = loop.init(), []
    for step in range(5):
        kernels.append(np.asarray(state["params"]["down"]["kernel"][...]))
        state, _ = loop.advance(state, batch(step), step)
    ages = {path: int(age) for path, age in loop.view.entries(state["sparse"], "refreshed").items()}
    assert ages == {"up": 3, "down": 4}
    mask = s24.transposable_mask24(kernels[4])
    np.testing.assert_array_equal(state["sparse"]["down"]["state"]["mask"][...], mask)


def test_a_step_of_another_number_than_the_state_is_refused():
    """Of a state of its own, of one that was copied, and of a checkpoint; nothing is donated before."""
    method = s24.methods.FST(refresh_every=3)
    loop = loop_of(method)
    state = loop.init()
    with pytest.raises(ValueError, match=r"step 1 is not that of the state, which has made 0 steps.*step=0"):
        loop.advance(state, batch(0), 1)
    state, _ = loop.advance(state, batch(0), 0)
    other = jax.tree.map(jnp.copy, state)
    for wrong in (0, 2, 5):
        with pytest.raises(ValueError, match=f"step {wrong} is not that of the state"):
            loop.advance(state, batch(1), wrong)
        with pytest.raises(ValueError, match=f"step {wrong} is not that of the state"):
            loop_of(method).advance(other, batch(1), wrong)
    (state, _), (again, _) = loop.advance(state, batch(1), 1), loop_of(method).advance(other, batch(1), 1)
    jax.tree.map(np.testing.assert_array_equal, arrays(state["params"]), arrays(again["params"]))


def test_a_step_can_be_traced():
    loop = loop_of(s24.methods.STE())
    state, _ = jax.eval_shape(lambda state: loop.advance(state, batch(0), 3), loop.init())
    assert state["step"].shape == ()


def test_the_number_of_a_state_is_known_without_waiting_for_it(monkeypatch):
    loop = loop_of(s24.methods.FST(refresh_every=3))
    state, _ = loop.advance(loop.init(), batch(0), 0)
    asked = []
    monkeypatch.setattr(type(state["step"]), "__int__", lambda self: asked.append(1) or self.item())
    for step in (1, 2, 3):
        state, _ = loop.advance(state, batch(step), step)
    assert not asked


def test_debug_leaves_layers_alone_that_are_dense_by_their_method():
    class Two(nnx.Module):
        def __init__(self):
            self.q = s24.nn.Linear(d, d, method=s24.methods.Dense(), rngs=nnx.Rngs(0))
            self.ffn = ffn(s24.methods.FST(refresh_every=3))

        def __call__(self, x):
            return self.ffn(self.q(x))

    loop = s24.Loop(Two(), loss, optax.adam(1e-3), STEPS, debug=True)
    state = loop.init()
    for step in range(4):
        state, _ = loop.advance(state, batch(step), step)
    loop.restore(state)


def test_a_state_with_more_than_the_loop_has_is_refused():
    state = loop_of(s24.methods.FST()).init()
    with pytest.raises(
        ValueError, match=r"the checkpoint has state\['(opt|sparse)'\].* more, which this loop"
    ):
        s24.Loop(ffn(s24.methods.STE()), loss, optax.sgd(1e-2), STEPS).restore(state)
    own = loop_of(s24.methods.FST())
    assert own.restore({**state, "ema": jnp.zeros(3)})["ema"].shape == (3,)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "which has none"),
        (None, "which has none"),
        ({"x": jnp.zeros((4, d)), "t": 1.0}, r"batch\['t'\] is 1.0"),
    ],
)
def test_a_batch_is_arrays(wrong, words):
    loop = loop_of(s24.methods.FST())
    with pytest.raises(TypeError, match=words):
        loop.advance(loop.init(), wrong, 0)


def test_a_loss_with_more_than_a_scalar_is_refused():
    loop = s24.Loop(ffn(s24.methods.FST()), lambda m, b: (loss(m, b), 1), optax.sgd(1e-2), STEPS)
    with pytest.raises(TypeError, match="loss must return a scalar, got tuple"):
        loop.advance(loop.init(), batch(0), 0)
    loop = s24.Loop(ffn(s24.methods.FST()), lambda m, b: m(b["x"]), optax.sgd(1e-2), STEPS)
    with pytest.raises(TypeError, match=r"loss must return a scalar, got shape \(32, 16\)"):
        loop.advance(loop.init(), batch(0), 0)


def test_evaluations_take_batches():
    loop = loop_of(s24.methods.FST())
    state = loop.init()
    for wrong in (batch(0), batch(0)["x"], None, "xy"):
        with pytest.raises(TypeError, match=r"batches must be an iterable of batches, such as \[batch\]"):
            loop.evaluate(state, wrong)
    with pytest.raises(ValueError, match="at least one batch, got none"):
        loop.evaluate(state, [])
    with pytest.raises(TypeError, match="loss must return a scalar, got tuple"):
        loop.evaluate(state, [batch(0)], lambda m, b: (loss(m, b), 1))
    with pytest.raises(TypeError, match=r"loss must be a function of .*, got 'mse'"):
        loop.evaluate(state, [batch(0)], "mse")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_micro_batches_of_a_loss_of_another_dtype(dtype):
    """Losses are summed in float32, or in a wider type of their own."""
    with jax.enable_x64(dtype == "float64"):
        options = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
        made = [s24.nn.FFN(d, f, method=s24.methods.STE(), rngs=nnx.Rngs(0), **options) for _ in range(2)]
        x = {name: value.astype(dtype) for name, value in batch(0).items()}
        losses = []
        for module, parts in zip(made, (1, 2), strict=True):
            loop = s24.Loop(module, loss, optax.sgd(1e-2), STEPS, accumulate=parts)
            losses.append(float(loop.advance(loop.init(), x, 0)[1]["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if dtype == "bfloat16" else 1e-12)


def test_micro_batches_do_not_widen_a_loss():
    """With 64-bit types the mean of losses in float32 was float64."""
    with jax.enable_x64(True):
        x = {name: value.astype(jnp.float32) for name, value in batch(0).items()}
        for parts in (1, 2):
            loop = loop_of(s24.methods.STE(), accumulate=parts)
            assert loop.advance(loop.init(), x, 0)[1]["loss"].dtype == jnp.float32


def test_a_mean_of_many_losses_in_16_bits():
    """Of 600 batches with the loss 2.3 in bfloat16 it was 1.7."""
    loop = loop_of(s24.methods.STE())
    found = loop.evaluate(loop.init(), [batch(0)] * 600, lambda model, batch: jnp.bfloat16(2.3))
    assert found == {"dense": float(jnp.bfloat16(2.3)), "sparse": float(jnp.bfloat16(2.3))}


@pytest.mark.parametrize(
    "method",
    [
        s24.methods.FST(fp8="delayed", dense_fraction=0),
        dataclasses.replace(METHODS["Venom"], routing="learned", dense_warmup=0),
    ],
    ids=["delayed scales", "learned router"],
)
def test_a_state_keeps_its_types_with_64_bit_types_on(method):
    """An exponent of 64 bits gave two scales in place of one, and a router a gradient of another dtype."""
    with jax.enable_x64(True):
        loop = loop_of(method, accumulate=2)
        first = loop.init()
        types = jax.tree.map(lambda x: (x.shape, x.dtype), first)
        x = jax.tree.map(lambda x: x.astype(jnp.float32), batch(0))
        state, _ = loop.advance(first, x, 0)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == types


def test_an_optimiser_with_a_frozen_moment_needs_a_dense_phase():
    tx = s24.optim.for_method(s24.methods.STEP(), 1e-3, STEPS)
    with pytest.raises(
        ValueError, match=r"begins sparse.*FST\(\).schedule\(steps\) and s24.optim.for_method"
    ):
        s24.Loop(ffn(s24.methods.FST()), loss, tx, STEPS).init()
    s24.Loop(ffn(s24.methods.STEP()), loss, tx, STEPS).init()


@pytest.mark.parametrize("tx", [optax.contrib.prodigy(1.0), optax.contrib.cocob()], ids=["Prodigy", "COCOB"])
def test_an_optimiser_that_keeps_the_first_parameters(tx):
    """Its state held the very arrays of the parameters, which the first step could not donate twice."""
    loop = loop_of(METHODS["FST"], tx)
    first = jax.tree.map(np.asarray, loop.init()["params"])
    state, _ = loop.advance(loop.init(), batch(0), 0)
    state, metrics = loop.advance(state, batch(1), 1)
    assert jnp.isfinite(metrics["loss"]) and metrics["predicted"] < 0
    jax.tree.map(np.testing.assert_array_equal, first, loop.init()["params"])


def test_a_learned_router_is_arranged_and_trained():
    """One buffer stood in the state twice after neurons were put in order, and no step could donate it."""
    method = dataclasses.replace(METHODS["Venom"], routing="learned", columns="statistic")
    loop = loop_of(method, debug=True)
    state = loop.init()
    for step in range(STEPS):
        state, metrics = loop.advance(state, batch(step), step)
    assert jnp.isfinite(metrics["loss"]) and loop.arranged(state)


@pytest.mark.parametrize("make", [loop_of, tree_loop])
@pytest.mark.parametrize("name", ["STEP", *METHODS])
def test_a_dense_phase_that_settles_early_ends_as_any_other(make, name):
    """Masks were those of the initial weights until the latest step of the dense phase, neurons were never
    put in order, a checkpoint of the step that settled was refused, and the finished model was dense."""
    method = {**METHODS, "STEP": s24.methods.STEP()}[name]
    phases = s24.Phase("dense", 6, sparse=False, until_settled=True), s24.Phase("sparse", 2, sparse=True)
    tx = s24.optim.step_adamw(1e-2, b2=0.5, eps=1e3)  # settles with its second step
    loop = make(method, tx, s24.Schedule(phases), debug=True)
    state, due = loop.init(), {0: -1, 1: -1, 2: 2, 3: 3, 4: 3}
    for step in range(5):
        state, _ = loop.advance(state, batch(step), step)
        loop.restore(state)
        assert bool(s24.optim.settled(state["opt"])) == (step >= 1)
        ages = loop.view.entries(state["sparse"], "refreshed").values() if name == "FST" else []
        assert all(age == due[step] for age in ages)
        assert loop.by_sparse_weights(state) == (step >= 2)
    assert not loop.arranges or loop.arranged(state)
    assert make is tree_loop or loop.model(state).up.sparse
