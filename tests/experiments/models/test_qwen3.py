"""The model of Qwen3's shape: its attention against one written out, causality, decoding, a run of it."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments import config as configs
from experiments import launch
from experiments.errors import UserError
from experiments.models import qwen3
from experiments.models.parts import rotate

VOCABULARY = 11
SHAPE = {"layers": 2, "d": 16, "f": 32, "heads": 4, "kv_heads": 2, "head": 6, "rope": 100.0}


def model_of(method=s24.methods.Dense(), **fields):  # noqa: B008
    rngs = nnx.Rngs(params=0, default=1)
    return qwen3.Config(**SHAPE | fields).create(method, VOCABULARY, rngs=rngs)


def tokens(batch=2, length=10):
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (batch, length)), jnp.int32)


def test_attention_is_that_of_its_formula():
    """Every head of queries by itself, in float64, with scales of the norms that are not 1."""
    layer = model_of().blocks[0].attention
    rng = np.random.default_rng(1)
    for norm in (layer.query_norm, layer.key_norm):
        norm.scale[...] = jnp.asarray(rng.uniform(0.5, 2, 6), jnp.float32)
    x_BLd = rng.normal(size=(2, 5, 16))
    q, k, v = (
        (x_BLd @ np.asarray(part.kernel[...], np.float64)).reshape(2, 5, -1, 6)
        for part in (layer.query, layer.key, layer.value)
    )

    def prepared(y, norm):
        y = y / np.sqrt(np.mean(y**2, -1, keepdims=True) + 1e-6) * np.asarray(norm.scale[...], np.float64)
        return np.asarray(rotate(jnp.asarray(y, jnp.float32), base=100.0), np.float64)

    q, k, heads = prepared(q, layer.query_norm), prepared(k, layer.key_norm), []
    for head in range(4):
        own = head // 2  # two heads of queries for each of keys and values
        scores = np.einsum("blh,bmh->blm", q[:, :, head], k[:, :, own]) / np.sqrt(6)
        scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        heads.append(np.einsum("blm,bmh->blh", shares, v[:, :, own]))
    want = np.concatenate(heads, -1) @ np.asarray(layer.out.kernel[...], np.float64)
    np.testing.assert_allclose(layer(jnp.asarray(x_BLd, jnp.float32))[0], want, atol=1e-5)


@pytest.mark.slow
def test_no_gradient_comes_from_a_later_token():
    model, at = model_of(), 4

    def logits_there(x_BLd):
        for block in model.blocks:
            x_BLd, _ = block(x_BLd)
        return jnp.sum(model.logits(model.norm(x_BLd))[:, at] * jnp.arange(VOCABULARY))

    x_BLd = jax.random.normal(jax.random.key(0), (2, 10, 16))
    size_BL = np.abs(jax.jit(jax.grad(logits_there))(x_BLd)).sum(-1)
    assert (size_BL[:, : at + 1] > 0).all() and (size_BL[:, at + 1 :] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"remat": True}, {"tied": False, "kv_heads": 1}])
def test_decoding_gives_the_logits_of_the_whole(fields):
    model, words = model_of(**fields), tokens()
    decode = nnx.jit(lambda model, *rest: model.decode(*rest))
    logits, cache = decode(model, words[:, :6], model.empty_cache(2, 10), 0)
    parts = [logits]
    for position in range(6, 10):
        logits, cache = decode(model, words[:, position : position + 1], cache, position)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), nnx.jit(lambda m, w: m(w))(model, words), atol=1e-5)


def test_methods_start_from_the_same_parameters():
    one, other = (nnx.state(model_of(m), nnx.Param) for m in (s24.methods.Dense(), s24.methods.FST()))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert len(s24.nn.sparse_layers(model_of(s24.methods.FST()))) == 2 * 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_heads": 3}, "must divide model.heads, got kv_heads=3 and heads=4"),
        ({"head": 5}, "model.head must be even, got 5"),
        ({"layers": 0}, "model.layers must be positive, got 0"),
        ({"attention": "cudnn"}, "needs model.dtype bfloat16, got float32"),
    ],
)
def test_rules(fields, words):
    with pytest.raises(UserError, match=words):
        qwen3.Config(**SHAPE | fields)


FEWER = ["--method.dense-fraction", "0", "--train.probe-every", "0"]  # programs to compile


@pytest.mark.slow
def test_a_run_from_the_command_line(shared, tmp_path, capsys):
    """Of this model, on documents of a JSON Lines file: trained with FST, evaluated at the end."""
    texts = [path.read_text() for path in sorted((shared / "corpus").iterdir())]
    pieces = [text[i : i + 600] for text in texts for i in range(0, len(text), 600)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    out = tmp_path / "run"
    chosen = [
        "--model",
        "qwen3",
        "--model.kv-heads",
        "1",
        "--model.head",
        "8",
        "--model.layers",
        "1",
        "--data=files",
    ]
    chosen += ["--data.files", str(tmp_path / "text.jsonl"), "--out", str(out), "--progress", "False"]
    launch.main([str(shared / "tiny.py"), *chosen, "--train.eval-every", "0", "--no-tune", *FEWER])
    config = configs.read(out / "config.json")
    assert config.model == qwen3.Config(layers=1, d=16, f=32, heads=2, kv_heads=1, head=8)
    assert (config.data.files, config.data.seq) == (str(tmp_path / "text.jsonl"), 32)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    flips = [row["flip_rate"] for row in rows if row["kind"] == "monitor"]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert len(flips) == 4 and all(0 <= flip < 1 for flip in flips)  # few steps: none may have flipped
    printed = capsys.readouterr().out
    for name in ("dense ", "sparse"):
        assert re.search(rf"validation loss, {name} [\d.]+ nats = [\d.]+ bits per byte", printed), printed
    assert re.search(r"xz compresses the training text to [\d.]+ bits per byte", printed)
