"""V:2:M: blocks of V rows that share four of every M columns (Venom, 2310.02065)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch.operation import Kernel, Operation, Reverse, mask_like, trailing
from jax_sparse24.ops.order import collect, regroup
from jax_sparse24.ops.packed24 import PackedArray
from jax_sparse24.ops.reference import packed_vnm as reference
from jax_sparse24.ops.reference.packed24 import squared_relu
from jax_sparse24.patterns import VNM

TILE = 128  # rows or columns that a CUDA kernel takes at a time
MOST_TILES = 65535  # along tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedVNM(PackedArray):
    """A V:2:M-sparse array (2310.02065), compressed along one of its last two axes.

    As in Packed24 the compressed axis, of size K, is stored last. With `lead` the dimensions before the last
    two, and `R` the size of the other one of these, which is cut into blocks of V:

    values:    `lead + (R, 2 K / M)`, the kept elements, in order; float32, bfloat16, float16 (float64 by the
               reference).
    metadata:  `lead + (R, ceil(K / 2M))` uint8, two nibbles a byte as in Packed24; the positions are those
               among the four columns of the block.
    columns:   `lead + (R / V, K / M, 4)` uint8, the columns of each block that stay: ascending, from 0 to
               M - 1.
    v, m:      the size of a block (static).
    axis:      the compressed axis, -1 or -2 (static)."""

    values: jax.Array
    metadata: jax.Array
    columns: jax.Array
    v: int = dataclasses.field(metadata={"static": True})
    m: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    @staticmethod
    def types(
        x: jax.Array | jax.ShapeDtypeStruct, v: int, m: int, axis: int, **_
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of values, metadata and columns of a packed array.

        x: the array, or its shape and dtype.
        v, m: the size of a block.
        axis: the compressed axis, -1 or -2.

        Returns: the three, as `jax.ShapeDtypeStruct`."""
        *lead, _, _ = x.shape
        rows, groups = x.shape[-3 - axis], x.shape[axis] // m
        return (
            jax.ShapeDtypeStruct((*lead, rows, 2 * groups), x.dtype),
            jax.ShapeDtypeStruct((*lead, rows, -(-groups // 2)), jnp.uint8),
            jax.ShapeDtypeStruct((*lead, rows // v, groups, 4), jnp.uint8),
        )

    @property
    def parts(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Values, metadata and columns."""
        return self.values, self.metadata, self.columns

    @property
    def blocks(self) -> dict[str, int]:
        """The size of a block and the compressed axis, as operations take them."""
        return {"v": self.v, "m": self.m, "axis": self.axis}

    @property
    def K(self) -> int:
        """Uncompressed size of the compressed axis."""
        return self.values.shape[-1] // 2 * self.m

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        *lead, rows, _ = self.values.shape
        return (*lead, rows, self.K) if self.axis == -1 else (*lead, self.K, rows)

    @property
    def pattern(self) -> str:
        """The sizes V:N:M, such as "64:2:16"."""
        return f"{self.v}:2:{self.m}"

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values, metadata and columns."""
        return self.values.nbytes + self.metadata.nbytes + self.columns.nbytes

    @property
    def T(self) -> "PackedVNM":
        """The transpose of the last two axes; no data moves."""
        return dataclasses.replace(self, axis=-3 - self.axis)

    def todense(self, *, implementation: str | None = None) -> jax.Array:
        """The array it stands for, with +0 where nothing is kept. Differentiable in `values`.

        implementation: as in `mask24`.

        Returns: an array of `shape` and `dtype`."""
        check_packed_vnm("todense", self)
        return UNPACK_VNM(*self.parts, **self.blocks, implementation=implementation)


def vnm_mask(
    x: jax.typing.ArrayLike,
    v: int,
    m: int,
    n: int = 2,
    axis: int = -1,
    exact: bool = False,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Keep mask of V:2:M: in every block of `v` rows and `m` columns four columns stay, and of these every
    row keeps the two of largest |x|.

    The columns are those of largest L1 norm: |x| summed over the rows in float32, where a subnormal adds
    nothing (columns without anything else are ranked by their largest element) and sums beyond float32 count
    as Inf. Ties keep the lower index and NaN outranks everything, as in `mask24`. A row whose non-zeros lie
    outside the four columns keeps zeros: that is the limit of the format.

    The columns of a block depend on all its rows: where these are tokens, a token's mask depends on later
    ones. To select within a support, mask x first: `vnm_mask(jnp.where(support, x, 0), ...)`. The transpose
    of a V:2:M array is not V:2:M, so a product along the other axis takes a selection of its own. No gradient
    flows.

    x: (..., rows, columns); float32, bfloat16 or float16.
    v: the rows of a block, 16, 32, 64, 128 or 256; it divides the axis that is not `axis`.
    m: the columns of a block, 4 to 32; it divides `axis`.
    n: 2.
    axis: that of the columns, -1 or -2.
    exact: the best of all sets of four columns, that whose kept |x| add up to most, for m up to 16; in a
        block with NaN or Inf as many of these as possible are kept.
    implementation: as in `mask24`.

    Returns: bool, x's shape, exactly two per row and block.
    Raises: TypeError (dtype, types), ValueError (sizes), RuntimeError (implementation).
    Source: 2410.16135 for the norm; 2310.02065, section 4, for exact."""
    x, blocks = _checked("vnm_mask", x, v, m, n, axis, exact)
    return VNM_MASK(lax.stop_gradient(x), **blocks, exact=bool(exact), implementation=implementation)


def pack_vnm(
    x: jax.typing.ArrayLike,
    v: int,
    m: int,
    n: int = 2,
    axis: int = -1,
    exact: bool = False,
    mask: jax.typing.ArrayLike | None = None,
    *,
    implementation: str | None = None,
) -> PackedVNM:
    """`x` compressed along an axis to V:2:M: two of every `m` elements, within four columns that `v` rows
    share.

    Without a mask the selection is that of `vnm_mask`. Differentiable in `x`.

    x, v, m, n, axis, exact, implementation: as in `vnm_mask`.
    mask: bool, x's shape, or None. Masked elements come before all others, so that a mask that is V:2:M
        itself is followed; of one that is not, the columns and elements of largest |x| stay, and what is
        missing is filled with stored zeros.

    Returns: a PackedVNM.
    Raises: as `vnm_mask`; TypeError or ValueError for a mask of another dtype or shape, or with exact.
    Source: 2310.02065."""
    x, blocks = _checked("pack_vnm", x, v, m, n, axis, exact)
    if mask is None:
        parts = PACK_VNM(x, **blocks, exact=bool(exact), implementation=implementation)
        return PackedVNM(*parts, **blocks)
    if exact:
        raise ValueError(
            "pack_vnm: exact=True searches and mask names what stays; give one of them. To search within a "
            "support, pack jnp.where(support, x, 0)."
        )
    mask = patterns.as_mask("pack_vnm", mask, x)
    return PackedVNM(*PACK_VNM_MASKED(x, mask, **blocks, implementation=implementation), **blocks)


def _checked(op, x, v, m, n, axis, exact) -> tuple[jax.Array, dict[str, int]]:
    """The array, and v, m and axis as operations take them."""
    patterns.check_flag(op, "exact", exact)
    x = patterns.as_array(op, "x", x)
    pattern = VNM(v, m, n)
    if exact:
        pattern.check_search(op)
    axis = pattern.check(op, x.shape, axis)
    return x, {"v": int(v), "m": int(m), "axis": axis}


def _blocks(v, m, axis):
    return {**trailing(axis), "v": v, "m": m}


def _searched_blocks(v, m, axis, exact):
    return {**_blocks(v, m, axis), "exact": exact}


VNM_MASK = Operation(
    "vnm_mask", reference.vnm_mask, kernel=Kernel("s24_vnm_mask", mask_like, _searched_blocks)
)


def _pack_backward(positions, cotangents, *, implementation, exact, **blocks):
    return (UNPACK_VNM(cotangents[0], *positions, **blocks, implementation=implementation),)


PACK_VNM = Operation(
    "pack_vnm",
    reference.pack_vnm,
    kernel=Kernel("s24_vnm_pack", PackedVNM.types, _searched_blocks),
    vjp=Reverse(lambda operands, results, **_: results[1:], _pack_backward),
)


def _masked_types(x, mask, **blocks):
    return PackedVNM.types(x, **blocks)


def _masked_backward(saved, cotangents, *, implementation, **blocks):
    *positions, mask = saved
    dx = UNPACK_VNM(cotangents[0], *positions, **blocks, implementation=implementation)
    return jnp.where(mask, dx, jnp.zeros_like(dx)), None


PACK_VNM_MASKED = Operation(
    "pack_vnm",
    reference.pack_vnm_masked,
    kernel=Kernel("s24_vnm_pack_masked", _masked_types, _blocks),
    vjp=Reverse(lambda operands, results, **_: (*results[1:], operands[1]), _masked_backward),
)


def gather_vnm(x, packed: PackedVNM, *, implementation: str | None = None) -> jax.Array:
    """The values of an array at the positions of a packed one: the transpose of `todense`.

    `dataclasses.replace(packed, values=...)` is then x cut to packed's support. Differentiable in `x`.

    x: packed's shape; float32, bfloat16 or float16.
    packed: names the positions; its values are not read.
    implementation: as in `mask24`.

    Returns: an array of the shape of `packed.values` and x's dtype.
    Raises: TypeError (dtype), ValueError (shape)."""
    x = patterns.as_array("gather_vnm", "x", x)
    check_packed_vnm("gather_vnm", packed)
    if x.shape != packed.shape:
        raise ValueError(f"gather_vnm: x has shape {x.shape}, the packed array {packed.shape}; need equal.")
    return GATHER_VNM(x, *packed.parts[1:], **packed.blocks, implementation=implementation)


def check_packed_vnm(op: str, packed: PackedVNM) -> VNM:
    """Checks that the parts of a packed array belong together.

    op: the operation, for messages.
    packed: from a caller.

    Returns: its pattern.
    Raises: TypeError (type, dtype) or ValueError if they do not."""
    if not isinstance(packed, PackedVNM):
        raise TypeError(f"{op}: needs a PackedVNM, got {type(packed).__name__}.")
    patterns.check_dtype(op, "values", packed.dtype)
    pattern = VNM(packed.v, packed.m)
    shapes = packed.values.shape, packed.metadata.shape, packed.columns.shape
    fits = len(shapes[0]) >= 2 and packed.axis in (-1, -2) and shapes[0][-1] % 2 == 0
    if fits:
        *lead, rows, kept = shapes[0]
        groups = kept // 2
        fits = rows % pattern.v == 0 and shapes[1:] == (
            (*lead, rows, -(-groups // 2)),
            (*lead, rows // pattern.v, groups, 4),
        )
    if not fits or packed.metadata.dtype != jnp.uint8 or packed.columns.dtype != jnp.uint8:
        raise ValueError(
            f"{op}: values {shapes[0]}, metadata {shapes[1]} {packed.metadata.dtype} and columns {shapes[2]} "
            f"{packed.columns.dtype} do not belong together for {pattern} and axis {packed.axis}; values are "
            f"(R, 2K/M), metadata (R, ceil(K/2M)) and columns (R/V, K/M, 4) uint8. Build them with pack_vnm."
        )
    return pattern


def _unpacked_type(values, metadata, columns, v, m, axis):
    return jax.ShapeDtypeStruct(PackedVNM(values, metadata, columns, v, m, axis).shape, values.dtype)


def _unpack_backward(positions, cotangent, *, implementation, **blocks):
    return GATHER_VNM(cotangent, *positions, **blocks, implementation=implementation), None, None


UNPACK_VNM = Operation(
    "unpack_vnm",
    reference.unpack_vnm,
    kernel=Kernel("s24_vnm_unpack", _unpacked_type, _blocks),
    vjp=Reverse(lambda operands, results, **_: operands[1:], _unpack_backward),
)


def _gathered_type(x, metadata, columns, **blocks):
    return PackedVNM.types(x, **blocks)[0]


def _gather_backward(positions, cotangent, *, implementation, **blocks):
    return UNPACK_VNM(cotangent, *positions, **blocks, implementation=implementation), None, None


GATHER_VNM = Operation(
    "gather_vnm",
    reference.gather_vnm,
    kernel=Kernel("s24_vnm_gather", _gathered_type, _blocks),
    vjp=Reverse(lambda operands, results, **_: operands[1:], _gather_backward),
)


def squared_relu_vnm(x_Tf: jax.Array, v: int, m: int, *, implementation: str | None = None) -> PackedVNM:
    """`pack_vnm(relu(x_Tf)**2, v, m)`, with the square of `squared_relu24`.

    On CUDA it takes one pass, for 16-bit floats in whole tiles. It is not differentiable.

    x_Tf: (T, f); float32, bfloat16 or float16.
    v, m, implementation: as in `vnm_mask`.

    Returns: a PackedVNM along axis -1.
    Raises: as `pack_vnm`."""
    VNM(v, m)
    return SQUARED_RELU_VNM(x_Tf, v=v, m=m, implementation=implementation)


def _squares_in_steps(x_Tf, *, v, m, implementation):
    return pack_vnm(squared_relu(x_Tf), v, m, implementation=implementation)


def _squares_in_one_pass(x_Tf, *, v, m):
    return PackedVNM(*SQUARED_RELU_KERNEL(x_Tf, v=v, m=m, axis=-1), v, m, -1)


def _squares_fit(_, x_Tf, *, v, m) -> bool:
    T, f = x_Tf.shape
    tiles = f % TILE == 0 and T % v == 0 and T // v <= MOST_TILES
    return x_Tf.dtype.itemsize == 2 and _tiled(v, m) and tiles


def _tiled(v: int, m: int) -> bool:
    """Whether CUDA's kernels of whole tiles have blocks of this size."""
    return v in (64, 128, 256) and m in (8, 16, 32)


SQUARED_RELU_KERNEL = Kernel("s24_vnm_squared_relu", PackedVNM.types, lambda v, m, axis: {"v": v, "m": m})
SQUARED_RELU_VNM = Operation(
    "pack_vnm", composed=_squares_in_steps, cuda=_squares_in_one_pass, fits=_squares_fit
)


def repack_vnm(
    packed: PackedVNM,
    tokens: str = "strided",
    collected: bool = False,
    exact: bool = False,
    *,
    implementation: str | None = None,
) -> PackedVNM:
    """Packs V:N:M activations (T, f), which are packed along f, again along T, to the same pattern.

    It is `pack_vnm(x, v, m, axis=-2)` of `x = packed.todense()`, after `regroup(x, tokens, m)` and, if
    collected, `collect(x, f // m, -1)`; in one pass, without that array, in whole tiles of 16-bit floats on
    CUDA. Not differentiable.

    packed: (T, f), packed along f; T and f multiples of v and m.
    tokens: "consecutive" or "strided".
    collected: whether features are moved by `collect`, so that those i, i + m, i + 2m, ... lie together.
    exact: as in `pack_vnm`.
    implementation: as in `mask24`.

    Returns: a PackedVNM along axis -2.
    Raises: TypeError or ValueError for arrays that do not belong together."""
    check_packed_vnm("repack_vnm", packed)
    return REPACK_VNM(packed, tokens=tokens, collected=collected, exact=exact, implementation=implementation)


def _repack_in_steps(packed, *, tokens, collected, exact, implementation):
    x_Tf = regroup(packed.todense(implementation=implementation), tokens, packed.m)
    x_Tf = collect(x_Tf, x_Tf.shape[-1] // packed.m, -1) if collected else x_Tf
    return pack_vnm(x_Tf, packed.v, packed.m, axis=-2, exact=exact, implementation=implementation)


def _repack_in_one_pass(packed, *, tokens, collected, exact):
    order = {"strided": tokens == "strided", "collected": collected}
    parts = REPACK_KERNEL(*packed.parts, v=packed.v, m=packed.m, **order)
    return PackedVNM(*parts, packed.v, packed.m, -2)


def _repacked_types(values, metadata, columns, v, m, **_):
    packed = PackedVNM(values, metadata, columns, v, m, -1)
    return PackedVNM.types(jax.ShapeDtypeStruct(packed.shape, packed.dtype), v, m, -2)


def in_vnm_tiles(packed: PackedVNM, collected: bool, exact: bool = False, **_) -> bool:
    """Whether CUDA's kernel takes packed activations, to pack them along tokens.

    packed: (T, f), packed along f.
    collected, exact: as in `repack_vnm`."""
    (T, f), v, m = packed.shape, packed.v, packed.m
    sizes = packed.dtype.itemsize == 2 and _tiled(v, m)
    features = f // m % v == 0 if collected else f % v == 0 and v // m >= 4
    return not exact and sizes and T % TILE == 0 and T % v == 0 and T // TILE <= MOST_TILES and features


REPACK_KERNEL = Kernel("s24_vnm_repack", _repacked_types, lambda **flags: flags)
REPACK_VNM = Operation(
    "repack_vnm",
    composed=_repack_in_steps,
    cuda=_repack_in_one_pass,
    fits=lambda _, *operands, **options: in_vnm_tiles(*operands, **options),
)
