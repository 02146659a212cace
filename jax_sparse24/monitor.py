"""Quantities that tell whether sparse training is healthy."""

from typing import Any

import jax
import jax.numpy as jnp


def flip_rate(old: Any, new: Any) -> jax.Array:
    """Share of mask entries that differ between two trees of masks, over all leaves.

    Give it freshly computed masks (`method.fresh_mask(w)`) of two steps, not the stored ones.

    old, new: trees of bool arrays, of equal structure and shapes.

    Returns: float32 scalar in [0, 1]; 0 for masks without entries.
    Raises: ValueError if the trees, shapes or dtypes do not match.
    Source: 2409.09099, `|m_t xor m_{t-1}| / D`."""
    old_leaves, new_leaves = jax.tree.leaves(old), jax.tree.leaves(new)
    if jax.tree.structure(old) != jax.tree.structure(new) or not old_leaves:
        raise ValueError("flip_rate: needs two non-empty trees of masks with the same structure.")
    for a, b in zip(old_leaves, new_leaves, strict=True):
        if not (hasattr(a, "dtype") and hasattr(b, "dtype")):
            kinds = f"{type(a).__name__} and {type(b).__name__}"
            raise ValueError(f"flip_rate: masks must be arrays, got {kinds}.")
        if a.shape != b.shape or a.dtype != jnp.bool_ or b.dtype != jnp.bool_:
            raise ValueError(
                f"flip_rate: masks must be bool of equal shape, got {a.dtype} {a.shape} "
                f"and {b.dtype} {b.shape}."
            )
    flips = sum(_count(a ^ b) for a, b in zip(old_leaves, new_leaves, strict=True))
    return flips / max(sum(a.size for a in old_leaves), 1)


def _count(x) -> jax.Array:
    """How many are True, a float32 scalar; exact for each matrix, so that its shards do not change it."""
    return jnp.sum(jnp.sum(x, axis=tuple(range(-min(x.ndim, 2), 0)), dtype=jnp.int32), dtype=jnp.float32)


def density(x: jax.typing.ArrayLike) -> jax.Array:
    """Share of elements that are not zero; NaN counts as not zero.

    x: an array of any shape and dtype.

    Returns: float32 scalar in [0, 1]; 0 for an array without elements."""
    x = jnp.asarray(x)
    return jnp.mean(x != 0, dtype=jnp.float32) if x.size else jnp.zeros((), jnp.float32)


def kept_share(w: Any, mask: Any) -> jax.Array:
    """Share of magnitude that masks keep: `sum |w| mask / sum |w|`, over all leaves.

    w: a tree of weights.
    mask: a tree of bool arrays of the same structure and shapes.

    Returns: float32 scalar in [0, 1]; 1 if all weights are zero.
    Raises: ValueError if the trees or shapes differ, or a mask is not bool."""
    if jax.tree.structure(w) != jax.tree.structure(mask):
        raise ValueError("kept_share: needs trees of weights and of masks with the same structure.")
    for a, m in zip(jax.tree.leaves(w), jax.tree.leaves(mask), strict=True):
        if jnp.shape(a) != jnp.shape(m) or jnp.result_type(m) != jnp.bool_:
            raise ValueError(
                f"kept_share: a mask must be bool of its weight's shape {jnp.shape(a)}, got "
                f"{jnp.result_type(m)} {jnp.shape(m)}."
            )
    leaves = list(zip(jax.tree.leaves(w), jax.tree.leaves(mask), strict=True))
    total = sum(jnp.sum(jnp.abs(a), dtype=jnp.float32) for a, _ in leaves)
    kept = sum(jnp.sum(jnp.where(m, jnp.abs(a), 0), dtype=jnp.float32) for a, m in leaves)
    return jnp.where(total == 0, 1.0, kept / jnp.where(total == 0, 1.0, total))
