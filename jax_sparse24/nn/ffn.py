"""Feed-forward blocks of transformers."""

import jax
from flax import nnx
from flax.nnx.nn import dtypes

from jax_sparse24.engine import sparse_ffn
from jax_sparse24.methods.base import Method
from jax_sparse24.nn.linear import Linear
from jax_sparse24.plan import ACTIVATIONS


def _check_activation(layer: str, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{layer}: activation {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}."
        )


class FFN(nnx.Module):
    """`down(act(up(x)))`: all six products run as `method` says, under one differentiation rule.

    d, f: model and FFN width. `up` (d, f) and `down` (f, d) are `s24.nn.Linear`, so parameters are named as
    in a plain block. activation: "squared_relu", "relu", "gelu" or "silu". Raises like `sparse_ffn`."""

    def __init__(
        self,
        d: int,
        f: int,
        *,
        method: Method | None = None,
        activation: str = "squared_relu",
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **linear,
    ):
        _check_activation("FFN", activation)
        self.activation = activation
        self.up = Linear(d, f, method=method, use_bias=use_bias, role="w1", rngs=rngs, **linear)
        self.down = Linear(f, d, method=method, use_bias=use_bias, role="w2", rngs=rngs, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = self.up, self.down
        if not (up.active and down.active):
            return down(ACTIVATIONS[self.activation](up(x)))
        params = [None if p is None else p[...] for p in (up.kernel, up.bias, down.kernel, down.bias)]
        x, w1, b1, w2, b2 = dtypes.promote_dtype((x, *params), dtype=up.dtype)
        state = {"w1": up.method_state(), "w2": down.method_state()}
        y = sparse_ffn(
            x,
            w1,
            w2,
            up.method,
            state,
            up.noise_key(),
            b1=b1,
            activation=self.activation,
            implementation=up.implementation,
        )
        return y if b2 is None else y + b2


class GatedFFN(nnx.Module):
    """`down(act(gate(x)) * up(x))`, SwiGLU for activation="silu": each of the three linears runs as `method`
    says.

    d, f: model and FFN width. `gate`, `up` (d, f) and `down` (f, d) are `s24.nn.Linear`. Raises like
    `sparse_dot`."""

    def __init__(
        self,
        d: int,
        f: int,
        *,
        method: Method | None = None,
        activation: str = "silu",
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **linear,
    ):
        _check_activation("GatedFFN", activation)
        self.activation = activation
        self.gate = Linear(d, f, method=method, use_bias=use_bias, rngs=rngs, **linear)
        self.up = Linear(d, f, method=method, use_bias=use_bias, rngs=rngs, **linear)
        self.down = Linear(f, d, method=method, use_bias=use_bias, rngs=rngs, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))
