"""Feed-forward blocks of transformers."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_sparse24.engine.ffn import check_fits, check_widths, sparse_ffn
from jax_sparse24.engine.gated import Weight, gated_ffn
from jax_sparse24.engine.operand import ACTIVATIONS, check_activation
from jax_sparse24.engine.stats import activation_stats
from jax_sparse24.methods.base import Method
from jax_sparse24.nn.linear import Linear, check_alike


class FFN(nnx.Module):
    """`down(act(up(x)))`: all six products run as `method` says, under one differentiation rule.

    d, f: model and FFN width. `up` (d, f) and `down` (f, d) are `s24.nn.Linear`, so parameters are named as
    in a plain block; a method with a learned router adds `router` (d, clusters). activation: "squared_relu",
    "relu", "gelu" or "silu". Raises like `sparse_ffn`."""

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
        check_activation("FFN", activation)
        self.activation = activation
        self.up = Linear(d, f, method=method, use_bias=use_bias, role="w1", rngs=rngs, **linear)
        check_fits("FFN", self.up.method, activation)
        check_widths("FFN", self.up.method, d, f)
        self.down = Linear(f, d, method=method, use_bias=use_bias, role="w2", rngs=rngs, **linear)
        if self.up.method.router:
            self.router = nnx.Param(jnp.zeros((d, self.up.method.router), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = self.up, self.down
        check_alike("FFN", up=up, down=down)
        if not (up.active and down.active) or up.adapted or down.adapted or not x.size:
            return down(ACTIVATIONS[self.activation](up(x)))
        x, w1, b1, w2, b2 = self._promoted(x)
        options = {"b1": b1, "activation": self.activation, "implementation": up.implementation}
        state, tokens = self._state(), x.reshape(-1, x.shape[-1])
        y = sparse_ffn(x, w1, w2, up.method, state, up.noise_key(), **options)
        y = up.method.observe(y, state["w1"], tokens, w1)
        if up.method.router:
            y = up.method.teach(y, self.router[...], tokens, w1)
        return y if b2 is None else y + b2

    def activation_stats(self, x: jax.Array) -> dict[str, jax.Array]:
        """How sparse the activations of `x` are, and what the method's cuts take away, in dense mode too, and
        without adapters; see `s24.activation_stats`."""
        up = self.up
        check_alike("FFN", up=up, down=self.down)
        x, w1, b1, *_ = self._promoted(x)
        return activation_stats(
            x, w1, up.method, self._state(), up.noise_key(), b1=b1, activation=self.activation
        )

    def _promoted(self, x):
        layers = (self.up, self.down)
        params = [None if p is None else p[...] for layer in layers for p in (layer.kernel, layer.bias)]
        return dtypes.promote_dtype((x, *params), dtype=self.up.dtype)

    def _state(self):
        own = {"centroids": jax.lax.stop_gradient(self.router[...])} if self.up.method.router else {}
        return {"w1": self.up.method_state() | own, "w2": self.down.method_state()}


class GatedFFN(nnx.Module):
    """`down(act(gate(x)) * up(x))`, SwiGLU for activation="silu": each of the three linears runs as `method`
    says. Without biases one rule differentiates all three where a kernel of `s24.gated` was measured to be
    faster than XLA.

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
        check_activation("GatedFFN", activation)
        self.activation = activation
        self.gate = Linear(d, f, method=method, use_bias=use_bias, rngs=rngs, **linear)
        self.up = Linear(d, f, method=method, use_bias=use_bias, rngs=rngs, **linear)
        self.down = Linear(f, d, method=method, use_bias=use_bias, rngs=rngs, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        layers = {"gate": self.gate, "up": self.up, "down": self.down}
        check_alike("GatedFFN", **layers)
        if any(not layer.active or layer.adapted for layer in layers.values()):
            return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))
        xs, weights = [], []
        for layer in layers.values():
            bias = None if layer.bias is None else layer.bias[...]
            own_x, w, bias = dtypes.promote_dtype((x, layer.kernel[...], bias), dtype=layer.dtype)
            xs.append(own_x)
            weights.append(Weight(w, layer.method_state(), layer.noise_key(), bias))
        return gated_ffn(xs[:2], *weights, self.up.method, self.activation, self.up.implementation)
