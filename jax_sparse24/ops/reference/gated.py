"""Gated activations and their gradients."""

import jax

from jax_sparse24.ops.reference.bits import compute_format

GATES = {"gelu": jax.nn.gelu, "silu": jax.nn.silu}


def gated(gate, up, activation):
    wide = compute_format(gate.dtype).dtype
    return (GATES[activation](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def gated_backward(gate, up, dz, activation):
    wide = compute_format(gate.dtype).dtype
    _, vjp = jax.vjp(lambda gate, up: GATES[activation](gate) * up, gate.astype(wide), up.astype(wide))
    return tuple(d.astype(gate.dtype) for d in vjp(dz.astype(wide)))
