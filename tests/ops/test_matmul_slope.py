"""The gradient of the input of an activation from a 2:4 product: what it is, and which calls are one pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch.decision import named
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.matmul_pointwise import MATMUL_SLOPE, MOST, matmul_slope
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.reference.slope import activation_gradient
from tests.ops.data import assert_same_bits
from tests.ops.test_matmul_squared_relu import cpu_only, on_h200  # noqa: F401

T, d, f = 24, 128, 64
ACTIVATIONS = ("squared_relu", "relu")


def operands(dtype="bfloat16", batch=()):
    rng = np.random.default_rng(5)
    sizes = (T, d), (f, d), (T, f)
    dy3, w, y1 = (jnp.asarray(rng.integers(-4, 5, (*batch, *size)), dtype) for size in sizes)
    return dy3, s24.pack24(w, -1, implementation="reference"), jnp.maximum(y1, 0) ** 2


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_slope_times_the_rounded_product(dtype, activation, implementation):
    """Exactly, of whole numbers; the slope is that of a dense block."""
    dy3, w, y2 = operands(dtype)
    y1 = jnp.sqrt(y2)
    exact = np.asarray(dy3, np.float64) @ np.asarray(w.todense(), np.float64).T
    rounded = np.asarray(jnp.asarray(exact, dtype), np.float64)
    slope = np.asarray(2 * y1 if activation == "squared_relu" else y1 > 0, np.float64)
    saved = y2 if activation == "relu" or dtype == "bfloat16" else y1
    got = matmul_slope(dy3, w, saved, activation, implementation=implementation)
    assert_same_bits(got, jnp.asarray(np.where(slope > 0, slope * rounded, 0), dtype))
    assert 0.2 < (np.asarray(got, np.float32) != 0).mean() < 0.8


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_steps_multiply_as_was_decided(activation, implementation):
    """Where no implementation is named, and nothing is decided again."""
    dy3, w, y2 = operands()
    want = activation_gradient(y2, contract(dy3, w, -1, -1, implementation), activation)
    assert_same_bits(matmul_slope(dy3, w, y2, activation, decision=named(implementation)), want)


def test_vmap_broadcasts(implementation):
    dy3, w, y2 = operands(batch=(3,))

    def run(*given):
        return matmul_slope(*given, "squared_relu", implementation=implementation)

    for axes in ((0, None, 0), (None, 0, 0), (0, 0, None), (None, None, 0)):
        mapped = list(zip((dy3, w, y2), axes, strict=True))

        def element(n, mapped=mapped):
            return [jax.tree.map(lambda part, i=n if axis == 0 else 0: part[i], a) for a, axis in mapped]

        given = [a if axis == 0 else one for (a, axis), one in zip(mapped, element(0), strict=True)]
        got = jax.vmap(run, axes)(*given)
        for n in range(3):
            assert_same_bits(got[n], run(*element(n)))


@cpu_only
def test_which_calls_take_one_pass(on_h200):  # noqa: F811
    """On Hopper, whole tiles of bfloat16 in all three operands, where our kernels are asked for."""

    def in_one_pass(shape=(T, d, f), dtypes=3 * ("bfloat16",), implementation="ffi", axis=-1):
        tokens, depth, rows = shape
        sizes = (tokens, depth), (rows, depth) if axis == -1 else (depth, rows), (tokens, rows)
        dy3, w, saved = (jax.ShapeDtypeStruct(*given) for given in zip(sizes, dtypes, strict=True))
        packed = Packed24(*Packed24.types(w, axis), axis)
        options = {"activation": "squared_relu", "decision": None, "implementation": implementation}
        return MATMUL_SLOPE.in_one_pass(dy3, packed, saved, **options)

    assert in_one_pass() and in_one_pass((1, 14336, 4096)) and in_one_pass((MOST, d, f))
    assert not in_one_pass((T, d + 64, f)) and not in_one_pass((T, d, f + 32))
    assert not in_one_pass((MOST + 1, d, f)) and not in_one_pass((T, d, d), axis=-2)
    wide = ("float32", "bfloat16", "bfloat16")
    for dtypes in (3 * ("float16",), wide, wide[::-1]):
        assert not in_one_pass(dtypes=dtypes)
    assert not in_one_pass(implementation="reference") and not in_one_pass(implementation=None)


@cpu_only
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_call_on_hopper(activation, on_h200):  # noqa: F811
    """That reads the compressed weight, dY3 and what was saved, and writes dY1; nothing else is computed."""

    def made(dy3, w, saved):
        packed = s24.pack24(w, -1, implementation="ffi")
        return matmul_slope(dy3, packed, saved, activation, implementation="ffi")

    given = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((T, d), (f, d), (T, f))]
    text = jax.jit(made).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"@(s24_\w+)\(.*: \((.*)\) -> (.*)\n", text)
    assert [target for target, *_ in found] == ["s24_pack", "s24_cusparselt_compress", "s24_matmul_slope"]
    compressed, saved = f"tensor<{f * 9 // 8}x{d // 2}xbf16>", f"tensor<{T}x{f}xbf16>"
    assert found[-1][1:] == (f"{compressed}, tensor<{T}x{d}xbf16>, {saved}", saved)
    assert f"relu = {int(activation == 'relu')} : i64" in text
    assert "stablehlo.multiply" not in text and "stablehlo.select" not in text
