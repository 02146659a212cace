"""Mixture of experts whose experts are sparse feed-forward blocks."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jax_sparse24.dispatch.shards import (
    TOKENS,
    check_declared,
    mesh_axes,
    spec_text,
    under_jit,
    whole,
    with_tokens_of,
)
from jax_sparse24.methods.base import Method
from jax_sparse24.nn import sharding
from jax_sparse24.nn.ffn import FFN
from jax_sparse24.nn.linear import check_axes
from jax_sparse24.patterns import check_input


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

    With `expert_axis`, and over a mesh in the context, every device has its share of the experts. Each shard
    of tokens routes its own, with the capacity of its number of tokens, and sends them to the devices of
    their experts, which send back what they make of them: two all-to-alls forward, two backward. `Routing` is
    that of all tokens.

    d, f: model and FFN width of every expert.
    experts: number of experts.
    top_k: number of experts that each token goes to.
    capacity_factor: an expert takes at most this many times its even share of the tokens, rounded up to what
        the method's groups need; the first tokens come first, and to a token that it does not take it adds
        nothing. None for dropless routing, where every expert has room for all tokens and compute grows with
        it.
    method: as in `FFN`.
    expert_axis: name of the logical axis of the experts, such as "expert"; the rules of `s24.sharding` say
        over which mesh axes it is cut. These must cut the tokens too. None to cut nothing.
    tokens: name of the logical axis that comes first in the input.
    rngs: draws the initial parameters and noise keys.
    ffn: other arguments of each `FFN`, such as `activation` or `use_bias`; `axes` may name the axis of f, as
        in (None, "mlp"), with which the kernels of every expert are cut over the mesh, too.

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
        expert_axis: str | None = None,
        tokens: str = "batch",
        rngs: nnx.Rngs,
        **ffn: Any,
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
        width, hidden = check_axes(ffn.pop("axes", None)) or (None, None)
        if width is not None or (hidden is not None and expert_axis is None):
            raise ValueError(
                f"MoE: axes={(width, hidden)!r} with expert_axis={expert_axis!r}: experts lie over the mesh "
                "axes along which other layers cut the model width. Write axes=(None, 'mlp') to cut f, with "
                "expert_axis='expert'."
            )
        if hidden is not None:
            ffn |= {"axes": (None, hidden), "tokens": tokens}
        if expert_axis is not None:
            sharding.check_named(tokens, expert_axis, hidden)
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.router = nnx.Linear(d, experts, use_bias=False, rngs=rngs)
        each = [FFN(d, f, method=method, rngs=rngs, **ffn) for _ in range(experts)]
        graphdef = nnx.graphdef(each[0])
        self.experts = nnx.merge(graphdef, jax.tree.map(lambda *v: jnp.stack(v), *map(nnx.state, each)))
        self.expert_axis, self.tokens = expert_axis, tokens
        if expert_axis is not None:
            for _, variable in nnx.to_flat_state(nnx.state(self.experts)):
                own = variable.get_metadata().get("out_sharding") or ()
                stacked = (None,) * (variable.get_value().ndim - 1 - len(own))
                variable.set_metadata(**sharding.metadata((expert_axis, *stacked, *own)))
            for layer in self.experts.parts.values():  # whose tokens the shards cut that route them
                layer.stacked_axes, layer.tokens = (expert_axis,), None

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
        check_input("MoE", x)
        graphs, (router, experts) = zip(*map(nnx.split, (self.router, self.experts)), strict=True)
        over, across = self._mesh_axes(x.shape)
        if x.size and (not across or jax.process_count() == 1):  # else the state may lie elsewhere
            for layer in self.experts.parts.values():
                layer.check_current()

        def of_shard(x, router, experts):
            return self._routed(x, nnx.merge(graphs[0], router), graphs[1], experts, over, across)

        if not over:
            there = jax.typeof(x).sharding.spec
            if any(mesh_axes("MoE", "x", there, x.ndim)):
                raise ValueError(
                    f"MoE: x of shape {x.shape} is cut by {spec_text(there)} over explicit mesh axes, but by "
                    f"expert_axis={self.expert_axis!r} and the rules its tokens are whole. Give "
                    "expert_axis='expert', with the rule ('expert', None) for experts that are whole."
                )
            y, routing = of_shard(*whole("MoE", (x, router, experts)))
            return with_tokens_of(y, x), routing
        mesh = jax.sharding.get_abstract_mesh()
        batch, share = PartitionSpec(over), PartitionSpec(across or None)
        operands = x, router, experts
        specs = (
            batch,
            *(jax.tree.map(lambda _, s=s: s, v) for v, s in ((router, PartitionSpec()), (experts, share))),
        )
        results = batch, Routing(PartitionSpec(), PartitionSpec())

        def cut(*operands):
            return jax.shard_map(of_shard, in_specs=specs, out_specs=results, axis_names=set(over))(*operands)

        check_declared("MoE", "x", batch, x)
        for name, layer in self.experts.parts.items():
            check_declared("MoE", f"experts.{name}", sharding.spec(*layer.rests), layer.weight)
        if mesh.explicit_axes:
            # A shard_map that leaves explicit axes to others would gather along them.
            cut = jax.sharding.auto_axes(cut, axes=mesh.explicit_axes, out_sharding=results)
        y, routing = under_jit(cut, operands)(*operands)
        return with_tokens_of(y, x), routing

    def _mesh_axes(self, shape: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The mesh axes that cut tokens, and those that cut experts, which are some of these."""
        if self.expert_axis is None:
            return (), ()
        over, across = sharding.mesh_axes(self.tokens), sharding.mesh_axes(self.expert_axis)
        hidden = self.experts.up.axes and sharding.mesh_axes(self.experts.up.axes[1])
        sharding.check_named(self.tokens, self.expert_axis, *(self.experts.up.axes or ()))
        if over and len(shape) < 2:
            raise ValueError(
                f"MoE: x of shape {shape} is one vector, without the axis of tokens that {' * '.join(over)} "
                "cuts. Give it rows that these divide, or call this where no mesh is in the context."
            )
        if hidden and set(hidden) & set(over):
            raise ValueError(
                f"MoE: mesh axis {hidden[0]!r} cuts the kernels of experts, so it may not cut tokens; give "
                f"{self.experts.up.axes[1]!r} a rule with another axis of the mesh, or with None."
            )
        if missing := [axis for axis in across if axis not in over]:
            raise ValueError(
                f"MoE: mesh axis {missing[0]!r} cuts experts, but not tokens, so that its devices would all "
                f"route the same ones; add it to the rule of {self.tokens!r}."
            )
        sizes = jax.sharding.get_abstract_mesh().shape
        for what, size, axes in (
            ("experts", self.router.out_features, across),
            (f"rows of x of shape {shape}", shape[0], over),
        ):
            n = math.prod(sizes[axis] for axis in axes)
            if size % n:
                along = " * ".join(f"{axis} = {sizes[axis]}" for axis in axes)
                raise ValueError(f"MoE: {size} {what} do not divide into {n} shards ({along}).")
        return over, across

    def _routed(self, x, router, graph, experts, over, across) -> tuple[jax.Array, Routing]:
        """The call of one shard of tokens.

        x: (..., d), the tokens of the shard.
        router: the layer.
        graph, experts: graph and state of the experts on this device.
        over, across: the mesh axes that cut tokens and experts, () for none."""
        d, count = x.shape[-1], router.out_features
        x_Td = x.reshape(-1, d)
        tokens = x_Td.shape[0]
        capacity = self.capacity(tokens)
        p_TE = jax.nn.softmax(router(x_Td.astype(jnp.float32)))
        gates_Tk, chosen_Tk = jax.lax.top_k(p_TE, self.top_k)
        gates_Tk = gates_Tk / gates_Tk.sum(-1, keepdims=True)

        # Assignments are listed in the order of tokens, and each takes the next free slot of its expert.
        chosen = chosen_Tk.reshape(-1)
        taken_AE = jax.nn.one_hot(chosen, count, dtype=jnp.int32)
        turn = jnp.take_along_axis(jnp.cumsum(taken_AE, axis=0), chosen[:, None], axis=1)[:, 0] - 1
        slot = jnp.where(turn < capacity, chosen * capacity + turn, count * capacity)
        token = jnp.arange(chosen.size) // self.top_k
        source = jnp.full(count * capacity + 1, tokens).at[slot].set(token)[:-1]
        padded = jnp.concatenate([x_Td, jnp.zeros_like(x_Td[:1])])
        x_ECd = padded[source].reshape(count, capacity, d)

        if across:  # all tokens of this device's experts
            x_ECd = jax.lax.all_to_all(x_ECd, across, split_axis=0, concat_axis=1, tiled=True)
        y_ECd = jax.vmap(lambda state, x: nnx.merge(graph, state)(x))(experts, x_ECd)
        if across:
            y_ECd = jax.lax.all_to_all(y_ECd, across, split_axis=1, concat_axis=0, tiled=True)
        zero_of_dropped = jnp.zeros((1, d), y_ECd.dtype)
        y = jnp.concatenate([y_ECd.reshape(count * capacity, d), zero_of_dropped])[slot]
        y_Td = jnp.einsum("tk,tkd->td", gates_Tk.astype(y.dtype), y.reshape(tokens, self.top_k, d))

        if not tokens:
            return y_Td.reshape(x.shape), Routing(jnp.float32(0), jnp.float32(0))

        def mean(shares):
            for axes in filter(None, (over, TOKENS.value)):  # by themselves, as types tell of `over` alone
                shares = jax.lax.pmean(shares, axes)
            return shares

        share_E = mean(taken_AE.mean(0, dtype=jnp.float32))
        loss = count * jnp.sum(share_E * mean(p_TE.mean(0)))
        return y_Td.reshape(x.shape), Routing(loss, mean(jnp.mean(turn >= capacity, dtype=jnp.float32)))
