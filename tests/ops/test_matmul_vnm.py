"""matmul with a V:2:M operand, in every layout, against float64 products."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import named
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.order import collect, regroup
from tests.ops import oracle, vnm_oracle
from tests.ops.data import NUMPY, assert_same_bits, assert_within, device, unit_roundoff, words

# (rows, K, columns of the other, v, m): one group and odd numbers of them; more rows than a task takes and
# more K than a panel holds; widths of 1, below and above a panel.
SHAPES = [
    (16, 4, 1, 16, 4),
    (48, 77, 33, 16, 7),
    (1280, 80, 70, 64, 16),
    (64, 4400, 130, 64, 16),
    (256, 96, 17, 128, 32),
    (256, 40, 65, 256, 8),
]


def operands(rng, rows, k, n, v, m, dtype):
    """The array (rows, K) that a packed operand stands for, and a dense one (K, n), rounded to dtype."""
    p = rng.normal(size=(rows, k)).astype(NUMPY[dtype])
    p = np.where(vnm_oracle.mask(p, v, m, -1), p, np.zeros_like(p))
    return p, rng.normal(size=(k, n)).astype(NUMPY[dtype])


def product(p, d, m):
    """The exact product, and a bound of a float32 sum of its 2K/M terms plus the rounding of the result."""
    p, d = oracle.wide(p), oracle.wide(d)
    terms = p.shape[-1] // m * 2
    scale = np.abs(p) @ np.abs(d)
    return p @ d, lambda dtype: terms * 2.0**-24 * scale + (1 + 2**-8) * unit_roundoff(dtype) * np.abs(p @ d)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(s, "float32") for s in SHAPES] + [(s, d) for s in SHAPES[1:4] for d in ("bfloat16", "float16")],
    ids=str,
)
def test_all_layouts(implementation, dtype, shape, rng):
    """Either side, the dense operand contracted along either axis, the packed one also as a transpose."""
    v, m = shape[3:]
    p, d = operands(rng, *shape, dtype)
    exact, bound = product(p, d, m)
    packs = (s24.pack_vnm(device(p), v, m), -1), (s24.pack_vnm(device(p.T), v, m, axis=0), -2)
    for (packed, axis), d_axis in ((packs[0], -1), (packs[1], -2)):
        dense = device(d if d_axis == -2 else d.T)
        left = contract(packed, dense, axis, d_axis, implementation)
        right = contract(dense, packed, d_axis, axis, implementation)
        for got, want in ((left, exact), (right.T, exact)):
            assert got.dtype == p.dtype
            assert_within(got, want, bound(dtype))


ISAS = native.module("cpu").isas() if native.module("cpu") else []


@pytest.fixture(params=ISAS)
def isa(request):
    """Kernels of the CPU are those of one instruction set."""
    native.module("cpu").use_isa(request.param)
    yield request.param
    native.module("cpu").use_isa(ISAS[0])


def test_products_on_every_instruction_set(isa, rng):
    p, d = operands(rng, *SHAPES[1], "float32")
    exact, bound = product(p, d, 7)
    packed = s24.pack_vnm(device(p), 16, 7)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        got = contract(packed, device(d.T), -1, -1, "ffi", dtype)
        assert_within(got, exact, bound(np.dtype(dtype)))


# ---- strided groups


def assert_same_as_regrouped(shape, dtype, implementation, rng):
    """A dense operand in its first order gives the product of a regrouped one, in every layout: by kernels
    its bits; XLA, which regroups, chooses the order of its sums anew."""
    v, m = shape[3:]
    p, d = (device(x) for x in operands(rng, *shape, dtype))
    moved, packed = regroup(d, "strided", m), s24.pack_vnm(p, v, m)
    exact, bound = product(p, moved, m)
    for k_last, left in itertools.product((False, True), repeat=2):

        def multiply(dense, strided, k_last=k_last, left=left):
            (dense, axis), options = (dense.T, -1) if k_last else (dense, -2), {"strided": strided}
            if left:
                return contract(packed, dense, -1, axis, implementation, **options)
            return contract(dense, packed, axis, -1, implementation, **options).T

        got = multiply(d, True)
        assert_within(got, exact, bound(dtype))
        if implementation == "ffi":
            assert_same_bits(got, multiply(moved, False))


# Beside `SHAPES`: panels of which the last has few groups; runs longer than the stripe of a panel.
STRIDED = [*SHAPES, (16, 32 * 129, 20, 16, 32), (16, 4 * 2049, 9, 16, 4), (32, 31 * 70, 66, 32, 31)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(s, "float32") for s in STRIDED] + [(s, d) for s in STRIDED[-3:] for d in ("bfloat16", "float16")],
    ids=str,
)
def test_strided_groups_are_those_of_regrouped_rows(implementation, shape, dtype, rng):
    assert_same_as_regrouped(shape, dtype, implementation, rng)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strided_groups_on_every_instruction_set(isa, dtype, rng):
    assert_same_as_regrouped(STRIDED[-3], dtype, "ffi", rng)


@pytest.mark.parametrize("k_last", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_gradients_of_strided_groups(implementation, left, k_last, rng):
    """Those of the product of the regrouped operand, in the order of the operand itself."""
    (p, d), axis = operands(rng, 32, 48, 7, 16, 8, "float32"), -1 if k_last else -2
    p, d, c = device(p), device(d.T if k_last else d), device(rng.normal(size=(32, 7)), "float32")

    def loss(p, d, strided):
        if not strided:
            d = regroup(d.T, "strided", 8).T if k_last else regroup(d, "strided", 8)
        packed, options = s24.pack_vnm(p, 16, 8), {"strided": strided}
        if left:
            return jnp.sum(c * contract(packed, d, -1, axis, implementation, **options))
        return jnp.sum(c.T * contract(d, packed, axis, -1, implementation, **options))

    got, want = (jax.grad(loss, (0, 1))(p, d, strided) for strided in (True, False))
    assert np.asarray(want[1]).any()
    assert_same_bits(got, want)


def test_strided_groups_of_a_product_that_runs_dense(rng):
    """Without a measurement no V:N:M product runs packed."""
    p, d = (device(x) for x in operands(rng, 64, 128, 48, 64, 8, "float32"))
    packed = s24.pack_vnm(p, 64, 8)
    for k_last, axis in ((False, -2), (True, -1)):
        got = contract(packed, d.T if k_last else d, -1, axis, decision=named("dense"), strided=True)
        assert_within(got, p @ regroup(d, "strided", 8), 1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_strided_groups_are_those_of_a_packed_operand(side, implementation, rng):
    """Of a 2:4 one, too; two arrays have none."""
    p, d = (device(x) for x in operands(rng, 64, 128, 48, 64, 8, "float32"))
    packed = s24.pack24(regroup(p.T, "strided"), -2, implementation=implementation)
    kept = s24.prune24(regroup(p.T, "strided"), -2)
    if side == "left":
        got = contract(packed, d, -2, -2, implementation, strided=True)
    else:
        got = contract(d, packed, -2, -2, implementation, strided=True)
    want = kept.T @ regroup(d, "strided")
    assert_within(got, want if side == "left" else want.T, 1e-4)
    with raises(TypeError, "strided=True", "packed operand", type(d).__name__, "regroup"):
        contract(d, d, -1, -1, strided=True)


# ---- collected rows


def assert_same_as_collected(shape, dtype, implementation, rng):
    """The product whose rows are put back afterwards, bit for bit, in every layout, and for one shape in both
    types of the result."""
    v, m = shape[3:]
    p, d = (device(x) for x in operands(rng, *shape, dtype))
    packs = (s24.pack_vnm(p, v, m), -1), (s24.pack_vnm(p.T, v, m, axis=0), -2)
    out_dtypes = (None, "float32") if shape == COLLECTED[1] else (None,)
    layouts = itertools.product(packs, ((d, -2), (d.T, -1)), (False, True), out_dtypes)
    for (packed, axis), (dense, dense_axis), strided, out_dtype in layouts:

        def multiply(packed, dense, collected, axes=(axis, dense_axis), strided=strided, out_dtype=out_dtype):
            options = {"strided": strided, "collected": collected}
            return contract(packed, dense, *axes, implementation, out_dtype, **options)

        want = jax.jit(lambda *a: collect(multiply(*a, False), m, -2))(packed, dense)
        assert_same_bits(jax.jit(lambda *a: multiply(*a, True))(packed, dense), want)


# Groups of rows within one block of V, of a few blocks, and across the blocks of a task.
COLLECTED = [(16, 4, 1, 16, 4), (48, 72, 33, 16, 12), (1280, 80, 70, 64, 16), (496, 155, 66, 16, 31)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", COLLECTED, ids=str)
def test_collected_rows_are_written_to_their_places(implementation, shape, dtype, rng):
    assert_same_as_collected(shape, dtype, implementation, rng)


def test_collected_rows_on_every_instruction_set(isa, rng):
    assert_same_as_collected(COLLECTED[1], "bfloat16", "ffi", rng)


@pytest.mark.parametrize("k_last", [False, True])
def test_gradients_of_collected_rows(implementation, k_last, rng):
    """Those of the product whose rows are put back before a bias is added."""
    p, d = operands(rng, 48, 48, 7, 16, 8, "float32")
    p, d, bias = device(p), device(d.T if k_last else d), device(rng.normal(size=48), "float32")
    c = device(rng.normal(size=(48, 7)), "float32")

    def loss(p, d, bias, collected):
        options = {"strided": True, "collected": collected, "bias": bias if collected else None}
        y = contract(s24.pack_vnm(p, 16, 8), d, -1, -1 if k_last else -2, implementation, **options)
        return jnp.sum(c * (y if collected else collect(y, 8, -2) + bias[:, None]))

    got, want = (jax.grad(loss, (0, 1, 2))(p, d, bias, collected) for collected in (True, False))
    assert all(np.asarray(x).any() for x in want)
    assert_same_bits(got, want)


def test_collected_rows_of_a_product_that_runs_dense(rng):
    p, d, bias = (device(rng.normal(size=shape), "float32") for shape in ((64, 128), (128, 48), 64))
    packed, options = s24.pack_vnm(p, 64, 8), {"decision": named("dense"), "bias": bias}
    got = contract(packed, d, -1, -2, collected=True, **options)
    assert_within(got, collect(packed.todense() @ d, 8, -2) + bias[:, None], 1e-4)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_collected_rows_in_batches(implementation, mapped, rng):
    x, d = device(rng.normal(size=(3, 32, 24)), "float32"), device(rng.normal(size=(3, 24, 7)), "float32")
    args = [a if axis == 0 else a[0] for a, axis in zip((x, d), mapped, strict=True)]

    def multiply(x, d, collected):
        packed = s24.pack_vnm(x, 16, 8)
        y = contract(packed, d, -1, -2, implementation, collected=collected)
        return y if collected else collect(y, 8, -2)

    got, want = (jax.vmap(lambda *a: multiply(*a, collected), mapped)(*args) for collected in (True, False))  # noqa: B023
    assert_within(got, want, 1e-5)


def test_collected_rows_are_those_of_blocks_on_the_left():
    x = jnp.ones((48, 48))
    packed, others = s24.pack_vnm(x, 16, 8), (x, s24.pack24(x, -1))
    for a, b in ((x, packed), *((other, x) for other in others)):
        with raises(TypeError, "collected=True", "PackedVNM", type(a).__name__, type(b).__name__, "collect"):
            contract(a, b, -1, -1, collected=True)
    for packed, axis in (
        (s24.pack_vnm(jnp.ones((48, 70)), 16, 7), -1),
        (s24.pack_vnm(jnp.ones((70, 48)), 16, 7, axis=0), -2),
    ):
        with raises(ValueError, f"size 48 along axis {-3 - axis}", "multiple of 7", "42 or 49"):
            contract(packed, jnp.ones((70, 5)), axis, -2, collected=True)


def test_a_product_is_that_of_the_same_packing(implementation, rng):
    """Rows of any block see that block's columns: a matrix of one-hot rows reads D."""
    x = np.zeros((64, 48), np.float32)
    x[np.arange(64), rng.integers(0, 48, 64)] = 1
    x[16:32] = 0
    packed = s24.pack_vnm(device(x), 16, 12)
    d = rng.normal(size=(48, 5)).astype(np.float32)
    kept = np.asarray(packed.todense(implementation="reference"))
    assert_same_bits(s24.matmul(packed, device(d), implementation=implementation), kept @ d)
    assert kept.sum() > 20


