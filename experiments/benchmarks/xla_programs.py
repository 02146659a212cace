"""XLA's dense programs as a good user has them compiled, beside the default: what sparsity must beat."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Variant(NamedTuple):
    """XLA's options for the program, and the dtype in which it computes, if that is another one."""

    options: dict
    dtype: str | None = None


CUBLASLT = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True}
EXHAUSTIVE = {"xla_gpu_exhaustive_tiling_search": True}


def variants(dtype, exhaustive: bool = False) -> dict[str, Variant]:
    """Name -> dense programs besides XLA's default, which on a GPU has tried Triton's kernels and cuBLAS's
    (autotuning level 4).

    On a GPU "cublasLt": products by cuBLASLt, which XLA does not try by default; exhaustive: also every
    tiling of Triton's kernels, which takes minutes to compile. On a CPU, for 16-bit floats, "float32": XLA
    computes them no faster than float32, so who wants speed there computes in float32."""
    if jax.default_backend() == "gpu":
        found = {"cublasLt": Variant(CUBLASLT)}
        return found | ({"exhaustive": Variant(EXHAUSTIVE)} if exhaustive else {})
    if jnp.dtype(dtype).itemsize == 2:
        return {"float32": Variant({}, "float32")}
    return {}


def cast(variant: Variant, args) -> list:
    """The arguments in the variant's dtype."""
    return [x if variant.dtype is None else x.astype(variant.dtype) for x in args]
