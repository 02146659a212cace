"""What a model goes through in other people's programs: copies, pickles, donation, Linen, checkpoints."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_sparse24 as s24
from tests.nn.models import arrays, assert_same, inputs

d, f = 16, 32
FST = s24.methods.FST(refresh_every=4)


@pytest.fixture(scope="module")
def model():
    model = s24.nn.FFN(d, f, method=FST, rngs=nnx.Rngs(0))
    s24.refresh(model, 3)
    return model


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), nnx.clone])
def test_a_copy_is_the_model_and_is_its_own(model, how):
    s24.nn.set_sparse(model, False)
    twin = how(model)
    s24.nn.set_sparse(model, True)
    assert not twin.up.sparse and twin.up.method == FST
    s24.nn.set_sparse(twin, True)
    assert_same(twin, model)
    np.testing.assert_array_equal(twin(inputs()[:, :d]), model(inputs()[:, :d]))
    twin.up.kernel[...] = 0 * twin.up.kernel[...]
    s24.refresh(twin, 4)
    assert int(model.up.step[...]) == 3 and model.up.kernel[...].any()


def test_a_step_may_donate_its_model():
    twin = s24.nn.FFN(d, f, method=FST, rngs=nnx.Rngs(0))
    s24.refresh(twin, jnp.int32(5))  # no buffer stands in the state twice

    @nnx.jit(donate_argnums=0)
    def step(model, number):
        s24.refresh(model, number)
        return model(inputs()[:, :d]).sum()

    values = [step(twin, jnp.int32(number)) for number in (6, 7, 8)]
    assert np.isfinite(values).all() and int(twin.down.refreshed[...]) == 8


def test_a_model_serves_as_a_linen_module():
    linen = nnx.bridge.to_linen(s24.nn.FFN, d, f, method=FST)
    x = inputs()[:, :d]
    variables = linen.init(jax.random.key(0), x)
    assert {"params", "SparseState"} <= variables.keys()
    y = linen.apply(variables, x)
    assert y.shape == x.shape and np.isfinite(y).all()


def test_orbax_keeps_modes_masks_and_ages(model, tmp_path):
    s24.nn.set_sparse(model, False)
    state = jax.tree.map(jnp.copy, nnx.state(model))
    s24.nn.set_sparse(model, True)
    with ocp.StandardCheckpointer() as files:
        files.save(tmp_path / "model", nnx.to_pure_dict(state))
        files.wait_until_finished()
        stored = files.restore(tmp_path / "model")
    twin = s24.nn.FFN(d, f, method=FST, rngs=nnx.Rngs(1))
    target = nnx.state(twin)
    nnx.replace_by_pure_dict(target, stored)
    nnx.update(twin, target)
    assert arrays(twin).keys() == arrays(model).keys()
    for path, value in arrays(state).items():
        np.testing.assert_array_equal(arrays(twin)[path], value)
    with pytest.raises(ValueError, match="written in a dense phase"):
        twin(inputs()[:, :d])
