"""The sparsity patterns: how each divides an array into groups, and the errors where an array does not fit.

`2:4`          two of every four consecutive elements along one axis are kept.
`n:m`          n of every m consecutive elements are kept; there are only masks, because no hardware packs any
               other than 2:4.
`transposable` every 4x4 tile of a matrix keeps two per row and two per column, so that the matrix is 2:4
               along both axes (2102.08124; exact search over the 90 possible tiles as in 2404.01847,
               section 5).
`V:N:M`        the last two axes are divided into blocks of V x M: of every M columns four stay, the same ones
               in all V rows, and of these four every row keeps N = 2 (2310.02065)."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 4
KEPT = 2
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
# Only a few operations support it. Every number of it is a number of bfloat16, too.
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
# The pairs of columns that a row may keep, in the order in which ties are broken; TILES has that order, too.
PAIRS = tuple((i, j) for i in range(GROUP) for j in range(i + 1, GROUP))


def _valid_tiles():
    tiles = []
    for code in np.ndindex(*(len(PAIRS),) * GROUP):
        columns = [column for p in code for column in PAIRS[p]]
        if all(columns.count(c) == KEPT for c in range(GROUP)):
            tiles.append(code)
    return tuple(tiles)


TILES = _valid_tiles()  # 90 tuples: index into PAIRS for row 0, ..., row 3


def as_array(op: str, name: str, x: Any, also: tuple = ()) -> jax.Array:
    """An argument as a JAX array.

    op, name: the operation and the argument, for messages.
    x: an array, a nested list of numbers or a number.
    also: the dtypes that the operation has beside `FLOATS` and float64.

    Returns: an array of one of these dtypes.
    Raises: TypeError if x is no array, or not of a supported dtype."""
    if not isinstance(x, (list, tuple, float, int)):
        check_array(op, name, x)
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} must be an array of numbers: {error}") from error
    check_dtype(op, name, x.dtype, also)
    return x


def as_mask(op: str, mask: Any, x: jax.Array) -> jax.Array:
    """An argument as a mask of x.

    op: the operation, for messages.
    mask: bool, x's shape.
    x: the array that is masked.

    Returns: bool, x's shape.
    Raises: TypeError or ValueError for another dtype or shape."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"{op}: mask must be bool, got {mask.dtype.name}. Use mask24, or compare: mask != 0.")
    if mask.shape != x.shape:
        raise ValueError(f"{op}: mask has shape {mask.shape}, x has shape {x.shape}; they must be equal.")
    return mask


def check_array(op: str, name: str, x: Any) -> None:
    """Raises TypeError for what is no array, such as a list.

    op, name: the operation and its argument, for the message.
    x: from a caller."""
    converts = hasattr(x, "__jax_array__") or (hasattr(x, "__array__") and hasattr(x, "dtype"))
    if not converts or hasattr(x, "todense"):
        fix = ""
        if hasattr(x, "todense"):
            fix = "; call todense()"
        elif isinstance(x, list | tuple | float | int):
            fix = "; make one by jnp.asarray"
        raise TypeError(f"{op}: {name} must be an array, got {type(x).__name__}{fix}.")


def check_input(op: str, x: Any) -> None:
    """Raises TypeError or ValueError unless the input of a layer is an array with an axis of features.

    op: the layer, for the message.
    x: from a caller."""
    check_array(op, "x", x)
    if not x.shape:
        raise ValueError(f"{op}: x must be an array (..., features), got a number, of shape ().")


def check_dtype(op: str, name: str, dtype: jax.typing.DTypeLike, also: tuple = ()) -> None:
    """Raises TypeError for a dtype other than `FLOATS`, those of `also`, and float64.

    op, name: the operation and its argument, for the message.
    dtype: of the argument.
    also: further dtypes that the operation takes."""
    if dtype not in (*FLOATS, *also, jnp.float64):
        raise TypeError(
            f"{op}: {name} has dtype {getattr(dtype, 'name', dtype)}; supported are {_supported(also)}. "
            "Cast it first."
        )


def _supported(also: tuple) -> str:
    names = ", ".join(jnp.dtype(d).name for d in (*FLOATS, *also))
    return f"{names} (and float64 with jax_enable_x64, by the reference implementation)"


