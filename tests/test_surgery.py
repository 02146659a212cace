"""`sparsify` and `densify`: models that know nothing of this package become sparse, and dense again."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.engine.contraction import of_axes, of_einsum

d, f = 8, 16
FST, STE, ACTIVATION = s24.methods.FST(refresh_every=4), s24.methods.STE(), s24.methods.Activation24()


def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


class MLP(nnx.Module):
    """With names and a call of its own."""

    def __init__(self, rngs, act=squared_relu, names=("fc1", "fc2"), **linear):
        self.names, self.act = names, act
        setattr(self, names[0], nnx.Linear(d, f, rngs=rngs, **linear))
        setattr(self, names[1], nnx.Linear(f, d, use_bias=False, rngs=rngs, **linear))

    def __call__(self, x):
        return getattr(self, self.names[1])(self.act(getattr(self, self.names[0])(x)))


class Gated(nnx.Module):
    """A gated block as others write it, with the sharding of the result in the call of a layer."""

    def __init__(self, rngs):
        self.gate_proj, self.up_proj = (nnx.Linear(d, f, use_bias=False, rngs=rngs) for _ in range(2))
        self.down_proj = nnx.Linear(f, d, use_bias=False, rngs=rngs)

    def __call__(self, x):
        gated = nnx.silu(self.gate_proj(x, out_sharding=None)) * self.up_proj(x)
        return self.down_proj(gated, out_sharding=None)


class Mixed(nnx.Module):
    """Every kind of layer, in every kind of container."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(12, d, rngs=rngs)
        self.attn = nnx.Dict(
            query=nnx.LinearGeneral(d, (2, 4), rngs=rngs),
            out=nnx.LinearGeneral((2, 4), d, axis=(-2, -1), rngs=rngs),
        )
        self.mlp = MLP(rngs)
        self.seq = nnx.Sequential(
            nnx.Linear(d, f, rngs=rngs), squared_relu, nnx.Linear(f, d, use_bias=False, rngs=rngs)
        )
        self.split = nnx.Einsum("...F,NHF->N...H", (2, 4, d), (2, 4), rngs=rngs)
        self.join = nnx.Einsum("NBTH,NHD->BTD", (2, 4, d), rngs=rngs)
        self.some = nnx.data((nnx.Linear(d, d, rngs=rngs), [nnx.Linear(d, 10, rngs=rngs)]))
        self.again = self.some[0]
        self.head = nnx.Linear(d, d, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attn.out(self.attn.query(x)) + self.mlp(x) + self.seq(x) + self.join(self.split(x))
        return self.head(self.again(self.some[0](x))), self.some[1][0](x)


@nnx.jit
def run(model):
    return model(TOKENS)


TOKENS = jnp.arange(24).reshape(2, 12) % 12


def params(model):
    """The very Param objects, by path."""
    return {path: leaf for path, leaf in nnx.iter_graph(model) if isinstance(leaf, nnx.Param)}


def sparse_types(model):
    return {".".join(map(str, p)): type(m).__name__ for p, m in nnx.iter_modules(model) if _ours(m)}


def _ours(module):
    return isinstance(module, s24.nn.Linear | s24.nn.FFN | s24.nn.GatedFFN)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def made():
    model = nnx.jit(lambda: Mixed(nnx.Rngs(0)))()
    return model, run(model)


@pytest.fixture
def mixed(made):
    """A model, what it was, and its outputs."""
    model, outputs = made
    model = nnx.clone(model)
    return model, nnx.graphdef(model), params(model), outputs


@pytest.mark.slow
def test_every_layer_becomes_sparse_with_the_same_parameters_and_dense_again(mixed):
    model, graphdef, before, outputs = mixed
    assert s24.sparsify(model, STE) is model
    kinds = sparse_types(model)
    assert {name: kind.removeprefix("Replaced") for name, kind in kinds.items()} == {
        **dict.fromkeys(("attn.query", "attn.out"), "LinearGeneral"),
        **dict.fromkeys(
            ("mlp.fc1", "mlp.fc2", "seq.layers.0", "seq.layers.2", "again", "some.1.0"), "Linear"
        ),
        **dict.fromkeys(("split", "join"), "Einsum"),
    }
    assert model.some[0] is model.again, "a layer that stands twice in the model still does"
    now = params(model)
    assert now.keys() == before.keys() and all(now[path] is before[path] for path in now)

    # Outside of what is sparse nothing changes; sparse products are those of the masked weights.
    sparse, masks = run(model), s24.nn.masks(model)
    s24.nn.set_sparse(model, False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), run(model), outputs)
    assert s24.densify(model) is model
    assert nnx.graphdef(model) == graphdef
    now = params(model)
    assert now.keys() == before.keys() and all(now[path] is before[path] for path in now)
    same(run(model), outputs)
    masked = nnx.merge(graphdef, jax.tree.map(lambda w, mask: jnp.where(mask, w, 0), nnx.state(model), masks))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), sparse, run(masked))
    assert not np.allclose(sparse[0], outputs[0], atol=0.01)


