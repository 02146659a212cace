"""2:4 products by our kernel for Hopper: exact sums however tiles are divided, the same bits however it is
called."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import hopper
from jax_sparse24.dispatch.decision import named
from jax_sparse24.dispatch.hardware import generation, hardware
from jax_sparse24.dispatch.product import Product
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.order import regroup
from tests.gpu.test_runtime import assert_same_for_ten_thousand_calls, assert_same_with_graphs
from tests.ops.data import assert_same_bits

HERE = generation()
pytestmark = pytest.mark.skipif(HERE is None or HERE.code != "sm_90a", reason="the kernel is Hopper's")
# R, K, N: one tile, with a block that has no rows and without; tiles divided into fronts, few and many, with
# what lies behind them and without; whole tiles and divided ones, whole ones alone; rows and columns that are
# missing.
SHAPES = [
    (64, 128, 8),
    (256, 4096, 256),
    (768, 1024, 768),
    (768, 32768, 768),
    (3072, 32768, 768),
    (768, 8192, 3072),
    (2304, 2048, 776),
    (1088, 640, 4104),
    (4096, 512, 4096),
    (8192, 1024, 2048),
    (5120, 384, 3000),
]


def operands(shape, seed=0, whole=False, dtype=jnp.bfloat16):
    """P^T (K, R) and D (K, N)."""
    R, K, N = shape
    rng = np.random.default_rng(seed)
    draw = (lambda s: rng.integers(-3, 4, s)) if whole else (lambda s: rng.normal(size=s))
    return tuple(jnp.asarray(draw(s), dtype) for s in ((K, R), (K, N)))


@partial(jax.jit, static_argnames=("left", "d_axis", "strided", "by"))
def multiply(p, d, bias=None, left=False, d_axis=-2, strided=False, by="ffi"):
    """P^T packed along K, by columns, and multiplied: D^T P^T, or its transpose. d_axis: -1 for D^T in its
    place."""
    packed = compressed24.pack(p, -2, strided=strided)
    options = {"decision": named(by), "strided": strided, "bias": bias}
    if left:
        return contract(dataclasses.replace(packed, axis=-1), d, -1, d_axis, **options)
    return contract(d, packed, d_axis, -2, **options)


# How it is called: the side of P, the axis of D that is contracted, whether its rows are strided.
CALLS = [(left, *d) for left in (False, True) for d in ((-2, False), (-2, True), (-1, False))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("left", "d_axis", "strided"), CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_whole_numbers(shape, left, d_axis, strided, dtype):
    """Sums are exact, whoever adds them, and a bias does not change that. The product of what is not
    compressed takes the same kernel."""
    R, K, N = shape
    p, d = operands(shape, sum(shape), whole=True, dtype=dtype)
    sides = ("left", (R, K, N), (-1, d_axis)) if left else ("right", (N, K, R), (d_axis, -2))
    assert not hopper.misfit(Product(sides[2], sides[0], p.dtype, sides[1]))
    kept = s24.prune24(regroup(p, "strided") if strided else p, -2)
    other = regroup(d, "strided") if strided else d
    bias = (jnp.arange(R, dtype=jnp.float32) % 7 - 3).astype(dtype)
    sums = jnp.matmul(other.T, kept, preferred_element_type=jnp.float32)
    d = d.T if d_axis == -1 else d
    for b, want in ((None, sums.astype(dtype)), (bias, (sums + bias).astype(dtype))):
        want = want.T if left else want
        assert_same_bits(multiply(p, d, b, left, d_axis, strided), want)
        if left != (d_axis == -1) and not strided:  # the layout of s24.matmul
            product = jax.jit(partial(s24.matmul, implementation="ffi"))
            sides = (s24.pack24(p.T, -1), d) if left else (d, s24.pack24(p, -2))
            assert_same_bits(product(*sides, bias=b), want)


@pytest.mark.parametrize("d_axis", [-1, -2])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normal_numbers_differ_from_the_library_by_roundings(shape, left, d_axis, cusparselt):
    """The order of sums is another one: few results differ, by a unit in the last place."""
    p, d = operands(shape, 3)
    d, bias = d.T if d_axis == -1 else d, jnp.asarray(p[0])
    got, want = (
        np.asarray(multiply(p, d, bias, left, d_axis, by=by), np.float32) for by in ("ffi", "cusparselt")
    )
    assert (got != want).mean() < 0.02
    scale = np.sqrt(shape[1]) * 2.0**-8
    assert (
        np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max() and np.abs(got - want).mean() < scale * 0.01
    )


def test_gradients_through_it():
    """Those of a matmul, whose own gradients are dense products."""
    p, d = operands((320, 512, 264))

    def loss(packed, d, implementation):
        out = s24.matmul(packed, d, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    packed = s24.pack24(p.T, -1)
    found = [jax.grad(loss, (0, 1), allow_int=True)(packed, d, by) for by in ("ffi", "reference")]
    for a, b in zip(*((g[0].values, g[1]) for g in found), strict=True):
        a, b = (np.asarray(g, np.float32) for g in (a, b))
        assert np.abs(a - b).max() <= 2.0**-6 * np.abs(b).max()


def test_what_is_not_finite_reaches_its_sums_alone():
    """Inf and NaN of D reach the row of a result that they belong to, if what they meet is kept."""
    p, d = operands((320, 384, 264))
    d = d.at[5, 7].set(jnp.inf).at[77, 100].set(jnp.nan)
    kept = np.asarray(s24.prune24(p, -2), np.float32)
    for d_axis in (-1, -2):
        got = np.asarray(multiply(p, d.T if d_axis == -1 else d, d_axis=d_axis), np.float32)
        assert_same_bits(np.isnan(got[100]), kept[77] != 0)
        assert_same_bits(got[7] == np.inf, kept[5] > 0)
        assert_same_bits(got[7] == -np.inf, kept[5] < 0)
        assert np.isfinite(np.delete(got, [7, 100], 0)).all()


@pytest.mark.parametrize("d_axis", [-1, -2])
def test_nothing_is_read_or_written_beyond_the_arrays(d_axis):
    """D between NaN, ragged results beside ones."""

    @jax.jit
    def beside(p, d):
        return multiply(p, d[128:-128], d_axis=d_axis), jnp.ones((4096,), jnp.bfloat16)

    for N in (8, 264, 520, 776):
        p, d = operands((320, 384, N), N)
        d = d.T if d_axis == -1 else d
        want = multiply(p, d, d_axis=d_axis)
        apart = jnp.full((len(d) + 256, d.shape[1]), jnp.nan, jnp.bfloat16).at[128 : 128 + len(d)].set(d)
        got, ones = beside(p, apart)
        assert_same_bits(got, want)
        assert bool(jnp.all(ones == 1))


def test_batches():
    p, d = operands((320, 3 * 512, 264))
    p, d = p.reshape(3, 512, 320), d.reshape(3, 512, 264)
    run = lambda p, d: contract(d, s24.pack24(p, -2), -2, -2, "ffi")  # noqa: E731
    for axes in ((0, 0), (0, None), (None, 0)):
        given = [a if axis == 0 else a[0] for a, axis in zip((p, d), axes, strict=True)]
        got = jax.jit(jax.vmap(run, axes))(*given)
        for n in range(3):
            own = [a[n] if axis == 0 else a for a, axis in zip(given, axes, strict=True)]
            assert_same_bits(got[n], run(*own))


GRAPHS = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import jax_sparse24 as s24
from jax_sparse24.ops.matmul import contract

rng = np.random.default_rng(1)
p, d = (jnp.asarray(rng.normal(size=(2048, n)), jnp.bfloat16) for n in (768, 512))

def step(d, _):
    out = contract(d, s24.pack24(p, -2), -2, -2, "ffi")
    bits = jax.lax.bitcast_convert_type(out, jnp.uint16).astype(jnp.uint32)
    return d + out.mean(1).astype(d.dtype), bits.sum()

run = jax.jit(lambda d: jax.lax.scan(step, d, length=6))
leaves = [np.asarray(leaf) for _ in range(3) for leaf in jax.tree.leaves(run(d))]
results = [hashlib.sha256(leaf.tobytes()).hexdigest() for leaf in leaves]
print(*results)
"""


