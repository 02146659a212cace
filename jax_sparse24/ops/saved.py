"""Packed activations that are saved for the backward pass, and what follows from them (2503.16672)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import run
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.compressed24 import Compressed24, compressed_types
from jax_sparse24.ops.features import non_zeros, rank_of
from jax_sparse24.ops.matmul import with_values
from jax_sparse24.ops.order import collect, regroup
from jax_sparse24.ops.packed24 import Packed24, gather24, pack24, pack24_strided, packed_types, squared_relu24
from jax_sparse24.ops.packed_vnm import PackedVNM, check_packed_vnm, pack_vnm, packed_vnm_types
from jax_sparse24.ops.reference.bits import bits
from jax_sparse24.ops.reference.packed24 import squared_relu
from jax_sparse24.ops.reference.saved import sloped
from jax_sparse24.patterns import VNM

TILE = 128  # tokens that a CUDA kernel takes at a time
MOST_TILES = 65535  # along tokens


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


def _stored(packed: Packed24 | Compressed24) -> jax.Array:
    """The array that begins with the values."""
    return packed.compressed if isinstance(packed, Compressed24) else packed.values


def _run(op: str, dtype, fits: bool, implementation, one_pass, composed, *args):
    """A kernel of CUDA for what `fits` it; elsewhere what `composed(implementation, ...)` makes of others."""
    several = partial(composed, implementation)
    fallback = partial(composed, "reference")

    def kernel(*args):
        return lax.platform_dependent(*args, cuda=one_pass, default=several)

    return run(op, dtype, implementation, kernel if fits else several, fallback, *args)


@partial(jax.jit, static_argnames=("squared", "compressed", "implementation"), inline=True)
def pack_counted(
    x: jax.Array, squared: bool, *, compressed: bool = False, implementation: str | None = None
) -> tuple[Packed24 | Compressed24, jax.Array]:
    """`squared_relu24(x, -1)` if squared, else `pack24(x, -1)`, and how many elements of each feature are not
    zero in it, int32 (f,); in one pass where `in_tiles(x)`, on CUDA.

    x: (T, f), f a multiple of 4; float32, bfloat16, float16. compressed: a `Compressed24`, on CUDA. Not
    differentiable."""

    def one_pass(x):
        T, f = x.shape
        types = compressed_types(x, -1) if compressed else packed_types(x, -1)
        parts = jax.ShapeDtypeStruct((T // TILE, f), jnp.uint8)
        *packed, parts = native.call("s24_pack_counted", (*types, parts), x, squared=squared)
        form = Compressed24 if compressed else Packed24
        return form(*packed, -1), jnp.sum(parts, axis=0, dtype=jnp.int32)

    def composed(implementation, x):
        if compressed:
            packed = compressed24.squared_relu(x, -1) if squared else compressed24.pack(x, -1)
        else:
            packed = (squared_relu24 if squared else pack24)(x, -1, implementation=implementation)
        return packed, non_zeros(packed.todense(implementation=implementation))

    if compressed and in_tiles(x):
        return one_pass(x)
    return _run("pack24", x.dtype, in_tiles(x), implementation, one_pass, composed, x)


@partial(jax.jit, static_argnames=("activation", "tokens", "compressed", "implementation"), inline=True)
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
    and Y2 and dY1 along tokens; in one pass over dY2 on CUDA, for whole tiles of 16-bit floats.

    saved: (T, f), packed along f. dy2: (T, f). features: int32 (n,), ascending, those that stay dense.
    activation: of `reference.saved.SLOPES`. tokens: "consecutive" or "strided", as `regroup` has it; T a
    multiple of 4. compressed: whether Y2 and dY1 along tokens are to be `Compressed24`, on CUDA in whole
    tiles; dY1 has the form of `saved`. Not differentiable."""

    def one_pass(saved, dy2, features):
        ranks = rank_of(features, dy2.shape[1])
        few = jax.ShapeDtypeStruct((features.size, dy2.shape[0]), dy2.dtype)
        forms = [
            (Compressed24, compressed_types) if asked else (Packed24, packed_types) for asked in compressed
        ]
        along = [(*types(dy2, -2), few) for _, types in forms]
        dy1, *parts = native.call(
            "s24_saved_backward",
            (jax.ShapeDtypeStruct(_stored(saved).shape, dy2.dtype), *along[0], *along[1]),
            *(_stored(saved), saved.metadata, dy2, ranks),
            relu=activation == "relu",
            strided=tokens == "strided",
        )
        y2, dy1_along = (
            Along(form(values, metadata, -2), dense)
            for (form, _), (values, metadata, dense) in zip(forms, (parts[:3], parts[3:]), strict=True)
        )
        return type(saved)(dy1, saved.metadata, saved.axis), y2, dy1_along

    def composed(implementation, saved, dy2, features):
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

    if in_tiles(saved) and any(compressed):
        return one_pass(saved, dy2, features)
    args = saved, dy2, features
    return _run("saved_backward", saved.dtype, in_tiles(saved), implementation, one_pass, composed, *args)


