"""Sparse layers in models of Equinox, which are pytrees: what a layer keeps is in the leaves of the model.

`jax_sparse24.nn.state.equinox_of` imports this module for a model of that library, and nothing else does."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_sparse24.engine.vectors import vector_dot
from jax_sparse24.interception import paths_of
from jax_sparse24.methods.base import Method
from jax_sparse24.nn import linear
from jax_sparse24.nn.fitting import Unfit
from jax_sparse24.patterns import check_dtype

PLAIN = (eqx.nn.Linear,)  # types of linear layers


class Product(linear.Linear):
    """The product of a layer of Equinox: an `s24.nn.Linear` without bias, whose input may be one vector of
    those over which `jax.vmap` maps.

    kernel: (..., in, out); leading axes are those of a stack of layers.
    method, implementation: as in `s24.nn.Linear`.
    noise_key: a PRNG key.
    path: of the layer in the model."""

    def __init__(
        self,
        kernel: jax.Array,
        method: Method,
        implementation: str | None,
        noise_key: jax.Array,
        path: str,
    ):
        self.kernel, self.bias = nnx.Param(kernel), None
        self.dtype, self.param_dtype = None, kernel.dtype
        self.in_features, self.out_features = kernel.shape[-2:]
        self.prepare(method, "w", implementation, noise_key)
        self.path = path

    @linear.naming_its_layer
    def __call__(self, x: jax.Array) -> jax.Array:
        self.check_current()
        x, w = dtypes.promote_dtype((x, self.weight), dtype=None)
        options = {"implementation": self.implementation}
        return vector_dot(x, w, self.method, self.method_state(), self.noise_key(), **options)


class Bits(eqx.Module):
    """An array of floats that is no parameter: as leaf an array of integers with the same bits.

    Filters of Equinox take every array of floats for a parameter, so that weight decay changes also one whose
    gradient is stopped.

    x: the array, of any floating dtype."""

    bits: jax.Array
    dtype: Any = eqx.field(static=True)

    def __init__(self, x: jax.Array):
        self.bits, self.dtype = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), x.dtype

    @property
    def floats(self) -> jax.Array:
        """The array. Raises TypeError where the bits were changed as if they were numbers, such as by a mean
        of models."""
        held = f"uint{8 * self.dtype.itemsize}"
        if self.bits.dtype != held:
            raise _changed(f"{self.bits.dtype}, and must be {held}, the bits of {self.dtype}")
        return jax.lax.bitcast_convert_type(self.bits, self.dtype)


def _changed(text: str) -> TypeError:
    return TypeError(
        f"What a sparse layer keeps in `own` is {text}. Change the parameters alone, "
        "eqx.filter(model, eqx.is_inexact_array), and leave the rest."
    )


def _held(x):
    """An array of a layer's `own`. Raises TypeError where floats stand among them, which are parameters for
    all who filter a model."""
    if eqx.is_inexact_array(x):
        raise _changed(f"{x.dtype}, an array of floats, which would be a parameter")
    return x.floats if isinstance(x, Bits) else x


class Linear(eqx.nn.Linear):
    """An `eqx.nn.Linear` whose three products run as a method says, with the very arrays of the layer that
    it replaces.

    Its call takes one vector, as that of `eqx.nn.Linear`; `jax.vmap` of it is one product of all tokens.

    layer: the layer that is replaced.
    graphdef: the structure of its `Product`, which is static.
    own: what the method keeps, by name: "state" with the masks, "key", "step", and so on, as in
        `s24.nn.Linear`. None of it is a parameter: arrays of floats are `Bits`."""

    own: dict[str, Any]
    graphdef: Any = eqx.field(static=True)

    def __init__(self, layer: eqx.nn.Linear, graphdef: Any, own: dict[str, Any]):
        self.weight, self.bias, self.use_bias = layer.weight, layer.bias, layer.use_bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.graphdef = graphdef
        self.own = jax.tree.map(lambda x: Bits(x) if eqx.is_inexact_array(x) else x, own)

    @property
    def product(self) -> Product:
        """The product with the present weight and state."""
        own = jax.tree.map(_held, self.own, is_leaf=lambda x: isinstance(x, Bits))
        return nnx.merge(self.graphdef, {"kernel": kernel_of(self), **own})

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        product = self.product
        if not product.active:
            return eqx.nn.Linear.__call__(self, x, key=key)
        y = product(x)
        return y if self.bias is None else y + self.bias


def kernel_of(layer: eqx.nn.Linear) -> jax.Array:
    """The weight of a layer as a kernel.

    layer: with a weight (..., out, in).

    Returns: (..., in, out)."""
    return layer.weight.swapaxes(-1, -2)


def with_product(layer: eqx.nn.Linear, product: Product) -> Linear:
    """A sparse layer in place of another one, whose arrays it has.

    layer: with the weight.
    product: with method and state.

    Returns: a layer."""
    graphdef, _, own = nnx.split(product, nnx.Param, linear.SparseState)
    return Linear(layer, graphdef, nnx.to_pure_dict(own))


def _is_layer(value) -> bool:
    return isinstance(value, eqx.nn.Linear | eqx.nn.Embedding)


def sites(model: eqx.Module) -> dict[str, eqx.Module]:
    """The linear layers and embeddings of a model.

    model: an Equinox module.

    Returns: layers by their paths, such as "mlp/layers/0"; "" is that of a layer that is the model itself."""
    found = zip(paths_of(model, _is_layer), jax.tree.leaves(model, is_leaf=_is_layer), strict=True)
    return {path: leaf for path, leaf in found if _is_layer(leaf)}


def replaced(model: eqx.Module, new: dict[str, eqx.Module]) -> eqx.Module:
    """A copy of a model with other layers.

    model: an Equinox module.
    new: layers by their paths.

    Returns: an Equinox module."""
    leaves, structure = jax.tree.flatten(model, is_leaf=_is_layer)
    paths = paths_of(model, _is_layer)
    return jax.tree.unflatten(structure, [new.get(p, leaf) for p, leaf in zip(paths, leaves, strict=True)])


def sparse_method(layer: eqx.Module) -> Method | None:
    """The method of a layer of this package.

    layer: any layer.

    Returns: the method; None for another layer."""
    return layer.product.method if isinstance(layer, Linear) else None


def kernel_shape(layer: eqx.nn.Linear) -> tuple[int, ...]:
    """The shape of the kernel of a linear layer.

    layer: plain or of this package.

    Returns: sizes (..., in, out); () where something else stands in place of the weight, as in
        `eqx.nn.Shared`."""
    shape = getattr(layer.weight, "shape", ())
    return (*shape[:-2], *shape[-2:][::-1])


def check_layer(layer: eqx.nn.Linear, method: Method | None = None) -> None:
    """Raises `Unfit` unless `s24.sparsify` can replace a layer.

    layer: an `eqx.nn.Linear`, or a stack of such layers.
    method: from `s24.methods`, to compare its groups with the layer's widths; None to leave that out."""
    widths = layer.in_features, layer.out_features
    if type(layer) not in PLAIN:
        raise Unfit(f"{type(layer).__name__} is a subclass whose call may be another one")
    if "scalar" in widths:
        raise Unfit("it takes or gives a scalar")
    if not hasattr(layer.weight, "shape"):
        raise Unfit(f"its weight is a {type(layer.weight).__name__}, and no array")
    if kernel_shape(layer)[-2:] != widths:
        raise Unfit(f"its weight has shape {layer.weight.shape}, which does not end in {widths[::-1]}")
    try:
        check_dtype("it", "weight", layer.weight.dtype)
        if method is not None and method.trains_adapters:
            raise ValueError(
                f"{method} trains low-rank adapters, for which Equinox has no place; use it without them"
            )
        if method is not None and method.histories:
            raise ValueError(
                f"{method} scales by what earlier steps have seen, which no layer of Equinox observes; use "
                's24.nn, or fp8="tensor"'
            )
        if method is not None:
            linear.check_fit(method, *widths)
    except (TypeError, ValueError) as error:
        raise Unfit(str(error).removeprefix("Linear: ").removeprefix("it: ").rstrip(".")) from error


