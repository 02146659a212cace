"""jit, vmap, scan, remat and donation change nothing; forward mode says what to use instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.engine.plan import FFN, Plan, Row
from jax_sparse24.engine.sparsifiers import MVUE, Masked
from jax_sparse24.methods.base import Method
from tests.engine import oracle

pytestmark = pytest.mark.optimised

T, d, f = 8, 12, 16
FST = s24.methods.FST()
KEY = jax.random.key(3)
# For shapes this small None would choose dense products.
KERNELS = "ffi" if jax.default_backend() == "cpu" else None


def linear_gradients(x, w, dy, state, key):
    y, vjp = jax.vjp(lambda x, w: s24.sparse_dot(x, w, FST, state, key, implementation=KERNELS), x, w)
    return y, *vjp(dy)


def ffn(x, w1, w2, state, key, method=FST):
    return s24.sparse_ffn(x, w1, w2, method, state, key, activation="relu", implementation=KERNELS)


def ffn_states(w1, w2):
    return {"w1": FST.init(w1), "w2": FST.init(w2)}


def assert_equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, want)


def assert_near(got, want):
    """Equal but for the order of float32 sums."""

    def compare(a, b):
        a, b = oracle.wide(a), oracle.wide(b)
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)

    jax.tree.map(compare, got, want)


# Whole numbers: sums are exact in any order, so equality is to the bit and a draw cannot hide in a tolerance.


def test_vmap_over_examples_and_keys_is_the_loop():
    x, w, dy = oracle.integers(1, "float32", (3, T, d), (d, f), (3, T, f))
    state = FST.init(w)
    keys = jax.random.split(KEY, 3)
    batched = jax.vmap(linear_gradients, in_axes=(0, None, 0, None, 0))(x, w, dy, state, keys)
    loop = [linear_gradients(x[i], w, dy[i], state, keys[i]) for i in range(3)]
    assert_equal(batched, jax.tree.map(lambda *a: jnp.stack(a), *loop))
    assert not np.array_equal(*(linear_gradients(x[0], w, dy[0], state, k)[2] for k in keys[:2]))


def test_vmap_over_keys_alone_draws_differently():
    x, w, dy = oracle.integers(2, "float32", (T, d), (d, f), (T, f))
    state = FST.init(w)
    keys = jax.random.split(KEY, 4)
    y, dx, dw = jax.vmap(linear_gradients, in_axes=(None,) * 4 + (0,))(x, w, dy, state, keys)
    assert (np.asarray(y) == np.asarray(y[0])).all()
    assert (np.asarray(dx) == np.asarray(dx[0])).all()
    for i, key in enumerate(keys):
        np.testing.assert_array_equal(dw[i], linear_gradients(x, w, dy, state, key)[2])
    assert len({np.asarray(g).tobytes() for g in dw}) == 4


@pytest.mark.parametrize("shared_x", [True, False])
def test_vmap_over_weights_and_states(shared_x, dtype):
    """An ensemble: a batch of weights, each with its own mask."""
    check_ensemble(shared_x, dtype, KERNELS)


def test_vmap_over_weights_with_dense_products_in_bfloat16():
    check_ensemble(True, "bfloat16", None, s24.methods.STE())


def check_ensemble(shared_x, dtype, implementation, method=FST):
    x, w, dy = oracle.integers(3, dtype, (2, T, d), (2, d, f), (2, T, f))
    if shared_x:
        x = x[0]
    state = method.init(w)
    assert all(s.shape == (2, d, f) for s in state.values())

    def gradients(x, w, dy, state):
        y, vjp = jax.vjp(
            lambda x, w: s24.sparse_dot(x, w, method, state, KEY, implementation=implementation), x, w
        )
        return y, *vjp(dy)

    axes = (None if shared_x else 0, 0, 0, 0)
    batched = jax.jit(jax.vmap(gradients, in_axes=axes))(x, w, dy, state)
    for i in range(2):
        one = gradients(x if shared_x else x[i], w[i], dy[i], jax.tree.map(lambda m, i=i: m[i], state))
        assert_equal([b[i] for b in batched], list(one))


def test_vmap_of_an_ffn_gradient():
    x, w1, w2 = oracle.integers(4, "float32", (3, T, d), (d, f), (f, d), largest=2)
    state, keys = ffn_states(w1, w2), jax.random.split(KEY, 3)
    gradient = jax.grad(lambda w1, x, key: ffn(x, w1, w2, state, key).sum())
    batched = jax.vmap(gradient, in_axes=(None, 0, 0))(w1, x, keys)
    for i in range(3):
        np.testing.assert_array_equal(batched[i], gradient(w1, x[i], keys[i]))


def test_jit_with_the_method_as_a_static_argument():
    """Methods are hashable, and equal ones share a compilation."""
    x, w, dy = oracle.integers(5, "float32", (T, d), (d, f), (T, f))
    state = FST.init(w)
    traces = []

    def run(method, x, w, state, key):
        traces.append(method)
        return jax.vjp(lambda w: s24.sparse_dot(x, w, method, state, key), w)[1](dy)[0]

    compiled = jax.jit(run, static_argnums=0)
    got = compiled(s24.methods.FST(), x, w, state, KEY)
    compiled(s24.methods.FST(), x, w, state, jax.random.key(4))
    assert len(traces) == 1
    compiled(s24.methods.FST(mvue=None), x, w, state, KEY)
    assert len(traces) == 2
    np.testing.assert_array_equal(got, linear_gradients(x, w, dy, state, KEY)[2])


def test_scan_over_layers_is_the_loop():
    x, w1, w2 = oracle.matrices(6, "float32", (T, d), (3, d, f), (3, f, d))
    state, keys = ffn_states(w1, w2), jax.random.split(KEY, 3)

    def scanned(w1, w2, x):
        def layer(x, leaf):
            return x + ffn(x, *leaf), None

        return jax.lax.scan(layer, x, (w1, w2, state, keys))[0]

    def loop(w1, w2, x):
        for i in range(3):
            x = x + ffn(x, w1[i], w2[i], jax.tree.map(lambda a, i=i: a[i], state), keys[i])
        return x

    got, want = (
        jax.jit(jax.value_and_grad(lambda *a, run=run: (run(*a) ** 2).sum(), (0, 1, 2)))(w1, w2, x)
        for run in (scanned, loop)
    )
    assert_near(got, want)


# ---- remat


class NoisyForward(Method):
    """Draws in both forward products, so that a second forward pass must draw the same."""

    def ffn_plan(self):
        noise = MVUE()
        return Plan.of(
            FFN, F1=Row("w1", noise), F2=Row("w2", noise), B2=Row("dy3", noise), B4=Row("dy1", noise)
        )


@pytest.mark.parametrize(
    ("policy", "draws"), [(None, 6), (jax.checkpoint_policies.save_only_these_names("s24_ffn"), 5)]
)
def test_remat_repeats_the_draw(policy, draws):
    """Four draws become six when the forward pass runs twice, or five if the result is saved by its name."""
    x, w1, w2, dy = oracle.integers(7, "float32", (T, d), (d, f), (f, d), (T, d), largest=2)
    method = NoisyForward()

    def run(x, w1, w2):
        return ffn(x, w1, w2, None, KEY, method) ** 2  # the square needs the result again

    def compiled(function):
        def both(*a):
            y, vjp = jax.vjp(function, *a)
            return y, *vjp(dy)

        return jax.jit(both).lower(x, w1, w2).compile()

    plain, remat = compiled(run), compiled(jax.checkpoint(run, policy=policy))
    # Kernels of CUDA multiply no packed float32.
    draw = 's24_mvue_pack"' if jax.default_backend() == "cpu" else 's24_mvue"'
    count = [c.as_text().count(f'custom_call_target="{draw}') for c in (plain, remat)]
    assert count == [4, draws], "without a second draw this test shows nothing"
    assert_near(remat(x, w1, w2), plain(x, w1, w2))
    other = ffn(x, w1, w2, None, jax.random.key(9), method)
    assert not np.allclose(other, ffn(x, w1, w2, None, KEY, method))


def test_results_are_named_for_remat_policies():
    """A policy does not see the kernels; it can name what they return."""
    x, w1, w2 = oracle.matrices(8, "float32", (T, d), (d, f), (f, d))
    dot = jax.make_jaxpr(lambda: s24.sparse_dot(x, w1, FST, FST.init(w1), KEY))()
    both = jax.make_jaxpr(lambda: ffn(x, w1, w2, ffn_states(w1, w2), KEY))()
    assert "name=s24_dot" in str(dot)
    assert "name=s24_ffn" in str(both)


# ---- donation


def test_a_donated_training_step_gives_the_same():
    x, w1, w2 = oracle.matrices(9, "float32", (T, d), (d, f), (f, d))
    state = ffn_states(w1, w2)

    def step(params, state, key):
        loss, gradient = jax.value_and_grad(lambda p: (ffn(x, *p, state, key) ** 2).mean())(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        return params, {n: FST.refresh(state[n], p) for n, p in zip(("w1", "w2"), params, strict=True)}, loss

    want = jax.jit(step)((w1, w2), state, KEY)
    params, donated = (w1 + 0, w2 + 0), jax.tree.map(jnp.copy, state)
    got = jax.jit(step, donate_argnums=(0, 1))(params, donated, KEY)
    assert_equal(got, want)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, donated)))


# ---- forward mode

X, W = jnp.ones((T, d)), jnp.ones((d, f))
STATE, BIAS = FST.init(W), jnp.ones(f)
FORWARD = {
    "jvp": lambda g, a: jax.jvp(g, (a,), (a,)),
    "jvp of jit": lambda g, a: jax.jvp(jax.jit(g), (a,), (a,)),
    "jvp in jit": lambda g, a: jax.jit(lambda a: jax.jvp(g, (a,), (a,)))(a),
    "jacfwd": lambda g, a: jax.jacfwd(g)(a),
    "jvp of vmap": lambda g, a: jax.jvp(jax.vmap(g), (a[None],), (a[None],)),
    "jvp of remat": lambda g, a: jax.jvp(jax.checkpoint(g), (a,), (a,)),
    "linearize": lambda g, a: jax.linearize(g, a)[1](a),
}
OF = {
    "sparse_dot x": ("sparse_dot", lambda x: s24.sparse_dot(x, W, FST, STATE, KEY), X),
    "sparse_dot w": ("sparse_dot", lambda w: s24.sparse_dot(X, w, FST, STATE, KEY), W),
    "sparse_ffn w1": (
        "sparse_ffn",
        lambda w: s24.sparse_ffn(X, w, W.T, FST, ffn_states(W, W.T), KEY, activation="relu"),
        W,
    ),
    "sparse_ffn b1": (
        "sparse_ffn",
        lambda b: s24.sparse_ffn(X, W, W.T, FST, ffn_states(W, W.T), KEY, b1=b, activation="relu"),
        BIAS,
    ),
}


@pytest.mark.parametrize("how", FORWARD)
@pytest.mark.parametrize("what", ["sparse_dot x", "sparse_ffn b1"])
def test_forward_mode_raises_and_says_what_to_use(how, what):
    op, function, argument = OF[what]
    with pytest.raises(
        TypeError, match=rf"{op} is differentiable in reverse mode only.*Use jax.grad or jax.vjp"
    ):
        FORWARD[how](function, argument)


@pytest.mark.parametrize("what", OF)
def test_forward_mode_raises_for_every_argument(what):
    op, function, argument = OF[what]
    with pytest.raises(TypeError, match=rf"{op} is differentiable in reverse mode only"):
        jax.jvp(function, (argument,), (argument,))
    jax.jit(jax.grad(lambda a: function(a).sum()))(argument)  # and reverse mode does not


def test_integer_state_and_keys_have_no_gradient():
    """A mask and raw key words among the differentiated arguments of an outer function do no harm."""
    x, w, dy = oracle.integers(10, "float32", (T, d), (d, f), (T, f))
    state = FST.init(w)

    def loss(w, state, words):
        return (s24.sparse_dot(x, w, FST, state, words) * dy).sum()

    dw, dstate, dwords = jax.grad(loss, (0, 1, 2), allow_int=True)(w, state, jax.random.key_data(KEY))
    np.testing.assert_array_equal(dw, linear_gradients(x, w, dy, state, KEY)[2])
    assert dstate["mask"].dtype == dwords.dtype == jax.dtypes.float0


def test_masks_without_a_state_entry_are_read_per_operand():
    """In an FFN each matrix reads its own entry of the state, and only that."""
    method = s24.methods.FST(mvue=None)
    x, w = oracle.integers(11, "float32", (T, d), (d, d))
    masks = [FST.init(jax.random.normal(jax.random.key(i), (d, d))) for i in range(2)]
    assert isinstance(dict(method.ffn_plan().rows)["F1"].by, Masked)

    def run(first, second):
        return s24.sparse_ffn(x, w, w, method, {"w1": masks[first], "w2": masks[second]}, activation="relu")

    def dense(first, second):
        w1, w2 = (np.where(masks[i]["mask"], w, 0) for i in (first, second))
        return np.maximum(np.asarray(x) @ w1, 0) @ w2

    for first, second in ((0, 1), (1, 0), (1, 1)):
        np.testing.assert_array_equal(run(first, second), dense(first, second))
