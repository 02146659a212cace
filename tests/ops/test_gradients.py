"""Derivatives against central differences that are exact: integers with steps that no selection notices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.packed24 import gather24
from jax_sparse24.ops.soft import soft_pack24
from tests.ops import oracle
from tests.ops.data import NUMPY, assert_same_bits, device, words

STEP = 0.25
MASK = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]], bool)


def tile(seed=0):
    """4 x 4 signed integers, no two of the same magnitude, none zero."""
    rng = np.random.default_rng(seed)
    magnitudes = rng.permutation(np.arange(1, 17)).reshape(4, 4)
    return (magnitudes * rng.choice([-1, 1], (4, 4))).astype(np.float32)


def positions(x, axis):
    return jnp.asarray(oracle.pack24(np.asarray(tile(9)), axis)[1])


BOTH_MODES = {
    "prune24-rows": lambda x, impl: s24.prune24(x, 1, implementation=impl),
    "prune24-columns": lambda x, impl: s24.prune24(x, 0, implementation=impl),
    "soft24-rows": lambda x, impl: s24.soft24(x, 1, implementation=impl),
    "soft24-columns": lambda x, impl: s24.soft24(x, 0, implementation=impl),
    "double_prune24-rows": lambda x, impl: s24.double_prune24(x, 1, implementation=impl),
    "double_prune24-columns": lambda x, impl: s24.double_prune24(x, 0, implementation=impl),
}
REVERSE = {
    "pack24-rows": lambda x, impl: s24.pack24(x, 1, implementation=impl).todense(implementation=impl),
    "pack24-columns": lambda x, impl: s24.pack24(x, 0, implementation=impl).values,
    "pack24-mask": lambda x, impl: s24.pack24(x, 1, MASK, implementation=impl).todense(implementation=impl),
    "pack24-mask-both": lambda x, impl: jnp.stack(
        [p.todense(implementation=impl) for p in s24.pack24(x, (-1, -2), MASK, implementation=impl)]
    ),
    "gather24": lambda x, impl: gather24(x, positions(x, 1), -1, impl),
    "gather24-columns": lambda x, impl: gather24(x, positions(x, 0), -2, impl),
    "todense": lambda x, impl: s24.Packed24(x, jnp.full((4, 1), 0xD9, jnp.uint8), -1).todense(
        implementation=impl
    ),
    "soft_pack24-rows": lambda x, impl: soft_pack24(x, jnp.full((), 2, x.dtype), -1, impl).todense(
        implementation=impl
    ),
    "soft_pack24-columns": lambda x, impl: soft_pack24(x, jnp.full((), 2, x.dtype), -2, impl).values,
    "squared_relu24": lambda x, impl: s24.squared_relu24(x, 0, implementation=impl).todense(
        implementation=impl
    ),
}


def differences(f, x):
    """Jacobian (output..., input...) by central differences, exact for polynomials of degree two."""
    columns = []
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = STEP
        columns.append((np.asarray(f(x + step)) - np.asarray(f(x - step))) / (2 * STEP))
    return np.stack(columns, -1).reshape(*columns[0].shape, *x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOTH_MODES, *REVERSE])
def test_jacobian_in_reverse(implementation, name):
    def f(x):
        return (BOTH_MODES | REVERSE)[name](x, implementation)

    jacobian = jax.jit(jax.jacrev(f))
    for seed in (0, 1):
        x = tile(seed)
        want = differences(f, x)
        assert np.abs(want).max() >= 1
        np.testing.assert_array_equal(jacobian(device(x)), want)


@pytest.mark.parametrize("name", BOTH_MODES)
def test_jacobian_forward(implementation, name):
    def f(x):
        return BOTH_MODES[name](x, implementation)

    x = tile(2)
    np.testing.assert_array_equal(jax.jit(jax.jacfwd(f))(device(x)), differences(f, x))
    value, _ = jax.jvp(f, (device(x),), (device(x),))
    assert_same_bits(value, f(device(x)))


@pytest.mark.parametrize("name", ["prune24-rows", "soft24-columns", "double_prune24-rows", *REVERSE])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bits(implementation, name, dtype):
    """In the dtype of the input, and as in float32 but for its rounding."""

    def f(x):
        return (BOTH_MODES | REVERSE)[name](x, implementation)

    x = tile(3)
    jacobian = differences(f, x)
    weights = np.resize(np.arange(1, 17), jacobian.shape[:-2]).astype(np.float32)
    got = jax.jit(jax.grad(lambda x: jnp.sum(f(x) * weights.astype(NUMPY[dtype]))))(device(x, dtype))
    assert got.dtype == NUMPY[dtype]
    want = np.tensordot(weights, jacobian, weights.ndim)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2**-7)


def test_selection_has_no_gradient(implementation):
    x = device(tile(4))

    def loss(x):
        mask = s24.mask24(x, 1, implementation=implementation)
        tiles = s24.transposable_mask24(x, implementation=implementation)
        return jnp.sum(jnp.where(mask, x, 0) + jnp.where(tiles, x, 0))

    want = oracle.mask24(x, 1).astype(np.float32) + oracle.transposable_mask24(np.abs(np.asarray(x)))
    np.testing.assert_array_equal(jax.grad(loss)(x), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_cotangents_of_pruned_entries_vanish(implementation, bad):
    """The gradient is a selection, not a product with a mask."""
    x = device(tile(5))
    for f, kept in (
        (lambda x: s24.prune24(x, 1, implementation=implementation), oracle.mask24(x, 1)),
        (
            lambda x: s24.double_prune24(x, 1, implementation=implementation),
            oracle.double_prune24(x, -1) != 0,
        ),
        (lambda x: s24.pack24(x, 1, implementation=implementation).todense(), oracle.mask24(x, 1)),
    ):
        _, pull = jax.vjp(f, x)
        (got,) = pull(device(np.where(kept, 2, bad), "float32"))
        assert_same_bits(got, np.where(kept, 2, 0).astype(np.float32))


def test_pruned_non_finite_inputs_leave_no_trace_in_gradients(implementation):
    x = device([[np.inf, np.nan, np.nan, 2.0]], "float32")
    got = jax.grad(lambda x: jnp.sum(s24.prune24(x, 1, implementation=implementation)))(x)
    assert_same_bits(got, np.float32([[0, 1, 1, 0]]))


def test_soft_threshold_at_zero_has_no_slope(implementation):
    x = device([[3, 0, -2, 0], [0, 0, 0, 0], [2, 2, 2, 2]], "float32")
    got = jax.jit(jax.grad(lambda x: jnp.sum(s24.soft24(x, 1, implementation=implementation))))(x)
    assert_same_bits(got, np.float32([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]))


def test_second_derivatives(implementation):
    """Of sum(y^3) / 6 the Hessian is diag(y), through every operation that only moves elements."""
    x = device(tile(6))
    for name in ("prune24-rows", "double_prune24-columns", "pack24-rows", "pack24-mask"):
        f = (BOTH_MODES | REVERSE)[name]

        def loss(x, f=f):
            return jnp.sum(f(x, implementation) ** 3) / 6

        got = jax.jit(jax.jacrev(jax.grad(loss)))(x).reshape(16, 16)
        np.testing.assert_allclose(got, np.diag(np.ravel(f(x, implementation))), rtol=1e-6)


def test_gradient_through_pack_and_todense_is_a_round_trip(implementation, dtype):
    x = device(tile(7), dtype)
    y, pull = jax.vjp(
        lambda x: s24.pack24(x, 0, implementation=implementation).todense(implementation=implementation), x
    )
    assert_same_bits(y, oracle.prune24(x, 0))
    (dx,) = pull(x)
    assert_same_bits(words(dx), words(oracle.prune24(x, 0)))
