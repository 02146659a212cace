"""Low-rank adapters beside sparse weights: they are switched on and off, and merged into one dense weight."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse24.engine.linear import weight_in
from jax_sparse24.nn.linear import Linear, variables_of
from jax_sparse24.nn.state import equinox_of, layers_of
from jax_sparse24.patterns import check_flag

_Model = TypeVar("_Model")


def set_adapting(model: nnx.Module, adapting: bool) -> None:
    """Switches the adapters of every sparse layer on or off, in place.

    Adapters that are off add nothing to the output and get no gradient. Like the mode of `s24.nn.set_sparse`,
    the switch is static: a compiled function is compiled anew after a switch. New layers have their adapters
    on; adapters that were never trained may add nothing (those of `SLoPe`).

    model: any NNX module.
    adapting: True for on, False for off.

    Raises: TypeError if `model` is no NNX module, or `adapting` no bool; ValueError if the model has no layer
        of `s24.nn`."""
    check_flag("set_adapting", "adapting", adapting)
    for _, layer in layers_of("set_adapting", model):
        layer.adapting = bool(adapting)


def merge_adapters(model: _Model) -> _Model:
    """Folds each layer's sparse weight and adapters into its kernel and makes the layer dense, in place.

    Outputs do not change but for rounding, and where a method makes activations sparse, too. Afterwards the
    parameters are those of an ordinary linear layer.
    The sparse weight is that of the layer's present state, so refresh first what is out of date. Adapters
    that are off (`set_adapting`) are left out. A method that makes no weight sparse in the forward pass
    leaves its kernel as it is. The state records the dense mode, as `s24.nn.set_sparse` does.

    model: any NNX module; or an Equinox module of `s24.sparsify`, which stays as it is.

    Returns: the model; of Equinox a copy, to be used in place of it.
    Raises: TypeError if `model` is no such module; ValueError if it has no layer of `s24.nn`, or, outside of
        jit, a layer in sparse mode has the state of another kernel or phase, as in a call, or two layers that
        share a kernel multiply by different weights."""
    if library := equinox_of(model):
        merged = merge_adapters(library.products(model))
        return library.with_kernels(library.with_products(model, merged), merged)
    layers, kernels = layers_of("merge_adapters", model), {}
    for _, layer in layers:
        layer.check_current()
    for path, layer in layers:  # all of them before any is written: layers may share a kernel
        new = layer.like_kernel(_merged(layer))
        other, kernel = kernels.setdefault(id(layer.kernel), (path, new))
        traced = isinstance(new, jax.core.Tracer)
        if kernel is not new and not traced and not jnp.array_equal(kernel, new, equal_nan=True):
            raise ValueError(
                f"merge_adapters: {other} and {path} share a kernel, but multiply by different weights. Give "
                "one of them a kernel of its own before, such as layer.kernel = nnx.Param(layer.kernel[...])."
            )
    for _, layer in layers:
        layer.set_sparse(False)  # before the kernel moves, so that masks are due in another sparse phase
    for _, layer in layers:
        layer.kernel[...] = kernels[id(layer.kernel)][1]
        layer.adapters = nnx.Dict()
    return model


def _merged(layer: Linear) -> jax.Array:
    """The weight that a layer multiplies by, with its adapters, (..., in, out)."""
    weight = layer.weight
    if layer.active:
        weight = weight_in("fwd", weight, layer.method, layer.method_state(), layer.role)
    if layer.adapted:
        weight = weight + layer.adapt(jnp.eye(weight.shape[-2], dtype=weight.dtype), weight)
    return weight


def add_something(layer: Linear) -> bool:
    """Whether adapters add something that a new layer with this kernel would not add; False without adapters.

    layer: with its arrays.

    Raises: ValueError for a stack whose axes do not come first."""
    own = {name: value[...] for name, value in variables_of(layer.adapters).items()}
    if not own:
        return False
    layer.check_stack()
    fresh = layer._initial(layer.method.adapters)
    if jax.tree.all(jax.tree.map(jnp.array_equal, own, fresh)):
        return False
    w = layer.weight
    return bool(layer.adapt(jnp.eye(w.shape[-2], dtype=w.dtype), w).any())
