"""Packed activations that are saved for the backward pass, and what follows from them (2503.16672)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24.dispatch.operation import Kernel, Operation
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.features import non_zeros, rank_of
from jax_sparse24.ops.matmul import with_values
from jax_sparse24.ops.order import regroup
from jax_sparse24.ops.packed24 import Packed24, gather24, pack24, pack24_strided, squared_relu24
from jax_sparse24.ops.reference.bits import bits
from jax_sparse24.ops.reference.saved import sloped

TILE = 128  # tokens that a CUDA kernel takes at a time


class Along(NamedTuple):
    """A saved activation (T, f), regrouped for the products that contract tokens.

    packed: the two largest of every four tokens, packed along axis -2.
    dense: the features (n, T) that stay dense, in the same order of tokens."""

    packed: Packed24 | Compressed24
    dense: jax.Array


def in_tiles(x: jax.Array | Packed24 | Compressed24) -> bool:
    """Whether CUDA's kernels take a matrix (T, f), to be packed or packed along f."""
    T, f = x.shape
    return x.dtype.itemsize == 2 and T % TILE == 0 and f % 8 == 0


def _form(compressed: bool) -> type[Packed24] | type[Compressed24]:
    return Compressed24 if compressed else Packed24


def pack_counted(
    x: jax.Array, squared: bool, *, compressed: bool = False, implementation: str | None = None
) -> tuple[Packed24 | Compressed24, jax.Array]:
    """A packed activation, and how many elements of each feature are not zero in it; in one pass where
    `in_tiles(x)`, on CUDA. Not differentiable.

    x: (T, f), f a multiple of 4; float32, bfloat16 or float16.
    squared: whether `squared_relu24(x, -1)` is packed, or `pack24(x, -1)`.
    compressed: whether it is a `Compressed24`, on CUDA.
    implementation: as in `mask24`.

    Returns: the packed array, and int32 (f,)."""
    if compressed and in_tiles(x):
        return _counted_in_one_pass(x, squared=squared, compressed=True)
    return PACK_COUNTED(x, squared=squared, compressed=compressed, implementation=implementation)


def _counted_types(x, squared, compressed):
    T, f = x.shape
    return *_form(compressed).types(x, -1), jax.ShapeDtypeStruct((T // TILE, f), jnp.uint8)


@partial(jax.jit, static_argnames=("squared", "compressed"), inline=True)
def _counted_in_one_pass(x, *, squared, compressed):
    *packed, counts = COUNTED_KERNEL(x, squared=squared, compressed=compressed)
    return _form(compressed)(*packed, -1), jnp.sum(counts, axis=0, dtype=jnp.int32)


def _counted_in_steps(x, *, squared, compressed, implementation):
    if compressed:
        packed = compressed24.squared_relu(x, -1) if squared else compressed24.pack(x, -1)
    else:
        packed = (squared_relu24 if squared else pack24)(x, -1, implementation=implementation)
    return packed, non_zeros(packed.todense(implementation=implementation))


COUNTED_KERNEL = Kernel("s24_pack_counted", _counted_types, lambda squared, compressed: {"squared": squared})
PACK_COUNTED = Operation(
    "pack24",
    composed=_counted_in_steps,
    cuda=_counted_in_one_pass,
    fits=lambda x, **_: in_tiles(x),
)


def saved_backward(
    saved: Packed24 | Compressed24,
    dy2: jax.Array,
    features: jax.Array,
    activation: str,
    tokens: str = "strided",
    *,
    compressed: tuple[bool, bool] = (False, False),
    implementation: str | None = None,
) -> tuple[Packed24 | Compressed24, Along, Along]:
    """From packed values Y2 of an activation and the gradient dY2: dY1 at the places of Y2, packed as it is,
    and Y2 and dY1 along tokens; in one pass over dY2 on CUDA, for whole tiles of 16-bit floats. Not
    differentiable.

    saved: (T, f), packed along f; T a multiple of 4.
    dy2: (T, f).
    features: int32 (n,), ascending, those that stay dense.
    activation: of `reference.saved.SLOPES`.
    tokens: "consecutive" or "strided", as `regroup` has it.
    compressed: whether Y2 and dY1 along tokens are to be `Compressed24`, on CUDA in whole tiles.
    implementation: as in `mask24`.

    Returns: dY1 in the form of `saved`; Y2 along tokens; dY1 along tokens."""
    operands = saved, dy2, features
    options = {"activation": activation, "tokens": tokens, "compressed": compressed}
    if in_tiles(saved) and any(compressed):
        return _backward_in_one_pass(*operands, **options)
    return SAVED_BACKWARD(*operands, **options, implementation=implementation)


def _backward_types(values, metadata, dy2, ranks, *, features, compressed, **_):
    few = jax.ShapeDtypeStruct((features, dy2.shape[0]), dy2.dtype)
    y2, dy1 = ((*_form(asked).types(dy2, -2), few) for asked in compressed)
    return jax.ShapeDtypeStruct(values.shape, dy2.dtype), *y2, *dy1


def _backward_flags(activation, tokens, **_):
    return {"relu": activation == "relu", "strided": tokens == "strided"}


@partial(jax.jit, static_argnames=("activation", "tokens", "compressed"), inline=True)
def _backward_in_one_pass(saved, dy2, features, *, activation, tokens, compressed):
    ranks = rank_of(features, dy2.shape[1])
    # The array that begins with the values.
    stored = saved.compressed if isinstance(saved, Compressed24) else saved.values
    options = {"activation": activation, "tokens": tokens, "compressed": compressed}
    operands = stored, saved.metadata, dy2, ranks
    dy1, *parts = BACKWARD_KERNEL(*operands, features=features.size, **options)
    y2, dy1_along = (
        Along(_form(asked)(values, metadata, -2), dense)
        for asked, (values, metadata, dense) in zip(compressed, (parts[:3], parts[3:]), strict=True)
    )
    return type(saved)(dy1, saved.metadata, saved.axis), y2, dy1_along


def _backward_in_steps(saved, dy2, features, *, activation, tokens, compressed, implementation):
    dy2 = gather24(dy2, saved.metadata, -1, implementation)
    dy1 = with_values(saved, sloped(saved.values, dy2, activation))
    pack = pack24_strided if tokens == "strided" else partial(pack24, axis=-2)

    def along(x):
        dense = x.todense(implementation=implementation)
        few = jnp.take(bits(dense), features, axis=1, mode="clip")  # of floats, a CPU would change NaN
        # Gathered and moved in one pass, a GPU would read single elements.
        few = lax.bitcast_convert_type(regroup(lax.optimization_barrier(few), tokens), dense.dtype)
        return Along(pack(dense, implementation=implementation), few.T)

    return dy1, along(saved), along(dy1)


BACKWARD_KERNEL = Kernel("s24_saved_backward", _backward_types, _backward_flags)
SAVED_BACKWARD = Operation(
    "saved_backward",
    composed=_backward_in_steps,
    cuda=_backward_in_one_pass,
    fits=lambda saved, *_, **__: in_tiles(saved),
)
