"""`s24.Function`: functions of any pytree train with methods that keep masks and draw noise."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24

d, f, T = 8, 16, 8
FST = s24.methods.FST(refresh_every=3, dense_fraction=0.25, decay=1e-2)
PARAMS = {
    "head": jax.random.normal(jax.random.key(0), (d, 4)),
    "qkv": jax.random.normal(jax.random.key(1), (2, 2, d, 4)) / 3,
    "mlp": {
        "up": jax.random.normal(jax.random.key(2), (2, d, f)) / 3,
        "down": jax.random.normal(jax.random.key(3), (2, d, f)) / 3,
    },
    "twice": jax.random.normal(jax.random.key(4), (d, d)) / 3,
    "scale": jnp.ones(d),
    "activation": jax.nn.relu,
    "count": jnp.int32(1),
}
X = jax.random.normal(jax.random.key(5), (2, T, d))


def apply(params, x):
    """Slices of a parameter, weights on the left, scan, remat, vmap, and one parameter in two products."""
    q, k = (jnp.einsum("btd,ndh->btnh", x, params["qkv"][i]) for i in range(2))
    x = x + (q * k).reshape(x.shape)

    @jax.checkpoint
    def block(x, up, down):
        token = lambda x: down @ params["activation"](up.T @ x)  # noqa: E731
        return jax.vmap(jax.vmap(token))(x)

    def body(x, layer):
        return x + jax.jit(block)(x, *layer), None

    x, _ = jax.lax.scan(body, x, (params["mlp"]["up"], params["mlp"]["down"]))
    return (x @ params["twice"] @ params["twice"] * params["scale"] * params["count"]) @ params["head"]


@functools.cache
def view(method=FST):
    return s24.Function(apply, PARAMS, method, (jax.ShapeDtypeStruct(X.shape, X.dtype),))


def masked(mask24):
    """The parameters as sparse products take them, and the masks."""
    qkv = jnp.stack([mask24(m.transpose(1, 0, 2).reshape(d, -1)) for m in PARAMS["qkv"]])
    masks = {name: jnp.ones((), bool) for name in ("head", "scale")}
    masks |= {"activation": None, "count": None, "qkv": qkv.reshape(2, d, 2, 4).swapaxes(1, 2)}
    masks["mlp"] = {"up": mask24(PARAMS["mlp"]["up"])}
    masks["mlp"]["down"] = mask24(PARAMS["mlp"]["down"].swapaxes(1, 2)).swapaxes(1, 2)
    masks["twice"] = mask24(PARAMS["twice"])
    others = {"activation": PARAMS["activation"], "count": PARAMS["count"]}
    arrays = {**PARAMS, "activation": None, "count": None}
    cut = jax.tree.map(lambda w, mask: jnp.where(mask, w, 0), arrays, masks)
    return {**cut, **others}, masks


@pytest.mark.slow
def test_masks_are_those_of_what_is_multiplied():
    @jax.jit
    def found():
        params, own = view().split()
        cut, masks = masked(s24.transposable_mask24)
        got = view().masks(params, own, True), view().model(params, own, True)(X)
        return own, got, (masks, apply(cut, X))

    own, got, want = found()
    assert own.keys() == {"qkv", "qkv (2)", "mlp/up", "mlp/down", "twice", "twice (2)"}
    jax.tree.map(np.testing.assert_array_equal, got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=2e-4, atol=1e-5)
    assert view().masks(view().params, own, False) == {}
    dense = view().model(view().params, own, False)
    np.testing.assert_array_equal(dense(X), apply(PARAMS, X))
    assert dense.params["activation"] is jax.nn.relu


def stacked(params, x):
    return jax.lax.scan(lambda y, w: (y + jnp.square(x) @ w, None), 0 * x, params["w"])[0]


STACK = {"w": jnp.stack([PARAMS["twice"]] * 2)}


@pytest.mark.slow
def test_noise_is_that_of_the_product_the_layer_and_the_step():
    """The gradient of a weight is an estimate from a draw: two stacked layers with equal weights, inputs and
    output gradients differ in nothing else."""
    fst = s24.Function(stacked, STACK, FST, (X[0],))
    _, own = fst.split()
    target = jax.random.normal(jax.random.key(9), (T, d))

    @jax.jit
    def grads(own):
        return jax.grad(lambda p: jnp.vdot(fst.model(p, own, True)(X[0]), target))(STACK)["w"]

    at = [grads(fst.refresh(STACK, own, step, sparse=True, due=False)) for step in (0, 0, 1)]
    np.testing.assert_array_equal(at[0], at[1])
    assert not jnp.allclose(at[0], at[2]) and not jnp.allclose(at[0][0], at[0][1])
    here = jax.tree.map(lambda x: x[1], fst.folded(own)["w"])

    def ours(w):
        key = jax.random.wrap_key_data(here["key"])
        return jnp.vdot(s24.sparse_dot(jnp.square(X[0]), w, FST, here["state"]["w"], key), target)

    np.testing.assert_allclose(at[0][1], jax.grad(ours)(PARAMS["twice"]), rtol=1e-5)


@pytest.mark.slow
def test_a_loop_trains_and_gives_the_dense_model_back():
    function = s24.Function(stacked, STACK, FST, (X[0],))
    tx = s24.optim.for_method(FST, 3e-2, 8)
    loop = s24.Loop(function, lambda model, x: jnp.mean((model(x) - 1) ** 2), tx, 8, debug=True)
    state, losses, masks = loop.init(), [], []
    for step in range(8):
        state, metrics = loop.advance(state, X[0], step)
        losses.append(float(metrics["loss"]))
        masks.append(np.asarray(state["sparse"]["w"]["state"]["w"]["mask"]))
    assert losses[-1] < 0.7 * losses[0], losses
    flips = [step for step, (a, b) in enumerate(itertools.pairwise(masks)) if (a != b).any()]
    assert flips and set(flips) <= {2, 5}, "masks are computed anew every three steps"
    model = loop.model(state)
    np.testing.assert_array_equal(model(X[0]), stacked(model.params, X[0]))
    np.testing.assert_array_equal(loop.model(loop.init())(X[0]), stacked(STACK, X[0]))


@pytest.mark.slow
def test_a_method_without_stored_masks_and_one_with_a_number_per_matrix():
    params, own = view(s24.methods.SRSTE()).split()
    masks = view(s24.methods.SRSTE()).masks(params, own, True)
    want = masked(lambda w: s24.mask24(w, -2))[1]
    jax.tree.map(np.testing.assert_array_equal, masks, want)
    scaled = s24.Function(stacked, STACK, s24.methods.SSTE(), (X[0],))
    shapes = jax.eval_shape(scaled.split)[1]
    assert shapes["w"]["state"]["w"]["scale"].shape == (2,)
    assert jax.eval_shape(lambda own: scaled.model(STACK, own, True)(X[0]), shapes).shape == (T, d)


def test_a_weight_that_one_of_three_products_keeps_is_kept():
    def thrice(params, x):
        return (x @ params["w"] @ params["w"]) @ params["w"].T

    params = {"w": jax.random.normal(jax.random.key(6), (d, d))}
    found = s24.Function(thrice, params, s24.methods.SRSTE(), (jnp.ones((T, d)),))
    masks = found.masks(*found.split(), True)
    either = s24.mask24(params["w"], 0) | s24.mask24(params["w"], 1)
    np.testing.assert_array_equal(masks["w"], either)


def test_what_is_explained_and_refused():
    lines = dict(line.split(": ", 1) for line in view().explain().splitlines())
    assert lines["head"] == "(8, 4), dense: it is left alone" and "sparse by FST(" in lines["qkv"]
    assert "twice: (8, 8), dense: the method is Dense()" in view(s24.methods.Dense()).explain()
    slope, activation, few = s24.methods.SLoPe(), s24.methods.Activation24(), {"twice": PARAMS["twice"]}

    def branches(params, x):
        return jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x @ w.T, params["twice"])

    def changes(params, x):
        return x @ params["twice"] if len(x) == T else x @ params["twice"] @ params["twice"]

    changing = s24.Function(changes, few, FST, (X[0],))
    own = changing.split()[1]

    def gradient(tokens):
        return jax.grad(lambda params: changing.model(params, own, True)(jnp.ones((tokens, d))).sum())(few)

    for error, text, call in (
        (TypeError, "example must be a tuple", lambda: s24.Function(apply, PARAMS, FST, X)),
        (ValueError, "trains low-rank", lambda: s24.Function(apply, PARAMS, slope, (X,))),
        (ValueError, "Function: Activation24 makes", lambda: s24.Function(apply, PARAMS, activation, (X,))),
        (ValueError, "nearest path is 'twice'", lambda: s24.Function(apply, PARAMS, FST, (X,), "twise")),
        (ValueError, "used within cond", lambda: s24.Function(branches, few, FST, (X[0],))),
        (ValueError, r"by twice \(2\), but did not", lambda: changing.model(few, own, True)(X[0, :4])),
        (ValueError, "twice: .*multiple of 4", lambda: gradient(6)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
