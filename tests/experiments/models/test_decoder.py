"""Properties of the language model."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments.errors import UserError
from experiments.models import decoder, parts
from experiments.training import step
from experiments.training.step import loss_of

VOCABULARY = 11
METHODS = (s24.methods.Dense(), s24.methods.STE(), s24.methods.FST())


def build(method=s24.methods.Dense(), seed=0, **model):  # noqa: B008
    shape = {"layers": 2, "d": 16, "f": 32, "heads": 2, **model}
    return decoder.Config(**shape).create(method, VOCABULARY, rngs=nnx.Rngs(params=seed, default=seed + 1))


def tokens(length=12, batch=4, seed=0):
    return jnp.array(np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length)), jnp.int32)


@nnx.jit
def decode(model, tokens, cache, position):
    return model.decode(tokens, cache, position)


def params_of(model):
    return nnx.state(model, nnx.Param)


def gradient(model, batch):
    """Loss and gradients, as the training step takes them."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return jax.jit(jax.value_and_grad(lambda p: loss_of(nnx.merge(graphdef, p, rest), batch)))(params)


def test_gradient_of_embeddings():
    """Sums over tokens, on accelerators by a product and without a scatter."""
    table, words = jax.random.normal(jax.random.key(0), (VOCABULARY, 16)), tokens()
    ct = jax.random.normal(jax.random.key(1), (*words.shape, 16))
    wanted = jax.vjp(lambda t: t[words], table)[1](ct)[0]
    gradient = lambda table, ct: jax.vjp(lambda t: parts.look_up(t, words), table)[1](ct)[0]  # noqa: E731
    np.testing.assert_allclose(gradient(table, ct), wanted, rtol=1e-5, atol=1e-5)
    by_product = parts.sums_by_product(words, ct, VOCABULARY)
    np.testing.assert_allclose(by_product, wanted, rtol=1e-5, atol=1e-5)
    lowered = jax.jit(gradient).trace(table, ct).lower(lowering_platforms=("cuda",))
    assert "scatter" not in lowered.as_text()


@pytest.mark.parametrize("rows", [VOCABULARY, 60])
def test_gradient_of_a_large_table(rows, monkeypatch):
    """Sums in float32 and in one order, which no scatter that adds would keep."""
    monkeypatch.setattr(parts, "ROWS_BY_PRODUCT", VOCABULARY - 1)
    table, words = jnp.zeros((rows, 16), jnp.bfloat16), tokens()
    ct = jax.random.normal(jax.random.key(1), (*words.shape, 16), jnp.bfloat16)
    wanted = np.zeros((rows, 16), np.float32)
    np.add.at(wanted, words, ct.astype(np.float32))
    gradient = jax.jit(lambda table, ct: jax.vjp(lambda t: parts.look_up(t, words), table)[1](ct)[0])
    np.testing.assert_allclose(gradient(table, ct).astype(np.float32), wanted, rtol=2**-8)
    assert "add" not in str(re.findall(r"scatter\S*", str(jax.make_jaxpr(gradient)(table, ct))))


def test_loss_in_parts(monkeypatch):
    """The same loss and gradients to rounding, and never all logits at once, and each once; small
    vocabularies are whole."""
    model, batch = build(layers=1), tokens(length=13, batch=2)
    loss, grads = gradient(model, batch)
    monkeypatch.setattr(step, "LOGITS_AT_ONCE", 2 * 4 * VOCABULARY)
    assert step.parts_of(2, 12, VOCABULARY) == 1
    monkeypatch.setattr(step, "VOCABULARY_AT_ONCE", VOCABULARY - 1)
    monkeypatch.setattr(parts, "ROWS_BY_PRODUCT", VOCABULARY - 1)
    assert [step.parts_of(2, length, VOCABULARY) for length in (12, 13, 4)] == [3, 13, 1]
    loss_parts, grads_parts = gradient(model, batch)
    np.testing.assert_allclose(loss, loss_parts, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_parts), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    program = str(jax.make_jaxpr(jax.grad(lambda p: loss_of(nnx.merge(graphdef, p, rest), batch)))(params))
    assert f"f32[2,4,{VOCABULARY}]" in program and f"[2,12,{VOCABULARY}]" not in program
    assert len(re.findall(rf"f32\[2,4,{VOCABULARY}\] = dot_general", program)) == 1


