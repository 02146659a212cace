"""Functions of a weight that work tile by tile, such as the choice of a mask, on the shards where it rests.

No weight is gathered for them where its shards are made of whole tiles."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_sparse24.dispatch.shards import manual_over, mesh_axes, under_jit

# Rows and columns of a tile; 0 for an axis that must be whole, None for a function of all of the weight.
Size = tuple[int, int] | None

_OVER = jax.make_user_context(((), ()))  # the mesh axes that cut rows and columns within `on_shards`


def total(x: jax.Array, axes: tuple[int, ...] = (-2, -1)) -> jax.Array:
    """The sum of an array over the shards of the weight, within `on_shards`; elsewhere the array itself.

    x: any array, computed of one shard.
    axes: of the weight, along which the shards are that add to the sum.

    Returns: an array like x, the same on every one of these shards."""
    over = tuple(name for axis in axes for name in _OVER.value[axis])
    return jax.lax.psum(x, over) if over else x


def whole_columns(x: jax.Array) -> jax.Array:
    """An array with the columns of all shards, gathered, within `on_shards`; elsewhere the array itself.

    x: (..., rows, columns), of the columns of one shard.

    Returns: (..., rows, all columns)."""
    over = _OVER.value[-1]
    return jax.lax.all_gather(x, over, axis=x.ndim - 1, tiled=True) if over else x


def on_shards(function: Callable, size: Size, cut: PartitionSpec | None, w: jax.Array, state=None):
    """`function(w)`, or `function(w, state)`, on the shards of a weight that is cut over the mesh in the
    context.

    Where shards are not made of whole tiles, the weight is gathered. Outside of jit a weight on one device
    stays there.

    function: of w and `state`. What it says of a tile depends on that tile alone, and on sums by `total`.
    size: of its tiles.
    cut: how w is cut, by mesh axes, where these are not explicit; None if it is not.
    w: (..., in, out).
    state: a dict of arrays, of the shape of w or with its leading axes alone; None for none.

    Returns: what `function` returns: None or an array of the shape of w, or with a state a dict like it.
    Raises: ValueError for mesh axes that the mesh does not have."""
    operands = (w,) if state is None else (w, state)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:  # the type tells how it is cut, whatever was declared
        cut = jax.typeof(w).sharding.spec
    if cut is None or mesh.empty or _on_one_device(w):
        return function(*operands)
    axes = mesh_axes("sharding", "a weight", cut, w.ndim)
    used = {axis for over in axes for axis in over}
    if not used:
        return function(*operands)

    def spec_of(x):
        rests = axes if x.shape == w.shape else axes[: w.ndim - 2]
        return PartitionSpec(*(over or None for over in rests))

    specs = jax.tree.map(spec_of, operands)
    if mesh.explicit_axes:
        operands = jax.tree.map(jax.sharding.reshard, operands, specs)
    if not _whole_tiles(size, w.shape, axes, mesh):
        if not mesh.explicit_axes:
            return function(*operands)
        gathered = jax.tree.map(lambda x: jax.sharding.reshard(x, PartitionSpec()), operands)
        found = function(*gathered)
        return None if found is None else jax.tree.map(jax.sharding.reshard, found, specs[-1])

    def local(*operands):
        with _OVER((axes[-2], axes[-1])):
            return function(*operands)

    options = {"in_specs": specs, "out_specs": specs[-1], "axis_names": manual_over(used), "check_vma": False}
    return under_jit(jax.shard_map(local, **options), operands)(*operands)


def _on_one_device(w) -> bool:
    return not isinstance(w, jax.core.Tracer) and len(jnp.asarray(w).sharding.device_set) == 1


def _whole_tiles(size: Size, shape, axes, mesh) -> bool:
    if size is None:
        return False
    for side, n, over in zip(size, shape[-2:], axes[-2:], strict=True):
        for axis in over:
            n, rest = divmod(n, mesh.shape[axis])
            if rest or not side:
                return False
        if over and n % side:
            return False
    return True
