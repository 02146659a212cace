"""SRSTE, STEP, BiMask, the variants of FST and FP8 against products written out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24 import choices
from jax_sparse24.dispatch import decision
from jax_sparse24.engine.float8 import FORMATS, All, Float8
from jax_sparse24.engine.operand import Request
from jax_sparse24.ops.mvue import random24
from tests.engine import oracle

T, d, f = 12, 16, 24
KEY = jax.random.key(7)
NOISE = jax.random.fold_in(KEY, 2)  # of wgrad


def masked_nm(n, m):
    def cut(a, axis):
        g = np.moveaxis(a, axis, -1)
        order = np.argsort(-np.abs(g.reshape(-1, m)), axis=-1, kind="stable")
        keep = np.zeros(order.shape, bool)
        np.put_along_axis(keep, order[:, :n], True, axis=-1)
        return np.moveaxis(np.where(keep.reshape(g.shape), g, 0), -1, axis)

    return cut


def twice(a, axis):
    return oracle.top2(oracle.top2(a, 0), 1)


def reordered(order):
    def cut(a, axis):
        out = np.zeros_like(a)
        out[:, order] = oracle.top2(oracle.top2(a, 0)[:, order], 1)
        return out

    return cut


def in_8_bits(name, cut=lambda a, axis: a, row=False):
    """Scaled to the largest number of the format, cast, and back; a row is what one result sums up."""

    def rounded(a, axis):
        a = np.asarray(cut(a, axis), np.float32)
        top = np.abs(a).max(axis if row else None, keepdims=True)
        scale = np.float32(jnp.finfo(FORMATS[name]).max) / np.where(top > 0, top, 1).astype(np.float32)
        return (a * scale).astype(FORMATS[name]).astype(np.float32) / scale

    return rounded


def delayed(exponent=None):
    """Scaled by the power of two that takes magnitudes of 2^exponent to 2^7, cut at 448, cast, and back."""

    def rounded(a, axis):
        a = np.asarray(a, np.float32)
        scale = np.float32(2) ** (7 - (np.floor(np.log2(np.abs(a).max())) if exponent is None else exponent))
        return np.clip(a * scale, -448, 448).astype(FORMATS["e4m3"]).astype(np.float32) / scale

    return rounded


def both(fwd, dgrad):
    return lambda state, dy: {("fwd", "w"): fwd, ("dgrad", "w"): dgrad}


def float8(row, backward="e5m2", exact=True):
    def cuts(state, dy):
        values = lambda a, axis: np.asarray(s24.soft24(jnp.float32(a), 0) * state["scale"])  # noqa: E731
        drawn = s24.mvue24(NOISE, dy, 0, exact=exact)
        e4m3, behind = ({"name": name, "row": row} for name in ("e4m3", backward))
        found = {
            ("fwd", "w"): in_8_bits(cut=values, **e4m3),
            ("fwd", "x"): in_8_bits(**e4m3),
            ("dgrad", "w"): in_8_bits(cut=values, **behind),
            ("dgrad", "dy"): in_8_bits(**behind),
        }
        if backward == "e4m3":
            return {**found, ("wgrad", "dy"): oracle.drawn(drawn)}
        found["wgrad", "dy"] = in_8_bits(cut=oracle.drawn(drawn), **behind)
        return {**found, ("wgrad", "x"): in_8_bits(**behind)}

    return cuts


def fst_float8(row, dense=None):
    """The weight gradient is of operands that are not rounded. dense: of activations and gradients."""

    def cuts(state, dy):
        rounded = {"name": "e4m3", "row": row}
        values = in_8_bits(cut=oracle.masked(state["mask"]), **rounded)
        return {
            ("fwd", "w"): values,
            ("fwd", "x"): dense or in_8_bits(**rounded),
            ("dgrad", "w"): values,
            ("dgrad", "dy"): dense or in_8_bits(**rounded),
            ("wgrad", "dy"): oracle.drawn(s24.mvue24(NOISE, dy, 0)),
        }

    return cuts


def cut_of(sparse_dy):
    def cuts(state, dy):
        by = oracle.masked(state["mask"])
        return {("fwd", "w"): by, ("dgrad", "w"): by, ("wgrad", "dy"): oracle.drawn(sparse_dy(dy))}

    return cuts


top2_rows = oracle.along(0)
FST = s24.methods.FST
CASES = {
    "SRSTE": (s24.methods.SRSTE(), both(top2_rows, top2_rows)),
    "SRSTE 1:8": (s24.methods.SRSTE(n=1, m=8), both(*[oracle.along(0, masked_nm(1, 8))] * 2)),
    "STEP": (s24.methods.STEP(), both(top2_rows, top2_rows)),
    "BiMask": (
        s24.methods.BiMask(trials=3),
        lambda state, dy: both(top2_rows, reordered(np.asarray(state["order"])))(state, dy),
    ),
    "FST greedy": (
        FST(mask="greedy", mvue=None),
        lambda state, dy: both(*[oracle.masked(state["mask"])] * 2)(state, dy),
    ),
    "FST double-pruned": (FST(mask="double-pruned", mvue=None), both(top2_rows, twice)),
    "FST top-2": (FST(mask="top-2", mvue=None), both(top2_rows, top2_rows)),
    "FST biased": (FST(mvue="biased"), cut_of(lambda dy: s24.prune24(dy, 0))),
    "FST uniform": (FST(mvue="uniform"), cut_of(lambda dy: random24(NOISE, dy, 0, "uniform"))),
    "FST paired": (FST(mvue="paired"), cut_of(lambda dy: random24(NOISE, dy, 0, "paired"))),
    "FST fp8 per tensor": (FST(fp8="tensor"), fst_float8(row=False)),
    "FST fp8 per row": (FST(fp8="row"), fst_float8(row=True)),
    "FST fp8 delayed, first step": (FST(fp8="delayed"), fst_float8(row=False, dense=delayed())),
    "SSTE fp8 per tensor": (s24.methods.SSTE(fp8="tensor"), float8(row=False)),
    "SSTE fp8 per row": (
        s24.methods.SSTE(fp8="row", mvue="approximate"),
        float8(row=True, exact=False),
    ),
    "SSTE e4m3": (
        s24.methods.SSTE(fp8="tensor", fp8_backward="e4m3"),
        float8(row=False, backward="e4m3"),
    ),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((n, "ffi") for n in CASES), ("FST double-pruned", None), ("FST paired", None)],
)
def test_gradients_are_the_masked_dense_products(name, implementation):
    """By the kernels, which take every operand that has a format packed, or as is faster here."""
    method, cuts = CASES[name]
    x, w, dy = oracle.matrices(4, "float32", (T, d), (d, f), (T, f))
    state = method.init(w)
    run = lambda x, w: s24.sparse_dot(x, w, method, state, KEY, implementation=implementation)  # noqa: E731
    y, vjp = jax.vjp(run, x, w)
    dx, dw = vjp(dy)
    want = oracle.linear(x, w, dy, cuts(state, dy))
    for what, got in {"y": y, "dx": dx, "dw": dw}.items():
        oracle.assert_close(got, want[what], "float32", K=max(T, d, f), roundings=2, name=what)


@pytest.mark.parametrize(
    "method",
    [s24.methods.BiMask(trials=2), s24.methods.SSTE(fp8="tensor", mvue=None), FST(fp8="tensor", mvue=None)],
)
def test_both_matrices_of_an_ffn_are_treated_alike(method):
    """An FFN is its two linear layers."""
    x, w1, w2, dy = oracle.matrices(5, "float32", (T, d), (d, f), (f, d), (T, d))
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}

    def layers(x, w1, w2):
        hidden = jnp.square(jax.nn.relu(s24.sparse_dot(x, w1, method, state["w1"])))
        return s24.sparse_dot(hidden, w2, method, state["w2"])

    results = []
    for run in (lambda *a: s24.sparse_ffn(*a, method, state), layers):
        y, vjp = jax.vjp(run, x, w1, w2)
        results.append((y, *vjp(dy)))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scales", ["tensor", "row", "delayed"])
@pytest.mark.parametrize(
    "kind", [partial(s24.methods.SSTE, scale="unit", fp8_backward="e4m3"), partial(FST, mask="top-2")]
)
def test_8_bits_hide_neither_nan_nor_small_numbers(scales, kind):
    method = kind(fp8=scales, mvue=None)
    w = jnp.tile(jnp.array([[4.0], [0.0], [0.0], [1.0]]), (1, 4))
    for x, want in ((1e-35, 4e-35), (0.0, 0.0), (jnp.nan, jnp.nan), (jnp.inf, jnp.nan)):
        y = s24.sparse_dot(jnp.array([[x, 0, 0, 0]], jnp.float32), w, method, method.init(w))
        np.testing.assert_allclose(y, np.full((1, 4), want), rtol=2**-4)


SSTE8 = s24.methods.SSTE(fp8="tensor", mvue=None)
FST8_DELAYED = FST(fp8="delayed", mvue=None)
SSTE8_DELAYED = s24.methods.SSTE(fp8="delayed", fp8_backward="e4m3", mvue=None)
FST8_ROWS = FST(fp8="row", mvue=None)


def block_in_8_bits(method):
    """(y, dx, dw1, dw2) of an FFN with a bias, as a function of the implementation."""
    x, w1, w2, dy = oracle.matrices(6, "float32", (32, 64), (64, 128), (128, 192), (32, 192))
    b1 = jnp.linspace(-1, 1, 128)
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}

    def run(implementation):
        options = {"b1": b1, "activation": "gelu", "implementation": implementation}
        y, vjp = jax.vjp(lambda *a: s24.sparse_ffn(*a, method, state, **options), x, w1, w2)
        return (y, *vjp(dy))

    return run


def assert_simulated(got, want):
    """Sums round as they are compiled, and rounding to 8 bits follows them: on a GPU, whose dense products of
    8 bits have sums of some 14 bits, some numbers are rounded to a neighbour."""
    for a, b in zip(got, want, strict=True):
        if jax.default_backend() == "cpu":
            np.testing.assert_allclose(a, b, rtol=4e-4, atol=4e-3)
        else:
            assert np.linalg.norm(a - b) <= 2**-6 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("method", "products"),
    [
        *((method, ("F1", "F2")) for method in (SSTE8, SSTE8_DELAYED)),
        *((method, ("F1", "F2", "B1", "B3")) for method in (FST8_ROWS, FST8_DELAYED)),
    ],
    ids=str,
)
def test_8_bit_products_of_the_library_are_the_simulated_ones(
    method, products, documented_cusparselt, capsys
):
    """Of both layers of an FFN, with a bias. The weight gradient of FST is the library's in 16 bits, but for
    float32; that of S-STE is simulated, as is its input gradient in e5m2."""
    jax.clear_caches()  # two methods have the same forward products
    run = block_in_8_bits(method)
    assert_simulated(run("cusparselt"), run("ffi"))
    assert [call.operands for call in documented_cusparselt] == ["float8_e4m3fn"] * len(products)
    s24.explain(method, shape=(32, 64, 128), implementation="cusparselt")
    lines = capsys.readouterr().out.splitlines()
    assert {line[:2] for line in lines if "cuSPARSELt, e4m3" in line} == set(products)
    s24.explain(method, shape=(32, 64, 128), implementation="ffi")
    assert "cuSPARSELt, e4m3" not in capsys.readouterr().out


def test_8_bit_products_whose_scales_multiply_beyond_float32(documented_cusparselt):
    jax.clear_caches()
    x, w = oracle.matrices(6, "float32", (32, 64), (64, 128))
    state = SSTE8.init(w)
    tiny = s24.sparse_dot(x * 1e-20, w * 1e-15, SSTE8, state, implementation="cusparselt")
    want = s24.sparse_dot(x, w, SSTE8, state, implementation="cusparselt")
    np.testing.assert_allclose(tiny * 1e35, want, rtol=1e-4, atol=1e-3)
    assert documented_cusparselt


@pytest.mark.parametrize("kind", [s24.methods.SSTE, FST])
def test_8_bit_products_that_the_library_does_not_take_are_simulated(kind, documented_cusparselt):
    """For their sizes."""
    method, (x, w) = kind(fp8="tensor", mvue=None), oracle.matrices(6, "float32", (32, 24), (24, 16))
    run = lambda x, i: s24.sparse_dot(x, w, method, method.init(w), implementation=i).sum()  # noqa: E731
    for implementation in ("cusparselt", "ffi"):
        jax.grad(run)(x, implementation)
    assert not documented_cusparselt


@pytest.mark.parametrize("value", [0.0, 1.0, -3.7e-40, 1e30, np.float32(2.0**-100), np.nan])
def test_the_largest_magnitude_becomes_the_largest_number_in_8_bits(value):
    """Nothing overflows, and zeros and NaN stay what they are."""
    x = jnp.full((4, 8), value, jnp.float32).at[1, 1].multiply(0.999)
    rounded, scale = Float8(All(), -1).quantised(x, -1, Request({}, None, None))
    assert rounded.dtype == jnp.float8_e4m3fn and scale.shape == (1, 1) and jnp.isfinite(scale)
    wide = np.float32(rounded)
    assert np.isnan(wide).all() == np.isnan(value)
    if not np.isnan(value):
        top = 0 if value == 0 else min(448, 448 * abs(float(value)) * 2.0**100)
        np.testing.assert_allclose(np.abs(wide).max(), top, rtol=2**-4, atol=2**-10)


@pytest.mark.parametrize(
    "method",
    [
        *(FST(fp8=scales, mvue=None, mask="top-2") for scales in ("tensor", "row", "delayed")),
        s24.methods.SSTE(fp8="tensor", fp8_backward="e4m3", mvue=None),
    ],
    ids=str,
)
def test_dense_products_in_8_bits_are_the_simulated_ones(monkeypatch, capsys, method):
    """XLA's, where a sparse operand is not packed: not measured, or not 2:4 along the contracted axis."""
    run = block_in_8_bits(method)
    want = run(None)
    for module in (decision, choices):
        monkeypatch.setattr(module, "dense_float8_obstacle", lambda: None)
    dots = []
    original = jax.lax.dot_general
    monkeypatch.setattr(
        jax.lax, "dot_general", lambda a, b, *r, **o: dots.append(str(a.dtype)) or original(a, b, *r, **o)
    )
    assert_simulated(run(None), want)
    assert dots.count("float8_e4m3fn") == 4
    s24.explain(method, shape=(32, 64, 128))
    assert capsys.readouterr().out.count("XLA, dense e4m3") == 4
    s24.explain(method)
    assert "XLA's dense product of e4m3" in capsys.readouterr().out