def test_masks_of_general_kernels_lie_along_what_is_contracted(mixed):
    model, *_ = mixed
    s24.sparsify(model, STE, "attn|split|join")
    masks = s24.nn.masks(model)
    for mask, axes in (
        (masks["attn"]["query"]["kernel"], (0,)),
        (masks["attn"]["out"]["kernel"], (0, 1)),
        (masks["split"]["kernel"], (2,)),
        (masks["join"]["kernel"], (0, 1)),
    ):
        groups = jnp.moveaxis(mask[...], axes, range(len(axes))).reshape(d // 4, 4, -1)
        assert (groups.sum(1) == 2).all()
    s24.densify(model)


@pytest.mark.parametrize(
    ("equation", "x", "kernel"),
    [
        ("BTD,DNH->BTNH", (2, 3, 4), (4, 2, 5)),
        ("BTNH,NHD->BTD", (2, 3, 2, 4), (2, 4, 5)),
        ("...F,NHF->...NH", (2, 3, 4), (2, 5, 4)),
        ("...NH,HND->D...", (3, 2, 4), (4, 2, 5)),
    ],
)
def test_a_contraction_is_its_einsum(equation, x, kernel, rng):
    x, kernel = rng.normal(size=x), jnp.asarray(rng.normal(size=kernel))
    found = of_einsum(equation, x.ndim)
    matrix = found.matrix(kernel)
    got = found.product(jnp.asarray(x), kernel.shape, lambda x: x @ matrix)
    np.testing.assert_allclose(got, np.einsum(equation, x, kernel), rtol=1e-5)
    same(found.like_kernel(matrix, kernel.shape), kernel)
    stack = jnp.stack([kernel, 2 * kernel])
    same(found.matrix(stack)[1], 2 * matrix)
    same(found.like_kernel(found.matrix(stack), stack.shape), stack)


def test_a_contraction_is_its_dot_general(rng):
    x, kernel = jnp.asarray(rng.normal(size=(4, 3, 2))), jnp.asarray(rng.normal(size=(5, 2, 4)))
    found = of_axes((0, -1), (2, 1), 3, 3)
    got = found.product(x, kernel.shape, lambda x: x @ found.matrix(kernel))
    np.testing.assert_allclose(got, np.einsum("abc,dca->bd", x, kernel), rtol=1e-5)


@pytest.mark.parametrize("equation", ["BTD,BDF->BTF", "BTD,DFG->BTF", "BD,DF->F", "BDD,DF->BF", "BTD->BT"])
def test_an_equation_that_is_no_product_of_matrices_says_so(equation):
    with pytest.raises(ValueError, match=r"the equation '.*' (has the axis|is no)"):
        of_einsum(equation)


def test_blocks_are_recognised_by_what_they_compute(mixed):
    model, graphdef, before, outputs = mixed
    s24.sparsify(model, ACTIVATION)
    kinds = sparse_types(model)
    assert kinds["mlp"] == kinds["seq"] == "ReplacedFFN"
    assert model.mlp.activation == "squared_relu" and model.mlp.names == (("up", "fc1"), ("down", "fc2"))
    assert params(model).keys() == before.keys()
    x = jax.random.normal(jax.random.key(0), (8, d))
    ours = s24.nn.FFN(d, f, method=ACTIVATION, rngs=nnx.Rngs(0))
    ours.up.kernel, ours.down.kernel = model.mlp.fc1.kernel, model.mlp.fc2.kernel
    assert not model.mlp.fc1.bias[...].any()
    same(model.mlp(x), ours(x))
    s24.densify(model)
    assert nnx.graphdef(model) == graphdef
    same(run(model), outputs)


def test_a_rule_names_the_layers_of_a_block():
    gated = nnx.Dict(mlp=Gated(nnx.Rngs(0)))
    dense, graphdef = gated.mlp(jnp.ones((4, d))), nnx.graphdef(gated)
    rule = s24.Rule("mlp", FST, up="up_proj", down="down_proj", gate="gate_proj")
    s24.sparsify(gated, [rule])
    assert type(gated.mlp).__name__ == "ReplacedGatedFFN" and gated.mlp.activation == "silu"
    s24.nn.set_sparse(gated, False)
    np.testing.assert_allclose(gated.mlp(jnp.ones((4, d))), dense, rtol=1e-5)
    assert nnx.graphdef(s24.densify(gated)) == graphdef


def test_a_method_that_orders_neurons_moves_those_of_another_block():
    venom = s24.methods.Venom(v=16, m=8, clusters=2)
    model = nnx.List([MLP(nnx.Rngs(0), act=nnx.relu, names=("wi", "wo"))])
    x = jax.random.normal(jax.random.key(0), (4, d))
    outputs = model[0](x)
    s24.sparsify(model, venom)
    moves = s24.nn.arrange(model)
    assert set(moves) == {"0.wi.kernel", "0.wi.bias", "0.wo.kernel"}
    np.testing.assert_allclose(s24.densify(model)[0](x), outputs, atol=1e-5)


class Stack(nnx.Module):
    """Blocks that `nnx.vmap` stacks and `nnx.scan` runs, an embedding and a head."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return MLP(rngs)

        self.blocks = stack(rngs)
        self.embed, self.out = nnx.Embed(12, d, rngs=rngs), nnx.Linear(d, 12, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x):
            return x + block(x)

        return self.out(run(self.blocks, self.embed(tokens)))


def loss(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), (tokens + 5) % 12).mean()


@pytest.mark.parametrize("axis", [0, 1])
def test_adapters_of_a_stack_lie_as_its_kernel_should(axis):
    """JAX said that two types cannot be multiplied."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=nnx.StateAxes({nnx.Param: axis, ...: 0}))
    def stack(rngs):
        return s24.sparsify(nnx.Linear(d, f, rngs=rngs), s24.methods.SLoPe(rank=2))

    model = nnx.Dict(stack=stack(nnx.Rngs(0)))
    if axis:
        with pytest.raises(ValueError, match=r"adapters.*, does not have the axes of the stack of 3"):
            s24.densify(model)
    else:
        assert type(s24.densify(model).stack) is nnx.Linear


def test_axes_of_an_einsum_may_have_names():
    """An attribute was missing."""
    names = {"out_sharding": ("embed", "heads", None), "eager_sharding": False}
    layer = nnx.Einsum("btd,dnh->btnh", (d, 4, d), rngs=nnx.Rngs(0), kernel_metadata=names)
    assert s24.sparsify(layer, FST).axes == ("embed", "heads")


def test_a_stack_keeps_masks_and_keys_of_each_layer():
    layer = nnx.Linear(d, f, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(jnp.stack([layer.kernel[...], layer.kernel[...][::-1]]))
    layer.bias = nnx.Param(jnp.zeros((2, f)))
    sparse = s24.sparsify(layer, FST)
    same(sparse.mask()[1], s24.transposable_mask24(sparse.kernel[1]))
    one, two = np.asarray(sparse.key[...])
    assert (one != two).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [STE, s24.methods.Activation24(dense_warmup=2)], ids=["STE", "Activation24"]
)
def test_stacked_layers_train_in_a_loop_and_end_dense(method):
    """Weights that are sparse to the end have to be written into the kernels first, and are warned of."""
    model = Stack(nnx.Rngs(0))
    keys, graphdef = params(model).keys(), nnx.graphdef(model)
    s24.sparsify(model, method)
    assert not _ours(model.out), "as wide as the embedding: the head"
    schedule = s24.Schedule((s24.Phase("sparse", 12, sparse=True),))
    loop = s24.Loop(model, loss, s24.optim.for_method(method, 1e-2, 12), schedule)
    state, losses = loop.init(), []
    for step in range(12):
        state, metrics = loop.advance(state, TOKENS, step)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    trained = loop.model(state)
    expected = trained(TOKENS)
    if method == STE:
        np.testing.assert_allclose(loss(trained, TOKENS), losses[-1], rtol=0.2)
        with pytest.warns(
            UserWarning, match=r"2 layers of STE multiply sparse weights.*merge_adapters\(model\)"
        ):
            other = s24.densify(nnx.clone(trained))
        assert loss(other, TOKENS) > 1.2 * loss(trained, TOKENS), "the kernels themselves were not trained"
        s24.nn.merge_adapters(trained)
    with warnings.catch_warnings(action="error"):
        s24.densify(trained)
    assert params(trained).keys() == keys and nnx.graphdef(trained) == graphdef
    np.testing.assert_allclose(trained(TOKENS), expected, rtol=1e-4, atol=1e-5)


def test_the_place_of_a_layer_decides_its_key():
    one, two = nnx.Dict(a=MLP(nnx.Rngs(0)), b=MLP(nnx.Rngs(0))), nnx.Dict(b=MLP(nnx.Rngs(0)))
    s24.sparsify(one, FST)
    s24.sparsify(two, FST)
    same(one.b.fc1.key[...], two.b.fc1.key[...])
    assert (one.a.fc1.key[...] != one.b.fc1.key[...]).any()
    s24.densify(two)
    s24.sparsify(two, FST, key=jax.random.key(1))
    assert (one.b.fc1.key[...] != two.b.fc1.key[...]).any()


def test_a_layer_alone_is_returned():
    layer = nnx.Linear(d, f, rngs=nnx.Rngs(0))
    sparse = s24.sparsify(layer, FST)
    assert isinstance(sparse, s24.nn.Linear) and sparse.kernel is layer.kernel
    assert type(s24.densify(sparse)) is nnx.Linear


def test_a_model_without_values_becomes_sparse_too():
    shapes = nnx.eval_shape(lambda: s24.sparsify(Stack(nnx.Rngs(0)), ACTIVATION))
    assert shapes.blocks.fc1.dense_from.shape == (3,)
    with pytest.raises(TypeError, match=r"shapes in place of arrays\. Make it sparse in.*: nnx\.eval_shape"):
        s24.sparsify(nnx.eval_shape(lambda: Stack(nnx.Rngs(0))), STE)


def test_the_sharding_of_a_result_is_taken_as_nnx_linear_takes_it():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    layer = nnx.Linear(d, f, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, d)), jax.P(None, None))
        sparse = s24.sparsify(layer, STE)
        for mode in (False, True):
            s24.nn.set_sparse(sparse, mode)
            y = sparse(x, out_sharding=jax.P("data", None))
            assert y.sharding.spec == jax.P("data", None)
        assert layer(x, out_sharding=jax.P("data", None)).sharding.spec == y.sharding.spec


