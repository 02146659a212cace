"""Gradients that follow from the values of an activation."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import FORMATS, bits, compute_format, flush, is_nan, magnitude_bits

# Activations whose derivative follows from their value, so that their input need not be saved.
SLOPES = "squared_relu", "relu"


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


def sloped(y, dy, activation):
    """The gradient of the input of an activation: its slope times the gradient `dy` of its result.

    The product is taken in float32 and rounded once. Results below 2^-125, twice the least normal float32,
    are zeros with the sign of dy, because hardware disagrees on what is subnormal just above the least normal
    number. So are those of squared ReLU where y < 2^-100. A NaN result has all bits set but the sign.

    y: result of the activation, not negative, any shape.
    dy: y's shape and dtype.
    activation: one of SLOPES.

    Returns: an array of y's shape and dtype."""
    fmt, own = compute_format(y.dtype), FORMATS[y.dtype]
    value, given = y.astype(fmt.dtype), flush(dy.astype(fmt.dtype))
    if activation == "relu":
        slope = jnp.where(value >= fmt.tiny(), fmt.dtype.type(1), 0)
    else:
        slope = jnp.where(value < 2.0**-100, 0, 2 * jnp.sqrt(value))
    product = slope * given
    small = magnitude_bits(product) < fmt.uint(2 << fmt.mantissa)
    words = jnp.where(small, bits(dy) & own.uint(own.sign), bits(product.astype(y.dtype)))
    return lax.bitcast_convert_type(jnp.where(is_nan(product), own.uint(own.sign - 1), words), y.dtype)
