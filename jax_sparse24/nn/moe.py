"""Mixture of experts whose experts are sparse feed-forward blocks."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse24.methods.base import Method
from jax_sparse24.nn.ffn import FFN


class Routing(NamedTuple):
    """What a call of `MoE` reports about its routing, as float32 scalars.

    load_balancing_loss: `E sum_e f_e p_e`, with f_e the share of assignments and p_e the mean probability of
        expert e; 1 at balance. Add it to the loss with a small factor.
    dropped: share of the assignments that were beyond their expert's capacity.

    Source: the loss is that of Switch Transformers, 2101.03961."""

    load_balancing_loss: jax.Array
    dropped: jax.Array


class MoE(nnx.Module):
    """`sum_e g_e(x) FFN_e(x)` over the `top_k` experts of largest router probability.

    The gates g_e of a token's experts sum to 1, before tokens are dropped. `router` is a dense float32 layer.
    `experts` is one `FFN` whose variables carry a leading axis of experts, so `s24.refresh`, `s24.nn.masks`
    and `s24.nn.arrange` treat each expert. A call takes x, (..., d), and returns ((..., d), `Routing`);
    `Routing` is zeros if there are no tokens.

    d, f: model and FFN width of every expert.
    experts: number of experts.
    top_k: number of experts that each token goes to.
    capacity_factor: an expert takes at most this many times its even share of the tokens, rounded up to what
        the method's groups need; the first tokens come first, and to a token that it does not take it adds
        nothing. None for dropless routing, where every expert has room for all tokens and compute grows with
        it.
    method: as in `FFN`.
    rngs: draws the initial parameters and noise keys.
    ffn: other arguments of each `FFN`, such as `activation` or `use_bias`.

    Raises: as `FFN`; TypeError for `experts` or `top_k` that is no int, ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        d: int,
        f: int,
        *,
        experts: int,
        top_k: int = 2,
        capacity_factor: float | None = 1.25,
        method: Method | None = None,
        rngs: nnx.Rngs,
        **ffn,
    ):
        for name, value in (("experts", experts), ("top_k", top_k)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"MoE: {name}={value!r} must be an int.")
        if not 1 <= top_k <= experts:
            raise ValueError(f"MoE: top_k={top_k} must lie between 1 and experts={experts}.")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(
                f"MoE: capacity_factor={capacity_factor} must be finite and positive, or None for dropless."
            )
        if "axes" in ffn:
            raise ValueError(
                f"MoE: axes={ffn['axes']!r} cannot be used yet, as experts are not cut over a mesh. Leave it "
                "out."
            )
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.router = nnx.Linear(d, experts, use_bias=False, rngs=rngs)
        each = [FFN(d, f, method=method, rngs=rngs, **ffn) for _ in range(experts)]
        graphdef = nnx.graphdef(each[0])
        self.experts = nnx.merge(graphdef, jax.tree.map(lambda *v: jnp.stack(v), *map(nnx.state, each)))

    def capacity(self, tokens: int) -> int:
        """How many tokens one expert takes at most.

        tokens: number of tokens of the call, an int.

        Returns: int, a multiple of what the method's groups need."""
        experts = self.router.out_features
        even = tokens * self.top_k / experts
        most = tokens if self.capacity_factor is None else math.ceil(even * self.capacity_factor)
        multiple = self.experts.up.method.token_multiple
        return -(-min(most, tokens) // multiple) * multiple

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        d, experts = x.shape[-1], self.router.out_features
        x_Td = x.reshape(-1, d)
        tokens = x_Td.shape[0]
        capacity = self.capacity(tokens)
        p_TE = jax.nn.softmax(self.router(x_Td.astype(jnp.float32)))
        gates_Tk, chosen_Tk = jax.lax.top_k(p_TE, self.top_k)
        gates_Tk = gates_Tk / gates_Tk.sum(-1, keepdims=True)

        # Assignments are listed in the order of tokens, and each takes the next free slot of its expert.
        chosen = chosen_Tk.reshape(-1)
        taken_AE = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)
        turn = jnp.take_along_axis(jnp.cumsum(taken_AE, axis=0), chosen[:, None], axis=1)[:, 0] - 1
        slot = jnp.where(turn < capacity, chosen * capacity + turn, experts * capacity)
        token = jnp.arange(chosen.size) // self.top_k
        source = jnp.full(experts * capacity + 1, tokens).at[slot].set(token)[:-1]
        padded = jnp.concatenate([x_Td, jnp.zeros_like(x_Td[:1])])
        x_ECd = padded[source].reshape(experts, capacity, d)

        graphdef, state = nnx.split(self.experts)
        y_ECd = jax.vmap(lambda state, x: nnx.merge(graphdef, state)(x))(state, x_ECd)
        zero_of_dropped = jnp.zeros((1, d), y_ECd.dtype)
        y = jnp.concatenate([y_ECd.reshape(experts * capacity, d), zero_of_dropped])[slot]
        y_Td = jnp.einsum("tk,tkd->td", gates_Tk.astype(y.dtype), y.reshape(tokens, self.top_k, d))

        if not tokens:
            return y_Td.reshape(x.shape), Routing(jnp.float32(0), jnp.float32(0))
        share_E = taken_AE.mean(0, dtype=jnp.float32)
        loss = experts * jnp.sum(share_E * p_TE.mean(0))
        return y_Td.reshape(x.shape), Routing(loss, jnp.mean(turn >= capacity, dtype=jnp.float32))
