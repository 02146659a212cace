"""Low-rank layers: what they compute, how they start, what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from tests.nn.models import inputs


@pytest.mark.parametrize(("activation", "act"), [("silu", jax.nn.silu), ("identity", lambda z: z)])
def test_two_factors_and_what_is_between(activation, act):
    layer = s24.nn.LowRank(256, 384, rank=64, activation=activation, rngs=nnx.Rngs(0))
    a, b = layer.reduce.kernel[...], layer.expand.kernel[...]
    x = inputs(4, 256)
    np.testing.assert_allclose(layer(x), act(x @ a) @ b, rtol=1e-4, atol=1e-4)
    for factor in (a, b):  # N(0, 1) rank^(-1/4) (in + out)^(-1/4)
        assert float(factor.std()) == pytest.approx(64**-0.25 * 640**-0.25, rel=0.02)


def test_blocks_with_and_without_a_gate():
    x, made = inputs(4, 16), {"rank": 4, "rngs": nnx.Rngs(0)}
    gated = s24.nn.LowRankFFN(16, 32, **made)
    np.testing.assert_allclose(gated(x), gated.down(jax.nn.silu(gated.gate(x)) * gated.up(x)), rtol=1e-6)
    plain = s24.nn.LowRankFFN(16, 32, activation="squared_relu", gated=False, **made)
    hidden = jnp.square(jax.nn.relu(plain.up(x)))
    np.testing.assert_allclose(plain(x), plain.down(hidden), rtol=1e-6)
    assert plain.activation_stats(x)["density"] == jnp.mean(hidden != 0)


def test_an_initialiser_of_ones_own_is_taken():
    """It was replaced by the paper's without a word."""
    layer = s24.nn.LowRank(16, 32, rank=8, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    assert (layer.reduce.kernel[...] == 1).all() and (layer.expand.kernel[...] == 1).all()


def test_factors_can_be_sparse():
    layer = s24.nn.LowRank(16, 32, rank=8, method=s24.methods.STE(), rngs=nnx.Rngs(0))
    assert len(s24.nn.sparse_layers(layer)) == 2
    x = inputs(4, 16)
    a, b = (s24.prune24(w[...], 0) for w in (layer.reduce.kernel, layer.expand.kernel))
    np.testing.assert_allclose(layer(x), jax.nn.silu(x @ a) @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "LowRank: rank=0 must be at least 1"),
        ({"bottleneck": "relu"}, "LowRank: activation 'relu' is unknown; use 'silu' or 'identity'"),
        ({"activation": "tanh"}, "LowRankFFN: activation 'tanh' is unknown"),
    ],
)
def test_bad_options(fields, message):
    with pytest.raises(ValueError, match=message):
        s24.nn.LowRankFFN(16, 32, **{"rank": 4, **fields}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("rank", [2.5, True, "4"])
def test_the_rank_is_a_whole_number(rank):
    with pytest.raises(TypeError, match="LowRank: rank must be an int, got"):
        s24.nn.LowRank(16, 32, rank=rank, rngs=nnx.Rngs(0))
