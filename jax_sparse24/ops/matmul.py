"""Products of which one operand may be packed."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.formats import Packed24, PackedVNM
from jax_sparse24.ops import _cusparselt, _ffi, _measured, reference
from jax_sparse24.ops._choose import choose, decide, run
from jax_sparse24.ops.pack import check_packed, gather24
from jax_sparse24.ops.vnm import check_packed_vnm, gather_vnm

PACKED = Packed24, PackedVNM


def gather(x, packed: Packed24 | PackedVNM, implementation: str | None = None) -> jax.Array:
    """The values of `x` at the positions of `packed`: the transpose of `todense`."""
    if isinstance(packed, Packed24):
        return gather24(x, packed.metadata, packed.axis, implementation)
    return gather_vnm(x, packed, implementation=implementation)


def matmul(a, b, *, implementation: str | None = None, preferred_element_type=None) -> jax.Array:
    """`a @ b` for matrices, either of which may be `Packed24` or `PackedVNM` along the contraction axis.

    a: (..., M, K), b: (..., K, N), arrays or packed (`a` packed along axis -1 or `b` along axis -2; not
    both), with equal leading dimensions or none on one side; float32, bfloat16, float16. Sums are float32;
    the result (..., M, N) has the promoted dtype of the operands, or `preferred_element_type`. Differentiable
    in both operands and in packed values; those gradients are dense products (training with sparse backward
    products is `sparse_dot`). Inf or NaN of the dense operand where nothing is kept meets a
    zero when the product runs dense (the result is NaN, as in `x @ w`) and is skipped by the packed kernels.
    Raises TypeError (dtype, both packed), ValueError (shapes, axis of the packing)."""
    for name, operand, side in (("a", a, -1), ("b", b, -2)):
        if isinstance(operand, PACKED) and operand.axis != side:
            pack = "pack24" if isinstance(operand, Packed24) else "pack_vnm"
            size = "" if pack == "pack24" else f"{operand.v}, {operand.m}, "
            raise ValueError(
                f"matmul: {name} of shape {operand.shape} is packed along axis {operand.axis}, but "
                f"the product contracts axis {side}. Pack it with {pack}({name}, {size}axis={side})."
            )
    if isinstance(a, PACKED) and isinstance(b, PACKED):
        raise TypeError(
            "matmul: both operands are packed; sparse hardware takes one. Call todense() on either."
        )
    a, b = _operand("a", a), _operand("b", b)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul: shapes {a.shape} and {b.shape} do not multiply; need (..., M, K) and (..., K, N)."
        )
    if a.ndim > 2 and b.ndim > 2 and a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"matmul: leading dimensions differ: {a.shape} and {b.shape}.")
    if implementation is not None:  # two dense operands are no reason to accept a name that cannot run
        choose("matmul", jnp.promote_types(a.dtype, b.dtype), implementation)
    batch = (-1,) * (max(a.ndim, b.ndim) - 2)
    product = partial(
        contract, a_axis=-1, b_axis=-2, implementation=implementation, out_dtype=preferred_element_type
    )
    for level in reversed(range(len(batch))):
        product = jax.vmap(
            product, in_axes=(0 if a.ndim > 2 + level else None, 0 if b.ndim > 2 + level else None)
        )
    return product(a, b)


def _operand(name: str, x):
    if isinstance(x, PACKED):
        check = check_packed if isinstance(x, Packed24) else check_packed_vnm
        check("matmul", x)
        return x
    return patterns.as_array("matmul", name, x)


def contract(
    a,
    b,
    a_axis: int,
    b_axis: int,
    implementation: str | None = None,
    out_dtype=None,
    algorithm: int | None = None,
) -> jax.Array:
    """Sum over axis `a_axis` of matrix `a` and `b_axis` of matrix `b`; the result is (free axis of a, free
    axis of b).

    Either may be packed along its contracted axis, in which case no operand is transposed in memory (but for
    a dense one beside V:2:M of 16-bit floats on CUDA, if its contracted axis is the last);
    `implementation=None` unpacks it for XLA's dense product unless measurements say that packed is as fast.
    algorithm: of cuSPARSELt, -1 for its own choice; None for what was measured here, or else the best known.
    Accumulates in float32; the result has the promoted dtype of the operands or `out_dtype`. Axes are -1 or
    -2."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    patterns.check_dtype("matmul", "operands", dtype)
    out_dtype = jnp.dtype(dtype if out_dtype is None else out_dtype)
    patterns.check_dtype("matmul", "the result", out_dtype)
    if isinstance(a, PACKED):
        packed, dense, dense_k_last, out_packed_last = a, b, b_axis == -1, False
    elif isinstance(b, PACKED):
        packed, dense, dense_k_last, out_packed_last = b, a, a_axis == -1, True
    else:
        return lax.dot_general(
            a.astype(dtype), b.astype(dtype), (((a.ndim + a_axis,), (b.ndim + b_axis,)), ((), ())),
            preferred_element_type=out_dtype,  # XLA sums in float32 at least, whatever it is
        )  # fmt: skip
    side = "right" if out_packed_last else "left"
    product = (a_axis, b_axis), side, dtype, _shape(a, b, a_axis, b_axis), packed.pattern
    if implementation is None:
        decision = decide(*product, "masked")
        fits = decision.implementation != "cusparselt" or not _library(
            packed.values, dense, dense_k_last, out_packed_last, dtype
        ).misfit(out_dtype)
        if not (decision.packed and fits):
            a, b = (x.todense() if isinstance(x, PACKED) else x for x in (a, b))
            return contract(a, b, a_axis, b_axis, None, out_dtype)
        if decision.implementation == "cusparselt":
            implementation = "cusparselt"
    if implementation == "cusparselt" and algorithm is None:
        algorithm = _measured.algorithm(*product)
    args = (dense_k_last, out_packed_last, out_dtype, implementation, algorithm)
    stored = dataclasses.replace(packed, values=packed.values.astype(dtype), axis=-1)
    return _product(stored, dense.astype(dtype), *args)


