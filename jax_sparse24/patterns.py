"""What each sparsity pattern divides an array into, and the errors raised where it does not fit.

`2:4`          two of every four consecutive elements along one axis are kept.
`transposable` every 4x4 tile of a matrix keeps two per row and two per column, so that the matrix is 2:4
               along both axes (2102.08124; exact search over the 90 possible tiles as in 2404.01847,
               section 5).
"""

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 4
KEPT = 2
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
# Row patterns of a tile and the valid tiles, both in the order in which ties are broken.
PAIRS = tuple((i, j) for i in range(GROUP) for j in range(i + 1, GROUP))


def _valid_tiles():
    tiles = []
    for code in np.ndindex(*(len(PAIRS),) * GROUP):
        columns = [column for p in code for column in PAIRS[p]]
        if all(columns.count(c) == KEPT for c in range(GROUP)):
            tiles.append(code)
    return tuple(tiles)


TILES = _valid_tiles()  # 90 tuples (pair of row 0, ..., pair of row 3)


def as_array(op: str, name: str, x) -> jax.Array:
    """`x` as a JAX array; raises TypeError if it is not one or not of a supported floating dtype."""
    if not isinstance(x, (list, tuple, float, int)) and not _converts(x):
        raise TypeError(f"{op}: {name} must be an array, got {type(x).__name__}.")
    x = jnp.asarray(x)
    check_dtype(op, name, x.dtype)
    return x


def _converts(x) -> bool:
    return hasattr(x, "dtype") and (hasattr(x, "__array__") or hasattr(x, "__jax_array__"))


def check_dtype(op: str, name: str, dtype) -> None:
    if dtype not in FLOATS and dtype != jnp.float64:
        supported = ", ".join(jnp.dtype(d).name for d in FLOATS)
        raise TypeError(
            f"{op}: {name} has dtype {getattr(dtype, 'name', dtype)}; supported are {supported} "
            f"(and float64 with jax_enable_x64, by the reference implementation). Cast it first."
        )


def negative_axis(op: str, shape: tuple[int, ...], axis: int) -> int:
    """The axis counted from the end, so that leading batch dimensions do not move it."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"{op}: axis must be an int, got {axis!r}.")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{op}: axis {axis} does not exist in shape {shape}; it must be in [{-len(shape)}, {len(shape)})."
        )
    return int(axis) - len(shape) if axis >= 0 else int(axis)


def check_divides(
    op: str, shape: tuple[int, ...], axis: int, multiple: int = GROUP, what: str = "array"
) -> None:
    if shape[axis] % multiple:
        size = shape[axis]
        raise ValueError(
            f"{op}: the {what} of shape {shape} has size {size} along axis {axis}, which is not a multiple "
            f"of {multiple}. Groups never wrap or pad: use {size - size % multiple} or "
            f"{size - size % multiple + multiple}."
        )


def check_grouped(op: str, x: jax.Array, axis: int) -> int:
    """Checks that 2:4 groups fit `x` along `axis`; returns the axis counted from the end."""
    axis = negative_axis(op, x.shape, axis)
    check_divides(op, x.shape, axis)
    return axis


def check_matrix(op: str, x: jax.Array) -> None:
    """Checks that 4x4 tiles fit the last two axes."""
    if x.ndim < 2:
        raise ValueError(f"{op}: needs a matrix (..., rows, columns), got shape {x.shape}.")
    check_divides(op, x.shape, -2)
    check_divides(op, x.shape, -1)