def as_dtype(op: str, dtype: Any, also: tuple = ()) -> jnp.dtype:
    """An argument as the dtype of products.

    op: the operation, for the message.
    dtype: of a caller, such as "bfloat16" or `jnp.bfloat16`.
    also: as in `check_dtype`.

    Returns: a dtype.
    Raises: TypeError for what is no dtype, or not one of those of `check_dtype`."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (*FLOATS, *also, jnp.float64):
        raise TypeError(f"{op}: dtype={dtype!r} is none of the supported ones, {_supported(also)}.")
    return found


def key_of(words: Any) -> jax.Array:
    """The PRNG key of two words, whatever kind of key `jax_default_prng_impl` says.

    words: uint32 (..., 2).

    Returns: typed keys (...)."""
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def check_flag(op: str, name: str, value: Any) -> None:
    """Raises TypeError unless an option is True or False; any other word would count as true.

    op, name: the operation and its option, for the message.
    value: of the option."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}.")


def check_size(op: str, name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless an option is a whole number of at least 1.

    op, name: the operation and its option, for the message.
    value: of the option."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}.")
    if value < 1:
        raise ValueError(f"{op}: {name}={value} must be at least 1.")


def check_block(op: str, name: str, shape: Any, multiple: int = 1) -> None:
    """Raises ValueError unless the shape of a feed-forward block is three positive whole numbers.

    op, name: the operation and its argument, for the message.
    shape: from a caller, to be (T, d, f).
    multiple: what divides each of them."""
    sizes = np.asarray(shape).tolist() if hasattr(shape, "dtype") else shape
    sizes = list(sizes) if isinstance(sizes, Sequence) else []
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in sizes)
    if len(sizes) != 3 or not whole or any(n % multiple for n in sizes):
        kind = "ints" if multiple == 1 else f"multiples of {multiple}"
        raise ValueError(
            f"{op}: {name}={shape!r} must be (T, d, f), three positive {kind}: tokens, model width and FFN "
            "width."
        )


