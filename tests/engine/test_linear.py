"""The linear engine against float64 products, exact autodiff and hand-made operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from tests.conftest import FLOATS, IMPLEMENTATIONS
from tests.engine import oracle
from tests.engine.spy import Log, Spied

T, d, f = 12, 16, 24
METHODS = {
    "Dense": s24.methods.Dense(),
    "STE": s24.methods.STE(),
    "FST exact": s24.methods.FST(mvue="exact"),
    "FST approximate": s24.methods.FST(mvue="approximate"),
    "FST None": s24.methods.FST(mvue=None),
}
WGRAD = 2  # place of the product in the table: what its key is folded with
KEY = jax.random.key(7)

# The sequential estimator takes long to compile in jnp; its bits are compared where operations are tested.
CASES = [
    (m, dt, i)
    for m in METHODS
    for dt in FLOATS
    for i in IMPLEMENTATIONS
    if not (m == "FST approximate" and i == "reference" and dt != "float32")
]


def cuts(name, state, dy, key=KEY):
    """The sparse operands of a method; the noise is drawn again, from the key as documented."""
    if name == "Dense":
        return {}
    if name == "STE":
        return {("fwd", "w"): oracle.along(0), ("dgrad", "w"): oracle.along(0)}
    table = {("fwd", "w"): oracle.masked(state["mask"]), ("dgrad", "w"): oracle.masked(state["mask"])}
    if name != "FST None":
        noise = s24.mvue24(jax.random.fold_in(key, WGRAD), dy, 0, name == "FST exact")
        table["wgrad", "dy"] = oracle.drawn(noise)
    return table


@pytest.mark.parametrize(("name", "dtype", "implementation"), CASES, indirect=["implementation"])
def test_gradients_are_the_masked_dense_products(name, dtype, implementation):
    method, log = METHODS[name], Log()
    x, w, dy = oracle.matrices(1, dtype, (T, d), (d, f), (T, f))
    state = method.init(w)

    def run(x, w):
        return s24.sparse_dot(x, w, Spied(method, log), state, KEY, implementation=implementation)

    y, vjp = jax.vjp(run, x, w)
    dx, dw = vjp(dy)
    want = oracle.linear(x, w, dy, cuts(name, state, dy))
    for what, got in {"y": y, "dx": dx, "dw": dw}.items():
        assert got.dtype == dtype
        oracle.assert_close(got, want[what], dtype, K=max(T, d, f), roundings=1, name=what)
    # Only the operands of the table were touched, along the contracted axis, and none before its time.
    rows = dict(method.linear_plan().rows)
    assert set(log) == set(rows)
    for product, (operand, axis, key) in log.items():
        assert axis == {"fwd": -2, "dgrad": -1, "wgrad": -2}[product]
        np.testing.assert_array_equal(operand, {"w": w, "dy": dy}[rows[product].operand])
        if product == "wgrad":
            np.testing.assert_array_equal(
                jax.random.key_data(key), jax.random.key_data(jax.random.fold_in(KEY, 2))
            )


@pytest.mark.parametrize("name", ["Dense", "STE", "FST None"])
def test_without_noise_it_is_autodiff_with_a_straight_through_weight(name, dtype, implementation):
    """Whole numbers make every sum exact, so equality is to the bit."""
    method = METHODS[name]
    x, w, dy = oracle.integers(2, dtype, (T, d), (d, f), (T, f))
    state = method.init(w)
    used = {
        "Dense": lambda: oracle.wide(w),
        "STE": lambda: oracle.top2(oracle.wide(w), 0),
        "FST None": lambda: np.where(state["mask"], oracle.wide(w), 0),
    }[name]()

    def surrogate(x, w):
        straight_through = w.astype(jnp.float32) + jax.lax.stop_gradient(used - w.astype(jnp.float32))
        y = x.astype(jnp.float32) @ straight_through
        return jnp.sum(y * dy.astype(jnp.float32)), y

    (_, y), (dx, dw) = jax.value_and_grad(surrogate, (0, 1), has_aux=True)(x, w)

    @jax.jit
    def run(x, w):
        y, vjp = jax.vjp(
            lambda x, w: s24.sparse_dot(x, w, method, state, KEY, implementation=implementation), x, w
        )
        return y, *vjp(dy)

    for got, want in zip(run(x, w), (y.astype(dtype), dx, dw), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mvue", ["exact", "approximate"])
def test_the_weight_gradient_is_the_drawn_cotangent(mvue, dtype):
    """With the identity as x, dW is the draw itself, to the bit; jit makes no difference."""
    method = s24.methods.FST(mvue=mvue)
    (w, dy) = oracle.matrices(3, dtype, (f, f), (f, f))
    x = jnp.eye(f, dtype=dtype)
    state = method.init(w)

    @jax.jit
    def weight_gradient(key):
        return jax.vjp(lambda w: s24.sparse_dot(x, w, method, state, key), w)[1](dy)[0]

    want = s24.mvue24(jax.random.fold_in(KEY, WGRAD), dy, axis=0, exact=mvue == "exact")
    got = weight_gradient(KEY)
    np.testing.assert_array_equal(got, want)
    groups = np.asarray(got).reshape(f // 4, 4, f)
    assert (np.count_nonzero(groups, axis=1) <= 2).all(), "dY must be 2:4 along the tokens"
    assert not np.array_equal(weight_gradient(jax.random.key(8)), want)


def test_fst_weights_are_24_along_both_axes_with_the_values_of_the_master():
    """Identities on either side read out the weight that each product used."""
    method = s24.methods.FST()
    (w,) = oracle.matrices(4, "float32", (d, f))
    state = method.init(w)

    def used(w):
        forward = s24.sparse_dot(jnp.eye(d), w, method, state, KEY)
        _, vjp = jax.vjp(lambda x: s24.sparse_dot(x, w, method, state, KEY), jnp.zeros((f, d)))
        return np.asarray(forward), np.asarray(vjp(jnp.eye(f))[0].T)

    for master in (w, w * 1.7 + 0.1):  # the cached mask stays, the values are read anew
        forward, dgrad = used(master)
        np.testing.assert_array_equal(forward, np.where(state["mask"], master, 0))
        np.testing.assert_array_equal(dgrad, forward)
        assert (np.count_nonzero(forward.reshape(d // 4, 4, f), axis=1) == 2).all()
        assert (np.count_nonzero(forward.reshape(d, f // 4, 4), axis=2) == 2).all()


@pytest.mark.parametrize("mvue", ["exact", "approximate"])
def test_the_weight_gradient_is_unbiased(mvue):
    """Mean over keys within 6 standard errors of the dense gradient everywhere (a false alarm: 4e-7)."""
    method, draws = s24.methods.FST(mvue=mvue), 4000
    x, w, dy = oracle.matrices(5, "float32", (8, 12), (12, 16), (8, 16))
    state = method.init(w)

    @jax.jit
    def moments(keys):
        gradient = jax.vmap(lambda k: jax.vjp(lambda w: s24.sparse_dot(x, w, method, state, k), w)[1](dy)[0])(
            keys
        )
        return gradient.mean(0), gradient.std(0)

    mean, spread = moments(jax.random.split(jax.random.key(11), draws))
    want = oracle.wide(x).T @ oracle.wide(dy)
    z = (oracle.wide(mean) - want) / (oracle.wide(spread) / np.sqrt(draws))
    assert np.abs(z).max() < 6
    # The test has power: cutting by magnitude instead would be seen.
    biased = oracle.wide(x).T @ oracle.top2(oracle.wide(dy), 0)
    assert np.abs((biased - want) / (oracle.wide(spread) / np.sqrt(draws))).max() > 20


def test_sums_are_float32(dtype, implementation):
    """512 ones: a running sum in 16 bits would stop at 256 (bfloat16)."""
    n = 512
    method = s24.methods.FST(mvue="exact" if implementation == "ffi" else None)
    w = jnp.ones((n, n), dtype)
    state = method.init(w)
    x = jnp.ones((n, n), dtype)

    @jax.jit
    def run(x, w):
        y, vjp = jax.vjp(
            lambda x, w: s24.sparse_dot(x, w, method, state, KEY, implementation=implementation), x, w
        )
        return y, *vjp(x)

    y, dx, dw = run(x, w)
    np.testing.assert_array_equal(y, np.full((n, n), n / 2, y.dtype))  # half of the ones are kept
    np.testing.assert_array_equal(dx, np.full((n, n), n / 2, dx.dtype))
    np.testing.assert_array_equal(
        dw, np.full((n, n), n, dw.dtype)
    )  # two of four may be drawn, worth two each


def test_dtypes_promote_and_gradients_keep_their_own():
    method = s24.methods.FST(mvue=None)
    x, w = oracle.matrices(6, "float32", (T, d), (d, f))
    state = method.init(w)
    y, vjp = jax.vjp(lambda x, w: s24.sparse_dot(x, w, method, state), x.astype("bfloat16"), w)
    dx, dw = vjp(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    mixed = s24.sparse_dot(x.astype("bfloat16"), w.astype("float16"), method, state)
    assert mixed.dtype == jnp.promote_types("bfloat16", "float16")


def test_float64_runs_by_the_reference():
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        x, w, dy = (jnp.asarray(rng.normal(size=s)) for s in ((T, d), (d, f), (T, f)))
        method = s24.methods.FST(mvue=None)
        state = method.init(w)
        y, vjp = jax.vjp(lambda x, w: s24.sparse_dot(x, w, method, state), x, w)
        want = oracle.linear(x, w, dy, cuts("FST None", state, dy))
        for name, got in zip(("y", "dx", "dw"), (y, *vjp(dy)), strict=True):
            assert got.dtype == jnp.float64
            oracle.assert_close(got, want[name], "float64", K=f, roundings=1, name=name)
        with pytest.raises(RuntimeError, match="float64"):
            s24.sparse_dot(x, w, method, state, implementation="ffi")


@pytest.mark.parametrize("lead", [(), (3,), (2, 2, 3), (0,), (2, 0)])
def test_leading_dimensions(lead):
    method = s24.methods.STE()
    x, w = oracle.integers(8, "float32", (*lead, d), (d, f))
    y = s24.sparse_dot(x, w, method)
    assert y.shape == (*lead, f)
    np.testing.assert_array_equal(y, oracle.wide(x) @ oracle.top2(oracle.wide(w), 0))


def test_no_tokens_give_no_gradient():
    method = s24.methods.FST()
    (w,) = oracle.matrices(9, "float32", (d, f))
    state = method.init(w)
    dx, dw = jax.grad(lambda x, w: s24.sparse_dot(x, w, method, state, KEY).sum(), (0, 1))(
        jnp.zeros((0, d)), w
    )
    assert dx.shape == (0, d)
    np.testing.assert_array_equal(dw, np.zeros((d, f)))


@pytest.mark.parametrize(("width", "out"), [(0, 8), (8, 0)])
@pytest.mark.parametrize("name", ["Dense", "STE", "FST exact"])
def test_empty_weights_give_empty_results(name, width, out):
    method, w = METHODS[name], jnp.ones((width, out))
    y, vjp = jax.vjp(lambda w: s24.sparse_dot(jnp.ones((T, width)), w, method, method.init(w), KEY), w)
    np.testing.assert_array_equal(y, np.zeros((T, out)))
    assert vjp(y)[0].shape == (width, out)


@pytest.mark.parametrize("key", [jax.random.key(7), jax.random.PRNGKey(7)])
def test_typed_and_raw_keys_are_the_same(key):
    method = s24.methods.FST()
    x, w, dy = oracle.matrices(1, "float32", (T, d), (d, f), (T, f))
    state = method.init(w)
    dw = jax.vjp(lambda w: s24.sparse_dot(x, w, method, state, key), w)[1](dy)[0]
    want = oracle.linear(x, w, dy, cuts("FST exact", state, dy))
    oracle.assert_close(dw, want["dw"], "float32", K=T, roundings=1)


# ---- bad input


def call(x=None, w=None, method=None, **rest):
    x = jnp.ones((T, d)) if x is None else x
    w = jnp.ones((d, f)) if w is None else w
    return s24.sparse_dot(x, w, s24.methods.STE() if method is None else method, **rest)


FST, STATE = s24.methods.FST(), {"mask": jnp.ones((d, f), bool)}
BAD = {
    "dtype": (
        TypeError,
        r"sparse_dot: x has dtype int32.*float32, bfloat16, float16",
        {"x": jnp.ones((T, d), int)},
    ),
    "vector weight": (ValueError, r"w must be a matrix \(in, out\), got shape \(16,\)", {"w": jnp.ones(d)}),
    "stacked weight": (ValueError, r"w must be a matrix .*\(2, 16, 24\)", {"w": jnp.ones((2, d, f))}),
    "scalar x": (ValueError, r"takes 16 features", {"x": jnp.ones(())}),
    "features": (ValueError, r"w of shape \(16, 24\) takes 16 features.*20", {"x": jnp.ones((T, 20))}),
    "groups": (
        ValueError,
        r"operand w of product fwd of shape \(18, 24\) has size 18 along axis -2.*multiple of 4.*16 or 20",
        {"x": jnp.ones((T, 18)), "w": jnp.ones((18, f))},
    ),
    "no key": (ValueError, r"draws random numbers; pass key=", {"method": FST, "state": STATE}),
    "batch of keys": (
        TypeError,
        r"one PRNG key.*\(3, 2\)",
        {"method": FST, "state": STATE, "key": jax.random.split(KEY, 3)},
    ),
    "no state": (ValueError, r"state\['mask'\].*method.init\(w\)", {"method": FST, "key": KEY}),
    "state of another weight": (
        ValueError,
        r"state\['mask'\] is bool \(4, 4\).*bool \(16, 24\).*method.init",
        {"method": FST, "key": KEY, "state": {"mask": jnp.ones((4, 4), bool)}},
    ),
    "mask of numbers": (
        ValueError,
        r"state\['mask'\] is float32 .* needs bool",
        {"method": FST, "key": KEY, "state": {"mask": jnp.ones((d, f))}},
    ),
    "method by name": (
        TypeError,
        r"method must be one of s24.methods, such as FST\(\), got 'FST'",
        {"method": "FST"},
    ),
    "method without parentheses": (
        TypeError,
        r"got the class; call it: FST\(\)",
        {"method": s24.methods.FST},
    ),
    "unknown implementation": (ValueError, r"'gpu' is unknown", {"implementation": "gpu"}),
    "absent implementation": (RuntimeError, r"cusparselt", {"implementation": "cusparselt"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_and_says_what_to_do(case, no_cusparselt):
    error, message, arguments = BAD[case]
    with pytest.raises(error, match=message):
        call(**arguments)


@pytest.mark.parametrize("tokens", [1, 10, 14])
def test_tokens_that_are_no_multiple_of_four(tokens):
    """The forward product needs none; a gradient raises before anything runs, with names."""
    log = Log()
    method = Spied(s24.methods.FST(), log)
    (w,) = oracle.matrices(9, "float32", (d, f))
    state = method.init(w)
    x = jnp.ones((tokens, d))
    y = s24.sparse_dot(x, w, method, state, KEY)
    oracle.assert_close(
        y,
        oracle.linear(x, w, jnp.zeros((tokens, f)), cuts("FST None", state, None))["y"],
        "float32",
        K=d,
        roundings=1,
    )
    log.clear()
    with pytest.raises(
        ValueError,
        match=rf"the operand dy of product wgrad of shape \({tokens}, 24\) has size {tokens} along axis -2",
    ):
        jax.grad(lambda w: s24.sparse_dot(x, w, method, state, KEY).sum())(w)
    assert not log, "no sparsifier may run before the check"
    # Without a sparse product along the tokens there is nothing to divide.
    jax.grad(lambda w: s24.sparse_dot(x, w, s24.methods.STE()).sum())(w)


@pytest.mark.parametrize("method", [s24.methods.Activation24(), s24.methods.Venom()], ids=["A24", "Venom"])
def test_methods_of_blocks_are_refused(method):
    """They have no table for a single layer, whose product was dense without a word."""
    with pytest.raises(ValueError, match=r"has no table for a single linear layer; use s24.sparse_ffn"):
        s24.sparse_dot(jnp.ones((8, 16)), jnp.ones((16, 32)), method)


def test_a_layer_of_a_block_that_is_called_alone_is_dense():
    ffn, x = s24.nn.FFN(16, 32, method=s24.methods.Activation24(), rngs=nnx.Rngs(0)), jnp.ones((8, 16))
    np.testing.assert_allclose(ffn.up(x), x @ ffn.up.kernel[...], rtol=1e-5)
