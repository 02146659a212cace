"""`intercept`: products with parameters become sparse in functions that know nothing of this package."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jax_sparse24 as s24

STE = s24.methods.STE()
d, f, T = 8, 16, 4
PARAMS = {
    "embedding": jax.random.normal(jax.random.key(0), (12, d)),
    "attn": {"qkv": jax.random.normal(jax.random.key(1), (3, 2, d, 4)), "out": jnp.ones((2, 4, d)) / 3},
    "mlp": {
        "up": jax.random.normal(jax.random.key(2), (2, d, f)),
        "down": jax.random.normal(jax.random.key(3), (2, d, f)),
    },
    "last": {"a": jax.random.normal(jax.random.key(4), (d, f)), "b": jnp.arange(f * d).reshape(f, d) / f},
}
TOKENS = jnp.arange(2 * T).reshape(2, T)


def model(params, tokens, scale=1.0, *, name="a string"):
    """Einsums with several axes, weights on the left, casts, slices, scan, remat, cond and vmap."""
    x = params["embedding"][tokens]
    q, k, v = (jnp.einsum("btd,ndh->btnh", x, params["attn"]["qkv"][i]) for i in range(3))
    scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    mixed = jnp.einsum("bnts,bsnh->btnh", scores, v)
    x = x + jnp.einsum("...nh,nhd->...d", mixed, params["attn"]["out"])

    @jax.checkpoint
    def block(x, up, down):
        token = lambda x: down.astype(jnp.float32) @ jnp.square(jax.nn.relu(up.T @ x))  # noqa: E731
        return jax.vmap(jax.vmap(token))(x)

    def body(x, layer):
        return x + jax.jit(block)(x, *layer), x.mean()

    x, means = jax.lax.scan(body, x, (params["mlp"]["up"], params["mlp"]["down"]))
    x = jax.lax.cond(scale > 0, lambda x, w: x @ w, lambda x, w: -x @ w, x, params["last"]["a"])
    return {"logits": x @ params["last"]["b"] @ params["embedding"].T, "means": means, "none": None}


def masked(params):
    """The parameters as the products take them, along the axes that they contract."""
    top = s24.prune24
    qkv, out = params["attn"]["qkv"], params["attn"]["out"]
    return {
        "embedding": params["embedding"],
        "attn": {"qkv": top(qkv, -2), "out": top(out.reshape(d, d), 0).reshape(out.shape)},
        "mlp": {"up": top(params["mlp"]["up"], -2), "down": top(params["mlp"]["down"], -1)},
        "last": {name: top(w, 0) for name, w in params["last"].items()},
    }


def test_a_function_computes_with_sparse_parameters():
    sparse = s24.intercept(model, STE)
    got = jax.jit(sparse, static_argnames="name")(PARAMS, TOKENS, name="another")
    want = model(masked(PARAMS), TOKENS)
    assert got.keys() == want.keys() and got["none"] is None
    for name in ("logits", "means"):
        np.testing.assert_allclose(got[name], want[name], rtol=2e-4)
    assert not np.allclose(got["logits"], model(PARAMS, TOKENS)["logits"], rtol=0.1)


def test_groups_lie_along_what_each_product_contracts():
    def two(params, x):
        return x @ params["w"], params["w"] @ x.T

    w, x = PARAMS["mlp"]["up"][0], jax.random.normal(jax.random.key(5), (T, d))
    square = w[:, :d]
    got = s24.intercept(two, STE)({"w": square}, x)
    np.testing.assert_allclose(got[0], x @ s24.prune24(square, 0), rtol=1e-5)
    np.testing.assert_allclose(got[1], s24.prune24(square, 1) @ x.T, rtol=1e-5)


def test_gradients_are_those_of_the_method():
    def loss(params, x):
        return jnp.sum(jnp.einsum("td,dnh->nth", x, params["w"]) ** 2)

    x = jax.random.normal(jax.random.key(5), (T, d))
    w = jax.random.normal(jax.random.key(6), (d, 2, 4))
    got = jax.grad(s24.intercept(loss, STE), (0, 1))({"w": w}, x)

    def ours(w, x):
        return jnp.sum(s24.sparse_dot(x, w.reshape(d, -1), STE) ** 2)

    dw, dx = jax.grad(ours, (0, 1))(w, x)
    np.testing.assert_allclose(got[0]["w"], dw, rtol=1e-5)
    np.testing.assert_allclose(got[1], dx, rtol=1e-5)


def test_a_linen_model_is_taken_by_its_paths():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(d, name="head")(linen.relu(linen.Dense(f, name="up")(x)))

    x = jax.random.normal(jax.random.key(5), (T, d))
    variables = Net().init(jax.random.key(0), x)
    kernel = variables["params"]["up"]["kernel"]
    variables["params"]["up"]["kernel"] = s24.prune24(kernel, 0)
    want = Net().apply(variables, x)
    variables["params"]["up"]["kernel"] = kernel
    for where in (None, ".*/up/kernel"):
        np.testing.assert_allclose(s24.intercept(Net().apply, STE, where)(variables, x), want, rtol=1e-5)


def test_several_arrays_that_pass_through_one_operation_keep_their_own_paths():
    def both(params, x):
        x, a, b = jax.lax.optimization_barrier((x, params["a"], params["b"]))
        return x @ a @ b

    params = {"a": jnp.ones((d, f)), "b": jnp.ones((f, d))}
    lines = s24.intercept(both, STE).explain(params, jnp.ones((T, d)))
    assert lines.count("sparse by") == 2, lines


def test_what_stays_dense_is_told():
    def product(params, x):
        batched = jnp.einsum("bi,bio->bo", x, params["batch"])
        return x @ params["odd"] @ params["good"] + batched, params["two"] @ params["two"]

    params = {
        "odd": jnp.ones((6, d)),
        "good": jnp.ones((d, 6)),
        "batch": jnp.ones((T, 6, 6)),
        "two": jnp.ones((4, 4)),
    }
    assert s24.intercept(product, STE, "god|odd|good").explain(params, jnp.ones((T, 6))).splitlines() == [
        "batch: (4, 6, 6), dense: it is left alone",
        "good: (8, 6), sparse by STE()",
        "odd: (6, 8), dense: the parameter of shape (6, 8) has size 6 along axis -2, which is not a "
        "multiple of 4. Groups never wrap or pad: use 4 or 8",
        "two: (4, 4), dense: it is left alone",
    ]
    with pytest.warns(UserWarning, match="intercept: 2 products stay dense") as found:
        s24.intercept(product, STE)(params, jnp.ones((T, 6)))
    told = str(found[0].message)
    assert "odd: the parameter of shape (6, 8) has size 6 along axis -2" in told
    assert "batch: an axis of a batch makes several products of it" in told
    with pytest.raises(ValueError, match=r"no product of a parameter that matches can be sparse\. odd: "):
        s24.intercept(product, STE, "odd")(params, jnp.ones((T, 6)))
    with pytest.raises(ValueError, match="where='god' matches; the nearest path is 'good'"):
        s24.intercept(product, STE, "god")(params, jnp.ones((T, 6)))
    with pytest.raises(ValueError, match="no product of the function multiplies by 'two'"):
        s24.intercept(product, STE, "two")(params, jnp.ones((T, 6)))


def test_a_product_with_a_wider_result_stays_dense():
    """A result in float32 of bfloat16 operands was rounded to bfloat16 first, and nothing told of it."""

    def product(params, x, dtype):
        return jnp.dot(x, params["w"], preferred_element_type=dtype)

    x, params = (jax.tree.map(jnp.bfloat16, tree) for tree in (jnp.ones((T, d)), {"w": jnp.ones((d, f))}))
    sparse = s24.intercept(product, STE)
    assert sparse(params, x, jnp.bfloat16)[0, 0] == d // 2
    with pytest.raises(ValueError, match=r"w: preferred_element_type=float32 .* products of bfloat16 do not"):
        sparse(params, x, jnp.float32)


def test_a_parameter_that_an_inner_function_returns_is_followed_or_told():
    """Through an inner `jit` it stays the parameter; what other transformations return is an array, and the
    products with it that stay dense are told."""

    def through(transform):
        return lambda params, x: x @ transform(lambda w: w.astype(jnp.bfloat16))(params["w"])

    x, params = TOKENS[0, :, None] * jnp.ones(d), {"w": PARAMS["mlp"]["up"][0]}
    sparse = s24.intercept(through(jax.jit), STE, ".*")
    want = x @ s24.prune24(params["w"].astype(jnp.bfloat16), 0)
    np.testing.assert_allclose(sparse(params, x), want, rtol=1e-2)
    for transform, name in (
        (jax.checkpoint, "checkpoint"),
        (lambda cast: lambda w: jax.lax.cond(x.sum() > 0, cast, lambda w: cast(-w), w), "cond"),
        (lambda cast: lambda w: jax.lax.map(cast, w.reshape(1, d, f))[0], "scan"),
    ):
        with pytest.raises(ValueError, match=f"w: it passes through {name}, behind which it is not followed"):
            s24.intercept(through(transform), STE, ".*")(params, x)


def test_wrong_arguments_are_named():
    for error, text, call in (
        (TypeError, r"needs a function of \(params, ...\), got int", lambda: s24.intercept(3, STE)),
        (TypeError, "must be one of s24.methods", lambda: s24.intercept(model, "STE")),
        (ValueError, "FST keeps masks or draws noise", lambda: s24.intercept(model, s24.methods.FST())),
        (
            ValueError,
            "Activation24 makes no product",
            lambda: s24.intercept(model, s24.methods.Activation24()),
        ),
        (ValueError, "'fast' is unknown", lambda: s24.intercept(model, STE, implementation="fast")),
        (ValueError, r"where='\(' is no regular expression", lambda: s24.intercept(model, STE, "(")),
        (TypeError, "where must be a string", lambda: s24.intercept(model, STE, 3)),
    ):
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("split", [jnp.split, lambda w, n, axis: [w[:, : f // 2], w[:, f // 2 :]]])
def test_parts_of_a_parameter_are_followed(split):
    """Products with what `jnp.split` makes of one stayed dense."""
    x, w = jnp.arange(T * d).reshape(T, d) / 7, PARAMS["last"]["a"]
    apply = lambda w, x: sum(x @ part for part in split(w["a"], 2, axis=1))  # noqa: E731
    got = s24.intercept(apply, STE)({"a": w}, x)
    np.testing.assert_allclose(got, apply({"a": s24.prune24(w, 0)}, x), rtol=1e-5, atol=1e-5)
    view = s24.Function(apply, {"a": w}, s24.methods.FST(), (x,))
    assert "sparse by FST" in view.explain()
