"""What the types of arrays say about meshes: over which manual axes they vary, and over which they are cut.

Inside `jax.shard_map` an array varies over a mesh axis if the shards along it may hold different values. JAX
checks this (`check_vma=True`), and a native call or a differentiation rule needs operands that vary alike."""

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_sparse24.patterns import key_of

# Within a shard_map in which every call has its shard of the tokens: the manual axes that cut them, in order.
TOKENS = jax.make_user_context(())


def alike(tree):
    """Arrays that all vary over the same manual axes, the union of theirs, with the same values.

    The transpose of such a cast is the sum over shards that a gradient then needs.

    tree: arrays in any structure.

    Returns: the same structure; `tree` itself outside of `jax.shard_map`, and without its check."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    return varying_as(tree, tree)


def varying_as(tree, others):
    """Arrays that vary over every manual axis over which others do, with the same values.

    tree, others: arrays in any structure.

    Returns: the structure of `tree`."""
    over = varying(others)
    return jax.tree.map(lambda x: _vary(x, over), tree) if over else tree


def varying(tree) -> frozenset[str]:
    """The manual axes over which any of the arrays varies; none without the check of `jax.shard_map`.

    tree: arrays in any structure."""
    return frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def _vary(x: jax.Array, over: frozenset[str]) -> jax.Array:
    missing = over - jax.typeof(x).mat.varying
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def shards_summed(x: jax.Array, tree) -> int:
    """Over how many shards the gradient of an array is summed once `alike` has cast it beside others.

    x: the array as it was before the cast.
    tree: the others."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return 1
    return math.prod(mesh.shape[axis] for axis in varying((x, tree)) - varying(x))


def fold_shard(key: jax.Array, tree) -> jax.Array:
    """A key of its own for every shard in which other arrays may differ.

    With the check of `jax.shard_map` these are the shards along the axes over which the arrays vary; without
    it nothing tells which arrays are equal in all shards, so that every shard gets its own key. Along
    `TOKENS` all have one key, because draws know the place of the shard.

    key: uint32 (2,).
    tree: the arrays.

    Returns: uint32 (2,); `key` itself outside of `jax.shard_map`."""
    over = varying(tree)
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        index = jax.lax.axis_index(axis)
        if axis in TOKENS.value:
            continue
        if axis in over or not varying(index):
            key = jax.random.key_data(jax.random.fold_in(key_of(key), index))
    return key


def manual_over(used) -> frozenset[str]:
    """The mesh axes over which a `jax.shard_map` in the context is manual that uses some of them.

    These are explicit ones and those of one device besides. XLA may cut along the rest as it likes.

    used: names of mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    of_one = [axis for axis in mesh.axis_names if mesh.shape[axis] == 1 and axis not in mesh.manual_axes]
    return frozenset((*used, *mesh.explicit_axes, *of_one))


def left_to_xla() -> int:
    """Into how many shards XLA may cut an array here: over all devices, but inside of `jax.shard_map` only
    over the mesh axes that are not manual there."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return jax.device_count()
    return math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes)


