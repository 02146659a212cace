"""What models of this folder share: looking up embeddings, rotary positions, a ring of keys and values.

Shape suffixes: B sequences, L tokens, S slots of a cache, d width, H heads, h head width, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp

ROPE_BASE = 10_000.0
# Rows up to which accelerators sum gradients of a table by a product: its time grows with the rows.
ROWS_BY_PRODUCT = 4096


@jax.custom_vjp
def look_up(table_Vd, tokens_BL):
    """Rows of a table, by int32 tokens."""
    return table_Vd[tokens_BL]


def sums_by_product(tokens_BL, ct_BLd, vocabulary: int):
    """What each row of the table gets, as a product with one-hot tokens."""
    tokens_BLV = jax.nn.one_hot(tokens_BL, vocabulary, dtype=ct_BLd.dtype)
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    return jnp.einsum("blv,bld->vd", tokens_BLV, ct_BLd, **options).astype(ct_BLd.dtype)


def sums_by_segment(tokens_BL, ct_BLd, vocabulary: int):
    """What each row of the table gets, by sorting tokens and adding what equal ones get in pairs: in float32,
    in one order, and in time that hardly depends on the rows."""
    tokens_T, ct_Td = tokens_BL.reshape(-1), ct_BLd.reshape(-1, ct_BLd.shape[-1])
    order_T = jnp.argsort(tokens_T)
    tokens_T, sums_Td = tokens_T[order_T], ct_Td[order_T].astype(jnp.float32)
    changes = tokens_T[1:] != tokens_T[:-1]
    begins_T, ends_T = (jnp.pad(changes, one, constant_values=True) for one in ((1, 0), (0, 1)))

    def add(left, right):
        return left[0] | right[0], jnp.where(right[0][:, None], right[1], left[1] + right[1])

    _, sums_Td = jax.lax.associative_scan(add, (begins_T, sums_Td))
    # The last one of each token has the sum; the others go to places that are not there.
    places_T = jnp.where(ends_T, tokens_T, vocabulary + jnp.arange(len(tokens_T)))
    table_Vd = jnp.zeros((vocabulary, ct_Td.shape[-1]), jnp.float32)
    return table_Vd.at[places_T].set(sums_Td, mode="drop", unique_indices=True).astype(ct_BLd.dtype)


def _gradient_of_table(residuals, ct_BLd):
    table_Vd, tokens_BL = residuals
    if len(table_Vd) > ROWS_BY_PRODUCT:
        return sums_by_segment(tokens_BL, ct_BLd, len(table_Vd)), None
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
