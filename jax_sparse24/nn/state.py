"""Functions on a whole model: its sparse layers, their masks, their modes and the refresh of their state."""

import sys
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse24.engine.float8 import remembered
from jax_sparse24.methods.base import Method
from jax_sparse24.nn.linear import History, Linear, SparseState, Statistic
from jax_sparse24.patterns import check_flag, key_of

_Model = TypeVar("_Model")
FORGETTING = 0.01  # share of a running statistic that an optimiser step replaces


def equinox_of(model: Any) -> ModuleType | None:
    """`jax_sparse24.nn.equinox` for a model of Equinox, which is not imported for other models.

    model: any object.

    Returns: the module; None for other objects."""
    library = sys.modules.get("equinox")
    if library is None or not isinstance(model, library.Module):
        return None
    from jax_sparse24.nn import equinox

    return equinox


def _changed(model: Any, change) -> Any:
    """A model whose sparse layers a function of an NNX module has changed: in place if it is one of NNX."""
    library = equinox_of(model)
    module = library.products(model) if library else model
    change(module)
    return library.with_products(model, module) if library else model


def sparse_layers(model: nnx.Module) -> list[tuple[tuple, Linear]]:
    """All layers of the model that a method makes sparse.

    model: any NNX module.

    Returns: (path, layer) of every `s24.nn.Linear` whose method is not dense, in the order of the graph.
    Raises: TypeError if `model` is no NNX module."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"s24.nn: needs the model, an nnx.Module, got {type(model).__name__}.")
    return [
        (path, m) for path, m in nnx.iter_modules(model) if isinstance(m, Linear) and m.method.ffn_plan().rows
    ]


def layers_of(op: str, model: nnx.Module) -> list[tuple[str, Linear]]:
    """(path, layer) of every sparse layer, for a function that would do nothing where there are none.

    Arrays of NumPy in the model become arrays of JAX.

    Raises: TypeError if `model` is no NNX module, ValueError if it holds no layer of s24.nn, or a sparse one
        in a stack whose axes do not come first. A model whose layers have the method Dense is taken as it is.
    """
    try:
        found = sparse_layers(model)
    except TypeError as error:
        got = type(model).__name__
        raise TypeError(f"{op}: needs the model, an nnx.Module, got {got}.") from error
    if not found and not any(isinstance(m, Linear) for _, m in nnx.iter_modules(model)):
        raise ValueError(
            f"{op}: this {type(model).__name__} has 0 sparse layers, and no layer of s24.nn at all; make it "
            "sparse by s24.sparsify(model, method), build it from s24.nn.FFN, GatedFFN, MoE or Linear, or "
            "leave this call out."
        )
    for _, variable in nnx.iter_graph(model):  # arrays of NumPy, as of a checkpoint, would be written into
        if isinstance(variable, nnx.Param | SparseState) and isinstance(variable.get_raw_value(), np.ndarray):
            variable.set_value(jnp.array(variable.get_raw_value()))
    named = [(".".join(map(str, path)) or "the model", layer) for path, layer in found]
    for path, layer in named:
        layer.check_stack(path)
    return named


def refresh(
    model: _Model,
    step: jax.typing.ArrayLike | None = None,
    *,
    due: bool | frozenset[Method] | None = None,
) -> _Model:
    """Recomputes the stored masks and other state of every sparse layer that is due, in place.

    Call it once per optimiser step, before that step's forward pass; never in evaluation or per micro-batch.
    It works inside jit, and with layers that are stacked along axis 0. A layer in dense mode records the
    step, and that its state is due as soon as it is sparse again. A weight matrix with NaN or Inf keeps its
    old state, because a mask that they chose would outlive them.

    model: any NNX module; or an Equinox module of `s24.sparsify`, which stays as it is.
    step: number of the optimiser step, an int or a traced int32. Every layer records it, because its noise
        depends on it, and recomputes its state if its method's `refresh_every` divides it, or if it was not
        recomputed since the layer was constructed or was in dense mode. None records nothing and recomputes
        all state now.
    due: whether state is recomputed, if the caller knows (see `s24.due`), or the methods whose state is; None
        to decide here. A traced step is decided on the device, and the host of a GPU waits for each such
        decision.

    Returns: the model; of Equinox a copy, to be used in place of it.
    Raises: TypeError if `model` is no such module or `due` neither; ValueError if `step` is no step number,
        the model has no layer of `s24.nn`, layers are stacked along another axis (as far as it can be told,
        see `s24.nn.Linear`), or, outside of jit, a layer in sparse mode has the state of a dense phase,
        neurons that were never arranged (`s24.nn.arrange`), or a scale that is not finite and greater than 0.
    """
    number = isinstance(step, jax.Array) or hasattr(step, "__index__")
    whole = number and jnp.ndim(step) == 0 and jnp.issubdtype(jnp.result_type(step), jnp.integer)
    if not (step is None or whole) or (isinstance(step, int | np.integer) and step < 0):
        raise ValueError(f"refresh: step={step!r} must be the number of the optimiser step, an int >= 0.")
    if equinox_of(model):
        return _changed(model, lambda module: refresh(module, step, due=due))
    some = isinstance(due, frozenset) and all(isinstance(method, Method) for method in due)
    if not some and due is not None and getattr(due, "dtype", type(due)) not in (bool, jnp.dtype(bool)):
        raise TypeError(f"refresh: due={due!r} must be True, False, None, or a frozenset of methods.")
    for path, layer in layers_of("refresh", model):
        if step is not None:
            layer.check_mode(path)
            layer.check_arranged(path)
        layer.refresh(step, layer.method in due if some else due)
        layer.check_values(path)
    return model


def reset(model: nnx.Module) -> None:
    """Gives every sparse layer the state and adapters of a new layer with its kernel, in place.

    Use it after kernels were set in a finished model, such as to those of a trained one. Noise keys and steps
    stay.

    model: any NNX module.

    Raises: TypeError if `model` is no NNX module, ValueError if it has no layer of `s24.nn`."""
    for _, layer in layers_of("reset", model):
        layer.reset()


def set_sparse(model: _Model, sparse: bool) -> _Model:
    """Switches every sparse layer between its method's products and dense ones, in place.

    Parameters and masks stay. The mode is static: a compiled function is compiled anew after a switch. The
    state records it too, so that a checkpoint of a dense phase is not taken for one of a sparse phase; and
    masks are due if the kernels have moved since sparse mode was left.

    model: any NNX module; or an Equinox module of `s24.sparsify`, which stays as it is.
    sparse: True for the method's products, False for dense ones.

    Returns: the model; of Equinox a copy, to be used in place of it.
    Raises: TypeError if `model` is no such module, or `sparse` no bool; ValueError if the model has no layer
        of `s24.nn`."""
    check_flag("set_sparse", "sparse", sparse)
    if equinox_of(model):
        return _changed(model, lambda module: set_sparse(module, sparse))
    for _, layer in layers_of("set_sparse", model):
        layer.set_sparse(bool(sparse))
    return model


def masks(model: Any) -> Any:
    """The masks in use, for `s24.optim.masked_decay`.

    They are the stored masks, or those that a method which chooses anew in every step chooses for the weights
    as they are.

    model: any NNX module; or an Equinox module of `s24.sparsify`.

    Returns: a tree like `nnx.state(model, nnx.Param)`, or for Equinox like
        `eqx.filter(model, eqx.is_inexact_array)`: bool arrays of a kernel's shape, True where a weight is
        kept, and a scalar True for every parameter without a mask.
    Raises: TypeError if `model` is no such module, ValueError if it has no layer of `s24.nn`."""
    if library := equinox_of(model):
        return library.masks_like(library.parameters(model)[0], masks(library.products(model)))
    layers_of("masks", model)
    in_use = {
        (*path, "kernel"): mask
        for path, layer in sparse_layers(model)
        if layer.sparse and (mask := layer.mask()) is not None
    }
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return nnx.from_flat_state(
        [(path, v.replace(in_use.get(path, jnp.ones((), bool)))) for path, v in params]
    )


def observe(state: nnx.State, seen: nnx.State) -> nnx.State:
    """Updates running statistics with what one optimiser step has observed.

    Each statistic is multiplied by 0.99, and the observation is added; of the magnitudes by which FP8 scales
    are delayed, those of the last 16 steps are kept. What a step did not observe, as in a dense phase, stays.
    Call it after the step: then a step chooses by what earlier steps have observed, and no token influences
    the choice for tokens before it. For example:
    `nnx.update(model, s24.nn.observe(nnx.state(model, s24.nn.Statistic), seen))`.

    state: the variables, such as `nnx.state(model, s24.nn.Statistic)`.
    seen: the gradient with respect to the `Statistic` variables, as `jax.grad` gives it beside that of the
        parameters; over micro-batches their sum or mean.

    Returns: a copy of `state` with new statistics; an equal copy if it holds none. Zeros leave a running
        statistic as it is, as a dense phase does.
    Raises: TypeError if `state` or `seen` is no `nnx.State`; ValueError if `seen` has none of the statistics,
        as the gradient of the parameters alone."""
    for name, value in (("state", state), ("seen", seen)):
        if not isinstance(value, nnx.State):
            raise TypeError(
                f"observe: {name} must be an nnx.State, such as nnx.state(model, s24.nn.Statistic) or the "
                f"gradient with respect to it, got {type(value).__name__}."
            )
    seen = dict(nnx.to_flat_state(seen))
    statistics = [path for path, v in nnx.to_flat_state(state) if issubclass(v.type, Statistic)]
    if statistics and not any(path in seen for path in statistics):
        raise ValueError(
            f"observe: seen has none of the {len(statistics)} statistics of state, such as "
            f"{'.'.join(map(str, statistics[0]))}. It must be the gradient with respect to the Statistic "
            "variables, beside that of the parameters."
        )

    def add(path, variable):
        if path not in seen:
            return variable
        own, new = variable[...], seen[path][...]
        if issubclass(variable.type, History):
            return variable.replace(remembered(own, new))
        return variable.replace(jnp.where(jnp.any(new), (1 - FORGETTING) * own + new, own))

    return nnx.from_flat_state([(path, add(path, v)) for path, v in nnx.to_flat_state(state)])


def fold_key(state: nnx.State, data: jax.typing.ArrayLike) -> nnx.State:
    """Folds a number into every noise key, so that every micro-batch of a step draws its own noise.

    Give the copy to the loss, and keep the original.

    state: the variables, such as `nnx.state(model, s24.nn.SparseState)`.
    data: the number, such as the index of a micro-batch; an int or an integer scalar.

    Returns: a copy of `state` with new noise keys.
    Raises: TypeError if `state` is no `nnx.State`, or `data` no single integer."""

    if not isinstance(state, nnx.State):
        raise TypeError(
            f"fold_key: needs a state, such as nnx.state(model, s24.nn.SparseState), "
            f"got {type(state).__name__}."
        )
    if jnp.ndim(data) or not jnp.issubdtype(jnp.result_type(data), jnp.integer):
        raise TypeError(f"fold_key: data must be one integer, such as a micro-batch index, got {data!r}.")

    def fold(path, variable):
        if path[-1] != "key" or not issubclass(variable.type, SparseState):
            return variable
        words = variable[...]
        folded = jax.random.fold_in
        for _ in words.shape[:-1]:
            folded = jax.vmap(folded, in_axes=(0, None))
        return variable.replace(jax.random.key_data(folded(key_of(words), data)))

    return nnx.from_flat_state([(path, fold(path, v)) for path, v in nnx.to_flat_state(state)])
