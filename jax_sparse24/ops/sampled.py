"""A product of dense matrices at the kept entries of a third one: sampled dense-dense (SDDMM)."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch import hardware
from jax_sparse24.dispatch.operation import Kernel, Operation
from jax_sparse24.ops.packed_vnm import PackedVNM, check_packed_vnm
from jax_sparse24.ops.reference.bits import compute_format
from jax_sparse24.ops.reference.packed_vnm import gather_vnm


def sampled_matmul(
    a: jax.Array, b: jax.Array, support: PackedVNM, *, implementation: str | None = None
) -> jax.Array:
    """The values of `a @ b.T` at the kept entries of `support`, without the others.

    A kernel multiplies four of every M columns for each block of V rows: on a CPU, and on Hopper in 16-bit
    floats for V of at least 64, K a multiple of 64 and N / M of 32. Elsewhere the whole product is made. Sums
    are float32. Not differentiable.

    a: (R, K); float32, bfloat16 or float16.
    b: (N, K), in the dtype of `a`.
    support: V:2:M of shape (R, N), packed along its last axis; its values are not read.
    implementation: as in `mask24`.

    Returns: (R, 2 N / M) in that dtype; `dataclasses.replace(support, values=...)` is the product cut to that
        support.
    Raises: TypeError (dtypes), ValueError (shapes), RuntimeError (implementation)."""
    a, b = patterns.as_array("sampled_matmul", "a", a), patterns.as_array("sampled_matmul", "b", b)
    patterns.check_dtype("sampled_matmul", "a", a.dtype)
    if a.dtype != b.dtype:
        raise TypeError(f"sampled_matmul: a is {a.dtype} and b is {b.dtype}; cast one of them.")
    pattern = check_packed_vnm("sampled_matmul", support)
    fits = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1] and support.axis == -1
    if not fits or support.shape != (a.shape[0], b.shape[0]):
        raise ValueError(
            f"sampled_matmul: a {a.shape} and b {b.shape} with a support {support.shape} packed along axis "
            f"{support.axis} do not fit; needed are (R, K), (N, K), and (R, N) packed along axis -1."
        )
    options, places = {"v": pattern.v, "m": pattern.m}, (support.metadata, support.columns)
    named = implementation not in (None, "reference")
    if named and not SAMPLED_MATMUL.in_one_pass(a, b, *places, implementation=implementation, **options):
        raise RuntimeError(
            f"sampled_matmul: implementation {implementation!r} cannot run: no kernel of this device takes "
            f"{a.dtype} {a.shape} and {b.shape} with blocks of {pattern}. Use implementation=None or "
            "'reference'."
        )
    return SAMPLED_MATMUL(a, b, *places, **options, implementation=implementation)


def _values(a_RK, b_NK, metadata, columns, v, m):
    return jax.ShapeDtypeStruct((a_RK.shape[0], b_NK.shape[0] // m * 2), a_RK.dtype)


def _reference(a_RK, b_NK, metadata, columns, *, v, m):
    sums = compute_format(a_RK.dtype).dtype
    product_RN = lax.dot_general(a_RK, b_NK, (((1,), (1,)), ((), ())), preferred_element_type=sums)
    return gather_vnm(product_RN, metadata, columns, v, m, -1).astype(a_RK.dtype)


# What Hopper's kernel takes: multiples of V, K and N / M, and the largest b.
V, DEPTH, GROUPS, MOST = 64, 64, 32, (1 << 32) - 1


def _fits(platform, a_RK, b_NK, *_, v, m) -> bool:
    """Whether the platform has a kernel that takes the operands."""
    if platform == "cpu":
        return True
    N, K = b_NK.shape
    if not hardware.runs_code("sm_90a") or jnp.dtype(a_RK.dtype).itemsize != 2:
        return False
    return v % V == K % DEPTH == N // m % GROUPS == 0 and N * K <= MOST


KERNEL = Kernel("s24_vnm_sampled", _values, lambda v, m: {"v": v, "m": m})
SAMPLED_MATMUL = Operation("sampled_matmul", _reference, cpu=KERNEL, cuda=KERNEL, fits=_fits)
