"""Matrices that kernels pack as cuSPARSELt reads them: their bits, and products and gradients with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import hardware
from jax_sparse24.engine import execution, gated
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.gated import gated_backward_pack
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.mvue import mvue_pack24, mvue_pack24_strided
from jax_sparse24.ops.packed24 import pack24_strided
from jax_sparse24.ops.saved import saved_backward
from jax_sparse24.ops.slope import slope_mvue_pack24
from jax_sparse24.ops.soft import soft_pack24
from tests.ops import library
from tests.ops.cases import KEY
from tests.ops.data import adversarial, assert_same_bits, saved_operands

pytestmark = pytest.mark.usefixtures("cusparselt")
DTYPES = ["bfloat16", "float16"]
# Rows and K: one row of tiles of metadata, or several, whole and in part; K in parts of a tile, too.
SIZES = [(16, 32), (80, 96), (128, 512), (192, 640), (1024, 2048)]


def assert_compressed(pairs, *args):
    """Of (made, packed) that a function returns: the same parts, the library's order, the same array."""

    @jax.jit  # one program: compiling takes longest
    def parts(*args):
        return [
            (
                (got.compressed, got.metadata, got.todense(), compressed24.compress(plain)),
                (library.compress(plain), plain.metadata, plain.todense(), got.compressed),
            )
            for got, plain in pairs(*args)
        ]

    for got, want in parts(*args):
        assert_same_bits(got, want)


PRODUCERS = {
    "pack": (compressed24.pack, s24.pack24),
    "masked": tuple(
        lambda x, axis, pack=pack: pack(x, axis, s24.mask24(x[::-1], axis))
        for pack in (compressed24.pack, s24.pack24)
    ),
    "squared ReLU": (compressed24.squared_relu, s24.squared_relu24),
    "soft threshold": tuple(
        lambda x, axis, pack=pack: pack(x, jnp.asarray(1.37, x.dtype), axis)
        for pack in (compressed24.soft_pack, soft_pack24)
    ),
    "exact": tuple(
        lambda x, axis, pack=pack: pack(KEY, x, axis, True) for pack in (compressed24.mvue_pack, mvue_pack24)
    ),
    "approximate": tuple(
        lambda x, axis, pack=pack: pack(KEY, x, axis, False) for pack in (compressed24.mvue_pack, mvue_pack24)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_bits_are_those_of_the_packed_form(axis, size, dtype):
    x = jnp.asarray(adversarial(size if axis == -1 else size[::-1], dtype, seed=5))
    assert_compressed(lambda x: [(made(x, axis), plain(x, axis)) for made, plain in PRODUCERS.values()], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(96, 160), *SIZES[2:]], ids=str)
def test_bits_of_both_ways(size, dtype):
    """By a mask that is 2:4 along both axes, and by one that is not."""
    x = jnp.asarray(adversarial(size, dtype, seed=8))

    def pairs(x):
        for mask in (s24.transposable_mask24(x), s24.mask24(x, -1)):
            made = compressed24.pack_both(x, mask)
            yield from zip(made, s24.pack24(x, (-1, -2), mask), strict=True)

    assert_compressed(pairs, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)], ids=str)
