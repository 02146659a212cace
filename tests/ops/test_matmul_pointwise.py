"""The squared ReLU of a 2:4 product, and the gradient of the input of an activation from one: what they are,
which calls are one pass, and what programs call."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import decision, hardware, native, operation
from jax_sparse24.dispatch.decision import named
from jax_sparse24.dispatch.generations import AMPERE, BLACKWELL, HOPPER
from jax_sparse24.dispatch.hopper import MOST
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.matmul_pointwise import (
    MATMUL_SLOPE,
    MATMUL_SQUARED_RELU,
    matmul_slope,
    matmul_squared_relu,
)
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.reference.slope import activation_gradient
from tests.ops import not_finite
from tests.ops.data import assert_same_bits

T, d, f = 24, 128, 64
ACTIVATIONS = ("squared_relu", "relu")
cpu_only = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")


def operands(dtype="bfloat16", shape=(T, d, f)):
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.integers(-4, 5, size), dtype) for size in (shape[:2], shape[1:]))
    return x, s24.pack24(w, -2, implementation="reference")


def test_it_is_the_activation_of_the_rounded_product(dtype, implementation):
    """Exactly, of whole numbers; a NaN of X is one of all that it gives."""
    x, w = operands(dtype)
    y = np.asarray(x, np.float64) @ np.asarray(w.todense(), np.float64)
    rounded = np.asarray(jnp.asarray(y, dtype), np.float64)
    want = jnp.asarray(np.where(rounded > 0, rounded**2, 0).astype(np.float32)).astype(dtype)
    got = matmul_squared_relu(x, w, implementation=implementation)
    assert_same_bits(got, want)
    assert 0.3 < (np.asarray(got, np.float32) > 0).mean() < 0.7
    lost = np.isnan(np.asarray(matmul_squared_relu(x.at[2, 5].set(jnp.nan), w), np.float32))
    assert lost[2].any() and not np.delete(lost, 2, 0).any()


@pytest.fixture
def no_tiles():
    """Kernels of a CPU other than those by AMX, which multiply what is not kept by zero."""
    cpu = native.module("cpu")
    sets = cpu.isas() if cpu else ["generic"]
    if sets[0] == "amx":
        cpu.use_isa(sets[1])
    yield
    if cpu:
        cpu.use_isa(sets[0])


# What `not_finite.misfits` says where Inf and NaN meet what is not kept: each misfit is a NaN.
ADDED = r"(\d+) of 57600 elements are wrong .*: 0 NaN are missing, and \1 are where none"


@cpu_only
@pytest.mark.parametrize("kind", not_finite.OPERANDS)
def test_tiles_are_a_dense_product_of_what_is_not_finite(kind):
    if "amx" not in native.module("cpu").isas():
        pytest.skip("this processor has no AMX")
    x, w = not_finite.OPERANDS[kind]()
    found = not_finite.misfits(x, w, matmul_squared_relu(x, s24.pack24(w, -2), implementation="ffi"))
    dense = not_finite.misfits(x, w, matmul_squared_relu(x, s24.pack24(w, -2), implementation="reference"))
    assert re.match(ADDED, found) and found.split(" of ")[0] == dense.split(" of ")[0]


@pytest.mark.parametrize("kind", not_finite.OPERANDS)
def test_what_is_not_finite(kind, no_tiles):
    """Packed kernels skip what is not kept; a dense product multiplies it by zero, and is found out."""
    x, w = not_finite.OPERANDS[kind]()
    packed = s24.pack24(w, -2)
    assert not not_finite.misfits(x, w, matmul_squared_relu(x, packed, implementation="ffi"))
    found = not_finite.misfits(x, w, matmul_squared_relu(x, packed, implementation="reference"))
    assert re.match(ADDED, found)
    lost = jnp.nan_to_num(contract(x, packed, -1, -2, "ffi"), nan=0, posinf=jnp.inf, neginf=-jnp.inf)
    found = not_finite.misfits(x, w, lost, squared=False)
    assert re.match(r"(\d+) of 57600 elements are wrong .*: \1 NaN are missing, and 0 are where none", found)


def test_the_steps_multiply_as_was_decided(implementation):
    """Where no implementation is named, and nothing is decided again."""
    x, w = operands()
    want = jnp.square(jax.nn.relu(contract(x, w, -1, -2, implementation)))
    assert_same_bits(matmul_squared_relu(x, w, decision=named(implementation)), want)


def test_vmap_broadcasts(implementation):
    x, w = operands(shape=(3 * T, d, f))
    x = x.reshape(3, T, d)
    weights = jax.tree.map(lambda part: jnp.stack([part, part[::-1], part]), w)

    def run(x, w):
        return matmul_squared_relu(x, w, implementation=implementation)

    for axes, given in (((0, None), (x, w)), ((None, 0), (x[0], weights)), ((0, 0), (x, weights))):
        got = jax.vmap(run, axes)(*given)
        for n in range(3):
            one = [jax.tree.map(lambda a, n=n: a[n], g) if a == 0 else g for g, a in zip(given, axes)]  # noqa: B905
            assert_same_bits(got[n], run(*one))


@pytest.fixture
def on_h200(monkeypatch):
    """Programs are traced and lowered as on Hopper with kernels."""
    jax.clear_caches()
    for module in (decision, hardware, operation):
        monkeypatch.setattr(module, "platform", lambda: "cuda")
    for module in (decision, hardware):
        monkeypatch.setattr(module, "capability", lambda: "9.0")
        monkeypatch.setattr(module, "generation", lambda: HOPPER)
    monkeypatch.setitem(native._loaded, "cuda", (object(), None))
    yield
    jax.clear_caches()


@cpu_only
def test_which_calls_take_one_pass(on_h200, monkeypatch):
    """On Hopper, whole tiles of bfloat16: where our kernels are asked for, or were measured to be faster."""

    def in_one_pass(shape=(T, d, f), dtypes=("bfloat16", "bfloat16"), implementation="ffi", axis=-2):
        x = jax.ShapeDtypeStruct(shape[:2], dtypes[0])
        w = jax.ShapeDtypeStruct(shape[1:] if axis == -2 else shape[:0:-1], dtypes[1])
        packed = Packed24(*Packed24.types(w, axis), axis)
        return MATMUL_SQUARED_RELU.in_one_pass(x, packed, decision=None, implementation=implementation)

    assert in_one_pass() and in_one_pass((1, 14336, 4096)) and in_one_pass((MOST, d, f))
    assert not in_one_pass((T, d + 64, f)) and not in_one_pass((T, d, f + 32))
    assert not in_one_pass((T, 0, f)), "nothing is summed"
    assert not in_one_pass((MOST + 1, d, f)) and not in_one_pass(axis=-1, shape=(T, d, d))
    for dtypes in (("float16", "float16"), ("float32", "float32"), ("float32", "bfloat16")):
        assert not in_one_pass(dtypes=dtypes)
    assert not in_one_pass(implementation="reference") and not in_one_pass(implementation=None)
    name = hardware.hardware().name
    known = dataclasses.replace(HOPPER, faster=frozenset({(name, "matmul_squared_relu", "bfloat16", False)}))
    for row, runs in ((known, True), (HOPPER, False)):
        monkeypatch.setattr(hardware, "generation", lambda row=row: row)
        assert in_one_pass(implementation=None) == runs
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "1")
    assert not in_one_pass()
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "0")
    assert in_one_pass()
    for row in (AMPERE, BLACKWELL, None):
        monkeypatch.setattr(hardware, "generation", lambda row=row: row)
        assert not in_one_pass()


@cpu_only
@pytest.mark.parametrize("shape", [(T, d, f), (7, d, f), (T, d, f + 16)], ids=str)
def test_one_call_on_hopper(shape, on_h200):
    """If the operands fall into whole tiles; nothing else is computed. Elsewhere the product is a call."""
    (rows, depth, columns), packs = shape, s24.pack24

    def made(x, w):
        return matmul_squared_relu(x, packs(w, -2, implementation="ffi"), implementation="ffi")

    given = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in (shape[:2], shape[1:])]
    traced = jax.jit(made).trace(*given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"@(s24_\w+)\(.*: \((.*)\) -> (.*)\n", text)
    steps = ["s24_pack", "s24_matmul"]
    assert re.findall(r"@(s24_\w+)\(", traced.lower(lowering_platforms=("cpu",)).as_text()) == steps
    if columns % 64:
        assert [target for target, *_ in found] == steps and "stablehlo.maximum" in text
        return
    assert [target for target, *_ in found] == [
        "s24_pack",
        "s24_cusparselt_compress",
        "s24_matmul_squared_relu",
    ]
    compressed = f"tensor<{columns * 9 // 8}x{depth // 2}xbf16>"
    assert found[-1][1:] == (
        f"{compressed}, tensor<{rows}x{depth}xbf16>",
        f"tensor<{rows}x{columns}xbf16>",
    )
    assert "stablehlo.maximum" not in text and "stablehlo.multiply" not in text


def operands_of_slopes(dtype="bfloat16", batch=()):
    rng = np.random.default_rng(5)
    sizes = (T, d), (f, d), (T, f)
    dy3, w, y1 = (jnp.asarray(rng.integers(-4, 5, (*batch, *size)), dtype) for size in sizes)
    return dy3, s24.pack24(w, -1, implementation="reference"), jnp.maximum(y1, 0) ** 2


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_slope_times_the_rounded_product(dtype, activation, implementation):
    """Exactly, of whole numbers; the slope is that of a dense block."""
    dy3, w, y2 = operands_of_slopes(dtype)
    y1 = jnp.sqrt(y2)
    exact = np.asarray(dy3, np.float64) @ np.asarray(w.todense(), np.float64).T
    rounded = np.asarray(jnp.asarray(exact, dtype), np.float64)
    slope = np.asarray(2 * y1 if activation == "squared_relu" else y1 > 0, np.float64)
    saved = y2 if activation == "relu" or dtype == "bfloat16" else y1
    got = matmul_slope(dy3, w, saved, activation, implementation=implementation)
    assert_same_bits(got, jnp.asarray(np.where(slope > 0, slope * rounded, 0), dtype))
    assert 0.2 < (np.asarray(got, np.float32) != 0).mean() < 0.8


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_steps_of_slopes_multiply_as_was_decided(activation, implementation):
    """Where no implementation is named, and nothing is decided again."""
    dy3, w, y2 = operands_of_slopes()
    want = activation_gradient(y2, contract(dy3, w, -1, -1, implementation), activation)
    assert_same_bits(matmul_slope(dy3, w, y2, activation, decision=named(implementation)), want)


def test_vmap_broadcasts_slopes(implementation):
    dy3, w, y2 = operands_of_slopes(batch=(3,))

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
def test_which_slopes_take_one_pass(on_h200):
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
    assert not in_one_pass((T, 0, f)), "nothing is summed"
    assert not in_one_pass((MOST + 1, d, f)) and not in_one_pass((T, d, d), axis=-2)
    wide = ("float32", "bfloat16", "bfloat16")
    for dtypes in (3 * ("float16",), wide, wide[::-1]):
        assert not in_one_pass(dtypes=dtypes)
    assert not in_one_pass(implementation="reference") and not in_one_pass(implementation=None)


@cpu_only
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_are_one_call_on_hopper(activation, on_h200):
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
