"""Low-rank adapters besides sparse weights: when they take part, and how they become one dense weight."""

import jax.numpy as jnp
from flax import nnx

from jax_sparse24.engine.linear import forward_weight
from jax_sparse24.nn.state import sparse_layers
from jax_sparse24.patterns import check_flag


def set_adapting(model: nnx.Module, adapting: bool) -> None:
    """Whether the adapters of every sparse layer take part, in place; without them they get no gradient.

    Static like `s24.nn.set_sparse`. Layers begin with them: adapters that were never trained may add nothing
    (`SLoPe`)."""
    check_flag("set_adapting", "adapting", adapting)
    for _, layer in sparse_layers(model):
        layer.adapting = bool(adapting)


def merge_adapters(model: nnx.Module) -> None:
    """Makes every kernel what its layer multiplies by, sparse weight and adapters, and the layer dense, in
    place: outputs do not change but for rounding, and the parameters are those of an ordinary linear layer.

    The forward weight is that of the state as it is; refresh first what is out of date. Adapters that are
    set aside (`set_adapting`) are left out. Methods that make no weight sparse keep their kernels."""
    for _, layer in sparse_layers(model):
        kernel = layer.kernel[...]
        if layer.active:
            kernel = forward_weight(kernel, layer.method, layer.method_state())
        if layer.adapted:
            kernel = kernel + layer.adapt(jnp.eye(layer.in_features, dtype=kernel.dtype))
        layer.kernel[...] = kernel
        layer.sparse, layer.adapters = False, nnx.Dict()
