"""FFNs with a gate under one differentiation rule: bits, and when it is used."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.dispatch import hardware
from jax_sparse24.engine import fusions
from jax_sparse24.engine import gated as engine
from jax_sparse24.ops import gated
from tests.nn.models import d, f, inputs

# With kernels the bits are others, see tests/gpu.
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="bits of the reference")
METHODS = {
    "FST": s24.methods.FST(),
    "SSTE": s24.methods.SSTE(mvue="approximate"),
    "SLoPe": s24.methods.SLoPe(),  # its gradients are masked
}


@pytest.fixture
def kernels(monkeypatch):
    """Gives the operations on gated activations kernels for the CPU: what they do without."""
    for name in ("GATED", "GATED_BACKWARD", "GATED_BACKWARD_PACK"):
        operation = getattr(gated, name)
        composed = operation.composed and partial(operation.composed, implementation="reference")
        there = dataclasses.replace(operation, kernel=operation.reference or composed, missing={})
        monkeypatch.setattr(gated, name, there)


def gradients(model, x):
    """Result and gradients of all parameters and of x, compiled anew."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x):
        y = nnx.merge(graphdef, params, rest)(x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)


def packing_calls(monkeypatch) -> list:
    """Fills with the calls of the pass that makes gradients of gate and up and packs their estimates."""
    calls, pack = [], gated.gated_backward_pack

    def counted(*args, **options):
        calls.append(args)
        return pack(*args, **options)

    monkeypatch.setattr(gated, "gated_backward_pack", counted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "implementation", "packed"),
    [
        ("FST", "bfloat16", None, False),
        ("FST", "float32", "ffi", True),
        ("SSTE", "float32", "ffi", True),
        ("SLoPe", "bfloat16", None, False),
    ],
)
def test_bits_are_those_of_three_layers(monkeypatch, kernels, name, dtype, implementation, packed):
    """packed: gradients and their estimates for the next product come from one call."""
    model = s24.nn.GatedFFN(
        d, f, method=METHODS[name], dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0)
    )
    x, calls = inputs(2, 8, d), packing_calls(monkeypatch)
    monkeypatch.setattr(fusions, "any_gated", lambda *_: False)
    want = gradients(model, x)
    monkeypatch.setattr(hardware, "faster", lambda operation, *_: packed)
    monkeypatch.setattr(fusions, "any_gated", lambda *_: True)
    jax.tree.map(np.testing.assert_array_equal, gradients(model, x), want)
    assert len(calls) == packed


def test_one_rule_only_where_a_kernel_was_measured_to_be_faster(monkeypatch, kernels):
    taken, rule = [], engine._in_one_rule
    monkeypatch.setattr(engine, "_in_one_rule", lambda *args: taken.append(args) or rule(*args))
    method = METHODS["FST"]

    def runs(sparse=True, **options):
        taken.clear()
        model = s24.nn.GatedFFN(d, f, method=method, **options, rngs=nnx.Rngs(0))
        s24.nn.set_sparse(model, sparse)
        model(inputs())
        return bool(taken)

    assert not runs()
    monkeypatch.setattr(hardware, "faster", lambda operation, dtype, *_: dtype == jnp.bfloat16)
    assert not fusions.any_gated("relu", jnp.bfloat16, None)
    assert runs(dtype=jnp.bfloat16)
    assert not runs()
    assert not runs(dtype=jnp.bfloat16, activation="relu"), "which no kernel has"
    for options in ({"use_bias": True}, {"implementation": "reference"}, {"sparse": False}):
        assert not runs(dtype=jnp.bfloat16, **options)


@pytest.mark.parametrize(("implementation", "taken"), [("ffi", 1), ("reference", 0), (None, 0)])
def test_the_pass_that_packs_is_taken_by_name(monkeypatch, kernels, implementation, taken):
    """As every fused pass, where it was not measured. Where there is no kernel, nothing is asked for."""
    method, x, calls = METHODS["FST"], inputs(2, 8, d), packing_calls(monkeypatch)

    def count():
        calls.clear()
        model = s24.nn.GatedFFN(d, f, method=method, implementation=implementation, rngs=nnx.Rngs(0))
        gradients(model, x)
        return len(calls)

    assert count() == taken
    packs = dataclasses.replace(gated.GATED_BACKWARD_PACK, missing=gated.CUDA_ONLY)
    monkeypatch.setattr(gated, "GATED_BACKWARD_PACK", packs)
    assert count() == 0


def test_errors_are_those_of_a_layer(monkeypatch):
    monkeypatch.setattr(fusions, "any_gated", lambda *_: True)
    model = s24.nn.GatedFFN(d, f, method=METHODS["FST"], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"sparse_dot: .*operand dy of product wgrad.* size 6 along axis -2"):
        jax.grad(lambda x: model(x).sum())(inputs(6, d))
    with pytest.raises(TypeError, match="reverse mode only"):
        jax.jvp(model, (inputs(8, d),), (inputs(8, d),))
    with pytest.raises(ValueError, match=r"sparse_dot: .*takes 16 features, but its input has 12"):
        model(inputs(8, 12))
