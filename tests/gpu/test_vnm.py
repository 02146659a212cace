"""V:N:M on CUDA: products against float64, the same bits whatever else runs, and packing mapped over and
repeated.

Sizes are those of the kernel for whole tiles on Hopper. Its blocks hold 3 stages (V = 64) or 5 of 64
gathered rows, and 16 M of K are one stage. Tiles are of 128 x 256 (V = 128 and 256), of 64 x 256 or, where
these are an even number side by side and keep a GPU busy, of 64 x 512. One block of a multiprocessor, or
two of 64 x 256, take tiles in turn."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import jax_sparse24 as s24
from jax_sparse24.measure import Oracle, Program, same_bits
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.order import collect, regroup, stable_order
from tests.gpu.test_runtime import assert_same_with_graphs
from tests.ops.cases import HALVES
from tests.ops.data import adversarial, assert_same_bits

REPEATS = 200
# V, and the columns of a tile, the blocks of a multiprocessor and columns of a last tile that is partial.
TALL, WIDE, NARROW = (128, 256, 1, 8), (64, 512, 1, 264), (64, 256, 2, 8)
# Every step multiplies by tiles of every kind, some of them more than a GPU computes at a time.
IN_GRAPHS = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import jax_sparse24 as s24

rng = np.random.default_rng(1)
x, *weights = (jnp.asarray(rng.normal(size=(1536, n)), jnp.bfloat16) for n in (COLUMNS, 1536, 1536, 1536))
packed = [s24.pack_vnm(w, v, 8) for w, v in zip(weights, (64, 128, 256))]

def step(x, _):
    for p in packed:
        x = s24.matmul(p, x, implementation="ffi")
        x = x / jnp.max(jnp.abs(x))
    return x, (jnp.min(x), jnp.max(x))

run = jax.jit(lambda x: jax.tree.leaves(jax.lax.scan(step, x, length=70)))
print(*(hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for _ in range(3) for leaf in run(x)))
"""
KEEPS_BUSY = """
import jax, jax.numpy as jnp

run = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: x @ y / 4096, x))
x = jnp.ones((4096, 4096), jnp.bfloat16)
while True:
    jax.block_until_ready(run(x))
    print("busy", flush=True)
"""


def operands(v, m, rows, k, cols, dtype="bfloat16", seed=8):
    """P (rows, k), packed along its rows, and D (k, cols)."""
    of_x, of_dense = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(of_x, (rows, k)).astype(dtype)  # drawn in bfloat16, it often is 0
    return s24.pack_vnm(x, v, m), jax.random.normal(of_dense, (k, cols)).astype(dtype)


def multiply(packed, dense, transposed=False, out_dtype=None):
    """P D, or its transpose."""
    if transposed:
        return contract(dense, packed, -2, -1, "ffi", out_dtype=out_dtype)
    return contract(packed, dense, -1, -2, "ffi", out_dtype=out_dtype)


def assert_right(packed, dense, transposed=False, out_dtype=None, repeats=0):
    """The product is that of float64, and all repeats of it have the same bits."""
    program = Program(lambda p, d: multiply(p, d, transposed, out_dtype), packed, dense)
    got = program.result.T if transposed else program.result
    assert Oracle(packed.todense(), dense, unit=2.0**-24).excess(got) <= 1
    program.check(program() for _ in range(repeats))
    assert program.repeats_itself()


@pytest.mark.parametrize("v", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("axes", [(-1, -1), (-1, -2), (-2, -1), (-2, -2)], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("m", "groups", "cols"), [(8, 32, 136), (16, 16, 128), (10, 7, 33)])
def test_products(v, axes, side, m, groups, cols, dtype):
    """Whole and partial tiles; either axis of the dense operand contracted; the packed one on either side."""
    rng = np.random.default_rng(6)
    packed_axis, dense_axis = axes if side == "left" else axes[::-1]
    k = m * groups

    def array(free, axis, k_axis):
        return jnp.asarray(rng.normal(size=(free, k) if axis == k_axis else (k, free)), dtype)

    packed = s24.pack_vnm(array(2 * v, packed_axis, -1), v, m, axis=packed_axis)
    dense = array(cols, dense_axis, -1)
    plain = packed.todense()
    plain = plain if packed_axis == -1 else plain.T
    right = dense if dense_axis == -2 else dense.T
    given = (packed, dense) if side == "left" else (dense, packed)
    got = jax.jit(lambda a, b: contract(a, b, *axes, "ffi"))(*given)
    assert Oracle(plain, right, unit=2.0**-24).excess(got if side == "left" else got.T) <= 1


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("v", "m", "rows", "groups", "cols"),
    [
        *(
            (128, 16, 2048, 208, 2568),
            (256, 8, 2048, 208, 264),
            (64, 8, 8448, 208, 2568),
            (64, 16, 192, 48, 264),
        ),
        *((64, 31, 64, 176, 136), (16, 16, 32, 16, 128), (32, 10, 64, 7, 33), (64, 10, 128, 7, 33)),
    ],
)
def test_strided_groups(v, m, rows, groups, cols, transposed, dtype):
    """The bits of the product of regrouped rows, in tiles of every kind and without them."""
    packed, dense = operands(v, m, rows, m * groups, cols, dtype)

    def strided(packed, dense):
        given, axes = ((dense, packed), (-2, -1)) if transposed else ((packed, dense), (-1, -2))
        return contract(*given, *axes, "ffi", strided=True)

    moved = jax.jit(lambda dense: regroup(dense, "strided", m))(dense)
    program = Program(strided, packed, dense)
    assert_same_bits(program.result, jax.jit(lambda p, d: multiply(p, d, transposed))(packed, moved))
    assert program.repeats_itself()


