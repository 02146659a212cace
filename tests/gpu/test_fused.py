"""F1 and squared ReLU, and B1 and the slope, in one pass on Hopper: the bits of two passes, in any shape,
however it is called."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch.decision import named
from jax_sparse24.dispatch.hardware import generation
from jax_sparse24.engine import fusions
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.matmul_pointwise import (
    MATMUL_SLOPE,
    MATMUL_SQUARED_RELU,
    matmul_slope,
    matmul_squared_relu,
    squared_relu,
)
from jax_sparse24.ops.reference.slope import activation_gradient
from tests.gpu.test_runtime import assert_same_for_ten_thousand_calls, assert_same_with_graphs
from tests.ops import not_finite
from tests.ops.data import assert_same_bits

HERE = generation()
pytestmark = pytest.mark.skipif(HERE is None or HERE.code != "sm_90a", reason="the kernel is Hopper's")
# T, d, f: one tile; parts of tiles along T, and of clusters along f; one token; stages once around, and more
# often; more tiles than blocks run at a time, in bands of which the last is narrower.
SHAPES = [
    (256, 128, 256),
    *((T, 256, f) for T in (1, 7, 96, 255, 257, 512 + 24) for f in (64, 192, 576)),
    (1024, 768, 3072),
    (1000, 640, 2112),
    (4096, 512, 4160),
    (9000, 128, 8192),
]


def operands(shape, seed=0, scale=1.0):
    T, d, f = shape
    x, w = (
        jax.random.normal(jax.random.key(seed + i), size, jnp.bfloat16) * scale
        for i, size in enumerate(((T, d), (d, f)))
    )
    return x, w


def one(x, w):
    return matmul_squared_relu(x, w, implementation="ffi")


def sloped(dy3, w, y2, activation="squared_relu"):
    return matmul_slope(dy3, w, y2, activation, implementation="ffi")


@partial(jax.jit, static_argnames="axis")
def packed(w, axis=-2):
    return compressed24.pack(w, axis)


def by_library(x, w):
    """cuSPARSELt's product, which wants tokens in eights."""
    whole = jnp.pad(x, ((0, -len(x) % 8), (0, 0)))
    return contract(whole, w, -1, w.axis, decision=named("cusparselt"))[: len(x)]


