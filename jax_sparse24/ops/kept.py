"""What follows from packed activations that were kept for the backward pass (2503.16672)."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24.formats import Packed24
from jax_sparse24.ops import _ffi, reference
from jax_sparse24.ops._choose import run
from jax_sparse24.ops._groups import bits
from jax_sparse24.ops.pack import gather24, pack24, pack24_strided, packed_types
from jax_sparse24.ops.tokens import non_zeros, rank_of, regroup

TILE = 128  # tokens that a CUDA kernel takes at a time


class Along(NamedTuple):
    """An array (T, f), of which only a part is kept along f, as products that contract tokens take it: cut to
    the two largest of every four tokens, packed along axis -2; and the features (n, T) that stay dense, in
    the same order of tokens."""

    packed: Packed24
    dense: jax.Array


def in_tiles(packed: Packed24) -> bool:
    """Whether CUDA's kernels take a matrix (T, f) packed along f."""
    T, f = packed.shape
    return packed.dtype.itemsize == 2 and T % TILE == 0 and f % 8 == 0


def _run(op: str, kept: Packed24, implementation, one_pass, composed, *args):
    """The kernel of CUDA for whole tiles; elsewhere what `composed(implementation, ...)` makes of others."""
    several = partial(composed, implementation)
    fallback = partial(composed, "reference")

    def kernel(*args):
        return lax.platform_dependent(*args, cuda=one_pass, default=several)

    return run(op, kept.dtype, implementation, kernel if in_tiles(kept) else several, fallback, kept, *args)


@partial(jax.jit, static_argnames="implementation", inline=True)
def count_kept(kept: Packed24, *, implementation: str | None = None) -> jax.Array:
    """int32 (f,): how many elements of each feature of a matrix (T, f), packed along f, are not zero."""

    def one_pass(kept):
        T, f = kept.shape
        parts = jax.ShapeDtypeStruct((T // TILE, f), jnp.uint8)
        parts = _ffi.call("s24_count_kept", parts, kept.values, kept.metadata)
        return jnp.sum(parts, axis=0, dtype=jnp.int32)

    def composed(implementation, kept):
        return non_zeros(kept.todense(implementation=implementation))

    return _run("count_kept", kept, implementation, one_pass, composed)


@partial(jax.jit, static_argnames=("activation", "tokens", "implementation"), inline=True)
def kept_backward(
    kept: Packed24,
    dy2: jax.Array,
    features: jax.Array,
    activation: str,
    tokens: str = "strided",
    *,
    implementation: str | None = None,
) -> tuple[Packed24, Along, Along]:
    """From packed values Y2 of an activation and the gradient dY2: dY1 at the places of Y2, packed as it is,
    and Y2 and dY1 along tokens; in one pass over dY2 on CUDA, for whole tiles of 16-bit floats.

    kept: (T, f), packed along f. dy2: (T, f). features: int32 (n,), ascending, those that stay dense.
    activation: of `reference.SLOPES`. tokens: "consecutive" or "strided", as `regroup` has it; T a multiple
    of 4. Not differentiable."""

    def one_pass(kept, dy2, features):
        n, ranks = features.size, rank_of(features, dy2.shape[1])
        along = (*packed_types(dy2, -2), jax.ShapeDtypeStruct((n, dy2.shape[0]), dy2.dtype))
        dy1, *parts = _ffi.call(
            "s24_kept_backward",
            (packed_types(dy2, -1)[0], *along, *along),
            *(kept.values, kept.metadata, dy2, ranks),
            relu=activation == "relu",
            strided=tokens == "strided",
        )
        y2, dy1_along = (
            Along(Packed24(values, metadata, -2), dense) for values, metadata, dense in (parts[:3], parts[3:])
        )
        return dataclasses.replace(kept, values=dy1), y2, dy1_along

    def composed(implementation, kept, dy2, features):
        dy2 = gather24(dy2, kept.metadata, -1, implementation)
        dy1 = dataclasses.replace(kept, values=reference.sloped(kept.values, dy2, activation))
        pack = pack24_strided if tokens == "strided" else partial(pack24, axis=-2)

        def along(x):
            dense = x.todense(implementation=implementation)
            few = jnp.take(bits(dense), features, axis=1, mode="clip")  # of floats, a CPU would change NaN
            # Gathered and moved in one pass, a GPU would read single elements.
            few = lax.bitcast_convert_type(regroup(lax.optimization_barrier(few), tokens), dense.dtype)
            return Along(pack(dense, implementation=implementation), few.T)

        return dy1, along(kept), along(dy1)

    return _run("kept_backward", kept, implementation, one_pass, composed, dy2, features)
