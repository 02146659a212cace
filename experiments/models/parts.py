"""What models of this folder share: looking up embeddings, rotary positions, a ring of keys and values.

Shape suffixes: B sequences, L tokens, S slots of a cache, d width, H heads, h head width, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp

ROPE_BASE = 10_000.0


@jax.custom_vjp
def look_up(table_Vd, tokens_BL):
    """Rows of a table, by int32 tokens."""
    return table_Vd[tokens_BL]


def sums_by_product(tokens_BL, ct_BLd, vocabulary: int):
    """What each row of the table gets, as a product with one-hot tokens."""
    tokens_BLV = jax.nn.one_hot(tokens_BL, vocabulary, dtype=ct_BLd.dtype)
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    return jnp.einsum("blv,bld->vd", tokens_BLV, ct_BLd, **options).astype(ct_BLd.dtype)


def _gradient_of_table(residuals, ct_BLd):
    table_Vd, tokens_BL = residuals
    add = lambda tokens_BL, ct_BLd: jnp.zeros_like(table_Vd).at[tokens_BL].add(ct_BLd)  # noqa: E731
    # On an accelerator tokens that add to few rows wait for each other.
    product = partial(sums_by_product, vocabulary=len(table_Vd))
    return jax.lax.platform_dependent(tokens_BL, ct_BLd, cpu=add, default=product), None


look_up.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _gradient_of_table)


def rotate(x_BLHh, first=0, base: float = ROPE_BASE):
    """Rotary positions (arXiv 2104.09864) in float32: turn pair (i, i + h/2) by position * base^(-2i/h).

    first: the position of the first token."""
    length, half = x_BLHh.shape[1], x_BLHh.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (first + jnp.arange(length, dtype=jnp.float32))[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(x_BLHh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHh.dtype)


def slots(first, length: int, size: int):
    """Slots of the tokens from position `first` on in a ring of `size`, and which slots each of them sees:
    those of earlier tokens that have not been overwritten."""
    position_L = first + jnp.arange(length)
    last = first + length - 1
    position_S = last - (last - jnp.arange(size)) % size  # of the token in each slot
    return position_L % size, (position_S >= 0) & (position_S <= position_L[:, None])
