"""Minimum-variance unbiased 2:4 estimators, for neural gradients."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch.operation import Kernel, Operation, trailing
from jax_sparse24.ops.order import regroup
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.reference import mvue as reference
from jax_sparse24.ops.reference.packed24 import pack24


def mvue24(
    key: jax.typing.ArrayLike,
    g: jax.typing.ArrayLike,
    axis: int,
    exact: bool = True,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """A random 2:4 array along an axis whose expectation is `g`.

    Kept entries are `g / probability`. The draw depends on the key and the group's row-major index only: the
    same bits in every implementation. A group with NaN or Inf is cut by magnitude, unscaled, so that it
    reaches the loss; float32 subnormals count as zero. It estimates gradients and has no derivative of its
    own: differentiating raises.

    key: a JAX PRNG key, typed or raw.
    g: any shape whose `axis` is a multiple of 4; float32, bfloat16 or float16.
    axis: along which elements are grouped.
    exact: True draws with the inclusion probabilities of least variance, `min(1, 2|g|/sum|g|)` with the
        capped case, by systematic sampling. False draws two entries one after the other, in proportion to
        |g|, which is unbiased too and has 6 % more variance on Gaussian data.
    implementation: as in `mask24`.

    Returns: an array of g's shape and dtype.
    Raises: as `mask24`; TypeError for a key that is none.
    Source: 2203.10991; of exact=False, the code of 2404.01847."""
    operands, options = _checked(key, g, axis, exact)
    return MVUE24(*operands, **options, implementation=implementation)


def mvue_pack24(key, g, axis: int, exact: bool = True, *, implementation: str | None = None) -> Packed24:
    """`pack24(mvue24(key, g, axis, exact), axis)` in one pass.

    key, g, axis, exact, implementation: as in `mvue24`.

    Returns: a Packed24.
    Raises: as `mvue24`."""
    operands, options = _checked(key, g, axis, exact)
    parts = MVUE_PACK24(*operands, **options, implementation=implementation)
    return Packed24(*parts, options["axis"])


def mvue_pack24_strided(key, g_Tn, exact: bool = True, *, implementation: str | None = None) -> Packed24:
    """`mvue_pack24(key, regroup(g_Tn, "strided"), -2, exact)`: groups are those of `pack24_strided`.

    g_Tn: (T, n), T a multiple of 4; dtypes as in `mvue24`.
    key, exact, implementation: as in `mvue24`.

    Returns: a Packed24 along axis -2.
    Raises: as `mvue24`."""
    operands, options = _checked(key, g_Tn, -2, exact)
    parts = MVUE_PACK24_STRIDED(*operands, exact=options["exact"], implementation=implementation)
    return Packed24(*parts, -2)


def random24(key, g, axis: int, law: Literal["uniform", "paired"]) -> jax.Array:
    """Two other unbiased random 2:4 cuts of `g`, to compare `mvue24` with. Only the reference computes them.

    key, g, axis: as in `mvue24`.
    law: "uniform", any two of four with the same probability, doubled; "paired", one of each two neighbours
        with probability |g| / sum|g|, as large as their sum: the minimum-variance 1:2 estimate.

    Returns: an array of g's shape and dtype.
    Raises: as `mvue24`; ValueError for another law.
    Source: 2203.10991."""
    if law not in ("uniform", "paired"):
        raise ValueError(f"random24: law {law!r} is unknown; use 'uniform' or 'paired'.")
    words = key_words("random24", key)
    g = patterns.as_array("random24", "g", g)
    return RANDOM24(words, g, axis=patterns.check_grouped("random24", g, axis), law=law)


def _checked(key, g, axis, exact) -> tuple[tuple[jax.Array, jax.Array], dict[str, int | bool]]:
    """The operands and the options of an estimate."""
    patterns.check_flag("mvue24", "exact", exact)
    words = key_words("mvue24", key)
    g = patterns.as_array("mvue24", "g", g)
    return (words, g), {"axis": patterns.check_grouped("mvue24", g, axis), "exact": bool(exact)}


def key_words(op: str, key) -> jax.Array:
    """The two words by which draws are keyed.

    op: the operation, for messages.
    key: one PRNG key of any implementation, typed, or raw of `threefry2x32` or of what
        `jax_default_prng_impl` says; or what `key_of_shard` returned.

    Returns: uint32 (2,), or (5,) of a shard.
    Raises: TypeError for a key that is none."""
    dtype = getattr(key, "dtype", None)
    if dtype == jnp.uint32 and key.shape == (4,) and "rbg" in jax.config.jax_default_prng_impl:  # raw
        key = jax.random.wrap_key_data(key, impl="rbg")
        dtype = key.dtype
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key)
        if key.shape == () and words.shape != (2,):
            words = jax.random.bits(key, (2,), jnp.uint32)
    else:
        words = key
    if getattr(words, "dtype", None) != jnp.uint32 or words.shape not in ((2,), (5,)):
        got = f"{words.dtype} {words.shape}" if hasattr(words, "shape") else repr(key)
        raise TypeError(f"{op}: key must be one PRNG key such as jax.random.key(0), got {got}.")
    return words


def key_of_shard(key, above, left, across: int) -> jax.Array:
    """The key with which one shard of an array draws what the whole array would draw there.

    A matrix is cut into shards of one size, whose groups are whole.

    key: one PRNG key, the same for all shards.
    above, left: the place of the shard, counted from 0 in shards, along axes -2 and -1; int32 scalars.
    across: how many shards stand side by side along axis -1.

    Returns: uint32 (5,), a key for the operations of this module."""
    place = jnp.stack([jnp.asarray(n).astype(jnp.uint32) for n in (above, left, across)])
    return jnp.concatenate([key_words("key_of_shard", key), place])


def _refuse(*_, **__):
    raise TypeError(
        "mvue24 and random24 estimate gradients and have no derivative of their own. Apply them to "
        "cotangents, or wrap the argument in jax.lax.stop_gradient."
    )


def _like(words, g, **_):
    return jax.ShapeDtypeStruct(g.shape, g.dtype)


def _packed(words, g, axis, **_):
    return Packed24.types(g, axis)


def _flags(axis, exact):
    return {**trailing(axis), "exact": exact}


def _estimate_and_pack(words, g, axis, exact):
    estimate = reference.mvue24(words, g, axis, exact)
    # Fused into one, XLA:CPU of jax 0.11 takes minutes to compile both in bfloat16.
    return pack24(jax.lax.optimization_barrier(estimate), axis)


# The first operand is the key of the draws, uint32 (2,). A draw is keyed by it and by the index of its group;
# that of a shard, whose key has five words, by the index in the whole array.
MVUE24 = Operation("mvue24", reference.mvue24, kernel=Kernel("s24_mvue", _like, _flags), jvp=_refuse)
MVUE_PACK24 = Operation(
    "mvue24", _estimate_and_pack, kernel=Kernel("s24_mvue_pack", _packed, _flags), jvp=_refuse
)
# On CUDA rows are read where they are, which spares the pass that moves them.
MVUE_PACK24_STRIDED = Operation(
    "mvue24",
    reference=lambda words, g_Tn, exact: _estimate_and_pack(words, regroup(g_Tn, "strided"), -2, exact),
    kernel=lambda words, g_Tn, exact: MVUE_PACK24.kernel(
        words, regroup(g_Tn, "strided"), axis=-2, exact=exact
    ),
    cuda=Kernel("s24_mvue_pack_strided", partial(_packed, axis=-2), lambda exact: {"exact": exact}),
    jvp=_refuse,
)
RANDOM24 = Operation("random24", reference.random24, jvp=_refuse)
