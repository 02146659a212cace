"""How names of logical axes become specs over the mesh in the context."""

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
    with nnx.logical_axis_rules((("tp", None),)):
        assert s24.sharding.spec("tp") == P(None)  # unless a rule says otherwise
    with pytest.raises(
        ValueError, match=r"the logical axis 'width' is cut; there are rules for 'batch', .*'expert'\."
    ):
        s24.sharding.spec("width")


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
