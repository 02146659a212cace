"""Which layers and blocks of NNX modules the layers of this package can replace, and why not.

`s24.sparsify` asks this module, or `jax_sparse24.nn.equinox`, which has the same functions `sites`,
`sparse_method`, `check_layer`, `replacement`, `original`, `replaced` and `kernel_shape`."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes

from jax_sparse24.engine.ffn import check_fits, check_widths
from jax_sparse24.engine.operand import ACTIVATIONS
from jax_sparse24.methods.base import Method
from jax_sparse24.nn.ffn import Block
from jax_sparse24.nn.linear import Linear, check_fit
from jax_sparse24.nn.replaced import (
    ReplacedEinsum,
    ReplacedFFN,
    ReplacedGatedFFN,
    ReplacedLinear,
    ReplacedLinearGeneral,
    contraction_of,
    restored,
)
from jax_sparse24.patterns import check_dtype

REPLACEMENTS = {
    nnx.Linear: ReplacedLinear,
    nnx.LinearGeneral: ReplacedLinearGeneral,
    nnx.Einsum: ReplacedEinsum,
}
PLAIN = tuple(REPLACEMENTS)  # types of linear layers
PARAMETERS = ("kernel", "bias")  # of linear layers
PROBES = 4  # tokens with which a block is compared with what its replacement computes


class Unfit(Exception):
    """Why a layer stays dense, in words that follow its path."""


def name_of(path: Sequence) -> str:
    """A path of a module as text.

    path: names and indices.

    Returns: these with "/" between them."""
    return "/".join(map(str, path))


def sites(model: nnx.Module) -> dict[str, nnx.Module]:
    """All modules of a model.

    model: an NNX module.

    Returns: modules by their paths."""
    return {name_of(path): module for path, module in nnx.iter_modules(model)}


def sparse_method(layer: nnx.Module) -> Method | None:
    """The method of a layer of this package.

    layer: any module.

    Returns: the method; None for a module that is no such layer."""
    return layer.method if isinstance(layer, Linear) else None


def kernel_shape(layer: nnx.Module) -> tuple[int, ...]:
    """The shape of the kernel of a linear layer.

    layer: plain or of this package.

    Returns: sizes, those of a stack first."""
    return tuple(layer.kernel.shape)


def replacement(
    layer: nnx.Module, method: Method, implementation: str | None, noise_key: jax.Array, path: str
) -> Linear:
    """What takes the place of a linear layer.

    layer: as in `check_layer`.
    method, implementation: as in `s24.nn.Linear`.
    noise_key: a PRNG key.
    path: of the layer in the model.

    Returns: a layer with the parameters of the other one."""
    return REPLACEMENTS[type(layer)](layer, method, "w", implementation, noise_key)


def original(module: nnx.Module) -> nnx.Module | None:
    """What a module was before `s24.sparsify`, with its present parameters.

    module: any module.

    Returns: a module; None if `s24.sparsify` did not make the given one."""
    return restored(module)


def replaced(model: nnx.Module, new: dict[str, nnx.Module]) -> nnx.Module:
    """Puts modules in place of others, wherever these stand in the model.

    model: an NNX module, which is changed.
    new: modules by the paths of those that they replace.

    Returns: the model, or what replaces it."""
    old = sites(model)
    by_id = {id(old[path]): module for path, module in new.items()}

    def changed(value):
        if id(value) in by_id:
            return by_id[id(value)]
        if type(value) in (list, tuple):
            inside = [changed(inner) for inner in value]
            same = all(a is b for a, b in zip(inside, value, strict=True))
            return value if same else type(value)(inside)
        if type(value) is dict:
            inside = {name: changed(inner) for name, inner in value.items()}
            return value if all(inside[name] is value[name] for name in value) else inside
        return value

    for module in old.values():
        for name, value in list(vars(module).items()):
            if not name.startswith("_pytree__") and (there := changed(value)) is not value:
                setattr(module, name, there if isinstance(there, nnx.Module) else nnx.data(there))
    return changed(model)


def check_layer(layer: nnx.Module, method: Method | None = None) -> None:
    """Raises `Unfit` unless `s24.sparsify` can replace a layer.

    layer: an `nnx.Linear`, `nnx.LinearGeneral` or `nnx.Einsum`, or a stack of such layers.
    method: from `s24.methods`, to compare its groups with the layer's widths; None to leave that out."""
    kind = type(layer).__name__
    if type(layer) not in PLAIN:
        raise Unfit(f"{kind} is a subclass whose call may be another one")
    dots = [getattr(layer, name, None) for name in ("dot_general", "dot_general_cls", "einsum_op")]
    if any(dot not in (None, jax.lax.dot_general, jnp.einsum) for dot in dots):
        raise Unfit(f"this {kind} has a product of its own (dot_general or einsum_op)")
    for name in ("precision", "preferred_element_type"):
        if getattr(layer, name, None) is not None:
            raise Unfit(f"{name}={getattr(layer, name)} is an option that sparse products do not have")
    if layer.promote_dtype is not dtypes.promote_dtype:
        raise Unfit(f"this {kind} promotes dtypes by a function of its own")
    if own := [name_of(path) for path, _ in nnx.to_flat_state(nnx.state(layer)) if path[0] not in PARAMETERS]:
        raise Unfit(f"besides kernel and bias it holds {own[0]}")
    if getattr(layer, "batch_axis", None):
        raise Unfit(f"batch_axis={dict(layer.batch_axis)} makes several products of it")
    if isinstance(layer, nnx.Einsum):
        if layer.einsum_str is None:
            raise Unfit("it gets its equation in the call")
        try:
            contraction_of(layer)
        except ValueError as error:
            raise Unfit(str(error)) from error
        own = tuple(layer.kernel_shape)
    elif isinstance(layer, nnx.LinearGeneral):
        own = (*layer.in_features, *layer.out_features)
    else:
        own = (layer.in_features, layer.out_features)
    contraction = contraction_of(layer)
    widths = [math.prod(own[axis] for axis in axes) for axes in (contraction.contracted, contraction.free)]
    shape = layer.kernel.shape
    if shape[len(shape) - len(own) :] != own:
        raise Unfit(
            f"its kernel has shape {shape}, not {own} with the axes of a stack first: stack along axis 0"
        )
    lead = shape[: len(shape) - len(own)]
    if layer.bias is not None and layer.bias.shape[: len(lead)] != lead:
        raise Unfit(
            f"its bias has shape {layer.bias.shape} beside a kernel of shape {shape}, and does not begin "
            f"with {lead}, the axes of a stack: stack along axis 0"
        )
    try:
        check_dtype("it", "kernel", layer.kernel.dtype)
        check_dtype("it", "dtype", jnp.dtype(layer.dtype or jnp.float32))
        if method is not None:
            check_fit(method, *widths)
    except (TypeError, ValueError) as error:
        raise Unfit(str(error).removeprefix("Linear: ").removeprefix("it: ").rstrip(".")) from error