def test_matmul_of_either_side_with_leading_dimensions(implementation, rng):
    p = np.stack([operands(rng, 32, 24, 1, 16, 8, "float32")[0] for _ in range(4)]).reshape(2, 2, 32, 24)
    d = rng.normal(size=(2, 2, 24, 5)).astype(np.float32)
    for a, b in ((p, d), (p[0, 0], d), (p, d[1, 0])):
        exact, bound = product(a, b, 8)
        left = s24.matmul(s24.pack_vnm(device(a), 16, 8), device(b), implementation=implementation)
        assert_within(left, exact, bound("float32"))

        def flip(x):
            return device(np.swapaxes(x, -1, -2))

        packed = s24.pack_vnm(flip(a), 16, 8, axis=-2)
        right = s24.matmul(flip(b), packed, implementation=implementation)
        assert_within(right, np.swapaxes(exact, -1, -2), np.swapaxes(bound("float32"), -1, -2))


def test_sums_are_float32_whatever_is_asked(implementation, rng):
    p, d = operands(rng, 16, 1024, 3, 16, 8, "bfloat16")
    packed = s24.pack_vnm(device(p), 16, 8)
    exact, bound = product(p, d, 8)
    for asked in ("float32", "bfloat16", "float16"):
        got = s24.matmul(packed, device(d), implementation=implementation, preferred_element_type=asked)
        assert got.dtype == asked
        assert_within(got, exact, bound(asked))


