"""8-bit floats: packing and products of float8_e4m3fn."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.matmul import contract
from tests.ops import oracle
from tests.ops.data import assert_within, unit_roundoff

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def bits(x) -> np.ndarray:
    """Of e4m3; on a GPU, whose conversions return one NaN, without the sign of NaN."""
    codes = np.asarray(x).view(np.uint8)
    return codes if jax.default_backend() == "cpu" else np.where(codes % 128 == 127, 127, codes)


@pytest.mark.parametrize("axis", [-1, -2])
def test_packing_any_bits(implementation, axis):
    """All 256 of them, NaN and both zeros too, in groups with many ties."""
    rng = np.random.default_rng(1)
    codes = np.concatenate(
        [np.arange(256), rng.integers(0, 256, 4096), rng.choice([0, 1, 128, 127, 255], 256)]
    )
    x = codes.astype(np.uint8).view(E4M3).reshape(-1, 64)
    packed = s24.pack24(jnp.asarray(x), axis, implementation=implementation)
    values, metadata = oracle.pack24(x, axis)
    assert packed.dtype == E4M3
    np.testing.assert_array_equal(packed.metadata, metadata)
    np.testing.assert_array_equal(bits(packed.values), bits(values))
    dense = oracle.unpack24(values, metadata, axis)
    np.testing.assert_array_equal(bits(packed.todense(implementation=implementation)), bits(dense))


def test_packing_by_a_mask(implementation):
    x = np.arange(32, dtype=np.uint8).view(E4M3).reshape(2, 16)
    mask = np.arange(32).reshape(2, 16) % 4 == 0
    packed = s24.pack24(jnp.asarray(x), 1, jnp.asarray(mask), implementation=implementation)
    np.testing.assert_array_equal(bits(packed.todense()), np.where(mask, bits(x), 0))


LAYOUTS = list(itertools.product((-1, -2), (-1, -2)))


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_products(implementation, side):
    """In every layout, and of every dtype; sums are float32, products of two numbers exact. A GPU adds some
    terms of dense operands with 14 bits."""
    rng = np.random.default_rng(2)
    unit = 2.0**-24 if side != "none" or jax.default_backend() == "cpu" else 2.0**-14
    p = oracle.prune24(rng.normal(size=(24, 64)).astype(E4M3), -1)
    d = rng.normal(size=(64, 20)).astype(E4M3)
    exact = oracle.wide(p) @ oracle.wide(d)
    sums = 32 * unit * np.abs(oracle.wide(p)) @ np.abs(oracle.wide(d))
    outs = ("bfloat16", "float16", "float32", None)
    for (p_axis, d_axis), out in zip(LAYOUTS, outs, strict=True):
        packed = jnp.asarray(p if p_axis == -1 else p.T)
        packed = packed if side == "none" else s24.pack24(packed, p_axis)
        dense = jnp.asarray(d if d_axis == -2 else d.T)
        args = (dense, packed, d_axis, p_axis) if side == "right" else (packed, dense, p_axis, d_axis)
        got = jax.jit(lambda a, b, axes=args[2:], out=out: contract(a, b, *axes, implementation, out))(
            *args[:2]
        )
        assert got.dtype == (out or "bfloat16")
        bound = sums + (1 + 2**-8) * unit_roundoff(got.dtype) * np.abs(exact)
        assert_within(got.T if side == "right" else got, exact, bound)


def test_a_packed_operand_by_default():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(16, 32)), E4M3)
    w = s24.pack24(x, -1)
    got = s24.matmul(x, w.T, bias=jnp.ones(16), activation="relu")
    want = oracle.wide(x) @ oracle.wide(w.todense()).T + 1
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(got), np.maximum(want, 0), rtol=2**-6, atol=2**-6)
