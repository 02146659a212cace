"""Minimum-variance unbiased 2:4 estimators, for neural gradients."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import run
from jax_sparse24.ops.order import regroup
from jax_sparse24.ops.packed24 import Packed24, in_strides, packed_types
from jax_sparse24.ops.reference import mvue as reference
from jax_sparse24.ops.reference import packed24
from jax_sparse24.ops.select import like


def mvue24(key, g, axis: int, exact: bool = True, *, implementation: str | None = None) -> jax.Array:
    """A random 2:4 array along `axis` whose expectation is `g`.

    key: a JAX PRNG key, typed or raw. g: any shape whose `axis` is a multiple of 4; float32, bfloat16,
    float16. exact=True draws with the inclusion probabilities of least variance, `min(1, 2|g|/sum|g|)` with
    the capped case, by systematic sampling (2203.10991). exact=False draws two entries one after the other,
    in proportion to |g|, as the code of 2404.01847 does; unbiased too, 6 % more variance on Gaussian data.
    Kept entries are `g / probability`. The draw depends on the key and the group's row-major index only: the
    same bits in every implementation. A group with NaN or Inf is cut by magnitude, unscaled, so that it
    reaches the loss; float32 subnormals count as zero. It estimates gradients and has no derivative of its
    own: differentiating raises. Raises like `mask24`; TypeError for a key that is none."""
    patterns.check_flag("mvue24", "exact", exact)
    words = key_words("mvue24", key)
    g = patterns.as_array("mvue24", "g", g)
    return _mvue(g, words, patterns.check_grouped("mvue24", g, axis), bool(exact), implementation)


def mvue_pack24(key, g, axis: int, exact: bool = True, *, implementation: str | None = None) -> Packed24:
    """`pack24(mvue24(key, g, axis, exact), axis)` in one pass."""
    patterns.check_flag("mvue24", "exact", exact)
    words = key_words("mvue24", key)
    g = patterns.as_array("mvue24", "g", g)
    return _mvue_pack(g, words, patterns.check_grouped("mvue24", g, axis), bool(exact), implementation)


@partial(jax.jit, static_argnames=("exact", "implementation"), inline=True)
def mvue_pack24_strided(key, g, exact: bool = True, *, implementation: str | None = None) -> Packed24:
    """`mvue_pack24(key, regroup(g, "strided"), -2, exact)` of a matrix, as `pack24_strided`."""

    def fallback(g, words):
        return _mvue_pack(regroup(g, "strided"), words, -2, exact, "reference")

    def kernel(g, words):
        return in_strides("s24_mvue_pack", words, g, exact=exact)

    return run("mvue24", g.dtype, implementation, kernel, fallback, g, key_words("mvue24", key))


def random24(key, g, axis: int, law: Literal["uniform", "paired"]) -> jax.Array:
    """Two other unbiased random 2:4 cuts of `g`, to compare `mvue24` with.

    law: "uniform", any two of four with the same probability, doubled; "paired", one of each two neighbours
    with probability |g| / sum|g|, as large as their sum: the minimum-variance 1:2 estimate of 2203.10991.
    Shapes, dtypes, keys, non-finite groups and errors as `mvue24`; only the reference computes them."""
    if law not in ("uniform", "paired"):
        raise ValueError(f"random24: law {law!r} is unknown; use 'uniform' or 'paired'.")
    words = key_words("random24", key)
    g = patterns.as_array("random24", "g", g)
    return _random(g, words, patterns.check_grouped("random24", g, axis), law)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
@partial(jax.jit, static_argnums=(2, 3), inline=True)
def _random(g, words, axis, law):
    return reference.random24(words, g, axis, law)


def key_words(op: str, key) -> jax.Array:
    """uint32 (2,) from a PRNG key of any implementation."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key)
        if key.shape == () and words.shape != (2,):
            words = jax.random.bits(key, (2,), jnp.uint32)
    else:
        words = key
    if getattr(words, "dtype", None) != jnp.uint32 or words.shape != (2,):
        got = f"{words.dtype} {words.shape}" if hasattr(words, "shape") else repr(key)
        raise TypeError(f"{op}: key must be one PRNG key such as jax.random.key(0), got {got}.")
    return words


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _mvue(g, words, axis, exact, implementation):
    return _mvue_jit(g, words, axis, exact, implementation)


@partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _mvue_jit(g, words, axis, exact, implementation):
    def kernel(g, words):
        return native.call("s24_mvue", like(g), words, g, trailing=-1 - axis, exact=exact)

    return run(
        "mvue24",
        g.dtype,
        implementation,
        kernel,
        lambda g, words: reference.mvue24(words, g, axis, exact),
        g,
        words,
    )


@_mvue.defjvp
@_random.defjvp
def _refuse(*_):
    raise TypeError(
        "mvue24 and random24 estimate gradients and have no derivative of their own. Apply them to "
        "cotangents, or wrap the argument in jax.lax.stop_gradient."
    )


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
@partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _mvue_pack(g, words, axis, exact, implementation):
    def kernel(g, words):
        types = packed_types(g, axis)
        return Packed24(*native.call("s24_mvue_pack", types, words, g, trailing=-1 - axis, exact=exact), axis)

    def fallback(g, words):
        estimate = reference.mvue24(words, g, axis, exact)
        # Fused into one, XLA:CPU of jax 0.11 takes minutes to compile both in bfloat16.
        return Packed24(*packed24.pack24(jax.lax.optimization_barrier(estimate), axis), axis)

    return run("mvue24", g.dtype, implementation, kernel, fallback, g, words)


_mvue_pack.defjvp(_refuse)
