"""Matrices in the layout that cuSPARSELt multiplies, and a kernel of our own on Hopper: `Compressed24`.

The engines pack in this layout where either multiplies on CUDA. Nothing here is differentiable."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import cusparselt, hopper
from jax_sparse24.dispatch.operation import Kernel
from jax_sparse24.ops.mvue import MVUE_PACK24, MVUE_PACK24_STRIDED, key_words
from jax_sparse24.ops.packed24 import (
    PACK24,
    PACK24_MASKED,
    PACK24_MASKED_BOTH,
    PACK24_STRIDED,
    SQUARED_RELU24,
    UNPACK24,
    Packed24,
    PackedArray,
)
from jax_sparse24.ops.soft import SOFT_PACK24
from jax_sparse24.patterns import FLOAT8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressed24(PackedArray):
    """A 2:4-sparse matrix of 16-bit floats in the layout of cuSPARSELt on this generation of GPUs.

    The packing kernels write this layout directly, so that no call of the library compresses the matrix. It
    takes 10/16 of the memory of the matrix, where Packed24 takes 9/16.

    compressed: (R + P / 8, K / 2), the R rows of values as in Packed24, and after them the metadata of P rows
                in the library's order, where R is padded to P as its row in dispatch/generations.py says; K
                is a multiple of 32. Read as 16-bit floats, the metadata is never NaN or Inf.
    metadata:   (R, K / 8) uint8, as in Packed24.
    axis:       the compressed axis, as in Packed24 (static)."""

    compressed: jax.Array
    metadata: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def values(self) -> jax.Array:
        return self.compressed[: self.metadata.shape[0]]

    @property
    def plain(self) -> Packed24:
        """The same matrix as a Packed24, for products by other kernels; values may be copied."""
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
        """Other values at the same positions.

        values: (R, K / 2), in the dtype of the matrix.

        Returns: a Compressed24."""
        behind = self.compressed[self.metadata.shape[0] :]
        return dataclasses.replace(self, compressed=jnp.concatenate([values, behind]))

    def todense(self, *, implementation: str | None = None) -> jax.Array:
        """The array it stands for, with +0 where nothing is kept.

        implementation: ignored, because only the kernel reads this layout.

        Returns: an array of `shape` and `dtype`."""
        return unpack(self)

    @staticmethod
    def types(x, axis: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the compressed matrix and the metadata of a packed matrix.

        x: the matrix, or its shape and dtype.
        axis: the compressed axis, -1 or -2.

        Returns: both, as `jax.ShapeDtypeStruct`."""
        values, metadata = Packed24.types(x, axis)
        return _compressed_type(values), metadata


