"""`sparsify` of models of Equinox, where it is installed: layers have the same arrays, and state beside
them."""

import io
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_sparse24 as s24
from tests import pages

eqx = pytest.importorskip("equinox")
d, f, T = 8, 16, 8
FST = s24.methods.FST(refresh_every=4, dense_fraction=0.25)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    odd: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 5)
        self.embed = eqx.nn.Embedding(12, d, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, d, key=keys[1])
        self.mlp = eqx.nn.MLP(d, d, f, 1, jax.nn.gelu, key=keys[2])
        self.odd = eqx.nn.Linear(d, 6, use_bias=False, key=keys[3])
        self.out = eqx.nn.Linear(d, 12, key=keys[4])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        x = x + self.attention(x, x, x)
        return jax.vmap(self.out)(x + jax.vmap(self.mlp)(x))


TOKENS = jnp.arange(2 * T).reshape(2, T) % 12
MODEL = Model()


def loss(model, tokens):
    logits = jax.nn.log_softmax(jax.vmap(model)(tokens))
    return -jnp.take_along_axis(logits, (tokens + 1)[..., None] % 12, -1).mean()


def test_a_layer_without_an_array_stays_dense(capsys):
    """The weight of one that shares it is another object, of which arrays' methods were asked."""
    first, second = (eqx.nn.Linear(d, d, key=jax.random.key(seed)) for seed in range(2))
    shared = eqx.nn.Shared((first, second), lambda pair: pair[1].weight, lambda pair: pair[0].weight)
    model = eqx.nn.Sequential([eqx.nn.Lambda(shared), first])
    s24.explain(model)
    assert "its weight is a SharedNode, and no array" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="stay dense.*its weight is a SharedNode, and no array"):
        sparse = s24.sparsify(model, FST)
    assert type(sparse.layers[1]) is not eqx.nn.Linear


@pytest.mark.slow
def test_layers_become_sparse_and_are_dense_again(capsys):
    with pytest.warns(UserWarning, match="1 of the layers .* stay dense. odd: .* size 6 along axis -1"):
        sparse = s24.sparsify(MODEL, FST)
    assert isinstance(sparse.mlp.layers[0], eqx.nn.Linear)
    assert sparse.mlp.layers[0].weight is MODEL.mlp.layers[0].weight
    s24.explain(sparse)
    told = capsys.readouterr().out
    assert "6 layers with FST(" in told and "mlp.layers.1: kernel (16, 8)" in told
    assert (
        "out: kernel (8, 12): it is left alone as a head" in told and "odd: kernel (8, 6): the kernel" in told
    )
    assert s24.verify(sparse).ok
    assert eqx.tree_equal(s24.densify(sparse), MODEL, typematch=True)

    kept = s24.nn.masks(sparse)
    masked = jax.tree.map(
        lambda w, kept: jnp.where(kept, w, 0), eqx.filter(MODEL, eqx.is_array), kept_like(kept)
    )
    want = jax.jit(jax.vmap(eqx.combine(masked, eqx.filter(MODEL, eqx.is_array, inverse=True))))(TOKENS)
    np.testing.assert_allclose(eqx.filter_jit(jax.vmap(sparse))(TOKENS), want, atol=1e-5)
    dense = s24.nn.set_sparse(sparse, False)
    np.testing.assert_array_equal(dense.mlp(jnp.ones(d)), MODEL.mlp(jnp.ones(d)))


def kept_like(masks):
    """Masks of a sparsified model as a tree like the model."""
    return jax.tree.unflatten(jax.tree.structure(eqx.filter(MODEL, eqx.is_array)), jax.tree.leaves(masks))


def test_the_code_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (code,) = [code.text for code in pages.blocks(page) if code.title == "needs Equinox"]
    fst = s24.methods.FST(refresh_every=4)
    scope = {
        "jax": jax,
        "jnp": jnp,
        "s24": s24,
        "fst": fst,
        "x": jax.random.normal(jax.random.key(1), (16, 16)),
    }
    exec(code, scope)
    mlp, trained = scope["mlp"], scope["trained_mlp"]
    assert jax.tree.structure(trained) == jax.tree.structure(mlp)
    assert (trained.layers[0].weight != mlp.layers[0].weight).any()
    assert "2 layers with FST(" in capsys.readouterr().out


@pytest.mark.slow
def test_it_trains_in_the_loop():
    """In micro-batches, with a check after every step."""
    sparse = s24.sparsify(MODEL, FST, where="mlp|attention")
    loop = s24.Loop(sparse, loss, s24.optim.for_method(FST, 1e-2, 16), 16, accumulate=2, debug=True)
    state, losses = loop.init(), []
    for step in range(16):
        state, metrics = loop.advance(state, TOKENS, step)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]
    trained = s24.densify(loop.model(state))
    assert jax.tree.structure(trained) == jax.tree.structure(MODEL)
    np.testing.assert_allclose(loss(trained, TOKENS), loop.evaluate(state, [TOKENS])["dense"], rtol=1e-5)


