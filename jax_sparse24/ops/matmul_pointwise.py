"""2:4 products and an elementwise operation on what they give, in one pass."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import hardware, hopper
from jax_sparse24.dispatch.decision import Decision
from jax_sparse24.dispatch.operation import Kernel, Operation
from jax_sparse24.ops.compressed24 import Compressed24, compress
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.reference.slope import activation_gradient


def matmul_squared_relu(
    x_Td: jax.Array,
    w: Packed24 | Compressed24,
    *,
    decision: Decision | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`max(x @ w, 0)^2` of the product in its dtype: the bits of cuSPARSELt's product and the activation
    after it.

    The one pass is Hopper's, in bfloat16, for d a multiple of 128 and f of 64; elsewhere it is two steps. It
    is not differentiable. Squares that are subnormal are zeros in the one pass.

    x_Td: (T, d).
    w: (d, f), packed along axis -2, of x's dtype.
    decision: what multiplies in the steps where no implementation is named; None to decide it there.
    implementation: as in `mask24`. None takes the steps unless the one pass was measured to be faster.

    Returns: (T, f) in that dtype."""
    return MATMUL_SQUARED_RELU(x_Td, w, decision=decision, implementation=implementation)


def matmul_slope(
    dy3_Td: jax.Array,
    w: Packed24 | Compressed24,
    saved_Tf: jax.Array,
    activation: Literal["relu", "squared_relu"],
    *,
    decision: Decision | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """dY1 of what an activation saved and of dY2 = `dy3 @ w.T` in its dtype: the bits of cuSPARSELt's product
    and of `reference.slope.activation_gradient` after it.

    The one pass is that of `matmul_squared_relu`, and it is not differentiable.

    dy3_Td: (T, d).
    w: (f, d), packed along axis -1, of dy3's dtype.
    saved_Tf: (T, f) of that dtype: the result of the activation where `gives_input`, else its input.
    activation: its name.
    decision, implementation: as in `matmul_squared_relu`.

    Returns: (T, f) in that dtype."""
    options = {"activation": activation, "decision": decision, "implementation": implementation}
    return MATMUL_SLOPE(dy3_Td, w, saved_Tf, **options)


def squared_relu(y: jax.Array) -> jax.Array:
    """`max(y, 0)^2`, as a dense block has it.

    y: any shape.

    Returns: an array of y's shape and dtype."""
    return jnp.square(jax.nn.relu(y))


def _product(x_Td, w, implementation, decision) -> jax.Array:
    decision = decision if implementation is None else None
    return contract(x_Td, w, -1, w.axis, implementation, decision=decision)


def _squares_in_steps(x_Td, w, *, decision, implementation):
    return squared_relu(_product(x_Td, w, implementation, decision))


def _slope_in_steps(dy3_Td, w, saved_Tf, *, activation, decision, implementation):
    return activation_gradient(saved_Tf, _product(dy3_Td, w, implementation, decision), activation)


def _compressed(w) -> jax.Array:
    return w.compressed if isinstance(w, Compressed24) else compress(w)


def _types(compressed, x_Td, *_, **__) -> jax.ShapeDtypeStruct:
    # Behind R rows of values stand those of their metadata, R / 8 where R is a multiple of 64.
    return jax.ShapeDtypeStruct((x_Td.shape[0], compressed.shape[0] // 9 * 8), x_Td.dtype)


def _fits(axis: int, _, x_Td, w, *saved, **__) -> bool:
    """Whether the kernel takes the operands, on a GPU that has it, with w packed along this axis."""
    (T, d), f = x_Td.shape, w.shape[-3 - axis]
    if not hardware.runs_code("sm_90a") or w.axis != axis:
        return False
    if {jnp.dtype(x.dtype) for x in (x_Td, w, *saved)} != {jnp.dtype(jnp.bfloat16)}:
        return False
    return d % hopper.DEPTH == f % hopper.ROWS == 0 < d and max(T, d, f) <= hopper.MOST


def _faster(name: str, dtype, **_) -> bool:
    """Whether the pass was measured to be faster than cuSPARSELt's product and the pass after it."""
    return hardware.faster(name, dtype)


SQUARED_RELU_KERNEL = Kernel("s24_matmul_squared_relu", _types)
MATMUL_SQUARED_RELU = Operation(
    "matmul_squared_relu",
    composed=_squares_in_steps,
    cuda=lambda x_Td, w, **_: SQUARED_RELU_KERNEL(_compressed(w), x_Td),
    fits=partial(_fits, -2),
    measured=partial(_faster, "matmul_squared_relu"),
)
SLOPE_KERNEL = Kernel("s24_matmul_slope", _types, lambda activation: {"relu": activation == "relu"})
MATMUL_SLOPE = Operation(
    "matmul_slope",
    composed=_slope_in_steps,
    cuda=lambda dy3_Td, w, saved_Tf, *, activation, **_: SLOPE_KERNEL(
        _compressed(w), dy3_Td, saved_Tf, activation=activation
    ),
    fits=partial(_fits, -1),
    measured=partial(_faster, "matmul_slope"),
)
