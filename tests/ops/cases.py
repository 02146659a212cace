"""The operations as functions of arrays, for tests that hold for all of them.

`CASES` are functions of any array (..., 4 m, 4 n): `call(x, implementation)`. `IDENTICAL` adds the operations
that need other arrays and says on which arrays all of them are compared: the reference, the kernels of a CPU
and those of a GPU give the same bits. `ROUNDED` are the kernels whose sums each implementation may round in
its own way. Together they call every kernel: `python -m tests.ops.cases` does so on small arrays, for
compute-sanitizer, and looks at no result.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse24 as s24
from jax_sparse24.dispatch import native
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.features import top_features
from jax_sparse24.ops.gated import gated_backward, gated_backward_pack
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.matmul_pointwise import matmul_slope, matmul_squared_relu
from jax_sparse24.ops.mvue import key_of_shard, mvue_pack24, mvue_pack24_strided
from jax_sparse24.ops.packed24 import gather24, pack24_strided
from jax_sparse24.ops.packed_vnm import gather_vnm, repack_vnm, squared_relu_vnm
from jax_sparse24.ops.sampled import sampled_matmul
from jax_sparse24.ops.saved import pack_counted, saved_backward
from jax_sparse24.ops.slope import slope_mvue_pack24
from jax_sparse24.ops.soft import scaled_soft24, soft_pack24
from tests.ops.data import adversarial, device, from_words, saved_operands, without_nan, words

KEY = jax.random.key(7)
KEYS = np.array([[24, 4], [18, 47]], np.uint32)
FLOATS = ("float32", "bfloat16", "float16")
HALVES = FLOATS[1:]
# Operands that are one for all rows.
ONE_ROW = ("operand 0 dim 0 = 1", "operand 1 dim 0 = 1")


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    call: Callable
    target: str  # native kernel that it runs on CPU
    sums: bool = False  # a product: implementations may differ in rounding
    on_cuda: str = ""  # the kernel there, if it is another one
    multiples: tuple[int, int] = (1, 4)  # of which the rows and columns of a matrix must be some
    legal: tuple[str, ...] = ()  # see `sizes.Sized`
    other_dtypes: tuple[str, ...] = ()  # that the kernel takes besides `FLOATS`

    def data(self, shape, dtype="float32", seed=0):
        """Adversarial bits; for a product finite numbers, as it says nothing about payloads of NaN."""
        if self.sums:
            return device(np.random.default_rng(seed).normal(size=shape), dtype)
        return device(adversarial(shape, dtype, seed))

    def __repr__(self):
        return self.name


def packed24(x, impl, axis=-1):
    return s24.pack24(x, axis, implementation=impl)


def softened(op, x, axis, impl):
    return op(x, jnp.asarray(1.37, x.dtype), axis, impl)


def _gather(x, impl):
    return gather24(x, packed24(jnp.flip(x, -1), impl).metadata, -1, impl)


def _double(axis):
    return lambda x, impl: s24.double_prune24(x, axis, implementation=impl)


def _mvue(exact):
    return lambda x, impl: s24.mvue24(KEY, x, -1, exact, implementation=impl)


CASES = [
    Case("mask24", lambda x, impl: s24.mask24(x, -1, implementation=impl), "s24_mask"),
    Case("prune24", lambda x, impl: s24.prune24(x, -1, implementation=impl), "s24_prune"),
    Case(
        "prune_check24",
        lambda x, impl: s24.prune_check24(x, -1, implementation=impl),
        "s24_prune_check",
        other_dtypes=("bool",),
    ),
    Case(
        "prune_check24-columns",
        lambda x, impl: s24.prune_check24(x, -2, implementation=impl),
        "s24_prune_check",
        multiples=(4, 1),
        other_dtypes=("bool",),
    ),
    Case(
        "prune_check24-mask",
        lambda x, impl: s24.prune_check24(jnp.signbit(x), -2, implementation=impl),
        "s24_prune_check",
        multiples=(4, 1),
    ),
    Case("soft24", lambda x, impl: s24.soft24(x, -1, implementation=impl), "s24_soft"),
    Case("soft_pack24", lambda x, impl: softened(soft_pack24, x, -1, impl), "s24_soft_pack"),
    Case(
        "transposable_mask24",
        lambda x, impl: s24.transposable_mask24(x, implementation=impl),
        "s24_transposable_mask",
        multiples=(4, 4),
    ),
    Case("double_prune24-rows", _double(-1), "s24_double_prune", multiples=(4, 4)),
    Case("double_prune24-columns", _double(-2), "s24_double_prune", multiples=(4, 4)),
    Case("mvue24-exact", _mvue(True), "s24_mvue"),
    Case("mvue24-approximate", _mvue(False), "s24_mvue"),
    Case(
        "mvue_pack24",
        lambda x, impl: mvue_pack24(KEY, x, -2, implementation=impl),
        "s24_mvue_pack",
        multiples=(4, 1),
    ),
    Case("pack24", lambda x, impl: s24.pack24(x, -1, implementation=impl), "s24_pack"),
    Case(
        "pack24-columns",
        lambda x, impl: s24.pack24(x, -2, implementation=impl),
        "s24_pack",
        multiples=(4, 1),
    ),
    Case(
        "pack24-mask",
        lambda x, impl: s24.pack24(x, -1, jnp.signbit(x), implementation=impl),
        "s24_pack_masked",
        legal=ONE_ROW,
    ),
    Case(
        "pack24-mask-both",
        lambda x, impl: s24.pack24(x, (-1, -2), jnp.signbit(x), implementation=impl),
        "s24_pack_masked_both",
        multiples=(4, 4),
    ),
    Case(
        "transposable_pack24",
        lambda x, impl: s24.transposable_pack24(x, implementation=impl),
        "s24_transposable_mask",
        on_cuda="s24_transposable_pack",
        multiples=(4, 4),
    ),
    Case(
        "todense",
        lambda x, impl: packed24(x, impl).todense(implementation=impl),
        "s24_unpack",
        legal=ONE_ROW,
    ),
    Case("gather24", _gather, "s24_gather", legal=ONE_ROW),
    Case(
        "squared_relu24",
        lambda x, impl: s24.squared_relu24(x, implementation=impl),
        "s24_squared_relu_pack",
    ),
    Case(
        "matmul-a",
        lambda x, impl: s24.matmul(packed24(x, impl), jnp.swapaxes(x, -1, -2), implementation=impl),
        "s24_matmul",
        sums=True,
    ),
    Case(
        "matmul-b",
        lambda x, impl: s24.matmul(jnp.swapaxes(x, -1, -2), packed24(x, impl, -2), implementation=impl),
        "s24_matmul",
        sums=True,
    ),
]
ALONG_AN_AXIS = {
    "mask24": lambda x, axis, **kw: s24.mask24(x, axis, **kw),
    "prune24": lambda x, axis, **kw: s24.prune24(x, axis, **kw),
    "prune_check24": lambda x, axis, **kw: s24.prune_check24(x, axis, **kw),
    "soft24": lambda x, axis, **kw: s24.soft24(x, axis, **kw),
    "pack24": lambda x, axis, **kw: s24.pack24(x, axis, **kw),
    "squared_relu24": lambda x, axis, **kw: s24.squared_relu24(x, axis, **kw),
    "mvue24": lambda x, axis, **kw: s24.mvue24(KEY, x, axis, **kw),
}
# What an operation takes besides floating-point numbers of 16 and 32 bits.
OTHER_DTYPES = {"prune_check24": ("bool",), "pack24": ("float8_e4m3fn",), "matmul": ("float8_e4m3fn",)}


# ---- what has the same bits everywhere


@dataclasses.dataclass(frozen=True)
class Identical:
    """Arrays on which the implementations of an operation must agree in every bit.

    call: `call(*arrays, implementation)`. shapes: compared everywhere, the first in all of `dtypes` unless
    not `each`. on_gpu: compared too where there is a GPU; there all shapes are compared in all dtypes. given:
    the arrays of (shape, dtype)."""

    name: str
    call: Callable
    shapes: tuple
    on_gpu: tuple = ()
    dtypes: tuple = FLOATS
    given: Callable = lambda shape, dtype: (adversarial(shape, dtype, seed=1),)
    each: bool = True

    def few(self, shape) -> str:
        """The dtype of a shape where not all are compared."""
        return self.dtypes[len(shape) % 2 % len(self.dtypes)]

    def places(self, gpu: bool) -> Iterator[tuple[tuple, str]]:
        """(shape, dtype) of every comparison."""
        for n, shape in enumerate(self.shapes + self.on_gpu * gpu):
            dtypes = self.dtypes if gpu or (n == 0 and self.each) else (self.few(shape),)
            yield from ((shape, dtype) for dtype in dtypes)

    def __repr__(self):
        return self.name


# axis -> shapes everywhere and on a GPU. One group; a contiguous axis with an odd number of groups, whole and
# half bytes of metadata; inner sizes 17, 70 and 129 around the widths of vectors; leading dimensions; tiles
# of 128 rows, the last tile of columns partly outside.
AXES = {
    -1: (((5, 12), (4,)), ((6, 64), (3, 7, 1032))),
    -2: (((3, 68, 70), (2, 20, 17)), ((256, 192), (2, 128, 72), (2, 384, 8))),
    -3: (((2, 12, 3, 43),), ((128, 3, 24),)),
}
BOTH_WAYS = (((2052, 24), (2052, 20)), ((256, 192), (2, 128, 72), (3, 68, 72), (4096, 1024)))
STRIDED = (((68, 70),), ((256, 192), (384, 8), (4, 3), (8, 1), (4096, 1024)))


def _by_flipped(x, axis, implementation):
    return s24.pack24(
        x, axis, s24.mask24(x[::-1], axis, implementation=implementation), implementation=implementation
    )


def _gathered(x, axis, implementation):
    return gather24(x[::-1], packed24(x, implementation, axis).metadata, axis, implementation)


PLACED = {
    **{
        name: lambda x, axis, impl, op=op: op(x, axis, implementation=impl)
        for name, op in ALONG_AN_AXIS.items()
    },
    "scaled_soft24": lambda x, axis, impl: softened(scaled_soft24, x, axis, impl),
    "soft_pack24": lambda x, axis, impl: softened(soft_pack24, x, axis, impl),
    "pack24 with mask": _by_flipped,
    "todense": lambda x, axis, impl: packed24(x, impl, axis).todense(implementation=impl),
    "gather24": _gathered,
    "mvue24 approximate": lambda x, axis, impl: s24.mvue24(KEY, x, axis, False, implementation=impl),
    "mvue_pack24": lambda x, axis, impl: mvue_pack24(KEY, x, axis, implementation=impl),
    "mvue_pack24 approximate": lambda x, axis, impl: mvue_pack24(KEY, x, axis, False, implementation=impl),
}


def _normal(shape, dtype):
    """Tiles of normal numbers are searched in integers, but for a few."""
    return (np.asarray(device(np.random.default_rng(4).normal(size=shape), dtype)),)


def _with_mask(shape, dtype):
    x = adversarial(shape, dtype, seed=4)
    return x, np.random.default_rng(4).random(shape) < 0.5


def _just_below_normal(shape, dtype):
    """Entries that the estimator scales to just below the least normal number; hardware may round them up."""
    bits = [0x7E967699, 0x3F7FFFFF, 0x3F7FFFFE, 0x3F800000, 0x3EFFFFFF]
    return (from_words(np.random.default_rng(3).choice(bits, shape), dtype),)


# With rows of groups that are a multiple of four and others, in tiles and outside of them.
SHARDS_ON_GPU = ((512, 1536), (48, 80), (64, 40), (20, 12))

BOTH = {
    "squared_relu24 both ways": lambda x, impl: s24.squared_relu24(x, (-1, -2), implementation=impl),
    "transposable_pack24": lambda x, impl: s24.transposable_pack24(x, implementation=impl),
}


def _by_best_mask(x, impl):
    return s24.pack24(x, (-1, -2), s24.transposable_mask24(x, implementation=impl), implementation=impl)


# ---- V:N:M: (shape, v, m, axis) everywhere, and on a GPU, there many tiles in both directions too
BLOCKS = [((21, 48), 16, 7, -2), ((176, 192), 64, 8, -2), ((128, 304), 64, 16, -1)]
BLOCKS_ON_GPU = [
    *[
        ((16, 4), 16, 4, -1),
        ((2, 64, 240), 32, 12, -1),
        ((3, 96, 256), 128, 32, -2),
        ((256, 50), 256, 10, -1),
    ],
    *[((128, 256), 64, 8, -1), ((128, 256), 128, 32, -1)],
    *[((512, 4096), 128, 8, -1), ((4096, 512), 256, 16, -2), ((1024, 1536), 64, 12, -1)],
    ((256, 192), 64, 32, -2),
]
SEARCHED = [((48, 40), 16, 8, -1), ((40, 48), 16, 8, -2)]
SEARCHED_ON_GPU = [place for place in BLOCKS + BLOCKS_ON_GPU[:4] if place[2] <= 16]


def vnm_calls(v, m, axis, exact=False):
    def call(x, impl):
        options = {"axis": axis, "implementation": impl}
        packed = s24.pack_vnm(x, v, m, exact=exact, **options)
        if exact:
            return packed, s24.vnm_mask(x, v, m, exact=True, **options)
        by_mask = s24.pack_vnm(x, v, m, mask=jnp.signbit(x), **options)
        gathered = gather_vnm(jnp.flip(x, axis), packed, implementation=impl)
        return (
            packed,
            by_mask,
            gathered,
            packed.todense(implementation=impl),
            s24.vnm_mask(x, v, m, **options),
        )

    return call


def _vnm(places, on_gpu, **options) -> Iterator[Identical]:
    for place in (*places, *on_gpu):
        shape, v, m, axis = place
        where = {"shapes": (shape,)} if place in places else {"shapes": (), "on_gpu": (shape,)}
        name = f"{'searched ' if options else ''}V:N:M {v}:2:{m} along {axis}"
        yield Identical(name, vnm_calls(v, m, axis, **options), **where)


def repacking(v, m, tokens, collected):
    return lambda x, impl: repack_vnm(
        s24.pack_vnm(x, v, m, implementation=impl), tokens, collected, implementation=impl
    )


# (shape, v, m, whether features are collected), in tiles of a kernel of CUDA
REPACKED = [
    (*place, collected)
    for place in (
        *(((256, 1024), 64, 16), ((256, 2048), 64, 16), ((128, 2048), 128, 8), ((1152, 1024), 128, 8)),
        *(((128, 2048), 64, 32), ((128, 4096), 64, 32), ((512, 512), 256, 32)),
        *(((256, 2048), 256, 8), ((128, 192), 64, 16), ((128, 384), 64, 16)),
    )
    for collected in (True, False)
    if not (collected and place[0][1] // place[2] % place[1])  # groups in whole blocks
]


# ---- what follows from saved activations, in 16-bit floats and whole tiles
def features_of(f):
    return np.flatnonzero(np.random.default_rng(0).random(f) < 0.2).astype(np.int32)


def _saved(given):
    return lambda shape, dtype: (
        *jax.device_get(saved_operands(dtype, shape, given)),
        features_of(shape[1]),
    )


def _finite(shape, dtype):
    x = adversarial(shape, dtype, 1)
    return (from_words(words(x) & words(np.asarray(-1.9, x.dtype)), dtype),)


def _scores(shape, dtype):
    count, most = shape
    return (np.random.default_rng(count).integers(0, most + 1, count, np.int32),)


def _tops(most):
    return lambda scores, impl: [
        top_features(scores, share, most, implementation=impl) for share in (0.05, 1.0)
    ]


IDENTICAL = [
    *[
        Identical(case.name, case.call, ((3, 100, 420),), given=lambda *a: (adversarial(*a),))
        for case in CASES
        if not case.sums
    ],
    *[
        Identical(
            f"{name} along {axis}",
            lambda x, impl, op=op, axis=axis: op(x, axis, impl),
            *shapes,
            each=axis == -2,  # `CASES` have all dtypes along the last axis
        )
        for name, op in PLACED.items()
        for axis, shapes in AXES.items()
    ],
    *[Identical(name, call, *BOTH_WAYS) for name, call in BOTH.items()],
    Identical(
        "transposable_pack24 of normal numbers", BOTH["transposable_pack24"], *BOTH_WAYS, given=_normal
    ),
    Identical(
        "pack24 both ways",
        lambda x, mask, impl: s24.pack24(x, (-1, -2), mask, implementation=impl),
        *BOTH_WAYS,
        given=_with_mask,
    ),
    Identical("pack24 by the best mask", _by_best_mask, (), BOTH_WAYS[1]),
    Identical("pack24 by the best mask of normal numbers", _by_best_mask, (), BOTH_WAYS[1], given=_normal),
    Identical("pack24_strided", lambda x, impl: pack24_strided(x, implementation=impl), *STRIDED),
    *[
        Identical(
            f"{name} of numbers",
            call,
            (),
            ((256, 192), (2, 128, 72), (2, 384, 264)),  # five strips: four go together
            HALVES,
            lambda shape, dtype: (without_nan(shape, dtype, 1),),
        )
        for name, call in {
            "pack24 along -2": lambda x, impl: PLACED["pack24"](x, -2, impl),
            "squared_relu24 along -2": lambda x, impl: PLACED["squared_relu24"](x, -2, impl),
            "squared_relu24 both ways": BOTH["squared_relu24 both ways"],
        }.items()
    ],
    *[
        Identical(
            f"{name} {exact=}",
            lambda x, impl, op=op, exact=exact: op(x, exact, impl),
            *where,
            **options,
        )
        for exact in (True, False)
        for name, op, where, options in (
            (
                "mvue_pack24_strided",
                lambda x, exact, impl: mvue_pack24_strided(KEY, x, exact, implementation=impl),
                STRIDED,
                {},
            ),
            (
                "mvue24 just below normal",
                lambda x, exact, impl: s24.mvue24(KEY, x, -1, exact, implementation=impl),
                (((512, 64),),),
                {"dtypes": ("float32",), "given": _just_below_normal},
            ),
        )
    ],
    *[
        Identical(
            f"{op.__name__} of a shard {axis=} {exact=}",
            lambda x, impl, op=op, axis=axis, exact=exact: op(
                key_of_shard(KEY, 1, 2, 5), x, axis, exact, implementation=impl
            ),
            (),
            SHARDS_ON_GPU,
        )
        for axis in (-1, -2)
        for op, exact in ((s24.mvue24, True), (mvue_pack24, True), (mvue_pack24, False))
    ],
    *_vnm(BLOCKS, BLOCKS_ON_GPU),
    *_vnm(SEARCHED, SEARCHED_ON_GPU, exact=True),
    *[
        Identical(
            f"squared_relu_vnm {v}:2:{m}",
            lambda x, impl, v=v, m=m: squared_relu_vnm(x, v, m, implementation=impl),
            (shape,),
            dtypes=HALVES,
            given=given,
        )
        for shape, v, m in (((256, 1024), 64, 16), ((1280, 384), 128, 8), ((256, 128), 256, 32))
        for given in (_finite, lambda shape, dtype: (adversarial(shape, dtype, 7),))
    ],
    *[
        Identical(
            f"repack_vnm {v}:2:{m} {tokens} {collected=}",
            repacking(v, m, tokens, collected),
            (),
            (shape,),
            HALVES,
        )
        for shape, v, m, collected in REPACKED
        for tokens in ("strided", "consecutive")
    ],
    *[
        Identical(
            f"saved_backward {activation} {tokens} {given.__name__}",
            lambda *a, activation=activation, tokens=tokens: saved_backward(
                *a[:-1], activation, tokens, implementation=a[-1]
            ),
            ((128, 64),),
            ((256, 72), (1152, 8)),
            HALVES,
            _saved(given),
        )
        for activation in ("squared_relu", "relu")
        for tokens in ("strided", "consecutive")
        for given in (adversarial, without_nan)
    ],
    *[
        Identical(
            f"slope_mvue_pack24 {activation} {exact=}{' of a shard' if key is not KEY else ''}",
            lambda *a, key=key, activation=activation, exact=exact: slope_mvue_pack24(
                key, *a[:-1], activation, exact, implementation=a[-1]
            ),
            ((128, 64), (68, 20)),
            ((256, 72), (1152, 8), (384, 200)),
            given=lambda shape, dtype: (adversarial(shape, dtype, 1), adversarial(shape, dtype, 2)),
        )
        for activation in ("squared_relu", "relu")
        for exact, key in ((True, KEY), (False, KEY), (True, key_of_shard(KEY, 1, 2, 5)))
    ],
    *[
        Identical(
            f"pack_counted {squared=}{' finite' if given is _finite else ''}",
            lambda x, impl, squared=squared: pack_counted(x, squared, implementation=impl),
            ((384, 72),),
            ((128, 8), (1152, 4096 + 8)),
            FLOATS,
            given,
        )
        for squared in (True, False)
        for given in (_finite, lambda shape, dtype: (adversarial(shape, dtype, 1),))
    ],
    *[
        Identical(f"top_features {shape}", _tops(shape[1]), (shape,), dtypes=("int32",), given=_scores)
        for shape in ((8, 1), (14336, 16384), (100_003, 7), (1000, 0))
    ],
]


# ---- sums, which each implementation may round in its own way; matrices that only cuSPARSELt reads


def _products(x, pack, impl):
    """Of a square matrix with itself, packed on either side."""
    for a, b in itertools.product((-1, -2), (-1, -2)):
        yield contract(pack(x, a), x, a, b, impl)
        yield contract(x, pack(x, b), a, b, impl)


def _products_of_blocks(x, impl, v, m):
    pack = partial(s24.pack_vnm, v=v, m=m, implementation=impl)
    return list(_products(x, lambda x, axis: pack(x, axis=axis), impl))


def _gated(x, impl):
    for activation, transposed in itertools.product(("silu", "gelu"), (False, True)):
        order = {"transposed": transposed, "implementation": impl}
        yield s24.gated(x, x, activation, **order)
        yield gated_backward(x, x, x.T if transposed else x, activation, **order)
        yield gated_backward_pack(x, x, x, KEYS, activation, dz_transposed=transposed, **order)


# (name, call, shape, dtypes, the only platform that has kernels for it or nothing)
ROUNDED = [
    *[
        (f"gated {shape}", lambda x, impl: list(_gated(x, impl)), shape, FLOATS, "cuda")
        for shape in ((256, 192), (132, 72), (68, 20))
    ],
    (
        "2:4 products",
        lambda x, impl: list(_products(x, lambda x, axis: packed24(x, impl, axis), impl)),
        (256, 256),
        FLOATS,
        "",
    ),
    *[
        (
            f"{v}:2:{m} products",
            lambda x, impl, v=v, m=m: _products_of_blocks(x, impl, v, m),
            (256, 256),
            FLOATS,
            "",
        )
        for v, m in ((16, 8), (64, 8), (64, 16), (128, 32))
    ],
    (
        "squares of 2:4 products",
        lambda x, impl: matmul_squared_relu(x, packed24(x, impl, -2), implementation=impl),
        (256, 256),
        ("bfloat16",),
        "cuda",
    ),
    *[
        (
            f"slopes of {activation} of 2:4 products",
            lambda x, impl, activation=activation: matmul_slope(
                x, packed24(x, impl, -1), x * x, activation, implementation=impl
            ),
            (256, 256),
            ("bfloat16",),
            "cuda",
        )
        for activation in ("squared_relu", "relu")
    ],
    *[
        (
            "sampled_matmul",
            lambda x, impl: sampled_matmul(
                x, x, s24.pack_vnm(x, 64, 8, implementation=impl), implementation=impl
            ),
            (256, 256),
            dtypes,
            only,
        )
        for dtypes, only in ((("float32",), "cpu"), (HALVES, ""))
    ],
]


def _compressed(x, _):
    for axis in (-1, -2):
        packed = compressed24.pack(x, axis)
        yield packed
        yield packed.todense()
        yield compressed24.squared_relu(x, axis)
        yield compressed24.soft_pack(x, jnp.asarray(1.37, x.dtype), axis)
        for exact in (True, False):
            yield compressed24.mvue_pack(KEY, x, axis, exact)
    for mask in (s24.transposable_mask24(x), s24.mask24(x, -1)):
        yield compressed24.pack_both(x, mask)
    packed, _ = pack_counted(x, True, compressed=True, implementation="ffi")
    for exact in (True, False):
        options = {"compressed": True, "implementation": "ffi"}
        yield slope_mvue_pack24(KEY, x, x, "squared_relu", exact, **options)
    for tokens, activation in itertools.product(("consecutive", "strided"), ("squared_relu", "relu")):
        both = {"compressed": (True, True), "implementation": "ffi"}
        yield saved_backward(packed, x, np.array([1, 5, 17], np.int32), activation, tokens, **both)


COMPRESSED = (
    "matrices for cuSPARSELt",
    lambda x, impl: list(_compressed(x, impl)),
    (256, 256),
    HALVES,
    "cuda",
)


def small_calls(platform: str) -> Iterator[tuple[Callable, tuple]]:
    """(function of arrays, arrays): calls of every kernel of a platform on small arrays."""
    for case in IDENTICAL:
        for shape, dtype in case.places(platform == "cuda"):
            if np.prod(shape) <= 2**18:
                yield (lambda *a, call=case.call: call(*a, "ffi")), case.given(shape, dtype)
    for _, call, shape, dtypes, only in [*ROUNDED, COMPRESSED]:
        if only in ("", platform):
            x = np.random.default_rng(9).normal(size=shape)
            for dtype in dtypes:
                yield (lambda a, call=call: call(a, "ffi")), (np.asarray(device(x, dtype)),)


def called(platform: str, run: Callable) -> set[str]:
    """The targets that are called as `run(function, *arrays)` runs all of `small_calls`."""
    names, kernels = set(), native.call

    def call(name, *args, **attributes):
        names.add(name)
        return kernels(name, *args, **attributes)

    jax.clear_caches()  # what was traced before calls nothing again
    with mock.patch.object(native, "call", call):
        for function, arrays in small_calls(platform):
            run(function, *arrays)
    return names


if __name__ == "__main__":
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    found = called(platform, lambda f, *arrays: jax.block_until_ready(f(*jax.tree.map(jnp.asarray, arrays))))
    print(f"{len(found)} targets called")
