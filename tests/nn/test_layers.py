"""Layers: dense parameters as in flax, sparse products as the engines."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from tests.nn.models import BLOCKS, FST, METHODS, PlainFFN, T, arrays, assert_same, d, f, inputs


def described(module):
    return {p: (v.shape, v.dtype) for p, v in arrays(nnx.state(module, nnx.Param)).items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("block", BLOCKS)
def test_parameters_are_those_of_the_plain_block(block, method, use_bias, param_dtype):
    ours, plain = BLOCKS[block]
    options = {"use_bias": use_bias, "param_dtype": param_dtype, "rngs": nnx.Rngs(0)}
    sparse = ours(d, f, method=METHODS[method], **options)
    assert described(sparse) == described(plain(d, f, **options))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use_bias", [True, False])
def test_linear_is_a_drop_in(method, use_bias):
    ours = s24.nn.Linear(d, f, method=METHODS[method], use_bias=use_bias, rngs=nnx.Rngs(3))
    plain = nnx.Linear(d, f, use_bias=use_bias, rngs=nnx.Rngs(3))
    assert described(ours) == described(plain)
    np.testing.assert_array_equal(ours.kernel[...], plain.kernel[...])  # the same default and first key
    assert (ours.in_features, ours.out_features) == (d, f)
    assert nnx.Linear(d, f, use_bias=False, rngs=nnx.Rngs(3)).bias is None
    if not use_bias:
        assert ours.bias is None


def test_linear_takes_what_nnx_linear_takes():
    sparse = s24.methods.STE()
    taken, ours = (inspect.signature(kind.__init__).parameters.keys() for kind in (nnx.Linear, s24.nn.Linear))
    assert taken <= ours, taken - ours
    x, options = jnp.ones((4, 8), jnp.bfloat16), {"rngs": nnx.Rngs(0), "dtype": jnp.bfloat16}
    assert s24.nn.Linear(8, 8, preferred_element_type=jnp.float32, **options)(x).dtype == jnp.float32
    highest = s24.nn.Linear(8, 8, precision="highest", **options)
    assert "precision=(HIGHEST, HIGHEST)" in str(jax.make_jaxpr(highest)(x)).replace("Precision.", "")

    def kept(arrays, *, dtype):
        return tuple(a if a is None else a.astype(jnp.float32) for a in arrays)

    for kind, method in ((s24.nn.Linear, None), (s24.nn.FFN, sparse), (s24.nn.GatedFFN, sparse)):
        assert kind(8, 8, method=method, promote_dtype=kept, **options)(x).dtype == jnp.float32
    for wrong, message in (
        ({"dot_general": print}, r"the method says how the layer multiplies.*use nnx\.Linear"),
        (
            {"precision": "high", "method": sparse},
            r"precision='high' with STE\(.*add up in float32.*method=None",
        ),
        ({"preferred_element_type": jnp.float32, "method": sparse}, r"preferred_element_type=.* with STE"),
    ):
        with pytest.raises(ValueError, match=message):
            s24.nn.Linear(8, 8, **wrong, **options)
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    for cut in (
        s24.nn.Linear(8, 8, precision="high", axes=("embed", "mlp"), **options),
        s24.nn.GatedFFN(8, 8, precision="high", axes=("embed", "mlp"), **options),
    ):
        refused = pytest.raises(ValueError, match="precision='high': products that are cut over a mesh")
        with jax.sharding.use_abstract_mesh(mesh), refused:
            jax.eval_shape(cut, x)


@pytest.mark.parametrize("block", BLOCKS)
def test_checkpoints_interchange_both_ways(block, tmp_path):
    """Through a file of named arrays, as any checkpoint is."""
    ours, plain = BLOCKS[block]
    sparse = ours(d, f, method=FST, use_bias=True, rngs=nnx.Rngs(0))
    dense = plain(d, f, rngs=nnx.Rngs(1))
    x = inputs()

    def save(module):
        flat = arrays(nnx.state(module, nnx.Param))
        np.savez(tmp_path / "checkpoint.npz", **{"/".join(path): value for path, value in flat.items()})

    def load(module):
        state = nnx.state(module, nnx.Param)
        with np.load(tmp_path / "checkpoint.npz") as file:
            pure = nnx.to_pure_dict(state)
            for name in file.files:
                *modules, leaf = name.split("/")
                node = pure
                for key in modules:
                    node = node[key]
                node[leaf] = jnp.asarray(file[name])
        nnx.replace_by_pure_dict(state, pure)
        nnx.update(module, state)

    s24.nn.set_sparse(sparse, False)
    trained = sparse(x)
    save(sparse)
    load(dense)
    np.testing.assert_array_equal(dense(x), trained)

    other = plain(d, f, rngs=nnx.Rngs(2))
    save(other)
    load(sparse)
    np.testing.assert_array_equal(sparse(x), other(x))
    s24.nn.set_sparse(sparse, True)
    s24.refresh(sparse)
    np.testing.assert_array_equal(sparse.up.state["mask"][...], s24.transposable_mask24(other.up.kernel[...]))


@pytest.mark.parametrize("block", BLOCKS)
def test_methods_start_from_the_same_parameters(block):
    ours, _ = BLOCKS[block]

    class Two(nnx.Module):
        def __init__(self, method, rngs):
            self.first = ours(d, f, method=method, use_bias=True, rngs=rngs)
            self.second = ours(d, f, method=method, use_bias=True, rngs=rngs)
            self.after = nnx.Linear(d, d, rngs=rngs)

    models = [Two(method, nnx.Rngs(5)) for method in METHODS.values()]
    for model in models[1:]:
        assert_same(nnx.state(model, nnx.Param), nnx.state(models[0], nnx.Param))
    assert not np.array_equal(models[0].first.up.kernel[...], models[0].second.up.kernel[...])


def test_state_beside_the_parameters():
    layer = s24.nn.Linear(d, f, method=FST, rngs=nnx.Rngs(0))
    state = arrays(nnx.state(layer, s24.nn.SparseState))
    assert {p: (v.dtype, v.shape) for p, v in state.items()} == {
        ("state", "mask"): (np.bool_, (d, f)),
        ("key",): (np.uint32, (2,)),
        ("step",): (np.int32, ()),
        ("refreshed",): (np.int32, ()),
        ("dense_from",): (np.uint32, ()),
        ("checksum",): (np.uint32, ()),
    }
    np.testing.assert_array_equal(state["state", "mask"], s24.transposable_mask24(layer.kernel[...]))
    # Neither masks to keep nor noise to draw; only a sparse method has a mode.
    for method, names in (
        (s24.methods.Dense(), {("step",)}),
        (s24.methods.STE(), {("step",), ("dense_from",)}),
    ):
        plain = s24.nn.Linear(d, f, method=method, rngs=nnx.Rngs(0))
        assert set(arrays(nnx.state(plain, s24.nn.SparseState))) == names
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    assert set(arrays(rest)) == set(state)
    assert_same(nnx.merge(graphdef, params, rest), layer)


def test_shapes_without_values():
    """What restoring a checkpoint needs: the structure of a model that was never initialised."""
    make = lambda: s24.nn.FFN(d, f, method=FST, use_bias=True, rngs=nnx.Rngs(0))  # noqa: E731
    abstract, real = nnx.state(nnx.eval_shape(make)), nnx.state(make())
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


# ---- what a call computes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use_bias", [True, False])
def test_linear_runs_the_linear_engine(method, use_bias):
    method = METHODS[method]
    layer = s24.nn.Linear(
        d, f, method=method, use_bias=use_bias, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0)
    )
    x = inputs(2, 3, d)
    y = s24.sparse_dot(x, layer.kernel[...], method, layer.method_state(), jax.random.key(0))
    want = y + layer.bias[...] if use_bias else y
    np.testing.assert_allclose(layer(x), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["squared_relu", "relu", "gelu", "silu"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_ffn_runs_the_ffn_engine(activation, use_bias):
    """Also with biases: the first inside the engine, the second after it."""
    options = {"use_bias": use_bias, "bias_init": nnx.initializers.normal(1.0), "rngs": nnx.Rngs(0)}
    block = s24.nn.FFN(d, f, method=FST, activation=activation, **options)
    x = inputs(2, 4, d)
    state = {"w1": block.up.method_state(), "w2": block.down.method_state()}

    def functional(params, x):
        y = s24.sparse_ffn(
            x,
            params["up"]["kernel"],
            params["down"]["kernel"],
            FST,
            state,
            block.up.noise_key(),
            b1=params["up"].get("bias"),
            activation=activation,
        )
        return y + params["down"]["bias"] if use_bias else y

    params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    got, vjp = jax.vjp(
        lambda state, x: nnx.merge(nnx.graphdef(block), state, nnx.state(block, s24.nn.SparseState))(x),
        nnx.state(block, nnx.Param),
        x,
    )
    want, want_vjp = jax.vjp(functional, params, x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    gradient, dx = vjp(jnp.ones_like(got))
    want_gradient, want_dx = want_vjp(jnp.ones_like(got))
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        nnx.to_pure_dict(gradient),
        want_gradient,
    )


def test_gated_ffn_runs_three_linear_engines():
    block = s24.nn.GatedFFN(d, f, method=FST, activation="gelu", use_bias=True, rngs=nnx.Rngs(0))
    x = inputs()

    def masked(layer, x):
        return x @ jnp.where(layer.state["mask"][...], layer.kernel[...], 0) + layer.bias[...]

    want = masked(block.down, jax.nn.gelu(masked(block.gate, x)) * masked(block.up, x))
    np.testing.assert_allclose(block(x), want, rtol=1e-5, atol=1e-6)
    # Every linear layer draws with a key of its own.
    assert (
        len({bytes(np.asarray(block_layer.key[...])) for _, block_layer in s24.nn.sparse_layers(block)}) == 3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "param_dtype", "x_dtype", "result"),
    [
        (None, "float32", "float32", "float32"),
        (None, "float32", "bfloat16", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float16", "float32", "bfloat16", "float16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
    ],
)
@pytest.mark.parametrize("sparse", [True, False])
def test_dtypes_are_those_of_flax(dtype, param_dtype, x_dtype, result, sparse):
    options = {"use_bias": True, "dtype": dtype, "param_dtype": param_dtype, "rngs": nnx.Rngs(0)}
    x = inputs().astype(x_dtype)
    assert PlainFFN(d, f, **options)(x).dtype == result
    for block in (s24.nn.FFN, s24.nn.GatedFFN)[: 2 if dtype == "bfloat16" else 1]:
        model = block(d, f, method=FST, **options)
        s24.nn.set_sparse(model, sparse)
        assert model(x).dtype == result
        gradients = arrays(nnx.grad(lambda m: m(x).astype(jnp.float32).sum())(model))
        assert {str(g.dtype) for g in gradients.values()} == {param_dtype}


def test_the_product_runs_in_the_dtype_of_the_layer():
    """Parameters are rounded to it before the product; the mask belongs to the parameters as they are."""
    layer = s24.nn.Linear(d, f, method=FST, use_bias=False, dtype="bfloat16", rngs=nnx.Rngs(0))
    got = layer(jnp.eye(d))
    want = jnp.where(layer.state["mask"][...], layer.kernel[...], 0).astype("bfloat16")
    np.testing.assert_array_equal(got, want)


def test_initialisers_and_implementation_reach_every_layer():
    options = {
        "kernel_init": nnx.initializers.ones,
        "bias_init": nnx.initializers.constant(2.0),
        "use_bias": True,
    }
    for block in (s24.nn.FFN, s24.nn.GatedFFN):
        model = block(d, f, method=FST, implementation="reference", rngs=nnx.Rngs(0), **options)
        for _, layer in s24.nn.sparse_layers(model):
            np.testing.assert_array_equal(layer.kernel[...], np.ones(layer.kernel.shape))
            np.testing.assert_array_equal(layer.bias[...], np.full(layer.bias.shape, 2.0))
            assert layer.implementation == "reference"
        with pytest.raises(RuntimeError, match="cusparselt"):
            block(d, f, method=FST, implementation="cusparselt", rngs=nnx.Rngs(0))(inputs())


@pytest.mark.parametrize("block", BLOCKS)
def test_calls_are_pure(block):
    """Neither a forward nor a backward pass writes anything, and two calls are the same."""
    model = BLOCKS[block][0](d, f, method=FST, rngs=nnx.Rngs(0))
    before = arrays(model)
    graphdef = nnx.graphdef(model)
    x = inputs()
    first = model(x), nnx.grad(lambda m: m(x).sum())(model)
    second = model(x), nnx.grad(lambda m: m(x).sum())(model)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert arrays(model).keys() == before.keys()
    for path, value in arrays(model).items():
        np.testing.assert_array_equal(value, before[path])
    assert nnx.graphdef(model) == graphdef
    jax.jit(lambda x: model(x))(x)  # a write would leak a tracer
    assert_same(model, nnx.merge(graphdef, nnx.state(model)))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("method", METHODS)
def test_dense_mode_is_the_plain_block(block, method):
    ours, plain = BLOCKS[block]
    model, dense = (
        ours(d, f, method=METHODS[method], use_bias=True, rngs=nnx.Rngs(0)),
        plain(d, f, rngs=nnx.Rngs(9)),
    )
    nnx.update(dense, nnx.state(model, nnx.Param))
    x = inputs(5, d)  # five tokens: dense products need no multiple of four

    def both(m):
        y, gradient = nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(m)
        return arrays(gradient) | {"y": np.asarray(y)}

    s24.nn.set_sparse(model, False)
    want = both(dense)
    got = both(model)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-6, atol=1e-6, err_msg=str(path))


# ---- bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda **k: s24.nn.Linear(10, 8, method=FST, **k),
            ValueError,
            r"kernel of shape \(10, 8\) has size 10",
        ),
        (
            lambda **k: s24.nn.Linear(8, 10, method=FST, **k),
            ValueError,
            r"kernel of shape \(8, 10\) has size 10",
        ),
        (lambda **k: s24.nn.FFN(8, 18, method=FST, **k), ValueError, r"size 18.*multiple of 4.*16 or 20"),
        (lambda **k: s24.nn.Linear(10, 8, method=METHODS["STE"], **k), ValueError, r"size 10 along axis -2"),
        (
            lambda **k: s24.nn.Linear(8, 8, method="FST", **k),
            TypeError,
            r"s24.methods, such as FST\(\), got 'FST'",
        ),
        (
            lambda **k: s24.nn.Linear(8, 8, method=s24.methods.FST, **k),
            TypeError,
            r"got the class; call it: FST\(\)",
        ),
        (
            lambda **k: s24.nn.FFN(8, 8, activation="tanh", **k),
            ValueError,
            r"FFN: activation 'tanh'.*squared_relu",
        ),
        (
            lambda **k: s24.nn.Linear(8, 8, method=FST, role="w9", **k),
            ValueError,
            r"role 'w9' is unknown; .*'w2'",
        ),
        (
            lambda **k: s24.nn.Linear(8, 8, implementation="cuda", **k),
            ValueError,
            r"Linear: implementation 'cuda' is unknown; use None or one of",
        ),
        (lambda **k: s24.nn.Linear(8.0, 8, **k), TypeError, r"Linear: in_features must be an int, got 8.0"),
        (
            lambda **k: s24.nn.Linear(8, True, **k),
            TypeError,
            r"Linear: out_features must be an int, got True",
        ),
        (lambda **k: s24.nn.Linear(8, 0, **k), ValueError, r"Linear: out_features=0 must be at least 1"),
        (lambda **k: s24.nn.FFN(8, -4, **k), ValueError, r"Linear: out_features=-4 must be at least 1"),
        (
            lambda **k: s24.nn.FFN(8, 8, method=s24.methods.Activation24(), activation="gelu", **k),
            ValueError,
            r"FFN: Activation24\(.* needs an activation whose slope .* not 'gelu'",
        ),
        (
            lambda **k: s24.nn.FFN(8, 10, method=s24.methods.Activation24(), **k),
            ValueError,
            r"FFN: the operand y2 of product F2 .* size 10 along axis -1, .* multiple of 4",
        ),
        (
            lambda **k: s24.nn.FFN(8, 40, method=s24.methods.Venom(v=16, m=8, clusters=4), **k),
            ValueError,
            r"FFN: the operand y2 of product B2 .* size 40 along axis -1, .* multiple of 16",
        ),
        (
            lambda **k: s24.nn.FFN(8, 32, method=s24.methods.Venom(v=16, m=12, clusters=4), **k),
            ValueError,
            r"FFN: the operand y2 of product F2 .* size 32 along axis -1, .* multiple of 12",
        ),
        (
            lambda **k: s24.nn.FFN(8, 32, method=s24.methods.Venom(v=16, m=8, clusters=5), **k),
            ValueError,
            r"Venom: clusters=5 does not divide the 32 neurons of a weight of shape \(8, 32\)",
        ),
        (
            lambda **k: s24.nn.GatedFFN(8, 8, activation="swiglu", **k),
            ValueError,
            r"GatedFFN: activation 'swiglu'",
        ),
    ],
)
def test_bad_input_raises_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        make(rngs=nnx.Rngs(0))


def replaced(layer):
    return s24.sparsify(nnx.List([layer]), FST)[0]


LAYERS = {
    "Linear": lambda method: s24.nn.Linear(8, 8, method=method, rngs=nnx.Rngs(0)),
    "FFN": lambda method: s24.nn.FFN(8, 16, method=method, rngs=nnx.Rngs(0)),
    "GatedFFN": lambda method: s24.nn.GatedFFN(8, 16, method=method, rngs=nnx.Rngs(0)),
    "MoE": lambda method: s24.nn.MoE(8, 16, experts=2, method=method, rngs=nnx.Rngs(0)),
    "ReplacedLinear": lambda _: replaced(nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
    "ReplacedLinearGeneral": lambda _: replaced(nnx.LinearGeneral(8, (2, 4), rngs=nnx.Rngs(0))),
    "ReplacedEinsum": lambda _: replaced(nnx.Einsum("td,dhk->thk", (8, 2, 4), rngs=nnx.Rngs(0))),
}


@pytest.mark.parametrize("method", [None, FST], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_input_of_a_layer_is_an_array(name, method):
    """Errors were those of Python, such as that a list has no size."""
    layer = LAYERS[name](method)
    for x in ([[1.0] * 8] * 4, 1.0, None, "x"):
        got = type(x).__name__
        with pytest.raises(TypeError, match=f"^{name}: x must be an array, got {got}"):
            layer(x)
    with pytest.raises(ValueError, match=rf"^{name}: x must be an array \(..., features\), got a number"):
        layer(jnp.float32(1))


@pytest.mark.parametrize("name", ["Linear", "ReplacedLinear", "ReplacedLinearGeneral", "ReplacedEinsum"])
def test_the_input_has_a_name(name):
    """Its own, and that of Flax, by which a model may have called the layer that was replaced."""
    layer, x = LAYERS[name](FST), jnp.ones((4, 8))
    np.testing.assert_array_equal(layer(x=x), layer(inputs=x))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        layer(x=x, inputs=x)


@pytest.mark.parametrize(
    ("inputs", "axis", "shape"),
    [
        ((8, 2), (-1, -2), (3, 8, 2)),
        ((4, 4), (-1, -2), (3, 4, 4)),
        ((4, 4), (1, 0), (4, 4, 3)),
        ((4, 2), (-2, -1), (3, 4, 2)),
    ],
)
def test_axes_of_the_input_are_taken_in_the_order_of_flax(inputs, axis, shape):
    """Which is rising, however they are given."""
    layer = nnx.LinearGeneral(inputs, 16, axis=axis, rngs=nnx.Rngs(0))
    matrix = layer.kernel[...].reshape(-1, 4, 16).at[:, 2:].set(0)  # two of every four already
    layer.kernel[...] = matrix.reshape(layer.kernel.shape)
    x = jax.random.normal(jax.random.key(1), shape)
    want = layer(x)
    sparse = s24.sparsify(nnx.List([layer]), s24.methods.STE())[0]
    np.testing.assert_allclose(sparse(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4, 2), (8,), (3, 8)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), rngs=nnx.Rngs(0)),
        lambda: nnx.Einsum("...td,tdk->...k", (2, 4, 8), rngs=nnx.Rngs(0)),
    ],
)
def test_axes_of_other_sizes_are_refused(make, shape):
    """Where their product was the same, other numbers were multiplied without a word."""
    layer, x = replaced(make()), jnp.ones(shape)
    with pytest.raises(ValueError, match=r"does not fit the kernel of shape \(2, 4, 8\), .* sizes \(2, 4\)"):
        layer(x)
    assert layer(jnp.ones((3, 2, 4))).shape == (3, 8)


def test_what_need_not_divide_may_be_odd():
    assert s24.nn.Linear(10, 7, rngs=nnx.Rngs(0))(jnp.ones((3, 10))).shape == (3, 7)
    assert s24.nn.Linear(8, 7, method=METHODS["STE"], rngs=nnx.Rngs(0))(jnp.ones((3, 8))).shape == (3, 7)
    assert s24.nn.FFN(10, 7, rngs=nnx.Rngs(0))(jnp.ones((3, 10))).shape == (3, 10)


def test_tokens_are_checked_when_a_gradient_is_taken():
    model = s24.nn.FFN(d, f, method=FST, rngs=nnx.Rngs(0))
    x = inputs(T + 1, d)
    assert model(x).shape == (T + 1, d)
    with pytest.raises(ValueError, match=r"dy3 of product B2 of shape \(9, 16\) has size 9"):
        nnx.grad(lambda m: m(x).sum())(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        s24.methods.Activation24(),
        s24.methods.Activation24(token_cut="mvue", rank="lost", tokens="random", soft_weights=True),
        s24.methods.AST(slorb=4),
        s24.methods.Venom(v=16, m=8, clusters=4),
        s24.methods.Venom(v=16, m=8, clusters=4, routing="learned", columns="cluster"),
    ],
    ids=str,
)
def test_no_tokens_give_gradients_of_zero(method):
    """In the layer and in the function below it."""
    ffn, x = s24.nn.FFN(16, 32, method=method, rngs=nnx.Rngs(0)), jnp.ones((2, 0, 16))
    gradients = nnx.jit(nnx.grad(lambda ffn: jnp.sum(ffn(x))))(ffn)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))
    weights = {"w1": ffn.up.kernel[...], "w2": ffn.down.kernel[...]}
    state = {name: method.init(w, name) for name, w in weights.items()}

    def loss(weights):
        y = s24.sparse_ffn(x, *weights.values(), method, state, jax.random.key(0))
        assert y.shape == x.shape
        return jnp.sum(y)

    assert not any(g.any() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(weights)))
    ffn.activation_stats(x)


# ---- layers that were replaced


@pytest.mark.parametrize("block", [s24.nn.FFN, s24.nn.GatedFFN])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": s24.methods.STE()}, r"up.method is FST\(.*down.method is STE\(\).*the same method"),
        ({"implementation": "reference"}, r"down.implementation is reference; .*the same implementation"),
        ({"dtype": jnp.bfloat16}, r"down.dtype is bfloat16; .*the same dtype"),
        ({"tokens": "length"}, r"down.tokens is length; .*the same tokens"),
    ],
)
def test_a_block_refuses_layers_that_differ(block, changed, message):
    """A replaced layer was silently run as `up`."""
    model = block(d, f, method=FST, rngs=nnx.Rngs(0))
    model.down = s24.nn.Linear(f, d, **({"method": FST} | changed), use_bias=False, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=rf"^{block.__name__}: .*{message}"):
        model(inputs())
    model.down = nnx.Linear(f, d, rngs=nnx.Rngs(1))
    with pytest.raises(TypeError, match=rf"^{block.__name__}: down must be an s24.nn.Linear, got Linear"):
        model(inputs())


def test_a_block_takes_a_layer_that_is_alike():
    model = s24.nn.FFN(d, f, method=FST, dtype=jnp.float32, rngs=nnx.Rngs(0))
    want = model(inputs())
    same = s24.methods.FST(refresh_every=FST.refresh_every)
    down = s24.nn.Linear(f, d, method=same, dtype="float32", use_bias=False, rngs=nnx.Rngs(1))
    nnx.update(down, nnx.state(model.down))
    model.down = down
    np.testing.assert_array_equal(model(inputs()), want)


def test_experts_refuse_layers_that_differ():
    model = s24.nn.MoE(d, f, experts=2, method=FST, rngs=nnx.Rngs(0))
    model.experts.down.method = s24.methods.STE()
    with pytest.raises(ValueError, match=r"FFN: up.method is FST\(.*down.method is STE"):
        model(inputs())
    model.experts.up.implementation = "reference"
    with pytest.raises(ValueError, match=r"FFN: up.method is FST\("):
        model(inputs())


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: s24.nn.FFN(d, f, method=FST, rngs=nnx.Rngs(0)),
        lambda: s24.nn.GatedFFN(d, f, method=s24.methods.AST(), rngs=nnx.Rngs(0)),
        lambda: s24.nn.FFN(d, 32, method=s24.methods.Venom(v=16, m=8, clusters=4), rngs=nnx.Rngs(0)),
        lambda: s24.nn.Linear(d, f, method=s24.methods.BiMask(), rngs=nnx.Rngs(0)),
    ],
)
def test_a_call_does_not_trace_the_search_for_its_state(make, monkeypatch):
    """Only the shapes of the state are needed; `init` of FST searches 90 patterns for every tile."""
    model, traced = make(), []
    s24.nn.arrange(model)
    for _, layer in s24.nn.sparse_layers(model):
        kind = type(layer.method)
        monkeypatch.setattr(kind, "init", lambda *_, **__: traced.append(1) or {})
    x = inputs(16, d)
    nnx.grad(lambda m: m(x).sum())(model)
    if isinstance(model, s24.nn.FFN):
        model.activation_stats(x)
    assert not traced