def at(block: nnx.Module, path: str) -> nnx.Module:
    """What stands at a path in a block.

    block: a module.
    path: names with "/" between them.

    Returns: a module."""
    for name in path.split("/"):
        block = getattr(block, name)
    return block


def replaced_block(
    block: nnx.Module,
    method: Method,
    names: dict[str, str],
    activation: str | None,
    implementation: str | None,
    noise_key: jax.Array,
    known: list,
) -> Block:
    """What takes the place of a feed-forward block.

    block: a module, or a stack of modules; stays as it is.
    method, implementation: as in `s24.nn.FFN`.
    names: paths of its layers by their roles; {} to find them.
    activation, known: as in `recognise`.
    noise_key: a PRNG key.

    Returns: a `ReplacedFFN` or `ReplacedGatedFFN`.
    Raises: `Unfit` for a block that computes something else, or does not fit the method."""
    found = [name_of(path) for path, m in nnx.iter_modules(block) if isinstance(m, PLAIN)]
    if missing := [path for path in names.values() if path not in found]:
        raise Unfit(f"it has no linear layer {missing[0]!r}, but {', '.join(found)}")
    if not names and len(found) != 2:
        kind = type(method).__name__
        raise Unfit(f"{kind} needs a block of two linear layers, and it has {len(found)}: {', '.join(found)}")
    layers = {path: at(block, path) for path in (names.values() if names else found)}
    for path, layer in layers.items():
        if type(layer) is not nnx.Linear:
            raise Unfit(f"{path} is an {type(layer).__name__}, and a block runs nnx.Linear layers as one")
        try:
            check_layer(layer)
        except Unfit as reason:
            raise Unfit(f"{path}: {reason}") from None
    if len({layer.dtype and jnp.dtype(layer.dtype) for layer in layers.values()}) > 1:
        raise Unfit("its layers compute in different dtypes")
    rest = [
        name_of(path) for path, _ in nnx.to_flat_state(nnx.state(block)) if name_of(path[:-1]) not in layers
    ]
    if rest:
        raise Unfit(f"besides its linear layers it holds {rest[0]}")
    for path, module in nnx.iter_modules(block):
        if hasattr(module, "deterministic") and getattr(module, "rate", 1):
            raise Unfit(
                f"{name_of(path) or 'it'} has a flag `deterministic`, which model.train() changes and the "
                "replacement lacks; leave dropout out, or make the layers sparse one by one"
            )
    names, activation = recognise(block, names or found, activation, known)
    d, f = at(block, names["up"]).kernel.shape[-2:]
    try:
        check_fits("it", method, activation)
        check_widths("it", method, d, f)
    except ValueError as error:
        raise Unfit(str(error).removeprefix("it: ").rstrip(".")) from error
    kind = ReplacedGatedFFN if "gate" in names else ReplacedFFN
    for path in names.values():
        if (first := path.split("/")[0]) in (*dir(kind), "activation", "origin"):
            raise Unfit(f"{first!r} is a name that s24.nn.FFN uses itself; give the layer another one")
    roles = {"up": "w1", "down": "w2"} if kind is ReplacedFFN else dict.fromkeys(names, "w")
    sparse = {
        role: ReplacedLinear(
            at(block, path), method, roles[role], implementation, jax.random.fold_in(noise_key, number)
        )
        for number, (role, path) in enumerate(names.items())
    }
    return kind(block, names, activation, sparse)


