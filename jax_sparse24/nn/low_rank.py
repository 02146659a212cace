"""Low-rank layers, another way to spend fewer operations than a dense layer, to compare with (CoLA,
2502.10940)."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse24.engine.operand import ACTIVATIONS, check_activation
from jax_sparse24.nn.linear import Linear, block_axes
from jax_sparse24.patterns import check_size

Bottleneck = Literal["silu", "identity"]


class LowRank(nnx.Module):
    """`expand(act(reduce(x)))` in place of a linear layer.

    `reduce` (in_features, rank) and `expand` (rank, out_features) are `s24.nn.Linear` layers without bias, so
    a method makes their products sparse. Unless `kernel_init` is given, entries of both kernels start normal
    with variance (rank * (in + out))^(-1/2). A call takes x, (..., in_features), and returns (...,
    out_features).

    in_features, out_features: widths.
    rank: width between the two layers.
    activation: "silu" (the paper's), or "identity", which is a plain factorisation.
    rngs: draws the initial parameters and noise keys.
    linear: other arguments of both `s24.nn.Linear` layers, such as `method` or `dtype`; `axes` are the names
        of the logical axes of the input's and the output's features, as in `s24.nn.Linear`. The rank is never
        cut.

    Raises: as `s24.nn.Linear`; TypeError or ValueError for a rank that is no positive int, ValueError for an
        unknown activation.
    Source: CoLA, 2502.10940, section 3; the initial variance is that of its code."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        activation: Bottleneck = "silu",
        rngs: nnx.Rngs,
        **linear: Any,
    ):
        check_size("LowRank", "rank", rank)
        if activation not in ("silu", "identity"):
            raise ValueError(f"LowRank: activation {activation!r} is unknown; use 'silu' or 'identity'.")
        self.activation = activation
        linear.setdefault(
            "kernel_init", nnx.initializers.normal((rank * (in_features + out_features)) ** -0.25)
        )
        first, last = block_axes("LowRank", linear) or (None, None)
        names = [(first, None), (None, last)] if first or last else [None, None]
        self.reduce = Linear(in_features, rank, use_bias=False, axes=names[0], rngs=rngs, **linear)
        self.expand = Linear(rank, out_features, use_bias=False, axes=names[1], rngs=rngs, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        z = self.reduce(x)
        return self.expand(jax.nn.silu(z) if self.activation == "silu" else z)


class LowRankFFN(nnx.Module):
    """A feed-forward block of `LowRank` layers: `down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a
    gate.

    A call takes x, (..., d), and returns (..., d).

    d, f: model and FFN width.
    rank, bottleneck: rank and activation of each `LowRank` layer.
    activation: of the block, as in `FFN`; the paper leaves it in place.
    gated: whether the block has a gate.
    rngs, linear: as in `LowRank`; `axes` are the names of the logical axes of d and of f.

    Raises: as `LowRank`, and ValueError for an unknown activation."""

    def __init__(
        self,
        d: int,
        f: int,
        *,
        rank: int,
        bottleneck: Bottleneck = "silu",
        activation: str = "silu",
        gated: bool = True,
        rngs: nnx.Rngs,
        **linear: Any,
    ):
        check_activation("LowRankFFN", activation)
        self.activation = activation
        axes = block_axes("LowRankFFN", linear)
        linear |= {"rank": rank, "activation": bottleneck, "rngs": rngs}
        self.gate = LowRank(d, f, axes=axes, **linear) if gated else None
        self.up = LowRank(d, f, axes=axes, **linear)
        self.down = LowRank(f, d, axes=axes and axes[::-1], **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self._hidden(x))

    def _hidden(self, x):
        act = ACTIVATIONS[self.activation]
        return act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)

    def activation_stats(self, x: jax.Array) -> dict[str, jax.Array]:
        """How sparse the input of `down` is.

        x: (..., d).

        Returns: {"density": the share of non-zeros, a float32 scalar}."""
        return {"density": jnp.mean(self._hidden(x) != 0, dtype=jnp.float32)}