def test_a_rule_with_the_whole_path_takes_the_head_and_none_excludes(mixed):
    model, *_ = mixed
    s24.sparsify(model, STE, "head")
    assert list(sparse_types(model)) == ["head"]
    s24.densify(model)
    s24.sparsify(model, [s24.Rule(".*mlp.*|seq.*", STE), s24.Rule("seq", None)])
    assert list(sparse_types(model)) == ["mlp.fc1", "mlp.fc2"]
    s24.densify(model)


def test_the_head_is_the_layer_as_wide_as_the_embedding_but_none_of_a_block():
    rngs = nnx.Rngs(0)
    mlp = nnx.Dict(up=nnx.Linear(d, f, rngs=rngs), down=nnx.Linear(f, d, rngs=rngs))
    model = nnx.Dict(embed=nnx.Embed(f, d, rngs=rngs), mlp=mlp, out=nnx.Linear(d, f, rngs=rngs))
    assert list(sparse_types(s24.sparsify(model, STE))) == ["mlp.down", "mlp.up"]


def test_explain_lists_what_stays_dense_and_why(mixed, capsys):
    model, *_ = mixed
    s24.explain(model)
    before = capsys.readouterr().out
    assert "head: kernel (8, 8): it is left alone as a head" in before
    assert "mlp.fc1: kernel (8, 16): no rule of s24.sparsify has taken it" in before
    s24.sparsify(model, STE, "mlp")
    s24.explain(model)
    after = capsys.readouterr().out
    assert "2 layers with STE()" in after and "mlp.fc1: kernel (8, 16)\n" in after
    assert "some.1.0: kernel (8, 10): no rule of s24.sparsify has taken it" in after
    s24.densify(model)
    s24.sparsify(model, FST, "mlp")
    s24.explain(model)
    assert "some.1.0: kernel (8, 10): the kernel of shape (8, 10) has size 10" in capsys.readouterr().out
    s24.densify(model)