def replacement(
    layer: eqx.nn.Linear, method: Method, implementation: str | None, noise_key: jax.Array, path: str
) -> Linear:
    """What takes the place of a linear layer.

    layer: as in `check_layer`.
    method, implementation, noise_key, path: as in `Product`.

    Returns: a layer with the arrays of the other one."""
    return with_product(layer, Product(kernel_of(layer), method, implementation, noise_key, path))


def original(layer: eqx.Module) -> eqx.nn.Linear | None:
    """What a layer was before `s24.sparsify`, with its present arrays.

    layer: any layer.

    Returns: a layer; None if `s24.sparsify` did not make the given one."""
    if not isinstance(layer, Linear):
        return None
    widths = layer.in_features, layer.out_features, layer.use_bias
    made = eqx.filter_eval_shape(eqx.nn.Linear, *widths, key=jax.random.key(0))
    arrays = layer.weight, layer.bias
    return eqx.tree_at(lambda new: (new.weight, new.bias), made, arrays, is_leaf=lambda x: x is None)


def layers(model: eqx.Module) -> dict[str, Linear]:
    """The layers that `s24.sparsify` made.

    model: an Equinox module.

    Returns: layers by their paths."""
    return {path: layer for path, layer in sites(model).items() if isinstance(layer, Linear)}


