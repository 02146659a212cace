"""Low-rank adapters beside sparse weights: they are switched on and off, and merged into one dense weight."""

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse24.engine.linear import weight_in
from jax_sparse24.nn.linear import Linear
from jax_sparse24.nn.state import sparse_layers
from jax_sparse24.patterns import check_flag


def set_adapting(model: nnx.Module, adapting: bool) -> None:
    """Switches the adapters of every sparse layer on or off, in place.

    Adapters that are off add nothing to the output and get no gradient. Like the mode of `s24.nn.set_sparse`,
    the switch is static: a compiled function is compiled anew after a switch. New layers have their adapters
    on; adapters that were never trained may add nothing (those of `SLoPe`).

    model: any NNX module.
    adapting: True for on, False for off.

    Raises: TypeError if `model` is no NNX module, or `adapting` no bool."""
    check_flag("set_adapting", "adapting", adapting)
    for _, layer in sparse_layers(model):
        layer.adapting = bool(adapting)


def merge_adapters(model: nnx.Module) -> None:
    """Folds each layer's sparse weight and adapters into its kernel and makes the layer dense, in place.

    Outputs do not change but for rounding. Afterwards the parameters are those of an ordinary linear layer.
    The sparse weight is that of the layer's present state, so refresh first what is out of date. Adapters
    that are off (`set_adapting`) are left out. A method that makes no weight sparse in the forward pass
    leaves its kernel as it is.

    model: any NNX module.

    Raises: TypeError if `model` is no NNX module."""
    for _, layer in sparse_layers(model):
        weight = layer.weight
        if layer.active:
            weight = weight_in("fwd", weight, layer.method, layer.method_state())
        if layer.adapted:
            weight = weight + layer.adapt(jnp.eye(weight.shape[-2], dtype=weight.dtype), weight)
        layer.kernel[...] = layer.like_kernel(weight)
        layer.sparse, layer.adapters = False, nnx.Dict()


def add_something(layer: Linear) -> bool:
    """Whether adapters add something that a new layer with this kernel would not add; False without adapters.

    layer: with its arrays."""
    own = {name: value[...] for name, value in layer.adapters.items()}
    fresh = layer._initial(layer.method.adapters) if own else {}
    if jax.tree.all(jax.tree.map(jnp.array_equal, own, fresh)):
        return False
    w = layer.weight
    return bool(layer.adapt(jnp.eye(w.shape[-2], dtype=w.dtype), w).any())