@pytest.mark.parametrize("v", [16, 32])
def test_non_finite_values_stay_in_their_row_and_column(implementation, dtype, v, rng):
    p, d = operands(rng, 3 * v, 40, 9, v, 8, dtype)
    p[18, np.flatnonzero(p[18])[0]] = np.nan
    d[:, 4] = np.inf
    got = s24.matmul(s24.pack_vnm(device(p), v, 8), device(d), implementation=implementation)
    finite = np.isfinite(np.asarray(got, np.float32))
    assert not finite[18].any() and not finite[:, 4].any()
    assert np.delete(np.delete(finite, 18, 0), 4, 1).all()


def test_no_contraction_gives_zeros(implementation):
    packed = s24.pack_vnm(jnp.zeros((16, 0)), 16, 8)
    got = s24.matmul(packed, jnp.zeros((0, 5)), implementation=implementation)
    assert_same_bits(got, np.zeros((16, 5), np.float32))


def test_repeated_and_split_products_have_the_same_bits(rng):
    """The order of a sum depends on nothing but K."""
    p, d = operands(rng, 1280, 320, 200, 64, 16, "float32")
    whole = np.asarray(s24.matmul(s24.pack_vnm(device(p), 64, 16), device(d), implementation="ffi"))
    for _ in range(3):
        again = s24.matmul(s24.pack_vnm(device(p), 64, 16), device(d), implementation="ffi")
        assert_same_bits(again, whole)
    part = s24.matmul(s24.pack_vnm(device(p[640:704]), 64, 16), device(d[:, 64:128]), implementation="ffi")
    assert_same_bits(part, whole[640:704, 64:128])


