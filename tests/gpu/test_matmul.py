"""Products on CUDA, by our kernels and by cuSPARSELt, against float64."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import table
from jax_sparse24.dispatch.decision import named
from jax_sparse24.dispatch.generations import HOPPER
from jax_sparse24.measure import Oracle
from jax_sparse24.ops.matmul import contract
from tests.ops.data import assert_same_bits

FLOAT8_SUMS = 2.0**-13  # see `measure.roundoff`
LAYOUTS = list(itertools.product((-1, -2), (-1, -2), ("left", "right")))


def operands(rows, depth, cols, a_axis, b_axis, side, dtype, seed=0):
    """(a, b, dense a as (M, K), dense b as (K, N)), one of the first two packed with `rows` rows."""
    rng = np.random.default_rng(seed)
    m, n = (rows, cols) if side == "left" else (cols, rows)
    a = jnp.asarray(rng.normal(size=(m, depth) if a_axis == -1 else (depth, m)), dtype)
    b = jnp.asarray(rng.normal(size=(depth, n) if b_axis == -2 else (n, depth)), dtype)
    if side == "left":
        packed = s24.pack24(a, a_axis)
        plain, a = packed.todense(), packed
        left, right = plain, b
    else:
        packed = s24.pack24(b, b_axis)
        plain, b = packed.todense(), packed
        left, right = a, plain
    return a, b, left if a_axis == -1 else left.T, right if b_axis == -2 else right.T


def assert_product(shape, layout, dtype, implementation, out_dtype=None, algorithm=None):
    a, b, left, right = operands(*shape, *layout, dtype)
    by = named(implementation, algorithm)
    run = jax.jit(lambda a, b: contract(a, b, *layout[:2], None, out_dtype, decision=by))
    assert Oracle(left, right, unit=2.0**-24).excess(run(a, b)) <= 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "shape", [(128, 64, 128), (256, 320, 384), (200, 192, 136), (1, 4, 1), (17, 36, 5)], ids=str
)
def test_own_kernel(shape, layout, dtype):
    assert_product(shape, layout, dtype, "ffi")


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_own_kernel_with_float32_result(layout):
    assert_product((144, 128, 72), layout, "bfloat16", "ffi", jnp.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "shape", [(128, 64, 128), (512, 1024, 256), (80, 96, 24), (16, 32, 8), (272, 1600, 40)], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cusparselt(shape, layout, dtype, cusparselt):
    assert_product(shape, layout, dtype, "cusparselt", algorithm=-1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_preferred_algorithms_of_cusparselt(layout, dtype, cusparselt):
    assert_product((1024, 512, 2048), layout, dtype, "cusparselt")


@pytest.fixture
def epilogues(cusparselt):
    if cusparselt.version() not in HOPPER.verified:
        pytest.skip(f"cuSPARSELt {cusparselt.version()}")


def measured_algorithms() -> list[int]:
    """Those of cuSPARSELt that a table of this repository names."""
    tables = [json.loads(path.read_text()) for path in Path(s24.__file__).parent.glob("tuning/nvidia-*.json")]
    return sorted({p["algorithm"] for t in tables for p in t["products"] if p.get("algorithm") is not None})


@pytest.mark.parametrize("algorithm", measured_algorithms())
@pytest.mark.parametrize("shape", [(80, 96, 40), (272, 1632, 40), (16, 32, 8)], ids=str)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_measured_algorithms_at_other_sizes(algorithm, shape, activation, epilogues, monkeypatch):
    """One that the library refuses there, or with an activation, gives way to the library's own choice."""
    entry = {"implementation": "cusparselt", "algorithm": algorithm}
    monkeypatch.setattr(table, "find", lambda product: (None, entry))
    monkeypatch.setattr(table, "same_library", lambda entry: True)
    bias = jnp.ones(shape[0], jnp.bfloat16) if activation else None
    for layout in LAYOUTS:
        a, b, left, right = operands(*shape, *layout, "bfloat16")
        got = np.float64(contract(a, b, *layout[:2], "cusparselt", bias=bias, activation=activation))
        exact = np.float64(left) @ np.float64(right)
        want = np.maximum(exact + 1, 0) if activation else exact
        assert np.max(np.abs(got - want) - 2.0**-8 * np.abs(want)) <= 2.0**-10


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (64, 64, 0)], ids=str)
def test_empty_products(shape, cusparselt):
    rows, depth, cols = shape
    packed = s24.pack24(jnp.ones((rows, depth), jnp.bfloat16), -1)
    out = s24.matmul(packed, jnp.ones((depth, cols), jnp.bfloat16), implementation="cusparselt")
    assert_same_bits(out, jnp.zeros((rows, cols), jnp.bfloat16))