def test_bits_of_the_backward_pass_of_saved_activations(asked, dtype):
    packed, dy2 = saved_operands(dtype, (256, 160))
    features = jnp.asarray([3, 64, 159], jnp.int32)

    def pairs(packed, dy2):
        saved = Compressed24(compressed24.compress(packed), packed.metadata, -1)
        made = saved_backward(saved, dy2, features, "squared_relu", compressed=asked)
        plain = saved_backward(packed, dy2, features, "squared_relu")
        yield made[0], plain[0]
        for flag, got, want in zip(asked, made[1:], plain[1:], strict=True):
            if flag:
                yield got.packed, want.packed

    assert_compressed(pairs, packed, dy2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_of_strided_rows(size, dtype):
    x = jnp.asarray(adversarial(size[::-1], dtype, seed=6))

    def pairs(x):
        yield compressed24.pack(x, -2, strided=True), pack24_strided(x)
        for exact in (True, False):
            made = compressed24.mvue_pack(KEY, x, -2, exact, strided=True)
            yield made, mvue_pack24_strided(KEY, x, exact)

    assert_compressed(pairs, x)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_of_gated_gradients(size):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, *size[::-1])), "bfloat16")
    keys = jnp.asarray([[24, 4], [18, 47]], jnp.uint32)

    def pairs(x):
        made, plain = (
            gated_backward_pack(*x, keys, "silu", compressed=form, implementation="ffi")
            for form in (True, False)
        )
        return zip(made[2:], plain[2:], strict=True)

    assert_compressed(pairs, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_estimates_that_are_made_with_gradients(dtype):
    """In whole tiles, and in steps."""
    for shape in ((256, 192), (384, 96), (96, 160)):
        saved, dy2 = (jnp.asarray(adversarial(shape, dtype, seed)) for seed in (6, 7))

        def pairs(saved, dy2):
            for exact in (True, False):
                made, plain = (
                    slope_mvue_pack24(KEY, saved, dy2, "relu", exact, compressed=form, implementation="ffi")
                    for form in (True, False)
                )
                yield made[1], plain[1]

        assert_compressed(pairs, saved, dy2)


@pytest.mark.parametrize("axes", [(-1, -2), (-1, -1), (-2, -2)], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_products_are_those_of_the_packed_form(axes, side):
    rng = np.random.default_rng(7)
    packed, depth, dense = 272, 320, 136
    free = (packed, dense) if side == "left" else (dense, packed)
    shapes = [(n, depth) if axis == -1 else (depth, n) for n, axis in zip(free, axes, strict=True)]
    a, b = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in shapes)

    def product(pack):
        def run(a, b):
            a, b = (pack(a, axes[0]), b) if side == "left" else (a, pack(b, axes[1]))
            return contract(a, b, *axes, "cusparselt")

        return jax.jit(run)

    assert_same_bits(product(compressed24.pack)(a, b), product(s24.pack24)(a, b))
    # A batch, over either operand, is the loop.
    batch = jnp.stack([a, -a, a + 1])
    batched = jax.vmap(product(compressed24.pack), (0, None))(batch, b)
    for x, got in zip(batch, batched, strict=True):
        assert_same_bits(got, product(compressed24.pack)(x, b))


METHODS = {
    "FST": s24.methods.FST(),
    "SSTE": s24.methods.SSTE(),
    "Activation24": s24.methods.Activation24(),
    "redrawn": s24.methods.Activation24(backward_mask="redraw", token_cut="mvue"),
}


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_with_the_packed_form(name, monkeypatch):
    """Also where steps follow each other in a loop, which XLA may record into a graph."""
    method, rng = METHODS[name], np.random.default_rng(8)
    shapes = ((512, 256), (256, 1024), (1024, 256))
    x, w1, w2 = (jnp.asarray(rng.normal(size=s) / 16, jnp.bfloat16) for s in shapes)
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}

    def ffn(x, w1, w2, key):
        return s24.sparse_ffn(x, w1, w2, method, state, key, implementation="cusparselt")

    def results():
        jax.clear_caches()

        def step(carry, key):
            y, vjp = jax.vjp(lambda *a: ffn(*a, key), x, *carry)
            dx, *d = vjp(y)
            return [w - g for w, g in zip(carry, d, strict=True)], (y, dx, *d)

        return jax.jit(lambda: jax.lax.scan(step, [w1, w2], jax.random.split(KEY, 3)))()

    got = results()
    decide = execution.decide
    packed = lambda *a, **k: dataclasses.replace(decide(*a, **k), form="packed")  # noqa: E731
    monkeypatch.setattr(execution, "decide", packed)
    assert_same_bits(got, results())


def test_gradients_of_a_block_with_a_gate(monkeypatch):
    method, rng = METHODS["FST"], np.random.default_rng(9)
    shapes = ((512, 256), (256, 512), (256, 512), (512, 256))
    x, *w = (jnp.asarray(rng.normal(size=s) / 16, jnp.bfloat16) for s in shapes)
    states, keys = [method.init(m) for m in w], list(jax.random.split(KEY, 3))
    monkeypatch.setattr(hardware, "faster", lambda *_: True)

    def results():
        jax.clear_caches()

        def block(x, *w):
            layers = map(gated.Weight, w, states, keys)
            return gated.gated_ffn((x, x), *layers, method, "silu", "cusparselt")

        y, vjp = jax.vjp(jax.jit(block), x, *w)
        return y, vjp(y)

    got = results()
    decide = execution.decide
    packed = lambda *a, **k: dataclasses.replace(decide(*a, **k), form="packed")  # noqa: E731
    monkeypatch.setattr(execution, "decide", packed)
    assert_same_bits(got, results())
