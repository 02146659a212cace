"""Models of other libraries, where these are installed: they become sparse, train, and are dense again."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_sparse24 as s24

STE = s24.methods.STE()
d, f, T = 8, 16, 4
SCRIPT = Path(__file__).parents[1] / "docs" / "foreign_models.py"


def falls(loss, params, steps=8, rate=3e-2):
    """The gradient is that of the sparse function, by which the loss falls."""
    tx = optax.adam(rate)
    value_and_grad, opt, values = jax.jit(jax.value_and_grad(loss)), tx.init(params), []
    for _ in range(steps):
        value, grads = value_and_grad(params)
        updates, opt = tx.update(grads, opt)
        params = optax.apply_updates(params, updates)
        values.append(float(value))
    assert values[-1] < 0.9 * values[0], values
    return params


@pytest.mark.slow
def test_an_equinox_transformer():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        norm: eqx.nn.LayerNorm

        def __call__(self, x):
            x = x + self.attention(x, x, x)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))

    keys = jax.random.split(jax.random.key(0), 3)
    block = Block(
        eqx.nn.MultiheadAttention(2, d, key=keys[0]),
        eqx.nn.MLP(d, d, f, 1, jax.nn.gelu, key=keys[1]),
        eqx.nn.LayerNorm(d),
    )
    params, static = eqx.partition(block, eqx.is_array)
    x, y = jax.random.normal(keys[2], (2, 3, T, d))

    def apply(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    sparse = s24.intercept(apply, STE, "mlp/.*weight")
    cut = eqx.tree_at(
        lambda b: [layer.weight for layer in b.mlp.layers],
        block,
        [s24.prune24(layer.weight, -1) for layer in block.mlp.layers],
    )
    np.testing.assert_allclose(jax.jit(sparse)(params, x), jax.vmap(cut)(x), atol=1e-5)
    trained = falls(lambda params: jnp.mean((sparse(params, x) - y) ** 2), params)
    # The trained parameters are those of an ordinary model.
    assert np.isfinite(jax.vmap(eqx.combine(trained, static))(x)).all()


@pytest.mark.slow
def test_the_feed_forward_block_of_gemma():
    """Its gate and up are one kernel, whose last axis is contracted."""
    modules = pytest.importorskip("gemma.gm.nn._modules")
    block = modules.FeedForward(features=d, hidden_dim=f, transpose_gating_einsum=True)
    x, y = jax.random.normal(jax.random.key(1), (2, 2, T, d))
    variables = block.init(jax.random.key(0), x)
    sparse = s24.intercept(block.apply, STE)
    params = dict(variables["params"])
    cut = {
        "gating_einsum": s24.prune24(params["gating_einsum"], -1),
        "linear": s24.prune24(params["linear"], 0),
    }
    np.testing.assert_allclose(sparse(variables, x), block.apply({"params": cut}, x), rtol=1e-4)
    falls(lambda variables: jnp.mean((sparse(variables, x) - y) ** 2), variables)


@pytest.mark.slow
def test_a_layer_of_maxtext():
    linears = pytest.importorskip("maxtext.layers.linears")
    nnx = pytest.importorskip("flax.nnx")
    layer = linears.DenseGeneral(d, f, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    x, y = jax.random.normal(jax.random.key(1), (2, T, d)), jnp.ones((2, T, f))

    def apply(params, x):
        return nnx.merge(graphdef, params)(x)

    sparse = s24.intercept(apply, STE)
    cut = jax.tree.map(lambda w: s24.prune24(w, 0), params)
    np.testing.assert_allclose(sparse(params, x), apply(cut, x), rtol=1e-5)
    falls(lambda params: jnp.mean((sparse(params, x) - y) ** 2), params)


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 40


@pytest.mark.slow
def test_the_script_runs(capsys):
    for package in ("equinox", "gemma.gm.nn._modules", "maxtext.layers.linears"):
        pytest.importorskip(package)
    runpy.run_path(str(SCRIPT))
    text = capsys.readouterr().out
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)]
    assert len(losses) == 3 and all(last < 0.9 * first for first, last in losses)
    assert text.count("sparse by STE()") == text.count("dense: it is left alone") == 5