def test_what_is_made_of_the_logits_of_two_models_comes_in_parts(monkeypatch):
    """A loss beside a teacher: the same and its gradient to rounding, and never all logits at once."""
    models, batch = [build(layers=1, seed=seed) for seed in (0, 1)], tokens(length=13, batch=2)
    (graphdef, params, rest), teacher = nnx.split(models[0], nnx.Param, ...), models[1]

    def divergence(params):
        both = nnx.merge(graphdef, params, rest), teacher
        features = [step.features_of(one, batch[:, :-1]) for one in both]

        def mean(logits, arrays):
            own, taught = (jax.nn.log_softmax(x) for x in logits)
            return (jnp.exp(taught) * (taught - own)).sum(-1).mean() + step.losses_of(own, *arrays).mean()

        return step.over_logits(mean, both, features, batch[:, 1:]).mean()

    whole, grads = jax.jit(jax.value_and_grad(divergence))(params)
    monkeypatch.setattr(step, "LOGITS_AT_ONCE", 2 * 4 * VOCABULARY)
    monkeypatch.setattr(step, "VOCABULARY_AT_ONCE", VOCABULARY - 1)
    monkeypatch.setattr(parts, "ROWS_BY_PRODUCT", VOCABULARY - 1)
    in_parts, grads_in_parts = jax.jit(jax.value_and_grad(divergence))(params)
    np.testing.assert_allclose(whole, in_parts, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_in_parts), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    program = str(jax.make_jaxpr(jax.grad(divergence))(params))
    assert f"f32[2,4,{VOCABULARY}]" in program and f"[2,12,{VOCABULARY}]" not in program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "ffn"),
    [
        (METHODS[0], "squared_relu"),
        (METHODS[1], "swiglu"),
        (METHODS[2], "squared_relu"),
        (METHODS[2], "swiglu"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_causal_by_gradient(method, ffn):
    """The logits at position t depend on the embeddings of all positions 0..t and on no other."""
    model = build(method, ffn=ffn)
    x_BLd = jax.random.normal(jax.random.key(0), (1, 8, 16))
    model.embedded = lambda x: x  # the probe enters where embeddings do
    model.logits = lambda x: x

    influence = jax.jit(jax.grad(lambda x, t: (model(x)[0, t] ** 2).sum()))
    for t in (0, 3, 7):
        size = abs(influence(x_BLd, t)[0]).sum(-1)
        assert (size[: t + 1] > 0).all()
        assert (size[t + 1 :] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("attention_method", ["", "FST"])
@pytest.mark.parametrize("method", METHODS[::2], ids=lambda m: type(m).__name__)
def test_scan_equals_unrolled(method, attention_method):
    """Parameters, masks and keys, also those of attention's projections, and gradients."""
    unrolled, scanned = (
        build(method, scan=scan, attention_method=attention_method) for scan in (False, True)
    )
    batch = tokens()
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, unrolled.blocks))
    for one, other in zip(jax.tree.leaves(stacked), jax.tree.leaves(nnx.state(scanned.blocks)), strict=True):
        np.testing.assert_array_equal(one, other)
    for model in (unrolled, scanned):
        s24.refresh(model, step=3)
    (loss, grads), (loss_scan, grads_scan) = gradient(unrolled, batch), gradient(scanned, batch)
    np.testing.assert_allclose(loss, loss_scan, rtol=1e-6)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads["blocks"].values())
    leaves = zip(jax.tree.leaves(stacked), jax.tree.leaves(grads_scan["blocks"]), strict=True)
    for one, other in leaves:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_remat_changes_nothing():
    method = s24.methods.FST()
    (loss, grads), (loss_remat, grads_remat) = (
        gradient(build(method, scan=True, remat=remat), tokens()) for remat in (False, True)
    )
    np.testing.assert_allclose(loss, loss_remat, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_remat), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": 4, "kv_heads": 3}, "kv_heads must divide model.heads, got kv_heads=3 and heads=4"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"d": 18, "heads": 6}, "d=18 and heads=6.*or give model.head_dim"),
        ({"rank": 4, "kv_heads": 1}, "rank 4 is for as many kv_heads as heads"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
        ({"vocabulary": -1}, "vocabulary must not be negative"),
    ],
)
def test_options_that_do_not_fit(fields, words):
    with pytest.raises(UserError, match=words):
        decoder.Config(**{"layers": 1, "d": 16, "f": 32, "heads": 2, **fields})


def test_methods_start_from_the_same_parameters():
    states = [params_of(build(method)) for method in METHODS]
    for other in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, states[0], other)
    leaves = zip(jax.tree.leaves(states[0]), jax.tree.leaves(params_of(build(seed=1))), strict=True)
    assert any((a != b).any() for a, b in leaves)


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_no_gradient_of_attention_is_padded(kv_heads):
    """Those of queries, keys and values are put beside one another; padded and added, XLA reads and writes
    them at a third of a GPU's bandwidth."""
    model = decoder.Config(d=32, heads=4, kv_heads=kv_heads)
    graph, state = nnx.split(decoder.Attention(model, rngs=nnx.Rngs(0)))
    loss = jax.grad(lambda state, x: nnx.merge(graph, state)(x)[0].sum(), argnums=(0, 1))
    text = str(jax.make_jaxpr(loss)(state, jnp.ones((2, 8, 32))))
    assert " concatenate[" in text and " pad[" not in text


