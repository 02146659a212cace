"""The squared ReLU of a 2:4 product, in one pass."""

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import hardware
from jax_sparse24.dispatch.decision import Decision
from jax_sparse24.dispatch.operation import Kernel, Operation
from jax_sparse24.ops.compressed24 import Compressed24, compress
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.packed24 import Packed24

# What the kernel takes: multiples of K and of the packed operand's free axis, and the largest size.
DEPTH, ROWS, MOST = 128, 64, 1 << 30


def matmul_squared_relu(
    x_Td: jax.Array,
    w: Packed24 | Compressed24,
    *,
    decision: Decision | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`max(x @ w, 0)^2` of the product in its dtype: the bits of a product and the activation after it.

    The one pass is Hopper's, in bfloat16, for d a multiple of 128 and f of 64; elsewhere it is two steps. It
    is not differentiable. Squares that are subnormal are zeros in the one pass.

    x_Td: (T, d).
    w: (d, f), packed along axis -2, of x's dtype.
    decision: what multiplies in the steps where no implementation is named; None to decide it there.
    implementation: as in `mask24`. None takes the steps unless the one pass was measured to be faster.

    Returns: (T, f) in that dtype."""
    return MATMUL_SQUARED_RELU(x_Td, w, decision=decision, implementation=implementation)


def squared_relu(y: jax.Array) -> jax.Array:
    """`max(y, 0)^2`, as a dense block has it.

    y: any shape.

    Returns: an array of y's shape and dtype."""
    return jnp.square(jax.nn.relu(y))


def _in_steps(x_Td, w, *, decision, implementation):
    decision = decision if implementation is None else None
    return squared_relu(contract(x_Td, w, -1, w.axis, implementation, decision=decision))


def _in_one_pass(x_Td, w, **_):
    compressed = w.compressed if isinstance(w, Compressed24) else compress(w)
    return KERNEL(compressed, x_Td)


def _types(compressed, x_Td) -> jax.ShapeDtypeStruct:
    # Behind R rows of values stand those of their metadata, R / 8 where R is a multiple of 64.
    return jax.ShapeDtypeStruct((x_Td.shape[0], compressed.shape[0] // 9 * 8), x_Td.dtype)


def _fits(_, x_Td, w, **__) -> bool:
    """Whether the kernel takes the operands, on a GPU that has it."""
    (T, d), f = x_Td.shape, w.shape[1]
    if not hardware.runs_code("sm_90a") or w.axis != -2:
        return False
    if {jnp.dtype(x_Td.dtype), jnp.dtype(w.dtype)} != {jnp.dtype(jnp.bfloat16)}:
        return False
    return d % DEPTH == f % ROWS == 0 and max(T, d, f) <= MOST


def _faster(dtype, **_) -> bool:
    """Whether the pass was measured to be faster than cuSPARSELt and XLA's activation."""
    return hardware.faster("matmul_squared_relu", dtype)


KERNEL = Kernel("s24_matmul_squared_relu", _types)
MATMUL_SQUARED_RELU = Operation(
    "matmul_squared_relu", composed=_in_steps, cuda=_in_one_pass, fits=_fits, measured=_faster
)