def recognise(block: nnx.Module, names, activation: str | None, known: list) -> tuple[dict[str, str], str]:
    """The layers of a block by their roles, and its activation, found by running it with random parameters.

    block: a module, or a stack of modules.
    names: paths of its layers by role; or those of two layers whose roles are not known.
    activation: as in `s24.nn.FFN`; None to find it.
    known: what was found of other blocks; is added to.

    Returns: paths by role, and the name of the activation.
    Raises: `Unfit` for a block that computes something else."""
    graphdef, state = nnx.split(block)
    alike = str((names, activation, [(path, v.shape, v.dtype) for path, v in nnx.to_flat_state(state)]))
    for other, key, found in known:
        if key == alike and other == graphdef:
            return found
    lead = at(block, next(iter(names.values())) if isinstance(names, dict) else names[0]).kernel.ndim - 2
    draw = np.random.default_rng(1)

    def random_like(leaf):
        values = draw.standard_normal(leaf.shape[lead:], np.float32)
        return jnp.asarray(values / len(values) ** 0.5 if values.ndim > 1 else values, leaf.dtype)

    known_roles = isinstance(names, dict)
    orders = [names] if known_roles else [{"up": a, "down": b} for a, b in (names, names[::-1])]
    found, refused = [], []
    with jax.ensure_compile_time_eval():
        state = jax.tree.map(random_like, state)
        for order in orders:
            kernels = {role: at(block, path).kernel.shape[lead:] for role, path in order.items()}
            if any(shape != kernels["up"][:: -1 if role == "down" else 1] for role, shape in kernels.items()):
                shapes = ", ".join(f"{role} {shape}" for role, shape in kernels.items())
                refused.append(f"kernels of shapes {shapes} are not those of a feed-forward block")
                continue
            try:
                found.append((*_nearest(graphdef, state, order, activation), order))
            except Unfit as reason:
                refused.append(str(reason))
    if not found:
        raise Unfit(min(refused, key=lambda reason: "a call with" in reason))
    _, name, order = min(found, key=lambda one: one[0])
    known.append((graphdef, alike, (order, name)))
    return order, name


def _nearest(graphdef, state, names: dict[str, str], activation) -> tuple[float, str]:
    """The activation with which a block nearly computes what its replacement does, and the relative error.

    graphdef, state: of one block.
    names: paths of its layers by their roles."""
    tried = [activation] if activation else list(ACTIVATIONS)

    def errors(state, x):
        block = nnx.merge(graphdef, state)
        parts = {role: at(block, path) for role, path in names.items()}
        got, wants = block(x), []
        for name in tried:
            y = ACTIVATIONS[name](parts["gate" if "gate" in parts else "up"](x))
            wants.append(parts["down"](y * parts["up"](x) if "gate" in parts else y))
        if jax.tree.map(jnp.shape, got) != wants[0].shape:
            raise ValueError(f"for x of shape {x.shape} it returns {jax.tree.map(jnp.shape, got)}")
        eps = float(jnp.finfo(wants[0].dtype).eps)
        far = [jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max() for want in wants]
        return jnp.stack(far), eps

    d = at(nnx.merge(graphdef, state), names["up"]).kernel.shape[0]
    x = np.random.default_rng(0).standard_normal((1, PROBES, d), np.float32)
    try:
        far, eps = jax.jit(errors)(state, x)
    except Exception as error:  # whatever a call of a module may raise
        raise Unfit(f"a call with nothing but its input fails: {str(error).rstrip('.')}") from error
    error, name = min(zip(far.tolist(), tried, strict=True))
    if not error <= 32 * eps:
        formula = "down(act(gate(x)) * up(x))" if "gate" in names else "down(act(up(x)))"
        raise Unfit(
            f"it does not compute {formula} with one of {', '.join(ACTIVATIONS)}: the nearest, {name}, "
            f"differs by {error:.1e} of the largest output"
        )
    return error, name
