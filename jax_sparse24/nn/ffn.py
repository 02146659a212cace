"""Feed-forward blocks of transformers, with and without a gate."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jax_sparse24.engine.call import cut_over_mesh
from jax_sparse24.engine.ffn import check_fits, check_widths, sparse_ffn
from jax_sparse24.engine.gated import Weight, gated_ffn
from jax_sparse24.engine.operand import ACTIVATIONS, check_activation
from jax_sparse24.engine.stats import activation_stats
from jax_sparse24.methods.base import Method
from jax_sparse24.methods.dense import Dense
from jax_sparse24.nn.linear import Linear, block_axes, check_alike, naming_its_layer, specs_of


class Block(nnx.Module):
    """What feed-forward blocks share: they know their linear layers by what these do.

    roles: of the linear layers, which are the names of their attributes too, but for `names`.
    names: for a block that stands in place of another, pairs of a role and the layer's path in the block,
        such as ("up", "layers/0")."""

    roles: ClassVar[tuple[str, ...]] = ("up", "down")
    names: tuple[tuple[str, str], ...] = ()

    @property
    def places(self) -> dict[str, tuple[str, ...]]:
        """The paths of the linear layers in the block, as names of attributes, by their roles."""
        return {role: tuple(dict(self.names).get(role, role).split("/")) for role in self.roles}

    @property
    def parts(self) -> dict[str, Linear]:
        """All linear layers, by their roles: each an `s24.nn.Linear`, unless a user put another one there."""
        return {role: functools.reduce(getattr, place, self) for role, place in self.places.items()}

    def _specs(self, **roles: str) -> dict[str, PartitionSpec] | None:
        """How the operands of an engine are cut, see `specs_of`.

        roles: of the layers, by the names of their weights in the engine.

        Returns: as `specs_of`."""
        places, parts = self.places, self.parts
        layers = {name: (".".join(places[role]), parts[role]) for name, role in roles.items()}
        return specs_of(type(self).__name__, **layers)

    @property
    def path(self) -> str:
        """Of the block in the model, for messages, where a loop has told its layers."""
        return self.parts["up"].path.removesuffix(".".join(self.places["up"])).removesuffix(".")


class FFN(Block):
    """`down(act(up(x)))`: all six products run as `method` says, under one differentiation rule.

    `up` (d, f) and `down` (f, d) are `s24.nn.Linear` layers, so parameters are named as in a plain block. A
    method with a learned router adds the parameter `router`, float32 (d, clusters). A call takes x, (..., d),
    and returns (..., d).

    d, f: model and FFN width.
    method: from `s24.methods`; None for dense products.
    activation: "squared_relu", "relu", "gelu" or "silu".
    use_bias: whether both layers have a bias.
    rngs: draws the initial parameters and noise keys.
    linear: other arguments of both `s24.nn.Linear` layers, such as `dtype` or `implementation`; `axes` are
        the names of the logical axes of the block, such as ("embed", "mlp"), those of d and of f.

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
        **linear: Any,
    ):
        check_activation("FFN", activation)
        self.activation = activation
        axes = block_axes("FFN", linear)
        linear |= {"method": method, "use_bias": use_bias, "rngs": rngs}
        self.up = Linear(d, f, role="w1", axes=axes, **linear)
        check_fits("FFN", self.up.method, activation)
        check_widths("FFN", self.up.method, d, f)
        self.down = Linear(f, d, role="w2", axes=axes and axes[::-1], **linear)
        self.prepare()

    def prepare(self) -> None:
        """Gives the block, whose layers are there, the parameters that its method learns besides."""
        if self._learned:
            self.router = nnx.Param(jnp.zeros_like(self.parts["up"].state[self._learned][...]))

    @naming_its_layer
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = self.parts
        check_alike("FFN", **layers)
        up, down = layers["up"], layers["down"]
        if not (up.active and down.active) or up.adapted or down.adapted or not x.size:
            return down(ACTIVATIONS[self.activation](up(x)))
        up.check_current()
        down.check_current()
        x, w1, b1, w2, b2 = self._promoted(x)
        options = {"b1": b1, "activation": self.activation, "implementation": up.implementation}
        options["specs"] = self._specs(w1="up", w2="down")
        state, tokens = self._state(), x.reshape(-1, x.shape[-1])
        y = sparse_ffn(x, w1, w2, up.method, state, up.noise_key(), **options)
        if up.method.router:
            router = self.router[...] if self._learned else None
            cut = cut_over_mesh("FFN", "ffn", up.method, options["specs"], state, x=x, w1=w1, w2=w2)
            y = up.method.router.learn(y, state["w1"], router, tokens, w1, b1, cut)
        if b2 is None:
            return y
        own = jax.typeof(y).sharding
        if own.mesh.explicit_axes:  # the bias may rest in pieces, over axes that cut the tokens of y
            b2 = jax.sharding.reshard(b2, PartitionSpec(own.spec[-1]))
        return y + b2

    def activation_stats(self, x: jax.Array) -> dict[str, jax.Array]:
        """How sparse the activations of `x` are, and what the method's sparse products drop of them.

        The adapters are left out, and a layer in dense mode reports what its method would drop.

        x: (..., d).

        Returns: a dict of float32 scalars, see `s24.activation_stats`.
        Raises: as `s24.activation_stats`."""
        layers = self.parts
        check_alike("FFN", **layers)
        up = layers["up"]
        x, w1, b1, *_ = self._promoted(x)
        return activation_stats(
            x,
            w1,
            up.method,
            self._state(),
            up.noise_key(),
            b1=b1,
            activation=self.activation,
            specs=self._specs(w1="up"),
        )

    def _promoted(self, x):
        layers = self.parts.values()
        params = [None if p is None else p[...] for layer in layers for p in (layer.kernel, layer.bias)]
        up = self.parts["up"]
        return up.promote_dtype((x, *params), dtype=up.dtype)

    def _state(self):
        learned = {self._learned: jax.lax.stop_gradient(self.router[...])} if self._learned else {}
        return {"w1": self.parts["up"].method_state() | learned, "w2": self.parts["down"].method_state()}

    @property
    def _learned(self) -> str:
        """Name of the entry of w1's state that the parameter `router` replaces; "" without one."""
        router = self.parts["up"].method.router
        return router.learned if router else ""


