"""Matrices in the form that cuSPARSELt multiplies, `Compressed24`: for the engines, where it multiplies on
CUDA and nothing is differentiated."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import cusparselt
from jax_sparse24.dispatch.operation import Kernel
from jax_sparse24.ops.mvue import MVUE_PACK24, MVUE_PACK24_STRIDED, key_words
from jax_sparse24.ops.packed24 import (
    PACK24,
    PACK24_MASKED,
    PACK24_STRIDED,
    SQUARED_RELU24,
    UNPACK24,
    Packed24,
    PackedArray,
)
from jax_sparse24.patterns import FLOAT8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressed24(PackedArray):
    """A 2:4-sparse matrix of 16-bit floats as cuSPARSELt reads it on sm_90. Internal: what a kernel packs for
    one of its products is written here at once.

    compressed: (R + 8 ceil(R / 64), K / 2), R rows of values as in Packed24 and then their metadata in the
                library's order, K a multiple of 32. No two bytes of that look like an Inf or a NaN.
    metadata:   (R, K / 8) uint8 and
    axis:       (static), as in Packed24. Together 10/16 of the array, where Packed24 has 9/16."""

    compressed: jax.Array
    metadata: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def values(self) -> jax.Array:
        return self.compressed[: self.metadata.shape[0]]

    @property
    def plain(self) -> Packed24:
        """The same for other products; the values may be copied."""
        return Packed24(self.values, self.metadata, self.axis)

    @property
    def K(self) -> int:
        return 2 * self.compressed.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.metadata.shape[0]
        return (rows, self.K) if self.axis == -1 else (self.K, rows)

    @property
    def pattern(self) -> str:
        return "2:4"

    @property
    def dtype(self):
        return self.compressed.dtype

    def with_values(self, values: jax.Array) -> "Compressed24":
        """Others at the same positions."""
        behind = self.compressed[self.metadata.shape[0] :]
        return dataclasses.replace(self, compressed=jnp.concatenate([values, behind]))

    def todense(self, *, implementation: str | None = None) -> jax.Array:
        """The array it stands for, with +0 where nothing is kept; by the kernel, as nothing else reads it."""
        return unpack(self)

    @staticmethod
    def types(x, axis: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the compressed matrix and the metadata of a matrix packed along `axis`."""
        values, metadata = Packed24.types(x, axis)
        return _compressed_type(values), metadata


def _compressed_type(values, *_) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the compressed matrix with these values."""
    rows, half = values.shape
    behind = -(-rows // 64) * 16 // values.dtype.itemsize
    return jax.ShapeDtypeStruct((rows + behind, half), values.dtype)


# The library's own calls, which have no reference: the reference multiplies what was packed.
COMPRESS = Kernel("s24_cusparselt_compress", _compressed_type)
MULTIPLY = Kernel("s24_cusparselt_matmul", types=None, attributes=lambda **flags: flags)


def compress(packed: Packed24) -> jax.Array:
    """The compressed matrix of a packed one, of 16-bit floats or float8_e4m3fn."""
    return COMPRESS(packed.values, packed.metadata)


def pack(x, axis: int, mask=None, *, strided: bool = False) -> Compressed24:
    """As `pack24`, or strided as `pack24_strided`, by the same kernels."""
    types = Compressed24.types(x, axis)
    if mask is not None:
        made = PACK24_MASKED.kernel(x, mask, axis=axis, types=types)
    elif strided:
        made = PACK24_STRIDED.cuda(x, types=types)
    else:
        made = PACK24.kernel(x, axis=axis, types=types)
    return Compressed24(*made, axis)


def squared_relu(x, axis: int) -> Compressed24:
    """As `squared_relu24`, by the same kernel."""
    return Compressed24(*SQUARED_RELU24.kernel(x, axis=axis, types=Compressed24.types(x, axis)), axis)


def mvue_pack(key, g, axis: int, exact: bool, *, strided: bool = False) -> Compressed24:
    """As `mvue_pack24`, or strided as `mvue_pack24_strided`, by the same kernels."""
    words, types = key_words("mvue24", key), Compressed24.types(g, axis)
    if strided:
        made = MVUE_PACK24_STRIDED.cuda(words, g, exact=exact, types=types)
    else:
        made = MVUE_PACK24.kernel(words, g, axis=axis, exact=exact, types=types)
    return Compressed24(*made, axis)


def unpack(packed: Compressed24) -> jax.Array:
    """The array that `packed` stands for; its values are read where they are."""
    out = jax.ShapeDtypeStruct(packed.shape, packed.dtype)
    return UNPACK24.kernel(packed.compressed, packed.metadata, axis=packed.axis, types=out)


def multiply(
    packed: Packed24 | Compressed24,
    dense,
    dense_k_last: bool,
    out_packed_last: bool,
    out_dtype,
    algorithm: int | None,
    bias=None,
    activation: str | None = None,
) -> jax.Array:
    """The product by cuSPARSELt, of a matrix packed along its last axis; raises ValueError if it does not run
    that. Arguments as in `ops.matmul`."""
    dtype, k_last = packed.dtype, dense_k_last or packed.dtype == FLOAT8
    rows, n = packed.metadata.shape[0], dense.shape[-2 if dense_k_last else -1]
    product = cusparselt.Descriptor(rows, packed.K, n, k_last, out_packed_last, str(dtype), str(out_dtype))
    why = product.misfit()
    if why:
        raise ValueError(f"matmul: cuSPARSELt does not run this product: {why}. Use implementation='ffi'.")
    chosen = product.preferred if algorithm is None else algorithm
    out = jax.ShapeDtypeStruct((n, rows) if out_packed_last else (rows, n), out_dtype)
    workspace = jax.ShapeDtypeStruct((product.workspace(chosen, activation),), jnp.uint8)
    compressed = packed.compressed if isinstance(packed, Compressed24) else compress(packed)
    return MULTIPLY(
        *(compressed, dense if k_last == dense_k_last else dense.T, *(() if bias is None else (bias,))),
        dense_k_last=k_last,
        out_packed_last=out_packed_last,
        activation=cusparselt.CODES[activation],
        algorithm=chosen,
        types=(out, workspace),
    )[0]
