"""The gradient of the input of an activation: JAX's derivative, and its estimate along tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse24.dispatch import decision, hardware, native, operation
from jax_sparse24.dispatch.generations import HOPPER
from jax_sparse24.engine.operand import ACTIVATIONS
from jax_sparse24.ops.mvue import key_of_shard, mvue_pack24
from jax_sparse24.ops.packed_vnm import MOST_TILES
from jax_sparse24.ops.reference.saved import SLOPES
from jax_sparse24.ops.reference.slope import activation_gradient, gives_input
from jax_sparse24.ops.slope import SLOPE_MVUE_PACK, slope_mvue_pack24
from tests.ops.cases import FLOATS
from tests.ops.data import assert_same_bits, device, from_words, words
from tests.ops.test_errors import raises

pytestmark = pytest.mark.optimised
T, f = 40, 24
KEY = jax.random.key(3)


def derivative(y1, dy2, activation):
    """What the forward pass saves, and JAX's dY1, each a program of its own."""
    y2 = jax.jit(ACTIVATIONS[activation])(y1)
    (dy1,) = jax.jit(lambda y1, dy2: jax.vjp(ACTIVATIONS[activation], y1)[1](dy2))(y1, dy2)
    return y2 if gives_input(activation, y1.dtype) else y1, dy1


def given(dtype, shape=(T, f)):
    y1, dy2 = (np.random.default_rng(i).normal(size=shape) for i in range(2))
    y1[::5], dy2[::3] = 0, -0.0
    return device(y1, dtype), device(1e-3 * dy2, dtype)


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_it_is_the_derivative(activation, dtype):
    """Zeros of both signs and gradients that are infinite among them."""
    y1, dy2 = given(dtype, (400, 40))
    dy2 = dy2.at[7].set(jnp.inf).at[8].set(-jnp.inf)
    saved, want = derivative(y1, dy2, activation)
    got = jax.jit(activation_gradient, static_argnums=2)(saved, dy2, activation)
    assert_same_bits(got, want)
    assert (np.asarray(want, np.float32) == 0).mean() < 0.8


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_every_input_of_16_bits(activation, dtype):
    """But for subnormals of float32 and for NaN, and where squares are subnormal or overflow."""
    known = activation == "squared_relu" and gives_input(activation, jnp.dtype(dtype))
    y1 = device(from_words(np.arange(1 << 16), dtype))
    for slope in (1.0, -1.7, 3e-3, 0.0):
        dy2 = jnp.full_like(y1, slope)
        saved, want = derivative(y1, dy2, activation)
        got, want = (words(x) for x in (activation_gradient(saved, dy2, activation), want))
        value, y = np.float32(from_words(want, dtype)), np.float32(y1)
        same = (got == want) | np.isnan(value) | ((np.abs(value) < 2.0**-126) & (got & 0x7FFF == 0))
        if jax.default_backend() != "cpu":  # a derivative there may take a subnormal input for more than 0
            same |= np.abs(y) < 2.0**-126
        if known:
            same |= (y < 2.0**-63) & (got == 0) | (y >= 2.0**64)
        np.testing.assert_array_equal(np.flatnonzero(~same), [])


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_a_number(dtype):
    nan, inf = float("nan"), float("inf")
    saved = device(np.array([nan, -1.0, 0.0, 4.0, inf, 4.0]), dtype)
    dy2 = device(np.array([1.0, inf, nan, nan, 0.0, inf]), dtype)
    relu, squared = (activation_gradient(saved, dy2, a) for a in ("relu", "squared_relu"))
    np.testing.assert_array_equal(np.float32(relu), [0, 0, 0, nan, 0, inf])
    np.testing.assert_array_equal(np.float32(squared), [0, 0, 0, nan, nan, inf])
    assert set(words(squared)[3:5]) == {np.iinfo(words(saved).dtype).max >> 1}


def test_roots_of_bfloat16_may_err_by_a_few_units_of_float32():
    """As those of a GPU do, before they are rounded to bfloat16."""
    y = np.float32(from_words(np.arange(0x80, 0x7F80), "bfloat16"))
    root = np.sqrt(y)
    want = words(jnp.asarray(np.sqrt(np.float64(y)), jnp.bfloat16))
    for units in range(-8, 9):
        np.testing.assert_array_equal(
            words(jnp.asarray(root * np.float32(1 + units * 2.0**-23)).astype(jnp.bfloat16)), want
        )


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_estimate_is_that_of_what_comes_out(exact, activation, dtype, implementation):
    saved, dy2 = given(dtype)
    for key in (KEY, key_of_shard(KEY, 1, 2, 5)):
        options = {"implementation": implementation}
        dy1, packed = slope_mvue_pack24(key, saved, dy2, activation, exact, **options)
        assert_same_bits(dy1, activation_gradient(saved, dy2, activation))
        assert_same_bits(packed, mvue_pack24(key, dy1, -2, exact, **options))


def test_vmap_broadcasts():
    saved, dy2 = given("bfloat16", (3, T, f))
    run = jax.vmap(lambda s, d: slope_mvue_pack24(KEY, s, d, "squared_relu"), (None, 0))
    for i, got in enumerate(zip(*jax.tree.leaves(run(saved[0], dy2)), strict=True)):
        want = slope_mvue_pack24(KEY, saved[0], dy2[i], "squared_relu")
        assert_same_bits(list(got), jax.tree.leaves(want))


def test_which_calls_take_one_pass(monkeypatch):
    """On CUDA, whole tiles of 16-bit floats: where it is asked for, or was measured to be faster."""
    for module in (decision, hardware, operation):
        monkeypatch.setattr(module, "platform", lambda: "cuda")
    monkeypatch.setitem(native._loaded, "cuda", (object(), None))
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    monkeypatch.setattr(decision, "capability", lambda: "9.0")
    monkeypatch.setattr(decision, "generation", lambda: HOPPER)
    monkeypatch.setattr(hardware, "generation", lambda: dataclasses.replace(HOPPER, faster=frozenset()))

    def in_one_pass(shape=(256, 24), dtype="bfloat16", exact=True, implementation="ffi"):
        x = jax.ShapeDtypeStruct(shape, dtype)
        options = {"activation": "relu", "exact": exact, "compressed": False}
        return SLOPE_MVUE_PACK.in_one_pass(None, x, x, **options, implementation=implementation)

    assert in_one_pass() and in_one_pass(dtype="float16") and in_one_pass(exact=False)
    assert not in_one_pass(dtype="float32")
    assert not in_one_pass((260, 24)) and not in_one_pass((256, 20))
    assert in_one_pass((128 * MOST_TILES, 8)) and not in_one_pass((128 * (MOST_TILES + 1), 8))
    assert not in_one_pass(implementation="reference") and not in_one_pass(implementation=None)
    known = frozenset({(hardware.hardware().name, "slope_mvue exact", "bfloat16", False)})
    monkeypatch.setattr(hardware, "generation", lambda: dataclasses.replace(HOPPER, faster=known))
    assert in_one_pass(implementation=None)
    assert not in_one_pass(implementation=None, exact=False)
    assert not in_one_pass(implementation=None, dtype="float16")


def test_what_is_not_accepted():
    saved, dy2 = given("bfloat16", (6, 8))
    with raises(ValueError, "mvue24", "(6, 8)", "size 6 along axis -2", "multiple of 4"):
        slope_mvue_pack24(KEY, saved, dy2, "relu")
    with raises(TypeError, "mvue24", "one PRNG key"):
        slope_mvue_pack24([0, 1], saved[:4], dy2[:4], "relu")