@jax.jit
def separate(x, w):
    """By the library, and XLA's pass, which the barrier keeps apart."""
    return squared_relu(jax.lax.optimization_barrier(by_library(x, w)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_whole_numbers(shape):
    """Sums are exact, so that every implementation gives them, and no order of stages is hidden."""
    T, d, f = shape
    rng = np.random.default_rng(T + f)
    x, w = (jnp.asarray(rng.integers(-4, 5, size), jnp.bfloat16) for size in ((T, d), (d, f)))
    y = jnp.matmul(x, s24.prune24(w, -2), preferred_element_type=jnp.float32)
    want = squared_relu(jax.lax.optimization_barrier(y.astype(jnp.bfloat16)))
    for form in (packed(w), s24.pack24(w, -2)):
        assert MATMUL_SQUARED_RELU.in_one_pass(x, form, decision=None, implementation="ffi")
        assert_same_bits(jax.jit(one)(x, form), want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_the_library_and_the_activation_after_it(shape, cusparselt):
    """Of normal numbers, by the library's preferred algorithm, whose sums have the same order. If a release
    sums in another order, elements differ by a rounding of bfloat16 of Y1, and no more than a few."""
    x, w = operands(shape, scale=0.25)
    got, want = jax.jit(one)(x, packed(w)), separate(x, packed(w))
    if cusparselt.version() == (0, 10, 0):
        assert_same_bits(got, want)
        return
    a, b = (np.asarray(y, np.float32) for y in (got, want))
    assert (a != b).mean() < 1e-2 and np.allclose(a, b, rtol=2.0**-6, atol=1e-6)


@partial(jax.jit, static_argnames="activation")
def separate_slope(dy3, w, y2, activation="squared_relu"):
    """By the library, and XLA's pass, which the barrier keeps apart."""
    return activation_gradient(y2, jax.lax.optimization_barrier(by_library(dy3, w)), activation)


@pytest.mark.parametrize("activation", ["squared_relu", "relu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_slopes(shape, activation, cusparselt):
    """Of whole numbers, whose sums are exact, and of normal ones by the library's preferred algorithm."""
    (T, d, f), rng = shape, np.random.default_rng(sum(shape))
    y2 = squared_relu(jax.random.normal(jax.random.key(9), (T, f), jnp.bfloat16))
    whole = [jnp.asarray(rng.integers(-4, 5, size), jnp.bfloat16) for size in ((T, d), (f, d))]
    normal, turned = operands(shape, 3, scale=0.25)
    for (dy3, w), exact in ((whole, True), ((normal, turned.T), cusparselt.version() == (0, 10, 0))):
        form = packed(w, -1)
        options = {"activation": activation, "decision": None, "implementation": "ffi"}
        assert MATMUL_SLOPE.in_one_pass(dy3, form, y2, **options)
        got = jax.jit(sloped, static_argnums=3)(dy3, form, y2, activation)
        want = separate_slope(dy3, form, y2, activation)
        if exact:
            assert_same_bits(got, want)
        else:
            a, b = (np.asarray(y, np.float32) for y in (got, want))
            assert (a != b).mean() < 1e-2 and np.allclose(a, b, rtol=2.0**-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["squared_relu", "relu"])
def test_slopes_of_any_numbers(activation):
    """All of 16 bits in what was saved, and dY2 so small that its product with a slope is subnormal, or zero,
    infinite or NaN, beside each other in tokens; small ones and zeros also in features. W2 is such that
    dY2 is four times dY3, twice."""
    rng = np.random.default_rng(2)
    w = jnp.tile(4 * jnp.eye(128, dtype=jnp.bfloat16), (2, 1))
    saved = np.abs(rng.normal(size=(512, 256))).astype("bfloat16")
    saved[:256] = np.arange(1 << 16, dtype=np.uint16).view("bfloat16").reshape(256, 256)
    normal = rng.normal(size=(512, 128)).astype(np.float32)
    scales = (1e-3, 2.0**-65, 2.0**-100, 2.0**-126, 2.0**120, 2.0**125, 0.0)
    mixed = rng.choice(np.float32([0, 1, 2.0**-100, 2.0**125, np.nan]), (512, 1), p=[0.3, 0.3, 0.2, 0.1, 0.1])
    each = rng.choice(np.float32([0, 1, 2.0**-62, 2.0**-66, 2.0**-100]), (512, 128))
    for scale in (*scales, mixed, each):
        dy3 = jnp.asarray(normal * np.float32(scale), jnp.bfloat16)
        dy2 = jnp.tile(4 * dy3, (1, 2)) + jnp.bfloat16(0)
        got = jax.jit(sloped, static_argnums=3)(dy3, packed(w, -1), jnp.asarray(saved), activation)
        want = jax.jit(activation_gradient, static_argnums=2)(jnp.asarray(saved), dy2, activation)
        a, b = (np.asarray(y).view(np.uint16) for y in (got, want))
        # What tensor cores do with a subnormal dY3 is theirs: it is a zero in dY1 either way, of either sign.
        tiny = np.abs(np.asarray(dy2, np.float32)) < 2.0**-126
        np.testing.assert_array_equal(np.where(tiny, a & 0x7FFF, a), np.where(tiny, b & 0x7FFF, b))


@pytest.mark.parametrize("kind", not_finite.OPERANDS)
def test_what_is_not_finite(kind):
    """Infinite elements, and NaN, in X; and numbers whose squares overflow: what is right by the definition.
    cuSPARSELt is not compared: its 0.10.0 has NaN where a sum is -Inf."""
    x, w = not_finite.OPERANDS[kind]()
    product = jnp.asarray(np.float32(not_finite.sums(x, w)[0]), jnp.bfloat16)
    got = jax.jit(one)(x, packed(w))
    assert not (wrong := not_finite.misfits(x, w, got)), wrong
    assert not (wrong := not_finite.misfits(x, w, jax.jit(squared_relu)(product))), wrong
    assert np.isinf(np.asarray(got, np.float32)).any() and np.isnan(np.asarray(got, np.float32)).any()


def test_nothing_is_read_or_written_beyond_the_arrays():
    """Ragged results beside arrays of ones, and operands that lie between NaN. What was saved could be read
    beyond its end without a trace in a result: memcheck tells that."""
    for T in (1, 129, 257, 383):
        x, w = operands((T, 256, 192), T)
        want = jax.jit(one)(x, packed(w))
        apart = jnp.full((T + 256, 256), jnp.nan, jnp.bfloat16).at[128 : T + 128].set(x)
        around = jax.jit(lambda x, w, T=T: (one(x[128 : T + 128], w), jnp.ones((4096,), jnp.bfloat16)))
        got, ones = around(apart, packed(w))
        assert_same_bits(got, want)
        assert bool(jnp.all(ones == 1))
        form, y2 = packed(w.T, -1), squared_relu(operands((T, 192, 8), T + 1)[0])
        want = jax.jit(sloped)(x, form, y2)
        among = jnp.full((T + 256, 192), jnp.nan, jnp.bfloat16).at[128 : T + 128].set(y2)
        around = jax.jit(
            lambda x, w, y2, T=T: (
                sloped(x[128 : T + 128], w, y2[128 : T + 128]),
                jnp.ones((4096,), jnp.bfloat16),
            )
        )
        got, ones = around(apart, form, among)
        assert_same_bits(got, want)
        assert bool(jnp.all(ones == 1))


@pytest.mark.parametrize(
    "axes", [(0, None), (None, 0), (0, 0), (0, None, 0), (None, 0, 0), (0, 0, None), (None, None, 0)], ids=str
)
def test_batches(axes):
    """Of squares, and of slopes, which have a third operand."""
    x, w = operands((3 * 200, 256, 192))
    saved = squared_relu(operands((3 * 200, 192, 8), 4)[0]).reshape(3, 200, 192)
    x, weights = x.reshape(3, 200, 256), jnp.stack([w, -w, w[::-1]])
    given = [a if axis == 0 else a[0] for a, axis in zip((x, weights, saved), axes, strict=False)]

    def run(x, w, *saved):
        return sloped(x, s24.pack24(w.T, -1), *saved) if saved else one(x, s24.pack24(w, -2))

    got = jax.jit(jax.vmap(run, axes))(*given)
    for n in range(3):
        own = [a[n] if axis == 0 else a for a, axis in zip(given, axes, strict=True)]
        assert_same_bits(got[n], run(*own))


GRAPHS = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import jax_sparse24 as s24
from jax_sparse24.ops.matmul_pointwise import matmul_slope, matmul_squared_relu

rng = np.random.default_rng(1)
x = jnp.asarray(rng.normal(size=(500, 256)), jnp.bfloat16)
weights = jnp.asarray(rng.normal(size=(6, 256, 256)) / 16, jnp.bfloat16)

def step(x, w):
    y = matmul_squared_relu(x, s24.pack24(w, -2), implementation="ffi")
    dy = matmul_slope(x, s24.pack24(w.T, -1), y, "squared_relu", implementation="ffi")
    small = y / jnp.maximum(jnp.max(y), 1) - jnp.bfloat16(0.25)
    bits = jax.lax.bitcast_convert_type(dy, jnp.uint16).astype(jnp.uint32)
    return small, (jnp.min(y), jnp.max(y), jnp.sum(bits))

run = jax.jit(lambda x: jax.lax.scan(step, x, weights))
leaves = [np.asarray(leaf) for _ in range(3) for leaf in jax.tree.leaves(run(x))]
results = [hashlib.sha256(leaf.tobytes()).hexdigest() for leaf in leaves]
print(*results)
"""


def test_the_same_bits_with_graphs_and_without():
    assert_same_with_graphs(GRAPHS)


def test_threads_with_streams_of_their_own():
    given = [(x, packed(w), packed(w.T, -1)) for x, w in (operands((500 + n, 256, 576), n) for n in range(8))]
    run = jax.jit(lambda x, w, turned: (y := one(x, w), sloped(x, turned, y)))
    want = [run(*args) for args in given]
    with ThreadPoolExecutor(8) as pool:
        for got, expected in zip(pool.map(lambda args: run(*args), given * 8), want * 8, strict=True):
            assert_same_bits(got, expected)


def test_ten_thousand_calls():
    given = [(x, packed(w)) for x, w in (operands(shape, 5) for shape in ((2000, 768, 1600), (257, 128, 64)))]
    slopes = [
        (dy3, packed(w.T, -1), squared_relu(operands((len(dy3), w.shape[1], 8), 6)[0]))
        for dy3, w in (operands(shape, 7) for shape in ((2000, 768, 1600), (257, 128, 64)))
    ]
    for run, args in ((one, given), (sloped, slopes)):
        assert_same_for_ten_thousand_calls(run, args)


def test_large():
    """More than 2^31 bytes: indices need 64 bits."""
    x, w = operands((120_000, 128, 9600))
    got = jax.jit(one)(x, packed(w))
    for at in (0, 119_700):
        assert_same_bits(got[at : at + 300], jax.jit(one)(x[at : at + 300], packed(w)))


def test_large_slopes():
    x, w = operands((120_000, 128, 9600))
    y2 = squared_relu(operands((120_000, 9600, 8))[0])
    got = jax.jit(sloped)(x, packed(w.T, -1), y2)
    for at in (0, 119_700):
        part = slice(at, at + 300)
        assert_same_bits(got[part], jax.jit(sloped)(x[part], packed(w.T, -1), y2[part]))


METHODS = {
    "FST": s24.methods.FST(),
    "FST approximate": s24.methods.FST(mvue="approximate"),
    "SSTE": s24.methods.SSTE(),
    "STE": s24.methods.STE(),
    "SLoPe": s24.methods.SLoPe(),
}


# The kernel's calls, by the rule that makes them.
ONE_PASS = {
    "Squared": lambda operands: one(operands.left, operands.right),
    "Sloped": lambda operands, saved: sloped(operands.left, operands.right, saved),
}


@pytest.mark.parametrize("rule", ONE_PASS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("T", [512, 288])
def test_blocks_in_one_pass_and_in_two(rule, name, T, monkeypatch, cusparselt):
    """Value and gradients of blocks in which the library multiplies everything else, bit for bit; alone,
    recomputed, and in a loop, which XLA may record into a graph."""
    if rule == "Sloped" and name in ("SSTE", "STE"):
        pytest.skip("B1 multiplies W2 as an array with zeros")
    method = METHODS[name]
    arrays = [
        jnp.asarray(np.random.default_rng(i).normal(size=size) / 8, jnp.bfloat16)
        for i, size in enumerate(((T, 256), (256, 512), (512, 256)))
    ]
    state = {w: method.init(a, w) for w, a in zip(("w1", "w2"), arrays[1:], strict=True)}
    takes, runs = [True], []

    def by_kernel(self, execution, operands, *saved):
        assert isinstance(operands.right, Compressed24)
        runs.append(operands)
        return ONE_PASS[rule](operands, *saved)

    monkeypatch.setattr(getattr(fusions, rule), "matches", lambda *_: takes[0])
    monkeypatch.setattr(getattr(fusions, rule), "run", by_kernel)

    def results(block):
        def step(x, _):
            y, vjp = jax.vjp(block, x, *arrays[1:])
            return x - y / 8, (y, *vjp(y))

        return jax.jit(lambda x: jax.lax.scan(step, x, None, 3)[1])(arrays[0])

    def block(x, w1, w2):
        key = jax.random.key(2)
        return s24.sparse_ffn(x, w1, w2, method, state, key, implementation="cusparselt")

    found = []
    for one_pass in (True, False):
        jax.clear_caches()
        takes[0] = one_pass
        found.append([results(block), results(jax.checkpoint(block))])
        assert bool(runs) == one_pass
        runs.clear()
    assert_same_bits(*found)


def test_our_kernels_take_it():
    """Named, in a block; with a bias it is two steps."""
    text = {}
    for bias in (None, jnp.ones(512, jnp.bfloat16)):
        method = s24.methods.STE()
        x, w1, w2 = (jnp.ones(size, jnp.bfloat16) for size in ((256, 256), (256, 512), (512, 256)))
        run = lambda *a, b=bias, m=method: s24.sparse_ffn(*a, m, b1=b, implementation="ffi")  # noqa: E731
        text[bias is None] = jax.jit(run).lower(x, w1, w2).as_text()
    assert "s24_matmul_squared_relu" in text[True] and "s24_matmul_squared_relu" not in text[False]


def test_a_driver_that_compiles_ptx_takes_other_kernels(tmp_path):
    """It has no machine code for Hopper then: F1 of FST, and B1 of Venom at entries, are done in steps."""
    program = (
        "import jax, jax.numpy as jnp, jax_sparse24 as s24\n"
        "from jax_sparse24.ops.matmul_pointwise import matmul_squared_relu\n"
        "x, w = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((128, 512), jnp.bfloat16)\n"
        "y = matmul_squared_relu(x, s24.pack24(w, -2), implementation='ffi')\n"
        "assert (y == 64 * 64).all(), y\n"
        "method = s24.methods.Venom(clusters=4)\n"
        "state = {'w1': method.init(w, 'w1'), 'w2': method.init(w.T, 'w2')}\n"
        "def loss(x):\n"
        "    y = s24.sparse_ffn(x, w, w.T, method, state, implementation='ffi')\n"
        "    return y.astype('float32').sum()\n"
        "print(jax.grad(loss)(x))\n"
    )
    environment = os.environ | {
        "CUDA_FORCE_PTX_JIT": "1",
        "CUDA_CACHE_PATH": str(tmp_path),
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # XLA's own kernels for it have no PTX
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
