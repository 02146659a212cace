"""2:4 activations against the formulas of 2503.16672, written in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.engine import fusions
from jax_sparse24.engine.stats import saved_bytes
from jax_sparse24.methods import Activation24, Dense
from jax_sparse24.ops import features
from tests.engine import oracle

T, d, f = 48, 16, 40
KEY = jax.random.key(7)


def operands(dtype, seed=0):
    x, w1, w2, dy = oracle.matrices(seed, dtype, (T, d), (d, f), (f, d), (T, d))
    return x, w1 / 4, w2 / 4, dy


def run(method, x, w1, w2, dy, implementation=None, **options):
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}

    @jax.jit
    def both(x, w1, w2, dy):
        def block(x, w1, w2):
            return s24.sparse_ffn(x, w1, w2, method, state, KEY, implementation=implementation, **options)

        y, vjp = jax.vjp(block, x, w1, w2)
        return y, *vjp(dy)

    return [np.asarray(v, np.float64) for v in both(x, w1, w2, dy)]


def strided(a):
    return a.reshape(4, T // 4, -1).swapaxes(0, 1).reshape(a.shape)


def token_product(a, b, ranked):
    """a' b with a cut to two of every four tokens, except in the features `ranked`."""
    cut = strided(a)
    kept = oracle.top2(cut, 0)
    kept[:, ranked] = cut[:, ranked]
    return kept.T @ strided(b)


def formulas(x, w1, w2, dy, share=0.05, keep=True):
    """Section 2.1: Y3, dX, dW1, dW2 in float64."""
    x, w1, w2, dy = (np.asarray(v, np.float64) for v in (x, w1, w2, dy))
    relu = np.maximum(x @ w1, 0)
    y2 = oracle.top2(relu**2, 1)
    dy1 = (dy @ w2.T) * 2 * relu
    if keep:
        dy1 = np.where(y2 != 0, dy1, 0)
    along_features = dy1 if keep else oracle.top2(dy1, 1)
    uncut = y2 if keep else relu**2
    ranked = np.argsort(-(uncut != 0).sum(0), kind="stable")[: int(np.ceil(share * f))]
    dw1 = token_product(dy1, x, ranked).T
    return [y2 @ w2, along_features @ w1.T, dw1, token_product(uncut, dy, ranked)]


