"""The backward pass from packed activations: its definition, and the same bits from kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_sparse24 as s24
from jax_sparse24.ops.order import collect, regroup
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.packed_vnm import repack_vnm, squared_relu_vnm
from jax_sparse24.ops.reference import packed24 as reference
from jax_sparse24.ops.reference.bits import FORMATS
from jax_sparse24.ops.reference.saved import SLOPES, sloped
from jax_sparse24.ops.reference.slope import gives_input, input_of
from jax_sparse24.ops.saved import pack_counted, saved_backward
from tests.ops.data import (
    LAYOUT,
    adversarial,
    assert_same_bits,
    device,
    from_words,
    saved_operands,
    special_words,
    unit_roundoff,
    words,
)

pytestmark = pytest.mark.optimised
T, f = 40, 24
FEATURES = np.array([2, 3, 11, 23], np.int32)
TILES = 260, 1036  # several, with odd numbers of groups either way


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_slopes_follow_from_values(dtype, activation):
    """Twice the root of a square, or whether a value is positive; rounded once, after that of the root."""
    y = np.square(np.random.default_rng(0).normal(size=4000)).astype(np.float32)
    y[::5] = 0
    dy = np.random.default_rng(1).normal(size=4000).astype(np.float32)
    y, dy = jnp.asarray(y, dtype), jnp.asarray(dy, dtype)
    got = jax.jit(sloped, static_argnums=2)(y, dy, activation)
    y, dy = np.asarray(y, np.float32), np.asarray(dy, np.float32)
    slope = 2 * np.sqrt(y) if activation == "squared_relu" else np.float32(y > 0)
    want = jnp.asarray(slope * dy).astype(dtype)
    if jax.default_backend() == "cpu" or dtype != "float32":
        np.testing.assert_array_equal(words(got), words(want))
    else:  # XLA's roots on a GPU are within a unit in the last place, not correctly rounded
        np.testing.assert_allclose(got, want, rtol=4 * unit_roundoff(dtype))


@pytest.mark.parametrize("apart", [False, True])
def test_every_bfloat16_follows_from_its_rounded_square(apart):
    """From 2^-63, whose square is the least normal number, to where squares overflow; in one program, in
    which XLA may leave out the rounding of the square, and in two."""
    y1 = device(from_words(np.arange(1 << 16), "bfloat16"))
    square, back = (
        jax.jit(lambda x: jnp.square(jax.nn.relu(x))),
        jax.jit(lambda y: input_of(y, "squared_relu")),
    )
    got = (
        back(square(y1))
        if apart
        else jax.jit(lambda x: input_of(jnp.square(jax.nn.relu(x)), "squared_relu"))(y1)
    )
    got, y1, y2 = (np.asarray(x, np.float32) for x in (got, y1, square(y1)))
    known = (y1 >= 2.0**-63) & np.isfinite(y2)
    assert known.sum() > 2**14 - 256
    np.testing.assert_array_equal(got[known], y1[known])
    assert not got[y1 < 2.0**-63].any() and np.isnan(got[np.isnan(y1)]).all()


def test_where_the_input_of_an_activation_follows():
    found = {(a, t) for a in (*SLOPES, "gelu") for t in LAYOUT if gives_input(a, jnp.dtype(t))}
    assert found == {("squared_relu", "bfloat16"), *(("relu", dtype) for dtype in LAYOUT)}


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_slopes_of_special_values(dtype, activation):
    """NaN arrives as one NaN, Inf passes, zeros have the sign of the gradient."""
    special = special_words(dtype)
    y_words, dy_words = np.meshgrid(special, special)
    infinity, sign = FORMATS[jnp.dtype(dtype)].infinity, FORMATS[jnp.dtype(dtype)].sign
    y, dy = device(from_words(y_words, dtype)), device(from_words(dy_words, dtype))
    got = words(jax.jit(sloped, static_argnums=2)(y, dy, activation))
    size, nan = got & (sign - 1), (got & (sign - 1)) > infinity
    assert (got[nan] == sign - 1).all()
    assert nan[(dy_words & (sign - 1)) > infinity].all()
    if activation == "squared_relu":
        assert nan[(y_words & (sign - 1)) > infinity].all()
        one = infinity // 2 & infinity
        assert (got[(y_words == infinity) & (dy_words == one)] == infinity).all()
    assert (size == 0).any()
    np.testing.assert_array_equal((got & sign)[size == 0], (dy_words & sign)[size == 0])


CASES = [
    ("float32", "squared_relu", "consecutive"),
    ("bfloat16", "squared_relu", "strided"),
    ("float16", "relu", "strided"),
]


@pytest.mark.slow_where(dtype=("float32", "float16"))
@pytest.mark.parametrize("shape", [(T, f), TILES], ids=str)
@pytest.mark.parametrize(("dtype", "activation", "tokens"), CASES)
def test_the_backward_pass_of_saved_activations(dtype, activation, tokens, shape):
    """By the kernels of a CPU, and of Y2 and dY1 as arrays."""
    y2, dy2 = saved_operands(dtype, shape)

    @jax.jit
    def parts(y2, dy2):
        got = saved_backward(y2, dy2, device(FEATURES), activation, tokens, implementation="ffi")
        dense = [x.todense(implementation="reference") for x in (y2, got[0])]
        moved = [regroup(lax.bitcast_convert_type(x, LAYOUT[dtype][0]), tokens) for x in dense]
        cut = [Packed24(*reference.pack24(lax.bitcast_convert_type(x, dtype), -2), -2) for x in moved]
        slopes = sloped(y2.values, reference.gather24(dy2, y2.metadata, -1), activation)
        return got, slopes, moved, cut

    (dy1, *along), slopes, moved, cut = parts(y2, dy2)
    assert_same_bits((dy1.values, dy1.metadata), (slopes, y2.metadata))
    for made, dense, packed in zip(along, moved, cut, strict=True):
        assert_same_bits(made.packed, packed)
        np.testing.assert_array_equal(words(made.dense), dense[:, FEATURES].T)


def test_the_backward_pass_is_mapped():
    """Over dY2 and features, with one Y2 for all."""
    y2, dy2 = saved_operands("bfloat16", (T, f))
    several = jnp.stack([dy2, -dy2]), device(np.stack([FEATURES, FEATURES - 1]))

    def run(dy2, features):
        return saved_backward(y2, dy2, features, "squared_relu", implementation="ffi")

    got = jax.vmap(run)(*several)
    for i in range(2):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), run(*(x[i] for x in several)))


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("tokens", ["consecutive", "strided"])
@pytest.mark.parametrize(("v", "m", "exact"), [(16, 4, True), (64, 16, False), (32, 8, False)])
def test_blocks_along_features_are_cut_again_along_tokens(implementation, v, m, exact, tokens, collected):
    x = device(adversarial((128, 1024), "bfloat16", 7))
    packed = s24.pack_vnm(x, v, m)
    again = jax.jit(repack_vnm, static_argnums=(1, 2, 3), static_argnames="implementation")
    got = again(packed, tokens, collected, exact, implementation=implementation)
    x = packed.todense(implementation="reference")
    moved = lax.bitcast_convert_type(regroup(lax.bitcast_convert_type(x, jnp.uint16), tokens, m), x.dtype)
    moved = collect(moved, 1024 // m, -1) if collected else moved
    assert_same_bits(got, s24.pack_vnm(moved, v, m, axis=-2, exact=exact, implementation="reference"))
    assert (got.v, got.m, got.axis, got.shape) == (v, m, -2, (128, 1024))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_squares_are_packed_in_blocks(implementation, dtype):
    """Of every bit pattern: what packing the squares gives."""
    x = device(adversarial((128, 256), dtype, 8))
    got = squared_relu_vnm(x, 64, 16, implementation=implementation)
    squares = jax.jit(reference.squared_relu)(x)
    assert_same_bits(got, s24.pack_vnm(squares, 64, 16, implementation="reference"))


@pytest.mark.parametrize("squared", [True, False], ids=["squared ReLU", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_non_zeros_are_counted_with_the_packing(dtype, squared):
    x = device(adversarial((T, f), dtype, 1))
    packed, counts = pack_counted(x, squared, implementation="ffi")
    assert_same_bits(packed, s24.squared_relu24(x, -1) if squared else s24.pack24(x, -1))
    dense = words(packed.todense(implementation="reference"))
    assert counts.dtype == jnp.int32
    np.testing.assert_array_equal(counts, (dense << 1 != 0).sum(0))  # but for the sign
