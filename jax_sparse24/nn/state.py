"""Walking a model: sparse layers, their masks, modes and refreshes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse24.nn.linear import Linear, SparseState
from jax_sparse24.patterns import check_flag

FORGETTING = 0.01  # share of a running statistic that an optimiser step replaces


def sparse_layers(model: nnx.Module) -> list[tuple[tuple, Linear]]:
    """(path, layer) of every `Linear` of this package in the model whose method is not dense, in the order of
    the graph."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"s24.nn: needs the model, an nnx.Module, got {type(model).__name__}.")
    return [
        (path, m) for path, m in nnx.iter_modules(model) if isinstance(m, Linear) and m.method.ffn_plan().rows
    ]


def refresh(model: nnx.Module, step=None, *, due: bool | None = None) -> None:
    """Recomputes cached masks, in place. Call it once per optimiser step, before that step's forward pass.

    step: the optimiser step, an int or a traced int32. It is recorded in every layer, where it enters the
    noise key, and a layer's state is recomputed when its method's `refresh_every` divides it. Without `step`,
    all state is recomputed now. due: whether anything is recomputed, if the caller knows: a traced step
    decides on the device, and a GPU's host waits for each such decision. Layers in dense mode only record the
    step. A weight matrix that holds NaN or Inf keeps the state it has: a mask chosen by them would outlive
    them. Never call it in evaluation or per micro-batch. Works inside jit and with stacked layers."""
    whole = step is None or (jnp.ndim(step) == 0 and jnp.issubdtype(jnp.result_type(step), jnp.integer))
    if not whole or (isinstance(step, int | np.integer) and step < 0):
        raise ValueError(f"refresh: step={step!r} must be the number of the optimiser step, an int >= 0.")
    if due is not None and getattr(due, "dtype", type(due)) not in (bool, jnp.dtype(bool)):
        raise TypeError(f"refresh: due={due!r} must be True, False or None.")
    for _, layer in sparse_layers(model):
        layer.refresh(step, due)


def reset(model: nnx.Module) -> None:
    """Gives every sparse layer the state and the adapters that a new layer with its kernel has, in place.

    For kernels that were set after the model was made, such as those of a trained model. Noise keys and steps
    stay."""
    for _, layer in sparse_layers(model):
        layer.reset()


def set_sparse(model: nnx.Module, sparse: bool) -> None:
    """Switches every sparse layer between its method's products and dense ones, in place; parameters and
    state stay.

    The mode is static: a compiled function is compiled anew after a switch.
    """
    check_flag("set_sparse", "sparse", sparse)
    for _, layer in sparse_layers(model):
        layer.sparse = bool(sparse)


def masks(model: nnx.Module):
    """A tree like `nnx.state(model, nnx.Param)` whose leaves are the masks in use: bool, True where a weight
    is kept.

    Stored masks, or fresh ones of methods that choose anew in every step. Parameters without a mask get a
    scalar True. For `s24.optim.masked_decay`.
    """
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
    """A copy of a state in which every `Statistic` has forgotten a hundredth and gained what a step has seen.

    seen: the gradient with respect to the `Statistic` variables, as `jax.grad` gives it beside that of the
    parameters, of one optimiser step (over micro-batches: their sum or mean). Call it after the step, so that
    a step chooses by what earlier steps have seen and no token chooses for those before it. Without
    statistics the copy is the state. Example: `nnx.update(model, s24.nn.observe(nnx.state(model,
    s24.nn.Statistic), seen))`."""
    seen = dict(nnx.to_flat_state(seen))

    def add(path, variable):
        if path not in seen:
            return variable
        return variable.replace((1 - FORGETTING) * variable[...] + seen[path][...])

    return nnx.from_flat_state([(path, add(path, v)) for path, v in nnx.to_flat_state(state)])


def fold_key(state: nnx.State, data) -> nnx.State:
    """A copy of a state of `SparseState` variables in which every noise key is folded with `data`, such as a
    micro-batch index.

    Give the copy to the loss, so that every micro-batch of a step draws its own noise; keep the original.
    """

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
        return variable.replace(jax.random.key_data(folded(jax.random.wrap_key_data(words), data)))

    return nnx.from_flat_state([(path, fold(path, v)) for path, v in nnx.to_flat_state(state)])
