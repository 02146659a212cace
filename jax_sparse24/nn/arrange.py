"""Reordering the neurons of feed-forward blocks, and all that goes with them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse24.nn.ffn import FFN


class Move(NamedTuple):
    """What happened to a parameter: place i along `axis` now holds what was at `order[..., i]`."""

    axis: int  # -1 or -2
    order: jax.Array  # int32 (..., f)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x`, shaped like the parameter, in the new order."""
        if x.ndim == self.order.ndim:
            return jnp.take_along_axis(x, self.order, axis=-1)
        return jnp.take_along_axis(x, jnp.expand_dims(self.order, -3 - self.axis), axis=self.axis)


# The axis along which the neurons lie, by the parameter's path within its FFN.
NEURON_AXES = {("up", "kernel"): -1, ("up", "bias"): -1, ("down", "kernel"): -2}


def arrange(model: nnx.Module) -> dict[str, Move]:
    """Puts the neurons of every `FFN` into the order its method asks for, in place; outputs do not change.

    Columns of `up`, its bias and rows of `down` move together. Call it on the host before the first step
    whose method routes tokens (`Venom`), and give the result to `s24.optim.permute_moments`. Stacked layers
    are arranged one by one. Returns the moves by the path of each parameter, such as
    "blocks.0.ffn.up.kernel"; empty if no method asks for an order. Raises ValueError for non-finite
    weights."""
    moves = {}
    for path, ffn in nnx.iter_modules(model):
        if not isinstance(ffn, FFN):
            continue
        kernel = np.asarray(ffn.up.kernel[...])
        found = [ffn.up.method.arrange(w1) for w1 in kernel.reshape(-1, *kernel.shape[-2:])]
        if None in found:
            continue
        lead = kernel.shape[:-2]
        order = jnp.asarray(np.stack([o for o, _ in found]).reshape(*lead, -1), jnp.int32)
        for name in found[0][1]:
            values = jnp.stack([state[name] for _, state in found])
            ffn.up.state[name][...] = values.reshape(*lead, *values.shape[1:])
        if ffn.up.method.router:
            ffn.router[...] = ffn.up.state["centroids"][...]
        for (layer, name), axis in NEURON_AXES.items():
            parameter = getattr(getattr(ffn, layer), name)
            if parameter is not None:
                move = moves[".".join(map(str, (*path, layer, name)))] = Move(axis, order)
                parameter[...] = move(parameter[...])
    return moves