def products(model: eqx.Module) -> nnx.Dict:
    """The products of all sparse layers as one NNX module, on which the functions of this package work.

    model: an Equinox module.

    Returns: an `nnx.Dict` of `Product`, by the paths of their layers."""
    return nnx.Dict({path: layer.product for path, layer in layers(model).items()})


def with_products(model: eqx.Module, made: nnx.Dict) -> eqx.Module:
    """A copy of a model whose sparse layers have the methods, modes and state of products.

    model: an Equinox module.
    made: as `products` returned them, maybe changed.

    Returns: an Equinox module."""
    return replaced(model, {path: with_product(layer, made[path]) for path, layer in layers(model).items()})


def with_kernels(model: eqx.Module, made: nnx.Dict) -> eqx.Module:
    """A copy of a model whose sparse layers have the kernels of products.

    model: an Equinox module.
    made: as `products` returned them, maybe changed.

    Returns: an Equinox module."""
    new = {
        path: eqx.tree_at(lambda l: l.weight, layer, made[path].kernel[...].swapaxes(-1, -2))
        for path, layer in layers(model).items()
    }
    return replaced(model, new)


def kernels(model: eqx.Module) -> nnx.State:
    """The parameters of `products`.

    model: an Equinox module.

    Returns: the kernels, by the paths of their layers."""
    return nnx.from_flat_state(
        [((path, "kernel"), nnx.Param(kernel_of(layer))) for path, layer in layers(model).items()]
    )


def masks_like(params: eqx.Module, masks: nnx.State) -> eqx.Module:
    """Masks of products as a tree like that of the parameters.

    params: an Equinox module.
    masks: of `s24.nn.masks` of its products.

    Returns: a tree like params: bool arrays of a weight's shape, and a scalar True for all else."""
    found = {path: mask[...] for (path, _), mask in nnx.to_flat_state(masks) if mask.ndim}
    where = jax.tree.map(lambda _: jnp.ones((), bool), params)
    each = layers(where)
    new = {
        path: eqx.tree_at(lambda l: l.weight, each[path], mask.swapaxes(-1, -2))
        for path, mask in found.items()
    }
    return replaced(where, new)


def parameters(model: eqx.Module) -> tuple[eqx.Module, eqx.Module]:
    """What is trained of a model, and the rest, with what its sparse layers keep.

    model: an Equinox module.

    Returns: two trees like the model, one of its arrays of floats and one of all other leaves, with None in
        place of those of the other tree; see `joined`."""
    return eqx.partition(model, eqx.is_inexact_array)


def joined(params: eqx.Module, rest: eqx.Module) -> eqx.Module:
    """The inverse of `parameters`.

    params, rest: as `parameters` returned them.

    Returns: an Equinox module."""
    return eqx.combine(params, rest)
