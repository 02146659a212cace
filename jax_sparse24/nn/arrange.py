"""Moves the neurons of feed-forward blocks into another order, with all parameters that belong to them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jax_sparse24.methods.routing import Router
from jax_sparse24.nn import sharding
from jax_sparse24.nn.ffn import FFN
from jax_sparse24.nn.state import layers_of


class Move(NamedTuple):
    """How one parameter was moved: index i along `axis` now holds what was at `order[..., i]`.

    axis: the axis along which the neurons lie, -1 or -2.
    order: int32 (..., f), the old index of the neuron at each new index."""

    axis: int
    order: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """Moves another array in the same way, such as a moment of Adam.

        x: of the parameter's shape, any dtype.

        Returns: an array of x's shape and dtype."""
        order = self.order if x.ndim == self.order.ndim else jnp.expand_dims(self.order, -3 - self.axis)
        axis = -1 if x.ndim == self.order.ndim else self.axis
        moved = sharding.of_whole(lambda x: jnp.take_along_axis(x, order, axis=axis), x)
        return sharding.laid_like(moved, x)


# The axis along which the neurons lie, by the layer's role in its FFN and the parameter's name.
NEURON_AXES = {("up", "kernel"): -1, ("up", "bias"): -1, ("down", "kernel"): -2}


def new_order(router: Router, w1: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`Router.arrange` of weights that may be stacked, and cut over the devices of several processes.

    All processes call it together. They get what the first one finds, since others may round differently.

    router: of the method.
    w1: (..., d, f).

    Returns: int32 (..., f), the old index of the neuron at each new place, and the new entries of w1's state,
        each with the leading axes of w1."""
    elsewhere = isinstance(w1, jax.Array) and not w1.is_fully_addressable
    host = multihost_utils.process_allgather(w1, tiled=True) if elsewhere else np.asarray(w1)
    found = [router.arrange(matrix) for matrix in host.reshape(-1, *host.shape[-2:])]

    def stacked(values):
        joined = np.stack([np.asarray(value) for value in values])
        return joined.reshape((*w1.shape[:-2], *joined.shape[1:]))

    order = stacked([order for order, _ in found]).astype(np.int32)
    entries = {name: stacked([state[name] for _, state in found]) for name in found[0][1]}
    if not elsewhere:
        return jax.tree.map(jnp.asarray, (order, entries))
    everywhere = NamedSharding(w1.sharding.mesh, PartitionSpec())
    return jax.device_put(multihost_utils.broadcast_one_to_all((order, entries)), everywhere)


def arrange(model: nnx.Module) -> dict[str, Move]:
    """Puts the neurons of every `FFN` into the order that its method asks for, in place.

    Outputs do not change. The columns of `up`, its bias and the rows of `down` move together. Call it on the
    host before the first step whose method routes tokens (`Venom`), and give the result to
    `s24.optim.permute_moments`. Stacked layers are arranged one by one.

    model: any NNX module.

    Returns: a dict from the path of each moved parameter, such as "blocks.0.ffn.up.kernel", to its `Move`;
        empty if no method asks for an order.
    Raises: TypeError if `model` is no NNX module, ValueError if it has no layer of `s24.nn`, or for weights
        with NaN or Inf."""
    layers_of("arrange", model)
    moves = {}
    for path, ffn in nnx.iter_modules(model):
        if not isinstance(ffn, FFN) or (router := ffn.parts["up"].method.router) is None:
            continue
        up = ffn.parts["up"]
        order, entries = new_order(router, up.kernel[...])
        for name, value in entries.items():
            up.state[name][...] = sharding.laid_like(value, up.state[name][...])
        if router.learned:
            # A copy: a buffer that stands in the state twice could not be donated.
            ffn.router[...] = sharding.laid_like(jnp.copy(up.state[router.learned][...]), ffn.router[...])
        for (role, name), axis in NEURON_AXES.items():
            parameter = getattr(ffn.parts[role], name)
            if parameter is not None:
                move = moves[".".join(map(str, (*path, *ffn.places[role], name)))] = Move(axis, order)
                parameter[...] = move(parameter[...])
    return moves
