"""V:2:M: blocks of V rows that share four of every M columns (Venom, 2310.02065)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import run
from jax_sparse24.ops.packed24 import PackedArray, as_mask
from jax_sparse24.ops.reference import packed_vnm as reference
from jax_sparse24.ops.select import like
from jax_sparse24.patterns import VNM


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
        """Such as 64:2:16, for V:N:M."""
        return f"{self.v}:2:{self.m}"

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self):
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
        """The array it stands for, with +0 where nothing is kept. Differentiable in `values`."""
        return unpack_vnm(self, implementation=implementation)


def vnm_mask(
    x, v: int, m: int, n: int = 2, axis: int = -1, exact: bool = False, *, implementation: str | None = None
) -> jax.Array:
    """Keep mask of V:2:M: in every block of `v` rows and `m` columns four columns stay, and of these every
    row keeps the two of largest |x|.

    x: (..., rows, columns); `axis`, -1 or -2, is that of the columns (size a multiple of m), `v` runs along
    the other of the last two (size a multiple of v). v: 16, 32, 64, 128, 256; m: 4 to 32; float32, bfloat16,
    float16. Returns bool of x's shape, exactly two per row and block.

    The columns are those of largest L1 norm (2410.16135): |x| summed over the rows in float32, where a
    subnormal adds nothing (columns without anything else are ranked by their largest element) and sums beyond
    float32 count as Inf. exact: the best of all sets of four columns, that whose kept |x| add up to most
    (2310.02065, section 4), for m up to 16; in a block with NaN or Inf as many of these as possible are kept.
    Ties keep the lower index and NaN outranks everything, as in `mask24`. A row whose non-zeros lie outside
    the four columns keeps zeros: that is the limit of the format.

    The columns of a block depend on all its rows: where these are tokens, a token's mask depends on later
    ones. To select within a support, mask x first: `vnm_mask(jnp.where(support, x, 0), ...)`. The transpose
    of a V:2:M array is not V:2:M, so a product along the other axis takes a selection of its own.

    Not differentiable (no gradient flows). Raises TypeError (dtype, types), ValueError (sizes), RuntimeError
    (implementation)."""
    x, pattern, axis = _checked("vnm_mask", x, v, m, n, axis, exact)
    return _mask(lax.stop_gradient(x), pattern, axis, bool(exact), implementation)


def pack_vnm(
    x,
    v: int,
    m: int,
    n: int = 2,
    axis: int = -1,
    exact: bool = False,
    mask=None,
    *,
    implementation: str | None = None,
) -> PackedVNM:
    """`x` compressed along `axis` to V:2:M: two of every `m` elements, within four columns that `v` rows
    share.

    Without `mask` the selection is that of `vnm_mask`, which says what the arguments are. mask: bool of x's
    shape; masked elements come before all others, so that a mask that is V:2:M itself is followed; of one
    that is not, the columns and elements of largest |x| stay, and what is missing is filled with stored
    zeros. Differentiable in `x`. Raises like `vnm_mask`; TypeError or ValueError for a mask of another dtype
    or shape, or together with exact."""
    x, pattern, axis = _checked("pack_vnm", x, v, m, n, axis, exact)
    if mask is None:
        return _pack(x, pattern, axis, bool(exact), implementation)
    if exact:
        raise ValueError(
            "pack_vnm: exact=True searches and mask names what stays; give one of them. To search within a "
            "support, pack jnp.where(support, x, 0)."
        )
    return _pack_masked(x, as_mask("pack_vnm", mask, x), pattern, axis, implementation)


def _checked(op, x, v, m, n, axis, exact):
    patterns.check_flag(op, "exact", exact)
    x = patterns.as_array(op, "x", x)
    pattern = VNM(v, m, n)
    if exact:
        pattern.check_search(op)
    return x, pattern, pattern.check(op, x.shape, axis)


@partial(jax.jit, static_argnums=(1, 2, 3, 4), inline=True)
def _mask(x, pattern, axis, exact, implementation):
    def kernel(x):
        return native.call("s24_vnm_mask", like(x, jnp.bool_), x, exact=exact, **_place(pattern, axis))

    def fallback(x):
        return reference.vnm_mask(x, pattern.v, pattern.m, axis, exact)

    return run("vnm_mask", x.dtype, implementation, kernel, fallback, x)


def _place(pattern, axis):
    return {"trailing": -1 - axis, "v": pattern.v, "m": pattern.m}


def packed_vnm_types(x, pattern, axis):
    """Shapes and dtypes of values, metadata and columns of a packed `x`."""
    *lead, _, _ = x.shape
    rows, groups = x.shape[-3 - axis], x.shape[axis] // pattern.m
    return (
        jax.ShapeDtypeStruct((*lead, rows, 2 * groups), x.dtype),
        jax.ShapeDtypeStruct((*lead, rows, -(-groups // 2)), jnp.uint8),
        jax.ShapeDtypeStruct((*lead, rows // pattern.v, groups, 4), jnp.uint8),
    )


def _packed(parts, pattern, axis):
    return PackedVNM(*parts, pattern.v, pattern.m, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
@partial(jax.jit, static_argnums=(1, 2, 3, 4), inline=True)
def _pack(x, pattern, axis, exact, implementation):
    def kernel(x):
        types = packed_vnm_types(x, pattern, axis)
        parts = native.call("s24_vnm_pack", types, x, exact=exact, **_place(pattern, axis))
        return _packed(parts, pattern, axis)

    def fallback(x):
        return _packed(reference.pack_vnm(x, pattern.v, pattern.m, axis, exact), pattern, axis)

    return run("pack_vnm", x.dtype, implementation, kernel, fallback, x)


def _pack_fwd(x, pattern, axis, exact, implementation):
    packed = _pack(x, pattern, axis, exact, implementation)
    return packed, (packed.metadata, packed.columns)


def _pack_bwd(pattern, axis, exact, implementation, positions, ct):
    return (_unpack(ct.values, *positions, pattern, axis, implementation),)


_pack.defvjp(_pack_fwd, _pack_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
@partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _pack_masked(x, mask, pattern, axis, implementation):
    def kernel(x, mask):
        types = packed_vnm_types(x, pattern, axis)
        parts = native.call("s24_vnm_pack_masked", types, x, mask, **_place(pattern, axis))
        return _packed(parts, pattern, axis)

    def fallback(x, mask):
        return _packed(reference.pack_vnm_masked(x, mask, pattern.v, pattern.m, axis), pattern, axis)

    return run("pack_vnm", x.dtype, implementation, kernel, fallback, x, mask)


def _pack_masked_fwd(x, mask, pattern, axis, implementation):
    packed = _pack_masked(x, mask, pattern, axis, implementation)
    return packed, (packed.metadata, packed.columns, mask)


def _pack_masked_bwd(pattern, axis, implementation, residuals, ct):
    *positions, mask = residuals
    dx = _unpack(ct.values, *positions, pattern, axis, implementation)
    return jnp.where(mask, dx, jnp.zeros_like(dx)), None


_pack_masked.defvjp(_pack_masked_fwd, _pack_masked_bwd)


def unpack_vnm(packed: PackedVNM, *, implementation: str | None = None) -> jax.Array:
    """The array that `packed` stands for, +0 where nothing is kept. Differentiable in the values."""
    pattern = check_packed_vnm("todense", packed)
    parts = packed.values, packed.metadata, packed.columns
    return _unpack(*parts, pattern, packed.axis, implementation)


def gather_vnm(x, packed: PackedVNM, *, implementation: str | None = None) -> jax.Array:
    """The values of `x` at the positions of `packed`: the transpose of `todense`.

    x: of packed's shape; float32, bfloat16, float16. Returns an array of the shape of `packed.values` and x's
    dtype: `dataclasses.replace(packed, values=...)` is x cut to packed's support. Differentiable in `x`.
    Raises TypeError (dtype), ValueError (shape)."""
    x = patterns.as_array("gather_vnm", "x", x)
    pattern = check_packed_vnm("gather_vnm", packed)
    if x.shape != packed.shape:
        raise ValueError(f"gather_vnm: x has shape {x.shape}, the packed array {packed.shape}; need equal.")
    return _gather(x, packed.metadata, packed.columns, pattern, packed.axis, implementation)


def check_packed_vnm(op: str, packed: PackedVNM) -> VNM:
    """The pattern of `packed`; raises TypeError (type, dtype) or ValueError if its parts do not belong
    together."""
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


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
@partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _unpack(values, metadata, columns, pattern, axis, implementation):
    def kernel(*parts):
        shape = jax.ShapeDtypeStruct(_packed(parts, pattern, axis).shape, values.dtype)
        return native.call("s24_vnm_unpack", shape, *parts, **_place(pattern, axis))

    def fallback(*parts):
        return reference.unpack_vnm(*parts, pattern.v, pattern.m, axis)

    return run("unpack_vnm", values.dtype, implementation, kernel, fallback, values, metadata, columns)


def _unpack_fwd(values, metadata, columns, pattern, axis, implementation):
    return _unpack(values, metadata, columns, pattern, axis, implementation), (metadata, columns)


def _unpack_bwd(pattern, axis, implementation, positions, ct):
    return _gather(ct, *positions, pattern, axis, implementation), None, None


_unpack.defvjp(_unpack_fwd, _unpack_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
@partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _gather(x, metadata, columns, pattern, axis, implementation):
    def kernel(x, *positions):
        return native.call(
            "s24_vnm_gather", packed_vnm_types(x, pattern, axis)[0], x, *positions, **_place(pattern, axis)
        )

    def fallback(x, *positions):
        return reference.gather_vnm(x, *positions, pattern.v, pattern.m, axis)

    return run("gather_vnm", x.dtype, implementation, kernel, fallback, x, metadata, columns)


def _gather_fwd(x, metadata, columns, pattern, axis, implementation):
    return _gather(x, metadata, columns, pattern, axis, implementation), (metadata, columns)


def _gather_bwd(pattern, axis, implementation, positions, ct):
    return _unpack(ct, *positions, pattern, axis, implementation), None, None


_gather.defvjp(_gather_fwd, _gather_bwd)