def _shape(a, b, a_axis: int, b_axis: int) -> tuple[int, int, int]:
    """(M, K, N)"""
    return a.shape[-3 - a_axis], a.shape[a_axis], b.shape[-3 - b_axis]


def _library(values, dense, dense_k_last: bool, out_packed_last: bool, dtype) -> _cusparselt.Product:
    rows, half = values.shape[-2:]
    return _cusparselt.Product(
        rows, 2 * half, dense.shape[-2 if dense_k_last else -1], dense_k_last, out_packed_last, str(dtype)
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
@partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _product(packed, dense, dense_k_last, out_packed_last, out_dtype, implementation, algorithm):
    rows, n = packed.shape[-2], dense.shape[-2 if dense_k_last else -1]
    out = jax.ShapeDtypeStruct((n, rows) if out_packed_last else (rows, n), out_dtype)
    fast = out_dtype in (jnp.float32, packed.dtype)
    flags = {"dense_k_last": dense_k_last, "out_packed_last": out_packed_last}

    def kernel(packed, dense):
        result = out if fast else jax.ShapeDtypeStruct(out.shape, jnp.float32)
        if isinstance(packed, PackedVNM):
            return vnm(packed, dense, result).astype(out_dtype)
        parts = packed.values, packed.metadata
        return _ffi.call("s24_matmul", result, *parts, dense, **flags).astype(out_dtype)

    def vnm(packed, dense, result):
        def call(dense, **layout):
            parts, blocks = (packed.values, packed.metadata, packed.columns), {"v": packed.v, "m": packed.m}
            return _ffi.call("s24_vnm_matmul", result, *parts, dense, **flags | layout, **blocks)

        if not dense_k_last or packed.dtype == jnp.float32:
            return call(dense)
        # On CUDA rows of (K, N) are gathered whole: transposing them once costs less than to gather elements.
        return lax.platform_dependent(
            dense, cuda=lambda dense: call(dense.T, dense_k_last=False), default=call
        )

    def library(packed, dense):
        product = _library(packed.values, dense, **flags, dtype=packed.dtype)
        why = product.misfit(out_dtype)
        if why:
            raise ValueError(
                f"matmul: cuSPARSELt does not run this product: {why}. Use implementation='ffi'."
            )
        chosen = product.preferred if algorithm is None else algorithm
        workspace, compressed = (jax.ShapeDtypeStruct((n,), jnp.uint8) for n in product.needs(chosen))
        return _ffi.call(
            "s24_cusparselt_matmul",
            (out, compressed, workspace),
            *(packed.values, packed.metadata, dense),
            **flags,
            algorithm=chosen,
        )[0]

    def fallback(packed, dense):
        p = packed.todense(implementation="reference")
        return reference.matmul(p, dense, dense_k_last, out_packed_last, out_dtype)

    if isinstance(packed, PackedVNM):
        return run("vnm_matmul", packed.dtype, implementation, kernel, fallback, packed, dense)
    return run("matmul", packed.dtype, implementation, kernel, fallback, packed, dense, cusparselt=library)


def _product_fwd(packed, dense, *static):
    return _product(packed, dense, *static), (packed, dense)


def _product_bwd(dense_k_last, out_packed_last, out_dtype, implementation, algorithm, residuals, ct):
    packed, dense = residuals
    ct_rn = ct.T if out_packed_last else ct
    weights = packed.todense(implementation=implementation)
    d_dense = contract(weights, ct_rn, -2, -2, out_dtype=dense.dtype)  # (K, N)
    d_weights = contract(ct_rn, dense, -1, -2 if dense_k_last else -1, out_dtype=packed.dtype)  # (R, K)
    d_packed = jax.tree.map(lambda _: None, packed)
    values = gather(d_weights, packed, implementation)
    return dataclasses.replace(d_packed, values=values), d_dense.T if dense_k_last else d_dense


_product.defvjp(_product_fwd, _product_bwd)
