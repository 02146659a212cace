"""2:4 arrays in packed form: `Packed24`, what makes it from an array, and back."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import run
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
    def dtype(self):
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
        """The array it stands for, with +0 where nothing is kept. Differentiable in `values`."""
        return unpack24(self, implementation=implementation)


def packed_types(x, axis: int):
    """Shapes and dtypes of the values and metadata of `x` packed along `axis` (negative)."""
    place = x.ndim + axis
    lead, k = x.shape[:place] + x.shape[place + 1 :], x.shape[place]
    return jax.ShapeDtypeStruct((*lead, k // 2), x.dtype), jax.ShapeDtypeStruct(
        (*lead, -(-k // 8)), jnp.uint8
    )


def pack24(
    x,
    axis: int | tuple[int, int],
    mask=None,
    *,
    checked: bool = False,
    implementation: str | None = None,
):
    """`x` compressed along `axis`: two of every four elements with their positions.

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16, float16, float8_e4m3fn. Without `mask`
    the two of largest |x| are taken, as in `mask24`. mask: bool of x's shape. Of a group that holds more than
    two the two of largest |x| are taken (ties keep the lower index), and one that holds fewer is filled with
    stored zeros: every implementation and layer reads a mask so. checked: raise instead unless the mask holds
    exactly two of every group; it is read on the host, so it cannot be traced. axis: also (-1, -2), for a
    product along either: a Packed24 of each, with a mask from one pass over `x` on CUDA. Returns Packed24 or
    a tuple of them. Differentiable in `x`. Raises like `mask24`; TypeError or ValueError for a mask of
    another dtype or shape, or traced though checked; ValueError for other pairs of axes and for a checked
    mask that is not 2:4."""
    patterns.check_flag("pack24", "checked", checked)
    x = patterns.as_array("pack24", "x", x, float8=True)
    both = isinstance(axis, tuple) and len(axis) == 2
    axis = (patterns.check_both if both else patterns.check_grouped)("pack24", x, axis)
    if mask is not None:
        mask = as_mask("pack24", mask, x)
        if checked:
            for one in axis if both else (axis,):
                _check_two_of_four(mask, one)
    if x.dtype == FLOAT8:
        wide = pack24(x.astype(jnp.bfloat16), axis, mask, implementation=implementation)
        narrow = tuple(
            dataclasses.replace(p, values=p.values.astype(FLOAT8)) for p in (wide if both else (wide,))
        )
        return narrow if both else narrow[0]
    if mask is not None:
        return (
            _pack_masked_both(x, mask, implementation)
            if both
            else _pack_masked(x, mask, axis, implementation)
        )
    return tuple(_pack(x, a, implementation) for a in axis) if both else _pack(x, axis, implementation)


def as_mask(op: str, mask, x) -> jax.Array:
    """`mask` as an array; raises TypeError or ValueError unless it is bool and of x's shape."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"{op}: mask must be bool, got {mask.dtype.name}. Use mask24, or compare: mask != 0.")
    if mask.shape != x.shape:
        raise ValueError(f"{op}: mask has shape {mask.shape}, x has shape {x.shape}; they must be equal.")
    return mask


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


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _pack(x, axis, implementation):
    def kernel(x):
        return Packed24(*native.call("s24_pack", packed_types(x, axis), x, trailing=-1 - axis), axis)

    return run(
        "pack24", x.dtype, implementation, kernel, lambda x: Packed24(*reference.pack24(x, axis), axis), x
    )


def _pack_fwd(x, axis, implementation):
    packed = _pack(x, axis, implementation)
    return packed, packed.metadata


def _pack_bwd(axis, implementation, metadata, ct):
    return (_unpack(ct.values, metadata, axis, implementation),)


_pack.defvjp(_pack_fwd, _pack_bwd)


def in_strides(target: str, *operands, **attributes) -> Packed24:
    """A matrix, the last operand, packed along axis -2 by the kernel `target` as `regroup(x, "strided")` puts
    its rows; on CUDA they are read where they are, which spares a pass."""
    types = packed_types(operands[-1], -2)

    def one_pass(*operands):
        return Packed24(*native.call(f"{target}_strided", types, *operands, **attributes), -2)

    def two_passes(*operands):
        *others, x = operands
        x = regroup(x, "strided")
        return Packed24(*native.call(target, types, *others, x, trailing=1, **attributes), -2)

    return jax.lax.platform_dependent(*operands, cuda=one_pass, default=two_passes)


