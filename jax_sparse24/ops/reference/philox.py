"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), in jnp."""

import jax
import jax.numpy as jnp
import numpy as np

_MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def multiply(a, x):
    """High and low 32 bits of a * x, both uint32, without 64-bit integers."""
    low16 = np.uint32(0xFFFF)
    a_hi, a_lo = a >> 16, a & low16
    x_hi, x_lo = x >> 16, x & low16
    low = a_lo * x_lo
    mid = a_hi * x_lo + (low >> 16)
    mid2 = a_lo * x_hi + (mid & low16)
    return a_hi * x_hi + (mid >> 16) + (mid2 >> 16), a * x


@jax.jit  # traced once for all rounds
def _round(key, counter):
    """The key and the counter of the next round."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    hi0, lo0 = multiply(_MULTIPLIERS[0], c0)
    hi1, lo1 = multiply(_MULTIPLIERS[1], c2)
    next_key = k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])
    return next_key, (hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0)


def philox4x32(key, counter):
    """Four uint32 words for a key of two and a counter of four uint32 arrays (broadcast together)."""
    counter = tuple(jnp.broadcast_arrays(*counter))
    for _ in range(10):
        key, counter = _round(key, counter)
    return counter