def test_the_same_bits_with_graphs_and_without():
    assert_same_with_graphs(GRAPHS)


def test_threads_with_streams_of_their_own():
    """Blocks of one call wait for each other, beside blocks of other calls."""
    given = [operands((768, 4096 + 128 * n, 768), n) for n in range(8)]
    want = [multiply(*args) for args in given]
    with ThreadPoolExecutor(8) as pool:
        for got, expected in zip(pool.map(lambda a: multiply(*a), given * 8), want * 8, strict=True):
            assert_same_bits(got, expected)


def test_ten_thousand_calls():
    given = [operands(shape, 5) for shape in ((768, 1024, 768), (320, 512, 2056))]
    assert_same_for_ten_thousand_calls(multiply, given)


def test_large():
    """More than 2^31 bytes: indices need 64 bits. A part of the columns gives the same bits, if tiles are not
    divided; and whole numbers do if they are."""
    for shape in ((128, 4_259_840, 264), (33_024, 128, 33_024)):
        p, d = operands((128, 1024, 264), whole=True)
        R, K, N = shape
        p, d = (jnp.tile(a, (-(-K // 1024), -(-n // a.shape[1])))[:K, :n] for a, n in ((p, R), (d, N)))
        got = multiply(p, d)
        few = contract(d[:, :64], s24.prune24(p[:, :64], -2), -2, -2, out_dtype=jnp.float32)
        assert_same_bits(got[:64, :64], few.astype(jnp.bfloat16))


@pytest.mark.parametrize("tokens", ["consecutive", "strided", "random"])
@pytest.mark.parametrize("dense_share", [0.05, 0.0])
def test_blocks_whose_tokens_are_read_where_they_lie(tokens, dense_share, cusparselt):
    """Gradients of Activation24, also of features that stay dense, beside those by the library, for which the
    tokens of X and dY3 are moved: some roundings, where another order would make them others altogether."""
    if hardware().name != "nvidia-h200":
        pytest.skip("the table of this GPU has nothing of the kernel")
    T, d, f = 32768, 768, 3072
    method = s24.methods.Activation24(tokens=tokens, dense_share=dense_share)
    rng = np.random.default_rng(4)
    x, w1, w2 = (jnp.asarray(rng.normal(size=s) / 8, jnp.bfloat16) for s in ((T, d), (d, f), (f, d)))

    def gradients(implementation):
        def loss(*arrays):
            y = s24.sparse_ffn(*arrays, method, implementation=implementation)
            return (y.astype(jnp.float32) ** 2).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, w1, w2).compile()
        return compiled(x, w1, w2), compiled.as_text()

    (got, text), (want, other) = gradients(None), gradients("cusparselt")
    assert text.count('custom_call_target="s24_matmul_compressed24"') == 2
    assert "s24_matmul_compressed24" not in other
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(g, np.float32) for g in (a, b))
        assert np.abs(a - b).max() <= 2.0**-5 * np.abs(b).max()