def test_fst_variants_choose_their_masks():
    w = jax.random.normal(jax.random.key(1), (2, 8, 16))
    for kind, mask in {
        "transposable": s24.transposable_mask24(w),
        "greedy": s24.transposable_mask24(w, exact=False),
        "double-pruned": s24.mask24(w, 1),
        "top-2": s24.mask24(w, 1),
    }.items():
        method = FST(mask=kind)
        np.testing.assert_array_equal(method.init(w)["mask"], mask)
        np.testing.assert_array_equal(method.fresh_mask(w), mask)
    state = FST(mask="double-pruned").init(w)
    np.testing.assert_array_equal(state["backward"], s24.double_prune24(w, 1) != 0)


def test_bimask_loses_fewer_weights_than_without_an_order():
    method, w = s24.methods.BiMask(trials=50), jax.random.normal(jax.random.key(3), (2, 32, 16))
    refresh = jax.jit(method.refresh)

    def left(w, order):
        once = s24.prune24(w, 0)[:, order]
        return int((s24.prune24(once, 1) != 0).sum())

    state = jax.jit(method.init)(w)
    counts = [[left(w[i], jnp.arange(16)) for i in range(2)]]
    for search in range(1, 3):
        assert state["searches"].tolist() == [search] * 2
        assert np.sort(state["order"], axis=-1).tolist() == [list(range(16))] * 2
        counts.append([left(w[i], state["order"][i]) for i in range(2)])
        state = refresh(state, w)
    assert (np.diff(counts, axis=0) >= 0).all()  # the present order is among the candidates
    assert (np.array(counts[-1]) > counts[0]).all()
    within = s24.methods.BiMask(trials=5, feature_blocks=2).init(w)["order"]
    assert within.tolist() != [list(range(16))] * 2
    assert (within // 8 == np.arange(16) // 8).all(), "every column stays in its half"
    with pytest.raises(ValueError, match=r"BiMask: the weight in feature_blocks=3 .* multiple of 12"):
        s24.methods.BiMask(feature_blocks=3).init(w)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: s24.methods.SRSTE(decay=-1), ValueError, "SRSTE: decay=-1 must be 0 or positive"),
        (lambda: s24.methods.SRSTE(decay_on="updates"), ValueError, "decay_on='updates' is unknown; use one"),
        (lambda: s24.methods.SRSTE(n=4, m=2), ValueError, "SRSTE: n=4 of every m=2 cannot be kept"),
        (lambda: s24.methods.SRSTE(m=4.0), TypeError, "SRSTE: m must be an int, got 4.0"),
        (
            lambda: s24.methods.STEP(switch="soon"),
            ValueError,
            "STEP: switch='soon' must be 'arithmetic', 'ge",
        ),
        (lambda: s24.methods.STEP(switch=1.5), ValueError, r"STEP: switch=1.5 must lie in \[0, 1\]"),
        (lambda: s24.methods.STEP(latest=0.05), ValueError, "STEP: latest=0.05 is before earliest=0.1"),
        (lambda: s24.methods.BiMask(trials=0), ValueError, "BiMask: trials=0 must be a whole number"),
        (
            lambda: s24.methods.SSTE(fp8="block"),
            ValueError,
            "SSTE: fp8='block' is unknown; use one of 'tensor'",
        ),
        (
            lambda: s24.methods.SSTE(fp8="row", fp8_backward="e3m4"),
            ValueError,
            "SSTE: fp8_backward='e3m4' is unknown; use one of 'e5m2', 'e4m3'",
        ),
        (
            lambda: s24.methods.SSTE(fp8="delayed"),
            ValueError,
            "SSTE: fp8='delayed' needs fp8_backward=\"e4m3\"",
        ),
        (
            lambda: s24.methods.SSTE(fp8_backward="e4m3"),
            ValueError,
            'SSTE: fp8_backward=\'e4m3\' needs fp8="tensor" or "row"',
        ),
        (
            lambda: s24.methods.STEP(switch=0.01).schedule(20),
            ValueError,
            "STEP: switch=0.01 leaves no dense or no sparse step in a run of 20 steps",
        ),
        (
            lambda: s24.sparse_dot(jnp.ones((4, 12)), jnp.ones((12, 8)), s24.methods.SRSTE(n=1, m=8)),
            ValueError,
            "w of product fwd of shape .* size 12 along axis -2, which is not a multiple of 8",
        ),
    ],
)
def test_what_makes_no_sense(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_phases_of_step():
    for method, early in ((s24.methods.STEP(), True), (s24.methods.STEP(switch=0.25), False)):
        dense, sparse = method.schedule(100).phases
        assert (dense.sparse, dense.until_settled, sparse.sparse) == (False, early, True)
        assert dense.steps == (50 if early else 25)
    schedule = s24.methods.STEP().schedule(100)
    names = [schedule.phase_at(step, settled).name for step in (10, 60) for settled in (False, True)]
    assert names == ["dense", "sparse", "sparse", "sparse"]
    with pytest.raises(ValueError, match="the last Phase cannot end early"):
        s24.Schedule((s24.Phase("dense", 3, sparse=False, until_settled=True),))


def test_explain_says_what_has_no_format(capsys):
    s24.explain(s24.methods.SRSTE(n=1, m=8))
    s24.explain(s24.methods.SSTE(fp8="tensor"))
    printed = capsys.readouterr().out
    assert "top-1 of 8, which nothing packs, dense product" in printed
    assert "e4m3, a scale per tensor" in printed and "simulated by XLA's dense product" in printed
    if jax.default_backend() == "cpu":  # where a table may choose the library's 8-bit products
        assert "by measurement" not in printed