def test_by_default_it_runs_what_pays(rng):
    p, d = operands(rng, 64, 128, 48, 64, 8, "float32")
    exact, bound = product(p, d, 8)
    assert_within(s24.matmul(s24.pack_vnm(device(p), 64, 8), device(d)), exact, 4 * bound("float32"))


# ---- gradients and transformations


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_are_those_of_the_masked_dense_product(implementation, dtype, side, rng):
    w = rng.normal(size=(32, 24)).astype(NUMPY[dtype])
    mask = vnm_oracle.mask(w, 16, 8, -1)
    d, c = (rng.normal(size=s).astype(NUMPY[dtype]) for s in ((24, 7), (32, 7)))

    def loss(w, d):
        if side == "left":
            y = s24.matmul(s24.pack_vnm(w, 16, 8), d, implementation=implementation)
        else:
            y = s24.matmul(d.T, s24.pack_vnm(w.T, 16, 8, axis=0), implementation=implementation).T
        return jnp.sum(y.astype(jnp.float32) * c.astype(jnp.float32))

    dw, dd = jax.jit(jax.grad(loss, (0, 1)))(device(w), device(d))
    wide_w, wide_d, wide_c = (oracle.wide(v) for v in (np.where(mask, w, 0), d, c))
    for got, want, scale in (
        (dw, np.where(mask, wide_c @ wide_d.T, 0), np.abs(wide_c) @ np.abs(wide_d.T)),
        (dd, wide_w.T @ wide_c, np.abs(wide_w.T) @ np.abs(wide_c)),
    ):
        assert got.dtype == NUMPY[dtype]
        assert_within(got, want, 40 * 2.0**-24 * scale + 1.01 * unit_roundoff(dtype) * np.abs(want))
    assert not words(dw)[~mask].any()


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_some_operands(implementation, mapped, rng):
    x, d = device(rng.normal(size=(3, 32, 24)), "float32"), device(rng.normal(size=(3, 24, 7)), "float32")
    packs = jax.vmap(lambda x: s24.pack_vnm(x, 16, 8))(x)
    one = [jax.tree.map(lambda leaf, i=i: leaf[i], packs) for i in range(3)]

    def multiply(p, d):
        return s24.matmul(p, d, implementation=implementation)

    args = [packs if mapped[0] == 0 else one[0], d if mapped[1] == 0 else d[0]]
    got = jax.vmap(multiply, mapped)(*args)
    want = [
        multiply(one[i] if mapped[0] == 0 else one[0], d[i] if mapped[1] == 0 else d[0]) for i in range(3)
    ]
    assert_within(got, np.stack(want), 1e-5)