# ---- what does not fit stays dense, with the reason


class Odd(nnx.Module):
    def __init__(self, rngs):
        self.good = nnx.Linear(d, d, rngs=rngs)
        self.width = nnx.Linear(10, d, rngs=rngs)
        self.dots = nnx.Linear(
            d, d, rngs=rngs, dot_general=lambda *args, **options: jax.lax.dot_general(*args)
        )
        self.precise = nnx.Linear(d, d, rngs=rngs, precision="highest")
        self.batch = nnx.LinearGeneral(d, d, axis=-1, batch_axis={0: 2}, rngs=rngs)
        self.equation = nnx.Einsum("BTD,BDF->BTF", (2, d, d), rngs=rngs)
        self.dtype = nnx.Linear(d, d, rngs=rngs)
        self.dtype.kernel = nnx.Param(jnp.zeros((d, d), jnp.float8_e4m3fn))
        self.stacked = nnx.vmap(lambda rngs: nnx.Linear(d, d, rngs=rngs), out_axes=1)(rngs.split(3))
        self.as_many = nnx.vmap(lambda rngs: nnx.Linear(d, f, rngs=rngs), out_axes=1)(rngs.split(d))


class Doubled(nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_layers_of_a_subclass_are_listed(capsys):
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        mlp=nnx.Linear(d, d, rngs=rngs),
        doubled=Doubled(d, d, rngs=rngs),
        lora=nnx.LoRALinear(d, d, lora_rank=2, rngs=rngs),
    )
    with pytest.warns(UserWarning, match="2 of the layers .* doubled: Doubled is a subclass .* lora: LoRAL"):
        s24.sparsify(model, STE)
    assert list(sparse_types(model)) == ["mlp"]
    s24.explain(model)
    assert "doubled: kernel (8, 8): Doubled is a subclass whose call may be" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"fits its method\. the model: Doubled is a subclass"):
        s24.sparsify(Doubled(d, d, rngs=rngs), STE)


