"""Sparse layers in place of layers of other modules, whose parameters they share.

They are made by `s24.sparsify`. Each keeps the structure of the module that it replaces, without values, so
that `s24.densify` can give that back."""

import functools

import jax
from flax import nnx
from flax.nnx.nn import dtypes

from jax_sparse24.engine.contraction import Contraction, of_axes, of_einsum
from jax_sparse24.methods.base import Method
from jax_sparse24.nn import sharding
from jax_sparse24.nn.ffn import FFN, Block, GatedFFN
from jax_sparse24.nn.linear import Linear, naming_its_layer, of_jax


class ReplacedLinear(Linear):
    """An `s24.nn.Linear` in place of an `nnx.Linear`, with its very `nnx.Param` objects.

    layer: the layer that is replaced, or a stack of layers whose parameters have leading axes.
    method, role, implementation: as in `s24.nn.Linear`.
    noise_key: a PRNG key."""

    def __init__(self, layer, method: Method, role: str, implementation: str | None, noise_key: jax.Array):
        self.origin = nnx.graphdef(layer)
        self.kernel, self.bias = layer.kernel, layer.bias
        self.dtype, self.param_dtype = layer.dtype, self.kernel.dtype
        self.promote_dtype = layer.promote_dtype
        self.shape_like(layer)
        self.in_features, self.out_features = self.weight.shape[-2:]
        self.prepare(method, role, implementation, noise_key)

    def shape_like(self, layer) -> None:
        """Takes over from the layer how its kernel is a matrix.

        layer: as in `ReplacedLinear`."""

    def restored(self) -> nnx.Module:
        """Puts the parameters back into a layer of the kind that was replaced.

        Returns: that layer, with the parameters of this one."""
        own = [(path, v) for path, v in nnx.to_flat_state(nnx.state(self)) if path[0] in ("kernel", "bias")]
        layer = nnx.merge(self.origin, nnx.from_flat_state(own))
        layer.kernel, layer.bias = self.kernel, self.bias
        return layer


class ReplacedLinearGeneral(ReplacedLinear):
    """An `s24.nn.Linear` in place of an `nnx.LinearGeneral`: its kernel has several axes for the input or for
    the output."""

    inner_names: tuple[sharding.Name, ...] = ()  # of axes that follow others in an axis of the matrix

    def shape_like(self, layer):
        self.axis, self.kernel_ndim = tuple(layer.axis), len(layer.in_features) + len(layer.out_features)

    def contraction(self, ndim: int | None = None) -> Contraction:
        """How an input is multiplied with the kernel.

        ndim: number of axes of the input; None where only the kernel's part matters.

        Returns: a `Contraction`."""
        inside = len(self.axis)
        # Flax takes the axes of the input in rising order, however they were given.
        axes = range(inside) if ndim is None else sorted(axis % ndim for axis in self.axis)
        return of_axes(axes, range(inside), ndim or inside, self.kernel_ndim)

    @property
    def weight(self) -> jax.Array:
        return self.contraction().matrix(of_jax(self.kernel[...]))

    def _take_axes(self):
        super()._take_axes()
        if names := sharding.declared(self.kernel):
            self.inner_names = tuple(name for _, *rest in self._merged(names) for name in rest if name)

    def _merged(self, names):
        """The names of the kernel's axes that make each axis of its matrix, (in, out)."""
        contraction = self.contraction()
        return [[names[axis] for axis in axes] for axes in (contraction.contracted, contraction.free)]

    def names_of_weight(self, names):
        merged = self._merged(names)
        return *names[: len(names) - sum(map(len, merged))], *(first for first, *_ in merged)

    def like_kernel(self, matrix):
        return self.contraction().like_kernel(matrix, self.kernel.shape)

    @naming_its_layer
    def __call__(self, x: jax.Array, out_sharding=None) -> jax.Array:
        return self._contract(self.contraction(x.ndim), x, out_sharding)

    def _contract(self, contraction, x, out_sharding):
        for name in self.inner_names:
            if axes := sharding.mesh_axes(name):
                raise ValueError(
                    f"{type(self).__name__}: the kernel of shape {self.kernel.shape} is cut along {name!r} "
                    f"by mesh axis {axes[0]!r}, but of axes that make one axis of its matrix only the first "
                    f"may be. Give it the rule ({name!r}, None)."
                )
        takes = [self.kernel.shape[axis] for axis in contraction.contracted]
        ndim = len(contraction.order) - len(contraction.free) + len(takes)
        if x.ndim != ndim or [x.shape[axis] for axis in dict.fromkeys(contraction.inputs)] != takes:
            raise ValueError(
                f"{type(self).__name__}: x of shape {x.shape} does not fit the kernel of shape "
                f"{self.kernel.shape}, with which it is contracted over axes of sizes {tuple(takes)}."
            )
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = dtypes.promote_dtype((x, self.kernel[...], bias), dtype=self.dtype)
        y = contraction.product(x, kernel.shape, lambda x: self.product(x, None))
        if bias is not None:
            # The bias has those axes of the result that are of the kernel, in their order there.
            left = x.ndim - len(contraction.inputs)
            sizes = [
                size if axis >= left else 1 for axis, size in zip(contraction.order, y.shape, strict=True)
            ]
            y = y + bias.reshape(sizes)
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


