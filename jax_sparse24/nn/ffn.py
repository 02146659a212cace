"""Feed-forward blocks of transformers, with and without a gate."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_sparse24.engine.ffn import check_fits, check_widths, sparse_ffn
from jax_sparse24.engine.gated import Weight, gated_ffn
from jax_sparse24.engine.operand import ACTIVATIONS, check_activation
from jax_sparse24.engine.stats import activation_stats
from jax_sparse24.methods.base import Method
from jax_sparse24.nn.linear import Linear, check_alike, naming_its_layer


class FFN(nnx.Module):
    """`down(act(up(x)))`: all six products run as `method` says, under one differentiation rule.

    `up` (d, f) and `down` (f, d) are `s24.nn.Linear` layers, so parameters are named as in a plain block. A
    method with a learned router adds the parameter `router`, float32 (d, clusters). A call takes x, (..., d),
    and returns (..., d).

    d, f: model and FFN width.
    method: from `s24.methods`; None for dense products.
    activation: "squared_relu", "relu", "gelu" or "silu".
    use_bias: whether both layers have a bias.
    rngs: draws the initial parameters and noise keys.
    linear: other arguments of both `s24.nn.Linear` layers, such as `dtype` or `implementation`.

    Raises: TypeError and ValueError as `s24.nn.Linear`, and ValueError for an activation or a width that the
        method cannot use; a call raises as `s24.sparse_ffn`."""

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
        if self._learned:
            self.router = nnx.Param(jnp.zeros_like(self.up.state[self._learned][...]))

    @property
    def path(self) -> str:
        """Of the block in the model, for messages, where a loop has told its layers."""
        return self.up.path.removesuffix("up").removesuffix(".")

    @naming_its_layer
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = self.up, self.down
        check_alike("FFN", up=up, down=down)
        if not (up.active and down.active) or up.adapted or down.adapted or not x.size:
            return down(ACTIVATIONS[self.activation](up(x)))
        up.check_current()
        down.check_current()
        x, w1, b1, w2, b2 = self._promoted(x)
        options = {"b1": b1, "activation": self.activation, "implementation": up.implementation}
        state, tokens = self._state(), x.reshape(-1, x.shape[-1])
        y = sparse_ffn(x, w1, w2, up.method, state, up.noise_key(), **options)
        if up.method.router:
            router = self.router[...] if self._learned else None
            y = up.method.router.learn(y, state["w1"], router, tokens, w1)
        return y if b2 is None else y + b2

    def activation_stats(self, x: jax.Array) -> dict[str, jax.Array]:
        """How sparse the activations of `x` are, and what the method's sparse products drop of them.

        The adapters are left out, and a layer in dense mode reports what its method would drop.

        x: (..., d).

        Returns: a dict of float32 scalars, see `s24.activation_stats`.
        Raises: as `s24.activation_stats`."""
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
        learned = {self._learned: jax.lax.stop_gradient(self.router[...])} if self._learned else {}
        return {"w1": self.up.method_state() | learned, "w2": self.down.method_state()}

    @property
    def _learned(self) -> str:
        """Name of the entry of w1's state that the parameter `router` replaces; "" without one."""
        return self.up.method.router.learned if self.up.method.router else ""


class GatedFFN(nnx.Module):
    """`down(act(gate(x)) * up(x))`, whose three linear layers run as `method` says.

    For activation="silu" it is SwiGLU. Without biases, one differentiation rule covers all three layers where
    a kernel of `s24.gated` was measured to be faster than XLA. `gate`, `up` (d, f) and `down` (f, d) are
    `s24.nn.Linear` layers. A call takes x, (..., d), and returns (..., d).

    d, f: model and FFN width.
    method: from `s24.methods`, one that has a plan for a single linear layer; None for dense products.
    activation, use_bias, rngs, linear: as in `FFN`.

    Raises: as `s24.nn.Linear`, and ValueError for an unknown activation; a call raises as `s24.sparse_dot`.
    """

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

    @property
    def path(self) -> str:
        """Of the block in the model, for messages, where a loop has told its layers."""
        return self.up.path.removesuffix("up").removesuffix(".")

    @naming_its_layer
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = {"gate": self.gate, "up": self.up, "down": self.down}
        check_alike("GatedFFN", **layers)
        if any(not layer.active or layer.adapted for layer in layers.values()):
            return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))
        for layer in layers.values():
            layer.check_current()
        xs, weights = [], []
        for layer in layers.values():
            bias = None if layer.bias is None else layer.bias[...]
            own_x, w, bias = dtypes.promote_dtype((x, layer.kernel[...], bias), dtype=layer.dtype)
            xs.append(own_x)
            weights.append(Weight(w, layer.method_state(), layer.noise_key(), bias))
        return gated_ffn(xs[:2], *weights, self.up.method, self.activation, self.up.implementation)
