"""docs/models.md runs as it stands; a model of the experiments is sparsified as one of others is."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments.models.qwen3 import Config

PAGE = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.slow
def test_the_page_runs(capsys):
    scope = {"__name__": "page"}
    for code in CODE:
        exec(code, scope)
    out = capsys.readouterr().out
    for text in (
        "it is left alone as a head",
        "3 layers with FST(",
        "mlp.up_proj: the mask is that",
        "GatedFFN",
    ):
        assert text in out
    losses = scope["losses"]
    assert losses[-1] < 0.9 * losses[0]
    trained, plain = scope["trained"], scope["Model"](nnx.Rngs(0))
    assert nnx.graphdef(trained) == nnx.graphdef(plain)
    assert np.isfinite(trained(scope["tokens"])).all()
    assert scope["y"].shape == scope["dense"].shape
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(scope["gradient"]))
    assert jax.tree.structure(scope["trained_params"]) == jax.tree.structure(scope["params"])


def test_the_script_is_short():
    assert len(CODE[1].strip().splitlines()) <= 40


def test_files_that_the_page_names_exist():
    for path in re.findall(r"`(tests/\w+\.py)`", PAGE):
        assert (Path(__file__).parent.parent / path).exists(), path


class Gated(nnx.Module):
    """SwiGLU as in models of others."""

    def __init__(self, d, f, rngs):
        self.gate_proj, self.up_proj = (nnx.Linear(d, f, use_bias=False, rngs=rngs) for _ in range(2))
        self.down_proj = nnx.Linear(f, d, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.slow
def test_a_decoder_of_the_shape_of_qwen3():
    config = Config(layers=2, d=16, f=32, heads=2, kv_heads=1, head=8)
    method, rngs = s24.methods.STE(), nnx.Rngs(1)
    model = config.create(None, 32, rngs=rngs)
    for block in model.blocks:
        block.ffn = Gated(16, 32, rngs)
    tokens = jnp.arange(16).reshape(2, 8)
    run = nnx.jit(lambda model: model(tokens))
    before, graphdef = run(model), nnx.graphdef(model)
    names = {"up": "up_proj", "down": "down_proj", "gate": "gate_proj"}
    s24.sparsify(model, [s24.Rule(".*ffn", method, **names), s24.Rule(".*attention", method)])
    assert len(s24.nn.sparse_layers(model)) == 2 * 7
    masks, sparse = s24.nn.masks(model), run(model)
    s24.densify(model)
    assert nnx.graphdef(model) == graphdef
    np.testing.assert_array_equal(run(model), before)
    cut = jax.tree.map(lambda w, mask: jnp.where(mask, w, 0), nnx.state(model), masks)
    np.testing.assert_allclose(sparse, run(nnx.merge(graphdef, cut)), atol=1e-4)
