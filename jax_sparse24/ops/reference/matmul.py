"""Products of a matrix that was packed with a dense one."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import compute_format


def matmul(p, dense, dense_k_last, out_packed_last, out_dtype):
    """The product of P, a matrix that was packed and is an array again, with a dense matrix D.

    p: (..., R, K).
    dense: (..., N, K) if `dense_k_last`, else (..., K, N).
    out_packed_last: whether the result is (..., N, R), and not (..., R, N).
    out_dtype: of the result."""
    sums = compute_format(dense.dtype).dtype
    d = jnp.swapaxes(dense, -1, -2) if dense_k_last else dense

    def multiply(p, d):
        return jnp.matmul(p, d, precision=lax.Precision.HIGHEST, preferred_element_type=sums)

    def widened(p, d):
        return multiply(p.astype(sums), d.astype(sums))

    # Products of 16 bits are exact in float32, so that a GPU need not widen them. XLA:CPU cannot run a
    # bfloat16 product whose float32 result is then transposed.
    out = lax.platform_dependent(p, d, cpu=widened, default=multiply)
    return (jnp.swapaxes(out, -1, -2) if out_packed_last else out).astype(out_dtype)
