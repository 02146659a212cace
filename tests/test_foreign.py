"""Models of other libraries, where these are installed: products are sparse, and a script trains them."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24

FST = s24.methods.FST()
d, f, T = 8, 16, 4
SCRIPT = Path(__file__).parents[1] / "docs" / "foreign_models.py"


def sparse(apply, params, x, where=None):
    """What a function computes with sparse products."""
    view = s24.Function(apply, params, FST, (x,), where)
    return jax.jit(lambda params, own: view.model(params, own, True)(x))(*view.split())


def cut(w):
    """A kernel as products of FST take it: the masks of (in, out) and (out, in) are the same."""
    return jnp.where(s24.transposable_mask24(w), w, 0)


@pytest.mark.slow
def test_the_feed_forward_block_of_gemma():
    """Its gate and up are one kernel, whose last axis is contracted."""
    modules = pytest.importorskip("gemma.gm.nn._modules")
    block = modules.FeedForward(features=d, hidden_dim=f, transpose_gating_einsum=True)
    x = jax.random.normal(jax.random.key(1), (2, T, d))
    variables = block.init(jax.random.key(0), x)
    params = dict(variables["params"])
    gating = cut(params["gating_einsum"].reshape(-1, d).T).T.reshape(2, f, d)
    masked = {"params": {"gating_einsum": gating, "linear": cut(params["linear"])}}
    np.testing.assert_allclose(sparse(block.apply, variables, x), block.apply(masked, x), rtol=1e-4)


@pytest.mark.slow
def test_a_layer_of_maxtext():
    linears = pytest.importorskip("maxtext.layers.linears")
    nnx = pytest.importorskip("flax.nnx")
    graphdef, params = nnx.split(linears.DenseGeneral(d, f, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (2, T, d))

    def apply(params, x):
        return nnx.merge(graphdef, params)(x)

    np.testing.assert_allclose(
        sparse(apply, params, x), apply(jax.tree.map(cut, params), x), rtol=1e-4, atol=1e-5
    )


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 40


@pytest.mark.slow
def test_the_script_runs(capsys):
    for package in ("equinox", "gemma.gm.nn._transformer", "maxtext.models.llama2"):
        pytest.importorskip(package)
    runpy.run_path(str(SCRIPT))
    text = capsys.readouterr().out
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)]
    assert len(losses) == 3 and all(last < 0.85 * first for first, last in losses)
    assert text.count("sparse by FST(") == text.count("dense: the method is Dense()") == 5 + 7
    assert "No sparse layers" in text and "6 layers with FST(" in text
    assert text.count("dense again with the same outputs: True") == 3
