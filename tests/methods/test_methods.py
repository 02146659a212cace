"""The table, the state and the hooks of every method."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.engine.operand import Request
from jax_sparse24.engine.plan import FFN, LINEAR, Row
from jax_sparse24.engine.sparsifiers import MVUE, DenseValues, Masked, Soft, Top2
from jax_sparse24.methods.base import Decay, Freeze, Method, Training

KINDS = [
    kind
    for kind in vars(s24.methods).values()
    if isinstance(kind, type) and issubclass(kind, Method) and kind is not Method
]
# Options that keep tests of these methods small.
SMALL = {"BiMask": {"trials": 2}, "Venom": {"v": 16, "m": 8}}
METHODS = [
    *(kind(**SMALL.get(kind.__name__, {})) for kind in KINDS),
    s24.methods.FST(mvue="approximate", decay=0.0),
    s24.methods.FST(mvue=None, refresh_every=1, dense_fraction=0),
    s24.methods.SSTE(scale="dynamic", mvue="exact"),
    s24.methods.SSTE(fp8="row"),
    s24.methods.SSTE(fp8="tensor", fp8_backward="e4m3"),
    s24.methods.SSTE(fp8="delayed", fp8_backward="e4m3"),
    s24.methods.FST(fp8="tensor"),
    s24.methods.FST(fp8="delayed", mask="double-pruned"),
    s24.methods.FST(mask="greedy", mvue="uniform"),
    s24.methods.FST(mask="double-pruned", mvue="paired"),
    s24.methods.SRSTE(n=1, m=8, decay_on="weights"),
    s24.methods.Activation24(soft_weights=True, backward_mask="redraw"),
    s24.methods.SLoPe(mask="random", rank=4, adapter_share=1.0),
    s24.methods.AST(slorb=16, distill=0.0),
]
FST = s24.methods.FST
STORED = Masked("mask", "transposable mask")


def weight(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_methods_are_static_values(method):
    """Frozen, hashable and equal by value, hence usable as static arguments of jit."""
    twin = dataclasses.replace(method)
    assert twin is not method
    assert (twin, hash(twin)) == (method, hash(method))
    assert all(method != other for other in METHODS if other is not method)
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, 1)
    assert method.linear_plan() == twin.linear_plan()
    hash(method.linear_plan()), hash(method.ffn_plan())


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_tables_name_products_of_their_engine(method):
    assert {name for name, _ in method.linear_plan().rows} <= set(LINEAR)
    assert {name for name, _ in method.ffn_plan().rows} <= set(FFN)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_refresh_keeps_the_shape_of_the_state(method):
    """Refreshing may happen in a traced branch, so shapes and dtypes are those of init."""
    w = weight(3, 8, 16)
    state = method.init(w)
    new = method.refresh(state, w * 2 + 1)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == jax.tree.map(
        lambda a: (a.shape, a.dtype), state
    )


@pytest.mark.slow
@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_refresh_of_weights_that_are_not_finite_keeps_the_state(method, broken):
    """Of stacked matrices each on its own, under jit too."""
    w = jnp.stack([weight(8, 16), weight(8, 16) + 1])
    state, later = method.init(w), -w[:, ::-1]
    refresh = jax.jit(method.refresh)
    new, expected = refresh(state, later.at[0, 3, 2].set(broken)), refresh(state, later)
    for name, value in new.items():
        np.testing.assert_array_equal(value[0], state[name][0])
        np.testing.assert_array_equal(value[1], expected[name][1])


def test_dense():
    method = s24.methods.Dense()
    assert (method.linear_plan().rows, method.ffn_plan().rows) == ((), ())
    assert (method.init(weight(8, 8)), method.fresh_mask(weight(8, 8))) == ({}, None)
    assert (method.training(10), method.refresh_every, method.stochastic) == (Training(), 0, False)
    assert method.schedule(10) == s24.Schedule((s24.Phase("train", 10, sparse=False),))
    assert isinstance(method, Method)


def test_ste():
    method = s24.methods.STE()
    prune = Top2()
    assert dict(method.linear_plan().rows) == {
        "fwd": Row("w", prune),
        "dgrad": Row("w", DenseValues(prune, axis=-2)),
    }
    assert dict(method.ffn_plan().rows) == {
        "F1": Row("w1", prune),
        "F2": Row("w2", prune),
        "B1": Row("w2", DenseValues(prune, axis=-2)),
        "B3": Row("w1", DenseValues(prune, axis=-2)),
    }
    assert (method.training(9), method.refresh_every, method.stochastic, method.init(weight(8, 8))) == (
        Training(),
        0,
        False,
        {},
    )
    assert method.schedule(10) == s24.Schedule((s24.Phase("train", 10, sparse=True),))
    w = weight(8, 16)
    np.testing.assert_array_equal(method.fresh_mask(w), s24.mask24(w, 0))


@pytest.mark.parametrize(("mvue", "exact"), [("exact", True), ("approximate", False), (None, None)])
def test_fst_table(mvue, exact):
    method = s24.methods.FST(mvue=mvue)
    linear = {"fwd": Row("w", STORED), "dgrad": Row("w", STORED)}
    ffn = {"F1": Row("w1", STORED), "F2": Row("w2", STORED), "B1": Row("w2", STORED), "B3": Row("w1", STORED)}
    if mvue:
        linear["wgrad"] = Row("dy", MVUE(exact))
        ffn |= {"B2": Row("dy3", MVUE(exact)), "B4": Row("dy1", MVUE(exact))}
    assert dict(method.linear_plan().rows) == linear
    assert dict(method.ffn_plan().rows) == ffn
    assert method.stochastic == (mvue is not None)


def test_sste_table_and_scale():
    method = s24.methods.SSTE()
    for exact, option in ((True, {}), (False, {"mvue": "approximate"})):
        assert dict(s24.methods.SSTE(**option).linear_plan().rows) == {
            "fwd": Row("w", Soft()),
            "dgrad": Row("w", DenseValues(Soft(), axis=-2)),
            "wgrad": Row("dy", MVUE(exact=exact)),
        }
    assert (method.refresh_every, method.training(9), method.stochastic) == (0, Training(), True)
    assert [phase.sparse for phase in method.schedule(10).phases] == [True]
    # 1.4845 for a Gaussian of any size (section 5); 1.4836 with two million groups.
    w = weight(2, 512, 512)
    scales = method.init(w * jnp.asarray([1.0, 1e-3])[:, None, None])["scale"]
    np.testing.assert_allclose(scales, [1.484, 1.484], atol=0.01)
    soft = np.asarray(s24.soft24(w[0], 0), np.float64)
    best = (np.asarray(w[0], np.float64) * soft).sum() / (soft**2).sum()
    np.testing.assert_allclose(scales[0], best, rtol=1e-5)
    assert method.init(jnp.zeros((8, 8)))["scale"] == 1
    assert s24.methods.SSTE(scale="unit").init(w)["scale"].tolist() == [1, 1]
    dynamic = s24.methods.SSTE(scale="dynamic")
    assert dynamic.refresh_every == 1
    np.testing.assert_array_equal(dynamic.refresh({"scale": scales}, w)["scale"], dynamic.init(w)["scale"])
    with pytest.raises(ValueError, match="scale='fixed' is unknown; use one of 'frozen', 'dynamic', 'unit'"):
        s24.methods.SSTE(scale="fixed")


def test_sste_gradient_is_straight_through_without_the_scale():
    """Forward, the gradient of the input and that of the scaled weight, given unchanged to the weight."""
    method, x, dy = s24.methods.SSTE(mvue=None), weight(12, 16, seed=1), weight(12, 8, seed=2)
    w = weight(16, 8)
    state = method.init(w)
    y, vjp = jax.vjp(lambda x, w: s24.sparse_dot(x, w, method, state), x, w)
    values = s24.soft24(w, 0) * state["scale"]
    dx, dw = vjp(dy)
    for got, want in ((y, x @ values), (dx, dy @ values.T), (dw, x.T @ dy)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_fst_defaults_are_the_papers():
    method = s24.methods.FST()
    assert (method.refresh_every, method.mvue, method.dense_fraction, method.decay) == (
        40,
        "exact",
        1 / 6,
        6e-5,
    )
    assert s24.methods.FST(decay=2e-4).decay == 2e-4
    with pytest.raises(TypeError):
        s24.methods.FST(6e-5)  # by keyword only: an order of four numbers is no interface


@pytest.mark.parametrize("shape", [(8, 16), (3, 8, 12), (2, 2, 4, 4)])
def test_fst_state_is_the_transposable_mask(shape):
    method = s24.methods.FST()
    w, later = weight(*shape), weight(*shape, seed=1)
    state = method.init(w)
    assert list(state) == ["mask"]
    assert (state["mask"].dtype, state["mask"].shape) == (jnp.bool_, shape)
    np.testing.assert_array_equal(state["mask"], s24.transposable_mask24(w))
    np.testing.assert_array_equal(method.refresh(state, later)["mask"], s24.transposable_mask24(later))
    np.testing.assert_array_equal(method.fresh_mask(later), s24.transposable_mask24(later))
    assert not np.array_equal(method.fresh_mask(later), state["mask"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mvue": "exakt"}, r"mvue='exakt' is unknown; use one of 'exact', 'approximate', 'biased', "),
        ({"mask": "rows"}, r"mask='rows' is unknown; use one of 'transposable', 'greedy', 'double-pruned', "),
        ({"mvue": False}, r"mvue=False is unknown"),
        ({"decay": -1e-4}, r"decay=-0.0001 must be 0 or positive"),
        ({"decay": math.nan}, r"decay=nan must be 0 or positive"),
        ({"refresh_every": 0}, r"refresh_every=0 must be a whole number of optimiser steps, >= 1"),
        ({"refresh_every": 1.5}, r"refresh_every=1.5 must be a whole number"),
        ({"refresh_every": True}, r"refresh_every=True must be a whole number"),
        ({"dense_fraction": 1.1}, r"dense_fraction=1.1 must lie in \[0, 1\]"),
        ({"dense_fraction": -0.1}, r"dense_fraction=-0.1 must lie in \[0, 1\]"),
        ({"fp8": "column"}, r"fp8='column' is unknown; use one of 'tensor', 'row', 'delayed', None"),
    ],
)
def test_fst_rejects_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match="FST: " + message):
        s24.methods.FST(**arguments)


@pytest.mark.parametrize(
    ("total", "fraction", "sparse", "dense"),
    [
        (300_000, 1 / 6, 250_000, 50_000),  # the paper's GPT-2
        (12, 1 / 6, 10, 2),
        (7, 1 / 6, 6, 1),
        (2, 1 / 6, 2, 0),
        (10, 0, 10, 0),
        (10, 1, 0, 10),
        (10, 0.5, 5, 5),
    ],
)
def test_fst_ends_dense(total, fraction, sparse, dense):
    schedule = s24.methods.FST(dense_fraction=fraction).schedule(total)
    assert schedule.total_steps == total
    phases = [(p.name, p.steps, p.sparse) for p in schedule.phases]
    assert phases == [p for p in (("sparse", sparse, True), ("dense", dense, False)) if p[1]]
    if dense and sparse:
        assert schedule.phase_at(sparse - 1).sparse
        assert not schedule.phase_at(sparse).sparse


# ---- sparsifiers

X = weight(12, 16)
KEY = jax.random.key(3)
MASK = s24.transposable_mask24(X)
REQUEST = Request({"mask": MASK, "other": MASK, "scale": jnp.float32(1.5)}, KEY, None, "packed")
SPARSIFIERS = [
    (Top2(), lambda axis: s24.prune24(X, axis), "top-2 of 4"),
    (Masked(), lambda axis: jnp.where(MASK, X, 0), "stored mask"),
    (Masked("other", "label"), lambda axis: jnp.where(MASK, X, 0), "label"),
    (Soft(), lambda axis: s24.soft24(X, axis) * jnp.float32(1.5), "soft threshold, scaled"),
    (MVUE(), lambda axis: s24.mvue24(KEY, X, axis), "MVUE, exact"),
    (MVUE(exact=False), lambda axis: s24.mvue24(KEY, X, axis, exact=False), "MVUE, approximate"),
]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("by", "want", "label"), SPARSIFIERS, ids=lambda v: v if isinstance(v, str) else "")
def test_sparsifiers_pack_along_the_contraction_axis(by, want, label, axis):
    packed = by(X, axis, REQUEST)
    assert isinstance(packed, s24.Packed24)
    assert (packed.axis, packed.shape) == (axis, X.shape)
    np.testing.assert_array_equal(packed.todense(), want(axis))
    assert str(by) == label
    assert by.stochastic == isinstance(by, MVUE)
    np.testing.assert_array_equal(by(X, axis, dataclasses.replace(REQUEST, form="dense")), want(axis))
    hash(by)


@pytest.mark.parametrize("fixed", [-1, -2])
@pytest.mark.parametrize(("by", "want", "label"), SPARSIFIERS, ids=lambda v: v if isinstance(v, str) else "")
def test_dense_values_are_those_along_the_fixed_axis(by, want, label, fixed):
    values = DenseValues(by, fixed)
    for axis in (-1, -2):
        got = values(X, axis, REQUEST)
        np.testing.assert_array_equal(got, want(fixed))
    assert str(values) == f"values of {label}, dense product"
    assert values.stochastic == by.stochastic
    odd = (4, 6) if fixed == -1 else (6, 4)
    with pytest.raises(ValueError, match=f"the operand of shape .* size 6 along axis {fixed}"):
        values.check("op", odd, -3 - fixed, "operand")


@pytest.mark.parametrize("by", [s for s, _, _ in SPARSIFIERS], ids=str)
def test_sparsifiers_pass_the_implementation_on(by, no_cusparselt):
    with pytest.raises(RuntimeError, match="cusparselt"):
        by(X, -1, dataclasses.replace(REQUEST, implementation="cusparselt"))


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_stored_mask_that_is_not_two_of_four_has_one_meaning(dtype, axis):
    """Whether a product runs dense or packed, and by which implementation, it multiplies what `pack24` keeps:
    of three or four the two largest, of one or none what there is."""
    rng = np.random.default_rng(16)
    w, mask = jnp.asarray(rng.normal(size=(16, 32)), dtype), jnp.asarray(rng.random((16, 32)) < 0.6)
    expected = s24.pack24(w, axis, mask, implementation="reference").todense(implementation="reference")
    assert not np.array_equal(expected, jnp.where(mask, w, 0))
    for implementation in (None, "reference", "ffi"):
        for packed in (False, True):
            values = Masked()(
                w, axis, Request({"mask": mask}, None, implementation, "packed" if packed else "dense")
            )
            values = values.todense() if packed else values
            np.testing.assert_array_equal(values, expected)


def test_a_flipped_bit_of_a_mask_gives_one_result_and_gradient():
    method, rng = s24.methods.AST(), np.random.default_rng(3)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 16), (16, 12)))
    state = method.init(w)
    state["mask"] = state["mask"].at[int(jnp.argmin(state["mask"][:4, 0])), 0].set(True)

    def loss(x, w, implementation):
        return jnp.sum(s24.sparse_dot(x, w, method, state, implementation=implementation) ** 2)

    expected = jax.value_and_grad(loss, (0, 1))(x, w, "reference")
    for implementation in (None, "ffi"):
        got = jax.value_and_grad(loss, (0, 1))(x, w, implementation)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "method", [*(kind(fp8=s) for kind in (s24.methods.SSTE, FST) for s in ("tensor", "row")), FST()], ids=str
)
def test_training_under_strict_promotion(method, dtype):
    with jax.numpy_dtype_promotion("strict"):
        w = weight(8, 16).astype(dtype)
        x, bias = jnp.ones((4, 8), dtype), jnp.zeros(16, dtype)

        def loss(x, w, bias):
            state, key = method.init(w), jax.random.key(0)
            return jnp.sum(s24.sparse_dot(x, w, method, state, key, bias=bias) ** 2)

        gradients = jax.grad(loss, (0, 1, 2))(x, w, bias)
    assert all(jnp.isfinite(g).all() and g.any() and g.dtype == dtype for g in gradients)


@pytest.mark.slow
def test_causal_activations_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        method = s24.methods.Activation24(forward="causal")
        w1, w2 = weight(8, 16), weight(16, 8)
        g = jax.grad(lambda w1: jnp.sum(s24.sparse_ffn(jnp.ones((8, 8)), w1, w2, method)))(w1)
    assert jnp.isfinite(g).all()


NUMBERS = {
    "FST": ("decay", "dense_fraction"),
    "SRSTE": ("decay",),
    "BiMask": ("decay",),
    "AST": ("decay", "distill", "temperature"),
    "SLoPe": ("rank", "adapter_share"),
    "STEP": ("switch", "earliest", "latest"),
    "Activation24": ("dense_share",),
    "Venom": ("sparse_share",),
}


@pytest.mark.parametrize(("name", "field"), [(n, f) for n, fields in NUMBERS.items() for f in fields])
def test_numbers_that_are_none_are_refused_where_they_are_written(name, field):
    """Arrays cannot be hashed, and what is not finite trains nothing."""
    for value in (math.inf, math.nan, jnp.float32(0.1), np.full(2, 0.1), True, None, "half", [0.1]):
        with pytest.raises(ValueError, match=rf"{name}: {field}="):
            getattr(s24.methods, name)(**{field: value})


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_every_option_is_checked(method):
    """No field of any method takes an array, an unhashable value or an object."""
    for field in dataclasses.fields(method):
        for value in (np.zeros(2), {}, object(), jnp.zeros(())):
            with pytest.raises((ValueError, TypeError), match=f"{field.name}"):
                dataclasses.replace(method, **{field.name: value})


def test_counts_are_called_what_they_count():
    with pytest.raises(ValueError, match=r"clusters=0 must be a whole number of clusters, >= 1"):
        s24.methods.Venom(clusters=0)
    with pytest.raises(ValueError, match=r"trials=0 must be a whole number of orders to try, >= 1"):
        s24.methods.BiMask(trials=0)
    with pytest.raises(ValueError, match=r"slorb=-1 must be a whole number of inputs, >= 0"):
        s24.methods.AST(slorb=-1)


def test_what_methods_ask_of_a_training_loop():
    """Of their optimiser: where masked decay acts, and which moment is frozen."""
    methods = s24.methods
    asked = {
        methods.FST(decay=0.1): Training(Decay(0.1)),
        methods.BiMask(decay=0.2): Training(Decay(0.2)),
        methods.SRSTE(decay=0.3, decay_on="weights"): Training(Decay(0.3, on="weights")),
        methods.AST(decay=0.4, decay_steps=7, distill=0.0): Training(Decay(0.4, on="momentum", rise=7)),
        methods.STEP(earliest=0.25, switch="geometric"): Training(freeze=Freeze("geometric", 10)),
        methods.STEP(switch=0.3): Training(freeze=Freeze(None, 4)),
    }
    for method, training in asked.items():
        assert method.training(40) == training


def test_a_distilled_loss_is_the_cross_entropy_of_a_student_who_is_the_teacher():
    method = s24.methods.AST(distill=0.25)
    training, logits = method.training(10), weight(2, 3, 8)
    assert training.teacher == "distill" and hash(training) == hash(method.training(10))
    np.testing.assert_allclose(training.loss(2.0, logits, logits), 1.5, rtol=1e-6)
    assert training.loss(2.0, logits, -logits) > 1.5


@pytest.mark.parametrize(
    "method",
    [
        *METHODS,
        s24.methods.FST(mask="double-pruned"),
        s24.methods.SSTE(scale="unit"),
        s24.methods.Activation24(soft_weights=True),
        *(
            s24.methods.Venom(v=16, m=8, clusters=4, columns=columns, weights=weights)
            for columns in ("data", "statistic", "cluster")
            for weights in ("soft", "dense")
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("role", ["w", "w1", "w2"])
@pytest.mark.parametrize("stack", [(), (3,)])
def test_shapes_of_the_state_are_those_of_init(method, role, stack):
    """Which a call does not run; in bfloat16, too."""
    w = jax.ShapeDtypeStruct((*stack, 16, 32), jnp.bfloat16)
    made = jax.eval_shape(lambda w: method.init(w, role), w)
    said = method.state_shapes(w.shape, role)
    assert {n: (v.shape, v.dtype) for n, v in said.items()} == {
        n: (v.shape, v.dtype) for n, v in made.items()
    }


def test_every_method_with_state_says_its_shapes():
    assert len(KINDS) > 10
    for kind in KINDS:
        stateful = kind.init is not Method.init
        assert (kind.state_shapes is not Method.state_shapes) == stateful, kind.__name__


@pytest.mark.parametrize("steps", ["60", 60.0, True, -1])
@pytest.mark.parametrize("name", ["Dense", "FST", "SLoPe", "STEP", "Activation24", "Venom"])
def test_a_schedule_is_of_a_whole_number_of_steps(name, steps):
    with pytest.raises((TypeError, ValueError), match=rf"{name}.schedule: total_steps.* must be "):
        getattr(s24.methods, name)().schedule(steps)


def test_the_list_of_methods_refuses_widths_that_are_no_numbers():
    with pytest.raises(TypeError, match=r"methods.list: d must be an int, got '768'"):
        s24.methods.list("768")
    with pytest.raises(ValueError, match=r"methods.list: f=0 must be at least 1"):
        s24.methods.list(768, 0)


def test_the_init_of_a_users_method_is_traced_once():
    """For a method, shape and role; with 64-bit types once more, since its dtypes may be others."""
    traced = []

    @dataclasses.dataclass(frozen=True)
    class Counted(Method):
        def init(self, w, role="w"):
            traced.append((w.shape, role))
            return {"scale": jnp.zeros(w.shape[-1:], float)}

    for _ in range(3):
        assert Counted().state_shapes((8, 4))["scale"].dtype == jnp.float32
        Counted().state_shapes((8, 4), "w1")
        Counted().state_shapes((8, 8))
    assert traced == [((8, 4), "w"), ((8, 4), "w1"), ((8, 8), "w")]
    with jax.enable_x64(True):
        assert Counted().state_shapes((8, 4))["scale"].dtype == jnp.float64
