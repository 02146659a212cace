"""What used to go wrong in a training loop without a word is an error that says what to do, or is right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from tests.nn.models import PlainFFN, inputs
from tests.nn.test_training import Stacked

d, f = 16, 32
FST = s24.methods.FST(refresh_every=4)
VENOM = s24.methods.Venom(v=16, m=8, clusters=4)


def block(method=FST, seed=0):
    return s24.nn.FFN(d, f, method=method, rngs=nnx.Rngs(seed))


def fresh(layer):
    return np.array_equal(layer.mask(), layer.method.fresh_mask(layer.kernel[...]))


def move(model):
    """What an optimiser step, or loading, does to the kernels."""
    for _, layer in s24.nn.sparse_layers(model):
        layer.kernel[...] = -layer.kernel[...][::-1] * jnp.arange(1.0, layer.out_features + 1)


def gradient(model, x):
    return np.asarray(nnx.grad(lambda m: (m(x) ** 2).mean())(model).up.kernel[...])


FUNCTIONS = {
    "refresh": s24.refresh,
    "masks": s24.nn.masks,
    "set_sparse": lambda m: s24.nn.set_sparse(m, True),
    "arrange": s24.nn.arrange,
    "reset": s24.nn.reset,
    "set_adapting": lambda m: s24.nn.set_adapting(m, True),
    "merge_adapters": s24.nn.merge_adapters,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_models_that_have_sparse_layers(name):
    """`masks(nnx.state(m))` switched masked decay off; `refresh(state)` did nothing."""
    for wrong in (nnx.state(block(s24.methods.STE())), None, {"w": 1}):
        with pytest.raises(
            TypeError, match=rf"{name}: needs the model, an nnx.Module, got {type(wrong).__name__}"
        ):
            FUNCTIONS[name](wrong)
    with pytest.raises(
        ValueError, match=rf"{name}: this PlainFFN has 0 sparse layers, .* by s24.sparsify.* from s24.nn.FFN"
    ):
        FUNCTIONS[name](PlainFFN(d, f, rngs=nnx.Rngs(0)))
    FUNCTIONS[name](block(None))  # whoever wants a dense model of these layers says so


def test_a_mode_is_true_or_false():
    """`set_sparse(f, "dense")` set sparse."""
    model = block(s24.methods.STE())
    for wrong in ("dense", 1, None):
        with pytest.raises(TypeError, match=r"set_sparse: sparse must be True or False, got"):
            s24.nn.set_sparse(model, wrong)


def test_loaded_weights_make_masks_due():
    """Loaded weights kept the mask of the random initialisation."""
    model, trained, x = block(), block(seed=1), inputs()[:, :d]
    nnx.update(model, nnx.state(trained, nnx.Param))
    with pytest.raises(
        ValueError, match=r"masks of this layer.*weights were loaded.*Call s24.refresh\(model\)"
    ):
        model(x)
    s24.refresh(model, 17)  # no multiple of the period
    assert fresh(model.up) and fresh(model.down)
    np.testing.assert_array_equal(model(x), trained(x))


def test_a_checkpoint_of_a_dense_phase_is_not_taken_for_a_sparse_one():
    """Mode was an attribute of Python: the restored model ran sparse, with another loss."""
    dense, x = block(s24.methods.STE()), inputs()[:, :d]
    s24.nn.set_sparse(dense, False)
    s24.refresh(dense, 3)
    restored = block(s24.methods.STE(), seed=1)
    nnx.update(restored, nnx.state(dense))
    for use in (lambda: restored(x), lambda: s24.refresh(restored, 4)):
        with pytest.raises(ValueError, match=r"written in a dense phase, but the layer is in sparse mode"):
            use()
    with pytest.raises(ValueError, match=r"state of (up|down), with a kernel of shape"):
        s24.refresh(restored, 4)  # the path is known to functions on a model
    s24.nn.set_sparse(restored, False)
    np.testing.assert_array_equal(restored(x), dense(x))
    s24.nn.set_sparse(restored, True)
    s24.refresh(restored, 5)
    assert not np.array_equal(restored(x), dense(x))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 0.0, -1.5])
@pytest.mark.parametrize(
    "method",
    [s24.methods.SSTE(mvue=None), s24.methods.Activation24(soft_weights=True, token_cut=None)],
    ids=["SSTE", "Activation24"],
)
def test_a_scale_that_no_method_makes_is_refused(method, value):
    """It was used without a word. Under jit, where it is not known, nothing is looked at."""
    model, x = block(method), inputs()[:, :d]
    right = model.up.method_state()["scale"]
    model.up.state["scale"][...] = value
    rule = rf"is {value}, but must be finite and greater than 0: .*call s24.nn.reset\(model\)"
    for use in (lambda: model(x), lambda: nnx.grad(lambda m: m(x).sum())(model)):
        with pytest.raises(ValueError, match=rf"state\['scale'\] of .*{rule}"):
            use()
    with pytest.raises(ValueError, match=rf"state\['scale'\] of up, with a kernel .*{rule}"):
        s24.refresh(model, 3)  # the path is known to functions on a model
    assert "state['scale']" in str(s24.verify(model, raises=False))
    nnx.jit(lambda m, x: m(x))(model, x)
    s24.nn.set_sparse(model, False)
    model(x)  # dense products have no scale
    s24.nn.set_sparse(model, True)
    s24.nn.reset(model)
    assert model.up.method_state()["scale"] == right
    model(x)


def test_a_scale_of_another_shape_is_refused():
    """By functions on a model, too."""
    model = block(s24.methods.SSTE(mvue=None))
    model.down.state["scale"].set_value(jnp.ones(d))
    for use in (lambda: s24.refresh(model, 3), lambda: model(inputs()[:, :d])):
        with pytest.raises(
            ValueError, match=rf"float32 \({d},\), a kernel of shape .* needs float32 \(\): restore"
        ):
            use()


def test_a_scale_that_every_step_computes_anew_is_mended_by_a_refresh():
    model, x = block(s24.methods.SSTE(mvue=None, scale="dynamic")), inputs()[:, :d]
    want = model(x)
    model.up.state["scale"].set_value(jnp.float32(-1))
    with pytest.raises(ValueError, match=r"state\['scale'\] of this layer"):
        model(x)
    s24.refresh(model, 1)
    np.testing.assert_array_equal(model(x), want)


@pytest.mark.parametrize("compiled", [False, True])
def test_masks_are_due_after_a_dense_phase(compiled):
    """The mask of before stayed for up to 39 steps. A look at the dense loss in between moves nothing."""
    model = block()
    s24.refresh(model, 0)
    s24.nn.set_sparse(model, False)
    s24.nn.set_sparse(model, True)
    move(model)
    s24.refresh(model, 1)
    assert not fresh(model.up), "an evaluation in dense mode is no dense phase"
    s24.nn.set_sparse(model, False)
    s24.refresh(model, 2)
    move(model)
    s24.nn.set_sparse(model, True)
    refresh = nnx.jit(s24.refresh) if compiled else s24.refresh
    refresh(model, jnp.int32(5) if compiled else 5)
    assert fresh(model.up) and fresh(model.down) and int(model.up.refreshed[...]) == 5


def test_masks_are_due_after_a_dense_phase_that_told_no_step():
    model = block()
    s24.refresh(model, 0)
    s24.nn.set_sparse(model, False)
    move(model)
    s24.nn.set_sparse(model, True)
    s24.refresh(model, 5)
    assert fresh(model.up)


@pytest.mark.parametrize("call", ["never", "without a step", "every fourth step"])
def test_draws_advance_by_themselves(call):
    """Every step dropped the same entries of the gradient, and their mean over steps stayed wrong."""
    model, x = block(s24.methods.SSTE()), inputs()[:, :d]
    drawn = []
    for step in range(3):
        if call == "without a step":
            s24.refresh(model)
        elif call == "every fourth step" and step % 4 == 0:
            s24.refresh(model, step)
        model.up.kernel[...] = model.up.kernel[...] * 1.0001  # an optimiser step
        y, pull = jax.vjp(lambda m: m(x), model.up)
        drawn.append(np.asarray(pull(jnp.ones_like(y))[0].kernel[...]))
    assert not np.allclose(drawn[0], drawn[1]) and not np.allclose(drawn[1], drawn[2])


def test_a_step_that_is_told_draws_as_before():
    """Then the key is that of the step, whatever the weights: equal runs on other machines draw alike."""
    layer = block().up
    for step in (0, 3):
        s24.refresh(layer, step)
        move(layer)
        s24.refresh(layer, step)
        want = jax.random.fold_in(jax.random.wrap_key_data(layer.key[...]), step)
        assert (jax.random.key_data(layer.noise_key()) == jax.random.key_data(want)).all()


def test_venom_is_not_trained_without_an_order_of_neurons():
    model, x = block(VENOM), inputs(16, d)
    for use, place in ((lambda: model(x), "this layer"), (lambda: s24.refresh(model, 0), "up")):
        with pytest.raises(ValueError, match=rf"{place}, with a kernel .* call s24.nn.arrange\(model\)"):
            use()
    s24.nn.set_sparse(model, False)
    s24.refresh(model, 0)  # the dense warm-up needs no order
    s24.nn.set_sparse(model, True)
    s24.nn.arrange(model)
    s24.refresh(model, 1)
    assert np.isfinite(model(x)).all()


def test_moments_of_an_nnx_optimizer_are_moved():
    """`permute_moments` rejected the `nnx.Optimizer` of the README."""
    model, tx, x = block(VENOM), optax.adam(1e-3), inputs(16, d)
    s24.nn.set_sparse(model, False)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))
    state = jax.tree.map(jnp.copy, nnx.as_pure(optimizer.opt_state))
    moves = s24.nn.arrange(model)
    params = nnx.state(model, nnx.Param)
    got = s24.optim.permute_moments(optimizer, optimizer.opt_state, params, moves)
    assert got is optimizer.opt_state
    mu, before = nnx.as_pure(optimizer.opt_state)[0].mu, state[0].mu
    np.testing.assert_array_equal(mu["up"]["kernel"], moves["up.kernel"](before["up"]["kernel"]))
    assert not np.array_equal(mu["up"]["kernel"], before["up"]["kernel"])
    optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))
    for wrong, match in (
        ((None, state, params, moves), "tx must be an optax transformation or an nnx.Optimizer"),
        ((tx, state, model, moves), r"params must be nnx.state\(model, nnx.Param\), got FFN"),
        ((tx, state, params, None), "moves must be what s24.nn.arrange returned"),
    ):
        with pytest.raises(TypeError, match=match):
            s24.optim.permute_moments(*wrong)


METHODS = {
    **{name: getattr(s24.methods, name)() for name in ("FST", "SSTE", "Activation24", "SLoPe")},
    "Activation24 causal": s24.methods.Activation24(forward="causal"),
    "Venom": VENOM,
    "Venom statistic": s24.methods.Venom(v=16, m=8, clusters=4, columns="statistic"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_token_at_a_time_without_a_gradient_and_none_that_is_too_many_with_one(name):
    """63 tokens passed forward and failed in the backward pass; Venom could not generate."""
    model, x = block(METHODS[name]), inputs(64, d)
    s24.nn.arrange(model)
    assert model(x[:1]).shape == (1, d)
    assert np.isfinite(model(x[:63])).all()
    if METHODS[name].token_multiple == 1 or name == "SLoPe":
        return
    entered = []

    def loss(model):
        y = model(x[:63])
        entered.append(y)
        return y.sum()

    with pytest.raises(ValueError, match=r"\(63, .*(use 60 or 64|use 48 or 64)"):
        nnx.grad(loss)(model)
    assert not entered, "it is refused in the forward pass"


def test_what_a_step_observed_is_the_gradient_of_the_statistics():
    """Gradients of the parameters alone left histories empty, and every step scaled by itself."""
    model, x = block(s24.methods.FST(fp8="delayed")), inputs(T := 16, d)
    own, of_params = nnx.state(model, s24.nn.Statistic), nnx.grad(lambda m: m(x[:T]).sum())(model)
    with pytest.raises(
        ValueError, match=r"observe: seen has none of the 4 statistics of state, such as down\."
    ):
        s24.nn.observe(own, of_params)
    with pytest.raises(TypeError, match=r"observe: state must be an nnx.State, .* got FFN"):
        s24.nn.observe(model, own)
    with pytest.raises(TypeError, match=r"observe: seen must be an nnx.State, .* got FFN"):
        s24.nn.observe(own, model)
    params = nnx.state(model, nnx.Param)
    assert jax.tree.structure(s24.nn.observe(params, of_params)) == jax.tree.structure(params)


def test_methods_that_are_due_are_instances():
    """No class is the method of a layer, so nothing was refreshed."""
    with pytest.raises(
        TypeError, match=r"due=frozenset\(.*must be True, False, None, or a frozenset of methods"
    ):
        s24.refresh(block(), 0, due=frozenset({s24.methods.FST}))


@pytest.mark.parametrize(
    "method", [s24.methods.AST(slorb=4), s24.methods.SLoPe(rank=4)], ids=["AST", "SLoPe"]
)
def test_merged_adapters_leave_the_state_of_dense_mode(method):
    """Restored into a new model, or switched to sparse mode, the merged weights ran under the old masks."""
    model, x = block(method), inputs()[:, :d]
    s24.refresh(model, 0)
    for _, layer in s24.nn.sparse_layers(model):
        for value in layer.adapters.values():
            value[...] = value[...] + 0.1
    want = model(x)
    s24.nn.merge_adapters(model)
    np.testing.assert_allclose(model(x), want, rtol=1e-4, atol=1e-4)
    restored = block(dataclasses.replace(method, **dict.fromkeys({"slorb", "rank"} & set(vars(method)), 0)))
    nnx.update(restored, nnx.state(model))
    with pytest.raises(ValueError, match="written in a dense phase, but the layer is in sparse mode"):
        restored(x)
    s24.nn.set_sparse(model, True)
    if method.refresh_every:
        with pytest.raises(ValueError, match=r"masks of this layer.*Call s24.refresh\(model\)"):
            model(x)


def test_adapters_are_merged_with_the_masks_of_the_weights():
    """Those of another kernel pruned a loaded one."""
    model = block(s24.methods.AST(slorb=4))
    move(model)
    with pytest.raises(ValueError, match=r"masks of this layer.*Call s24.refresh\(model\)"):
        s24.nn.merge_adapters(model)


def test_stacked_layers_are_scanned_in_a_functional_step():
    """nnx.scan refuses variables of an outer trace; a merged copy has none."""
    model, x = Stacked(rngs=nnx.Rngs(0)), inputs()
    graphdef, params, state = nnx.split(model, nnx.Param, s24.nn.SparseState)

    def loss(params):
        return (nnx.merge(graphdef, params, state, copy=True)(x) ** 2).mean()

    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(jax.grad(loss)(params)))


def twins(method):
    """Two layers of one kernel."""
    first, second = (s24.nn.Linear(d, d, method=method, use_bias=False, rngs=nnx.Rngs(n)) for n in range(2))
    second.kernel = first.kernel
    s24.nn.reset(second)
    return nnx.Sequential(first, second)


@pytest.mark.parametrize("method", [s24.methods.SSTE(), s24.methods.FST()], ids=["SSTE", "FST"])
def test_layers_that_share_a_kernel_are_merged_once(method):
    """The threshold of SSTE was applied a second time, to weights that it had reached already."""
    model, x = twins(method), inputs()[:, :d]
    want = model(x)
    np.testing.assert_allclose(s24.nn.merge_adapters(model)(x), want, rtol=1e-5, atol=1e-6)


def test_layers_that_share_a_kernel_and_multiply_by_different_weights_are_not_merged():
    model = twins(s24.methods.SLoPe(rank=4))
    for value in model.layers[1].adapters.values():
        value[...] = value[...] + 0.1
    with pytest.raises(
        ValueError, match=r"layers.0 and layers.1 share a kernel.* a kernel of its own before"
    ):
        s24.nn.merge_adapters(model)


@pytest.mark.parametrize("method", [s24.methods.STE(), s24.methods.FST()], ids=["STE", "FST"])
@pytest.mark.parametrize("layer", [s24.nn.FFN, s24.nn.GatedFFN, s24.nn.Linear])
def test_a_stack_is_called_in_a_vmap_or_a_scan(layer, method):
    """JAX said that fold_in accepts a single key."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def made(rngs):
        return layer(d, f, method=method, rngs=rngs)

    stack = made(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"this is a stack of layers.*inside of a vmap or a scan"):
        stack(inputs())
    nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, inputs())


