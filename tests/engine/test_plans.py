"""Plans: every operand of every product alone, made-up methods, and tables that cannot be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24 import patterns
from jax_sparse24.dispatch.decision import Decision
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.operand import Sparsifier
from jax_sparse24.engine.plan import FFN, LINEAR, Plan, Row, ffn_plan
from jax_sparse24.engine.sparsifiers import MVUE, Blocks, DenseValues, Masked, Top2
from jax_sparse24.methods.base import Method
from jax_sparse24.ops.features import densest
from jax_sparse24.ops.order import collect
from tests.engine import oracle
from tests.engine.spy import Log, Spied

T, d, f, out = 12, 16, 24, 8
KEY = jax.random.key(5)
# product -> the operands it may have, and the axis (not negative) along which their groups lie.
LINEAR_OPERANDS = {"fwd": {"x": 1, "w": 0}, "dgrad": {"dy": 1, "w": 1}, "wgrad": {"x": 0, "dy": 0}}
FFN_OPERANDS = {
    "F1": {"x": 1, "w1": 0},
    "F2": {"y2": 1, "w2": 0},
    "B1": {"dy3": 1, "w2": 1},
    "B2": {"y2": 0, "dy3": 0},
    "B3": {"dy1": 1, "w1": 1},
    "B4": {"x": 0, "dy1": 0},
}


@dataclasses.dataclass(frozen=True)
class Table(Method):
    """A method that is nothing but its rows, for both engines."""

    rows: tuple = ()

    def linear_plan(self):
        return Plan.of(LINEAR, **dict(self.rows))

    def ffn_plan(self):
        return Plan.of(FFN, **dict(self.rows))


@dataclasses.dataclass(frozen=True)
class OnlyLinear(Table):
    def ffn_plan(self):
        return Plan()


@dataclasses.dataclass(frozen=True)
class OnlyFFN(Table):
    def linear_plan(self):
        return Plan()


def run_ffn(rows, dtype="float32", activation="silu"):
    """Results of the engine and of the oracle, for a table {product: (operand, sparsifier)}."""
    log = Log()
    method = Spied(OnlyFFN(tuple((p, Row(*row)) for p, row in rows.items())), log)
    x, w1, w2, dy3, b1 = oracle.matrices(3, dtype, (T, d), (d, f), (f, out), (T, out), (f,))
    y, vjp = jax.vjp(
        lambda *a: s24.sparse_ffn(*a[:3], method, None, KEY, b1=a[3], activation=activation), x, w1, w2, b1
    )
    got = dict(zip(("y", "dx", "dw1", "dw2", "db1"), (y, *vjp(dy3)), strict=True))
    cuts = {(p, operand): cut(p, by, log, FFN_OPERANDS) for p, (operand, by) in rows.items()}
    return got, oracle.ffn(x, w1, w2, b1, dy3, activation, cuts)


def cut(product, by, log, operands):
    if isinstance(by, MVUE):
        x, axis, _ = log[product]
        key = jax.random.fold_in(KEY, list(operands).index(product))
        return oracle.drawn(s24.mvue24(key, x, axis, by.exact))
    return oracle.top2


def cases(operands):
    return [(p, o, by) for p in operands for o in operands[p] for by in (Top2(), MVUE(exact=False))]


@pytest.mark.parametrize(("product", "operand", "by"), cases(FFN_OPERANDS), ids=str)
def test_one_sparse_operand_in_an_ffn(product, operand, by):
    got, want = run_ffn({product: (operand, by)})
    for name, value in got.items():
        oracle.assert_close(value, want[name], "float32", K=f, roundings=16, name=name)
    # The oracle tells this plan from every other: without the cut, at least one result is elsewhere.
    dense = run_ffn({})[1]
    assert any(
        np.abs(want[n].value - dense[n].value).max() > 0.05 * np.abs(dense[n].value).max() for n in got
    )


@pytest.mark.parametrize(("product", "operand", "by"), cases(LINEAR_OPERANDS), ids=str)
def test_one_sparse_operand_in_a_linear_layer(product, operand, by):
    log = Log()
    method = Spied(OnlyLinear(((product, Row(operand, by)),)), log)
    x, w, dy = oracle.matrices(4, "float32", (T, d), (d, f), (T, f))
    y, vjp = jax.vjp(lambda x, w: s24.sparse_dot(x, w, method, None, KEY), x, w)
    dx, dw = vjp(dy)
    want = oracle.linear(x, w, dy, {(product, operand): cut(product, by, log, LINEAR_OPERANDS)})
    for name, got in {"y": y, "dx": dx, "dw": dw}.items():
        oracle.assert_close(got, want[name], "float32", K=f, roundings=1, name=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_activations_in_four_products_at_once(dtype):
    got, want = run_ffn(
        {"F2": ("y2", Top2()), "B2": ("y2", Top2()), "B3": ("dy1", Top2()), "B4": ("dy1", Top2())},
        dtype,
        "squared_relu",
    )
    for name in (
        ("y", "dw2", "db1") if dtype == "bfloat16" else got
    ):  # rounding may change what is top-2 of dY1
        oracle.assert_close(got[name], want[name], dtype, K=f, roundings=16, name=name)


@pytest.mark.parametrize("rank", ["density", "lost"])
@pytest.mark.parametrize(("product", "operand"), [("B2", "y2"), ("B4", "dy1")])
@pytest.mark.parametrize("by", [Top2(), Blocks(16, 8)], ids=str)
def test_dense_features_beside_gathered_ones(by, product, operand, rank, implementation):
    """Features stay dense wherever the cut moves them, and the result has all in their first order."""
    x, dense = oracle.matrices(2, "float32", (32, 64), (32, d))
    x, share = jnp.maximum(x, 0), 0.25
    row = Row(operand, by, gather_features=True, dense_share=share, rank=rank)
    execution = Execution("test", "ffn", Plan.of(FFN, **{product: row}), implementation, "squared_relu")
    arrays = {name: x if name == operand else dense for name, _ in FFN[product]}
    shapes = {name: array.shape for name, array in arrays.items()}
    decision = execution.decisions([product], shapes, x.dtype)[product]
    got = execution.multiply(product, execution.cut(product, arrays, {}, None, decision))
    cut = execution.cut(product, arrays, {}, None, Decision("dense", "for its values"))
    cut = collect(cut.left if product == "B2" else cut.right, by.group, -1)
    features = densest(x, share, rank)
    want = cut.at[:, features].set(x[:, features]).T @ dense
    np.testing.assert_allclose(got if product == "B2" else got.T, want, rtol=1e-5, atol=1e-5)


def test_all_six_products_draw_their_own_noise():
    rows = {p: (next(iter(o)), MVUE()) for p, o in FFN_OPERANDS.items()}
    got, want = run_ffn(rows)
    for name, value in got.items():
        oracle.assert_close(value, want[name], "float32", K=f, roundings=16, name=name)


# ---- a paper is one file: everything below is what such a file holds


@dataclasses.dataclass(frozen=True)
class Chosen(Sparsifier):
    """The two of every four that the state names, scaled by a number from the state."""

    def __call__(self, x, axis, request):
        scaled = x * request.state["gain"].astype(x.dtype)
        return s24.pack24(scaled, axis, request.state["pattern"], implementation=request.implementation)

    def __str__(self):
        return "chosen"


@dataclasses.dataclass(frozen=True)
class Rounded(Sparsifier):
    """Sparsifiers may return arrays, too: whole numbers in a dense product; groups along the last axis."""

    def check(self, op, shape, axis, what):
        patterns.check_divides(op, shape, -1, what=what)

    def __call__(self, x, axis, request):
        return jnp.round(x)

    def __str__(self):
        return "whole numbers"


@dataclasses.dataclass(frozen=True)
class MadeUp(Method):
    """fwd: the chosen weights; dgrad: their dense values; wgrad: X in whole numbers."""

    gain: float = 1.0
    refresh_every: int = 3
    decay: float = 0.5

    def linear_plan(self):
        return Plan.of(
            LINEAR,
            fwd=Row("w", Chosen()),
            dgrad=Row("w", DenseValues(Chosen(), axis=-2)),
            wgrad=Row("x", Rounded()),
        )

    def init(self, w, role="w"):
        rows = jnp.arange(w.shape[-2]) % 4 < 2
        return {"pattern": jnp.broadcast_to(rows[:, None], w.shape), "gain": jnp.float32(self.gain)}

    def refresh(self, state, w):
        return state | {"gain": state["gain"] + 1}


def chosen(gain):
    def cut(a, axis):
        return np.where((np.arange(a.shape[0]) % 4 < 2)[:, None], a * gain, 0)

    return cut


def whole(a, axis):
    return np.round(a)


def test_a_made_up_method_runs_in_the_linear_engine():
    method = MadeUp(gain=3.0)
    x, w, dy = oracle.matrices(6, "float32", (T, d), (d, f), (T, f))
    state = method.init(w)
    y, vjp = jax.jit(
        lambda x, w: (lambda r: (r[0], r[1](dy)))(
            jax.vjp(lambda x, w: s24.sparse_dot(x, w, method, state), x, w)
        )
    )(x, w)
    cuts = {("fwd", "w"): chosen(3.0), ("dgrad", "w"): chosen(3.0), ("wgrad", "x"): whole}
    want = oracle.linear(x, w, dy, cuts)
    for name, got in zip(("y", "dx", "dw"), (y, *vjp), strict=True):
        oracle.assert_close(got, want[name], "float32", K=f, roundings=2, name=name)


def test_a_made_up_method_runs_in_the_ffn_engine():
    """Both matrices, each with its own state; y2 goes whole in B2 because it is the x of the second layer."""
    method = MadeUp(gain=3.0)
    x, w1, w2, dy3 = oracle.matrices(7, "float32", (T, d), (d, f), (f, out), (T, out))
    state = {"w1": method.init(w1), "w2": MadeUp(gain=-2.0).init(w2)}
    y, vjp = jax.vjp(lambda *a: s24.sparse_ffn(*a, method, state, activation="relu"), x, w1, w2)
    first, second = chosen(3.0), chosen(-2.0)
    cuts = {("F1", "w1"): first, ("B3", "w1"): first, ("F2", "w2"): second, ("B1", "w2"): second}
    cuts |= {("B4", "x"): whole, ("B2", "y2"): whole}
    want = oracle.ffn(x, w1, w2, None, dy3, "relu", cuts)
    for name, got in zip(("y", "dx", "dw1", "dw2"), (y, *vjp(dy3)), strict=True):
        oracle.assert_close(got, want[name], "float32", K=f, roundings=16, name=name)


def test_a_made_up_method_is_checked_like_any_other():
    method = MadeUp()
    w = jnp.ones((d, f))
    with pytest.raises(ValueError, match=r"state\['pattern'\] is missing"):
        s24.sparse_dot(jnp.ones((T, d)), w, method, {"gain": jnp.float32(1)})
    with pytest.raises(
        ValueError, match=r"operand w of product fwd of shape \(6, 8\) has size 6 along axis -2"
    ):
        w = jnp.ones((6, 8))
        s24.sparse_dot(jnp.ones((T, 6)), w, method, method.init(w))

    # Its groups lie along the last axis, whatever is contracted: here features, in a product over tokens.
    odd = OnlyLinear((("wgrad", Row("x", Rounded())),))
    with pytest.raises(
        ValueError, match=r"operand x of product wgrad of shape \(12, 6\) has size 6 along axis -1"
    ):
        jax.grad(lambda w: s24.sparse_dot(jnp.ones((T, 6)), w, odd).sum())(jnp.ones((6, 8)))


@dataclasses.dataclass(frozen=True)
class Astray(Sparsifier):
    """A faulty sparsifier: it packs along the other axis."""

    def check(self, op, shape, axis, what):
        """All fits."""

    def __call__(self, x, axis, request):
        return s24.pack24(x, -3 - axis)


@pytest.mark.parametrize("product", ["fwd", "dgrad", "wgrad"])
def test_a_sparsifier_that_packs_along_the_wrong_axis_is_caught(product):
    """With square operands the shapes agree, so nothing else would notice."""
    operand = {"fwd": "w", "dgrad": "w", "wgrad": "dy"}[product]
    method = OnlyLinear(((product, Row(operand, Astray())),))
    with pytest.raises(
        ValueError,
        match=rf"packed operand {operand} of product {product} along axis -.; the product contracts",
    ):
        jax.grad(lambda x, w: s24.sparse_dot(x, w, method).sum(), (0, 1))(jnp.ones((8, 8)), jnp.ones((8, 8)))


# ---- tables


@pytest.mark.parametrize(
    ("products", "rows", "message"),
    [
        (
            LINEAR,
            {"F1": Row("w", Top2())},
            r"product 'F1' does not exist; the products are fwd, dgrad, wgrad",
        ),
        (
            FFN,
            {"fwd": Row("w1", Top2())},
            r"product 'fwd' does not exist; the products are F1, F2, B1, B2, B3, B4",
        ),
        (LINEAR, {"fwd": Row("dy", Top2())}, r"product fwd has operands x and w, not 'dy'"),
        (LINEAR, {"dgrad": Row("x", Top2())}, r"product dgrad has operands dy and w, not 'x'"),
        (LINEAR, {"wgrad": Row("w", Top2())}, r"product wgrad has operands x and dy, not 'w'"),
        (FFN, {"F1": Row("y2", Top2())}, r"product F1 has operands x and w1, not 'y2'"),
        (FFN, {"F2": Row("w1", Top2())}, r"product F2 has operands y2 and w2, not 'w1'"),
        (FFN, {"B1": Row("dy1", Top2())}, r"product B1 has operands dy3 and w2, not 'dy1'"),
        (FFN, {"B2": Row("dy1", Top2())}, r"product B2 has operands y2 and dy3, not 'dy1'"),
        (FFN, {"B3": Row("w2", Top2())}, r"product B3 has operands dy1 and w1, not 'w2'"),
        (FFN, {"B4": Row("w", Top2())}, r"product B4 has operands x and dy1, not 'w'"),
    ],
)
def test_impossible_rows_raise(products, rows, message):
    with pytest.raises(ValueError, match=message):
        Plan.of(products, **rows)


def test_an_ffn_plan_treats_both_matrices_alike():
    stored, noise = Masked(), MVUE()
    linear = Plan.of(LINEAR, fwd=Row("w", stored), dgrad=Row("w", Top2()), wgrad=Row("dy", noise))
    assert dict(ffn_plan(linear).rows) == {
        "F1": Row("w1", stored),
        "B3": Row("w1", Top2()),
        "B4": Row("dy1", noise),
        "F2": Row("w2", stored),
        "B1": Row("w2", Top2()),
        "B2": Row("dy3", noise),
    }
    of_x = ffn_plan(Plan.of(LINEAR, wgrad=Row("x", Top2())))
    assert dict(of_x.rows) == {"B4": Row("x", Top2()), "B2": Row("y2", Top2())}


def test_a_plan_knows_whether_it_draws():
    assert Plan.of(LINEAR, wgrad=Row("dy", MVUE())).stochastic
    assert not Plan.of(LINEAR, fwd=Row("w", Top2())).stochastic
    assert not Plan().stochastic
    assert Plan.of(LINEAR).row("fwd") is None


# ---- states that do not belong


def test_states_that_do_not_belong_are_refused_with_the_right_call():
    x, w1, w2 = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((16, 8))
    fst, soft = s24.methods.AST(), s24.methods.SSTE(mvue=None)
    both = {"w1": fst.init(w1, "w1"), "w2": fst.init(w2, "w2")}
    of_one = r"pass state=method.init\(w\) of this AST"
    of_two = r'pass state=\{"w1": method.init\(w1, "w1"\), "w2": method.init\(w2, "w2"\)\} of this AST'
    for state, message in (
        (None, rf"state\['mask'\] is missing; {of_one}"),
        (soft.init(w1), rf"state\['mask'\] is missing; {of_one}"),
        ({"mask": jnp.ones((16, 8), bool)}, rf"is bool \(16, 8\), a weight of shape \(8, 16\).*{of_one}"),
        (fst.init(w1) | soft.init(w1), rf"state\['scale'\] is no state that this method has; {of_one}"),
    ):
        with pytest.raises(ValueError, match=f"sparse_dot: .*{message}"):
            s24.sparse_dot(x, w1, fst, state)
    for state, message in (
        (None, rf"state\['w1'\]\['mask'\] is missing; {of_two}"),
        (fst.init(w1), rf"state\['w1'\]\['mask'\] is missing; {of_two}"),
        ({"w1": both["w1"]}, rf"state\['w2'\]\['mask'\] is missing; {of_two}"),
        (both | {"w3": {}}, rf"'w3' is no state that this method has; {of_two}"),
    ):
        with pytest.raises(ValueError, match=f"sparse_ffn: .*{message}"):
            s24.sparse_ffn(x, w1, w2, fst, state)
    with pytest.raises(ValueError, match=r"state\['mask'\] is no state that this method has; .* of this STE"):
        s24.sparse_dot(x, w1, s24.methods.STE(), fst.init(w1))
    for state in (both["w1"]["mask"], [both], "mask"):
        with pytest.raises(TypeError, match=r"sparse_dot: state must be a dict of arrays, got"):
            s24.sparse_dot(x, w1, fst, state)
    with pytest.raises(TypeError, match=r"state\['w1'\] must be a dict of arrays, got .*; pass state="):
        s24.sparse_ffn(x, w1, w2, fst, {"w1": both["w1"]["mask"], "w2": both["w2"]})
    with pytest.raises(TypeError, match=r"state\['mask'\] must be an array, got None; pass state="):
        s24.sparse_dot(x, w1, fst, {"mask": None})
    with pytest.raises(ValueError, match=r"activation_stats: activation 'tanh' is unknown"):
        s24.activation_stats(x, w1, fst, both, activation="tanh")
    with pytest.raises(TypeError, match=r"sparse_dot: bias has dtype int32"):
        s24.sparse_dot(x, w1, fst, both["w1"], bias=jnp.ones(16, int))
    with pytest.raises(ValueError, match=r"activation_stats: state\['w1'\]\['mask'\] is missing"):
        s24.activation_stats(x, w1, fst)


def test_a_layer_of_an_ffn_runs_alone_with_its_state():
    ffn = s24.nn.FFN(8, 16, method=s24.methods.Activation24(soft_weights=True), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(ffn.up(jnp.ones((4, 8))), jnp.ones((4, 8)) @ ffn.up.kernel[...], rtol=1e-5)


def test_a_class_is_no_method():
    for call in (
        lambda: s24.sparse_dot(jnp.ones((4, 8)), jnp.ones((8, 8)), s24.methods.FST),
        lambda: s24.nn.Linear(8, 8, method=s24.methods.FST, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(TypeError, match=r"got the class; call it: FST\(\)"):
            call()