@pytest.fixture
def float8(cusparselt):
    if cusparselt.float8_problem():
        pytest.skip(cusparselt.float8_problem())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bias_and_activation(layout, activation, dtype, epilogues):
    """Of the float32 sum, rounded once; GELU, of the rounded sum, is compared by its absolute error."""
    *axes, side = layout
    a, b, left, right = operands(272, 320, 136, *layout, dtype)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=272), dtype)
    run = jax.jit(
        lambda a, b, c: contract(a, b, *axes, decision=named("cusparselt", -1), bias=c, activation=activation)
    )
    got = np.float64(run(a, b, bias))
    wide = np.float64(bias)
    exact = np.float64(left) @ np.float64(right) + (wide[:, None] if side == "left" else wide)
    unit = float(jnp.finfo(dtype).eps) / 2
    bound = 2**-16 + 1.01 * unit * np.abs(exact)
    if activation == "gelu":
        bound, exact = bound + 16 * unit * (np.abs(exact) + 1), np.float64(jax.nn.gelu(jnp.float32(exact)))
    if activation == "relu":
        exact = np.maximum(exact, 0)
    assert np.max(np.abs(got - exact) - bound) <= 0


def test_biases_that_change(epilogues):
    """Two in one program, and one whose buffer is donated, so that its address changes as it may."""
    x, w, _, _ = operands(512, 256, 128, -1, -2, "right", "bfloat16")
    sums = contract(x, w, -1, -2, "ffi", jnp.float32)
    biases = jnp.asarray(np.random.default_rng(2).normal(size=(8, 512)), jnp.bfloat16)

    def add(bias, activation=None):
        return s24.matmul(x, w, bias=bias, activation=activation, implementation="cusparselt")

    def close(got, want):
        return bool(jnp.all(jnp.abs(got - want) <= 2**-7 * jnp.abs(want) + 2**-7))

    two = jax.jit(lambda b, c: (add(b), add(c, "relu")))
    step = jax.jit(lambda b: (add(b), b + 1), donate_argnums=0)
    moving = biases[0] + 0
    for bias, other in zip(biases, biases[::-1], strict=True):
        first, second = two(bias, other)
        assert close(first, sums + bias)
        assert close(second, jax.nn.relu(sums + other))
        want = sums + moving
        got, moving = step(moving)
        assert close(got, want)
    batched = jax.vmap(add)(biases)
    assert close(batched, sums + biases[:, None])


def test_many_biases_keep_few_plans(epilogues):
    """More addresses than plans are kept for."""
    x, w, _, _ = operands(64, 64, 32, -1, -2, "right", "bfloat16")
    run = jax.jit(lambda b: s24.matmul(x, w, bias=b, implementation="cusparselt"))
    biases = [jnp.full(64, i, jnp.bfloat16) for i in range(1500)]
    base = np.float32(run(jnp.zeros(64, jnp.bfloat16)))
    for i in (*range(1500), 0, 1499):
        np.testing.assert_allclose(np.float32(run(biases[i])), base + i, rtol=2**-7, atol=2**-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(32, 64, 16), (96, 192, 48), (544, 1600, 80)], ids=str)
def test_8_bits(shape, layout, out, float8):
    a, b, left, right = operands(*shape, *layout, jnp.float8_e4m3fn)
    run = jax.jit(lambda a, b: contract(a, b, *layout[:2], None, out, decision=named("cusparselt", -1)))
    assert Oracle(left, right, unit=FLOAT8_SUMS).excess(run(a, b)) <= 1


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_bias_of_8_bit_products(out, activation, float8, epilogues):
    x, w, left, right = operands(96, 128, 64, -1, -2, "right", jnp.float8_e4m3fn)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=96), out)
    got = np.float64(
        contract(x, w, -1, -2, None, out, decision=named("cusparselt", -1), bias=bias, activation=activation)
    )
    exact = np.float64(left) @ np.float64(right) + np.float64(bias)
    eps = float(jnp.finfo(out).eps)
    atol = 8 * FLOAT8_SUMS * 128
    if activation == "relu":
        exact = np.maximum(exact, 0)
    if activation == "gelu":  # where the library has none, of a rounded sum
        atol, exact = atol + 8 * eps, np.float64(jax.nn.gelu(jnp.float32(exact)))
    np.testing.assert_allclose(got, exact, rtol=2 * eps, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sste_in_8_bits_is_its_simulation(dtype, float8):
    method = s24.methods.SSTE(fp8="tensor", mvue=None)
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.normal(size=s), dtype) for s in ((64, 256), (256, 128)))
    run = lambda i: s24.sparse_dot(x, w, method, method.init(w), implementation=i).astype(jnp.float32)  # noqa: E731
    with jax.default_matmul_precision("highest"):
        got, want = run("cusparselt"), run("ffi")
    # The simulation rounds the scaled-back operands to the dtype; the product of 8 bits does not.
    rounding = max(float(jnp.finfo(dtype).eps), 8 * FLOAT8_SUMS)
    assert 0 < jnp.linalg.norm(got - want) <= rounding * jnp.linalg.norm(want)


