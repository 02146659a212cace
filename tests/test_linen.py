"""Linen layers: parameters of `flax.linen.Dense`, products of `s24.nn`, state in a collection of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import freeze

import jax_sparse24 as s24

T, d, f = 8, 8, 16
FST, ACTIVATION = s24.methods.FST(), s24.methods.Activation24()
X = jax.random.normal(jax.random.key(1), (T, d))


class Plain(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(d, use_bias=False, name="down")(
            jnp.square(linen.relu(linen.Dense(f, use_bias=False, name="up")(x)))
        )


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_parameters_and_dense_products_are_those_of_linen():
    for ours, theirs in ((s24.linen.Dense(f), linen.Dense(f)), (s24.linen.FFN(f), Plain())):
        variables = ours.init(jax.random.key(0), X)
        same(variables, theirs.init(jax.random.key(0), X))
        np.testing.assert_allclose(ours.apply(variables, X), theirs.apply(variables, X), rtol=1e-6)


@pytest.mark.parametrize("method", [FST, ACTIVATION], ids=lambda method: type(method).__name__)
def test_a_block_computes_what_the_nnx_block_computes(method):
    module = s24.linen.FFN(f, method=method)
    variables = module.init(jax.random.key(0), X)
    assert jax.tree.structure(variables["params"]) == jax.tree.structure(
        Plain().init(jax.random.key(0), X)["params"]
    )
    other = s24.nn.FFN(d, f, method=method, rngs=nnx.Rngs(0))
    for name in ("up", "down"):
        getattr(other, name).kernel[...] = variables["params"][name]["kernel"]
    s24.nn.reset(other)
    if method.stochastic:
        same(variables["sparse24"]["up"]["w1"]["mask"], other.up.mask())
    same(module.apply(variables, X), other(X))


def test_a_layer_trains_with_masks_that_are_refreshed():
    module = s24.linen.Dense(f, method=FST)
    variables = module.init(jax.random.key(0), X)
    target = jax.random.normal(jax.random.key(2), (T, f))
    tx = s24.optim.for_method(FST, 3e-2, 10)
    opt = tx.init(variables["params"])

    def loss(params, variables, key):
        return jnp.mean(
            (module.apply({**variables, "params": params}, X, rngs={"sparse24": key}) - target) ** 2
        )

    @jax.jit
    def step(variables, opt, key):
        variables = s24.linen.refresh(variables, FST)
        masks = s24.linen.masks(variables, FST)
        value, grads = jax.value_and_grad(loss)(variables["params"], variables, key)
        updates, opt = tx.update(grads, opt, variables["params"], masks=masks)
        return {**variables, "params": optax.apply_updates(variables["params"], updates)}, opt, value, grads

    values = []
    for key in jax.random.split(jax.random.key(3), 10):
        variables, opt, value, _ = step(variables, opt, key)
        values.append(float(value))
    assert values[-1] < 0.9 * values[0]
    assert (
        step(variables, opt, jax.random.key(8))[3]["kernel"].tolist()
        != step(variables, opt, jax.random.key(9))[3]["kernel"].tolist()
    ), "noise comes from the key"
    fresh = s24.linen.refresh(variables, FST)
    same(fresh["sparse24"]["w"]["mask"], s24.transposable_mask24(variables["params"]["kernel"]))
    same(s24.linen.masks(fresh, FST)["kernel"], fresh["sparse24"]["w"]["mask"])
    assert s24.linen.masks(fresh, FST)["bias"]
    same(s24.linen.Dense(f).apply(fresh, X), linen.Dense(f).apply({"params": fresh["params"]}, X))


def test_variables_may_be_frozen():
    variables = s24.linen.Dense(f, method=FST).init(jax.random.key(0), X)
    frozen = freeze(variables)
    same(freeze(s24.linen.refresh(frozen, FST)), freeze(s24.linen.refresh(variables, FST)))
    same(s24.linen.masks(frozen, FST), s24.linen.masks(variables, FST))


def test_parameters_of_a_dense_checkpoint():
    params = linen.Dense(f).init(jax.random.key(1), X)["params"]
    layer = s24.linen.Dense(f, method=FST)
    with pytest.raises(ValueError, match=r"no collection 'sparse24' with the state of FST.*linen.refresh"):
        layer.apply({"params": params}, X)
    made = s24.linen.refresh({**layer.init(jax.random.key(0), X), "params": params}, FST)
    kept = s24.transposable_mask24(params["kernel"])
    same(layer.apply(made, X), X @ jnp.where(kept, params["kernel"], 0) + params["bias"])


def test_wrong_arguments_are_named():
    variables = s24.linen.Dense(f, method=FST).init(jax.random.key(0), X)
    for error, text, call in (
        (TypeError, r"got the class; call it: FST\(\)", lambda: s24.linen.Dense(f, method=s24.methods.FST)),
        (ValueError, "has size 10 along axis -1", lambda: s24.linen.Dense(10, method=FST)),
        (ValueError, "'fast' is unknown", lambda: s24.linen.FFN(f, implementation="fast")),
        (ValueError, "has no table for a single linear layer", lambda: s24.linen.Dense(f, method=ACTIVATION)),
        (ValueError, "trains low-rank adapters", lambda: s24.linen.Dense(f, method=s24.methods.SLoPe())),
        (
            ValueError,
            "puts neurons into an order; use s24.nn.FFN",
            lambda: s24.linen.FFN(f, method=s24.methods.Venom(v=16, m=8, clusters=2)),
        ),
        (ValueError, "activation 'tanh' is unknown", lambda: s24.linen.FFN(f, activation="tanh")),
        (ValueError, "whose slope follows", lambda: s24.linen.FFN(f, method=ACTIVATION, activation="gelu")),
    ):
        with pytest.raises(error, match=text):
            call().init(jax.random.key(0), X)
    with pytest.raises(TypeError, match="refresh: method must be one of"):
        s24.linen.refresh(variables, "FST")
    with pytest.raises(TypeError, match="masks: needs the variables of a model, a dict with 'params', got 3"):
        s24.linen.masks(3, FST)
    with pytest.raises(ValueError, match="has the state mask, which is not that of SSTE"):
        s24.linen.refresh(variables, s24.methods.SSTE())
    with pytest.raises(ValueError, match="has state in the collection 'sparse24', but no kernel"):
        s24.linen.refresh({**variables, "params": {}}, FST)


@pytest.mark.parametrize("layer", [s24.linen.Dense(d, FST), s24.linen.FFN(f, FST)], ids=["Dense", "FFN"])
def test_the_input_of_a_layer_is_an_array(layer):
    variables = layer.init(jax.random.key(0), X)
    with pytest.raises(TypeError, match=f"{type(layer).__name__}: x must be an array, got list"):
        layer.apply(variables, X.tolist())


def test_parameters_may_carry_the_names_of_their_axes():
    """State and masks were made of the box in which Linen keeps a kernel with the names of its axes."""
    named = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
    module, plain = (s24.linen.FFN(f, method=FST, **more) for more in ({"kernel_init": named}, {}))
    variables, bare = (m.init(jax.random.key(0), X) for m in (module, plain))
    assert isinstance(variables["params"]["up"]["kernel"], linen.Partitioned)
    for boxed, want in (
        (s24.linen.refresh(variables, FST), s24.linen.refresh(bare, FST)),
        (s24.linen.masks(variables, FST), s24.linen.masks(bare, FST)),
    ):
        same(linen.unbox(boxed), want)
    tx = s24.optim.for_method(FST, 1e-2, 10)
    params = variables["params"]
    updates, _ = tx.update(params, tx.init(params), params, masks=s24.linen.masks(variables, FST))
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
def test_layers_are_stacked_along_the_first_axis(axes):
    """Masks of other stacks had shapes that a scan refused, or were those of other matrices."""

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return s24.linen.Dense(d, FST)(x), None

    places = dict(zip(("params", "sparse24"), axes, strict=True))
    scan = linen.scan(Layer, variable_axes=places, split_rngs={"params": True}, length=4)
    variables = scan().init(jax.random.key(0), X, None)
    if any(axes):
        for call in (s24.linen.refresh, s24.linen.masks):
            with pytest.raises(ValueError, match=r"Dense_0 has a .* beside a kernel of .*'params': 0, 'spar"):
                call(variables, FST)
    else:
        same(s24.linen.refresh(variables, FST), variables)


def test_masks_of_methods_that_store_none():
    """They were no masks at all, so that the decay of BiMask and SRSTE acted on nothing."""
    method = s24.methods.BiMask(trials=2)
    variables = s24.linen.Dense(f, method=method).init(jax.random.key(0), X)
    kernel = variables["params"]["kernel"]
    same(s24.linen.masks(variables, method), {"kernel": s24.mask24(kernel, -2), "bias": jnp.ones((), bool)})
    method = s24.methods.SRSTE()
    variables = s24.linen.Dense(f, method=method).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"masks: SRSTE\(.*keeps no state.*method\.fresh_mask\(kernel\)"):
        s24.linen.masks(variables, method)
    assert s24.linen.masks(variables, s24.methods.SRSTE(decay=0.0))["kernel"].shape == ()
