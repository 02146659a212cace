"""Whether an array is 2:4."""

import jax.numpy as jnp

from jax_sparse24.ops.reference.bits import magnitude_bits, split
from jax_sparse24.patterns import KEPT


def prune_check24(x, axis):
    non_zero = x if x.dtype == jnp.bool_ else magnitude_bits(x) != 0
    counts = sum(member.astype(jnp.int32) for member in split(non_zero, axis))
    return jnp.sum(counts > KEPT, dtype=jnp.int32)
