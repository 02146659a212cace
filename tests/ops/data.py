"""Arrays that are hard on selection and rounding, and comparison by bits."""

import functools

import jax
import ml_dtypes
import numpy as np

from jax_sparse24 import pack24
from jax_sparse24.ops.reference.packed24 import squared_relu

NUMPY = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# dtype -> (unsigned type, explicit mantissa bits)
LAYOUT = {
    "float64": (np.uint64, 52),
    "float32": (np.uint32, 23),
    "bfloat16": (np.uint16, 7),
    "float16": (np.uint16, 10),
}


def unit_roundoff(dtype) -> float:
    """Largest relative error of rounding to `dtype`."""
    return 2.0 ** -(LAYOUT[str(np.dtype(dtype))][1] + 1)


def words(x) -> np.ndarray:
    """The elements as unsigned integers; booleans and bytes as they are."""
    x = np.asarray(x)
    return x.view(LAYOUT[str(x.dtype)][0]) if str(x.dtype) in LAYOUT else x


def from_words(bits, dtype: str) -> np.ndarray:
    return np.asarray(bits).astype(LAYOUT[dtype][0]).view(NUMPY[dtype])


def special_words(dtype: str) -> np.ndarray:
    """Both signs of zero, subnormals, least normals, one and its neighbours, the largest, Inf and NaNs."""
    uint, mantissa = LAYOUT[dtype]
    size = 8 * np.dtype(uint).itemsize
    normal = 1 << mantissa
    infinity = (1 << (size - 1)) - normal
    one = infinity // 2 // normal * normal
    quiet = normal >> 1
    positive = [
        *(0, 1, 2, normal - 1, normal, normal + 1, 2 * normal, one - 1, one, one + 1, one + normal),
        *(infinity - normal, infinity - 1, infinity),
        *(infinity + 1, infinity + quiet, infinity + quiet + 5, infinity + normal - 1),
    ]
    return np.array([p | sign << (size - 1) for p in positive for sign in (0, 1)], dtype=uint)


@functools.cache
def adversarial(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Rows in turn of: uniform bits; special values; small integers (ties); Gaussian; all of these mixed."""
    rng = np.random.default_rng([seed, *shape])
    uint = LAYOUT[dtype][0]
    kinds = [
        rng.integers(0, np.iinfo(uint).max, shape, uint, endpoint=True).view(NUMPY[dtype]),
        rng.choice(special_words(dtype), shape).view(NUMPY[dtype]),
        rng.integers(-3, 4, shape).astype(NUMPY[dtype]),
        rng.normal(size=shape).astype(NUMPY[dtype]),
    ]
    mixed = np.choose(rng.integers(0, 4, shape), [words(k) for k in kinds]).view(NUMPY[dtype])
    kinds.append(mixed)
    row = np.arange(shape[0] if shape else 0).reshape(-1, *(1,) * (len(shape) - 1)) % len(kinds)
    out = np.choose(np.broadcast_to(row, shape), [words(k) for k in kinds]).view(NUMPY[dtype])
    out.setflags(write=False)
    return out


def without_nan(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """As `adversarial`, with a subnormal or zero in place of each NaN: kernels take another path for NaN."""
    x = adversarial(shape, dtype, seed)
    small = words(x) & ~words(np.asarray(np.inf, x.dtype))
    return np.where(np.isnan(x), small.view(x.dtype), x)


def assert_same_bits(actual, expected) -> None:
    """Equal structure, dtypes, shapes and bits of every leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        got, want = np.asarray(got), np.asarray(want)
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        differ = words(got) != words(want)
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            raise AssertionError(
                f"{differ.sum()} of {differ.size} differ, first at {at}: {got[at]} ({words(got)[at]:#x}) "
                f"is not {want[at]} ({words(want)[at]:#x})"
            )


def assert_within(actual, expected, bound) -> None:
    """|actual - expected| <= bound everywhere, in float64."""
    error = np.abs(np.asarray(actual).astype(np.float64) - np.asarray(expected).astype(np.float64))
    excess = error - bound
    assert error.shape == np.shape(expected)
    worst = np.unravel_index(np.argmax(excess), error.shape) if error.size else ()
    assert np.all(error <= bound), f"at {worst}: error {error[worst]} over the bound by {excess[worst]}"


def device(x, dtype: str | None = None):
    """`device_put`, which compiles nothing; `jnp.asarray` compiles a program for each new shape."""
    return jax.device_put(np.asarray(x, dtype=dtype and NUMPY[dtype]))


def saved_operands(dtype: str, shape: tuple[int, int], given=adversarial):
    """Packed values of a squared ReLU, some of them anything, and gradients. given: (shape, dtype, seed)."""
    y, dy2 = (device(given(shape, dtype, seed)) for seed in (1, 2))
    squares = words(jax.jit(squared_relu)(y))
    mixed = np.where(np.arange(shape[0])[:, None] % 3 == 0, words(y), squares)
    return pack24(device(from_words(mixed, dtype)), -1), dy2