@pytest.mark.parametrize(
    "method", [s24.methods.FST(refresh_every=2, mvue=None), s24.methods.SSTE(scale="dynamic", mvue=None)]
)
def test_an_optimiser_of_its_own_takes_masks(method):
    """Masks fit what `eqx.filter_grad` returns; the loop is that of `s24.Loop`."""
    sparse = s24.sparsify(MODEL.mlp, method)
    tx, x = s24.optim.for_method(method, 1e-2, 4), jax.random.normal(jax.random.key(1), (T, d))
    loss = lambda model, x: jnp.mean((jax.vmap(model)(x) - 1) ** 2)  # noqa: E731

    @eqx.filter_jit
    def step(model, state, number):
        model = s24.refresh(model, number)
        params, grads = eqx.filter(model, eqx.is_inexact_array), eqx.filter_grad(loss)(model, x)
        updates, state = tx.update(grads, state, params, masks=s24.nn.masks(model))
        return eqx.apply_updates(model, updates), state

    loop = s24.Loop(sparse, loss, tx, s24.Schedule((s24.Phase("sparse", 4, sparse=True),)))
    model, state, of_loop = sparse, tx.init(eqx.filter(sparse, eqx.is_inexact_array)), loop.init()
    for number in range(4):
        model, state = step(model, state, jnp.int32(number))
        of_loop, _ = loop.advance(of_loop, x, number)
    models = model, s24.nn.set_sparse(loop.model(of_loop, sparse=False), True)
    own, theirs = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in models)
    for a, b in zip(own, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [s24.methods.STE(), s24.methods.SSTE()], ids=["STE", "SSTE"])
def test_weights_that_are_sparse_to_the_end_are_written_into_the_arrays(method):
    x = jax.random.normal(jax.random.key(1), (T, d))
    loop = s24.Loop(
        s24.sparsify(MODEL.mlp, method),
        lambda model, x: jnp.mean((jax.vmap(model)(x) - 1) ** 2),
        s24.optim.for_method(method, 1e-2, 4),
        4,
    )
    state = loop.init()
    for step in range(4):
        state, _ = loop.advance(state, x, step)
    trained = loop.model(state)
    with pytest.warns(
        UserWarning, match=r"2 layers of S\w*TE multiply sparse weights.*merge_adapters\(model\)"
    ):
        wrong = s24.densify(trained)
    merged = s24.nn.merge_adapters(trained)
    assert jax.tree.structure(trained) != jax.tree.structure(merged), "the other is in sparse mode"
    with warnings.catch_warnings(action="error"):
        plain = s24.densify(merged)
    assert jax.tree.structure(plain) == jax.tree.structure(MODEL.mlp)
    want, got, other = (np.asarray(jax.vmap(model)(x)) for model in (trained, plain, wrong))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.abs(other - want).max() > 0.1
    assert all((np.asarray(layer.weight) == 0).mean() >= 0.5 for layer in plain.layers)


def test_a_loop_of_its_own_refreshes_a_copy():
    """Noise is new with a step, and where the weights move without one; masks go by the method's period."""
    method = s24.methods.FST(refresh_every=2)
    model = s24.sparsify(MODEL.mlp, method)
    x, tree = jax.random.normal(jax.random.key(1), (T, d)), jax.tree.structure(model)

    @eqx.filter_jit
    def gradient(model):
        return eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(x) ** 3))(model).layers[0].weight

    told = s24.refresh(model, 0)
    moved = eqx.tree_at(lambda m: m.layers[0].weight, told, -told.layers[0].weight[::-1])
    assert jax.tree.structure(told) == tree
    assert (gradient(told) != gradient(s24.refresh(told, 1))).any()
    np.testing.assert_array_equal(gradient(told), gradient(s24.refresh(model, 0)))
    masks = [s24.nn.masks(m).layers[0].weight for m in (moved, s24.refresh(moved, 1), s24.refresh(moved, 2))]
    assert (masks[0] == masks[1]).all() and (masks[2] != masks[1]).any()


