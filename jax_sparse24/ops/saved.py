"""Packed activations that are saved for the backward pass, and the gradients that are made from them.

Source: 2503.16672."""

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


class AlongTokens(NamedTuple):
    """A saved activation (T, f), regrouped for the products that contract tokens.

    packed: the two largest of every four tokens, packed along axis -2.
    dense: the features (k, T) that stay dense, in the same order of tokens."""

    packed: Packed24 | Compressed24
    dense: jax.Array


def in_tiles(x_Tf: jax.Array | Packed24 | Compressed24) -> bool:
    """Whether CUDA's kernels of this file take a matrix.

    x_Tf: the matrix, which is to be packed, or is packed along f."""
    T, f = x_Tf.shape
    return x_Tf.dtype.itemsize == 2 and T % TILE == 0 and f % 8 == 0 and T * f < 2**35


def _form(compressed: bool) -> type[Packed24] | type[Compressed24]:
    return Compressed24 if compressed else Packed24


def pack_counted(
    x_Tf: jax.Array, squared: bool, *, compressed: bool = False, implementation: str | None = None
) -> tuple[Packed24 | Compressed24, jax.Array]:
    """Packs an activation along features and counts the elements of each feature that are not zero in it.

    On CUDA it takes one pass if `in_tiles(x_Tf)`. It is not differentiable.

    x_Tf: (T, f), f a multiple of 4; float32, bfloat16 or float16.
    squared: True packs `squared_relu24(x_Tf, -1)`, False packs `pack24(x_Tf, -1)`.
    compressed: whether the result is a `Compressed24`, on CUDA only.
    implementation: as in `mask24`.

    Returns: the packed array, and the counts, int32 (f,)."""
    return PACK_COUNTED(x_Tf, squared=squared, compressed=compressed, implementation=implementation)


def _counted_types(x_Tf, squared, compressed):
    T, f = x_Tf.shape
    return *_form(compressed).types(x_Tf, -1), jax.ShapeDtypeStruct((T // TILE, f), jnp.uint8)


@partial(jax.jit, static_argnames=("squared", "compressed"), inline=True)
def _counted_in_one_pass(x_Tf, *, squared, compressed):
    *packed, counts_of_tiles = COUNTED_KERNEL(x_Tf, squared=squared, compressed=compressed)
    return _form(compressed)(*packed, -1), jnp.sum(counts_of_tiles, axis=0, dtype=jnp.int32)


def _counted_in_steps(x_Tf, *, squared, compressed, implementation):
    if compressed:
        packed = compressed24.squared_relu(x_Tf, -1) if squared else compressed24.pack(x_Tf, -1)
    else:
        packed = (squared_relu24 if squared else pack24)(x_Tf, -1, implementation=implementation)
    return packed, non_zeros(packed.todense(implementation=implementation))


COUNTED_KERNEL = Kernel("s24_pack_counted", _counted_types, lambda squared, compressed: {"squared": squared})
PACK_COUNTED = Operation(
    "pack24",
    composed=_counted_in_steps,
    cuda=_counted_in_one_pass,
    fits=lambda _, x_Tf, **__: in_tiles(x_Tf),
)


def saved_backward(
    saved: Packed24 | Compressed24,
    dy2_Tf: jax.Array,
    features_k: jax.Array,
    activation: str,
    tokens: str = "strided",
    *,
    compressed: tuple[bool, bool] = (False, False),
    implementation: str | None = None,
) -> tuple[Packed24 | Compressed24, AlongTokens, AlongTokens]:
    """The backward pass of an activation of which only the packed values Y2 were saved.

    It makes dY1 at the positions of Y2, and regroups Y2 and dY1 along tokens. It takes one pass over dY2, on
    CUDA for whole tiles of 16-bit floats. It is not differentiable.

    saved: Y2 (T, f), packed along f; T a multiple of 4.
    dy2_Tf: the gradient dY2, in the dtype of `saved`.
    features_k: int32 (k,), ascending, the features that stay dense.
    activation: one of `reference.saved.SLOPES`.
    tokens: "consecutive" or "strided", as `regroup` has it.
    compressed: whether Y2 and dY1 along tokens are to be `Compressed24`, on CUDA only.
    implementation: as in `mask24`.

    Returns: dY1 in the form of `saved`; Y2 along tokens; dY1 along tokens."""
    operands = saved, dy2_Tf, features_k
    options = {"activation": activation, "tokens": tokens, "compressed": compressed}
    return SAVED_BACKWARD(*operands, **options, implementation=implementation)


def _backward_types(values, metadata, dy2_Tf, ranks_f, *, features, compressed, **_):
    dense = jax.ShapeDtypeStruct((features, dy2_Tf.shape[0]), dy2_Tf.dtype)
    y2, dy1 = ((*_form(asked).types(dy2_Tf, -2), dense) for asked in compressed)
    return jax.ShapeDtypeStruct(values.shape, dy2_Tf.dtype), *y2, *dy1


def _backward_flags(activation, tokens, **_):
    return {"relu": activation == "relu", "strided": tokens == "strided"}


@partial(jax.jit, static_argnames=("activation", "tokens", "compressed"), inline=True)
def _backward_in_one_pass(saved, dy2_Tf, features_k, *, activation, tokens, compressed):
    ranks_f = rank_of(features_k, dy2_Tf.shape[1])
    # The array that begins with the values.
    stored = saved.compressed if isinstance(saved, Compressed24) else saved.values
    options = {"activation": activation, "tokens": tokens, "compressed": compressed}
    operands = stored, saved.metadata, dy2_Tf, ranks_f
    dy1, *parts = BACKWARD_KERNEL(*operands, features=features_k.size, **options)
    y2, dy1_along = (
        AlongTokens(_form(asked)(values, metadata, -2), dense_kT)
        for asked, (values, metadata, dense_kT) in zip(compressed, (parts[:3], parts[3:]), strict=True)
    )
    return type(saved)(dy1, saved.metadata, saved.axis), y2, dy1_along


def _backward_in_steps(saved, dy2_Tf, features_k, *, activation, tokens, compressed, implementation):
    dy2 = gather24(dy2_Tf, saved.metadata, -1, implementation)  # at the positions of Y2
    dy1 = with_values(saved, sloped(saved.values, dy2, activation))
    strided = tokens == "strided"
    pack = pack24_strided if strided else partial(pack24, axis=-2)

    def along_tokens(packed, compressed):
        x_Tf = packed.todense(implementation=implementation)
        words_Tk = jnp.take(bits(x_Tf), features_k, axis=1, mode="clip")  # of floats, a CPU would change NaN
        # Gathered and moved in one pass, a GPU would read single elements.
        words_Tk = regroup(lax.optimization_barrier(words_Tk), tokens)
        dense_kT = lax.bitcast_convert_type(words_Tk, x_Tf.dtype).T
        if compressed:
            return AlongTokens(compressed24.pack(x_Tf, -2, strided=strided), dense_kT)
        return AlongTokens(pack(x_Tf, implementation=implementation), dense_kT)

    return dy1, along_tokens(saved, compressed[0]), along_tokens(dy1, compressed[1])


def _backward_fits(platform, saved, *_, compressed, **__):
    if platform == "cuda":
        return in_tiles(saved)
    return isinstance(saved, Packed24) and not any(compressed)


BACKWARD_KERNEL = Kernel("s24_saved_backward", _backward_types, _backward_flags)
SAVED_BACKWARD = Operation(
    "saved_backward",
    composed=_backward_in_steps,
    cpu=_backward_in_one_pass,
    cuda=_backward_in_one_pass,
    fits=_backward_fits,
)