def test_layers_that_do_not_fit_are_listed_with_the_reason():
    model = Odd(nnx.Rngs(0))
    with pytest.warns(UserWarning, match="sparsify: 8 of the layers") as found:
        s24.sparsify(model, STE)
    told = str(found[0].message)
    for reason in (
        r"width: the kernel of shape (10, 8) has size 10 along axis -2",
        "dots: this Linear has a product of its own",
        "precise: precision=highest is an option",
        "batch: batch_axis={0: 2} makes several products of it",
        "equation: the equation 'BTD,BDF->BTF' has the axis 'B', which operands and result all have",
        "dtype: kernel has dtype float8_e4m3fn; supported are float32",
        "stacked: its kernel has shape (8, 3, 8), not (8, 8) with the axes of a stack first",
        "as_many: its bias has shape (16, 8) beside a kernel of shape (8, 8, 16), and does not begin",
    ):
        assert reason in told
    assert list(sparse_types(model)) == ["good"]


class More(MLP):
    def __call__(self, x, deterministic):
        return super().__call__(x)


class Normed(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.RMSNorm(d, rngs=rngs)


class Dropping(MLP):
    """Dropout that is off, and that draws by the `rngs` of a call."""

    def __init__(self, rngs, rate):
        super().__init__(rngs)
        self.drop = nnx.Dropout(rate, deterministic=True)

    def __call__(self, x):
        return self.drop(super().__call__(x))


@pytest.mark.parametrize(
    ("make", "rule", "reason"),
    [
        (
            lambda rngs: Dropping(rngs, 0.1),
            {},
            "drop has a flag `deterministic`, which .* lacks; leave dropout out",
        ),
        (lambda rngs: MLP(rngs, jnp.tanh), {}, r"does not compute down\(act\(up\(x\)\)\) with one of"),
        (lambda rngs: MLP(rngs), {"activation": "relu"}, "nearest, relu, differs by"),
        (lambda rngs: More(rngs), {}, "a call with nothing but its input fails: .*deterministic"),
        (lambda rngs: Normed(rngs), {}, "besides its linear layers it holds norm/scale"),
        (lambda rngs: MLP(rngs, nnx.gelu), {}, "needs an activation whose slope follows from its value"),
        (lambda rngs: Gated(rngs), {}, "needs a block of two linear layers, and it has 3: down_proj"),
        (lambda rngs: MLP(rngs), {"up": "up", "down": "fc2"}, "it has no linear layer 'up', but fc1, fc2"),
        (lambda rngs: MLP(rngs), {"up": "fc2", "down": "fc1"}, r"a call with nothing but its input fails"),
        (lambda rngs: MLP(rngs, names=("path", "fc2")), {}, "'path' is a name that s24.nn.FFN uses itself"),
    ],
)
def test_a_block_that_computes_something_else_stays_dense(make, rule, reason):
    model = nnx.Dict(mlp=make(nnx.Rngs(0)))
    graphdef = nnx.graphdef(model)
    with pytest.raises(ValueError, match=rf"none of the layers .* mlp: .*{reason}"):
        s24.sparsify(model, [s24.Rule("mlp", ACTIVATION, **rule)])
    assert nnx.graphdef(model) == graphdef


# ---- misuse


def test_dropout_that_never_drops_is_no_hindrance():
    model = s24.sparsify(nnx.Dict(mlp=Dropping(nnx.Rngs(0), 0.0)), ACTIVATION)
    assert isinstance(model.mlp, s24.nn.FFN)


def test_a_layer_with_parameters_of_a_users_own_stays_dense():
    """They were lost, and `densify` failed."""
    model = nnx.Dict(mlp=MLP(nnx.Rngs(0)))
    model.mlp.fc1.gain = nnx.Param(jnp.ones(f))
    with pytest.warns(UserWarning, match="1 of the layers .* mlp/fc1: besides kernel and bias it holds gain"):
        s24.sparsify(model, STE)
    assert list(sparse_types(model)) == ["mlp.fc2"] and type(model.mlp.fc1) is nnx.Linear


def test_wrong_arguments_are_named_with_the_rule_and_the_fix(mixed):
    model, graphdef, *_ = mixed
    for error, text, call in (
        (TypeError, "an nnx.Module or an equinox.Module, got dict", lambda: s24.sparsify({}, FST)),
        (TypeError, r"got the class; call it: FST\(\)", lambda: s24.sparsify(model, s24.methods.FST)),
        (TypeError, "must be one of s24.methods, such as FST.*got 'FST'", lambda: s24.sparsify(model, "FST")),
        (TypeError, r"rules must be s24.Rule\(where, method\), got 3", lambda: s24.sparsify(model, [3])),
        (ValueError, "no rule has a method", lambda: s24.sparsify(model, [])),
        (ValueError, "rules have their own", lambda: s24.sparsify(model, [s24.Rule(".*", FST)], ".*")),
        (ValueError, "'fast' is unknown", lambda: s24.sparsify(model, FST, implementation="fast")),
        (TypeError, "key", lambda: s24.sparsify(model, FST, key=3)),
        (TypeError, "where must be a string, got 3", lambda: s24.sparsify(model, FST, 3)),
        (ValueError, r"where='\(' is no regular expression: .*Write '\.\*'", lambda: s24.Rule("(", FST)),
        (TypeError, "Rule: method must be one of s24.methods", lambda: s24.Rule(".*", "FST")),
        (ValueError, "up='a', down=None, gate=None name a part", lambda: s24.Rule(".*", FST, up="a")),
        (ValueError, "activation 'tanh' is unknown", lambda: s24.Rule(".*", FST, activation="tanh")),
        (ValueError, "method=None leaves layers", lambda: s24.Rule(".*", None, activation="relu")),
        (
            ValueError,
            "has no table for a block with a gate",
            lambda: s24.Rule(".*", ACTIVATION, up="a", down="b", gate="c"),
        ),
        (
            ValueError,
            r"where='mlp/fc3' matches no linear layer; the nearest path is 'mlp/fc\d'. The whole path",
            lambda: s24.sparsify(model, FST, "mlp/fc3"),
        ),
        (
            ValueError,
            r"where='\.\*mpl\.\*' matches no linear layer; the nearest path is 'mlp/fc\d'",
            lambda: s24.sparsify(model, FST, ".*mpl.*"),
        ),
        (
            ValueError,
            "needs a feed-forward block, but where='mlp/fc1' takes the single layer mlp/fc1; name the module "
            "that holds it, 'mlp'",
            lambda: s24.sparsify(model, ACTIVATION, "mlp/fc1"),
        ),
        (
            ValueError,
            r"two rules take mlp/fc1: where='mlp.*' with FST.* and where='.*fc1' with STE",
            lambda: s24.sparsify(model, [s24.Rule("mlp.*", FST), s24.Rule(".*fc1", STE)]),
        ),
        (
            ValueError,
            "two rules take mlp/fc2",
            lambda: s24.sparsify(model, [s24.Rule("mlp", ACTIVATION), s24.Rule(".*fc2", STE)]),
        ),
        (ValueError, "left alone, such as the head", lambda: s24.sparsify(model, FST, "hea.")),
        (
            ValueError,
            "the model has no linear layer",
            lambda: s24.sparsify(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), FST),
        ),
        (ValueError, "holds no layer that s24.sparsify made.$", lambda: s24.densify(model)),
        (
            ValueError,
            "Its layers are of s24.nn: s24.nn.merge_adapters.* to the same model built with method=None",
            lambda: s24.densify(s24.nn.Linear(16, 32, method=STE, rngs=nnx.Rngs(0))),
        ),
        (TypeError, "densify: needs the model", lambda: s24.densify(3)),
    ):
        with pytest.raises(error, match=text):
            call()
    assert nnx.graphdef(model) == graphdef