def under_jit(function, operands):
    """A function with a `jax.shard_map` that leaves mesh axes to XLA, as it can be called where it is called:
    outside of jit, where jax 0.10 refuses to run it, under a jit of its own.

    function: of the operands.
    operands: arrays in any structure."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands))
    return function if traced else jax.jit(function)


def whole(op: str, tree):
    """Raises ValueError if an array is cut over an explicit mesh axis, where no kernel can be called.

    op: the operation, for the message.
    tree: arrays in any structure.

    Returns: the same structure, in which no type names mesh axes of one device, which cut nothing."""

    def of_type(x):
        sharding = jax.typeof(x).sharding
        named = [axes for axes in sharding.spec if axes is not None]
        if not sharding.mesh.explicit_axes or not named:
            return x
        if all(size == 1 for size in map(sharding.mesh.shape.get, jax.tree.leaves(named))):
            return jax.sharding.reshard(x, PartitionSpec())
        names = ", ".join(repr(axis) for axis in sharding.mesh.explicit_axes)
        raise ValueError(
            f"{op}: an operand of shape {x.shape} is cut by {spec_text(sharding.spec)} over a mesh with "
            f"explicit axes ({names}), which kernels do not see. Call {op} inside jax.shard_map, where every "
            f"device has its own shard: jax.shard_map({op}, in_specs=..., out_specs=...)."
        )

    return jax.tree.map(of_type, tree)


def mesh_axes(op: str, what: str, spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """The axes of the mesh in the context that cut each axis of an array.

    Mesh axes of one device are left out, and those over which the caller is manual.

    op, what: the function, and what is cut, for messages.
    spec: how it is cut.
    rank: number of axes of the array.

    Returns: names of mesh axes for each axis.
    Raises: TypeError for another kind of `spec`; ValueError for one of more axes, or with a mesh axis that
        the mesh does not have."""
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{op}: {what} is cut by {spec!r}, which is no jax.sharding.PartitionSpec. Write "
            "PartitionSpec('dp') to cut the first axis over dp."
        )
    if len(spec) > rank:
        raise ValueError(
            f"{op}: {what} has {rank} axes and cannot be cut by {spec_text(spec)}. Name mesh axes for its "
            f"first {rank} axes at most."
        )
    found = []
    for axes in (*spec, *(None,) * (rank - len(spec))):
        axes = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axis in axes:
            if axis not in mesh.axis_names:
                known = ", ".join(map(repr, mesh.axis_names))
                raise ValueError(
                    f"{op}: {what} is cut by {spec_text(spec)}, but the mesh in the context has no axis "
                    f"{axis!r}; it has {known or 'none'}. Name one of these, or give the mesh that axis."
                )
        found.append(tuple(a for a in axes if mesh.shape[a] > 1 and a not in mesh.manual_axes))
    return tuple(found)


def cut_of(x) -> PartitionSpec | None:
    """How an array is cut over the mesh in the context, as far as that is known: where axes of the mesh are
    explicit, and of arrays that have been placed on it, outside of jit.

    x: anything that is an array, or has the shape of one.

    Returns: how; None if it is not known."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        return jax.typeof(x).sharding.spec
    placed = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed
    if not placed or not isinstance(x.sharding, NamedSharding):
        return None
    return x.sharding.spec if x.sharding.mesh.shape == mesh.shape else None


def with_tokens_of(y: jax.Array, x) -> jax.Array:
    """A result whose tokens are cut as those of the input are, where axes of the mesh are explicit: over axes
    of one device, too, which cut nothing, but are part of its type.

    y: (..., out).
    x: (..., in), with the leading axes of y."""
    own = jax.typeof(y).sharding
    if not own.mesh.explicit_axes:
        return y
    *tokens, _ = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(y, PartitionSpec(*tokens, own.spec[-1]))


def check_declared(op: str, name: str, declared: PartitionSpec, x, axes=slice(None)) -> None:
    """Raises ValueError for an array that is known to be cut in another way than is declared.

    Left to JAX, the array would be moved, and its gradient back, in every call.

    op, name: the function and the array, for messages.
    declared: how it should be cut.
    x: the array.
    axes: those that are compared."""
    there = cut_of(x)
    if there is None:
        return
    wanted, found = (mesh_axes(op, name, spec, x.ndim)[axes] for spec in (declared, there))
    if wanted == found:
        return
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    move = "jax.sharding.reshard" if explicit else "jax.device_put"
    raise ValueError(
        f"{op}: {name} is declared to be cut by {spec_text(declared)}, but it is cut by {spec_text(there)}. "
        f"Move it with {move}({name if name.isidentifier() else '...'}, {spec_text(declared)}), or declare "
        "what it is, in specs or in the axes, tokens and rules of the layer."
    )


def spec_text(spec: PartitionSpec) -> str:
    """A partition as it is written, such as P('dp', None).

    spec: of an array."""
    return f"P({', '.join(map(repr, spec))})"