def as_list(op: str, name: str, values: Any, kind: str) -> list:
    """An argument as a list.

    op, name: the operation and its argument, for the message.
    values: from a caller.
    kind: what it holds, such as "names of dtypes", for the message.

    Returns: a list.
    Raises: TypeError for a string, whose letters are not meant, and for what cannot be iterated over."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{op}: {name}={values!r} must be a list of {kind}, even of a single one.")
    return list(values)


def check_number(op: str, name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless an option is a number that is 0 or positive.

    op, name: the operation and its option, for the message.
    value: of the option."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}.")
    if not value >= 0:
        raise ValueError(f"{op}: {name}={value} must be 0 or positive.")


def negative_axis(op: str, shape: tuple[int, ...], axis: int) -> int:
    """The axis counted from the end, so that leading batch dimensions do not move it.

    op: the operation, for messages.
    shape: of the array.
    axis: counted from the front or from the end.

    Returns: a negative int.
    Raises: TypeError for an axis that is no int, ValueError for one that the array does not have."""
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
    """Raises ValueError unless the size of an array along an axis is a multiple of a number.

    op, what: the operation and the array, for the message.
    shape: of the array.
    axis: that must divide into groups.
    multiple: the size of a group."""
    if shape[axis] % multiple:
        size = shape[axis]
        below, above = size - size % multiple, size - size % multiple + multiple
        raise ValueError(
            f"{op}: the {what} of shape {shape} has size {size} along axis {axis}, which is not a multiple "
            f"of {multiple}. Groups never wrap or pad: use {f'{below} or ' if below else ''}{above}."
        )


def check_grouped(op: str, x: jax.Array, axis: int) -> int:
    """Checks that an array divides into groups of four along an axis.

    op: the operation, for messages.
    x: the array, any shape.
    axis: along which groups lie.

    Returns: the axis, counted from the end.
    Raises: as `negative_axis` and `check_divides`."""
    axis = negative_axis(op, x.shape, axis)
    check_divides(op, x.shape, axis)
    return axis


def check_both(op: str, x: jax.Array, axis: tuple) -> tuple[int, int]:
    """Checks an `axis` that names both of the last two axes of an array.

    op: the operation, for messages.
    x: the array, (..., rows, columns).
    axis: a pair of ints, (-1, -2) or the same counted from the front.

    Returns: (-1, -2).
    Raises: as `check_grouped`, and ValueError for other axes."""
    axes = tuple(check_grouped(op, x, a) for a in axis)
    if axes != (-1, -2):
        raise ValueError(f"{op}: axis must be one axis or (-1, -2), got {axis} of shape {x.shape}.")
    return axes


def check_matrix(op: str, x: jax.Array) -> None:
    """Raises ValueError unless the last two axes of an array divide into tiles of 4x4.

    op: the operation, for the message.
    x: the array, (..., rows, columns)."""
    if x.ndim < 2:
        raise ValueError(f"{op}: needs a matrix (..., rows, columns), got shape {x.shape}.")
    check_divides(op, x.shape, -2)
    check_divides(op, x.shape, -1)


def check_nm(op: str, n: int, m: int) -> None:
    """Raises TypeError or ValueError unless n of every m elements can be kept.

    op: the operation, for the message.
    n, m: how many of how many elements are kept."""
    for name, value in (("n", n), ("m", m)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{op}: {name} must be an int, got {value!r}.")
    if not 1 <= n <= m:
        raise ValueError(f"{op}: n={n} of every m={m} cannot be kept; use 1 <= n <= m.")


BLOCK_ROWS = (16, 32, 64, 128, 256)  # V: matrix units take rows by 16
SEARCHED = 16  # largest M of the exhaustive search


@dataclasses.dataclass(frozen=True)
class VNM:
    """The pattern V:N:M: `v` rows share 4 of every `m` columns, and each row keeps `n` of the four.

    v: 16, 32, 64, 128 or 256.
    m: 4 to 32.
    n: 2.

    Raises: TypeError or ValueError for anything else.
    Source: 2310.02065."""

    v: int
    m: int
    n: int = 2

    def __post_init__(self):
        for name, rule in (
            ("v", f"one of {', '.join(map(str, BLOCK_ROWS))}: matrix units multiply 16 rows at a time"),
            ("m", "from 4 to 32"),
            ("n", "2: sparse hardware keeps two of the four columns"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"VNM: {name} must be an int, got {value!r}.")
            allowed = {"v": BLOCK_ROWS, "m": range(4, 33), "n": (2,)}[name]
            if value not in allowed:
                raise ValueError(f"VNM: {name}={value} is not supported; {name} must be {rule}.")

    def __str__(self):
        return f"{self.v}:{self.n}:{self.m}"

    def check(
        self,
        op: str,
        shape: tuple[int, ...],
        axis: int,
        what: str = "array",
        along: tuple[str, str] = ("rows", "columns"),
    ) -> int:
        """Checks that blocks with their M columns along `axis` fit an array.

        op, what: the operation and the array, for messages.
        shape: of the array, two axes at least.
        axis: one of the last two.
        along: names of what lies along the last two axes, for messages.

        Returns: the axis, counted from the end.
        Raises: TypeError (axis type), ValueError (axis, sizes)."""
        if len(shape) < 2:
            raise ValueError(f"{op}: {self} blocks need a matrix (..., rows, columns), got shape {shape}.")
        axis = negative_axis(op, shape, axis)
        if axis < -2:
            raise ValueError(f"{op}: axis must be one of the last two, got axis {axis} of shape {shape}.")
        rows = shape[-3 - axis]
        if 0 < rows < self.v:
            fitting = [v for v in BLOCK_ROWS if rows % v == 0]
            fix = f"use v={max(fitting)} or" if fitting else "use"
            them = along[-1 - axis]
            raise ValueError(
                f"{op}: the {what} of shape {shape} has {rows} {them} along axis {-3 - axis}, fewer than "
                f"v={self.v}: {fix} more {them}."
            )
        check_divides(op, shape, -3 - axis, self.v, what)
        check_divides(op, shape, axis, self.m, what)
        return axis

    def check_search(self, op: str) -> None:
        """Raises ValueError unless M is small enough for an exhaustive search of columns.

        op: the operation, for the message."""
        if self.m > SEARCHED:
            sets = math.comb(self.m, GROUP)
            raise ValueError(
                f"{op}: exact=True compares all sets of four columns, for m={self.m} {sets} in every block; "
                f"it is limited to m={SEARCHED}. Use exact=False."
            )
