"""Gated activations: values and gradients against float64, both orders of memory, packing, who runs them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import decision, hardware
from jax_sparse24.dispatch.generations import HOPPER
from jax_sparse24.ops.gated import gated_backward, gated_backward_pack
from jax_sparse24.ops.mvue import mvue_pack24
from tests.ops.data import assert_same_bits
from tests.ops.test_errors import raises

KEYS = jax.random.split(jax.random.key(1))


def operands(shape=(24, 40), dtype="float32"):
    x = np.random.default_rng(0).normal(scale=2, size=(3, *shape))
    return [jnp.asarray(one, dtype) for one in x]


def swapped(x):
    return jnp.swapaxes(x, -1, -2)


def exact(gate, up, dz, activation):
    """z, dgate and dup in float64, by numpy."""
    x, up, dz = (np.asarray(a).astype(np.float64) for a in (gate, up, dz))
    if activation == "silu":
        share, slope = 1 / (1 + np.exp(-x)), 1
    else:
        c = np.sqrt(2 / np.pi)
        share = 0.5 * (1 + np.tanh(c * (x + 0.044715 * x**3)))
        slope = 2 * c * (1 + 3 * 0.044715 * x**2)
    return x * share * up, dz * up * (share + x * share * (1 - share) * slope), dz * x * share


def assert_close(got, want, terms):
    """But for one rounding to got's dtype and a few of float32."""
    unit = float(jnp.finfo(got.dtype).eps) / 2
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert np.all(error <= unit * np.abs(want) + 2.0**-20 * terms + unit * float(jnp.finfo(got.dtype).tiny))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_gradients(dtype, activation, transposed):
    gate, up, dz = operands(dtype=dtype)
    own = [swapped(x) if transposed else x for x in (gate, up)]
    z, vjp = jax.vjp(lambda g, u: s24.gated(g, u, activation, transposed=transposed), *own)
    gradients = vjp(dz)
    assert {x.dtype for x in (z, *gradients)} == {gate.dtype}
    gradients = [swapped(x) if transposed else x for x in gradients]
    terms = [(1 + np.abs(np.asarray(x, np.float64))) for x in (gate, up, dz)]
    for got, want in zip((z, *gradients), exact(gate, up, dz, activation), strict=True):
        assert_close(got, want, terms[0] ** 2 * terms[1] * terms[2])


def test_leading_dimensions_mixed_dtypes_vmap_and_nothing():
    gate, up, _ = operands((2, 3, 4, 8))
    want = s24.gated(gate, up)
    np.testing.assert_array_equal(jax.vmap(s24.gated)(gate, up), want)
    np.testing.assert_array_equal(s24.gated(swapped(gate), swapped(up), transposed=True), want)
    np.testing.assert_array_equal(
        jax.vmap(s24.gated, (0, None))(gate, up[0]), s24.gated(gate, up[:1] + 0 * up)
    )
    assert s24.gated(gate.astype("bfloat16"), up).dtype == jnp.float32
    assert s24.gated(gate[:, :0], up[:, :0]).shape == (2, 0, 4, 8)


@pytest.mark.parametrize("exact", [True, False])
def test_packed_gradients_are_those_packed_by_themselves(exact):
    gate, up, dz = operands((16, 24), "bfloat16")
    dense = gated_backward(gate, up, dz, "gelu")
    dgate, dup, *packed = gated_backward_pack(
        swapped(gate), swapped(up), swapped(dz), KEYS, "gelu", exact, transposed=True, dz_transposed=True
    )
    own = [mvue_pack24(k, d, -2, exact) for k, d in zip(KEYS, (dgate, dup), strict=True)]
    assert_same_bits(packed, own)
    if decision.platform() == "cpu":
        assert_same_bits((dgate, dup), dense)
    else:  # a kernel and XLA's fusion may take turns
        for got, want in zip((dgate, dup), dense, strict=True):
            np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=2**-7, atol=2**-12)


def test_the_kernel_runs_where_it_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(decision, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "platform", lambda: "cuda")
    assert not hardware.faster("gated", "bfloat16")
    known = frozenset({(hardware.hardware().name, "gated", "bfloat16", True)})
    row = dataclasses.replace(HOPPER, faster=known)
    monkeypatch.setattr(hardware, "generation", lambda: row)
    assert hardware.faster("gated", jnp.bfloat16, True)
    assert not hardware.faster("gated", "bfloat16")
    assert not hardware.faster("gated", "float32", True)
    assert not hardware.faster("gated_backward", "bfloat16", True)
    monkeypatch.setattr(hardware, "platform", lambda: "cpu")
    assert not hardware.faster("gated", "bfloat16", True)


def test_what_is_not_accepted():
    gate, up, dz = operands((6, 8))
    with raises(ValueError, "gated", "gate", "(6, 8)", "up", "(6, 4)", "equal"):
        s24.gated(gate, up[:, :4])
    with raises(ValueError, "gated", "'swish'", "unknown", "gelu, silu"):
        s24.gated(gate, up, "swish")
    with raises(TypeError, "gated", "up has dtype int32", "float32, bfloat16, float16"):
        s24.gated(gate, jnp.ones((6, 8), jnp.int32))
    with raises(TypeError, "gated", "gate must be an array", "str"):
        s24.gated("gate", up)
    with raises(ValueError, "gated", "(..., f, T)", "(8,)"):
        s24.gated(gate[0], up[0], transposed=True)
    with raises(ValueError, "gated", "'cuda'", "unknown"):
        s24.gated(gate, up, implementation="cuda")
    if decision.platform() == "cpu":
        with raises(RuntimeError, "gated", "'ffi' cannot run", "no CPU kernel", "'reference'"):
            s24.gated(gate, up, implementation="ffi")
    with raises(ValueError, "mvue24", "(6, 8)", "size 6 along axis -2", "multiple of 4"):
        gated_backward_pack(gate, up, dz, KEYS, "silu")
    with raises(TypeError, "mvue24", "one PRNG key"):
        gated_backward_pack(gate[:4], up[:4], dz[:4], [0, 1], "silu")