@pytest.mark.parametrize("out_dtype", [None, "float32"], ids=str)
@pytest.mark.parametrize("dense_axis", [-1, -2])
@pytest.mark.parametrize(
    ("v", "m", "rows", "groups", "cols"),
    [
        *((128, 16, 2048, 208, 2568), (256, 8, 2048, 208, 264), (128, 12, 384, 48, 264)),
        *((64, 8, 8448, 208, 2568), (64, 16, 192, 48, 264), (64, 31, 31 * 64, 176, 136)),
        *((16, 16, 32, 16, 128), (32, 10, 320, 7, 33), (64, 12, 192, 7, 33)),
    ],
)
def test_collected_rows(v, m, rows, groups, cols, dense_axis, out_dtype, dtype):
    """The bits of the product whose rows are put back afterwards, in tiles of every kind and without them."""
    packed, dense = operands(v, m, rows, m * groups, cols, dtype)
    dense = dense if dense_axis == -2 else dense.T

    def multiplied(packed, dense, **options):
        return contract(packed, dense, -1, dense_axis, "ffi", out_dtype, strided=True, **options)

    program = Program(lambda p, d: multiplied(p, d, collected=True), packed, dense)
    want = jax.jit(lambda p, d: collect(multiplied(p, d), m, -2))(packed, dense)
    assert_same_bits(program.result, want)
    assert program.repeats_itself()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("v", [64, 128, 256])
@pytest.mark.parametrize(("stages", "m"), [(1, 4), (2, 8), (3, 16), (4, 32), (5, 5), (6, 16), (11, 31)])
def test_products_of_few_stages(stages, m, v, transposed, dtype):
    """Fewer than a block holds, as many and more, odd and even numbers; three blocks of rows, of columns one
    tile and a partial one."""
    assert_right(*operands(v, m, 3 * v, 16 * m * stages, 264, dtype), transposed)


@pytest.mark.parametrize("out_dtype", [None, "float32"], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("v", "rows", "groups", "cols"),
    [(128, 2048, 208, 2568), (256, 2048, 208, 2568), (64, 2560, 112, 2000), (64, 2560, 112, 2232)],
)
def test_products_of_many_tiles(v, rows, groups, cols, transposed, out_dtype, dtype):
    """More tiles than a GPU computes at a time, odd numbers of steps and a last tile that is partial; the
    same bits in every call."""
    assert_right(*operands(v, 8, rows, 8 * groups, cols, dtype), transposed, out_dtype, repeats=REPEATS)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 7])
@pytest.mark.parametrize("tiles", [TALL, WIDE, NARROW], ids=["tall", "wide", "narrow"])
def test_a_last_round_of_one_tile(tiles, stages, transposed):
    """All blocks have taken two tiles, and one takes a third; tiles begin in any stage."""
    v, width, blocks, last = tiles
    cols = 2 * blocks * jax.devices()[0].core_count * width + last
    assert_right(*operands(v, 4, v, 64 * stages, cols), transposed, repeats=20)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("v", "m", "rows", "k"),
    [
        (64, 4, 192, 40960),
        (128, 8, 256, 65536),
        (256, 16, 256, 98304),
        (128, 32, 128, 131072),
        (64, 16, 8448, 32768),
    ],
)
def test_long_contractions(v, m, rows, k, transposed):
    """Up to 640 stages; the last one in tiles of 64 x 512."""
    assert_right(*operands(v, m, rows, k, 264), transposed, repeats=20)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)], ids=str)
