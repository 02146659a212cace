"""The checks and conversions of arguments that every public engine function does before a kernel runs."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch import shards
from jax_sparse24.dispatch.decision import decide
from jax_sparse24.engine._reverse_only import reverse_only
from jax_sparse24.engine.partition import Partition, check_tokens, partition
from jax_sparse24.engine.plan import Plan
from jax_sparse24.ops.mvue import key_words


def plan_of(op: str, method, name: str) -> Plan:
    """The plan of a method.

    op: the function, for messages.
    method: the instance that the caller gave.
    name: "linear_plan" or "ffn_plan".

    Raises: TypeError if `method` is a class or no method."""
    if isinstance(method, type):
        raise TypeError(f"{op}: method must be an instance, got the class; call it: {method.__name__}().")
    if not hasattr(method, name):
        raise TypeError(f"{op}: method must be one of s24.methods, such as FST(), got {method!r}.")
    return getattr(method, name)()


def prepare(op: str, plan: Plan, implementation, state, key, x, **weights):
    """Checks the arguments of an engine, promotes their dtypes and flattens the leading axes of x to tokens.

    op: the function, for messages.
    plan: of the method.
    implementation, state, key: as the caller gave them.
    x: (..., in).
    weights: matrices (in, out) by name, each of which takes the features that the one before it gives.

    Returns: x as (T, in), the weights, both in the promoted dtype; the state, {} for None; and the key as
        uint32 (2,), None for a plan that draws nothing.
    Raises: TypeError (types, dtypes), ValueError (shapes, missing key), RuntimeError (implementation)."""
    state = {} if state is None else state
    if not isinstance(state, Mapping):
        raise TypeError(f"{op}: state must be a dict of arrays, got {type(state).__name__}.")
    x = patterns.as_array(op, "x", x)
    if jax.sharding.get_abstract_mesh().explicit_axes:
        check_tokens(op, x, jax.typeof(x).sharding.spec)
    weights = {name: patterns.as_array(op, name, w) for name, w in weights.items()}
    for name, w in weights.items():
        if w.ndim != 2:
            raise ValueError(f"{op}: {name} must be a matrix (in, out), got shape {w.shape}.")
    width = x.shape[-1] if x.ndim else None
    for name, w in weights.items():
        if w.shape[0] != width:
            raise ValueError(
                f"{op}: {name} of shape {w.shape} takes {w.shape[0]} features, but its input has {width}."
            )
        width = w.shape[1]
    if plan.stochastic:
        if key is None:
            raise ValueError(
                f"{op}: this method draws random numbers; pass key=jax.random.key(...), a new one every step."
            )
        key = key_words(op, key)
    else:
        key = None
    dtype = jnp.result_type(x, *weights.values())
    if implementation is not None:  # with a dense plan, too, a name that cannot run is refused
        decide(op, dtype, implementation)
    tokens = reverse_only(op, x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(dtype))
    return tokens, [reverse_only(op, w.astype(dtype)) for w in weights.values()], state, key


def cut_over_mesh(op: str, products: str, method, specs, states, x, **weights) -> Partition | None:
    """How a call is cut over the mesh in the context.

    op: the function, for messages.
    products: a key of `partition.DIMENSIONS`.
    method: of the call.
    specs: as the caller gave them.
    states: of every weight, by its name.
    x: (..., in), as the caller gave it.
    weights: by name.

    Returns: a `Partition`; None if nothing is cut.
    Raises: ValueError for specs that do not fit, and for a method whose state cannot be cut so."""
    cut = partition(op, products, specs, {"x": jnp.asarray(x), **weights}, method.token_blocks)
    if cut is None or not cut.sizes:
        return cut
    for weight, entries in states.items():
        for entry, value in entries.items():
            shape = weights[weight].shape
            if value.shape == shape:
                shards.check_declared(op, f"state {entry!r} of {weight}", cut.spec(weight), value)
                continue
            for axis in (-2, -1):
                if entry in method.state_axes or shape[axis] not in value.shape:
                    continue
                if axes := cut.over(weight, axis):
                    raise ValueError(
                        f"{op}: {type(method).__name__} keeps {entry!r} of shape {value.shape} for {weight} "
                        f"of shape {shape}, which mesh axis {axes[0]} cuts along axis {axis}: say in "
                        f"the method's state_axes how {entry!r} is cut, or leave that axis of {weight} whole."
                    )
    return dataclasses.replace(cut, state_axes=tuple(method.state_axes.items()))


def in_shards(op: str, cut: Partition | None, key, operands: Mapping, state):
    """The operands of a differentiation rule as meshes need them, and the key of this shard.

    Inside `jax.shard_map` all operands vary over the same manual axes, so that the gradient of one that was
    equal in all shards is summed over them. Where axes are explicit, operands get the types that the
    partition says. Elsewhere nothing changes.

    op: the function, for messages.
    cut: how the call is cut; None if it is not.
    key: uint32 (2,) or None, or a list of these.
    operands: arrays or None, by name.
    state: arrays in any structure.

    Returns: the key, different wherever operands may be, the operands and the state.
    Raises: ValueError for operands that are cut over an explicit mesh axis, where `cut` is None."""
    if cut is None:
        operands, state = shards.whole(op, (operands, state))
    else:
        present = {name: x for name, x in operands.items() if x is not None}
        present, state = cut.resharded(present, state)
        operands = {**operands, **present}
    key = jax.tree.map(lambda words: shards.fold_shard(words, (operands, state)), key)
    return shards.alike((key, operands, state))


def check_bias(op: str, name: str, bias, weight_name: str, weight):
    """A bias in the dtype of its weight.

    op, name, weight_name: the function and the arguments, for messages.
    bias: (out,) or None.
    weight: (in, out).

    Returns: (out,), or None without a bias.
    Raises: ValueError unless the shape fits."""
    if bias is None:
        return None
    if jnp.shape(bias) != (weight.shape[1],):
        raise ValueError(
            f"{op}: {name} has shape {jnp.shape(bias)}, {weight_name} of shape {weight.shape} needs "
            f"({weight.shape[1]},)."
        )
    return reverse_only(op, patterns.as_array(op, name, bias).astype(weight.dtype))


def check_state(op: str, method, state, **weights) -> None:
    """Raises unless a state has the entries, shapes and dtypes that the method gives to its weights.

    op: the function, for messages.
    state: of a layer alone, or that of each weight under its name in an FFN.
    weights: the weight as `w`, or both of an FFN as `w1` and `w2`.

    Raises: ValueError (missing or unknown entries, shapes), TypeError (no dict, no array)."""
    single = "w" in weights
    fix = "method.init(w)" if single else '{"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}'
    fix = f"pass state={fix} of this {type(method).__name__}"
    expected = {role: method.state_shapes(w.shape, role) for role, w in weights.items()}
    unknown = [] if single else [repr(role) for role in state if role not in weights]
    for role, entries in expected.items():
        own, place = (state, "state") if single else (state.get(role, {}), f"state[{role!r}]")
        if not isinstance(own, Mapping):
            raise TypeError(f"{op}: {place} must be a dict of arrays, got {type(own).__name__}; {fix}.")
        others = [entry for entry in own if entry not in entries]
        # A layer of an FFN that is called alone brings the state that it has in the FFN.
        if others and single:
            there = [method.state_shapes(weights[role].shape, r) for r in ("w1", "w2")]
            others = [entry for entry in others if not any(entry in state for state in there)]
        unknown += [f"{place}[{entry!r}]" for entry in others]
        for entry, like in sorted(entries.items()):
            if entry not in own:
                raise ValueError(f"{op}: {place}[{entry!r}] is missing; {fix}.")
            if not hasattr(own[entry], "dtype"):
                raise TypeError(f"{op}: {place}[{entry!r}] must be an array, got {own[entry]!r:.40}; {fix}.")
            shape, dtype = jnp.shape(own[entry]), own[entry].dtype
            if shape != like.shape or dtype != like.dtype:
                needs = f"a weight of shape {weights[role].shape} needs {like.dtype} {like.shape}"
                raise ValueError(f"{op}: {place}[{entry!r}] is {dtype} {shape}, {needs}; {fix}.")
    if unknown:
        raise ValueError(f"{op}: {', '.join(unknown)} is no state that this method has; {fix}.")
