"""Bad input raises before any work, naming the operation, the value, the rule and the fix."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import mvue_pack24
from tests.ops import cases
from tests.ops.cases import KEY

X = jnp.ones((8, 12))
P = s24.pack24(X, 1)
ALONG_AN_AXIS = cases.ALONG_AN_AXIS | {"double_prune24": s24.double_prune24}
OPERATIONS = ALONG_AN_AXIS | {
    "transposable_mask24": lambda x, axis=None, **kw: s24.transposable_mask24(x, **kw),
    "matmul": lambda x, axis=None, **kw: s24.matmul(x, jnp.ones((12, 4)), **kw),
}


def raises(error, *parts):
    """All parts occur in the message, in this order."""
    return pytest.raises(error, match=".*".join(re.escape(p) for p in parts))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn", "uint8"])
def test_wrong_dtype(name, dtype):
    if dtype in cases.OTHER_DTYPES.get(name, ()):
        return
    with raises(TypeError, name, dtype, "float32, bfloat16, float16", "float64"):
        OPERATIONS[name](jnp.ones((8, 12), dtype), 1)


@pytest.mark.parametrize("name", OPERATIONS)
def test_not_an_array(name):
    for value, kind in ((None, "NoneType"), ("four", "str"), ({}, "dict")):
        with raises(TypeError, name, "must be an array", kind):
            OPERATIONS[name](value, 1)
    if name != "matmul":
        with raises(TypeError, name, "must be an array", "Packed24"):
            OPERATIONS[name](P, 1)


@pytest.mark.parametrize("name", ALONG_AN_AXIS)
def test_bad_axis(name):
    op = ALONG_AN_AXIS[name]
    for axis in (2, -3, 100):
        with raises(ValueError, name, f"axis {axis} ", "(8, 12)", "[-2, 2)"):
            op(jnp.ones((8, 12)), axis)
    for axis in (1.0, None, True, (0,), "rows"):
        with raises(TypeError, name, "axis must be an int", repr(axis)):
            op(jnp.ones((8, 12)), axis)
    op(jnp.ones((8, 12)), np.int64(1))


@pytest.mark.parametrize("name", ALONG_AN_AXIS)
def test_size_that_does_not_divide(name):
    shape, axis, size = ((10, 8), 0, 10) if name == "double_prune24" else ((3, 10, 8), 1, 10)
    with raises(ValueError, name, str(shape), f"size {size} along axis -2", "multiple of 4", "use 8 or 12"):
        ALONG_AN_AXIS[name](jnp.ones(shape), axis)
    with raises(ValueError, name):
        jax.jit(lambda x: ALONG_AN_AXIS[name](x, axis))(jnp.ones(shape))


def test_what_does_not_divide_into_tiles():
    with raises(ValueError, "transposable_mask24", "(8, 10)", "size 10 along axis -1", "multiple of 4"):
        s24.transposable_mask24(jnp.ones((8, 10)))
    with raises(ValueError, "transposable_mask24", "(6, 8)", "size 6 along axis -2"):
        s24.transposable_mask24(jnp.ones((6, 8)))
    for op in (s24.transposable_mask24, s24.transposable_pack24, lambda w: s24.double_prune24(w, 0)):
        with raises(ValueError, "needs a matrix", "(4,)"):
            op(jnp.ones(4))
    with raises(ValueError, "double_prune24", "one of the last two", "axis -3", "(4, 4, 4)"):
        s24.double_prune24(jnp.ones((4, 4, 4)), 0)


def test_masks():
    with raises(TypeError, "pack24", "mask must be bool", "float32", "mask24"):
        s24.pack24(X, 1, X)
    with raises(ValueError, "pack24", "(8, 1)", "(8, 12)", "equal"):
        s24.pack24(X, 1, jnp.ones((8, 1), bool))


def test_pairs_of_axes():
    for op in (s24.pack24, s24.squared_relu24):
        with raises(ValueError, op.__name__, "one axis or (-1, -2)", "(-2, -1)", "(8, 12)"):
            op(jnp.ones((8, 12)), (-2, -1))


@pytest.mark.parametrize("name", OPERATIONS)
def test_implementations(name, no_cusparselt):
    with raises(ValueError, name, "'cuda'", "unknown", "reference", "ffi", "cusparselt"):
        OPERATIONS[name](X, 1, implementation="cuda")
    with raises(RuntimeError, name, "'cusparselt'", "cuSPARSELt is not here", "implementation=None"):
        OPERATIONS[name](X, 1, implementation="cusparselt")


def test_implementations_of_packed_operands(no_cusparselt):
    for call in (P.todense, lambda **kw: s24.matmul(P, X.T, **kw), lambda **kw: s24.matmul(X, P.T, **kw)):
        with raises(ValueError, "'cuda'", "unknown"):
            call(implementation="cuda")
        with raises(RuntimeError, "'cusparselt'"):
            call(implementation="cusparselt")


@pytest.mark.parametrize(
    "key",
    [0, None, [0, 1], jnp.ones(2), jnp.ones(4, jnp.uint32), jax.random.split(KEY, 3), X],
    ids=["int", "none", "list", "floats", "four words", "several", "swapped arguments"],
)
def test_keys(key):
    for op in (s24.mvue24, mvue_pack24):
        with raises(TypeError, "mvue24", "one PRNG key", "jax.random.key(0)"):
            op(key, KEY if key is X else X, 1)


# ---- products


def test_both_operands_packed():
    with raises(TypeError, "matmul", "both operands are packed", "todense()"):
        s24.matmul(P, P.T)


def test_packed_along_the_wrong_axis():
    with raises(
        ValueError, "matmul", "a of shape (8, 12)", "axis -2", "contracts axis -1", "pack24(a, axis=-1)"
    ):
        s24.matmul(s24.pack24(X, 0), X.T)
    with raises(
        ValueError, "matmul", "b of shape (8, 12)", "axis -1", "contracts axis -2", "pack24(b, axis=-2)"
    ):
        s24.matmul(X.T, P)


def test_shapes_that_do_not_multiply():
    for a, b in ((P, X), (X, P.T.todense()[:8]), (P, jnp.ones(12))):
        with raises(ValueError, "matmul", str(a.shape), str(b.shape), "(..., R, K) and (..., K, N)"):
            s24.matmul(a, b)
    with raises(ValueError, "matmul", "leading dimensions differ", "(2, 3, 8)", "(3, 8, 4)"):
        s24.matmul(jnp.ones((2, 3, 8)), jnp.ones((3, 8, 4)))


def test_dtypes_of_products():
    with raises(TypeError, "matmul", "b has dtype int32", "float32, bfloat16, float16"):
        s24.matmul(P, jnp.ones((12, 3), jnp.int32))
    with raises(TypeError, "matmul", "the result has dtype int32", "float32, bfloat16, float16"):
        s24.matmul(P, X.T, preferred_element_type=jnp.int32)


def test_8_bit_products():
    x = jnp.ones((8, 12), jnp.float8_e4m3fn)
    packed = s24.pack24(x, 1)
    with raises(TypeError, "b is float8_e5m2", "float8_e4m3fn", "refuses e4m3 times e5m2", "Cast it"):
        s24.matmul(packed, x.T.astype(jnp.float8_e5m2))
    with raises(TypeError, "a is float8_e4m3fn, b is bfloat16", "with itself only", "Cast"):
        s24.matmul(packed, x.T.astype(jnp.bfloat16))
    with raises(TypeError, "the result has dtype float8_e4m3fn"):
        s24.matmul(packed, x.T, preferred_element_type=jnp.float8_e4m3fn)
    for a in (packed, x):
        with raises(TypeError, "matmul", "float8_e4m3fn have no gradient", "FST(fp8=...) or SSTE(fp8=...)"):
            jax.grad(lambda y, a=a: s24.matmul(a, y).astype(jnp.float32).sum())(x.T)


def test_epilogues():
    with raises(ValueError, "matmul", "activation 'silu' is unknown", "relu, gelu"):
        s24.matmul(P, X.T, activation="silu")
    with raises(ValueError, "matmul", "bias has shape (12,)", "free axis of a", "(8,)"):
        s24.matmul(P, jnp.ones((12, 3)), bias=jnp.ones(12))
    with raises(ValueError, "matmul", "bias has shape ()", "free axis of b", "(3,)"):
        s24.matmul(X, jnp.ones((12, 3)), bias=1.0)
    with raises(TypeError, "matmul", "bias has dtype int32"):
        s24.matmul(P, X.T, bias=jnp.ones(8, jnp.int32))


BROKEN = {
    "short metadata": s24.Packed24(P.values, P.metadata[:, :1], -1),
    "rows missing": s24.Packed24(P.values, P.metadata[:3], -1),
    "wide metadata": s24.Packed24(P.values, P.metadata.astype(jnp.int32), -1),
    "odd values": s24.Packed24(P.values[:, :5], P.metadata, -1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_parts_that_do_not_belong_together(implementation, name):
    packed = BROKEN[name]
    with raises(ValueError, "todense", str(packed.values.shape), str(packed.metadata.shape), "pack24"):
        packed.todense(implementation=implementation)
    with raises(ValueError, "matmul", str(packed.values.shape), str(packed.metadata.shape), "pack24"):
        s24.matmul(packed, jnp.ones((packed.K, 3)), implementation=implementation)


def test_packed_arrays():
    with raises(TypeError, "todense", "values has dtype int32"):
        s24.Packed24(P.values.astype(jnp.int32), P.metadata, -1).todense()
    with raises(ValueError, "Packed24.T", "one of the last two", "axis -3", "(4, 4, 4)"):
        _ = s24.pack24(jnp.ones((4, 4, 4)), 0).T
    with raises(ValueError, "Packed24.T", "(4,)"):
        _ = s24.pack24(jnp.ones(4), 0).T


def test_packed_arrays_are_no_arrays():
    """NumPy neither wraps them as objects nor unpacks them unasked."""
    for packed in (P, s24.pack_vnm(jnp.ones((16, 8)), 16, 8)):
        kind = type(packed).__name__
        for convert in (np.asarray, jnp.asarray, lambda p: np.ones((8, 8)) @ p, np.sum):
            with raises(TypeError, f"{kind}: it stands for an array", "todense()"):
                convert(packed)
        with raises(TypeError, "mask24: x must be an array", f"{kind}; call todense()"):
            s24.mask24(packed, 1)


def test_a_size_below_the_multiple_names_the_multiple_alone():
    with raises(ValueError, "size 2 along axis -1", "not a multiple of 4", "pad: use 4."):
        s24.mask24(jnp.ones((8, 2)), 1)
    with raises(ValueError, "size 16 along axis -1", "not a multiple of 32", "pad: use 32."):
        s24.mask_nm(jnp.ones((8, 16)), 2, 32, 1)


def test_flags_take_no_words():
    """exact="approximate" would run the exact estimator."""
    square = jnp.ones((16, 16))
    for call in (
        lambda exact: s24.mvue24(KEY, X, 1, exact),
        lambda exact: mvue_pack24(KEY, X, 1, exact),
        lambda exact: s24.transposable_mask24(square, exact),
        lambda exact: s24.vnm_mask(square, 16, 8, exact=exact),
    ):
        for value in ("approximate", 1, None, np.zeros(2)):
            with raises(TypeError, "exact must be True or False, got", repr(value)):
                call(value)
        with raises(TypeError, "exact must be True or False, got"):
            jax.jit(call)(True)
    with raises(TypeError, "pack24: checked must be True or False, got 'yes'"):
        s24.pack24(X, 1, checked="yes")


def test_what_makes_no_array():
    for value in ([[1.0, 2.0], [3.0]], ["a", "b", "c", "d"]):
        with raises(TypeError, "mask24: x must be an array of numbers"):
            s24.mask24(value, 0)


def test_packed_arrays_made_by_hand():
    values, metadata = jnp.ones((8, 8)), jnp.zeros((8, 2), jnp.uint8)
    for axis in (1, -3, "rows", None):
        with raises(ValueError, f"todense: axis={axis!r} of a Packed24", "Build it with pack24"):
            s24.Packed24(values, metadata, axis).todense()
    with raises(TypeError, "todense: values must be an array, got list"):
        s24.Packed24([1.0, 2.0], metadata, -1).todense()
    with raises(ValueError, "axis=-1 of a Packed24 must be counted from the end of its 0"):
        s24.Packed24(jnp.float32(1), jnp.uint8(1), -1).todense()