@pytest.mark.parametrize("v", [64, 128, 256])
def test_batches(v, mapped, transposed, dtype):
    """The bits of each product alone."""
    each = [operands(v, 16, 2 * v, 16 * 16 * 3, 776, dtype, seed) for seed in range(5)]
    each = [[one[i] if axis == 0 else each[0][i] for i, axis in enumerate(mapped)] for one in each]
    given = [
        jax.tree.map(lambda *xs: jnp.stack(xs), *xs) if axis == 0 else xs[0]
        for xs, axis in zip(zip(*each, strict=True), mapped, strict=True)
    ]
    got = jax.jit(jax.vmap(lambda p, d: multiply(p, d, transposed), mapped))(*given)
    for result, (packed, dense) in zip(got, each, strict=True):
        assert_same_bits(result, jax.jit(lambda p, d: multiply(p, d, transposed))(packed, dense))


@pytest.mark.parametrize("v", [64, 128, 256])
def test_what_is_not_kept_leaves_no_trace(v):
    """Infinite rows of D reach the rows of P that keep their places, and no others."""
    packed, dense = operands(v, 8, 2 * v, 8 * 16 * 6, 264)
    infinite = jnp.arange(dense.shape[0]) % 97 == 5
    got = jax.jit(multiply)(packed, jnp.where(infinite[:, None], jnp.inf, dense))
    reached = (packed.todense() != 0)[:, infinite].any(1)
    assert 0 < reached.sum() < len(reached)
    np.testing.assert_array_equal(jnp.isfinite(got), np.broadcast_to(~reached[:, None], got.shape))


@pytest.mark.parametrize("columns", [2824, 3080])
def test_the_same_bits_in_graphs(columns):
    """In a CUDA graph 630 products follow each other, and each is in a loop that is called three times."""
    assert_same_with_graphs(IN_GRAPHS.replace("COLUMNS", str(columns)))


PAIRS = [(TALL, TALL), (TALL, WIDE), (TALL, NARROW), (WIDE, NARROW), (NARROW, NARROW)]


@pytest.mark.parametrize("kinds", PAIRS, ids=str)
def test_the_same_bits_of_two_at_once(kinds):
    """Two products on streams of their own, 200 times: each has the bits that it has alone."""
    given = [
        operands(v, 8, 2048, 8 * 16 * 13, 4 * width + last, seed=n)
        for n, (v, width, _, last) in enumerate(kinds)
    ]
    want = [jax.jit(multiply)(*pair) for pair in given]

    def both(given):
        found = []
        for stream, pair in enumerate(given, 1):
            with set_xla_metadata(_xla_stream_annotation=str(stream), inlineable="false"):
                found.append(jax.jit(multiply)(*pair))
        return found

    options = {"xla_gpu_experimental_stream_annotation": True}
    run = jax.jit(both).lower(given).compile(options)
    if "explicit" not in run.as_text():
        pytest.skip("this XLA gives the products no streams of their own")
    for _ in range(REPEATS):
        assert same_bits(run(given), want)


@pytest.mark.parametrize("tiles", [TALL, WIDE, NARROW], ids=["tall", "wide", "narrow"])
def test_the_same_bits_beside_another_process(tiles):
    """The GPU takes turns between the products and those of another process."""
    v, width, _, last = tiles
    given = operands(v, 8, 8448, 8 * 16 * 13, 2 * width + last)
    program = Program(multiply, *given)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with subprocess.Popen(
        [sys.executable, "-c", KEEPS_BUSY], env=environment, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout.readline() == b"busy\n"
            program.check(program() for _ in range(10 * REPEATS))
            assert other.poll() is None
        finally:
            other.terminate()
    assert program.repeats_itself()


def test_vmap_and_repetition():
    x = jnp.asarray(adversarial((3, 128, 64), "bfloat16", seed=7))
    pack = jax.jit(jax.vmap(lambda x: s24.pack_vnm(x, 64, 8)))
    first = pack(x)
    for _ in range(20):
        assert_same_bits(pack(x), first)
    for i in range(3):
        assert_same_bits(jax.tree.map(lambda leaf, i=i: leaf[i], first), s24.pack_vnm(x[i], 64, 8))


@pytest.mark.parametrize(("T", "count"), [(16384, 32), (32768, 64), (1000, 7)])
def test_tokens_are_counted_into_the_order_of_their_clusters(T, count):
    clusters = np.random.default_rng(T).integers(0, count, T).astype(np.int32)
    order = jax.jit(stable_order, static_argnums=1)(clusters, count)
    np.testing.assert_array_equal(order, np.argsort(clusters, kind="stable"))
