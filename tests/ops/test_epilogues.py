"""Bias and activation of products: what they compute, their gradients, and what is left to cuSPARSELt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.matmul import contract
from tests.ops import oracle
from tests.ops.data import device

ACTIVATIONS = {None: lambda y: y, "relu": jax.nn.relu, "gelu": jax.nn.gelu}


def operands(side: str):
    """(a, b, dense a, dense b, bias) of a product (8, 32) by (32, 16)."""
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=s).astype(np.float32) for s in ((8, 32), (32, 16)))
    if side == "left":
        a = oracle.prune24(a, -1)
    if side == "right":
        b = oracle.prune24(b, -2)
    packed = {"left": (s24.pack24(device(a), -1), device(b)), "right": (device(a), s24.pack24(device(b), -2))}
    bias = device(rng.normal(size=8 if side == "left" else 16).astype(np.float32))
    return *packed.get(side, (device(a), device(b))), device(a), device(b), bias


@pytest.mark.parametrize(
    ("side", "activation"),
    [("left", None), ("left", "relu"), ("right", None), ("right", "gelu"), ("none", "relu")],
)
def test_value_and_gradients(implementation, side, activation):
    a, b, dense_a, dense_b, bias = operands(side)
    along = bias[:, None] if side == "left" else bias

    def loss(a, b, bias):
        y = s24.matmul(a, b, bias=bias, activation=activation, implementation=implementation)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    def expected(a, b, along):
        y = ACTIVATIONS[activation](a @ b + along)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    got, y = jax.grad(loss, (0, 1, 2), has_aux=True, allow_int=True)(a, b, bias)
    want, z = jax.grad(expected, (0, 1, 2), has_aux=True)(dense_a, dense_b, along)
    np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[2], want[2].reshape(got[2].shape), rtol=1e-5, atol=1e-5)
    kept = want[1] if side == "left" else want[0]  # of the dense operand
    np.testing.assert_allclose(got[1] if side == "left" else got[0], kept, rtol=1e-5, atol=1e-5)


def test_under_vmap_every_element_has_its_bias(implementation):
    a, b, _, dense_b, bias = operands("right")
    rows, biases = jnp.stack([a, 2 * a]), jnp.stack([bias, -bias])
    got = jax.vmap(lambda a, c: s24.matmul(a, b, bias=c, implementation=implementation))(rows, biases)
    np.testing.assert_allclose(got, rows @ dense_b + biases[:, None], rtol=1e-5, atol=1e-5)
    both = s24.matmul(rows, b, bias=bias, activation="relu", implementation=implementation)
    np.testing.assert_allclose(both, jax.nn.relu(rows @ dense_b + bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("side", "activation"), [("left", "relu"), ("right", None), ("right", "gelu")])
def test_fused_gradients_are_those_of_the_parts(documented_cusparselt, side, activation):
    rng = np.random.default_rng(3)
    w = s24.pack24(jnp.asarray(rng.normal(size=(32, 64)), jnp.bfloat16), -1, implementation="reference")
    x = jnp.asarray(rng.normal(size=(64, 16)), jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=32), jnp.bfloat16)
    a, b, axes = (w, x, (-1, -2)) if side == "left" else (x, w, (-2, -1))

    def loss(operands, bias, implementation):
        y = contract(*operands, *axes, implementation, bias=bias, activation=activation)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    grad = jax.grad(loss, (0, 1), allow_int=True)
    fused, parts = grad((a, b), bias, "cusparselt"), grad((a, b), bias, "reference")
    assert documented_cusparselt == [("bfloat16", int(activation != "gelu"), int(activation == "relu"))]
    for own, want in zip(jax.tree.leaves(fused), jax.tree.leaves(parts), strict=True):
        if own.dtype == jnp.bfloat16:
            own, want = own.astype(jnp.float32), want.astype(jnp.float32)
            assert jnp.linalg.norm(own - want) <= 2**-6 * jnp.linalg.norm(want)
