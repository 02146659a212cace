"""The engine of FFNs with a gate: three linear layers under one differentiation rule.

Then one pass over the activations can serve all their products."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_sparse24.dispatch.shards import with_tokens_of
from jax_sparse24.engine import fusions
from jax_sparse24.engine.call import check_bias, check_state, cut_over_mesh, in_shards, plan_of, prepare
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.fusions import product
from jax_sparse24.engine.linear import over_tokens, sparse_dot
from jax_sparse24.engine.operand import ACTIVATIONS
from jax_sparse24.engine.partition import of_layers
from jax_sparse24.engine.plan import LINEAR
from jax_sparse24.ops.mvue import key_words


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


def gated_ffn(
    xs, gate: Weight, up: Weight, down: Weight, method, activation, implementation=None, specs=None
):
    """`down(act(gate(x)) * up(x))`, products and gradients as three `sparse_dot` give them.

    One differentiation rule covers all three products where there is a mesh in the context, and without
    biases also where a kernel serves the activations; elsewhere each has its own. The values are the same.
    Over a mesh the gradients of the input by gate and by up are summed over shards together.

    xs: the input (..., d) twice, for gate and for up, so that autodiff sums the gradients of both branches
        with the bits of two layers.
    gate, up: of weights (d, f).
    down: of a weight (f, d').
    method: from `s24.methods`, with a plan for a single linear layer.
    activation: one of `engine.operand.ACTIVATIONS`, of which "silu" and "gelu" have kernels.
    implementation: as in `sparse_dot`.
    specs: as in `sparse_dot`, of "x", "gate", "up" and "down".

    Returns: (..., d') in the promoted dtype.
    Raises: as `sparse_dot`."""
    layers = (gate, up, down)
    dtypes = {jnp.result_type(x, layer.w) for x, layer in zip((*xs, xs[0]), layers, strict=True)}
    over_mesh = not jax.sharding.get_abstract_mesh().empty
    bare = all(layer.bias is None for layer in layers) and implementation != "reference"
    if len(dtypes) == 1 and (over_mesh or (bare and fusions.any_gated(activation, *dtypes, implementation))):
        return _in_one_rule(xs, layers, method, activation, implementation, specs)
    cuts = of_layers(specs, xs[0].ndim)

    def dot(x, layer, name):
        w, state, key, bias = layer
        options = {"bias": bias, "implementation": implementation, "specs": cuts.get(name)}
        return sparse_dot(x, w, method, state, key, **options)

    hidden = _fused(activation, dot(xs[0], gate, "gate"), dot(xs[1], up, "up"))
    return dot(hidden, down, "down")


def _in_one_rule(xs, layers, method, activation, implementation, specs):
    op, (gate, up, down) = "sparse_dot", layers
    plan = plan_of(op, method, "linear_plan")
    x_gate, (w_gate,), *_ = prepare(op, plan, implementation, gate.state, gate.key, xs[0], w=gate.w)
    x_up, (w_up, w_down), *_ = prepare(op, plan, implementation, {}, up.key, xs[1], w=up.w, w_down=down.w)
    ws = {"gate": w_gate, "up": w_up, "down": w_down}
    states = {name: layer.state for name, layer in zip(ws, layers, strict=True)}
    for name, w in ws.items():
        check_state(op, method, states[name], w=w)
    biases = {
        f"{name}_bias": check_bias(op, "bias", layer.bias, "w", ws[name])
        for name, layer in zip(ws, layers, strict=True)
    }
    words = [key_words(op, layer.key) if plan.stochastic else None for layer in layers]
    cut = cut_over_mesh(op, "gated", method, specs, states, x=xs[0], **ws)
    operands = {"x_gate": x_gate, "x_up": x_up, **ws, **biases}
    keys, operands, states = in_shards(op, cut, dict(zip(ws, words, strict=True)), operands, states)
    execution = Execution(op, "linear", plan, implementation, activation, partition=cut)
    out = _gated_ffn(execution, operands, states, keys)
    y = with_tokens_of(out.reshape(*jnp.shape(xs[0])[:-1], w_down.shape[1]), xs[0])
    return checkpoint_name(y, "s24_dot")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_ffn(execution: Execution, operands, states, keys):
    return _run_forward(execution, ["fwd"], operands, states, keys)[0]


def _fused(activation, gate, up):
    """The gated activations as XLA fuses them, where no kernel is faster; bits are those of three layers."""
    return ACTIVATIONS[activation](gate) * up


def _run_forward(execution, products, operands, states, keys):
    """The result, and what the backward pass needs: gate, up and z, and `fusions.Ahead` of each layer.
    products: those that are checked and decided."""
    activation = execution.activation

    def body(arrays, states, keys, _):
        x_Td, ahead = arrays["x_gate"], {}
        (T, d), (f, out) = x_Td.shape, arrays["down"].shape
        first, second = {"x": (T, d), "w": (d, f), "dy": (T, f)}, {"x": (T, f), "w": (f, out), "dy": (T, out)}
        shapes = {"gate": first, "up": first, "down": second}
        for name in ("up", "down"):
            execution.layer(name).check(products, shapes[name])

        def forward(name, x):
            own, operands = execution.layer(name), {"x": x, "w": arrays[name]}
            decisions = own.decisions(products, shapes[name], x.dtype)
            given = operands, states[name], keys[name], decisions
            options = {"bias": arrays.get(f"{name}_bias")}
            y, weights = fusions.forward(own, ("fwd", "dgrad"), *given, **options)
            ahead[name] = fusions.Ahead(decisions, weights, own.seen(["fwd"], operands))
            return y

        gate_Tf, up_Tf = (checkpoint_name(forward(name, x_Td), "s24_dot") for name in ("gate", "up"))
        rule = fusions.GATED
        activate = rule.run if rule.matches(execution, gate_Tf.dtype) else _fused
        z_Tf = activate(activation, gate_Tf, up_Tf)
        return {"dy": forward("down", z_Tf)}, (gate_Tf, up_Tf, z_Tf, ahead)

    found, saved = execution.run(body, operands, states, keys, results=["dy"])
    return found["dy"], saved


def _fwd(execution, operands, states, keys):
    y_Td, saved = _run_forward(execution, LINEAR, operands, states, keys)
    *_, ahead = saved
    packed = {name: None for name, own in ahead.items() if own.weights}
    return y_Td, (operands | packed, saved, states, keys)


def _bwd(execution, residuals, dy_Td):
    (operands, saved, states, keys), activation = residuals, execution.activation

    def body(arrays, states, keys, saved):
        x_Td, (gate_Tf, up_Tf, z_Tf, ahead) = arrays["x_gate"], saved

        def gradients(name, x, dy, operands=None, joined=()):
            arrays_of = {"x": x, "w": arrays.get(name), "dy": dy} | ahead[name].weights
            own = dataclasses.replace(execution.layer(name), joined=joined)

            def run(what, operands=None):
                decision = ahead[name].decisions[what]
                return product(own, what, arrays_of, states[name], keys[name], decision, operands=operands)

            return run("dgrad"), run("wgrad", operands)

        dz_Tf, d_down = gradients("down", z_Tf, arrays["dy"])
        hidden, packed, first = (gate_Tf, up_Tf, dz_Tf), (None, None), execution.layer("gate")
        wgrads = [ahead[name].decisions["wgrad"] for name in ("gate", "up")]
        if fusions.GATED_MVUE.matches(first, gate_Tf.dtype, wgrads):
            dgate_Tf, dup_Tf, packed = fusions.GATED_MVUE.run(
                wgrads[0], first, activation, x_Td, *hidden, [keys["gate"], keys["up"]]
            )
        elif fusions.GATED_BACKWARD.matches(execution, dz_Tf.dtype):
            dgate_Tf, dup_Tf = fusions.GATED_BACKWARD.run(activation, *hidden)
        else:
            _, activation_vjp = jax.vjp(partial(_fused, activation), gate_Tf, up_Tf)
            dgate_Tf, dup_Tf = activation_vjp(dz_Tf)
        over = first.summed("dgrad")
        joined = ("dgrad",) if over else ()
        dx_gate, d_gate = gradients("gate", x_Td, dgate_Tf, packed[0], joined)
        dx_up, d_up = gradients("up", x_Td, dup_Tf, packed[1], joined)
        if over:  # both are gradients of one input: one sum over shards
            dx_gate, dx_up = jax.lax.psum(dx_gate + dx_up, over), jnp.zeros_like(dx_up)
        found, seen = {"x_gate": dx_gate, "x_up": dx_up, "gate": d_gate, "up": d_up, "down": d_down}, {}
        for name, dy in (("gate", dgate_Tf), ("up", dup_Tf), ("down", arrays["dy"])):
            found[f"{name}_bias"] = over_tokens(dy, arrays.get(f"{name}_bias"))
            if execution.plan.observes:
                seen[name] = {**ahead[name].seen, **execution.seen(["dgrad"], {"dy": dy})}
        if execution.plan.observes:
            found["seen"] = seen
        return {name: gradient for name, gradient in found.items() if gradient is not None}, None

    results = [name for name, x in operands.items() if x is not None] + ["seen"] * execution.plan.observes
    found, _ = execution.run(body, operands | {"dy": dy_Td}, states, keys, saved, results=results)
    observed = {name: execution.observation(own, states[name]) for name, own in found.get("seen", {}).items()}
    return {name: found.get(name) for name in operands}, observed or None, None


_gated_ffn.defvjp(_fwd, _bwd)