def _compressed_type(values, *_) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the compressed matrix with these values."""
    rows, half = values.shape
    multiple = cusparselt.layout().rows
    padded = -(-rows // multiple) * multiple
    return jax.ShapeDtypeStruct((rows + padded // (4 * values.dtype.itemsize), half), values.dtype)


# Calls of the library and of our kernel. They have no reference: `ops.matmul` multiplies what was packed.
COMPRESS = Kernel("s24_cusparselt_compress", _compressed_type)
MULTIPLY = Kernel("s24_cusparselt_matmul", types=None, attributes=lambda **flags: flags)
MULTIPLY_ON_HOPPER = Kernel("s24_matmul_compressed24", types=None, attributes=lambda **flags: flags)


def compress(packed: Packed24) -> jax.Array:
    """The array `compressed` of a packed matrix: its values, and its metadata in the library's order.

    packed: a matrix of 16-bit floats or float8_e4m3fn.

    Returns: values and metadata in one array, see `Compressed24`."""
    return COMPRESS(packed.values, packed.metadata)


def pack(x, axis: int, mask=None, *, strided: bool = False) -> Compressed24:
    """Packs as `pack24` does, or as `pack24_strided` if `strided`, by the same kernels.

    x, axis, mask: as in `pack24`, for one axis of a matrix.
    strided: whether groups are those of `pack24_strided`; without a mask.

    Returns: a Compressed24."""
    types = Compressed24.types(x, axis)
    if mask is not None:
        made = PACK24_MASKED.kernel(x, mask, axis=axis, types=types)
    elif strided:
        made = PACK24_STRIDED.cuda(x, types=types)
    else:
        made = PACK24.kernel(x, axis=axis, types=types)
    return Compressed24(*made, axis)


def pack_both(x, mask) -> tuple[Compressed24, Compressed24]:
    """Packs as `pack24` does by a mask along axis -1 and along axis -2, by the same kernel.

    x, mask: as in `pack24`, a matrix.

    Returns: a Compressed24 along each axis."""
    types = *Compressed24.types(x, -1), *Compressed24.types(x, -2)
    rows, row_metadata, columns, metadata = PACK24_MASKED_BOTH.kernel(x, mask, types=types)
    return Compressed24(rows, row_metadata, -1), Compressed24(columns, metadata, -2)


def squared_relu(x, axis: int) -> Compressed24:
    """Packs as `squared_relu24` does, by the same kernel.

    x, axis: as in `squared_relu24`, for one axis of a matrix.

    Returns: a Compressed24."""
    return Compressed24(*SQUARED_RELU24.kernel(x, axis=axis, types=Compressed24.types(x, axis)), axis)


def soft_pack(x, scale, axis: int) -> Compressed24:
    """Packs as `soft_pack24` does, by the same kernel.

    x, scale, axis: as in `soft_pack24`, for one axis of a matrix.

    Returns: a Compressed24."""
    return Compressed24(*SOFT_PACK24.kernel(x, scale, axis=axis, types=Compressed24.types(x, axis)), axis)


def mvue_pack(key, g, axis: int, exact: bool, *, strided: bool = False) -> Compressed24:
    """Packs as `mvue_pack24` does, or as `mvue_pack24_strided` if `strided`, by the same kernels.

    key, g, axis, exact: as in `mvue_pack24`, for a matrix.
    strided: whether groups are those of `pack24_strided`.

    Returns: a Compressed24."""
    words, types = key_words("mvue24", key), Compressed24.types(g, axis)
    if strided:
        made = MVUE_PACK24_STRIDED.cuda(words, g, exact=exact, types=types)
    else:
        made = MVUE_PACK24.kernel(words, g, axis=axis, exact=exact, types=types)
    return Compressed24(*made, axis)


def unpack(packed: Compressed24) -> jax.Array:
    """The array that a compressed matrix stands for; its values are read where they are.

    packed: a Compressed24.

    Returns: an array of its shape and dtype."""
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
    """The product of a matrix, packed along its last axis, with a dense one, by cuSPARSELt.

    packed: (R, K).
    dense: (N, K) if `dense_k_last`, else (K, N).
    dense_k_last: whether the contracted axis of `dense` is its last one.
    out_packed_last: whether the result is (N, R), with the axis of the packed matrix last, and not (R, N).
    out_dtype: of the result.
    algorithm: number of the library's algorithm, followed by an activation if the library has both; None for
        the preferred one.
    bias: (R,), added to the float32 sums; or None.
    activation: None, "relu" or "gelu", applied to the float32 sums.

    Returns: (R, N) or (N, R).
    Raises: ValueError for a product that the library does not run."""
    dtype, k_last = packed.dtype, dense_k_last or packed.dtype == FLOAT8
    rows, n = packed.metadata.shape[0], dense.shape[-2 if dense_k_last else -1]
    product = cusparselt.Descriptor(rows, packed.K, n, k_last, out_packed_last, str(dtype), str(out_dtype))
    why = product.misfit()
    if why:
        raise ValueError(f"matmul: cuSPARSELt does not run this product: {why}. Use implementation='ffi'.")
    chosen = product.preferred if algorithm is None else algorithm
    if algorithm is None or activation is not None:
        chosen = product.accepted(chosen, activation)
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


def multiply_on_hopper(
    packed: Packed24 | Compressed24,
    dense,
    dense_k_last: bool,
    out_packed_last: bool,
    bias=None,
    *,
    strided: bool = False,
) -> jax.Array:
    """The product of a matrix, packed along its last axis, with a dense one, by our kernel for Hopper.

    It takes the products for which `hopper.misfit` finds no obstacle. Where tiles of the result are too few
    for the GPU, several blocks sum parts of one, always the same parts in the same order; every call has a
    workspace of 36 MiB for these sums.

    packed: (R, K), bfloat16 or float16.
    dense: (N, K) if `dense_k_last`, else (K, N), of the same dtype.
    dense_k_last: whether the contracted axis of `dense` is its last one.
    out_packed_last: whether the result is (N, R), with the axis of the packed matrix last, and not (R, N).
    bias: (R,), added to the float32 sums; or None.
    strided: whether the groups of `packed` are those of `pack24_strided`: rows of `dense` are read in that
        order, and no pass moves them. Not if `dense_k_last`.

    Returns: (R, N) or (N, R), of the same dtype."""
    rows, n = packed.metadata.shape[0], dense.shape[-2 if dense_k_last else -1]
    shape = (n, rows) if out_packed_last else (rows, n)
    options = {"dense_k_last": dense_k_last, "rows_last": out_packed_last, "strided": strided}

    @jax.custom_batching.custom_vmap
    def call(compressed, dense, bias):
        leading = jnp.broadcast_shapes(compressed.shape[:-2], dense.shape[:-2], bias.shape[:-1])
        out = jax.ShapeDtypeStruct((*leading, *shape), dense.dtype)
        workspace = jax.ShapeDtypeStruct((hopper.WORKSPACE,), jnp.uint8)
        return MULTIPLY_ON_HOPPER(compressed, dense, bias, **options, types=(out, workspace))[0]

    @call.def_vmap  # the workspace gets no dimension of its own
    def _(_, mapped, *arrays):
        return call(*(x if own else x[None] for x, own in zip(arrays, mapped, strict=True))), True

    compressed = packed.compressed if isinstance(packed, Compressed24) else compress(packed)
    return call(compressed, dense, jnp.zeros(0, dense.dtype) if bias is None else bias)