@pytest.mark.parametrize("implementation", [None, "reference", "ffi"])
@pytest.mark.parametrize("options", [{}, {"dense_share": 0.3}, {"backward_mask": "redraw"}], ids=str)
def test_all_products_follow_the_paper(options, implementation):
    arrays = operands("float32")
    keep = options.get("backward_mask", "keep") == "keep"
    want = formulas(*arrays, options.get("dense_share", 0.05), keep)
    for got, expected in zip(run(Activation24(**options), *arrays, implementation), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "options", [{"dense_share": 0.3}, {"tokens": "consecutive", "soft_weights": True}], ids=str
)
def test_one_pass_over_the_gradient_gives_what_several_give(options, monkeypatch):
    arrays = operands("bfloat16")
    method, passes = Activation24(**options), []
    one_pass = fusions.Saved24.run
    monkeypatch.setattr(fusions.Saved24, "run", lambda *args: passes.append(args) or one_pass(*args))
    one = run(method, *arrays, "ffi")
    monkeypatch.setattr(fusions.Saved24, "matches", lambda *_: None)
    several = run(method, *arrays, "ffi")
    assert len(passes) == 1
    for got, want in zip(one, several, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("activation", ["squared_relu", "relu"])
def test_counts_from_the_forward_pass_choose_the_same_features(activation, monkeypatch):
    """As on CUDA, in one backward pass and in several."""
    arrays, method = operands("bfloat16"), Activation24(dense_share=0.3)
    want = run(method, *arrays, "ffi", activation=activation)
    counts = []
    monkeypatch.setattr(fusions.Counts, "matches", lambda *_: True)
    monkeypatch.setattr(features, "non_zeros", lambda x: counts.append(x))  # of no use to the backward pass
    for one_pass in (True, False):
        if not one_pass:
            monkeypatch.setattr(fusions.Saved24, "matches", lambda *_: None)
        for a, b in zip(run(method, *arrays, "ffi", activation=activation), want, strict=True):
            np.testing.assert_array_equal(a, b)
    assert not counts


@pytest.mark.parametrize("activation", ["squared_relu", "relu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_cut_means_the_dense_gradients(activation, dtype):
    """With at most two active features of four and every feature dense over tokens, the block is dense."""
    x, w1, w2, dy = operands(dtype)
    w1 = w1.at[:, 0::4].set(-w1[:, 1::4]).at[:, 2::4].set(-w1[:, 3::4])  # one of each pair is negative
    got = run(Activation24(dense_share=1.0), x, w1, w2, dy, activation=activation)
    want = run(Dense(), x, w1, w2, dy, activation=activation)
    near = 1e-5 if dtype == "float32" else 3e-2
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=near, atol=near * np.abs(b).max())


def test_mvue_along_tokens_estimates_the_uncut_products():
    x, w1, w2, dy = operands("float32")
    uncut = run(Activation24(token_cut=None), x, w1, w2, dy)
    method = Activation24(token_cut="mvue", dense_share=0)

    def draw(key):
        return jax.grad(lambda w1: jnp.vdot(s24.sparse_ffn(x, w1, w2, method, None, key), dy))(w1)

    draws = np.asarray(jax.vmap(draw)(jax.random.split(KEY, 400)), np.float64)
    error = np.abs(draws.mean(0) - uncut[2])
    assert (error <= 5 * draws.std(0) / np.sqrt(len(draws)) + 1e-4).all()


def test_the_backward_pass_holds_packed_activations():
    """Y1 (T, f) is not among the residuals; packed values and metadata, 17/32 of its float32 bytes, are."""
    x, w1, w2, _ = operands("float32")

    def saved(method):
        _, vjp = jax.vjp(lambda x: s24.sparse_ffn(x, w1, w2, method), x)
        return [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= T * f // 8]

    kept = {leaf.shape for leaf in saved(Activation24(token_cut="top2"))}
    assert (T, f // 2) in kept and (T, f // 8) in kept and (T, f) not in kept
    assert (T, f) in {leaf.shape for leaf in saved(Dense())}
    whole = saved_bytes(Dense(), (T, d, f), jnp.float32)
    assert whole == 4 * T * f
    assert saved_bytes(Activation24(), (T, d, f), jnp.float32) == whole * 17 // 32


def test_a_slope_that_does_not_follow_from_the_value_is_refused():
    with pytest.raises(ValueError, match="squared_relu, relu, not 'gelu'"):
        s24.sparse_ffn(*(jnp.ones(s) for s in ((8, 8), (8, 8), (8, 8))), Activation24(), activation="gelu")
    x, w1, w2, dy = operands("float32")
    run(Activation24(backward_mask="redraw"), x, w1, w2, dy, activation="gelu")


def test_soft_weights_are_the_same_values_in_all_four_products():
    """W1 in F1 and B3, W2 in F2 and B1: the input gradient is that of the forward pass."""
    x, w1, w2, dy = operands("float32")
    method = Activation24(soft_weights=True)
    soft1 = s24.soft24(w1, 0) * method.init(w1, "w1")["scale"]
    soft2 = s24.soft24(w2, 1) * method.init(w2, "w2")["scale"]
    for got, want in zip(run(method, x, w1, w2, dy), formulas(x, soft1, soft2, dy), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_the_causal_cut_loses_nothing_more_along_tokens():
    arrays = operands("float32")
    cut, uncut = (run(Activation24(forward="causal", token_cut=c), *arrays) for c in ("top2", None))
    for a, b in zip(cut, uncut, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_zero_and_nan_activations():
    x, w1, w2, dy = operands("float32")
    for value in run(Activation24(), x, jnp.zeros_like(w1), w2, dy):
        assert (value == 0).all()
    y, dx, *_ = run(Activation24(), x.at[5, 3].set(jnp.nan), w1, w2, dy)
    assert np.isnan(y[5]).all() and np.isfinite(np.delete(y, 5, 0)).all()
    assert np.isnan(dx[5]).any()


BAD = {
    "tokens": ({"tokens": "shuffled"}, "tokens='shuffled' is unknown; use one of 'consecutive'"),
    "share": ({"dense_share": 1.5}, r"dense_share=1.5 must lie in \[0, 1\]"),
    "gradient": ({"input_gradient": "token_cut", "token_cut": None}, "needs a token_cut"),
    "warm-up": ({"dense_warmup": -1}, "dense_warmup=-1 must be a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_fields(case):
    fields, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        Activation24(**fields)


def test_bad_shapes_and_places():
    x, w1, w2, _ = operands("float32")
    with pytest.raises(ValueError, match=r"operand y2 of product F2 of shape .* size 38 along axis -1"):
        s24.sparse_ffn(x, w1[:, :38], w2[:38], Activation24())
    with pytest.raises(ValueError, match="size 46 along axis -2"):
        jax.grad(lambda w1: s24.sparse_ffn(x[:46], w1, w2, Activation24()).sum())(w1)
    with pytest.raises(ValueError, match="nor for a block with a gate"):
        s24.nn.GatedFFN(8, 8, method=Activation24(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dense_warmup=1000 leaves no sparse step in a run of 900 steps"):
        Activation24().schedule(900)
    schedule = Activation24(dense_warmup=100).schedule(900)
    assert [(p.name, p.steps, p.sparse) for p in schedule.phases] == [
        ("dense_warmup", 100, False),
        ("sparse", 800, True),
    ]
