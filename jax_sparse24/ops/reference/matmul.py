"""Products of a matrix that was packed with a dense one."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import compute_format


def matmul(p, dense, dense_k_last, out_packed_last, out_dtype):
    """`P D` with P (..., R, K) unpacked, D (..., K, N) or (..., N, K); the result is (..., R, N) or
    (..., N, R)."""
    # Widened first: XLA:CPU cannot run a bfloat16 product whose float32 result is then transposed.
    accumulator = compute_format(dense.dtype).dtype
    d = (jnp.swapaxes(dense, -1, -2) if dense_k_last else dense).astype(accumulator)
    out = jnp.matmul(p.astype(accumulator), d, precision=lax.Precision.HIGHEST)
    return (jnp.swapaxes(out, -1, -2) if out_packed_last else out).astype(out_dtype)
