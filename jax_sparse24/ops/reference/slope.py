"""The gradient of the input of an activation, from what its forward pass saves."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import (
    FORMATS,
    bits,
    compute_format,
    flush,
    is_nan,
    magnitude_bits,
    select,
)


def gives_input(activation, dtype) -> bool:
    """Whether `input_of` finds the input of an activation exactly: of ReLU, and of squared ReLU in bfloat16.

    Squares of float16 underflow, and roots of float32 are not rounded alike everywhere.

    activation: its name.
    dtype: of its input and result."""
    return activation == "relu" or (activation == "squared_relu" and dtype == jnp.bfloat16)


def input_of(y, activation):
    """What an activation was applied to, as far as its slope needs it: zeros where that is not positive.

    A square that is rounded to p bits errs by 2^-p of itself at most. So its root errs by less than half a
    unit in the last of p bits, and rounded it is the number that was squared. Numbers below 2^-63, whose
    squares are subnormal, are taken for zeros.

    y: result of the activation, any shape; an activation and dtype for which `gives_input`.
    activation: its name.

    Returns: an array of y's shape and dtype; NaN where y is."""
    if activation == "relu":
        return y
    own, wide = jnp.finfo(y.dtype), y.astype(jnp.float32)
    root = jnp.where(wide < own.tiny, 0, jnp.sqrt(wide))
    # XLA may leave out a conversion to bfloat16 and back, but not this.
    return lax.reduce_precision(root, own.nexp, own.nmant).astype(y.dtype)


def activation_gradient(saved, dy2, activation):
    """The gradient dY1 of the input of ReLU or squared ReLU, as JAX's derivative of a dense block has it: dY2
    where the input is positive, for squared ReLU times twice the input, and +0 elsewhere.

    Twice the input is a number of the dtype, infinite where that overflows. The product is computed in
    float32, in which subnormals count as zero, with the sign of dY2, and rounded once. A NaN result of a
    product has all bits set but the sign. JAX's derivative differs in subnormals and in the bits of NaN
    alone, in which it differs from one platform to another.

    saved: the result of the activation where `gives_input`, else its input; any shape.
    dy2: the gradient of the result, of the same shape and dtype.
    activation: "relu" or "squared_relu".

    Returns: an array of that shape and dtype."""
    fmt, own = compute_format(saved.dtype), FORMATS[saved.dtype]
    positive = saved.astype(fmt.dtype) >= fmt.tiny()
    if activation == "relu":
        return select(positive, dy2)
    x = input_of(saved, activation) if gives_input(activation, saved.dtype) else saved
    twice = 2 * x.astype(fmt.dtype)
    twice = jnp.where(twice > float(jnp.finfo(saved.dtype).max), jnp.inf, twice)
    product = twice * flush(dy2.astype(fmt.dtype))
    small = magnitude_bits(product) < fmt.uint(1 << fmt.mantissa)
    words = jnp.where(small, bits(dy2) & own.uint(own.sign), bits(product.astype(saved.dtype)))
    words = jnp.where(is_nan(product), own.uint(own.sign - 1), words)
    return lax.bitcast_convert_type(jnp.where(positive, words, 0), saved.dtype)
