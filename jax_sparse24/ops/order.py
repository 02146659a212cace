"""The order of tokens and features: which of them make a group, and permutations."""

import jax
import jax.numpy as jnp
import numpy as np


def regroup(x: jax.Array, order: str, group: int = 4) -> jax.Array:
    """Rows of `x` (T, n) in a fixed order, T a multiple of `group`.

    Neighbouring tokens activate the same features, so that `group` consecutive ones overflow their two places
    (2503.16672). "consecutive" leaves them; "strided" groups tokens T / group apart; "random" uses one
    permutation per T. A sum over tokens does not depend on their order, so nothing is put back."""
    T = x.shape[0]
    if order == "consecutive":
        return x
    if order == "strided":
        return x.reshape(group, T // group, x.shape[1]).swapaxes(0, 1).reshape(x.shape)
    return x[np.random.default_rng(T).permutation(T)]


def collect(x: jax.Array, groups: int, axis: int) -> jax.Array:
    """Puts side by side what was dealt over `groups` groups along `axis` of a matrix, -1 or -2; with
    size / groups in place of groups, deals it again."""
    if axis == -2:
        return collect(x.T, groups, -1).T
    return x.reshape(x.shape[0], groups, x.shape[1] // groups).swapaxes(1, 2).reshape(x.shape)


@jax.custom_vjp
def permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows `order` of `x` (T, n), and rows of zeros where it is T: (R, n). Undone by `permute(y, inverse,
    order)`.

    order: int32 (R,), holds every number below T once, and R - T times T. inverse: int32 (T,), `inverse_of(
    order, T)`. The derivative is a gather too."""
    return _rows(x, order)


def _rows(x, order):
    if order.size <= x.shape[0]:
        return x[order]
    return jnp.take(x, order, axis=0, mode="fill", fill_value=0)


permute.defvjp(
    lambda x, order, inverse: (_rows(x, order), inverse),
    lambda inverse, ct: (_rows(ct, inverse), None, None),
)


def inverse_of(order: jax.Array, T: int) -> jax.Array:
    """int32 (T,): the place of each number below `T` in `order`, which holds every one of them once."""
    return jnp.zeros(T, order.dtype).at[order].set(jnp.arange(order.size, dtype=order.dtype), mode="drop")
