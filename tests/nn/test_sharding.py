"""How names of logical axes become specs over the mesh in the context."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24


@pytest.fixture(autouse=True)
def mesh():
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    ):
        yield


def test_names_without_a_rule():
    assert s24.sharding.spec("embed", None, "tp") == P("fsdp", None, "tp")  # an axis of the mesh is itself
    assert s24.sharding.spec(("embed", "tp"), ("mlp", "vocab")) == P(("fsdp", "tp"), "tp")
    with nnx.logical_axis_rules((("tp", None),)):
        assert s24.sharding.spec("tp") == P(None)  # unless a rule says otherwise
    with pytest.raises(
        ValueError, match=r"the logical axis 'width' is cut; there are rules for 'batch', .*'expert'\."
    ):
        s24.sharding.spec("width")


def test_rules_and_the_mesh_name_the_same_axes():
    with nnx.logical_axis_rules((("embed", "model"), ("mlp", "tp"))):
        assert s24.sharding.spec("mlp") == P("tp")
        with pytest.raises(
            ValueError, match=r"rule \('embed', 'model'\) names the mesh axis 'model', .*'fsdp', 'tp'\. Write"
        ):
            s24.sharding.spec("embed")
    rules = (("batch", None), ("embed", None), ("mlp", "tp"))
    with nnx.logical_axis_rules(rules), pytest.raises(ValueError, match=r"fsdp = 2, which no rule names"):
        s24.sharding.specs("batch", w=("embed", "mlp"))
    whole = {"x": P(None), "w": P(None, "tp")}
    with nnx.logical_axis_rules((*rules, ("fsdp", None))):
        assert s24.sharding.specs("batch", w=("embed", "mlp")) == whole
    mistyped = (*rules, ("embd", "fsdp"))
    told = r"no rule names; .*'embd' is no axis of this layer: is 'embed' meant\? Say .*\('fsdp', 'fsdp'\) if"
    with nnx.logical_axis_rules(mistyped), pytest.raises(ValueError, match=told):
        s24.sharding.specs("batch", w=("embed", "mlp"))
    for other in (("seq", "fsdp"), ("fsdp", "fsdp")):  # of other layers
        with nnx.logical_axis_rules((*rules, other)):
            assert s24.sharding.specs("batch", w=("embed", "mlp")) == whole
            assert s24.sharding.spec("fsdp") == P("fsdp")
    with nnx.logical_axis_rules(rules), pytest.raises(ValueError, match=r"fsdp = 2, which no rule names"):
        s24.sharding.check_named("batch", ("embed", None), "mlp")
    with nnx.logical_axis_rules(mistyped):  # a layer of one's own may have it
        assert s24.sharding.specs("batch", w=("embd", "mlp"))["w"] == P("fsdp", "tp")
    with nnx.logical_axis_rules(rules):  # a layer may name it, too
        assert s24.sharding.specs("batch", w=("fsdp", "mlp"))["w"] == P("fsdp", "tp")


LAYERS = {
    "Linear": functools.partial(s24.nn.Linear, axes=("embed", "mlp")),
    "FFN": functools.partial(s24.nn.FFN, axes=("embed", "mlp")),
    "GatedFFN": functools.partial(s24.nn.GatedFFN, axes=("embed", "mlp")),
    "MoE": functools.partial(s24.nn.MoE, experts=4, expert_axis="expert"),
    "LowRank": functools.partial(s24.nn.LowRank, rank=4, axes=("embed", "mlp")),
}


def over_data():
    return jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,)))


@pytest.mark.parametrize("name", LAYERS)
def test_a_mesh_that_no_rule_names_is_refused(name):
    """As a layer is made, and as it is called with a mesh that came later."""

    def make():
        return LAYERS[name](8, 16, method=s24.methods.STE(), rngs=nnx.Rngs(0))

    layer = make()
    message = r"data = 4, which no rule names; .*Say what is cut over it, such as \('batch', 'data'\)"
    with over_data():
        for made in (make, lambda: jax.eval_shape(layer, jnp.ones((8, 8)))):
            with pytest.raises(ValueError, match=message):
                made()
        rules = ("batch", "embed", "mlp", "expert", "data")
        with nnx.logical_axis_rules(tuple((name, None) for name in rules)):
            jax.eval_shape(make(), jnp.ones((8, 8)))


def test_a_layer_that_is_replaced_on_a_mesh_that_no_rule_names():
    metadata = {"out_sharding": ("embed", "mlp"), "eager_sharding": False}
    layer = nnx.Linear(8, 16, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    with over_data(), pytest.raises(ValueError, match="data = 4, which no rule names"):
        s24.sparsify(layer, s24.methods.STE())


def test_experts_may_name_a_mesh_axis_themselves():
    mesh = AbstractMesh((2, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    options = {"experts": 4, "expert_axis": "data", "tokens": "data", "axes": (None, "mlp")}
    with jax.sharding.use_abstract_mesh(mesh):
        moe = s24.nn.MoE(8, 16, method=s24.methods.STE(), **options, rngs=nnx.Rngs(0))
        assert jax.eval_shape(moe, jnp.ones((8, 8)))[0].shape == (8, 8)


@pytest.mark.parametrize("make", (s24.nn.Linear, s24.nn.FFN, s24.nn.GatedFFN))
def test_a_layer_says_as_it_is_made_what_the_mesh_cannot_cut(make):
    """Before Flax looks for the axes in the mesh, or JAX moves the parameters: neither says what to write."""

    def layer(d=8, f=16, axes=("embed", "mlp"), method=None):
        return make(d, f, method=method, axes=axes, rngs=nnx.Rngs(0))

    message = r"axis 1 of the kernel of shape \(8, 17\), 'mlp', of size 17 .* 2 shards \(tp = 2\)\. Use a mul"
    with pytest.raises(ValueError, match=message):
        layer(f=17)
    with pytest.raises(ValueError, match=r"no rule says .* axis 'embd' is cut; .*\('embd', None\)"):
        layer(axes=("embd", "mlp"))
    rules = (("batch", "fsdp"), ("embed", "model"), ("mlp", "tp"))
    with nnx.logical_axis_rules(rules), pytest.raises(ValueError, match=r"mesh axis 'model', .*'fsdp', 'tp'"):
        layer()
    layer(f=16)
    layer(f=17, axes=(None, None))


def test_how_arrays_rest():
    cut = s24.sharding.metadata(("embed", "mlp"))
    tree = {
        "stacked": nnx.Param(jnp.zeros((3, 4, 8)), **cut),
        "plain": nnx.Param(jnp.zeros(4)),
        "array": jnp.zeros(4),
    }
    found = s24.sharding.rests(tree)
    assert found["stacked"].get_value() == P(None, "fsdp", "tp")
    assert found["plain"].get_value() == found["array"] == P()