def test_programs_of_both_platforms():
    x, w = jax.ShapeDtypeStruct((32, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 4), jnp.bfloat16)

    def step(x, w, implementation):
        packed = s24.pack_vnm(x, 16, 8, implementation=implementation)
        y = s24.matmul(packed, w, implementation=implementation)
        return jnp.sum(y**2) + jnp.sum(jnp.where(s24.vnm_mask(x, 16, 8, implementation=implementation), x, 0))

    def text(implementation, platform):
        f = jax.jit(jax.value_and_grad(lambda x, w: step(x, w, implementation), (0, 1)))
        return f.trace(x, w).lower(lowering_platforms=(platform,)).as_text()

    assert ("@s24_vnm_pack(" in text(None, "cuda")) == native.available("cuda")[0]
    assert "s24_" not in text("reference", "cpu")
    calls = text("ffi", "cpu")
    for target in ("pack", "unpack", "gather", "matmul", "mask"):
        assert f"@s24_vnm_{target}(" in calls


# ---- errors


def raises(error, *parts):
    return pytest.raises(error, match=".*".join(parts))


def test_errors_of_the_pattern():
    for op in (s24.vnm_mask, s24.pack_vnm):
        x = jnp.ones((64, 48))
        for v in (8, 48, 512):
            with raises(ValueError, f"v={v} is not supported", "16, 32, 64, 128, 256"):
                op(x, v, 8)
        for m in (2, 33):
            with raises(ValueError, f"m={m} is not supported", "from 4 to 32"):
                op(x, 16, m)
        with raises(ValueError, "n=1 is not supported", "must be 2"):
            op(x, 16, 8, 1)
        with raises(TypeError, "v must be an int, got 16.0"):
            op(x, 16.0, 8)
        with raises(ValueError, op.__name__, "size 48 along axis -1", "multiple of 7", "42 or 49"):
            op(x, 16, 7)
        with raises(ValueError, op.__name__, "size 48 along axis -2", "multiple of 32"):
            op(jnp.ones((48, 64)), 32, 8)
        with raises(
            ValueError, op.__name__, "48 columns along axis -1, fewer than v=64", "use v=16 or more columns"
        ):
            op(x, 64, 8, axis=0)
        with raises(ValueError, "24 rows along axis -2, fewer than v=32: use more rows"):
            op(jnp.ones((24, 16)), 32, 8)
        with raises(ValueError, "need a matrix", r"\(16,\)"):
            op(jnp.ones(16), 16, 8)
        with raises(ValueError, "one of the last two", "axis -3"):
            op(jnp.ones((16, 16, 16)), 16, 8, axis=0)
        with raises(ValueError, "exact=True", "m=32", "35960", "limited to m=16"):
            op(jnp.ones((16, 64)), 16, 32, exact=True)
        with raises(TypeError, op.__name__, "int32", "float32, bfloat16, float16"):
            op(jnp.ones((16, 16), int), 16, 8)
        with raises(ValueError, op.__name__, "'cuda'", "unknown"):
            op(x, 16, 8, implementation="cuda")
    with raises(TypeError, "pack_vnm", "mask must be bool"):
        s24.pack_vnm(x, 16, 8, mask=x)
    with raises(ValueError, "pack_vnm", "exact=True", "mask", "where"):
        s24.pack_vnm(x, 16, 8, exact=True, mask=x > 0)


def test_errors_of_operands():
    x = jnp.ones((64, 48))
    packed = s24.pack_vnm(x, 16, 8)
    with raises(ValueError, "a of shape", "axis -2", "contracts axis -1", r"pack_vnm\(a, 16, 8, axis=-1\)"):
        s24.matmul(packed.T, x)
    with raises(TypeError, "both operands are packed"):
        s24.matmul(packed, s24.pack24(x.T, 0))
    with raises(ValueError, "do not multiply"):
        s24.matmul(packed, x)
    short = dataclasses.replace(packed, columns=packed.columns[:2])
    for call in (short.todense, lambda: s24.matmul(short, x.T)):
        with raises(ValueError, "do not belong together", "16:2:8", "pack_vnm"):
            call()
    with raises(ValueError, "v=48"):
        dataclasses.replace(packed, v=48).todense()