@partial(jax.jit, static_argnames="implementation", inline=True)
def pack24_strided(x, *, implementation: str | None = None) -> Packed24:
    """`pack24(regroup(x, "strided"), -2)` of a matrix (T, n): every four rows T / 4 apart make a group. Not
    differentiable."""

    def fallback(x):
        return Packed24(*reference.pack24(regroup(x, "strided"), -2), -2)

    return run("pack24", x.dtype, implementation, partial(in_strides, "s24_pack"), fallback, x)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@partial(jax.jit, static_argnums=(2, 3), inline=True)
def _pack_masked(x, mask, axis, implementation):
    kernel, fallback = (partial(f, axis=axis) for f in (_masked_kernel, _masked_reference))
    return run("pack24", x.dtype, implementation, kernel, fallback, x, mask)


def _masked_kernel(x, mask, axis):
    return Packed24(*native.call("s24_pack_masked", packed_types(x, axis), x, mask, trailing=-1 - axis), axis)


def _masked_reference(x, mask, axis):
    return Packed24(*reference.pack24_masked(x, mask, axis), axis)


def _pack_masked_fwd(x, mask, axis, implementation):
    packed = _pack_masked(x, mask, axis, implementation)
    return packed, (packed.metadata, mask)


def _pack_masked_bwd(axis, implementation, residuals, ct):
    metadata, mask = residuals
    dx = _unpack(ct.values, metadata, axis, implementation)
    return jnp.where(mask, dx, jnp.zeros_like(dx)), None


_pack_masked.defvjp(_pack_masked_fwd, _pack_masked_bwd)


def _both_types(x):
    return *packed_types(x, -1), *packed_types(x, -2)


def _of_both(row_values, row_metadata, values, metadata) -> tuple[Packed24, Packed24]:
    return Packed24(row_values, row_metadata, -1), Packed24(values, metadata, -2)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
@partial(jax.jit, static_argnums=(2,), inline=True)
def _pack_masked_both(x, mask, implementation):
    return run("pack24", x.dtype, implementation, _both_kernel, _both_reference, x, mask)


def _both_kernel(x, mask) -> tuple[Packed24, Packed24]:
    return _of_both(*native.call("s24_pack_masked_both", _both_types(x), x, mask))


def _both_reference(x, mask) -> tuple[Packed24, Packed24]:
    return _masked_reference(x, mask, -1), _masked_reference(x, mask, -2)


def _pack_masked_both_fwd(x, mask, implementation):
    packed = _pack_masked_both(x, mask, implementation)
    return packed, ([p.metadata for p in packed], mask)


def _pack_masked_both_bwd(implementation, residuals, cts):
    metadata, mask = residuals
    rows, columns = (
        _pack_masked_bwd(axis, implementation, (nibbles, mask), ct)[0]
        for axis, nibbles, ct in zip((-1, -2), metadata, cts, strict=True)
    )
    return rows + columns, None


_pack_masked_both.defvjp(_pack_masked_both_fwd, _pack_masked_both_bwd)


def unpack24(packed: Packed24, *, implementation: str | None = None) -> jax.Array:
    """The array that `packed` stands for, +0 where nothing is kept. Differentiable in the values."""
    if not isinstance(packed, Packed24):
        raise TypeError(f"todense: needs a Packed24, got {type(packed).__name__}.")
    check_packed("todense", packed)
    if packed.dtype == FLOAT8:
        wide = dataclasses.replace(packed, values=packed.values.astype(jnp.bfloat16))
        return unpack24(wide, implementation=implementation).astype(FLOAT8)
    return _unpack(packed.values, packed.metadata, packed.axis, implementation)


def check_packed(op: str, packed: Packed24) -> None:
    """Raises TypeError (types, dtype) or ValueError if values and metadata do not belong together."""
    for name in ("values", "metadata"):
        part = getattr(packed, name)
        if not hasattr(part, "dtype"):
            kind = type(part).__name__
            raise TypeError(f"{op}: {name} must be an array, got {kind}. Build it with pack24.")
    patterns.check_dtype(op, "values", packed.dtype, float8=True)
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


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@partial(jax.jit, static_argnums=(2, 3), inline=True)
def _unpack(values, metadata, axis, implementation):
    def kernel(values, metadata):
        shape = Packed24(values, metadata, axis).shape
        return native.call(
            "s24_unpack", jax.ShapeDtypeStruct(shape, values.dtype), values, metadata, trailing=-1 - axis
        )

    fallback = partial(reference.unpack24, axis=axis)
    return run("todense", values.dtype, implementation, kernel, fallback, values, metadata)


