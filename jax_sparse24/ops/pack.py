"""Between dense arrays and `Packed24`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.formats import Packed24
from jax_sparse24.ops import _ffi, reference
from jax_sparse24.ops._choose import run
from jax_sparse24.ops.tokens import regroup
from jax_sparse24.patterns import FLOAT8


def packed_types(x, axis: int):
    """Shapes and dtypes of the values and metadata of `x` packed along `axis` (negative)."""
    place = x.ndim + axis
    lead, k = x.shape[:place] + x.shape[place + 1 :], x.shape[place]
    return jax.ShapeDtypeStruct((*lead, k // 2), x.dtype), jax.ShapeDtypeStruct(
        (*lead, -(-k // 8)), jnp.uint8
    )


def pack24(x, axis: int, mask=None, *, implementation: str | None = None) -> Packed24:
    """`x` compressed along `axis`: two of every four elements with their positions.

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16, float16, float8_e4m3fn. Without `mask`
    the two of largest |x| are taken, as in `mask24`. mask: bool of x's shape; of more than two per group the
    two of largest |x| are taken, and a group with fewer is filled with stored zeros. Differentiable in `x`.
    Raises like `mask24`; TypeError or ValueError for a mask of another dtype or shape."""
    x = patterns.as_array("pack24", "x", x, float8=True)
    axis = patterns.check_grouped("pack24", x, axis)
    if x.dtype == FLOAT8:
        wide = pack24(x.astype(jnp.bfloat16), axis, mask, implementation=implementation)
        return dataclasses.replace(wide, values=wide.values.astype(FLOAT8))
    if mask is None:
        return _pack(x, axis, implementation)
    return _pack_masked(x, as_mask("pack24", mask, x), axis, implementation)


def as_mask(op: str, mask, x) -> jax.Array:
    """`mask` as an array; raises TypeError or ValueError unless it is bool and of x's shape."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"{op}: mask must be bool, got {mask.dtype.name}. Use mask24, or compare: mask != 0.")
    if mask.shape != x.shape:
        raise ValueError(f"{op}: mask has shape {mask.shape}, x has shape {x.shape}; they must be equal.")
    return mask


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _pack(x, axis, implementation):
    def kernel(x):
        return Packed24(*_ffi.call("s24_pack", packed_types(x, axis), x, trailing=-1 - axis), axis)

    return run("pack24", x.dtype, implementation, kernel, lambda x: reference.pack24(x, axis), x)


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
        return Packed24(*_ffi.call(f"{target}_strided", types, *operands, **attributes), -2)

    def two_passes(*operands):
        *others, x = operands
        x = regroup(x, "strided")
        return Packed24(*_ffi.call(target, types, *others, x, trailing=1, **attributes), -2)

    return jax.lax.platform_dependent(*operands, cuda=one_pass, default=two_passes)


@partial(jax.jit, static_argnames="implementation", inline=True)
def pack24_strided(x, *, implementation: str | None = None) -> Packed24:
    """`pack24(regroup(x, "strided"), -2)` of a matrix (T, n): every four rows T / 4 apart make a group. Not
    differentiable."""
    kernel = partial(in_strides, "s24_pack")
    return run(
        "pack24", x.dtype, implementation, kernel, lambda x: reference.pack24(regroup(x, "strided"), -2), x
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@partial(jax.jit, static_argnums=(2, 3), inline=True)
def _pack_masked(x, mask, axis, implementation):
    def kernel(x, mask):
        return Packed24(
            *_ffi.call("s24_pack_masked", packed_types(x, axis), x, mask, trailing=-1 - axis), axis
        )

    def fallback(x, mask):
        return reference.pack24_masked(x, mask, axis)

    return run("pack24", x.dtype, implementation, kernel, fallback, x, mask)


def _pack_masked_fwd(x, mask, axis, implementation):
    packed = _pack_masked(x, mask, axis, implementation)
    return packed, (packed.metadata, mask)


def _pack_masked_bwd(axis, implementation, residuals, ct):
    metadata, mask = residuals
    dx = _unpack(ct.values, metadata, axis, implementation)
    return jnp.where(mask, dx, jnp.zeros_like(dx)), None


_pack_masked.defvjp(_pack_masked_fwd, _pack_masked_bwd)


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
    """Raises TypeError (dtype) or ValueError if values and metadata do not belong together."""
    patterns.check_dtype(op, "values", packed.dtype, float8=True)
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
        return _ffi.call(
            "s24_unpack", jax.ShapeDtypeStruct(shape, values.dtype), values, metadata, trailing=-1 - axis
        )

    def fallback(values, metadata):
        return reference.unpack24(Packed24(values, metadata, axis))

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
        return _ffi.call("s24_gather", packed_types(x, axis)[0], x, metadata, trailing=-1 - axis)

    return run(
        "gather24", x.dtype, implementation, kernel, lambda x, m: reference.gather24(x, m, axis), x, metadata
    )


def _gather_fwd(x, metadata, axis, implementation):
    return gather24(x, metadata, axis, implementation), metadata


def _gather_bwd(axis, implementation, metadata, ct):
    return _unpack(ct, metadata, axis, implementation), None


gather24.defvjp(_gather_fwd, _gather_bwd)
