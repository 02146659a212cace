"""Calls every CUDA handler on small arrays, for compute-sanitizer: `python -m tests.gpu.every_kernel`.

Results are not looked at here; the tests do that. Arrays are in whole tiles and not, of all dtypes, in both
orders of memory; V:N:M products take both kernels of the device.
"""

import itertools
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
from jax_sparse24.ops.mvue import mvue_pack24, mvue_pack24_strided
from jax_sparse24.ops.packed24 import gather24, pack24_strided
from jax_sparse24.ops.packed_vnm import gather_vnm, repack_vnm, squared_relu_vnm
from jax_sparse24.ops.saved import pack_counted, saved_backward

KEYS = [jax.random.key(seed) for seed in (1, 2)]
KERNELS = {"implementation": "ffi"}
# Whole tiles of several blocks; parts of tiles; rows that are no whole vector.
SHAPES = ((256, 192), (2, 132, 72), (68, 20))
FEATURES = np.array([1, 5, 17], np.int32)


def producers(x):
    for axis in (-1, -2):
        yield s24.mask24(x, axis, **KERNELS)
        yield s24.prune24(x, axis, **KERNELS)
        yield s24.soft24(x, axis, **KERNELS)
        yield s24.double_prune24(x, axis, **KERNELS)
        packed = s24.pack24(x, axis, **KERNELS)
        yield packed
        yield packed.todense(**KERNELS)
        yield gather24(x, packed.metadata, axis, "ffi")
        yield s24.pack24(x, axis, jnp.signbit(x), **KERNELS)
        yield s24.squared_relu24(x, axis, **KERNELS)
        for exact in (True, False):
            yield s24.mvue24(KEYS[0], x, axis, exact, **KERNELS)
            yield mvue_pack24(KEYS[0], x, axis, exact, **KERNELS)
    yield s24.transposable_mask24(x, **KERNELS)
    yield s24.transposable_pack24(x, **KERNELS)
    yield s24.pack24(x, (-1, -2), jnp.signbit(x), **KERNELS)
    yield s24.squared_relu24(x, (-1, -2), **KERNELS)
    if x.ndim == 2:
        yield pack24_strided(x, **KERNELS)
        yield mvue_pack24_strided(KEYS[0], x, **KERNELS)


def for_cusparselt(x):
    """Of sizes that the library takes, in 16-bit floats: the matrix that it reads."""
    for axis in (-1, -2):
        packed = compressed24.pack(x, axis)
        yield packed
        yield packed.todense()
        yield compressed24.squared_relu(x, axis)
        for exact in (True, False):
            yield compressed24.mvue_pack(KEYS[0], x, axis, exact)


def kept(x, also):
    """From packed activations, in 16-bit floats and whole tiles. also: forms of the results."""
    yield pack_counted(x, False, compressed=also[0], **KERNELS)
    packed, counts = pack_counted(x, True, compressed=also[0], **KERNELS)
    yield top_features(counts, 0.1, x.shape[0], **KERNELS)
    for tokens in ("consecutive", "strided"):
        for activation in ("squared_relu", "relu"):
            yield saved_backward(packed, x, FEATURES, activation, tokens, compressed=also, **KERNELS)


def gated(x):
    x = x if x.ndim == 2 else x[0]
    for activation in ("silu", "gelu"):
        for transposed in (False, True):
            order = {"transposed": transposed, **KERNELS}
            yield s24.gated(x, x, activation, **order)
            yield gated_backward(x, x, x.T if transposed else x, activation, **order)
            yield gated_backward_pack(x, x, x, KEYS, activation, dz_transposed=transposed, **order)


def vnm(x, v, m):
    for axis in (-1, -2):
        mask = s24.vnm_mask(x, v, m, axis=axis, **KERNELS)
        packed = s24.pack_vnm(x, v, m, axis=axis, **KERNELS)
        yield s24.pack_vnm(x, v, m, axis=axis, mask=mask, **KERNELS)
        yield packed.todense(**KERNELS)
        yield gather_vnm(x, packed, **KERNELS)
    yield s24.vnm_mask(x, v, m, exact=m <= 16, **KERNELS)
    yield squared_relu_vnm(x, v, m, **KERNELS)


def repacked(x, m):
    """In whole tiles."""
    for collected, tokens in itertools.product((False, True), ("consecutive", "strided")):
        yield repack_vnm(s24.pack_vnm(x, 64, m, **KERNELS), tokens, collected, **KERNELS)


def products(x, pack):
    """Of a square matrix with itself, packed on either side; pack: along an axis."""
    for a, b in itertools.product((-1, -2), (-1, -2)):
        yield contract(pack(x, a), x, a, b, "ffi")
        yield contract(x, pack(x, b), a, b, "ffi")


def calls(dtype):
    """(function, array, other arguments), of functions that give the results of several kernels."""
    for seed, shape in enumerate(SHAPES):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)
        yield producers, x
        yield gated, x
    x = jnp.asarray(np.random.default_rng(9).normal(size=(256, 256)), dtype)
    for v, m in ((16, 8), (64, 8), (64, 16), (128, 32)):
        yield vnm, x, v, m
        yield products, x, lambda x, axis, v=v, m=m: s24.pack_vnm(x, v, m, axis=axis, **KERNELS)
    if dtype != "float32":
        yield products, x, lambda x, axis: s24.pack24(x, axis, **KERNELS)
        yield for_cusparselt, x
        for also in ((False, False), (True, True)):
            yield kept, x, also
        for m in (8, 16):
            x = jnp.asarray(np.random.default_rng(m).normal(size=(128, 64 * m)), dtype)
            yield repacked, x, m


def called(run) -> set[str]:
    """The handlers that are called as `run(function, x, *others)` takes what a function gives."""
    names, kernels = set(), native.call

    def call(name, *args, **attributes):
        names.add(name)
        return kernels(name, *args, **attributes)

    with mock.patch.object(native, "call", call):
        for dtype in ("bfloat16", "float16", "float32"):
            for function, x, *others in calls(dtype):
                run(function, x, *others)
    return names


if __name__ == "__main__":
    found = called(lambda function, *args: jax.block_until_ready(list(function(*args))))
    print(f"{len(found)} handlers called")
