"""The dense values of a weight, unpacked in the backward pass from what the forward pass has packed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import table
from jax_sparse24.engine import fusions
from jax_sparse24.methods import AST, SSTE, STE, Activation24, Venom
from tests.ops.data import assert_same_bits

METHODS = {
    "STE": STE(),
    "AST": AST(),
    "S-STE": SSTE(),
    "S-STE without estimates": SSTE(mvue=None),
    "Activation24": Activation24(soft_weights=True, dense_share=0.25),
    "Venom": Venom(v=16, m=8, clusters=4),
    "Venom of dense operands": Venom(v=16, m=8, clusters=4, dense_operand="dense"),
}
T, D, F = 128, 32, 64


def _operands(dtype):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.normal(size=s) / 8, dtype) for s in ((T, D), (D, F), (F, D), (T, D))]


def _step(method, implementation):
    """Y3 and the gradients of an FFN, of x, w1, w2 and dY3."""

    def step(x, w1, w2, dy3, state):
        def ffn(*operands):
            options = {"implementation": implementation}
            return s24.sparse_ffn(*operands, method, state, jax.random.key(0), **options)

        y3, vjp = jax.vjp(ffn, x, w1, w2)
        return y3, vjp(dy3)

    return step


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in METHODS), ("S-STE", "float32")])
def test_results_are_those_of_values_that_are_made_again(implementation, name, dtype, monkeypatch):
    method, operands = METHODS[name], _operands(dtype)
    state = {"w1": method.init(operands[1], "w1"), "w2": method.init(operands[2], "w2")}
    got = jax.jit(_step(method, implementation))(*operands, state)
    monkeypatch.setattr(fusions.Unpacked, "matches", lambda *_: False)
    assert_same_bits(got, jax.jit(_step(method, implementation))(*operands, state))


@pytest.mark.parametrize("name", ["STE", "S-STE without estimates"])
def test_gradients_of_gradients_flow_through_packed_weights(implementation, name, monkeypatch):
    """As through the dense values of a product that no table says to pack."""
    method, (x, w1, w2, dy3) = METHODS[name], _operands("float32")
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}

    def twice(implementation):
        def loss(w1, x):
            y3 = s24.sparse_ffn(x, w1, w2, method, state, implementation=implementation)
            return jnp.sum(y3 * y3 * dy3)

        return jax.jit(jax.grad(lambda w1: jnp.sum(jax.grad(loss, 1)(w1, x) ** 2)))(w1)

    monkeypatch.setattr(table, "tables", lambda: ((), ""))
    want = np.asarray(twice(None))
    assert want.any()
    np.testing.assert_allclose(twice(implementation), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("name", "unpacked"), [("S-STE", 2), ("Activation24", 1), ("Venom", 1)])
def test_one_pass_over_a_weight_makes_its_packed_values(name, unpacked, monkeypatch):
    """Of the soft threshold, the scale and the packing. The values of W1 are thresholded nowhere else."""
    method, operands = METHODS[name], _operands("bfloat16")
    state = {"w1": method.init(operands[1], "w1"), "w2": method.init(operands[2], "w2")}
    lowered = jax.jit(_step(method, "ffi")).trace(*operands, state).lower(lowering_platforms=("cuda",))
    found = re.findall(r"custom_call @(s24_\w+)\(.*: \((.*)\) -> \(?(.*?)\)?\n", lowered.as_text())
    softened = {(target, out) for target, _, out in found if target.startswith("s24_soft")}
    of_w1 = {target for target, operands, _ in found if f"tensor<{D}x{F}xbf16>, tensor<bf16>" in operands}
    assert of_w1 == {"s24_soft_pack"}, softened
    packed = f"tensor<{F}x{D // 2}x", f"tensor<{D}x{F // 2}x"
    values = {operands for target, operands, _ in found if target == "s24_unpack"}
    assert len([v for v in values if v.startswith(packed)]) == unpacked
