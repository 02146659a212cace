"""Products on CUDA, by our kernels and by cuSPARSELt, against float64."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24._measure import Oracle
from jax_sparse24.ops.matmul import contract
from tests.ops.data import assert_same_bits

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
    run = jax.jit(lambda a, b: contract(a, b, *layout[:2], implementation, out_dtype, algorithm))
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
    with pytest.raises(ValueError, match="bfloat16 or float16, not float32"):
        s24.matmul(
            s24.pack24(x.astype(jnp.float32), -1), x.T.astype(jnp.float32), implementation="cusparselt"
        )