@pytest.mark.parametrize("stacked", [False, True])
def test_an_optimiser_of_its_own_gets_parameters_alone(stacked):
    """Filters of Equinox take arrays of floats for parameters, and weight decay would shrink a scale, which
    has no gradient."""
    make = lambda key: eqx.nn.Linear(d, f, key=key)  # noqa: E731
    key = jax.random.key(0)
    plain = eqx.filter_vmap(make)(jax.random.split(key, 3)) if stacked else make(key)
    model = s24.sparsify(plain, s24.methods.SSTE(mvue=None))
    tx, x = optax.adamw(0.1, weight_decay=0.5), jax.random.normal(jax.random.key(1), (T, d))

    def loss(model):
        run = lambda layer: jax.vmap(layer)(x)  # noqa: E731
        return jnp.mean(((eqx.filter_vmap(run) if stacked else run)(model) - 1) ** 2)

    @eqx.filter_jit
    def step(model, state):
        updates, state = tx.update(
            eqx.filter_grad(loss)(model), state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), state

    after, _ = step(model, tx.init(eqx.filter(model, eqx.is_inexact_array)))
    assert (after.weight != model.weight).any()
    before, scale = (m.product.method_state()["scale"] for m in (model, after))
    np.testing.assert_array_equal(before, scale)
    assert scale.dtype == jnp.float32 and scale.shape == plain.weight.shape[:-2] and (scale > 1).all()
    assert eqx.tree_equal(after.own, model.own)
    parameters = jax.tree.leaves(eqx.filter(after, eqx.is_inexact_array))
    assert [p.shape for p in parameters] == [plain.weight.shape, plain.bias.shape]
    eqx.tree_serialise_leaves(file := io.BytesIO(), after)
    file.seek(0)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, model), after)


def test_a_stack_of_layers_has_masks_of_its_own():
    keys = jax.random.split(jax.random.key(0), 3)
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(d, d, key=key))(keys)
    sparse = s24.sparsify(stack, FST)
    x = jax.random.normal(jax.random.key(1), (T, d))

    @eqx.filter_jit
    def run(stack, x):
        arrays, rest = eqx.partition(stack, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (jax.vmap(eqx.combine(layer, rest))(x), None), x, arrays)[0]

    cut = eqx.tree_at(lambda s: s.weight, stack, jnp.where(s24.nn.masks(sparse).weight, stack.weight, 0))
    np.testing.assert_allclose(run(sparse, x), run(cut, x), rtol=1e-4, atol=1e-5)


def test_wrong_arguments_are_named():
    for text, call in (
        (
            r"where='mpl' matches no linear layer; the nearest path is 'mlp/layers/\d'",
            lambda: s24.sparsify(MODEL, FST, "mpl"),
        ),
        ("blocks, which are only found in NNX", lambda: s24.sparsify(MODEL, s24.methods.Activation24())),
        ("trains low-rank adapters", lambda: s24.sparsify(MODEL, s24.methods.SLoPe(rank=2))),
        (
            r'earlier steps have seen, which no layer of Equinox observes; use s24.nn, or fp8="tensor"',
            lambda: s24.sparsify(MODEL, s24.methods.FST(fp8="delayed")),
        ),
        ("is sparse already, with FST", lambda: s24.sparsify(s24.sparsify(MODEL, FST, "mlp"), FST, "mlp")),
        ("holds no layer that s24.sparsify made", lambda: s24.densify(MODEL)),
        ("0 sparse layers", lambda: s24.refresh(MODEL, 0)),
        (
            "it takes or gives a scalar",
            lambda: s24.sparsify(eqx.nn.Linear("scalar", d, key=jax.random.key(0)), FST),
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_bits_that_were_changed_as_numbers_are_refused():
    """A mean of models would make another scale of them."""
    from jax_sparse24.nn import equinox

    mean = jax.tree.map(lambda x: 0.5 * x + 0.5 * x, equinox.Bits(jnp.float32(0.7)))
    with pytest.raises(TypeError, match=r"must be uint32, the bits of float32\. Change the parameters alone"):
        mean.floats  # noqa: B018


def test_what_a_layer_keeps_is_checked_where_others_wrote_it():
    """Shapes and dtypes by every call; masks that are not 2:4 by `s24.verify`, because a call would count a
    whole weight."""
    x = jnp.ones((T, d))
    plain = MODEL.mlp.layers[0]
    masked, scaled = s24.sparsify(plain, FST), s24.sparsify(plain, s24.methods.SSTE(mvue=None))
    mask, scale = (lambda layer: layer.own["state"]["mask"]), (lambda layer: layer.own["state"]["scale"])

    def written(layer, at, value):
        return eqx.tree_at(at, layer, value)

    for error, match, changed in (
        (ValueError, r"state\['mask'\] is bool \(16, 8\), .* needs", written(masked, mask, mask(masked).T)),
        (TypeError, r"float32, an array of floats, .*", written(scaled, scale, jnp.float32(1.5))),
        (TypeError, r"float32, an array of floats, .*", written(masked, mask, 1.0 * mask(masked))),
        (
            ValueError,
            r"state\['scale'\] of this layer is float32 \(3,\), .* needs",
            written(scaled, lambda layer: scale(layer).bits, jnp.ones(3, jnp.uint32)),
        ),
    ):
        for run in (jax.vmap(changed), eqx.filter_jit(jax.vmap(changed))):
            with pytest.raises(error, match=match):
                run(x)
    for value in (True, False):
        report = s24.verify(written(masked, mask, jnp.full((d, f), value)), raises=False)
        assert "something else wrote it" in str(report)
