"""2:4 arrays in packed form: `Packed24`, what makes it from an array, and back."""

import dataclasses
from functools import partial
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24 import patterns
from jax_sparse24.dispatch import hardware
from jax_sparse24.dispatch.operation import Kernel, Operation, Reverse, trailing
from jax_sparse24.ops.order import regroup
from jax_sparse24.ops.reference import packed24 as reference
from jax_sparse24.patterns import FLOAT8


class PackedArray:
    """Base of the classes that stand for an array without being one.

    A conversion to NumPy is refused: it would wrap the object, or unpack it where nobody asked to spend the
    memory that it saves."""

    def __array__(self, *_, **__):
        name = type(self).__name__
        raise TypeError(f"{name}: it stands for an array and is none; call todense() to unpack it.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed24(PackedArray):
    """A 2:4-sparse array, compressed along one axis.

    The compressed axis is stored last, whatever its place in the array it stands for: matrix products read it
    as the contraction axis, and `.T` moves no data. With `lead` the array's dimensions without that axis, and
    `K` its size:

    values:    `lead + (K / 2,)`, the kept elements, in order; float32, bfloat16, float16, float8_e4m3fn
               (float64 by the reference).
    metadata:  `lead + (ceil(K / 8),)` uint8; byte `b` holds the nibbles of groups `2b` (low) and `2b + 1`
               (high). A nibble is `i0 | i1 << 2`, the two kept positions `i0 < i1` of a group of four, as in
               `mma.sp`; a missing last group is 4.
    axis:      the compressed axis, counted from the end (static), so leading batch dimensions may come and
               go under `vmap`.
    """

    values: jax.Array
    metadata: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})

    @staticmethod
    def types(
        x: jax.Array | jax.ShapeDtypeStruct, axis: int
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the values and metadata of a packed array.

        x: the array, or its shape and dtype.
        axis: the compressed axis, counted from the end.

        Returns: both, as `jax.ShapeDtypeStruct`."""
        place = x.ndim + axis
        lead, k = x.shape[:place] + x.shape[place + 1 :], x.shape[place]
        metadata = jax.ShapeDtypeStruct((*lead, -(-k // 8)), jnp.uint8)
        return jax.ShapeDtypeStruct((*lead, k // 2), x.dtype), metadata

    @property
    def K(self) -> int:
        """Uncompressed size of the compressed axis."""
        return 2 * self.values.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        lead = self.values.shape[:-1]
        place = len(lead) + 1 + self.axis
        return (*lead[:place], self.K, *lead[place:])

    @property
    def pattern(self) -> str:
        return "2:4"

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and metadata: 9/16 of a 16-bit array, 17/32 of a float32 one."""
        return self.values.nbytes + self.metadata.nbytes

    @property
    def T(self) -> "Packed24":
        """The transpose of the last two axes; no data moves."""
        if self.ndim < 2 or self.axis not in (-1, -2):
            raise ValueError(
                f"Packed24.T: the compressed axis must be one of the last two, got axis {self.axis} "
                f"of shape {self.shape}."
            )
        return Packed24(self.values, self.metadata, -3 - self.axis)

    def todense(self, *, implementation: str | None = None) -> jax.Array:
        """The array it stands for, with +0 where nothing is kept. Differentiable in `values`.

        implementation: as in `mask24`.

        Returns: an array of `shape` and `dtype`."""
        check_packed("todense", self)
        if self.dtype == FLOAT8:
            wide = dataclasses.replace(self, values=self.values.astype(jnp.bfloat16))
            return wide.todense(implementation=implementation).astype(FLOAT8)
        return UNPACK24(self.values, self.metadata, axis=self.axis, implementation=implementation)


@overload
def pack24(
    x: jax.typing.ArrayLike,
    axis: int,
    mask: jax.typing.ArrayLike | None = None,
    *,
    checked: bool = False,
    implementation: str | None = None,
) -> Packed24: ...


@overload
def pack24(
    x: jax.typing.ArrayLike,
    axis: tuple[int, int],
    mask: jax.typing.ArrayLike | None = None,
    *,
    checked: bool = False,
    implementation: str | None = None,
) -> tuple[Packed24, Packed24]: ...


def pack24(x, axis, mask=None, *, checked=False, implementation=None):
    """`x` compressed along an axis: two of every four elements with their positions.

    Without a mask the two of largest |x| are taken, as in `mask24`. Of a group in which a mask holds more
    than two, the two of largest |x| are taken (ties keep the lower index), and a group in which it holds
    fewer is filled with stored zeros: every implementation and layer reads a mask so. Differentiable in `x`.

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16, float16 or float8_e4m3fn.
    axis: along which elements are grouped; (-1, -2) for a product along either, with a mask from one pass
        over `x` on CUDA.
    mask: bool, x's shape, or None.
    checked: raise unless the mask holds exactly two of every group. It is read on the host, so it cannot be
        traced.
    implementation: as in `mask24`.

    Returns: a Packed24, or of two axes a tuple of them.
    Raises: as `mask24`; TypeError or ValueError for a mask of another dtype or shape, or traced though
        checked; ValueError for other pairs of axes and for a checked mask that is not 2:4.
    Source: 2104.08378, whose compressed format has these values and positions."""
    patterns.check_flag("pack24", "checked", checked)
    x = patterns.as_array("pack24", "x", x, also=(FLOAT8,))
    both = isinstance(axis, tuple) and len(axis) == 2
    axis = (patterns.check_both if both else patterns.check_grouped)("pack24", x, axis)
    if mask is not None:
        mask = patterns.as_mask("pack24", mask, x)
        if checked:
            for one in axis if both else (axis,):
                _check_two_of_four(mask, one)
    if x.dtype == FLOAT8:
        wide = pack24(x.astype(jnp.bfloat16), axis, mask, implementation=implementation)
        narrow = tuple(
            dataclasses.replace(p, values=p.values.astype(FLOAT8)) for p in (wide if both else (wide,))
        )
        return narrow if both else narrow[0]
    run = {"implementation": implementation}
    if both and mask is not None:
        return along_both(PACK24_MASKED_BOTH(x, mask, **run))
    if both:
        return tuple(Packed24(*PACK24(x, axis=a, **run), a) for a in axis)
    if mask is not None:
        return Packed24(*PACK24_MASKED(x, mask, axis=axis, **run), axis)
    return Packed24(*PACK24(x, axis=axis, **run), axis)


def _check_two_of_four(mask, axis: int) -> None:
    """Raises ValueError for the first group, in the order of memory, that does not hold exactly two."""
    if isinstance(mask, jax.core.Tracer):
        raise TypeError(
            "pack24: checked=True reads the mask, which has no value while a function is traced. Check it "
            "before jit, and call pack24 without checked inside."
        )
    mask = np.asarray(mask)
    place = mask.ndim + axis
    groups = mask.reshape(*mask.shape[:place], -1, patterns.GROUP, *mask.shape[place + 1 :])
    counts = groups.sum(place + 1)
    wrong = np.argwhere(counts != patterns.KEPT)
    if len(wrong):
        first = tuple(map(int, wrong[0]))
        start = patterns.GROUP * first[place]
        where = [*map(str, first[:place]), f"{start}:{start + patterns.GROUP}", *map(str, first[place + 1 :])]
        raise ValueError(
            f"pack24: the mask of shape {mask.shape} is not 2:4 along axis {axis}: mask[{', '.join(where)}] "
            f"holds {int(counts[first])} of four; of all groups {len(wrong)} do not hold two. "
            f"Make it anew with mask24 or transposable_mask24; unchecked, the two of largest |x| are taken."
        )


def along_both(parts) -> tuple[Packed24, Packed24]:
    """An array packed along axis -1 and along axis -2.

    parts: values and metadata along axis -1, and those along axis -2.

    Returns: a Packed24 along each axis."""
    row_values, row_metadata, values, metadata = parts
    return Packed24(row_values, row_metadata, -1), Packed24(values, metadata, -2)


def both_types(x, *_, **__):
    """The types of the parts that `along_both` takes.

    x: the array, or its shape and dtype.

    Returns: shape and dtype of each part."""
    return *Packed24.types(x, -1), *Packed24.types(x, -2)


def _unpacked(cotangents, metadata, axis, implementation):
    """The gradient of an array from that of its packed values."""
    return UNPACK24(cotangents[0], metadata, axis=axis, implementation=implementation)


def _pack_backward(metadata, cotangents, *, axis, implementation):
    return (_unpacked(cotangents, metadata, axis, implementation),)


PACK24 = Operation(
    "pack24",
    reference.pack24,
    kernel=Kernel("s24_pack", Packed24.types, trailing),
    vjp=Reverse(lambda operands, results, **_: results[1], _pack_backward),
)


def pack24_strided(x_Tn: jax.Array, *, implementation: str | None = None) -> Packed24:
    """`pack24(regroup(x_Tn, "strided"), -2)`: four rows that lie T / 4 apart make a group.

    It is not differentiable.

    x_Tn: (T, n), T a multiple of 4; dtypes as in `pack24`, but float8_e4m3fn.
    implementation: as in `mask24`.

    Returns: a Packed24 along axis -2."""
    return Packed24(*PACK24_STRIDED(x_Tn, implementation=implementation), -2)


# On CUDA rows are read where they are, which spares the pass that moves them.
PACK24_STRIDED = Operation(
    "pack24",
    reference=lambda x_Tn: reference.pack24(regroup(x_Tn, "strided"), -2),
    kernel=lambda x_Tn: PACK24.kernel(regroup(x_Tn, "strided"), axis=-2),
    cuda=Kernel("s24_pack_strided", partial(Packed24.types, axis=-2)),
)


def _masked_types(x, mask, axis):
    return Packed24.types(x, axis)


def _masked_backward(saved, cotangents, *, axis, implementation):
    metadata, mask = saved
    dx = _unpacked(cotangents, metadata, axis, implementation)
    return jnp.where(mask, dx, jnp.zeros_like(dx)), None


PACK24_MASKED = Operation(
    "pack24",
    reference.pack24_masked,
    kernel=Kernel("s24_pack_masked", _masked_types, trailing),
    vjp=Reverse(lambda operands, results, **_: (results[1], operands[1]), _masked_backward),
)


def _masked_both_reference(x, mask):
    return *reference.pack24_masked(x, mask, -1), *reference.pack24_masked(x, mask, -2)


def masked_both_backward(saved, cotangents, *, implementation):
    """The backward pass of packing an array along both axes by a mask.

    saved: the metadata along either axis, and the mask.
    cotangents: of values and metadata along axis -1, and along axis -2.
    implementation: as in `mask24`.

    Returns: the gradient of the array, and None for the mask."""
    *metadata, mask = saved
    rows, columns = (
        _masked_backward((nibbles, mask), ct, axis=axis, implementation=implementation)[0]
        for axis, nibbles, ct in zip((-1, -2), metadata, (cotangents[:2], cotangents[2:]), strict=True)
    )
    return rows + columns, None


PACK24_MASKED_BOTH = Operation(
    "pack24",
    _masked_both_reference,
    kernel=Kernel("s24_pack_masked_both", both_types),
    vjp=Reverse(lambda operands, results, **_: (results[1], results[3], operands[1]), masked_both_backward),
)


def both_ways_faster(dtype) -> bool:
    """Whether packing along both axes by a mask in one pass was measured here to be faster than in two.

    dtype: of the array."""
    return hardware.faster("pack24_masked_both", dtype)


def check_packed(op: str, packed: Packed24) -> None:
    """Raises TypeError (types, dtype) or ValueError if values and metadata do not belong together.

    op: the operation, for messages.
    packed: from a caller."""
    for name in ("values", "metadata"):
        part = getattr(packed, name)
        if not hasattr(part, "dtype"):
            kind = type(part).__name__
            raise TypeError(f"{op}: {name} must be an array, got {kind}. Build it with pack24.")
    patterns.check_dtype(op, "values", packed.dtype, also=(FLOAT8,))
    if not isinstance(packed.axis, int) or not -packed.ndim <= packed.axis < 0:
        raise ValueError(
            f"{op}: axis={packed.axis!r} of a Packed24 must be counted from the end of its {packed.ndim} "
            f"dimensions, -1 for the last. Build it with pack24."
        )
    *lead, half = packed.values.shape
    if half % 2 or packed.metadata.shape != (*lead, -(-half // 4)) or packed.metadata.dtype != jnp.uint8:
        raise ValueError(
            f"{op}: values {packed.values.shape} and metadata {packed.metadata.shape} "
            f"{packed.metadata.dtype} do not belong together; values end in K/2 with K a multiple "
            f"of 4, metadata in ceil(K/8) uint8. Build them with pack24."
        )


def _unpacked_type(values, metadata, axis):
    return jax.ShapeDtypeStruct(Packed24(values, metadata, axis).shape, values.dtype)


def _unpack_backward(metadata, cotangent, *, axis, implementation):
    return GATHER24(cotangent, metadata, axis=axis, implementation=implementation), None


UNPACK24 = Operation(
    "todense",
    reference.unpack24,
    kernel=Kernel("s24_unpack", _unpacked_type, trailing),
    vjp=Reverse(lambda operands, results, **_: operands[1], _unpack_backward),
)


def gather24(x, metadata, axis: int, implementation: str | None = None) -> jax.Array:
    """The values of an array at the positions of a packed one: the transpose of `todense`.

    Differentiable in `x`.

    x: any shape; float32, bfloat16 or float16.
    metadata: of a Packed24 of x's shape along `axis`, uint8.
    axis: the compressed axis, counted from the end.
    implementation: as in `mask24`.

    Returns: the values, of x's dtype."""
    return GATHER24(x, metadata, axis=axis, implementation=implementation)


def _gather_backward(metadata, cotangent, *, axis, implementation):
    return UNPACK24(cotangent, metadata, axis=axis, implementation=implementation), None


GATHER24 = Operation(
    "gather24",
    reference.gather24,
    kernel=Kernel("s24_gather", lambda x, metadata, axis: Packed24.types(x, axis)[0], trailing),
    vjp=Reverse(lambda operands, results, **_: operands[1], _gather_backward),
)


def squared_relu24(
    x: jax.typing.ArrayLike, axis: int | tuple[int, int] = -1, *, implementation: str | None = None
) -> Packed24:
    """`relu(x)**2`, the two largest of every four kept, packed.

    Activation, selection and packing are one pass. The square is taken in float32, whose subnormals count as
    zero, and rounded to x's dtype before the selection, so the result equals `pack24(relu(x)**2, axis)`; NaN
    passes. Differentiable in `x`: `2 relu(x)` at kept positions.

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16 or float16.
    axis: along which elements are grouped; (-1, -2) for a product along either, from one pass over `x` on
        CUDA.
    implementation: as in `mask24`.

    Returns: a Packed24, or of two axes a tuple of them.
    Raises: as `mask24`; ValueError for other pairs of axes.
    Source: 2503.16672."""
    x = patterns.as_array("squared_relu24", "x", x)
    if not (isinstance(axis, tuple) and len(axis) == 2):
        axis = patterns.check_grouped("squared_relu24", x, axis)
        return Packed24(*SQUARED_RELU24(x, axis=axis, implementation=implementation), axis)
    patterns.check_both("squared_relu24", x, axis)
    return along_both(SQUARED_RELU24_BOTH(x, implementation=implementation))


def _squared_relu_backward(saved, cotangents, *, axis, implementation):
    metadata, x = saved
    return (_unpacked(cotangents, metadata, axis, implementation) * (2 * jnp.maximum(x, 0)),)


SQUARED_RELU24 = Operation(
    "squared_relu24",
    reference.squared_relu24,
    kernel=Kernel("s24_squared_relu_pack", Packed24.types, trailing),
    vjp=Reverse(lambda operands, results, **_: (results[1], operands[0]), _squared_relu_backward),
)


def _squared_relu_both_backward(saved, cotangents, *, implementation):
    *metadata, x = saved
    rows, columns = (
        _unpacked(ct, nibbles, axis, implementation)
        for ct, nibbles, axis in zip((cotangents[:2], cotangents[2:]), metadata, (-1, -2), strict=True)
    )
    return ((rows + columns) * (2 * jnp.maximum(x, 0)),)


SQUARED_RELU24_BOTH = Operation(
    "squared_relu24",
    reference=lambda x: (*reference.squared_relu24(x, -1), *reference.squared_relu24(x, -2)),
    kernel=Kernel("s24_squared_relu_pack_both", both_types),
    vjp=Reverse(
        lambda operands, results, **_: (results[1], results[3], operands[0]), _squared_relu_both_backward
    ),
)
