"""Flax Linen layers: parameters as those of `flax.linen.Dense`, and the method's state in a collection of its
own."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, traverse_util
from flax.core import meta
from flax.linen import dtypes

from jax_sparse24.dispatch.decision import check_implementation
from jax_sparse24.engine.ffn import check_fits, check_widths, sparse_ffn
from jax_sparse24.engine.linear import sparse_dot
from jax_sparse24.engine.operand import ACTIVATIONS, check_activation
from jax_sparse24.methods import Dense as DenseMethod
from jax_sparse24.methods.base import Method
from jax_sparse24.nn.linear import ROLES, check_fit, check_method, checksum
from jax_sparse24.patterns import check_input

COLLECTION = "sparse24"  # of the state, and of the random numbers
_KERNEL_INIT = linen.initializers.lecun_normal()
_BIAS_INIT = linen.initializers.zeros_init()


class Weight(linen.Module):
    """The parameters of a linear layer, and what its method keeps.

    features: width of the output.
    method, use_bias, dtype, param_dtype, kernel_init, bias_init, implementation: as in `Dense`.
    role: the weight's name in the method's plan, "w", "w1" or "w2"."""

    features: int
    method: Method | None = None
    use_bias: bool = True
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: jax.nn.initializers.Initializer = _KERNEL_INIT
    bias_init: jax.nn.initializers.Initializer = _BIAS_INIT
    implementation: str | None = None
    role: str = "w"

    @linen.compact
    def __call__(self, width: int) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
        """Kernel, bias (None without one) and state of a layer.

        width: of the input."""
        method = _method("Dense", self.method, self.implementation)
        check_fit(method, width, self.features, self.role)
        kernel = self.param("kernel", self.kernel_init, (width, self.features), self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        state = {}
        if method.state_shapes(kernel.shape, self.role):
            if not (self.has_variable(COLLECTION, self.role) or self.is_mutable_collection(COLLECTION)):
                raise ValueError(
                    f"Dense: here are parameters, as of a dense checkpoint, but no collection {COLLECTION!r} "
                    f"with the state of {method}. Make it by init and compute it anew: s24.linen.refresh("
                    "{**model.init(key, x), 'params': params}, method)."
                )
            state = self.variable(COLLECTION, self.role, lambda: method.init(kernel, self.role)).value
        return kernel, bias, state


class Dense(linen.Module):
    """`y = x @ kernel + bias` whose three products run as `method` says; it replaces `flax.linen.Dense`.

    Parameters, their names and their initial values are those of `flax.linen.Dense`. State of the method,
    such as a mask, is in the collection "sparse24", which `s24.linen.refresh` computes anew. A call takes x,
    (..., in), and returns (..., features). For a dense phase, apply the same model built with method=None: it
    has the same parameters, and leaves the collection alone.

    Noise of a method that draws comes from `rngs={"sparse24": key}` in `apply`, to be a new key in every step
    and micro-batch; without it noise depends on the kernel, and so advances as the kernel moves.

    features: width of the output; a multiple of 4 where the method's groups lie along it.
    method: from `s24.methods`, one without low-rank adapters; None for dense products.
    use_bias: whether the layer has a bias.
    dtype: of the products; None for the promoted dtype of input and parameters.
    param_dtype: of kernel and bias.
    kernel_init, bias_init: initialisers, as in `flax.linen.Dense`.
    implementation: None to choose, or "reference", "ffi" or "cusparselt".

    Raises: a call raises TypeError (method), ValueError (widths, implementation, a method that has no plan
        for a single layer or that trains adapters, variables without the state), and as `s24.sparse_dot`."""

    features: int
    method: Method | None = None
    use_bias: bool = True
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: jax.nn.initializers.Initializer = _KERNEL_INIT
    bias_init: jax.nn.initializers.Initializer = _BIAS_INIT
    implementation: str | None = None

    def setup(self) -> None:
        options = (self.use_bias, self.dtype, self.param_dtype, self.kernel_init, self.bias_init)
        self.weight = Weight(self.features, self.method, *options, self.implementation)
        linen.share_scope(self, self.weight)

    def __call__(self, x: jax.Array) -> jax.Array:
        check_input("Dense", x)
        kernel, bias, state = self.weight(x.shape[-1])
        key = _noise_key(self, self.method, kernel)
        x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        if self.method is None:
            y = x @ kernel
            return y if bias is None else y + bias
        return sparse_dot(x, kernel, self.method, state, key, bias=bias, implementation=self.implementation)


class FFN(linen.Module):
    """`down(act(up(x)))`: all six products run as `method` says, under one differentiation rule.

    Parameters are those of two layers `flax.linen.Dense` with the names "up", (d, f), and "down", (f, d). A
    call takes x, (..., d), and returns (..., d). State, noise and dense phases are as in `Dense`.

    f: FFN width.
    method: from `s24.methods`, one without low-rank adapters that puts no neurons into an order; None for
        dense products.
    activation: "squared_relu", "relu", "gelu" or "silu".
    use_bias, dtype, param_dtype, kernel_init, bias_init, implementation: as in `Dense`.

    Raises: as `Dense`, and ValueError for an activation or widths that the method cannot use; a call raises
        as `s24.sparse_ffn`."""

    f: int
    method: Method | None = None
    activation: str = "squared_relu"
    use_bias: bool = False
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: jax.nn.initializers.Initializer = _KERNEL_INIT
    bias_init: jax.nn.initializers.Initializer = _BIAS_INIT
    implementation: str | None = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        check_input("FFN", x)
        d, method = x.shape[-1], _method("FFN", self.method, self.implementation)
        check_activation("FFN", self.activation)
        if method.router is not None:
            raise ValueError(
                f"FFN: {method} puts neurons into an order; use s24.nn.FFN, or nnx.bridge.to_linen of it."
            )
        check_fits("FFN", method, self.activation)
        check_widths("FFN", method, d, self.f)
        options = (self.use_bias, self.dtype, self.param_dtype, self.kernel_init, self.bias_init)
        up = Weight(self.f, method, *options, self.implementation, "w1", name="up")
        down = Weight(d, method, *options, self.implementation, "w2", name="down")
        (w1, b1, state1), (w2, b2, state2) = up(d), down(self.f)
        key = _noise_key(self, self.method, w1)
        x, w1, b1, w2, b2 = dtypes.promote_dtype(x, w1, b1, w2, b2, dtype=self.dtype)
        if self.method is None:
            y = x @ w1
            y = ACTIVATIONS[self.activation](y if b1 is None else y + b1) @ w2
        else:
            state = {"w1": state1, "w2": state2}
            named = {"b1": b1, "activation": self.activation, "implementation": self.implementation}
            y = sparse_ffn(x, w1, w2, method, state, key, **named)
        return y if b2 is None else y + b2


def refresh(variables: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """The variables of a model with all state in the collection "sparse24" computed anew.

    Call it before a step for which `s24.due(method, step)` is true, as a dense phase ends, and after
    parameters were loaded into a new model. It works under jit and with layers that `flax.linen.scan` stacks
    along axis 0. A stack along another axis is refused where the shapes of state and bias tell, and gets
    wrong masks where they do not.

    variables: of `init`, with the collections "params" and, if the method has state, "sparse24".
    method: the method of all layers.

    Returns: a dict like `variables`.
    Raises: TypeError if `method` is none; ValueError for state of another method, or without its kernel, and
        for state or a bias whose shape does not fit the kernel's."""
    new = {
        path: method.refresh(state, kernel, path[-1])
        for path, state, kernel in _states("refresh", variables, method)
    }
    return {**variables, COLLECTION: traverse_util.unflatten_dict(new)} if new else dict(variables)


