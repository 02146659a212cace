"""Logical axes of layers, and the mesh axes over which they are cut.

A layer that is told the names of its axes, such as `s24.nn.FFN(d, f, axes=("embed", "mlp"), rngs=rngs)`, cuts
its products over the mesh in the context (`jax.set_mesh`), by the rules in force: those of
`nnx.logical_axis_rules`, or `RULES` where none are."""

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core import spmd
from jax.sharding import PartitionSpec

from jax_sparse24.dispatch import shards
from jax_sparse24.engine import tiles

Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]
Name = str | tuple[str, ...] | None  # of a logical axis; several names cut one axis together

# Logical axis -> mesh axes. "batch" is the first axis of the input; "embed" is the model width, which weights
# are cut along only where they rest (FSDP); "mlp" is the width of a block, "heads" that of attention, "vocab"
# the rows of an embedding; "expert" is the axis of the experts of a mixture, whose mesh axes cut tokens too.
RULES: Rules = (
    ("batch", ("dp", "fsdp")),
    ("embed", "fsdp"),
    ("mlp", "tp"),
    ("heads", "tp"),
    ("vocab", None),
    ("expert", "fsdp"),
)


def rules_for(mesh: Any, rules: Rules = RULES) -> Rules:
    """Rules without the mesh axes that a mesh does not have, for `nnx.logical_axis_rules`.

    mesh: a `jax.sharding.Mesh`, or any object with `axis_names`.
    rules: pairs of a logical axis and its mesh axis, mesh axes or None.

    Returns: pairs of a logical axis and a tuple of mesh axes, None for an empty one."""

    def present(axes):
        return tuple(axis for axis in _tuple(axes) if axis in mesh.axis_names) or None

    return tuple((name, present(axes)) for name, axes in rules)


def spec(*names: Name) -> PartitionSpec | None:
    """How an array with these logical axes is cut over the mesh in the context.

    names: of its axes; None for one that is never cut, a tuple for one that several names cut. An axis of the
        mesh for which there is no rule stands for itself, as in Flax.

    Returns: a `PartitionSpec` of mesh axes; None without a mesh in the context.
    Raises: ValueError for a name without a rule, and for a rule with an axis that the mesh does not have."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    rules = {axis: axis for axis in mesh.axis_names} | _rules(mesh)

    def axes(name):
        if isinstance(name, tuple):
            return tuple(axis for one in name for axis in _tuple(axes(one))) or None
        if name is None:
            return None
        if name not in rules:
            known = ", ".join(repr(other) for other in rules if other not in mesh.axis_names)
            raise ValueError(
                f"sharding: no rule says over which mesh axes the logical axis {name!r} is cut; there are "
                f"rules for {known}. Add one, ({name!r}, None) for no mesh axis, to nnx.logical_axis_rules."
            )
        if missing := [axis for axis in _tuple(rules[name]) if axis not in mesh.axis_names]:
            raise ValueError(
                f"sharding: the rule ({name!r}, {rules[name]!r}) names the mesh axis {missing[0]!r}, but the "
                f"mesh in the context has {', '.join(map(repr, mesh.axis_names))}. Write ({name!r}, None) "
                "for an axis that is not cut, or leave out what the mesh does not have: "
                "nnx.logical_axis_rules(s24.sharding.rules_for(mesh, rules))."
            )
        return rules[name]

    return PartitionSpec(*map(axes, names))


def _rules(mesh) -> dict[str, Any]:
    """The rules in force, by logical axis."""
    return dict(spmd.get_logical_axis_rules() or rules_for(mesh))


def _tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def check_named(*names: Name) -> None:
    """Raises ValueError if no rule names an axis of the mesh in the context, and the layer does not either.

    Over it every device would compute the same, and what is cut over it would be gathered. A rule of an axis
    that looks like a mistyped one of the layer does not count; those of others may be for other layers. A
    layer asks as it is made, and in each call, which may have another mesh.

    names: the logical axes of the layer."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return
    own = {one for name in names for one in _tuple(name) if one is not None}
    rules, known = _rules(mesh), {name for name, _ in RULES} | own
    others = rules.keys() - known - set(mesh.axis_names)
    mistyped = {
        name: near[0] for name in others if (near := difflib.get_close_matches(name, sorted(known), 1))
    }
    told = {name: axes for name, axes in rules.items() if name not in mistyped}
    named = {*told, *(axis for axes in told.values() for axis in _tuple(axes))} | own
    left = [a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in named and a not in mesh.manual_axes]
    if left:
        axis, sizes = left[0], ", ".join(f"{a} = {mesh.shape[a]}" for a in left)
        all_rules = ", ".join(f"({name!r}, {axes!r})" for name, axes in rules.items())
        meant = [f" {name!r} is no axis of this layer: is {near!r} meant?" for name, near in mistyped.items()]
        raise ValueError(
            f"sharding: the mesh in the context has {sizes}, which no rule names; the rules are {all_rules}."
            f"{''.join(meant)} Say what is cut over it, such as ('batch', {axis!r}) for tokens, in "
            "nnx.logical_axis_rules around the making of layers and their calls. Add "
            f"({axis!r}, {axis!r}) if layers of your own are cut over it, or ({axis!r}, None) if all of its "
            "devices shall compute the same."
        )