def stacked(layers, axis, method, features=(d, f), **options):
    """A stack whose parameters have it along an axis, and all else first."""

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(
        in_axes=(0,),
        out_axes=nnx.StateAxes({nnx.Param: axis, ...: 0}),
        transform_metadata={nnx.PARTITION_NAME: "layers"} if "axes" in options else {},
    )
    def made(rngs):
        return s24.nn.Linear(*features, method=method, rngs=rngs, **options)

    return nnx.Dict(stack=made(nnx.Rngs(0)))


OTHERWISE = r"of stack, of shape .*, does not have the axes of the stack of {} layers .* along axis 0"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stack_along_another_axis_is_refused(name):
    """With as many layers as `in_features` all shapes fit: masks were those of other matrices."""
    with pytest.raises(ValueError, match=OTHERWISE.format(d)):
        FUNCTIONS[name](stacked(d, 1, FST, use_bias=False))
    FUNCTIONS[name](stacked(d, 0, FST, use_bias=False))


@pytest.mark.parametrize(
    "layers, axis, method, options",
    [
        (4, 1, FST, {"use_bias": False}),
        (d, 1, s24.methods.STE(), {}),
        (d, 1, s24.methods.STE(), {"use_bias": False, "axes": ("embed", "mlp")}),
        (d, 1, s24.methods.STE(), {"use_bias": False, "axes": (None, "mlp")}),
        (d, 2, s24.methods.STE(), {"use_bias": False}),
        (d, 1, s24.methods.SLoPe(rank=4), {"use_bias": False}),
    ],
    ids=["shape", "bias", "names", "one name", "last axis", "adapters"],
)
def test_shapes_and_names_tell_of_such_a_stack_in_jit(layers, axis, method, options):
    with pytest.raises(ValueError, match=OTHERWISE.format(layers)):
        nnx.jit(lambda model: s24.refresh(model, 0))(stacked(layers, axis, method, **options))
    nnx.jit(lambda model: s24.refresh(model, 0))(stacked(layers, 0, method, **options))


