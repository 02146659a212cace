"""Matrices in the form that cuSPARSELt multiplies, `Compressed24`: for the engines, where it multiplies on
CUDA and nothing is differentiated."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import cusparselt, native
from jax_sparse24.ops.mvue import key_words
from jax_sparse24.ops.packed24 import Packed24, PackedArray, packed_types
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


def compressed_types(x, axis: int):
    """As `packed_types`, for a `Compressed24`."""
    values, metadata = packed_types(x, axis)
    return _like(values), metadata


def _like(values) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the compressed matrix with these values."""
    rows, half = values.shape
    behind = -(-rows // 64) * 16 // values.dtype.itemsize
    return jax.ShapeDtypeStruct((rows + behind, half), values.dtype)


def compress(packed: Packed24) -> jax.Array:
    """The compressed matrix of a packed one, of 16-bit floats or float8_e4m3fn."""
    return native.call("s24_cusparselt_compress", _like(packed.values), packed.values, packed.metadata)


def _made(target: str, x, axis: int, *operands, strided: bool = False, **attributes) -> Compressed24:
    """What a kernel of `operands` packs of matrix `x`."""
    if strided:
        target = f"{target}_strided"
    else:
        attributes["trailing"] = -1 - axis
    return Compressed24(*native.call(target, compressed_types(x, axis), *operands, **attributes), axis)


def pack(x, axis: int, mask=None, *, strided: bool = False) -> Compressed24:
    """As `pack24`, or strided as `pack24_strided`."""
    if mask is not None:
        return _made("s24_pack_masked", x, axis, x, mask)
    return _made("s24_pack", x, axis, x, strided=strided)


def squared_relu(x, axis: int) -> Compressed24:
    """As `squared_relu24`."""
    return _made("s24_squared_relu_pack", x, axis, x)


def mvue_pack(key, g, axis: int, exact: bool, *, strided: bool = False) -> Compressed24:
    """As `mvue_pack24`, or strided as `mvue_pack24_strided`."""
    return _made("s24_mvue_pack", g, axis, key_words("mvue24", key), g, strided=strided, exact=exact)


def unpack(packed: Compressed24) -> jax.Array:
    """The array that `packed` stands for; its values are read where they are."""
    out = jax.ShapeDtypeStruct(packed.shape, packed.dtype)
    return native.call("s24_unpack", out, packed.compressed, packed.metadata, trailing=-1 - packed.axis)


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
    return native.call(
        "s24_cusparselt_matmul",
        (out, workspace),
        *(compressed, dense if k_last == dense_k_last else dense.T, *(() if bias is None else (bias,))),
        dense_k_last=k_last,
        out_packed_last=out_packed_last,
        activation=cusparselt.CODES[activation],
        algorithm=chosen,
    )[0]