def check_fits(op: str, names: tuple[Name, ...] | None, shape: tuple[int, ...]) -> None:
    """Raises ValueError if a kernel cannot be cut as its names say over the mesh in the context.

    A layer asks as it is made, so that this is told before anything is moved to the mesh.

    op: the layer, for messages.
    names: of the logical axes of the kernel; None for one that is never cut.
    shape: of the kernel, (in, out)."""
    found = None if names is None else spec(*names)
    if names is None or found is None:
        return
    sizes = jax.sharding.get_abstract_mesh().shape
    cuts = shards.mesh_axes(op, "the kernel", found, len(shape))
    for axis, (name, size, axes) in enumerate(zip(names, shape, cuts, strict=True)):
        n = math.prod(sizes[a] for a in axes)
        if size % n:
            along = " * ".join(f"{a} = {sizes[a]}" for a in axes)
            raise ValueError(
                f"{op}: axis {axis} of the kernel of shape {shape}, {name!r}, of size {size} does not divide "
                f"into {n} shards ({along}). Use a multiple of {n}, fewer devices along {axes[0]}, or the "
                f"rule ({name!r}, None)."
            )


def declared(variable: nnx.Variable) -> tuple[Name, ...] | None:
    """The names of all axes of a kernel, as its metadata declares them, or else as it lies on a mesh.

    variable: of two axes or more. Fewer names are those of its last axes, and one is that of the first of
        two.

    Returns: a name for each axis; None if nothing is cut."""
    found: Any = variable.get_metadata().get("out_sharding")
    value = variable.get_value()
    if not found and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        found = None if jax.typeof(value).sharding.mesh.explicit_axes else value.sharding
    for inner in ("sharding", "spec"):  # of a Format, and of a NamedSharding
        found = getattr(found, inner, found)
    if not isinstance(found, tuple | list | PartitionSpec) or not any(found):
        return None
    names = tuple(found) + (None,) * (2 - len(found))
    return (None,) * (value.ndim - len(names)) + names


def laid_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """An array that lies on a mesh as another one does, as far as that is known.

    x, other: arrays of one shape; the other one may be of NumPy.

    Returns: an array like x."""
    own = jax.typeof(other).sharding
    if own.mesh.explicit_axes:
        return jax.sharding.reshard(x, own.spec)
    known = not any(isinstance(array, jax.core.Tracer) for array in (x, other))
    lies = known and isinstance(other, jax.Array) and other.committed
    return jax.device_put(x, other.sharding) if lies else x


def of_whole(function: Callable, w: jax.Array) -> Any:
    """What a function says of a weight that it sees as a whole, on every device.

    function: of w.
    w: (..., in, out).

    Returns: what `function` returns: arrays in any structure, of which those of the shape of w lie as w."""
    explicit = jax.typeof(w).sharding.mesh.explicit_axes
    found = function(jax.sharding.reshard(w, PartitionSpec()) if explicit else w)
    return jax.tree.map(lambda x: laid_like(x, w) if x.shape == w.shape else x, found)