class GatedFFN(Block):
    """`down(act(gate(x)) * up(x))`, whose three linear layers run as `method` says.

    For activation="silu" it is SwiGLU. Without biases, one differentiation rule covers all three layers where
    a kernel of `s24.gated` was measured to be faster than XLA. `gate`, `up` (d, f) and `down` (f, d) are
    `s24.nn.Linear` layers. A call takes x, (..., d), and returns (..., d).

    d, f: model and FFN width.
    method: from `s24.methods`, one that has a plan for a single linear layer; None for dense products.
    activation, use_bias, rngs, linear: as in `FFN`.

    Raises: as `s24.nn.Linear`, and ValueError for an unknown activation; a call raises as `s24.sparse_dot`.
    """

    roles = ("gate", "up", "down")

    def __init__(
        self,
        d: int,
        f: int,
        *,
        method: Method | None = None,
        activation: str = "silu",
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **linear: Any,
    ):
        check_activation("GatedFFN", activation)
        self.activation = activation
        axes = block_axes("GatedFFN", linear)
        linear |= {"method": method, "use_bias": use_bias, "rngs": rngs}
        self.gate = Linear(d, f, axes=axes, **linear)
        self.up = Linear(d, f, axes=axes, **linear)
        self.down = Linear(f, d, axes=axes and axes[::-1], **linear)

    @naming_its_layer
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = self.parts
        check_alike("GatedFFN", **layers)
        gate, up, down = layers.values()
        active = [layer.active for layer in layers.values()]
        specs = self._specs(gate="gate", up="up", down="down")
        own = any(layer.adapted or layer.of_dense_products for layer in layers.values())
        apart = own or len(set(active)) > 1
        if apart or not (any(active) or specs):
            return down(ACTIVATIONS[self.activation](gate(x)) * up(x))
        for layer in layers.values():
            layer.check_current()
        method, xs, weights = up.method if up.active else Dense(), [], []
        for layer in layers.values():
            bias = None if layer.bias is None else layer.bias[...]
            own_x, w, bias = layer.promote_dtype((x, layer.kernel[...], bias), dtype=layer.dtype)
            xs.append(own_x)
            own = (layer.method_state(), layer.noise_key()) if up.active else ({}, None)
            weights.append(Weight(w, *own, bias))
        implementation = up.implementation if up.active else None
        return gated_ffn(xs[:2], *weights, method, self.activation, implementation, specs)