@partial(jax.jit, static_argnames=("v", "m", "implementation"), inline=True)
def squared_relu_vnm(x: jax.Array, v: int, m: int, *, implementation: str | None = None) -> PackedVNM:
    """`pack_vnm(relu(x)**2, v, m)` of x (T, f), with the square of `squared_relu24`; in one pass on CUDA, for
    16-bit floats in whole tiles. Not differentiable. Raises like `pack_vnm`."""
    (T, f), pattern = x.shape, VNM(v, m)

    def one_pass(x):
        return PackedVNM(
            *native.call("s24_vnm_squared_relu", packed_vnm_types(x, pattern, -1), x, v=v, m=m), v, m, -1
        )

    def composed(implementation, x):
        return pack_vnm(squared_relu(x), v, m, implementation=implementation)

    fits = x.dtype.itemsize == 2 and _tiled(v, m) and T % v == 0 and f % TILE == 0 and T // v <= MOST_TILES
    return _run("pack_vnm", x.dtype, fits, implementation, one_pass, composed, x)


def _tiled(v: int, m: int) -> bool:
    return v in (64, 128, 256) and m in (8, 16, 32)


def in_vnm_tiles(packed: PackedVNM, collected: bool) -> bool:
    """Whether CUDA's kernel takes activations (T, f), packed along f, to be packed along T."""
    (T, f), v, m = packed.shape, packed.v, packed.m
    sizes = packed.dtype.itemsize == 2 and _tiled(v, m)
    features = f // m % v == 0 if collected else f % v == 0 and v // m >= 4
    return sizes and T % TILE == 0 and T % v == 0 and T // TILE <= MOST_TILES and features


@partial(jax.jit, static_argnames=("tokens", "collected", "exact", "implementation"), inline=True)
def repack_vnm(
    packed: PackedVNM,
    tokens: str = "strided",
    collected: bool = False,
    exact: bool = False,
    *,
    implementation: str | None = None,
) -> PackedVNM:
    """V:N:M activations (T, f), packed along f, cut again to the same pattern along T, in another order:
    `pack_vnm(x, v, m, axis=-2)` of `x = packed.todense()`, after `regroup(x, tokens, m)` and, if collected,
    `collect(x, f // m, -1)`. In one pass, without that array, where `in_vnm_tiles` on CUDA.

    tokens: "consecutive" or "strided"; T and f multiples of v and m. exact: as `pack_vnm`. Not
    differentiable. Raises TypeError or ValueError for arrays that do not belong together."""
    check_packed_vnm("repack_vnm", packed)
    pattern = packed.v, packed.m

    def composed(implementation, packed):
        x = regroup(packed.todense(implementation=implementation), tokens, packed.m)
        x = collect(x, x.shape[-1] // packed.m, -1) if collected else x
        return pack_vnm(x, *pattern, axis=-2, exact=exact, implementation=implementation)

    def one_pass(packed):
        parts = packed.values, packed.metadata, packed.columns
        types = packed_vnm_types(jax.ShapeDtypeStruct(packed.shape, packed.dtype), packed, -2)
        order = {"strided": tokens == "strided", "collected": collected}
        made = native.call("s24_vnm_repack", types, *parts, v=packed.v, m=packed.m, **order)
        return PackedVNM(*made, *pattern, -2)

    fits = not exact and in_vnm_tiles(packed, collected)
    return _run("repack_vnm", packed.dtype, fits, implementation, one_pass, composed, packed)