def _unpack_fwd(values, metadata, axis, implementation):
    return _unpack(values, metadata, axis, implementation), metadata


def _unpack_bwd(axis, implementation, metadata, ct):
    return gather24(ct, metadata, axis, implementation), None


_unpack.defvjp(_unpack_fwd, _unpack_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@partial(jax.jit, static_argnums=(2, 3), inline=True)
def gather24(x, metadata, axis, implementation=None):
    """The values of `x` at the positions of a given packing along `axis` (negative): the transpose of
    `todense`."""

    def kernel(x, metadata):
        return native.call("s24_gather", packed_types(x, axis)[0], x, metadata, trailing=-1 - axis)

    return run(
        "gather24", x.dtype, implementation, kernel, lambda x, m: reference.gather24(x, m, axis), x, metadata
    )


def _gather_fwd(x, metadata, axis, implementation):
    return gather24(x, metadata, axis, implementation), metadata


def _gather_bwd(axis, implementation, metadata, ct):
    return _unpack(ct, metadata, axis, implementation), None


gather24.defvjp(_gather_fwd, _gather_bwd)


def squared_relu24(x, axis: int | tuple[int, int] = -1, *, implementation: str | None = None):
    """`relu(x)**2`, the two largest of every four kept, packed: activation, selection and packing in one pass
    (2503.16672).

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16, float16. The square is taken in float32,
    whose subnormals count as zero, and rounded to x's dtype before the selection, so the result equals
    `pack24(relu(x)**2, axis)`; NaN passes. axis: also (-1, -2), for a product along either: a Packed24 of
    each, from one pass over `x` on CUDA. Returns Packed24 or a tuple of them. Differentiable in `x`:
    `2 relu(x)` at kept positions. Raises like `mask24`; ValueError for other pairs of axes."""
    x = patterns.as_array("squared_relu24", "x", x)
    if not (isinstance(axis, tuple) and len(axis) == 2):
        return _squared_relu24(x, patterns.check_grouped("squared_relu24", x, axis), implementation)
    patterns.check_both("squared_relu24", x, axis)
    return _squared_relu_both(x, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _squared_relu24(x, axis, implementation):
    kernel, fallback = (partial(f, axis=axis) for f in (_squared_relu_kernel, _squared_relu_reference))
    return run("squared_relu24", x.dtype, implementation, kernel, fallback, x)


def _squared_relu_kernel(x, axis):
    return Packed24(*native.call("s24_squared_relu_pack", packed_types(x, axis), x, trailing=-1 - axis), axis)


def _squared_relu_reference(x, axis):
    return Packed24(*reference.squared_relu24(x, axis), axis)


def _squared_relu_fwd(x, axis, implementation):
    packed = _squared_relu24(x, axis, implementation)
    return packed, (packed.metadata, x)


def _squared_relu_bwd(axis, implementation, residuals, ct):
    metadata, x = residuals
    return (_unpack(ct.values, metadata, axis, implementation) * (2 * jnp.maximum(x, 0)),)


_squared_relu24.defvjp(_squared_relu_fwd, _squared_relu_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
@partial(jax.jit, static_argnums=(1,), inline=True)
def _squared_relu_both(x, implementation):
    def kernel(x):
        types = (*packed_types(x, -1), *packed_types(x, -2))
        *rows, values, metadata = native.call("s24_squared_relu_pack_both", types, x)
        return Packed24(*rows, -1), Packed24(values, metadata, -2)

    def fallback(x):
        return _squared_relu_reference(x, -1), _squared_relu_reference(x, -2)

    return run("squared_relu24", x.dtype, implementation, kernel, fallback, x)


def _squared_relu_both_fwd(x, implementation):
    packed = _squared_relu_both(x, implementation)
    return packed, ([p.metadata for p in packed], x)


def _squared_relu_both_bwd(implementation, residuals, cts):
    metadata, x = residuals
    rows, columns = (
        _unpack(ct.values, nibbles, axis, implementation)
        for ct, nibbles, axis in zip(cts, metadata, (-1, -2), strict=True)
    )
    return ((rows + columns) * (2 * jnp.maximum(x, 0)),)


_squared_relu_both.defvjp(_squared_relu_both_fwd, _squared_relu_both_bwd)
