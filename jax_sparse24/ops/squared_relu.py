"""Squared ReLU and its 2:4 cut."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import run
from jax_sparse24.ops.packed24 import Packed24, _unpack, packed_types
from jax_sparse24.ops.reference import packed24 as reference


def squared_relu24(x, axis: int | tuple[int, int] = -1, *, implementation: str | None = None):
    """`relu(x)**2`, the two largest of every four kept, packed: activation, selection and packing in one pass
    (2503.16672).

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16, float16. The square is taken in float32,
    whose subnormals count as zero, and rounded to x's dtype before the selection, so the result equals
    `pack24(relu(x)**2, axis)`; NaN passes. axis: also (-1, -2), for a product along either: a Packed24 of
    each, from one pass over `x` on CUDA. Returns Packed24 or a tuple of them. Differentiable in `x`:
    `2 relu(x)` at kept positions. Raises like `mask24`; ValueError for other pairs of axes."""
    x = patterns.as_array("squared_relu24", "x", x)
    if not (isinstance(axis, tuple) and len(axis) == 2):
        return _squared_relu24(x, patterns.check_grouped("squared_relu24", x, axis), implementation)
    patterns.check_both("squared_relu24", x, axis)
    return _both(x, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _squared_relu24(x, axis, implementation):
    kernel, fallback = (partial(f, axis=axis) for f in (_kernel, _reference))
    return run("squared_relu24", x.dtype, implementation, kernel, fallback, x)


def _kernel(x, axis):
    return Packed24(*native.call("s24_squared_relu_pack", packed_types(x, axis), x, trailing=-1 - axis), axis)


def _reference(x, axis):
    return Packed24(*reference.squared_relu24(x, axis), axis)


def _fwd(x, axis, implementation):
    packed = _squared_relu24(x, axis, implementation)
    return packed, (packed.metadata, x)


def _bwd(axis, implementation, residuals, ct):
    metadata, x = residuals
    return (_unpack(ct.values, metadata, axis, implementation) * (2 * jnp.maximum(x, 0)),)


_squared_relu24.defvjp(_fwd, _bwd)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
@partial(jax.jit, static_argnums=(1,), inline=True)
def _both(x, implementation):
    def kernel(x):
        types = (*packed_types(x, -1), *packed_types(x, -2))
        *rows, values, metadata = native.call("s24_squared_relu_pack_both", types, x)
        return Packed24(*rows, -1), Packed24(values, metadata, -2)

    def fallback(x):
        return _reference(x, -1), _reference(x, -2)

    return run("squared_relu24", x.dtype, implementation, kernel, fallback, x)


def _both_fwd(x, implementation):
    packed = _both(x, implementation)
    return packed, ([p.metadata for p in packed], x)


def _both_bwd(implementation, residuals, cts):
    metadata, x = residuals
    rows, columns = (
        _unpack(ct.values, nibbles, axis, implementation)
        for ct, nibbles, axis in zip(cts, metadata, (-1, -2), strict=True)
    )
    return ((rows + columns) * (2 * jnp.maximum(x, 0)),)


_both.defvjp(_both_fwd, _both_bwd)
