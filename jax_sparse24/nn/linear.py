"""The sparse linear layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_sparse24 import schedule
from jax_sparse24.dispatch.decision import IMPLEMENTATIONS
from jax_sparse24.engine.linear import sparse_dot
from jax_sparse24.engine.plan import LINEAR, LINEAR_IN_FFN
from jax_sparse24.methods import Dense
from jax_sparse24.methods.base import Method
from jax_sparse24.patterns import check_size

# Names of a weight in a plan: "w" of a layer alone, "w1" and "w2" of the first and second one in an FFN.
ROLES = ("w", *LINEAR_IN_FFN)
_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()


class SparseState(nnx.Variable):
    """What changes in a sparse layer besides its parameters: masks, noise key, step. It belongs in the
    checkpoint."""


class Statistic(SparseState):
    """A running statistic of activations. Its gradient is no gradient but what one step has observed, see
    `s24.nn.observe`."""


class Linear(nnx.Module):
    """`y = x @ kernel + bias` whose three products run as `method` says; it replaces `nnx.Linear`.

    Parameters have the names, shapes and dtypes of `nnx.Linear`: `kernel` (in_features, out_features) and
    `bias` (out_features,). A method with low-rank adapters adds them as parameters in `adapters`. Everything
    else is `SparseState`: `state` (what `method.init` returned), `key` (uint32 (2,), if the method draws
    noise) and `step` (int32, the last optimiser step that `s24.refresh` was told).

    A call takes x, (..., in_features), returns (..., out_features), and is pure. Noise depends on the key,
    the step and the product, so two calls of one layer in one step draw the same noise unless
    `s24.nn.fold_key` separates them.

    in_features, out_features: widths; multiples of 4 where the method's groups lie along them.
    method: from `s24.methods`; None for dense products.
    use_bias: whether the layer has a bias.
    dtype: of the products; None for the promoted dtype of input and parameters.
    param_dtype: of kernel and bias.
    kernel_init, bias_init: initialisers, as in `nnx.Linear`.
    implementation: None to choose, or "reference", "ffi" or "cusparselt".
    role: the weight's name in the method's plan: "w" alone, "w1" or "w2" as first or second layer of an FFN.
    rngs: draws the initial parameters and the noise key.

    Raises: TypeError (method, types of the widths), ValueError (widths, role, implementation, a method that
        has no plan for a single linear layer); a call raises as `s24.sparse_dot`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        method: Method | None = None,
        use_bias: bool = True,
        dtype=None,
        param_dtype=jnp.float32,
        kernel_init=_KERNEL_INIT,
        bias_init=_BIAS_INIT,
        implementation: str | None = None,
        role: str = "w",
        rngs: nnx.Rngs,
    ):
        self.method = Dense() if method is None else method
        if isinstance(method, type):
            raise TypeError(
                f"Linear: method must be an instance, got the class; call it: {method.__name__}()."
            )
        if not isinstance(self.method, Method):
            raise TypeError(f"Linear: method must be one of s24.methods, such as FST(), got {method!r}.")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_size("Linear", name, size)
        if role not in ROLES:
            raise ValueError(f"Linear: role {role!r} is unknown; use one of {', '.join(map(repr, ROLES))}.")
        if implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(
                f"Linear: implementation {implementation!r} is unknown; use None or one of {IMPLEMENTATIONS}."
            )
        if role == "w" and self.method.ffn_plan().rows and not self.method.linear_plan().rows:
            raise ValueError(
                f"Linear: {self.method} makes activations sparse and has no table for a single linear layer, "
                f"nor for a block with a gate; use s24.nn.FFN."
            )
        _check_features(self.method, in_features, out_features)
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.param_dtype = dtype, param_dtype
        self.implementation = implementation
        self.role = role
        self.sparse = True
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features), param_dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype)) if use_bias else None
        # The key is drawn for every method, so that models which differ only in their methods start from
        # the same parameters.
        noise_key = rngs.params()
        observed = self.method.router.observed if self.method.router else ()
        self.state = nnx.Dict(
            {
                name: (Statistic if name in observed else SparseState)(value)
                for name, value in self.method.init(self.kernel[...], role).items()
            }
        )
        if self.method.stochastic:
            self.key = SparseState(jax.random.bits(noise_key, (2,), jnp.uint32))
        self.step = SparseState(jnp.zeros((), jnp.int32))
        adapters = self.method.adapters(self.kernel[...], role)
        self.adapters = nnx.Dict({name: nnx.Param(value) for name, value in adapters.items()})
        self.adapting = True

    @property
    def active(self) -> bool:
        """Whether the products run as the method says (see `s24.nn.set_sparse`)."""
        return self.sparse and bool(self.method.ffn_plan().rows)

    @property
    def adapted(self) -> bool:
        """Whether the layer has adapters that are on (see `s24.nn.set_adapting`)."""
        return self.adapting and bool(self.adapters)

    def adapt(self, x: jax.Array) -> jax.Array:
        """What the adapters add to the output.

        x: (..., in_features).

        Returns: (..., out_features), of the promoted dtype of x and adapters."""
        return self.method.adapt(x, {name: v[...].astype(x.dtype) for name, v in self.adapters.items()})

    def noise_key(self) -> jax.Array | None:
        """The PRNG key of this step's noise, or None if the method draws none."""
        if not self.method.stochastic:
            return None
        return jax.random.fold_in(jax.random.wrap_key_data(self.key[...]), self.step[...])

    def method_state(self) -> dict[str, jax.Array]:
        """The method's arrays for this layer, by name."""
        return {name: value[...] for name, value in self.state.items()}

    def mask(self) -> jax.Array | None:
        """The mask in use: the stored one, or the one that the method chooses for the kernel as it is.

        Returns: bool, the kernel's shape; None if the method masks no weight."""
        if "mask" in self.state:
            return self.state["mask"][...]
        return self.method.fresh_mask(self.kernel[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = dtypes.promote_dtype((x, self.kernel[...], bias), dtype=self.dtype)
        if self.active:
            state, key = self.method_state(), self.noise_key()
            y = sparse_dot(x, kernel, self.method, state, key, bias=bias, implementation=self.implementation)
        else:
            y = x @ kernel if bias is None else x @ kernel + bias
        return y + self.adapt(x) if self.adapted else y

    def reset(self) -> None:
        """Gives the layer the state and adapters of a new layer with its kernel, see `s24.nn.reset`."""
        for name, value in self.method.init(self.kernel[...], self.role).items():
            self.state[name][...] = value
        for name, value in self.method.adapters(self.kernel[...], self.role).items():
            self.adapters[name][...] = value

    def refresh(self, step=None, due: bool | None = None) -> None:
        """Records the step and recomputes the method's state if it is due, see `s24.refresh`.

        The layer may be a stack of layers, whose variables have leading axes.

        step, due: as in `s24.refresh`."""
        if step is not None:
            self.step[...] = jnp.broadcast_to(jnp.asarray(step, jnp.int32), self.step.shape)
        old = self.method_state()
        if not self.method.refresh_every or not old or not self.active:
            return
        kernel = self.kernel[...]
        if due is None:
            due = step is None or schedule.due(self.method, step)
        if isinstance(due, jax.core.Tracer):
            new = jax.lax.cond(due, self._refreshed, _unchanged, old, kernel)
        else:
            new = self._refreshed(old, kernel) if due else {}
        for name, value in new.items():
            self.state[name][...] = value

    def _refreshed(self, state, kernel):
        return self.method.refresh(state, kernel, self.role)


def check_alike(block: str, **layers: Linear) -> None:
    """Raises unless the layers of a block have the same method, implementation and dtype.

    One plan and one differentiation rule serve the whole block, so the layers must agree on these.

    block: the block's name, for messages.
    layers: the layers by their names in the block.

    Raises: TypeError for a layer that is no `s24.nn.Linear`, ValueError where layers differ."""
    for name, layer in layers.items():
        if not isinstance(layer, Linear):
            raise TypeError(
                f"{block}: {name} must be an s24.nn.Linear, got {type(layer).__name__}; write "
                f"a block of other layers as a module of your own."
            )
    for what in ("method", "implementation", "dtype"):
        values = {name: getattr(layer, what) for name, layer in layers.items()}
        if what == "dtype":
            values = {name: value and jnp.dtype(value) for name, value in values.items()}
        if len(set(values.values())) > 1:
            found = ", ".join(f"{name}.{what} is {value}" for name, value in values.items())
            raise ValueError(
                f"{block}: {found}; its layers run as one, so all must have the same {what}: replace all of "
                f"them, or use s24.nn.set_sparse to make one dense."
            )


def _unchanged(state, kernel):
    return state


def _check_features(method: Method, in_features: int, out_features: int) -> None:
    for name, row in method.linear_plan().rows:
        if row.operand == "w":
            contracted = dict(LINEAR[name])["w"]
            row.by.check("Linear", (in_features, out_features), contracted, "kernel")