def rests(tree: Any) -> Any:
    """How arrays rest on the mesh in the context, by the logical axes that their variables declare.

    tree: of variables, and of arrays, which declare none and are whole.

    Returns: a tree like it, with a `PartitionSpec` in place of each array.
    Raises: ValueError for a name without a rule."""

    def of(leaf):
        if not isinstance(leaf, nnx.Variable):
            return PartitionSpec()
        names = leaf.get_metadata().get("out_sharding") or ()
        stacked = (None,) * (len(leaf.get_value().shape) - len(names))  # axes of stacked layers come first
        return leaf.replace(PartitionSpec(*stacked, *spec(*names)) if names else PartitionSpec())

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def mesh_axes(name: str) -> tuple[str, ...]:
    """The axes of the mesh in the context that cut a logical axis.

    Axes of one device are left out, and those over which the caller is manual.

    name: of the logical axis.

    Returns: names of mesh axes; () without a mesh in the context.
    Raises: ValueError for a name without a rule, or a rule with an axis that the mesh does not have."""
    found = spec(name)
    if found is None:
        return ()
    return shards.mesh_axes("sharding", f"the logical axis {name!r}", found, 1)[0]


def specs(tokens: str | None, **weights: tuple[Name, ...] | None) -> dict[str, PartitionSpec] | None:
    """How the operands of an engine are cut, from the logical axes of a layer.

    tokens: name of the first axis of the input; None if it is not cut.
    weights: the names of both axes of each weight, by the weight's name in the engine; None without names.

    Returns: as the engines take it; None without names, and without a mesh in the context.
    Raises: as `spec` and `check_named`."""
    if any(names is None for names in weights.values()) or jax.sharding.get_abstract_mesh().empty:
        return None
    check_named(tokens, *(name for names in weights.values() for name in names or ()))
    return {"x": spec(tokens), **{weight: spec(*names) for weight, names in weights.items()}}


def in_products(value: jax.Array, tokens: str | None, *names: Name) -> jax.Array:
    """An array that products of tokens take, inside of jit cut as those tokens are along their features.

    Sums over the axes that cut it are then added up, where XLA might gather the tokens. It stays whole along
    mesh axes that cut tokens, which do not divide it, or over which a `jax.shard_map` runs.

    value: with one axis for each name.
    tokens: name of the first axis of the input; None if it is not cut.
    names: of its logical axes; None for one that is whole. Without any name the array
        is left as it is.

    Returns: an array like `value`.
    Raises: ValueError for names that are not as many as the axes of `value`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not any(names) or mesh.empty or not isinstance(value, jax.core.Tracer):
        return value
    if len(names) != value.ndim:
        raise ValueError(
            f"sharding: an array of shape {value.shape} has the axes {names}: name each of them, or None for "
            "one that is whole (for adapters in `Method.adapter_axes`, by an axis of the weight, -2 or -1)."
        )
    taken = {axis for axes in spec(tokens) or () for axis in _tuple(axes)} | set(mesh.manual_axes)
    cuts = [tuple(a for a in _tuple(axes) if a not in taken) for axes in spec(*names) or ()]
    parts = [math.prod(mesh.shape[a] for a in axes) for axes in cuts]
    cuts = [axes if size % n == 0 else () for axes, size, n in zip(cuts, value.shape, parts, strict=True)]
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*(axes or None for axes in cuts)))


def by_tiles(
    function: Callable,
    size: tiles.Size,
    names: tuple[Name, ...] | None,
    w: jax.Array,
    state: dict[str, jax.Array] | None = None,
) -> Any:
    """What a function of a weight computes tile by tile, on the shards in which the weight rests.

    It is `engine.tiles.on_shards` with the logical axes of the weight.

    function: of w, and of `state` if there is one.
    size: of its tiles, see `Method.tiles`.
    names: of the last axes of the weight; None for one that is whole on every device.
    w: (..., in, out).
    state: a dict of arrays, of the shape of w or with its leading axes alone.

    Returns: what `function` returns: an array of the shape of w, or with a state a dict like it."""
    cut = None if names is None else spec(*names)
    if cut is not None:
        cut = PartitionSpec(*(None,) * (w.ndim - len(names)), *cut)
    return tiles.on_shards(function, size, cut, w, state)


def metadata(names: tuple[Name, ...] | None) -> dict:
    """The metadata of a variable with logical axes, which `nnx.get_partition_spec` reads.

    Values are not moved as the variable is made: without a mesh in the context that would raise.

    names: of its axes, or None.

    Returns: a dict; {} without names."""
    return {} if names is None else {"out_sharding": tuple(names), "eager_sharding": False}
