"""The engine of FFNs with a gate: three linears under one differentiation rule, so that one pass over the
activations can serve all their products."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_sparse24.engine import Cut, Execution, plan_of, prepare
from jax_sparse24.methods.sparsifiers import MVUE
from jax_sparse24.ops import gated as ops
from jax_sparse24.ops.compressed import reads
from jax_sparse24.ops.mvue import key_words
from jax_sparse24.ops.reference import GATES
from jax_sparse24.plan import ACTIVATIONS, LINEAR


class Weight(NamedTuple):
    """A linear without bias: its matrix (in, out), and the method's state and key."""

    w: jax.Array
    state: dict
    key: jax.Array | None


def pays(activation: str, dtype) -> bool:
    """Whether a kernel for gated activations is faster than XLA here."""
    return activation in GATES and any(ops.wins(operation, dtype) for operation in ops.OPERATIONS)


def gated_ffn(xs, gate: Weight, up: Weight, down: Weight, method, activation, implementation=None):
    """`down(act(gate(x)) * up(x))`, products and gradients as three `sparse_dot` give them.

    xs: x (..., d) as gate and as up take it, so that it gets the sum of both gradients as from two layers.
    activation: "silu" or "gelu". Dtypes and errors as `sparse_dot`."""
    op = "sparse_dot"
    plan = plan_of(op, method, "linear_plan")
    x_gate, (w_gate,), *_ = prepare(op, plan, implementation, gate.state, gate.key, xs[0], w=gate.w)
    x_up, (w_up, w_down), *_ = prepare(op, plan, implementation, {}, up.key, xs[1], w=up.w, w_down=down.w)
    weights = [
        Weight(w, layer.state, key_words(op, layer.key) if plan.stochastic else None)
        for w, layer in ((w_gate, gate), (w_up, up), (w_down, down))
    ]
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
        checkpoint_name(run.product("fwd", {"x": x_Td, "w": layer.w}, layer.state, layer.key), "s24_dot")
        for layer in (gate, up)
    )
    kernel = ops.wins("gated", gate_Tf.dtype)
    z_Tf = ops.gated(gate_Tf, up_Tf, activation) if kernel else _fused(activation, gate_Tf, up_Tf)
    y_Td = run.product("fwd", {"x": z_Tf, "w": down.w}, down.state, down.key)
    return y_Td, gate_Tf, up_Tf, z_Tf


def _fwd(run, activation, x_Td, _, weights):
    y_Td, *saved = _forward(run, activation, LINEAR, x_Td, weights)
    return y_Td, (x_Td, *saved, weights)


def _bwd(run, activation, residuals, dy_Td):
    x_Td, gate_Tf, up_Tf, z_Tf, weights = residuals

    def gradients(layer, x, dy, packed=None):
        operands = {"x": x, "w": layer.w, "dy": dy}
        cut = None if packed is None else Cut(x, packed, dy)
        dx = run.product("dgrad", operands, layer.state, layer.key)
        dw = run.product("wgrad", operands, layer.state, layer.key, cut=cut)
        return dx, Weight(dw, None, None)

    *first, down = weights
    dz_Tf, d_down = gradients(down, z_Tf, dy_Td)
    operands, dtype, packed = (gate_Tf, up_Tf, dz_Tf), dz_Tf.dtype, (None, None)
    row = run.plan.row("wgrad")
    drawn = row is not None and isinstance(row.by, MVUE) and row.operand == "dy" and row.other is None
    plain = drawn and row.tokens == "consecutive" and not row.collected
    if plain and ops.wins(ops.PACKING[row.by.exact], dtype) and run.packs("wgrad", x_Td, gate_Tf):
        keys = [run.draw_key("wgrad", layer.key) for layer in first]
        compressed = reads(*run.place("wgrad", x_Td, gate_Tf), run.implementation)
        options = {"compressed": True, "implementation": "ffi"} if compressed else {}
        made = ops.gated_backward_pack(*operands, keys, activation, row.by.exact, **options)
        dgate_Tf, dup_Tf, *packed = made
    elif ops.wins("gated_backward", dtype):
        dgate_Tf, dup_Tf = ops.gated_backward(*operands, activation)
    else:
        _, activation_vjp = jax.vjp(partial(_fused, activation), gate_Tf, up_Tf)
        dgate_Tf, dup_Tf = activation_vjp(dz_Tf)
    (dx_gate, d_gate), (dx_up, d_up) = (
        gradients(layer, x_Td, d, p) for layer, d, p in zip(first, (dgate_Tf, dup_Tf), packed, strict=True)
    )
    return dx_gate, dx_up, [d_gate, d_up, d_down]


_gated_ffn.defvjp(_fwd, _bwd)
