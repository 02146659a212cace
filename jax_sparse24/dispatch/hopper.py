"""Our kernels for Hopper of 2:4 products: the sizes that they take, and which products the one without an
elementwise operation multiplies."""

import math

import jax.numpy as jnp

from jax_sparse24.dispatch import hardware
from jax_sparse24.dispatch.product import Product
from jax_sparse24.dispatch.table import BORROWED

DTYPES = "bfloat16", "float16"
# In all products in which both were measured, the kernel took at most OF_LIBRARY times as long as cuSPARSELt,
# and the library at most LIBRARY times as long as the kernel. That was on one GPU, whose name this is
# (experiments/benchmarks/results/probe/nvidia-h200_without_library_2026-11-29.md).
OF_LIBRARY, LIBRARY, MEASURED_ON = 1.12, 1.4, "nvidia-h200"
TILE = 256  # rows and columns of a tile of the result
ROWS, DEPTH = 64, 128  # of which the sizes of the packed operand must be multiples
MULTIPLES = {"rows of the packed operand": ROWS, "K": DEPTH, "columns of the dense operand": 8}
MOST = 1 << 30  # of each size
# Bytes in which clusters of blocks leave sums for each other: 72 clusters, for each two tiles of 256 x 256
# float32, the signals of 16 warps, and a number.
WORKSPACE = 72 * 2 * (256 * 256 + 16 + 1) * 4


def unfit(product: Product) -> str:
    """Why the kernel multiplies a product on no GPU, or an empty string.

    product: of which one operand is packed."""
    if product.pattern != "2:4":
        return "it is not 2:4"
    if str(product.dtype) not in DTYPES or product.out_dtype not in (None, product.dtype):
        out_dtype = jnp.dtype(product.out_dtype or product.dtype)
        return f"operands and result are all bfloat16 or all float16, not {product.dtype} and {out_dtype}"
    (M, K, N), right = product.shape, product.side == "right"
    sizes = (N, K, M) if right else (M, K, N)
    for size, (what, multiple) in zip(sizes, MULTIPLES.items(), strict=True):
        if size % multiple or not 0 < size <= MOST:
            return f"{what} must be a multiple of {multiple} from {multiple} to {MOST}, got {size}"
    return ""


def misfit(product: Product) -> str:
    """Why the kernel cannot multiply a product here, or an empty string.

    product: of which one operand is packed."""
    return unfit(product) or ("" if hardware.runs_code("sm_90a") else "the kernel is Hopper's")


def gain_to_stand_in(product: Product) -> float:
    """The least `table.Measured.gain` of cuSPARSELt's product with which the kernel takes its place where the
    library is missing.

    product: one that the kernel multiplies here.

    Returns: a number from 1 on; infinity for a result that is not made of whole tiles, since such products
        were not compared with the library's."""
    (M, _, N) = product.shape
    if M % TILE or N % TILE:
        return math.inf
    return OF_LIBRARY * (1.0 if hardware.hardware().name == MEASURED_ON else BORROWED)
