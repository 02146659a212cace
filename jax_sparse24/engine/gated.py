"""The engine of FFNs with a gate: three linear layers under one differentiation rule.

Then one pass over the activations can serve all their products."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_sparse24.engine import fusions
from jax_sparse24.engine.call import check_state, in_shards, plan_of, prepare
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.fusions import product
from jax_sparse24.engine.linear import sparse_dot
from jax_sparse24.engine.operand import ACTIVATIONS
from jax_sparse24.engine.plan import LINEAR
from jax_sparse24.ops import gated as ops
from jax_sparse24.ops.mvue import key_words
from jax_sparse24.ops.reference.gated import GATES


class Weight(NamedTuple):
    """The weight of one linear layer of the block, and what belongs to it.

    w: (in, out).
    state: of the method, by name.
    key: uint32 (2,) or a PRNG key, if the method draws; else None.
    bias: (out,) or None."""

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

    Without biases, and where a kernel serves the activations, one differentiation rule covers all three
    products; elsewhere each has its own. The values are the same.

    xs: the input (..., d) twice, for gate and for up, so that autodiff sums the gradients of both branches
        with the bits of two layers.
    gate, up: of weights (d, f).
    down: of a weight (f, d').
    method: from `s24.methods`, with a plan for a single linear layer.
    activation: "silu" or "gelu" for one rule, or another one of `engine.operand.ACTIVATIONS`.
    implementation: as in `sparse_dot`.

    Returns: (..., d') in the promoted dtype.
    Raises: as `sparse_dot`."""
    layers = (gate, up, down)
    dtypes = {jnp.result_type(x, layer.w) for x, layer in zip((*xs, xs[0]), layers, strict=True)}
    bare = all(layer.bias is None for layer in layers) and implementation != "reference"
    if bare and len(dtypes) == 1 and fuses(activation, *dtypes):
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
    for w, layer in zip((w_gate, w_up, w_down), layers, strict=True):
        check_state(op, method, layer.state, w=w)
    keys = [key_words(op, layer.key) if plan.stochastic else None for layer in layers]
    states = [layer.state for layer in layers]
    keys, x_gate, x_up, ws, states = in_shards(op, keys, x_gate, x_up, (w_gate, w_up, w_down), states)
    weights = [Weight(w, state, key) for w, state, key in zip(ws, states, keys, strict=True)]
    execution = Execution(op, "linear", plan, implementation)
    out = _gated_ffn(execution, activation, x_gate, x_up, weights)
    return checkpoint_name(out.reshape(*jnp.shape(xs[0])[:-1], w_down.shape[1]), "s24_dot")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_ffn(execution: Execution, activation: str, x_Td, _, weights):
    return _forward(execution, activation, ["fwd"], x_Td, weights)[0]


def _fused(activation, gate, up):
    """The gated activations as XLA fuses them, where no kernel is faster; bits are those of three layers."""
    return ACTIVATIONS[activation](gate) * up


def _forward(execution, activation, products, x_Td, weights):
    """The result, and gate, up and z, which the backward pass needs."""
    gate, up, down = weights
    T, d, f = *x_Td.shape, gate.w.shape[1]
    execution.check(products, {"x": (T, d), "w": (d, f), "dy": (T, f)})
    execution.check(products, {"x": (T, f), "w": (f, down.w.shape[1]), "dy": (T, down.w.shape[1])})
    gate_Tf, up_Tf = (
        checkpoint_name(
            product(execution, "fwd", {"x": x_Td, "w": layer.w}, layer.state, layer.key), "s24_dot"
        )
        for layer in (gate, up)
    )
    kernel = ops.GATED.decide(gate_Tf.dtype).runs != "reference"
    z_Tf = ops.gated(gate_Tf, up_Tf, activation) if kernel else _fused(activation, gate_Tf, up_Tf)
    y_Td = product(execution, "fwd", {"x": z_Tf, "w": down.w}, down.state, down.key)
    return y_Td, gate_Tf, up_Tf, z_Tf


def _fwd(execution, activation, x_Td, _, weights):
    y_Td, *saved = _forward(execution, activation, LINEAR, x_Td, weights)
    return y_Td, (x_Td, *saved, weights)


def _bwd(execution, activation, residuals, dy_Td):
    x_Td, gate_Tf, up_Tf, z_Tf, weights = residuals

    def gradients(layer, x, dy, operands=None):
        arrays = {"x": x, "w": layer.w, "dy": dy}
        dx = product(execution, "dgrad", arrays, layer.state, layer.key)
        dw = product(execution, "wgrad", arrays, layer.state, layer.key, operands=operands)
        return dx, Weight(dw, None, None)

    *first, down = weights
    dz_Tf, d_down = gradients(down, z_Tf, dy_Td)
    arrays, packed = (gate_Tf, up_Tf, dz_Tf), (None, None)
    if decision := fusions.GATED_MVUE.matches(execution, x_Td, gate_Tf):
        keys = [layer.key for layer in first]
        dgate_Tf, dup_Tf, packed = fusions.GATED_MVUE.run(
            decision, execution, activation, x_Td, *arrays, keys
        )
    elif ops.GATED_BACKWARD.decide(dz_Tf.dtype).runs != "reference":
        dgate_Tf, dup_Tf = ops.gated_backward(*arrays, activation)
    else:
        _, activation_vjp = jax.vjp(partial(_fused, activation), gate_Tf, up_Tf)
        dgate_Tf, dup_Tf = activation_vjp(dz_Tf)
    (dx_gate, d_gate), (dx_up, d_up) = (
        gradients(layer, x_Td, d, o) for layer, d, o in zip(first, (dgate_Tf, dup_Tf), packed, strict=True)
    )
    return dx_gate, dx_up, [d_gate, d_up, d_down]


_gated_ffn.defvjp(_fwd, _bwd)
