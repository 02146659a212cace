"""Squared ReLU and its 2:4 cut."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.formats import Packed24
from jax_sparse24.ops import _ffi, reference
from jax_sparse24.ops._choose import run
from jax_sparse24.ops.pack import _unpack, packed_types


def squared_relu24(x, axis: int = -1, *, implementation: str | None = None) -> Packed24:
    """`relu(x)**2`, the two largest of every four kept, packed: activation, selection and packing in one pass
    (2503.16672).

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16, float16. The square is taken in float32,
    whose subnormals count as zero, and rounded to x's dtype before the selection, so the result equals
    `pack24(relu(x)**2, axis)`; NaN passes. Differentiable in `x`: `2 relu(x)` at kept positions. Raises like
    `mask24`."""
    x = patterns.as_array("squared_relu24", "x", x)
    return _squared_relu24(x, patterns.check_grouped("squared_relu24", x, axis), implementation)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _squared_relu24(x, axis, implementation):
    def kernel(x):
        return Packed24(
            *_ffi.call("s24_squared_relu_pack", packed_types(x, axis), x, trailing=-1 - axis), axis
        )

    return run(
        "squared_relu24", x.dtype, implementation, kernel, lambda x: reference.squared_relu24(x, axis), x
    )


def _fwd(x, axis, implementation):
    packed = _squared_relu24(x, axis, implementation)
    return packed, (packed.metadata, x)


def _bwd(axis, implementation, residuals, ct):
    metadata, x = residuals
    return (_unpack(ct.values, metadata, axis, implementation) * (2 * jnp.maximum(x, 0)),)


_squared_relu24.defvjp(_fwd, _bwd)