def masks(variables: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """The masks in use, for `s24.optim.masked_decay`.

    variables, method: as in `refresh`.

    Returns: a tree like `variables["params"]`: bool arrays of a kernel's shape, True where a weight is kept,
        and a scalar True for every parameter without a mask. Masks are the stored ones, or those that the
        method chooses for the kernels as they are.
    Raises: as `refresh`; ValueError for a method with masked decay that keeps no state, such as `SRSTE`, of
        which variables do not tell what layers it makes sparse."""
    check_method("masks", method)
    if method.training(1).decay.rate and not method.state_shapes((8, 8)):
        raise ValueError(
            f"masks: {method} keeps no state, so that variables do not tell which layers it makes sparse, "
            "and its decay would act on none. Give the optimiser method.fresh_mask(kernel) for the kernels "
            "of these layers, and True for all other parameters."
        )
    in_use = {}
    for path, state, kernel in _states("masks", variables, method):
        mask = state["mask"] if "mask" in state else method.fresh_mask(kernel)
        if mask is not None:
            in_use[(*path[:-1], "kernel")] = mask
    params = traverse_util.flatten_dict(variables["params"])
    found = {
        path: meta.replace_boxed(param, in_use.get(path, jnp.ones((), bool)))
        for path, param in params.items()
    }
    return traverse_util.unflatten_dict(found)


def _states(op: str, variables: Mapping[str, Any], method: Method):
    """(path with the role at its end, state, kernel) of every layer with state."""
    check_method(op, method)
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(f"{op}: needs the variables of a model, a dict with 'params', got {variables!r:.60}.")
    params = traverse_util.flatten_dict(variables["params"])
    layers: dict[tuple, dict] = {}
    for path, value in traverse_util.flatten_dict(variables.get(COLLECTION, {})).items():
        layers.setdefault(path[:-1], {})[path[-1]] = value
    for path, state in layers.items():
        place = "/".join(path[:-1]) or "the model"
        kernel = meta.unbox(params.get((*path[:-1], "kernel")))  # of the names of its axes
        if path[-1] not in ROLES or kernel is None:
            raise ValueError(f"{op}: {place} has state in the collection {COLLECTION!r}, but no kernel.")
        wanted = method.state_shapes(kernel.shape, path[-1])
        if wanted.keys() != state.keys():
            raise ValueError(
                f"{op}: {place} has the state {', '.join(state)}, which is not that of {method}; give the "
                "method of the model's layers."
            )
        beside = {f"state {name!r}": (state[name], like.shape) for name, like in wanted.items()}
        if (bias := meta.unbox(params.get((*path[:-1], "bias")))) is not None:
            beside["bias"] = bias, (*kernel.shape[:-2], kernel.shape[-1])
        for name, (value, shape) in beside.items():
            if value.shape != shape:
                raise ValueError(
                    f"{op}: {place} has a {name} of shape {value.shape}, but beside a kernel of shape "
                    f"{kernel.shape} it must be {shape}. Stack layers along axis 0: give flax.linen.scan "
                    f"variable_axes={{'params': 0, {COLLECTION!r}: 0}}."
                )
        yield path, state, kernel


def _method(op: str, method, implementation) -> Method:
    method = DenseMethod() if method is None else method
    check_method(op, method)
    check_implementation(op, implementation)
    if method.trains_adapters:
        raise ValueError(f"{op}: {method} trains low-rank adapters; use s24.nn, or the method without them.")
    if method.histories:
        raise ValueError(
            f"{op}: {method} scales by what earlier steps have seen, which this layer does not observe; use "
            's24.nn, or fp8="tensor".'
        )
    return method


def _noise_key(module: linen.Module, method: Method | None, kernel: jax.Array) -> jax.Array | None:
    if method is None or not method.stochastic:
        return None
    if module.has_rng(COLLECTION):
        return module.make_rng(COLLECTION)
    return jax.random.fold_in(jax.random.key(0), checksum(kernel))