class ReplacedEinsum(ReplacedLinearGeneral):
    """An `s24.nn.Linear` in place of an `nnx.Einsum` whose equation is one product of matrices."""

    def shape_like(self, layer):
        self.equation = layer.einsum_str

    def contraction(self, ndim=None):
        return of_einsum(self.equation, ndim)

    @naming_its_layer
    def __call__(self, x: jax.Array, einsum_str: str | None = None, out_sharding=None) -> jax.Array:
        if einsum_str is not None:
            raise ValueError(
                f"Einsum: got the equation {einsum_str!r} in a call, but s24.sparsify has taken the layer's "
                f"own, {self.equation!r}; leave the argument out, or the layer dense by s24.Rule(path, None)."
            )
        return self._contract(self.contraction(x.ndim), x, out_sharding)


class ReplacedBlock(Block):
    """An `s24.nn.FFN` or `GatedFFN` in place of another module that computes the same.

    block: the module that is replaced; its linear layers are replaced too, under the same names.
    names: the path of each layer in the block by its role, such as {"up": "fc1", "down": "fc2"}.
    activation: as in `s24.nn.FFN`.
    layers: the sparse layers, by their roles."""

    def __init__(
        self, block: nnx.Module, names: dict[str, str], activation: str, layers: dict[str, ReplacedLinear]
    ):
        self.origin = nnx.graphdef(block)
        self.names, self.activation = tuple(names.items()), activation
        for role, layer in layers.items():
            *above, last = self.places[role]
            if above and above[0] not in vars(self):
                setattr(self, above[0], _copied(getattr(block, above[0])))
            setattr(functools.reduce(getattr, above, self), last, layer)
        self.prepare()

    def prepare(self) -> None:
        """See `s24.nn.FFN`; a gated block learns nothing besides."""

    def restored(self) -> nnx.Module:
        """Puts the parameters back into a module of the kind that was replaced.

        Returns: that module, with the parameters of this one."""
        layers = {self.places[role]: layer.restored() for role, layer in self.parts.items()}
        state = [
            ((*map(_key, path), *inner), value)
            for path, layer in layers.items()
            for inner, value in nnx.to_flat_state(nnx.state(layer))
        ]
        block = nnx.merge(self.origin, nnx.from_flat_state(state))
        for (*above, last), layer in layers.items():
            setattr(functools.reduce(getattr, above, block), last, layer)
        return block


def _copied(container):
    """A container of layers with the same layers in it."""
    if isinstance(container, nnx.List):
        return nnx.List([_copied(value) for value in container])
    if isinstance(container, nnx.Dict):
        return nnx.Dict({name: _copied(value) for name, value in container.items()})
    return container


def _key(name: str):
    return int(name) if name.isdigit() else name


class ReplacedFFN(ReplacedBlock, FFN):
    """An `s24.nn.FFN` in place of another module that computes the same."""

    prepare = FFN.prepare


class ReplacedGatedFFN(ReplacedBlock, GatedFFN):
    """An `s24.nn.GatedFFN` in place of another module that computes the same."""


def contraction_of(layer: nnx.Module) -> Contraction:
    """How the kernel of a layer is a matrix.

    layer: an `nnx.Linear`, `nnx.LinearGeneral` or `nnx.Einsum` with an equation.

    Returns: a `Contraction`.
    Raises: ValueError for an equation that is not one product of matrices."""
    if isinstance(layer, nnx.Einsum):
        return of_einsum(layer.einsum_str)
    if isinstance(layer, nnx.LinearGeneral):
        inside = len(layer.axis)
        return of_axes(layer.axis, range(inside), inside, inside + len(layer.out_features))
    return of_axes((-1,), (0,), 1, 2)


def restored(module: nnx.Module) -> nnx.Module | None:
    """What a module of this file stands for.

    module: any module.

    Returns: the module that was replaced, with the parameters of `module`; None for other modules."""
    return module.restored() if isinstance(module, ReplacedLinear | ReplacedBlock) else None
