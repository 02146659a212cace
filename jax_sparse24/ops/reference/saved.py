"""Gradients that follow from the values of an activation."""

import jax.numpy as jnp
from jax import lax

from jax_sparse24.ops.reference.bits import FORMATS, bits, compute_format, flush, is_nan, magnitude_bits

# Activations whose derivative follows from their value, so that their input need not be saved.
SLOPES = "squared_relu", "relu"


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
