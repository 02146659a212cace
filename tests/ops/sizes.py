"""Kernels on arrays of any sizes, from which tests/native derives right and wrong calls.

Those of an operation on one array follow from its `Case`. Entries of their own have operations whose arrays
depend on further sizes, or that are on one platform alone."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse24 as s24
from jax_sparse24.dispatch.decision import named
from jax_sparse24.ops.compressed24 import Compressed24, compress
from jax_sparse24.ops.features import TOP_FEATURES
from jax_sparse24.ops.gated import gated_backward, gated_backward_pack
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.matmul_pointwise import matmul_slope, matmul_squared_relu
from jax_sparse24.ops.mvue import key_of_shard, mvue_pack24, mvue_pack24_strided
from jax_sparse24.ops.packed24 import pack24_strided
from jax_sparse24.ops.packed_vnm import squared_relu_vnm
from jax_sparse24.ops.sampled import sampled_matmul
from jax_sparse24.ops.saved import pack_counted, saved_backward
from jax_sparse24.ops.slope import slope_mvue_pack24
from tests.ops.cases import BOTH, CASES, FLOATS, HALVES, KEY, KEYS, Case, packed24, repacking, vnm_calls

# Operands of which a dimension is one for all of a batch.
ONE_OF_ALL = tuple(f"operand {i} dim {d} = 1" for i in range(3) for d in range(2))

Calls = Iterator[tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]]


@dataclasses.dataclass(frozen=True)
class Sized:
    """Kernels on arrays of any sizes: tests/native derives from it what their handlers must take and refuse.

    targets: the kernels that are meant, of all that are called.
    make: (dtype, **sizes) -> (function of arrays and an implementation, shapes of the arrays), some.
    sizes: right ones, of which each may also be twice as large. Every dimension of an array is a product of
        sizes, divided by others and by a number.
    multiples: of what a size is a multiple, if not of 1.
    on_cuda: of what it is one on CUDA, if of more.
    least: below what a size is wrong.
    forbidden: what a size must not be.
    choices: the sizes at random of which one is taken; others are any.
    most: elements of an array of such sizes.
    places: (dtype, sizes) besides them.
    more: as `make`, further right calls, of batches and single rows.
    legal: calls that differ from one of `make` by no more than that, and are right, too.
    dtypes: of the arrays.
    only: the platform that has the kernels, if not both do.
    sums: whether implementations may differ in rounding, but for small whole numbers.
    rounds: whether they may differ for all numbers."""

    targets: tuple[str, ...]
    make: Callable[..., Calls]
    sizes: dict[str, int]
    multiples: dict[str, int] = dataclasses.field(default_factory=dict)
    on_cuda: dict[str, int] = dataclasses.field(default_factory=dict)
    least: dict[str, int] = dataclasses.field(default_factory=dict)
    forbidden: dict[str, tuple] = dataclasses.field(default_factory=dict)
    choices: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    most: int = 24000
    places: tuple[tuple[str, dict[str, int]], ...] = ()
    more: Callable[..., Calls] = lambda *_, **__: ()
    legal: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = FLOATS
    only: str = ""
    sums: bool = False
    rounds: bool = False

    @classmethod
    def of(cls, case: Case) -> "Sized":
        rows = case.multiples == (1, 4)  # which may stand alone, or be a batch

        def make(dtype, R, K):
            yield case.call, _arrays(dtype, (R, K))
            if rows:
                yield _of_rows(case.call), _arrays(dtype, (R, K))

        def more(dtype, R, K):
            for shape in ((1, R, K), (2, R, K), *[(K,)] * rows):
                yield case.call, _arrays(dtype, shape)

        return cls(
            (case.target, case.on_cuda),
            make,
            sizes={"R": 16, "K": 24},
            multiples=dict(zip("RK", case.multiples, strict=True)),
            places=tuple((dtype, {"R": 144, "K": 208}) for dtype in case.other_dtypes),
            more=more,
            legal=case.legal,
            dtypes=FLOATS + case.other_dtypes,
        )


def _of_rows(call: Callable) -> Callable:
    return lambda x, impl: jax.vmap(lambda row: call(row, impl))(x)


def _arrays(dtype, *shapes) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def _turned(shape, axis: int):
    """A matrix of this shape whose last axis is to be `axis`."""
    return shape if axis == -1 else shape[::-1]


def _calls_of_products(pack, dtype, R, K, N, sides=(True, False), **options) -> Calls:
    """Products of a packed matrix (R, K) in every layout, and sums in float32. sides: of whether it is on the
    left."""
    for axis, dense_axis, left in itertools.product((-1, -2), (-1, -2), sides):

        def product(x, y, impl, axis=axis, dense_axis=dense_axis, left=left, out=None):
            a, b = (pack(x, axis, impl), axis), (y, dense_axis)
            (a, a_axis), (b, b_axis) = (a, b) if left else (b, a)
            return contract(a, b, a_axis, b_axis, impl, out, **options)

        arrays = _arrays(dtype, _turned((R, K), axis), _turned((N, K), dense_axis))
        yield product, arrays
        yield partial(product, out=jnp.float32), arrays


def _calls_in_batches(products, dtype, **sizes) -> Calls:
    """The first of the products in a batch of two, which have operands of their own, or one for both. A small
    product is enough for what batches add."""
    if math.prod(sizes.values()) > 1 << 20:
        return
    product, operands = next(iter(products(dtype, **sizes)))
    for axes in list(itertools.product((0, None), repeat=len(operands)))[:-1]:  # one at least is mapped

        def call(*arrays, axes=axes):
            *arrays, impl = arrays
            return jax.vmap(lambda *arrays: product(*arrays, impl), axes)(*arrays)

        shapes = [(2, *a.shape) if axis == 0 else a.shape for a, axis in zip(operands, axes, strict=True)]
        yield call, _arrays(dtype, *shapes)


def _calls_of_shards(axis, dtype, R, K, batch=()) -> Calls:
    keys = jnp.stack([key_of_shard(KEY, above, 2, 5) for above in (1, 3)])
    for op, exact in itertools.product((s24.mvue24, mvue_pack24), (True, False)):

        def call(x, impl, key=keys[0], op=op, exact=exact):
            return op(key, x, axis, exact, implementation=impl)

        yield call, _arrays(dtype, (*batch, R, K))
        if axis == -1 and not batch:
            yield _of_rows(call), _arrays(dtype, (R, K))
        if batch:
            each = lambda x, impl, call=call: jax.vmap(lambda x, key: call(x, impl, key))(x, keys)  # noqa: E731
            yield each, _arrays(dtype, (*batch, R, K))


def _calls_of_strided(dtype, R, K) -> Calls:
    yield lambda x, impl: pack24_strided(x, implementation=impl), _arrays(dtype, (K, R))
    for exact in (True, False):
        yield (
            lambda x, impl, exact=exact: mvue_pack24_strided(KEY, x, exact, implementation=impl),
            _arrays(dtype, (K, R)),
        )


def _calls_of_saved(dtype, T, f, n) -> Calls:
    features = np.sort(np.random.default_rng(n).permutation(f)[:n]).astype(np.int32)
    for activation, tokens in itertools.product(("squared_relu", "relu"), ("strided", "consecutive")):

        def call(x, dy2, impl, activation=activation, tokens=tokens):
            packed = s24.pack24(x, -1, implementation=impl)
            return saved_backward(packed, dy2, features, activation, tokens, implementation=impl)

        yield call, _arrays(dtype, (T, f), (T, f))


def _calls_of_slopes(dtype, T, f) -> Calls:
    for activation, exact in itertools.product(("squared_relu", "relu"), (True, False)):

        def call(saved, dy2, impl, activation=activation, exact=exact):
            return slope_mvue_pack24(KEY, saved, dy2, activation, exact, implementation=impl)

        yield call, _arrays(dtype, (T, f), (T, f))


def _batches_of_slopes(dtype, T, f) -> Calls:
    """Both operands of their own, or one of them; keys of shards, one for each."""
    keys = jnp.stack([key_of_shard(KEY, above, 2, 5) for above in (1, 3)])
    for axes in ((0, 0), (0, None), (None, 0)):

        def call(saved, dy2, impl, axes=axes):
            def one(key, *arrays):
                return slope_mvue_pack24(key, *arrays, "squared_relu", implementation=impl)

            return jax.vmap(one, (0, *axes))(keys, saved, dy2)

        shapes = [(2, T, f) if axis == 0 else (T, f) for axis in axes]
        yield call, _arrays(dtype, *shapes)


def _calls_of_squares(dtype, T, d, f) -> Calls:
    def call(x, w, impl):
        return matmul_squared_relu(x, packed24(w, impl, -2), implementation=impl)

    yield call, _arrays(dtype, (T, d), (d, f))


def _calls_of_sloped_products(dtype, T, d, f) -> Calls:
    for activation in ("squared_relu", "relu"):

        def call(dy3, w, saved, impl, activation=activation):
            return matmul_slope(dy3, packed24(w, impl, -1), saved, activation, implementation=impl)

        yield call, _arrays(dtype, (T, d), (f, d), (T, f))


def _calls_of_hopper(dtype, R, K, N) -> Calls:
    """Products with the packed matrix on either side, of (N, K), and of rows of (K, N) in their order and
    strided ones; every second one with a bias."""

    def multiply(p, dense, *bias, left, strided, dense_axis):
        *bias, impl = bias
        axis, ours = -1 if left else -2, impl == "ffi"
        packed = pack24_strided(p, implementation=impl) if strided else packed24(p, impl, axis)
        packed = dataclasses.replace(packed, axis=axis)
        if ours:
            packed = Compressed24(compress(packed), packed.metadata, axis)
        operands, axes = (packed, dense), (axis, dense_axis)
        if not left:
            operands, axes = operands[::-1], axes[::-1]
        product = partial(
            contract, *operands, *axes, decision=None if impl is None else named(impl), strided=strided
        )
        if ours or not bias:
            return product(bias=bias[0] if bias else None)
        sums = product(out_dtype=jnp.float32)  # to which the kernel adds it
        added = bias[0].astype(jnp.float32)
        return (sums + (added[:, None] if left else added)).astype(dense.dtype)

    layouts = itertools.product((False, True), ((False, -1), (False, -2), (True, -2)))
    for n, (left, (strided, dense_axis)) in enumerate(layouts):
        shape = (R, K) if left and not strided else (K, R)  # strided groups lie along axis -2
        call = partial(multiply, left=left, strided=strided, dense_axis=dense_axis)
        dense = (K, N) if dense_axis == -2 else (N, K)
        yield call, _arrays(dtype, shape, dense, *[(R,)] * (n % 2 == 0))


# R, K, N: one tile; one with a block without rows; tiles that are divided into fronts and what lies behind
# them, one, two and three of them; whole tiles and divided ones; columns and rows that are missing.
_DIVIDED = (
    (256, 128, 256),
    (64, 1408, 8),
    (256, 896, 512),
    (768, 640, 256),
    (1088, 256, 520),
    (320, 384, 264),
)


# T, d, f: one tile of a cluster; one with a block that has no rows; stages more than once; bands, of which
# the last is narrower, with rows and columns that are missing.
_TILES_OF_HOPPER = ((256, 128, 256), (1, 128, 128), (300, 640, 64), (520, 256, 576), (2400, 128, 320))


def _calls_of_gated(transposed, dz_transposed, packs, dtype, R, K) -> Calls:
    own, other = ((R, K) if turned else (K, R) for turned in (transposed, dz_transposed))
    order = {"transposed": transposed, "implementation": "ffi"}
    backward = order | {"dz_transposed": dz_transposed}
    for activation in ("silu", "gelu"):

        def call(gate, up, dz, _, activation=activation):
            if packs:
                operands = gate, up, dz, KEYS, activation
                return [gated_backward_pack(*operands, exact, **backward) for exact in (True, False)]
            return s24.gated(gate, up, activation, **order), gated_backward(
                gate, up, dz, activation, **backward
            )

        yield call, _arrays(dtype, own, own, other)


# Sizes of V:N:M: rows are blocks of v, columns are groups of m.
_UNFIT = {"v": (0, 8, 48, 80, 96, 112, 192, 512), "m": (1, 2, 3, 33, 64)}
_VNM_SIZES = {"blocks": 2, "v": 32, "groups": 6, "m": 8}
_HEIGHTS = (16, 32, 64, 128, 256)
_VNM = {"forbidden": _UNFIT, "choices": {"v": _HEIGHTS, "m": (8, 16, 32, *range(4, 33))}}


def _placed(last: str, *places) -> tuple:
    """(dtype, blocks, v, groups, m, and the size that is named) as places of a Sized."""
    names = ("blocks", "v", "groups", "m", last)
    return tuple((dtype, dict(zip(names, sizes, strict=True))) for dtype, *sizes in places)


_IN_TILES = {"v": (64, 128, 256), "m": (8, 16, 32)}
_PACK_VNM = ("s24_vnm_mask", "s24_vnm_pack", "s24_vnm_pack_masked", "s24_vnm_gather", "s24_vnm_unpack")


def _calls_of_blocks(dtype, blocks, v, groups, m, batch=(), **options) -> Calls:
    for axis in (-1, -2):
        shape = *batch, *_turned((blocks * v, groups * m), axis)
        yield vnm_calls(v, m, axis, **options), _arrays(dtype, shape)


_calls_of_24_products = partial(_calls_of_products, lambda x, axis, impl: packed24(x, impl, axis))


def _calls_of_block_products(dtype, blocks, v, groups, m, N, **options) -> Calls:
    def pack(x, axis, impl):
        return s24.pack_vnm(x, v, m, axis=axis, implementation=impl)

    for strided in (False, True):
        yield from _calls_of_products(pack, dtype, blocks * v, groups * m, N, strided=strided, **options)


_calls_of_collected_products = partial(_calls_of_block_products, sides=(True,), collected=True)


def _calls_of_sampled(dtype, blocks, v, groups, m, D) -> Calls:
    def call(a, b, x, impl):
        return sampled_matmul(a, b, s24.pack_vnm(x, v, m, implementation=impl), implementation=impl)

    R, K = blocks * v, groups * m
    yield call, _arrays(dtype, (R, D), (K, D), (R, K))


def _calls_of_repacking(collected, dtype, blocks, v, groups, m) -> Calls:
    for tokens in ("strided", "consecutive"):
        yield repacking(v, m, tokens, collected), _arrays(dtype, (blocks * v, groups * m))


SIZED = [
    *[Sized.of(case) for case in CASES if not case.sums],
    Sized(
        ("s24_squared_relu_pack_both",),
        lambda dtype, R, K: [(BOTH["squared_relu24 both ways"], _arrays(dtype, (R, K)))],
        sizes={"R": 16, "K": 24},
        multiples={"R": 4, "K": 4},
    ),
    *[
        Sized(
            ("s24_mvue", "s24_mvue_pack"),
            partial(_calls_of_shards, axis),
            sizes={"R": 16, "K": 24},
            multiples={name: 4},
            more=partial(_calls_of_shards, axis, batch=(2,)),
        )
        for axis, name in ((-1, "K"), (-2, "R"))
    ],
    Sized(
        ("s24_pack_strided", "s24_mvue_pack_strided"),
        _calls_of_strided,
        sizes={"R": 16, "K": 24},
        multiples={"K": 4},
    ),
    Sized(
        ("s24_matmul",),
        _calls_of_24_products,
        sizes={"R": 16, "K": 24, "N": 20},
        multiples={"K": 4},
        more=partial(_calls_in_batches, _calls_of_24_products),
        most=200_000,
        places=(
            ("bfloat16", {"R": 144, "K": 200, "N": 24}),
            ("float32", {"R": 80, "K": 44, "N": 70}),
            ("float32", {"R": 400, "K": 48, "N": 130}),
            ("bfloat16", {"R": 16, "K": 0, "N": 24}),
            # Where the CPU multiplies tiles: the last block is nearly whole.
            ("bfloat16", {"R": 33, "K": 508, "N": 24}),
        ),
        sums=True,
    ),
    Sized(_PACK_VNM, _calls_of_blocks, _VNM_SIZES, more=partial(_calls_of_blocks, batch=(2,)), **_VNM),
    Sized(
        _PACK_VNM[:2],
        partial(_calls_of_blocks, exact=True),
        _VNM_SIZES,
        forbidden=_UNFIT,
        choices={"v": (16,), "m": (4, 5, 8, 16)},
        most=1500,
        more=partial(_calls_of_blocks, batch=(2,), exact=True),
    ),
    Sized(
        ("s24_vnm_matmul",),
        _calls_of_block_products,
        _VNM_SIZES | {"N": 20},
        more=partial(_calls_in_batches, _calls_of_block_products),
        most=200_000,
        places=_placed(
            "N",
            ("bfloat16", 1, 128, 128, 8, 24),
            ("bfloat16", 2, 64, 80, 16, 264),
            ("bfloat16", 2, 128, 16, 8, 1288),
            ("float16", 5, 64, 112, 4, 136),
            # On Hopper, with the two multiprocessors of tests/native: fewer stages than a block holds, as
            # many, and one block with one more tile than the others.
            ("float16", 1, 128, 80, 4, 520),
            ("float16", 1, 256, 32, 32, 264),
            ("bfloat16", 5, 64, 16, 8, 136),
            ("bfloat16", 1, 64, 32, 4, 1288),
            ("bfloat16", 2, 64, 7, 10, 13),
            ("float16", 2, 32, 32, 16, 136),
            ("float32", 2, 16, 11, 5, 70),
            ("float32", 1, 128, 11, 8, 9),
            ("float32", 2, 16, 300, 8, 5),
            ("bfloat16", 1, 64, 0, 8, 24),
        ),
        sums=True,
        **_VNM,
    ),
    Sized(
        ("s24_vnm_matmul",),
        _calls_of_collected_products,
        _VNM_SIZES | {"N": 20},
        more=partial(_calls_in_batches, _calls_of_collected_products),
        most=200_000,
        places=_placed(
            "N",
            ("bfloat16", 3, 128, 16, 12, 264),
            ("float16", 5, 64, 16, 5, 136),
            ("bfloat16", 1, 64, 32, 4, 1288),
            ("bfloat16", 3, 64, 7, 12, 13),
            ("float16", 7, 16, 32, 14, 136),
            ("float32", 3, 16, 11, 6, 70),
            ("float32", 5, 64, 11, 10, 9),
        ),
        sums=True,
        # Rows are a multiple of m, too: 64 of these sizes, of which 5, 12 and 31 are no divisors.
        forbidden=_UNFIT | {"m": (*_UNFIT["m"], 5, 12, 31)},
        choices={"v": (32, 64, 128, 256), "m": (4, 8, 16, 32)},
    ),
    Sized(("s24_vnm_sampled",), _calls_of_sampled, _VNM_SIZES | {"D": 20}, only="cpu", sums=True, **_VNM),
    Sized(
        ("s24_vnm_sampled",),
        _calls_of_sampled,
        {"blocks": 2, "v": 64, "groups": 32, "m": 8, "D": 64},
        multiples={"groups": 32, "D": 64},
        dtypes=HALVES,
        only="cuda",
        sums=True,
        most=200_000,
        # A tile and parts of one; fewer stages than a block holds, and more; with the two multiprocessors of
        # tests/native, one block with one more tile than the others.
        places=_placed(
            "D",
            ("bfloat16", 1, 64, 160, 4, 128),
            ("float16", 3, 64, 128, 5, 320),
            ("bfloat16", 5, 64, 96, 16, 64),
            ("bfloat16", 1, 128, 96, 8, 576),
            ("float16", 1, 256, 64, 32, 192),
        ),
        forbidden=_UNFIT | {"v": (*_UNFIT["v"], 16, 32)},
        choices={"v": (64, 128, 256), "m": (8, 16, 32, *range(4, 33))},
    ),
    Sized(
        ("s24_saved_backward",),
        _calls_of_saved,
        sizes={"T": 128, "f": 24, "n": 5},
        multiples={"T": 4, "f": 4},
        on_cuda={"T": 128, "f": 8},
        choices={"n": tuple(range(10))},
    ),
    Sized(
        ("s24_pack_counted",),
        lambda dtype, T, f: [
            (lambda x, impl, squared=squared: pack_counted(x, squared, implementation=impl), a)
            for squared in (True, False)
            for a in [_arrays(dtype, (T, f))]
        ],
        sizes={"T": 256, "f": 24},
        multiples={"T": 128, "f": 8},
        dtypes=HALVES,
        only="cuda",
    ),
    Sized(
        ("s24_slope_mvue",),
        _calls_of_slopes,
        sizes={"T": 256, "f": 24},
        multiples={"T": 128, "f": 8},
        more=_batches_of_slopes,
        dtypes=HALVES,
        only="cuda",
    ),
    *[
        Sized(
            (target,),
            calls,
            sizes={"T": 24, "d": 128, "f": 64},
            multiples={"d": 128, "f": 64},
            least={"d": 128},
            more=partial(_calls_in_batches, calls),
            most=200_000,
            places=tuple(("bfloat16", dict(zip("Tdf", sizes, strict=True))) for sizes in _TILES_OF_HOPPER),
            dtypes=("bfloat16",),
            only="cuda",
            sums=True,
        )
        for target, calls in (
            ("s24_matmul_squared_relu", _calls_of_squares),
            ("s24_matmul_slope", _calls_of_sloped_products),
        )
    ],
    Sized(
        ("s24_matmul_compressed24",),
        _calls_of_hopper,
        sizes={"R": 64, "K": 128, "N": 24},
        multiples={"R": 64, "K": 128, "N": 8},
        least={"K": 128},
        more=partial(_calls_in_batches, _calls_of_hopper),
        most=200_000,
        legal=("operand 2 dim 0 = 0",),  # no bias
        places=tuple(
            (dtype, dict(zip("RKN", sizes, strict=True)))
            for sizes, dtype in zip(_DIVIDED, itertools.cycle(("bfloat16", "float16")))
        ),
        dtypes=("bfloat16", "float16"),
        only="cuda",
        sums=True,
    ),
    Sized(
        ("s24_features",),
        lambda dtype, count, n: [
            (
                lambda x, impl: TOP_FEATURES(x, count=n, most=15, implementation=impl),
                _arrays(dtype, (count,)),
            )
        ],
        sizes={"count": 40, "n": 12},
        least={"count": 12},
        choices={"count": (40, 1100, 17000), "n": (1, 12, 40)},
        dtypes=("int32",),
        legal=("bits=2",),
        only="cuda",
    ),
    *[
        Sized(
            ("s24_gated_backward_pack",) if packs else ("s24_gated", "s24_gated_backward"),
            partial(_calls_of_gated, transposed, dz_transposed, packs),
            sizes={"R": 24, "K": 32},
            multiples={"K": 4 if packs else 1},
            # Element by element, all dimensions are those of a batch.
            legal=(() if packs or transposed or dz_transposed else ONE_OF_ALL),
            only="cuda",
            rounds=True,
        )
        for transposed, dz_transposed, packs in itertools.product((False, True), repeat=3)
    ],
    Sized(
        ("s24_vnm_squared_relu",),
        lambda dtype, blocks, v, groups, m: [
            (
                lambda x, impl: squared_relu_vnm(x, v, m, implementation=impl),
                _arrays(dtype, (blocks * v, groups * m)),
            )
        ],
        sizes={"blocks": 2, "v": 64, "groups": 32, "m": 8},
        multiples={"groups": 16},
        dtypes=HALVES,
        only="cuda",
        forbidden=_UNFIT,
        choices=_IN_TILES,
    ),
    *[
        Sized(
            ("s24_vnm_repack",),
            partial(_calls_of_repacking, collected),
            sizes={"blocks": 2, "v": 64, "groups": 128, "m": 8},
            multiples={"blocks": 2, "groups": 64 if collected else 8},
            dtypes=HALVES,
            only="cuda",
            forbidden=_UNFIT,
            choices=_IN_TILES | {"blocks": (2, 4), "groups": (64, 128)},
            most=200_000,
        )
        for collected in (True, False)
    ],
]
