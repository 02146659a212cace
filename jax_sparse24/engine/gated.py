"""The engine of FFNs with a gate: three linears under one differentiation rule, so that one pass over the
activations can serve all their products."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_sparse24.engine import fusions
from jax_sparse24.engine.call import check_state, plan_of, prepare
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.fusions import product
from jax_sparse24.engine.linear import sparse_dot
from jax_sparse24.engine.operand import ACTIVATIONS
from jax_sparse24.engine.plan import LINEAR
from jax_sparse24.ops import gated as ops
from jax_sparse24.ops.mvue import key_words
from jax_sparse24.ops.reference.gated import GATES


class Weight(NamedTuple):
    """One linear of the block.

    w: its matrix (in, out). state: of the method, by name. key: uint32 (2,) or a PRNG key, if the method
    draws. bias: (out,) or None."""

    w: jax.Array
    state: dict
    key: jax.Array | None
    bias: jax.Array | None = None


def fuses(activation: str, dtype) -> bool:
    """Whether some operation on gated activations has a kernel that was measured to be faster than XLA."""
    packing = (ops.GATED_BACKWARD_PACK.decide(dtype, exact=exact) for exact in (True, False))
    found = (ops.GATED.decide(dtype), ops.GATED_BACKWARD.decide(dtype), *packing)
    return activation in GATES and any(decision.runs != "reference" for decision in found)


def gated_ffn(xs, gate: Weight, up: Weight, down: Weight, method, activation, implementation=None):
    """`down(act(gate(x)) * up(x))`, products and gradients as three `sparse_dot` give them.

    Without biases, and where a kernel serves the activations, all three have one differentiation rule;
    elsewhere they are three. The values are the same.

    Args:
      xs: the input (..., d) twice, as gate and as up take it, so that autodiff sums the gradients of both
        branches with the bits of two layers.
      gate, up: (d, f) and what belongs to them. down: (f, d').
      method: from `s24.methods`, with a table for a linear layer.
      activation: "silu" or "gelu" for one rule, or another one of `engine.operand.ACTIVATIONS`.
      implementation: as in `sparse_dot`.

    Returns:
      (..., d') in the promoted dtype.

    Raises:
      As `sparse_dot`."""
    layers = (gate, up, down)
    made = {jnp.result_type(x, layer.w) for x, layer in zip((*xs, xs[0]), layers, strict=True)}
    bare = all(layer.bias is None for layer in layers) and implementation != "reference"
    if bare and len(made) == 1 and fuses(activation, *made):
        return _in_one_rule(xs, layers, method, activation, implementation)

    def dot(x, layer):
        w, state, key, bias = layer
        return sparse_dot(x, w, method, state, key, bias=bias, implementation=implementation)

    return dot(_fused(activation, dot(xs[0], gate), dot(xs[1], up)), down)


def _in_one_rule(xs, layers, method, activation, implementation):
    op, (gate, up, down) = "sparse_dot", layers
    plan = plan_of(op, method, "linear_plan")
    x_gate, (w_gate,), *_ = prepare(op, plan, implementation, gate.state, gate.key, xs[0], w=gate.w)
    x_up, (w_up, w_down), *_ = prepare(op, plan, implementation, {}, up.key, xs[1], w=up.w, w_down=down.w)
    weights = [
        Weight(w, layer.state, key_words(op, layer.key) if plan.stochastic else None)
        for w, layer in zip((w_gate, w_up, w_down), layers, strict=True)
    ]
    for layer in weights:
        check_state(op, method, layer.state, w=layer.w)
    run = Execution(op, "linear", plan, implementation)
    out = _gated_ffn(run, activation, x_gate, x_up, weights)
    return checkpoint_name(out.reshape(*jnp.shape(xs[0])[:-1], w_down.shape[1]), "s24_dot")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_ffn(run: Execution, activation: str, x_Td, _, weights):
    return _forward(run, activation, ["fwd"], x_Td, weights)[0]


def _fused(activation, gate, up):
    """What XLA fuses where no kernel wins, so that all bits are those of three layers."""
    return ACTIVATIONS[activation](gate) * up


def _forward(run, activation, products, x_Td, weights):
    """The result, and gate, up and z, which the backward pass needs."""
    gate, up, down = weights
    T, d, f = *x_Td.shape, gate.w.shape[1]
    run.check(products, {"x": (T, d), "w": (d, f), "dy": (T, f)})
    run.check(products, {"x": (T, f), "w": (f, down.w.shape[1]), "dy": (T, down.w.shape[1])})
    gate_Tf, up_Tf = (
        checkpoint_name(product(run, "fwd", {"x": x_Td, "w": layer.w}, layer.state, layer.key), "s24_dot")
        for layer in (gate, up)
    )
    kernel = ops.GATED.decide(gate_Tf.dtype).runs != "reference"
    z_Tf = ops.gated(gate_Tf, up_Tf, activation) if kernel else _fused(activation, gate_Tf, up_Tf)
    y_Td = product(run, "fwd", {"x": z_Tf, "w": down.w}, down.state, down.key)
    return y_Td, gate_Tf, up_Tf, z_Tf


def _fwd(run, activation, x_Td, _, weights):
    y_Td, *saved = _forward(run, activation, LINEAR, x_Td, weights)
    return y_Td, (x_Td, *saved, weights)


def _bwd(run, activation, residuals, dy_Td):
    x_Td, gate_Tf, up_Tf, z_Tf, weights = residuals

    def gradients(layer, x, dy, made=None):
        arrays = {"x": x, "w": layer.w, "dy": dy}
        dx = product(run, "dgrad", arrays, layer.state, layer.key)
        dw = product(run, "wgrad", arrays, layer.state, layer.key, operands=made)
        return dx, Weight(dw, None, None)

    *first, down = weights
    dz_Tf, d_down = gradients(down, z_Tf, dy_Td)
    arrays, made = (gate_Tf, up_Tf, dz_Tf), (None, None)
    if decision := fusions.GATED_MVUE.matches(run, x_Td, gate_Tf):
        keys = [layer.key for layer in first]
        dgate_Tf, dup_Tf, made = fusions.GATED_MVUE.run(decision, run, activation, x_Td, *arrays, keys)
    elif ops.GATED_BACKWARD.decide(dz_Tf.dtype).runs != "reference":
        dgate_Tf, dup_Tf = ops.gated_backward(*arrays, activation)
    else:
        _, activation_vjp = jax.vjp(partial(_fused, activation), gate_Tf, up_Tf)
        dgate_Tf, dup_Tf = activation_vjp(dz_Tf)
    (dx_gate, d_gate), (dx_up, d_up) = (
        gradients(layer, x_Td, d, o) for layer, d, o in zip(first, (dgate_Tf, dup_Tf), made, strict=True)
    )
    return dx_gate, dx_up, [d_gate, d_up, d_down]


_gated_ffn.defvjp(_fwd, _bwd)
