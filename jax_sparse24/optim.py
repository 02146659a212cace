"""Optax transformations that sparse training needs."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_sparse24.methods.base import Method, is_number
from jax_sparse24.patterns import check_size

_MISSING = object()


def _number(value):
    """The number in an array without axes, as `optax.inject_hyperparams` makes one; others as they are."""
    scalar = isinstance(value, np.ndarray | jax.Array) and not value.ndim
    return value.item() if scalar and not isinstance(value, jax.core.Tracer) else value


def _check_rate(op: str, rate, name: str = "rate") -> None:
    if not callable(rate) and not (is_number(rate) and rate >= 0):
        raise ValueError(
            f"{op}: {name}={rate!r} must be 0 or positive: a finite number, or a schedule, which is a "
            "function of the count of earlier updates."
        )


def _check_adam(op: str, b1, b2, eps) -> None:
    for name, value in (("b1", _number(b1)), ("b2", _number(b2))):
        if not (isinstance(value, jax.core.Tracer) or (is_number(value) and 0 <= value < 1)):
            raise ValueError(f"{op}: {name}={value!r} must lie in [0, 1); at 1 the moment would never move.")
    eps = _number(eps)
    if not (isinstance(eps, jax.core.Tracer) or (is_number(eps) and eps >= 0)):
        raise ValueError(f"{op}: eps={eps!r} must be a finite number, 0 or positive.")


def _given(op: str, masks):
    """The masks, or None in a dense phase; raises ValueError if the caller passed none."""
    if masks is _MISSING:
        raise ValueError(
            f"{op}: needs the masks; call update(..., masks=s24.nn.masks(model)), or masks=None in a dense "
            "phase."
        )
    return None if isinstance(masks, dict) and not masks else masks


def _left_out(x) -> bool:
    """Whether a parameter gets no update, because `optax.masked` or `optax.partition` leave it out."""
    return x is None or isinstance(x, optax.MaskedNode)


def _map_masked(op: str, function, updates, params, masks, *others):
    """`function(update, parameter, mask, *others)` for every parameter that gets an update."""
    if params is None:
        raise ValueError(f"{op}: needs the parameters; call update(grads, state, params, masks=...).")

    try:
        jax.tree.map(lambda *_: None, updates, masks, is_leaf=_left_out)
    except ValueError as error:
        raise ValueError(
            f"{op}: masks must be a tree like the gradients, such as s24.nn.masks(model), or, where these "
            "are of the parameters that a filter wrt takes, "
            f"nnx.filter_state(s24.nn.masks(model), wrt). {error}"
        ) from error

    def one(g, w, mask, *others):
        if _left_out(g):
            return g
        if getattr(mask, "dtype", type(mask)) not in (bool, jnp.dtype(bool)):
            kind = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(f"{op}: the mask of a parameter of shape {w.shape} must be bool, got {kind}.")
        sizes = zip(reversed(jnp.shape(mask)), reversed(w.shape), strict=False)
        if jnp.ndim(mask) > w.ndim or any(size not in (1, of) for size, of in sizes):
            raise ValueError(
                f"{op}: a mask of shape {jnp.shape(mask)} does not broadcast to its parameter of shape "
                f"{w.shape}."
            )
        return function(g, w, mask, *others)

    return jax.tree.map(one, updates, params, masks, *others, is_leaf=_left_out)


def masked_decay(rate: optax.ScalarOrSchedule) -> optax.GradientTransformationExtraArgs:
    """Adds `rate * (1 - M) * w` to the gradients: a decay of the pruned weights, seen by both Adam moments.

    Place it after clipping and before the optimiser:

        optax.chain(optax.clip_by_global_norm(1.0), masked_decay(6e-5), optax.adamw(lr))

    To apply it to the weights instead, decoupled from Adam and times the learning rate (the form of SR-STE,
    2102.04010, that 2404.01847 compares with), place it between Adam's two parts:

        optax.chain(optax.scale_by_adam(), masked_decay(2e-4), optax.scale_by_learning_rate(lr))

    `update` takes `masks=`: what `s24.nn.masks(model)` returned, or any tree like the parameters whose leaves
    are bool arrays that broadcast against them (True: kept). `None` or `{}`, for a dense phase, adds nothing.
    Inside `optax.masked` and `optax.partition` it sees their part of the parameters; the masks may be those
    of all. The term is computed in float32 and must be applied once per optimiser step.

    rate: a number >= 0, or a schedule, a function of the count of earlier updates; the state is then that
        count.

    Returns: an optax transformation whose `update` needs `masks=`.
    Raises: ValueError for a rate that is negative, not finite, or an array; `update` raises ValueError when
        parameters or masks are missing or a mask does not fit its parameter, TypeError for a mask that is not
        bool.
    Source: 2404.01847, section 4."""
    _check_rate("masked_decay", rate)
    scheduled = callable(rate)

    def init(params):
        return optax.ScaleByScheduleState(jnp.int32(0)) if scheduled else optax.EmptyState()

    def update(updates, state, params=None, *, masks=_MISSING, **_):
        masks, now = _given("masked_decay", masks), rate
        if scheduled:
            now = rate(state.count)
            state = optax.ScaleByScheduleState(optax.safe_increment(state.count))
        if masks is None or (not scheduled and rate == 0):
            return updates, state

        def decay(g, w, mask):
            pull = jnp.where(mask, 0.0, now * w.astype(jnp.float32))
            return (g.astype(jnp.float32) + pull).astype(g.dtype)

        return _map_masked("masked_decay", decay, updates, params, masks), state

    return optax.GradientTransformationExtraArgs(init, update)


class _Decayed(NamedTuple):
    update: jax.Array
    nu: jax.Array


def adam_masked_decay(
    rate: optax.ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with masked decay of the momentum-smoothed gradient.

    The first moment m holds the gradients alone. For a parameter with a mask, `s = m + rate (1 - M) w` takes
    the place of m in the update, and of the gradient in the second moment. Other parameters, and all without
    masks, are treated by `optax.scale_by_adam` itself; a parameter whose mask is a scalar has none.

    rate: as in `masked_decay`.
    b1, b2: decay rates of the moments, in [0, 1).
    eps: >= 0, added to the root of the second moment.

    Returns: an optax transformation whose `update` needs `masks=`, as `masked_decay`.
    Raises: as `masked_decay`; ValueError for b1 or b2 outside [0, 1), or a negative eps.
    Source: 2407.20584, section 3.2; the order of operations is that of its code."""
    _check_rate("adam_masked_decay", rate)
    _check_adam("adam_masked_decay", b1, b2, eps)
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(updates, state, params=None, *, masks=_MISSING, **_):
        masks = _given("adam_masked_decay", masks)
        plain, after = adam.update(updates, state)
        if masks is None:
            return plain, after
        now = rate(state.count) if callable(rate) else rate

        def decay(g, w, mask, m, v, plain, plain_v):
            if not jnp.ndim(mask):
                return _Decayed(plain, plain_v)
            pull = jnp.where(mask, 0.0, now * w.astype(jnp.float32))
            s = (m.astype(jnp.float32) + pull).astype(m.dtype)
            v = optax.tree.update_moment_per_elem_norm(s, v, b2, 2)
            first = optax.tree.bias_correction(s, b1, after.count)
            second = optax.tree.bias_correction(v, b2, after.count)
            return _Decayed(first / (jnp.sqrt(second) + eps), v)

        moments = after.mu, state.nu, plain, after.nu
        decayed = _map_masked("adam_masked_decay", decay, updates, params, masks, *moments)
        out, nu = (
            jax.tree.map(lambda m, i=i: m[i], decayed, is_leaf=lambda x: isinstance(x, _Decayed))
            for i in range(2)
        )
        return out, after._replace(nu=nu)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def for_method(
    method: Method,
    learning_rate: optax.ScalarOrSchedule,
    steps: int,
    *,
    clip: float | None = 1.0,
    b1: float = 0.9,
    b2: float = 0.999,
    weight_decay: float = 1e-4,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with clipping, and with what a method adds to it: its masked decay, or a frozen second moment.

    Masked decay acts on the gradient after clipping, which would rescale it, and before Adam, whose moments
    must see it (FST, 2404.01847, section 4); or where the method says: between the moments, on the smoothed
    gradient (AST, 2407.20584), or after them, on the weights.

    `update` takes `masks=`, the masks in use, or {} in a dense phase, and `frozen=`, whether the phase is
    sparse; `s24.Loop` gives both.

    In `optax.inject_hyperparams`, `steps` stays an int by `static_args="steps"`; `static_args` must name `b2`
    too for `STEP`, in which the number of steps that are averaged depends on it, and a `mask` that is a
    function:

        optax.inject_hyperparams(s24.optim.for_method, static_args="steps")(method, 1e-3, steps)

    method: from `s24.methods`; its options, such as `FST(decay=)`, count here.
    learning_rate: of AdamW.
    steps: optimiser steps of the whole training.
    clip: largest global norm of the gradients; None for no clipping.
    b1, b2, weight_decay, mask: as in `optax.adamw`; `mask` says which parameters have weight decay.

    Returns: an optax transformation.
    Raises: TypeError if `method` is none or `steps` no int; ValueError for fewer steps than one, a learning
        rate that is neither a schedule nor a finite number, 0 or positive, a norm that is not positive, b1 or
        b2 outside [0, 1), and for `STEP` an array as b2."""
    if not isinstance(method, Method):
        raise TypeError(f"for_method: method must be one of s24.methods, such as FST(), got {method!r}.")
    if isinstance(steps, jax.Array):
        raise TypeError(
            f"for_method: steps must be an int, got {steps!r}, such as optax.inject_hyperparams makes of an "
            "int. Say that it is none of its hyperparameters: "
            "optax.inject_hyperparams(s24.optim.for_method, static_args='steps')."
        )
    check_size("for_method", "steps", steps)
    if not isinstance(learning_rate, jax.core.Tracer):
        _check_rate("for_method", _number(learning_rate), "learning_rate")
    norm = _number(clip)
    if not (norm is None or isinstance(norm, jax.core.Tracer) or (is_number(norm) and norm > 0)):
        raise ValueError(
            f"for_method: clip={norm!r} must be a finite number, greater than 0: the largest norm of "
            "gradients that are not scaled down. For no clipping give None."
        )
    _check_adam("for_method", b1, b2, 0)
    training = method.training(steps)
    first = [] if clip is None else [optax.clip_by_global_norm(clip)]
    betas, decoupled = {"b1": b1, "b2": b2}, {"weight_decay": weight_decay, "mask": mask}
    if training.freeze:
        when = dataclasses.asdict(training.freeze)
        return optax.chain(*first, step_adamw(learning_rate, **betas, **decoupled, **when))
    after = (optax.add_decayed_weights(**decoupled), optax.scale_by_learning_rate(learning_rate))
    pull, rise = training.decay.rate, training.decay.rise
    if training.decay.on == "momentum":
        pull = optax.linear_schedule(0.0, pull, rise) if rise else pull
        return optax.chain(*first, adam_masked_decay(pull, **betas), *after)
    decay, adam = masked_decay(pull), optax.scale_by_adam(**betas)
    if training.decay.on == "weights":
        return optax.chain(*first, adam, decay, *after)
    return optax.chain(*first, decay, adam, *after)


def permute_moments(tx: optax.GradientTransformation, opt_state: Any, params: Any, moves: Any) -> Any:
    """Moves the entries of an optimiser's state as `s24.nn.arrange` has moved neurons.

    Everything in the state with the parameters' tree is moved, such as Adam's moments, and the means of
    Adafactor over rows or columns. What `optax.masked` or `optax.partition` leave out is left out.

    tx: the transformation that made the state, or an `nnx.Optimizer`.
    opt_state: its state; `optimizer.opt_state` of an `nnx.Optimizer`, which is changed in place.
    params: `nnx.state(model, nnx.Param)`, or a pytree of dicts.
    moves: what `s24.nn.arrange` returned.

    Returns: the new state of the optimiser.
    Raises: TypeError for arguments of another kind, ValueError for a state that `tx` did not make, or in
        which it cannot be told how neurons lie."""
    tx = tx.tx if isinstance(tx, nnx.Optimizer) else tx
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            "permute_moments: tx must be an optax transformation or an nnx.Optimizer, got "
            f"{type(tx).__name__}."
        )
    if not isinstance(params, nnx.State | Mapping):
        got = type(params).__name__
        raise TypeError(f"permute_moments: params must be nnx.state(model, nnx.Param), got {got}.")
    if not isinstance(moves, Mapping):
        raise TypeError(
            f"permute_moments: moves must be what s24.nn.arrange returned, got {type(moves).__name__}."
        )
    paths = _paths_of(params)
    unknown = moves.keys() - set(jax.tree.leaves(paths))
    if unknown:
        raise ValueError(
            f"permute_moments: params has no {min(unknown)!r}; give the state of the same model."
        )

    shapes = dict(zip(jax.tree.leaves(paths), map(jnp.shape, jax.tree.leaves(params)), strict=True))

    def follow(value, path):
        if path not in moves or _left_out(value):
            return value
        return _moved(value, moves[path], path, shapes[path])

    def moved(opt_state, paths):
        known = {key for key, _ in jax.tree_util.tree_leaves_with_path(paths)}

        def tree_moved(tree):
            _check_tree(tree, known)
            return jax.tree.map(follow, tree, paths, is_leaf=_left_out)

        return optax.tree_utils.tree_map_params(tx, tree_moved, opt_state, is_leaf=lambda _: True)

    if any(isinstance(leaf, nnx.OptState) for leaf in jax.tree.leaves(opt_state, is_leaf=_is_variable)):
        # An nnx.Optimizer wraps every array of the state in a variable of its own.
        nnx.update(opt_state, nnx.state(moved(nnx.as_pure(opt_state), nnx.as_pure(paths))))
        return opt_state
    return moved(opt_state, paths)


def _check_tree(tree, known: set) -> None:
    """ValueError unless a tree of the state has its arrays where the parameters are, whose keys are known."""
    for key, value in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_left_out):
        if key not in known and not _left_out(value):
            raise ValueError(
                f"permute_moments: the optimiser's state holds an array of shape {jnp.shape(value)} at "
                f"{jax.tree_util.keystr(key)}, where params has none, and it cannot be told how neurons lie "
                "in it. Give the state that tx made of these params; SM3, which has an array for each axis, "
                "cannot be used."
            )


def _moved(value, move, path: str, shape: tuple[int, ...]):
    """What the state holds for a parameter of a shape, which may be factored: without one of its axes."""
    if value.shape == shape:
        return move(value)
    # Factored moments are a number for each neuron, or for each place along the other axis of the kernel.
    per_neuron, is_matrix = move.order.shape, len(shape) > move.order.ndim
    per_other = (*per_neuron[:-1], *([shape[-3 - move.axis]] if is_matrix else []))
    if value.shape == per_neuron != per_other:
        return move(value)
    if per_neuron[-1] not in value.shape or value.shape == per_other != per_neuron:
        return value
    raise ValueError(
        f"permute_moments: the optimiser's state holds an array of shape {value.shape} for {path} of shape "
        f"{shape}, whose neurons moved, and it cannot be told how they lie in it. Use an optimiser whose "
        "moments have the shapes of the parameters."
    )


def _paths_of(params):
    """A tree like the parameters that holds the path of each, such as "blocks.0.ffn.up.kernel"."""
    if isinstance(params, nnx.State):
        flat = nnx.to_flat_state(params)
        return nnx.from_flat_state([(path, v.replace(".".join(map(str, path)))) for path, v in flat])
    return jax.tree_util.tree_map_with_path(lambda path, _: ".".join(str(key.key) for key in path), params)


def _is_variable(x) -> bool:
    return isinstance(x, nnx.Variable)


class StepAdamState(NamedTuple):
    """The state of `step_adamw`.

    count: int32, the number of updates.
    mu, nu: Adam's moments, trees like the parameters.
    changes: float32 (window,), by how much the second moment changed in each of the last updates.
    settled: bool, whether the second moment has settled."""

    count: jax.Array
    mu: optax.Params
    nu: optax.Params
    changes: jax.Array
    settled: jax.Array


def step_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    settles: Literal["arithmetic", "geometric"] | None = "arithmetic",
    earliest: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW whose second moment can be frozen: dense steps find it, and sparse steps use it (STEP).

    `update` takes `frozen=`, a bool that is fixed when the step is compiled. With False it does a step of
    `optax.adamw`. With True the second moment stays v*, and the denominator is `sqrt(v*) + eps**(3/4)`, where
    v* is not corrected for its bias, as in 2404.01847's code; the first moment goes on as usual.

    learning_rate, b1, b2, eps, weight_decay, mask: as in `optax.adamw`.
    settles: how the change `Z_t` of the second moment v is averaged over all parameters: "arithmetic", the
        mean of |v_t - v_{t-1}| (the paper's option I), or "geometric" (option II, where a coordinate that did
        not move counts as the least normal number). When the mean of Z over the last `floor(1 / (1 - b2))`
        steps is below eps, `settled(opt_state)` becomes True and stays so. None never settles and computes
        nothing.
    earliest: the optimiser step before which it does not settle.

    Returns: an optax transformation whose `update` needs `frozen=`.
    Raises: ValueError for another `settles`, b1 or b2 outside [0, 1), a negative eps or `earliest`, or a
        weight decay that is not finite, and for an array as b2 unless `settles` is None; `update` raises
        ValueError without `frozen`.
    Source: 2302.01172."""
    if settles not in ("arithmetic", "geometric", None):
        raise ValueError(
            f"step_adamw: settles={settles!r} is unknown; use 'arithmetic', 'geometric' or None."
        )
    _check_adam("step_adamw", b1, b2, eps)
    if isinstance(earliest, bool) or not isinstance(earliest, int) or earliest < 0:
        raise ValueError(
            f"step_adamw: earliest={earliest!r} must be a whole number of optimiser steps, >= 0."
        )
    if settles is not None and isinstance(b2, jax.Array):
        raise ValueError(
            f"step_adamw: b2={b2!r} must be a number, and no array such as optax.inject_hyperparams makes of "
            "one: the length of the window in which changes are averaged depends on it. Name it in "
            "static_args, as in optax.inject_hyperparams(s24.optim.for_method, static_args=('steps', 'b2'))."
        )
    decay = _number(weight_decay)
    if not (callable(decay) or isinstance(decay, jax.core.Tracer) or is_number(decay)):
        raise ValueError(f"step_adamw: weight_decay={weight_decay!r} must be a finite number, or a schedule.")
    # The window is never empty, because checkpoints cannot hold an empty array.
    window = 1 if settles is None else math.floor(1 / (1 - b2) + 1e-6)

    def init(params):
        # These are two trees, because a buffer that stands in the state twice could not be donated.
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        return StepAdamState(jnp.int32(0), mu, nu, jnp.zeros(window, jnp.float32), jnp.asarray(False))

    def watch(state, count, nu):
        if settles is None:
            return state
        moves = [jnp.abs(a - b) for a, b in zip(*map(jax.tree.leaves, (nu, state.nu)), strict=True)]
        if settles == "geometric":
            moves = [jnp.log(jnp.maximum(m, jnp.finfo(m.dtype).tiny)) for m in moves]
        entries = max(sum(m.size for m in moves), 1)  # optax.partition may leave it no parameter
        mean = sum(jnp.sum(m, dtype=jnp.float32) for m in moves) / entries
        change = jnp.exp(mean) if settles == "geometric" else mean
        changes = state.changes.at[state.count % window].set(change)
        now = (count >= max(window, earliest)) & (changes.mean() < eps)
        return state._replace(changes=changes, settled=state.settled | now)

    def update(updates, state, params=None, *, frozen=None, **_):
        if not isinstance(frozen, bool):
            raise ValueError(
                f"step_adamw: needs frozen=False (dense steps) or frozen=True (sparse ones), got {frozen!r}; "
                "call update(..., frozen=False)."
            )
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = state.nu
        if frozen:
            scale = jax.tree.map(lambda v: jnp.sqrt(v) + eps**0.75, nu)
        else:
            nu = optax.tree.update_moment_per_elem_norm(updates, nu, b2, 2)
            state = watch(state, count, nu)
            scale = jax.tree.map(lambda v: jnp.sqrt(v) + eps, optax.tree.bias_correction(nu, b2, count))
        updates = jax.tree.map(lambda m, s: m / s, optax.tree.bias_correction(mu, b1, count), scale)
        return updates, state._replace(count=count, mu=mu, nu=nu)

    return optax.chain(
        optax.GradientTransformationExtraArgs(init, update),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def settled(opt_state: Any) -> jax.Array:
    """Whether the second moment of the `step_adamw` in an optimiser's state has settled.

    opt_state: the state of a transformation that holds `step_adamw`.

    Returns: a bool scalar.
    Raises: ValueError if the state holds no `step_adamw`."""
    found = optax.tree.get(opt_state, "settled")
    if found is None:
        raise ValueError("settled: the optimiser's state holds no s24.optim.step_adamw; train with it.")
    return found
