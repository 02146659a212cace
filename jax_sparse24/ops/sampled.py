"""A product of dense matrices at the kept entries of a third one: sampled dense-dense (SDDMM)."""

import jax
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import run
from jax_sparse24.ops.packed_vnm import PackedVNM, check_packed_vnm
from jax_sparse24.ops.reference import packed_vnm as reference
from jax_sparse24.ops.reference.bits import compute_format


def sampled_matmul(
    a: jax.Array, b: jax.Array, support: PackedVNM, *, implementation: str | None = None
) -> jax.Array:
    """The values of `a @ b.T` at the kept entries of `support`, without the others.

    a: (R, K); b: (N, K), both float32, bfloat16 or float16. support: V:2:M of shape (R, N), packed along its
    last axis; its values are not read. Sums are float32. A kernel multiplies four of every M columns for each
    block of V rows; the reference makes the whole product. Not differentiable. Returns an array (R, 2N/M)
    of a's dtype: `dataclasses.replace(support, values=...)` is the product cut to that support. Raises
    TypeError (dtypes), ValueError (shapes)."""
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

    def kernel(a, b, *places):
        values = jax.ShapeDtypeStruct((a.shape[0], b.shape[0] // pattern.m * 2), a.dtype)
        return native.call("s24_vnm_sampled", values, a, b, *places, v=pattern.v, m=pattern.m)

    def fallback(a, b, *places):
        sums = compute_format(a.dtype).dtype
        product = lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        return reference.gather_vnm(product, *places, pattern.v, pattern.m, -1).astype(a.dtype)

    places = support.metadata, support.columns
    return run("sampled_matmul", a.dtype, implementation, kernel, fallback, a, b, *places)