@pytest.mark.parametrize("axis", [1, 2])
def test_the_checksum_tells_of_such_a_stack_where_no_shape_does(axis):
    model = stacked(d, axis, FST, (d, d), use_bias=False)
    with pytest.raises(ValueError, match=OTHERWISE.format(d)):
        s24.Loop(model, lambda model, batch: 0.0, optax.sgd(1.0), 8)
    right = stacked(d, 0, FST, (d, d), use_bias=False)
    right.stack.kernel[...] = jnp.cos(right.stack.kernel[...])
    s24.refresh(right)  # with a kernel that has moved
    np.testing.assert_array_equal(right.stack.mask(), s24.transposable_mask24(right.stack.kernel[...]))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_stack_of_stacks_has_the_axis_of_the_outer_one_first(axis):
    @nnx.split_rngs(splits=(2, 2))
    @nnx.vmap(in_axes=(0,), out_axes=nnx.StateAxes({nnx.Param: axis, ...: 0}))
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def made(rngs):
        return s24.nn.Linear(d, f, method=FST, use_bias=False, rngs=rngs)

    model = nnx.Dict(stack=made(nnx.Rngs(0)))
    if axis:
        with pytest.raises(ValueError, match=OTHERWISE.format("2 x 2")):
            s24.refresh(model)
    else:
        s24.refresh(model)
        np.testing.assert_array_equal(model.stack.mask(), s24.transposable_mask24(model.stack.kernel[...]))