@pytest.mark.parametrize("where", [None, "ffn", "ffn/up"])
def test_layers_that_are_built_dense_are_named(where):
    """Of a model of `s24.nn.FFN` without a method it was said that nothing but the head matched."""
    model = nnx.Dict(
        ffn=s24.nn.FFN(16, 32, method=None, rngs=nnx.Rngs(0)), head=nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    )
    with pytest.raises(
        ValueError, match=r"ffn/(up|down) is a layer of s24.nn, which gets its method where it is built"
    ):
        s24.sparsify(model, STE, where)


def test_what_is_sparse_already_is_refused(mixed):
    model, graphdef, *_ = mixed
    s24.sparsify(model, STE, "mlp")
    for method in (FST, ACTIVATION):
        with pytest.raises(
            ValueError, match=r"mlp/fc1 is sparse already, with STE.*Call s24.densify\(model\) first"
        ):
            s24.sparsify(model, method, "mlp")
    s24.densify(model)
    assert nnx.graphdef(model) == graphdef


ADAPTED = s24.methods.SLoPe(rank=2), s24.methods.AST(slorb=4)


@pytest.mark.parametrize("method", ADAPTED)
def test_adapters_that_were_not_trained_are_taken_away_again(method):
    model = nnx.Dict(a=nnx.Linear(d, f, rngs=nnx.Rngs(0)))
    before = nnx.state(model, nnx.Param)
    s24.sparsify(model, method)
    assert jax.tree.leaves(nnx.state(model.a.adapters))
    assert type(s24.densify(model).a) is nnx.Linear
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("method", ADAPTED)
def test_trained_adapters_are_not_lost(method):
    model = nnx.Dict(a=nnx.Linear(d, f, rngs=nnx.Rngs(0)))
    s24.sparsify(model, method)
    for value in model.a.adapters.values():
        value[...] += 1
    with pytest.raises(ValueError, match=r"a has low-rank adapters that add something.*nn.merge_adapters"):
        s24.densify(model)
    s24.nn.merge_adapters(model)
    assert type(s24.densify(model).a) is nnx.Linear


@pytest.mark.parametrize("method", [FST, *ADAPTED])
def test_densify_refuses_shapes(method):
    shapes = nnx.eval_shape(lambda: s24.sparsify(nnx.Dict(a=nnx.Linear(d, f, rngs=nnx.Rngs(0))), method))
    with pytest.raises(TypeError, match=r"densify: the model has shapes in place of arrays\. Make the model"):
        s24.densify(shapes)


def test_an_equation_in_the_call_is_refused():
    layer = s24.sparsify(nnx.Einsum("BD,DF->BF", (d, f), rngs=nnx.Rngs(0)), STE)
    with pytest.raises(ValueError, match=r"got the equation 'BD,DF->FB' in a call.*its own|own, 'BD,DF->BF'"):
        layer(jnp.ones((4, d)), "BD,DF->FB")
