"""The FFN engine against float64 products, exact autodiff and the linear engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import operation
from jax_sparse24.dispatch.decision import Decision
from jax_sparse24.engine import ffn, fusions
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.operand import ACTIVATIONS
from jax_sparse24.engine.plan import FFN, Plan, Row
from jax_sparse24.engine.sparsifiers import Top2
from jax_sparse24.measure import same_bits
from tests.engine import oracle
from tests.engine.spy import Log, Spied
from tests.engine.test_linear import METHODS
from tests.ops.data import assert_same_bits

T, d, f, out = 12, 16, 24, 8
KEY = jax.random.key(7)
PLACE = {"B2": 3, "B4": 5}  # of a product in the table: what its key is folded with
ROUNDINGS = (
    16  # along the longest chain: F1, bias, activation, slope, their product, B1, B3; GELU alone is eight
)

# dtype, implementation, activation, bias. The kink of relu makes 16-bit gradients incomparable near zero.
RUNS = [("float32", "ffi", a, bias) for a in oracle.ACTIVATIONS for bias in (True, False)]
RUNS += [("float32", "reference", "squared_relu", True)]
RUNS += [(dt, "ffi", a, a == "gelu") for dt in ("bfloat16", "float16") for a in ("squared_relu", "gelu")]
# The estimators take long to compile in jnp.
CASES = [(m, *r) for m in METHODS for r in RUNS if not (m == "FST approximate" and r[1] == "reference")]
CASES += [(m, dt, "reference", "gelu", False) for m in ("STE", "FST None") for dt in ("bfloat16", "float16")]


def states(method, w1, w2):
    return {"w1": method.init(w1), "w2": method.init(w2)}


def cuts(name, state, log, key=KEY):
    if name == "Dense":
        return {}
    if name == "STE":
        prune = oracle.along(0)
        return {("F1", "w1"): prune, ("F2", "w2"): prune, ("B1", "w2"): prune, ("B3", "w1"): prune}
    m1, m2 = (oracle.masked(state[w]["mask"]) for w in ("w1", "w2"))
    table = {("F1", "w1"): m1, ("F2", "w2"): m2, ("B1", "w2"): m2, ("B3", "w1"): m1}
    if name != "FST None":
        for product, operand in (("B2", "dy3"), ("B4", "dy1")):
            cotangent = log[product][0]  # rounded as the engine rounds it: the draw depends on every bit
            noise = s24.mvue24(jax.random.fold_in(key, PLACE[product]), cotangent, 0, name == "FST exact")
            table[product, operand] = oracle.drawn(noise)
    return table


@pytest.mark.parametrize(
    ("name", "dtype", "implementation", "activation", "bias"), CASES, indirect=["implementation"]
)
def test_gradients_are_the_masked_dense_products(name, dtype, implementation, activation, bias):
    method, log = METHODS[name], Log()
    x, w1, w2, dy3, b1 = oracle.matrices(1, dtype, (T, d), (d, f), (f, out), (T, out), (f,))
    state = states(method, w1, w2)

    def run(x, w1, w2, b1):
        options = {"b1": b1 if bias else None, "activation": activation, "implementation": implementation}
        return s24.sparse_ffn(x, w1, w2, Spied(method, log), state, KEY, **options)

    y, vjp = jax.vjp(run, x, w1, w2, b1)
    got = dict(zip(("dx", "dw1", "dw2", "db1"), vjp(dy3), strict=True)) | {"y": y}
    if not bias:
        np.testing.assert_array_equal(got.pop("db1"), np.zeros(f))
    want = oracle.ffn(x, w1, w2, b1 if bias else None, dy3, activation, cuts(name, state, log))
    if name.startswith("FST") and name != "FST None":
        np.testing.assert_array_equal(log["B2"][0], dy3)
        got["dy1"] = log["B4"][0]
    for what, value in got.items():
        assert value.dtype == dtype
        oracle.assert_close(value, want[what], dtype, K=f, roundings=ROUNDINGS, name=what)
    axes = {"F1": -2, "F2": -2, "B1": -1, "B2": -2, "B3": -1, "B4": -2}
    assert {product: axis for product, (_, axis, _) in log.items()} == {
        product: axes[product] for product, _ in method.ffn_plan().rows
    }


@pytest.mark.parametrize("name", ["Dense", "STE", "FST None"])
@pytest.mark.parametrize("activation", ["relu", "squared_relu"])
def test_without_noise_it_is_autodiff_with_straight_through_weights(name, activation, implementation):
    """Small whole numbers make every sum exact, so equality is to the bit; jit makes no difference."""
    method = METHODS[name]
    x, w1, w2, dy, b1 = oracle.integers(2, "float32", (T, d), (d, f), (f, out), (T, out), (f,), largest=2)
    state = states(method, w1, w2)

    def used(name, w):
        if name == "STE":
            return oracle.top2(oracle.wide(w), 0)
        return oracle.wide(w) if name == "Dense" else np.where(method.init(w)["mask"], oracle.wide(w), 0)

    u1, u2 = used(name, w1), used(name, w2)

    def surrogate(x, w1, w2, b1):
        y1 = x @ (w1 + jax.lax.stop_gradient(u1 - w1)) + b1
        y2 = jnp.maximum(y1, 0)
        y2 = y2 * y2 if activation == "squared_relu" else jnp.where(y1 > 0, y1, 0)
        return y2 @ (w2 + jax.lax.stop_gradient(u2 - w2))

    def engine(x, w1, w2, b1):
        options = {"b1": b1, "activation": activation, "implementation": implementation}
        return s24.sparse_ffn(x, w1, w2, method, state, KEY, **options)

    @jax.jit
    def gradients(x, w1, w2, b1):
        runs = []
        for function in (engine, surrogate):
            y, vjp = jax.vjp(function, x, w1, w2, b1)
            runs.append((y, *vjp(dy)))
        return runs

    got, want = gradients(x, w1, w2, b1)
    assert float(jnp.abs(want[0]).max()) < 2**24
    for what, a, b in zip(("y", "dx", "dw1", "dw2", "db1"), got, want, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=what)


@pytest.mark.parametrize("name", ["Dense", "STE", "FST exact"])
@pytest.mark.parametrize(
    ("activation", "dtype"), [("squared_relu", "bfloat16"), ("relu", "bfloat16"), ("relu", "float32")]
)
def test_saved_activations_give_the_bits_of_their_saved_inputs(name, activation, dtype, monkeypatch):
    """Y2 in place of Y1, for the backward pass as a program of its own and in one with the forward pass."""
    method = METHODS[name]
    x, w1, w2, dy3, b1 = oracle.matrices(1, dtype, (T, d), (d, f), (f, out), (T, out), (f,))
    x, state = x.at[0].set(0).at[1].multiply(1e-8).at[2].multiply(1e8), states(method, w1, w2)

    def run(*operands):
        *operands, b1 = operands
        return s24.sparse_ffn(*operands, method, state, KEY, b1=b1, activation=activation)

    def gradients(*operands):
        return jax.vjp(run, *operands)[1](dy3)

    def found():
        jax.clear_caches()
        _, saved = jax.jit(lambda *operands: jax.vjp(run, *operands))(x, w1, w2, b1)
        kept = [leaf for leaf in jax.tree.leaves(saved) if leaf.shape == (T, f)]
        return kept, jax.jit(lambda saved: saved(dy3))(saved), jax.jit(gradients)(x, w1, w2, b1)

    (y2,), *new = found()
    monkeypatch.setattr(ffn, "gives_input", lambda *_: False)
    (y1,), *old = found()
    activated = jax.jit(ACTIVATIONS[activation])(y1)
    for a, b in zip(jax.tree.leaves((y2, new)), jax.tree.leaves((activated, old)), strict=True):
        assert_same_bits(a, b)
    assert not same_bits(y1, y2)


@pytest.mark.parametrize("name", ["FST exact", "FST approximate"])
@pytest.mark.parametrize("activation", ["squared_relu", "relu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_pass_gives_the_bits_of_the_slope_and_then_the_estimate(name, activation, dtype, monkeypatch):
    """Of what the forward pass saves, Y2 or Y1; with a bias, whose gradient is a sum of dY1."""
    method, runs = METHODS[name], []
    x, w1, w2, dy3, b1 = oracle.matrices(1, dtype, (T, d), (d, f), (f, out), (T, out), (f,))
    state, one_pass = states(method, w1, w2), fusions.SlopeMVUE.run

    def gradients():
        def run(*operands):
            *operands, b1 = operands
            options = {"b1": b1, "activation": activation, "implementation": "ffi"}
            return s24.sparse_ffn(*operands, method, state, KEY, **options)

        return jax.jit(lambda *operands: jax.vjp(run, *operands)[1](dy3))(x, w1, w2, b1)

    *want, want_b1 = gradients()
    monkeypatch.setattr(fusions.SlopeMVUE, "matches", lambda *_: True)
    monkeypatch.setattr(fusions.SlopeMVUE, "run", lambda *a: runs.append(a) or one_pass(*a))
    *got, got_b1 = gradients()
    assert len(runs) == 1
    assert_same_bits(got, want)
    if jax.default_backend() == "cpu":
        assert_same_bits(got_b1, want_b1)
    else:  # there XLA may sum dY1 in another order, in the program of the slope
        np.testing.assert_allclose(got_b1, want_b1, rtol=1e-5, atol=1e-5)


def test_which_blocks_take_one_pass_for_dy1(monkeypatch):
    """Those whose B4 takes a packed estimate, where one pass can make it."""
    asked = []

    def can(self, *operands, **options):
        asked.append(options)
        return True

    monkeypatch.setattr(operation.Operation, "in_one_pass", can)
    saved, packed = jnp.ones((T, f), jnp.bfloat16), Decision("ffi", "asked for", "packed")

    def matches(method=METHODS["FST exact"], activation="squared_relu", decision=packed, implementation=None):
        execution = Execution("test", "ffn", method.ffn_plan(), implementation, activation)
        return fusions.SLOPE_MVUE.matches(execution, saved, decision)

    assert matches() and matches(activation="relu") and matches(s24.methods.SSTE())
    assert matches(METHODS["FST approximate"], implementation="cusparselt")
    compressed = dataclasses.replace(packed, form="compressed")
    assert matches(decision=compressed, implementation="ffi")
    names = "activation", "exact", "compressed", "implementation"
    found = [tuple(options[name] for name in names) for options in asked]
    assert found == [
        *(("squared_relu", True, False, None), ("relu", True, False, None)),
        *(("squared_relu", True, False, None), ("squared_relu", False, False, "cusparselt")),
        ("squared_relu", True, True, "ffi"),
    ]
    monkeypatch.setattr(fusions.SlopeMVUE, "_options", None)  # nothing else comes so far
    assert not matches(activation="gelu")
    assert not matches(decision=Decision("dense", "slower"))
    for other in (METHODS["FST None"], METHODS["STE"], s24.methods.FST(mvue="biased"), s24.methods.SLoPe()):
        assert not matches(other)
    for other in (s24.methods.Activation24(token_cut="mvue"), s24.methods.Venom(), s24.methods.Dense()):
        assert not matches(other)
    row = s24.methods.FST().ffn_plan().row("B4")
    strided = Plan.of(FFN, B4=dataclasses.replace(row, tokens="strided"))
    y2_cut = Plan.of(FFN, B4=row, F2=Row("y2", Top2()))
    for plan in (strided, y2_cut):
        execution = Execution("test", "ffn", plan, None, "squared_relu")
        assert not fusions.SLOPE_MVUE.matches(execution, saved, packed)


def assert_same_in_one_pass(rule, found, monkeypatch) -> None:
    """What `found()` computes has the same bits, in several programs, where a rule of `fusions` matches."""
    want, runs, one_pass = found(), [], rule.run
    monkeypatch.setattr(rule, "matches", lambda *_: True)
    monkeypatch.setattr(rule, "run", lambda *a: runs.append(a) or one_pass(*a))
    got = found()
    assert len(runs) >= 2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(a, b)


SQUARED_BY = ("FST exact", "FST None", "STE")


@pytest.mark.parametrize("name", SQUARED_BY)
def test_one_pass_gives_the_bits_of_f1_and_then_its_squares(name, monkeypatch):
    """Value and gradients, alone, in a loop, recomputed and mapped; Y1 is nowhere."""
    method = METHODS[name]
    x, w1, w2, dy3 = oracle.matrices(1, "bfloat16", (T, d), (d, f), (f, out), (T, out))
    state = states(method, w1, w2)

    def block(x, w1, w2):
        return s24.sparse_ffn(x, w1, w2, method, state, KEY, implementation="ffi")

    def gradients(block):
        def run(x, w1, w2):
            y, vjp = jax.vjp(block, x, w1, w2)
            return y, *vjp(dy3)

        return run

    def found():
        jax.clear_caches()  # what was traced before asks nothing again
        alone, again = gradients(block), gradients(jax.checkpoint(block))
        step = lambda s, _: (s + 1, alone(x + s, w1, w2))  # noqa: E731
        loop = lambda x: jax.lax.scan(step, x[0, 0], None, 2)[1]  # noqa: E731
        many = lambda x: jax.vmap(alone, (0, None, None))(jnp.stack([x, -x]), w1, w2)  # noqa: E731
        whole = [jax.jit(run)(x, w1, w2) for run in (alone, again, block)]
        return *whole, jax.jit(loop)(x), jax.jit(many)(x)

    assert_same_in_one_pass(fusions.Squared, found, monkeypatch)


def every_operation_fits(monkeypatch, *names) -> list[tuple]:
    """Lets each operation be one pass whatever it is given. Returns what was asked: the operation's name, the
    shapes of its operands, and these options."""
    asked = []

    def can(self, *operands, **options):
        asked.append((self.name, *(x.shape for x in operands), *(options[name] for name in names)))
        return True

    monkeypatch.setattr(operation.Operation, "in_one_pass", can)
    return asked


def test_which_blocks_take_one_pass_for_y2(monkeypatch):
    """Those that multiply a packed W1 and need no Y1, where one pass can make Y2."""
    asked = every_operation_fits(monkeypatch, "implementation")
    x, bias = jnp.ones((T, d), jnp.bfloat16), jnp.ones(f, jnp.bfloat16)
    packed = Decision("ffi", "asked for", "packed")
    measured = Decision("cusparselt", "measured", "compressed")

    def matches(method=METHODS["STE"], decision=packed, by="ffi", activation="squared_relu", bias=None):
        plan = method if isinstance(method, Plan) else method.ffn_plan()
        execution = Execution("test", "ffn", plan, by, activation)
        return fusions.SQUARED.matches(execution, x, f, decision, bias)

    assert matches() and matches(decision=measured, by=None)
    for method in (METHODS["FST exact"], s24.methods.SSTE(), s24.methods.SLoPe(), s24.methods.SRSTE()):
        assert matches(method)
    assert set(asked) == {("matmul_squared_relu", (T, d), (d, f), by) for by in ("ffi", None)}
    monkeypatch.setattr(operation.Operation, "in_one_pass", None)  # nothing else comes so far
    assert not matches(bias=bias)
    assert not matches(activation="relu") and not matches(activation="gelu")
    assert not matches(decision=Decision("dense", "slower"), by=None)
    # Our kernels in place of the library's are a choice that a table makes, and the other way round.
    assert not matches(decision=dataclasses.replace(packed, runs="auto"), by=None)
    assert not matches(decision=measured, by="cusparselt") and not matches(by="reference")
    assert not matches(s24.methods.Dense()) and not matches(s24.methods.Activation24())
    row = METHODS["STE"].ffn_plan().row("F1")
    assert not matches(Plan.of(FFN, F1=dataclasses.replace(row, other=Top2())))
    assert not matches(Plan.of(FFN, F1=row, F2=Row("y2", Top2())))


def test_blocks_that_keep_y1_ask_for_no_pass_to_y2(monkeypatch):
    """In other dtypes, and where F2 cuts Y2."""
    asked = []
    monkeypatch.setattr(fusions.Squared, "matches", lambda *a: asked.append(a))
    x, w1, w2 = oracle.matrices(1, "bfloat16", (32, d), (d, 32), (32, d))
    for method, dtype, asks in (
        (METHODS["STE"], "bfloat16", True),
        (METHODS["STE"], "float16", False),
        (s24.methods.Activation24(), "bfloat16", False),
    ):
        asked.clear()
        jax.eval_shape(
            lambda *a, m=method: s24.sparse_ffn(*a, m, states(m, *a[1:]), KEY),
            *(jax.ShapeDtypeStruct(a.shape, dtype) for a in (x, w1, w2)),
        )
        assert bool(asked) == asks


SLOPED_BY = {name: METHODS[name] for name in ("FST exact", "FST None")} | {"SLoPe": s24.methods.SLoPe()}


@pytest.mark.parametrize("activation", ["squared_relu", "relu"])
@pytest.mark.parametrize("name", SLOPED_BY)
def test_one_pass_gives_the_bits_of_b1_and_then_the_slope(name, activation, monkeypatch):
    """Gradients, also recomputed and mapped, with a bias, whose gradient is a sum of dY1."""
    method = SLOPED_BY[name]
    x, w1, w2, dy3, b1 = oracle.matrices(1, "bfloat16", (T, d), (d, f), (f, out), (T, out), (f,))
    state = states(method, w1, w2)

    def block(x, w1, w2, b1):
        options = {"b1": b1, "activation": activation, "implementation": "ffi"}
        return s24.sparse_ffn(x, w1, w2, method, state, KEY, **options)

    def found():
        jax.clear_caches()  # what was traced before asks nothing again
        many = lambda *a: jax.vmap(jax.vjp(block, *a)[1])(jnp.stack([dy3, -dy3]))  # noqa: E731
        again = lambda *a: jax.vjp(jax.checkpoint(block), *a)[1](dy3)  # noqa: E731
        return [jax.jit(run)(x, w1, w2, b1) for run in (many, again)]

    assert_same_in_one_pass(fusions.Sloped, found, monkeypatch)


def test_which_blocks_take_one_pass_for_b1(monkeypatch):
    """Those that multiply by a packed W2 and save all of Y2, where one pass can make dY1."""
    asked = every_operation_fits(monkeypatch, "activation", "implementation")
    dy3, saved = jnp.ones((T, out), jnp.bfloat16), jnp.ones((T, f), jnp.bfloat16)
    packed = Decision("ffi", "asked for", "packed")
    measured = Decision("cusparselt", "measured", "compressed")

    def matches(method=METHODS["FST exact"], decision=packed, by="ffi", activation="squared_relu"):
        plan = method if isinstance(method, Plan) else method.ffn_plan()
        return fusions.SLOPED.matches(Execution("test", "ffn", plan, by, activation), dy3, saved, decision)

    assert matches() and matches(decision=measured, by=None) and matches(activation="relu")
    assert matches(s24.methods.SLoPe())
    kinds = (("squared_relu", "ffi"), ("squared_relu", None), ("relu", "ffi"))
    assert set(asked) == {("matmul_slope", (T, out), (f, out), (T, f), *kind) for kind in kinds}
    monkeypatch.setattr(operation.Operation, "in_one_pass", None)  # nothing else comes so far
    assert not matches(activation="gelu") and not matches(decision=Decision("dense", "slower"), by=None)
    assert not matches(decision=dataclasses.replace(packed, runs="auto"), by=None)
    assert not matches(decision=measured, by="cusparselt") and not matches(by="reference")
    others = (s24.methods.Dense(), s24.methods.STE(), s24.methods.SSTE(), s24.methods.Activation24())
    for method in (*others, s24.methods.Venom()):
        assert not matches(method)
    assert not matches(s24.methods.FST(fp8="tensor"))
    row = METHODS["FST exact"].ffn_plan().row("B1")
    assert not matches(Plan.of(FFN, B1=dataclasses.replace(row, other=Top2())))
    assert not matches(Plan.of(FFN, B1=row, F2=Row("y2", Top2())))
    monkeypatch.setattr(Execution, "summed", lambda _, name: ("tp",) if name == "B1" else ())
    assert not matches(), "shards of d: the slope belongs to the sum"


def test_both_weight_gradients_are_unbiased():
    """Mean over keys within 6 standard errors of the noiseless gradients (a false alarm: 6e-7)."""
    draws = 4000
    x, w1, w2, dy = oracle.matrices(5, "float32", (8, 8), (8, 16), (16, 8), (8, 8))
    state = states(METHODS["FST None"], w1, w2)

    def gradients(method, key):
        run = jax.vjp(lambda w1, w2: s24.sparse_ffn(x, w1, w2, method, state, key, activation="gelu"), w1, w2)
        return run[1](dy)

    @jax.jit
    def moments(keys):
        g = jax.vmap(lambda k: gradients(METHODS["FST exact"], k))(keys)
        return [(a.mean(0), a.std(0)) for a in g]

    expected = gradients(METHODS["FST None"], None)
    for (mean, spread), want in zip(
        moments(jax.random.split(jax.random.key(12), draws)), expected, strict=True
    ):
        error = np.abs(oracle.wide(mean) - oracle.wide(want))
        assert (error <= 6 * oracle.wide(spread) / np.sqrt(draws) + 1e-5).all()
        assert float(spread.mean()) > 0.1


def test_the_two_noises_differ():
    """With the same cotangent in both products, B2 and B4 still draw differently."""
    log = Log()
    method = Spied(METHODS["FST exact"], log)
    (w1, w2, x) = oracle.matrices(6, "float32", (d, f), (f, d), (T, d))
    state = states(method, w1, w2)
    jax.vjp(lambda w: s24.sparse_ffn(x, w, w2, method, state, KEY), w1)[1](jnp.ones((T, d)))
    words = [tuple(np.asarray(jax.random.key_data(log[p][2]))) for p in ("B2", "B4")]
    assert words == [tuple(np.asarray(jax.random.key_data(jax.random.fold_in(KEY, i)))) for i in (3, 5)]


def test_sums_are_float32(implementation):
    """512 ones in bfloat16: a running sum would stop at 256, in each of the six products and in the bias."""
    n, method = 512, METHODS["FST None"]
    ones = jnp.ones((n, n), jnp.bfloat16)
    state = states(method, ones, ones)

    @jax.jit
    def run(x, w1, w2, b1):
        y, vjp = jax.vjp(
            lambda *a: s24.sparse_ffn(
                *a[:3], method, state, b1=a[3], activation="relu", implementation=implementation
            ),
            x, w1, w2, b1,
        )  # fmt: skip
        return y, *vjp(x)

    half, b1 = n // 2, jnp.zeros(n, jnp.bfloat16)
    y, dx, dw1, dw2, db1 = run(ones, ones, ones, b1)
    for got, want in ((y, half * half), (dx, half * half), (dw1, half * n), (dw2, half * n), (db1, half * n)):
        np.testing.assert_array_equal(got.astype(jnp.float32), np.full(got.shape, want))


def test_dtypes_promote_and_gradients_keep_their_own():
    method = METHODS["FST exact"]
    x, w1, w2, b1 = oracle.matrices(7, "float32", (T, d), (d, f), (f, out), (f,))
    x, w1, b1 = x.astype("bfloat16"), w1.astype("bfloat16"), b1.astype("float16")
    state = states(method, w1, w2)
    y, vjp = jax.vjp(
        lambda x, w1, w2, b1: s24.sparse_ffn(x, w1, w2, method, state, KEY, b1=b1), x, w1, w2, b1
    )
    gradients = vjp(jnp.ones_like(y))
    assert y.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float16]


def test_float64():
    """Every result, the bias gradient included, is as exact as float64 allows."""
    method = METHODS["FST None"]
    with jax.enable_x64(True):
        rng = np.random.default_rng(8)
        shapes = ((T, d), (d, f), (f, out), (f,), (T, out))
        x, w1, w2, b1, dy = (jnp.asarray(rng.normal(size=s)) for s in shapes)
        state = states(method, w1, w2)
        y, vjp = jax.vjp(lambda x, w1, w2, b1: s24.sparse_ffn(x, w1, w2, method, state, b1=b1), x, w1, w2, b1)
        want = oracle.ffn(x, w1, w2, b1, dy, "squared_relu", cuts("FST None", state, None))
        for name, got in zip(("y", "dx", "dw1", "dw2", "db1"), (y, *vjp(dy)), strict=True):
            assert got.dtype == jnp.float64
            oracle.assert_close(got, want[name], "float64", K=f, roundings=ROUNDINGS, name=name)


@pytest.mark.parametrize("lead", [(), (2, 6), (0,)])
def test_leading_dimensions(lead):
    method = METHODS["STE"]
    x, w1, w2 = oracle.integers(8, "float32", (*lead, d), (d, f), (f, out), largest=2)
    y = s24.sparse_ffn(x, w1, w2, method, activation="relu")
    hidden = np.maximum(oracle.wide(x) @ oracle.top2(oracle.wide(w1), 0), 0)
    np.testing.assert_array_equal(y, hidden @ oracle.top2(oracle.wide(w2), 0))


# ---- bad input

W1, W2 = jnp.ones((d, f)), jnp.ones((f, out))
STATE = {"w1": {"mask": jnp.ones((d, f), bool)}, "w2": {"mask": jnp.ones((f, out), bool)}}
BAD = {
    "activation": (
        ValueError,
        r"activation 'tanh' is unknown; use one of squared_relu, relu",
        {"activation": "tanh"},
    ),
    "method by name": (TypeError, r"sparse_ffn: method must be one of s24.methods", {"method": "FST"}),
    "dtype": (TypeError, r"sparse_ffn: w2 has dtype int32", {"w2": jnp.ones((f, out), int)}),
    "chain": (ValueError, r"w2 of shape \(16, 8\) takes 16 features.*24", {"w2": jnp.ones((16, out))}),
    "bias": (ValueError, r"b1 has shape \(8,\), w1 of shape \(16, 24\) needs \(24,\)", {"b1": jnp.ones(8)}),
    "bias for broadcasting": (ValueError, r"b1 has shape \(1,\)", {"b1": jnp.ones(1)}),
    "no key": (ValueError, r"pass key=", {"key": None}),
    "no state": (ValueError, r"state\['w1'\]\['mask'\]", {"state": None}),
    "flat state": (ValueError, r"state\['w1'\]\['mask'\]", {"state": STATE["w1"]}),
    "half of the state": (ValueError, r"state\['w2'\]\['mask'\]", {"state": {"w1": STATE["w1"]}}),
    "states swapped": (
        ValueError,
        r"state\['w1'\]\['mask'\] is bool \(24, 8\).*\(16, 24\)",
        {"state": {"w1": STATE["w2"], "w2": STATE["w1"]}},
    ),
    "groups": (
        ValueError,
        r"operand w2 of product F2 of shape \(22, 8\) has size 22 along axis -2",
        {"w1": jnp.ones((d, 22)), "w2": jnp.ones((22, out)), "method": s24.methods.STE(), "state": None},
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_and_says_what_to_do(case):
    error, message, arguments = BAD[case]
    arguments = {"method": METHODS["FST exact"], "state": STATE, "key": KEY, "w1": W1, "w2": W2} | arguments
    with pytest.raises(error, match=message):
        s24.sparse_ffn(jnp.ones((T, d)), **arguments)


def test_tokens_that_are_no_multiple_of_four():
    log = Log()
    method = Spied(METHODS["FST exact"], log)
    x, w1, w2 = oracle.matrices(9, "float32", (10, d), (d, f), (f, out))
    state = states(method, w1, w2)
    y = s24.sparse_ffn(x, w1, w2, method, state, KEY)
    want = oracle.ffn(x, w1, w2, None, jnp.zeros((10, out)), "squared_relu", cuts("FST None", state, None))
    oracle.assert_close(y, want["y"], "float32", K=f, roundings=ROUNDINGS)
    log.clear()
    with pytest.raises(
        ValueError,
        match=r"sparse_ffn: the operand dy3 of product B2 of shape \(10, 8\) has size 10 along axis -2",
    ):
        jax.grad(lambda w: s24.sparse_ffn(x, w, w2, method, state, KEY).sum())(w1)
    assert not log, "no sparsifier may run before the check"
    jax.grad(lambda w: s24.sparse_ffn(x, w, w2, METHODS["FST None"], state).sum())(w1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        s24.methods.Activation24(dense_share=0.0),
        s24.methods.Venom(v=16, m=4, clusters=4, columns="cluster", weights="dense", dense_operand="dense"),
    ],
    ids=["Activation24", "Venom"],
)
def test_blocks_of_tokens_are_as_many_calls(method):
    """Sums of whole numbers are exact. How the blocks of Venom are filled up depends on their tokens."""
    rng = np.random.default_rng(3)
    x, w1, w2, dy = (
        jnp.asarray(rng.integers(-3, 4, s), jnp.float32) for s in ((32, d), (d, 32), (32, d), (32, d))
    )
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}
    if method.router:
        state["w1"] |= {
            "centroids": jnp.asarray(rng.normal(size=(d, 4)), jnp.float32),
            "arranged": jnp.array(True),
        }

    def gradients(method, x, dy):
        def loss(x, w1, w2):
            y = s24.sparse_ffn(x, w1, w2, method, state, implementation="ffi")
            return (y * dy).sum(), y

        (dx, *dw), y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, w1, w2)
        return (y, dx), dw

    blocks = jax.jit(lambda x, dy: gradients(dataclasses.replace(method, token_blocks=2), x, dy))
    call = jax.jit(lambda x, dy: gradients(method, x, dy))
    rows, sums = zip(*(call(x[i:][:16], dy[i:][:16]) for i in (0, 16)), strict=True)
    got_rows, got_sums = blocks(x, dy)
    for got, *parts in zip(got_rows, *rows, strict=True):
        np.testing.assert_array_equal(got, np.concatenate(parts))
    for got, *parts in zip(got_sums, *sums, strict=True):
        np.testing.assert_array_equal(got, sum(parts))
    with pytest.raises(ValueError, match=r"has 30 tokens, which token_blocks=4 does not divide"):
        s24.sparse_ffn(x[:30], w1, w2, dataclasses.replace(method, token_blocks=4), state)


def test_statistics_of_blocks_of_tokens():
    method = s24.methods.Activation24(dense_share=0.0)
    x, w1, *_ = oracle.matrices(1, "float32", (32, d), (d, f))
    stats = jax.jit(lambda x, method: s24.activation_stats(x, w1, method), static_argnums=1)
    halves = [stats(x[i:][:16], method) for i in (0, 16)]
    both = stats(x, dataclasses.replace(method, token_blocks=2))
    density, lost = ([half[name] for half in halves] for name in ("density", "F2_lost"))
    np.testing.assert_allclose(both["density"], np.mean(density), rtol=1e-6)
    np.testing.assert_allclose(both["F2_lost"], np.average(lost, weights=density), rtol=1e-6)
    assert both.keys() == halves[0].keys() and 0 < both["F2_lost"] < 1