def test_both_agree_on_a_large_product(cusparselt):
    a, b, _, _ = operands(2048, 4096, 4096, -1, -1, "right", "bfloat16")
    own, theirs = (contract(a, b, -1, -1, i).astype(jnp.float32) for i in ("ffi", "cusparselt"))
    assert jnp.linalg.norm(own - theirs) <= 2**-8 * jnp.linalg.norm(own)


@pytest.mark.parametrize("implementation", ["ffi", "cusparselt"])
def test_repeats_itself(implementation, cusparselt):
    a, b, _, _ = operands(1024, 2048, 512, -2, -2, "right", "bfloat16")
    run = jax.jit(lambda a, b: contract(a, b, -2, -2, implementation))
    first = run(a, b)
    for _ in range(20):
        assert_same_bits(run(a, b), first)


@pytest.mark.parametrize("implementation", ["ffi", "cusparselt"])
def test_vmap_over_either_operand(implementation, cusparselt):
    rng = np.random.default_rng(1)
    w = s24.pack24(jnp.asarray(rng.normal(size=(3, 64, 128)), jnp.bfloat16), -1)
    x = jnp.asarray(rng.normal(size=(2, 128, 24)), jnp.bfloat16)

    def one(w, x):
        return s24.matmul(w, x, implementation=implementation)

    got = jax.vmap(lambda x: jax.vmap(lambda w: one(w, x))(w))(x)
    for i, j in itertools.product(range(2), range(3)):
        assert_same_bits(got[i, j], one(jax.tree.map(lambda leaf, j=j: leaf[j], w), x[i]))


@pytest.mark.parametrize("implementation", ["ffi", "cusparselt"])
def test_in_a_scan_with_packing_in_every_step(implementation, cusparselt):
    """Custom calls inside a loop, where XLA may record them into a graph."""
    w = jnp.asarray(np.random.default_rng(2).normal(size=(256, 256)) / 16, jnp.bfloat16)

    def step(x, _):
        y = s24.matmul(s24.pack24(x, -1, implementation="ffi"), w, implementation=implementation)
        return y / jnp.maximum(jnp.max(jnp.abs(y)), 1), y.sum()

    x = jnp.asarray(np.random.default_rng(3).normal(size=(256, 256)), jnp.bfloat16)
    looped, _ = jax.jit(lambda x: jax.lax.scan(step, x, None, length=8))(x)
    once = jax.jit(step, static_argnums=1)
    for _ in range(8):
        x, _ = once(x, None)
    np.testing.assert_allclose(np.float32(looped), np.float32(x), rtol=0, atol=2**-6)


@pytest.mark.parametrize("implementation", ["ffi", "cusparselt"])
def test_threads(implementation, cusparselt):
    products = [
        operands(128 * (1 + i % 3), 256, 128, -1, -2, "left", "bfloat16", seed=i)[:2] for i in range(6)
    ]
    run = jax.jit(lambda a, b: contract(a, b, -1, -2, implementation))
    want = [np.asarray(run(*p)) for p in products]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: np.asarray(run(*products[i % 6])), range(240)))
    for i, result in enumerate(got):
        assert_same_bits(result, want[i % 6])


def test_many_calls_keep_no_memory(cusparselt):
    a, b, _, _ = operands(128, 256, 128, -1, -2, "left", "bfloat16")
    run = jax.jit(lambda a, b: contract(a, b, -1, -2, "cusparselt"))
    jax.block_until_ready(run(a, b))
    before = jax.devices()[0].memory_stats()["bytes_in_use"]
    for _ in range(10_000):
        out = run(a, b)
    jax.block_until_ready(out)
    del out
    assert jax.devices()[0].memory_stats()["bytes_in_use"] <= before + (1 << 20)


def test_misfits_are_named(cusparselt):
    x = jnp.ones((24, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="rows of the packed operand must be a multiple of 16, got 24"):
        s24.matmul(s24.pack24(x, -1), x.T, implementation="cusparselt")
    with pytest.raises(ValueError, match="K must be a multiple of 32, got 24"):
        s24.matmul(s24.pack24(x.T[:16, :24], -1), x, implementation="cusparselt")
    with pytest.raises(ValueError, match="float8_e4m3fn, not float32"):
        s24.matmul(
            s24.pack24(x.astype(jnp.float32), -1), x.T.astype(jnp.float32), implementation="cusparselt"
        )