def test_rotary_positions_are_relative():
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 8))
    q, k = (jnp.broadcast_to(x, (1, 10, 1, 8)) for x in (q, k))
    scores = jnp.einsum("blhd,bmhd->lm", parts.rotate(q), decoder.rotate(k))
    for offset in (-2, 0, 3):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(parts.rotate(q)[0, 0], q[0, 0])
    np.testing.assert_allclose(
        jnp.linalg.norm(parts.rotate(q), axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_head(tied):
    model = build(tied=tied)
    assert hasattr(model, "head") is not tied
    assert model(tokens()).shape == (4, 12, VOCABULARY)
    loss, grads = gradient(model, tokens())
    assert abs(float(loss) - np.log(VOCABULARY)) < 1.0
    assert all((abs(g) > 0).any() for g in jax.tree.leaves(grads))


def test_bfloat16_products_float32_parameters_and_logits():
    half, full = build(dtype="bfloat16"), build()
    assert {x.dtype for x in jax.tree.leaves(params_of(half))} == {jnp.dtype("float32")}
    assert half(tokens()).dtype == jnp.float32
    np.testing.assert_allclose(half(tokens()), full(tokens()), atol=0.1)


def test_dense_mode_is_the_dense_model():
    sparse, dense = build(s24.methods.FST()), build()
    assert abs(sparse(tokens()) - dense(tokens())).max() > 1e-3
    s24.nn.set_sparse(sparse, False)
    np.testing.assert_array_equal(sparse(tokens()), dense(tokens()))


def test_config_reaches_the_layers():
    model = build(s24.methods.FST(decay=3e-4), ffn="swiglu", f=24, layers=3)
    layers = s24.nn.sparse_layers(model)
    assert len(layers) == 9
    assert {layer.method for _, layer in layers} == {s24.methods.FST(decay=3e-4)}
    assert dataclasses.asdict(model.model)["f"] == 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({}, None),
        ({"scan": True, "kv_heads": 1, "head_dim": 6, "qk_norm": True}, None),
        ({"dtype": "bfloat16"}, None),
        ({}, s24.methods.Activation24()),
    ],
    ids=["unrolled", "scanned, shared keys", "bfloat16", "sparse activations"],
)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_text(fields, method):
    """Prompt at once, then token by token; the groups of a sparse activation lie within one token."""
    model, text = build(method, **fields), tokens()
    want = nnx.jit(lambda model, text: model(text))(model, text)
    logits, cache = decode(model, text[:, :5], model.empty_cache(text.shape[0], 12), 0)
    parts = [logits]
    for position in range(5, text.shape[1]):
        logits, cache = decode(model, text[:, position : position + 1], cache, position)
        parts.append(logits)
    near = 5e-2 if fields.get("dtype") else 1e-4
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, rtol=near, atol=near)


@pytest.mark.slow
def test_a_full_cache_forgets_the_oldest_tokens():
    """One layer: what leaves the window has no influence, what stays keeps its relative position."""
    model, text = build(layers=1), tokens()
    size = 4
    cache = model.empty_cache(text.shape[0], size)
    for position in range(text.shape[1]):
        logits, cache = decode(model, text[:, position : position + 1], cache, position)
    np.testing.assert_allclose(logits[:, -1], model(text[:, -size:])[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_projections_of_attention_by_a_method():
    """The same parameters; in sparse products, those of kernels cut along what they contract."""
    dense = build(s24.methods.STE(), layers=1, scan=True)
    model = build(s24.methods.STE(), layers=1, scan=True, attention_method="STE")
    jax.tree.map(np.testing.assert_array_equal, params_of(model), params_of(dense))
    cut = nnx.merge(*nnx.split(dense))
    for layer in (cut.blocks.attention.qkv, cut.blocks.attention.out):
        layer.kernel[...] = s24.prune24(layer.kernel[...], -2)
    run = nnx.jit(lambda model, words: model(words))
    np.testing.assert_allclose(run(model, tokens()), run(cut, tokens()), rtol=1e-4, atol=1e-5)


def test_a_method_of_attention():
    """The run's own with its options, or another with its defaults."""
    own = s24.methods.FST(refresh_every=7)
    for run, name, found in ((own, "FST", own), (s24.methods.Activation24(), "FST", s24.methods.FST())):
        layers = nnx.eval_shape(lambda run=run, name=name: build(run, attention_method=name)).blocks
        assert all(block.attention.qkv.method == block.attention.out.method == found for block in layers)
    plain = nnx.eval_shape(lambda: build(attention_method="FST"))
    assert type(plain.blocks[0].attention.qkv) is nnx.Linear  # a dense run has no sparse phase
    with pytest.raises(
        UserError, match=r"attention_method 'Venom' is no method .* those are AST, BiMask, FST"
    ):
        build(own, attention_method="Venom")
    with pytest.raises(UserError, match=r"attention_method STE is for projections of full rank"):
        decoder.Config(attention_method="STE", rank=4)
