"""Optax transformations that sparse training needs."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

_MISSING = object()


def masked_decay(rate: float) -> optax.GradientTransformationExtraArgs:
    """Adds `rate * (1 - M) * w` to the gradients: decay of the pruned weights, seen by both Adam moments
    (2404.01847, section 4).

    Place it after clipping and before the optimiser:

        optax.chain(optax.clip_by_global_norm(1.0), masked_decay(6e-5), optax.adamw(lr))

    On weights instead, decoupled from Adam and times the learning rate (the form of SR-STE, 2102.04010, that
    2404.01847 compares with), between its two parts:

        optax.chain(optax.scale_by_adam(), masked_decay(2e-4), optax.scale_by_learning_rate(lr))

    `update` takes `masks=`: what `s24.nn.masks(model)` returned, or any tree like the parameters whose leaves
    are bool arrays that broadcast against them (True: kept). `None` or `{}`, for a dense phase, adds nothing.
    The term is computed in float32, is not scaled by itself, and must be applied once per optimiser step.
    Raises ValueError for a negative rate, or when parameters or masks are missing."""
    if not rate >= 0:
        raise ValueError(f"masked_decay: rate={rate!r} must be 0 or positive.")

    def update(updates, state, params=None, *, masks=_MISSING, **_):
        if masks is _MISSING:
            raise ValueError(
                "masked_decay: needs the masks; call update(..., masks=s24.nn.masks(model)), or "
                "masks=None in a dense phase."
            )
        if rate == 0 or masks is None or (isinstance(masks, dict) and not masks):
            return updates, state
        if params is None:
            raise ValueError(
                "masked_decay: needs the parameters; call update(grads, state, params, masks=...)."
            )

        def decay(g, w, mask):
            pull = jnp.where(mask, 0.0, rate * w.astype(jnp.float32))
            return (g.astype(jnp.float32) + pull).astype(g.dtype)

        return jax.tree.map(decay, updates, params, masks), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def adam_masked_decay(
    rate: float | optax.Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with masked decay of the momentum-smoothed gradient (2407.20584, section 3.2; its
    order of operations is that of the paper's code).

    The first moment m holds the gradients alone. Of a parameter with a mask, `s = m + rate (1 - M) w` takes
    the place of m in the update, and of the gradient in the second moment; others see plain Adam. rate: a
    number, or a schedule of the count of earlier updates. `update` takes `masks=` like `masked_decay`, and
    raises like it; a parameter whose mask is a scalar has none."""
    adam = optax.scale_by_adam(b1, b2, eps)
    whole = masked_decay(1.0)

    def update(updates, state, params=None, *, masks=_MISSING, **_):
        nothing = jax.tree.map(jnp.zeros_like, updates)
        pruned, _ = whole.update(nothing, optax.EmptyState(), params, masks=masks)
        pull = rate(state.count) if callable(rate) else rate
        masked = jax.tree.map(jnp.ndim, masks) if masks else jax.tree.map(lambda _: 0, updates)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        top = jax.tree.map(lambda m, w: m + pull * w, mu, pruned)
        seen = jax.tree.map(lambda has, s, g: s if has else g, masked, top, updates)
        nu = jax.tree.map(lambda v, s: b2 * v + (1 - b2) * s * s, state.nu, seen)
        count = optax.safe_increment(state.count)
        first, second = (1 - jnp.float32(b) ** count for b in (b1, b2))
        out = jax.tree.map(lambda s, v: (s / first / (jnp.sqrt(v / second) + eps)).astype(s.dtype), top, nu)
        return out, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def permute_moments(tx: optax.GradientTransformation, opt_state, params: nnx.State, moves):
    """The optimiser state after `s24.nn.arrange` has moved neurons: its entries follow them.

    tx: the transformation that made `opt_state` for `params` (`nnx.state(model, nnx.Param)`). moves: what
    `arrange` returned. Everything in `opt_state` with the parameters' tree moves, such as Adam's moments."""
    flat = nnx.to_flat_state(params)
    paths = nnx.from_flat_state([(path, v.replace(".".join(map(str, path)))) for path, v in flat])

    def follow(value, path):
        return moves[path](value) if path in moves else value

    return optax.tree_utils.tree_map_params(tx, follow, opt_state, paths)


class StepAdamState(NamedTuple):
    """Adam's state; the last changes of the second moment, float32 (window,); whether it has settled."""

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
    mask=None,
    *,
    settles: Literal["arithmetic", "geometric"] | None = "arithmetic",
    earliest: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW whose second moment can be frozen: dense steps find it, sparse steps use it (STEP, 2302.01172).

    `update` takes `frozen=`, a bool that is fixed when the step is compiled. False: a step of `optax.adamw`,
    with the same arguments. True: the second moment stays v*, and the denominator is `sqrt(v*) + eps**(3/4)`
    with v* not corrected for its bias, as in 2404.01847's code; the first moment goes on as usual.

    settles: watch how far v moves, `Z_t`: the mean over all parameters of |v_t - v_{t-1}|, "arithmetic" (the
    paper's option I) or "geometric" (option II, where a coordinate that did not move counts as the least
    normal number). When the mean of Z over the last `floor(1 / (1 - b2))` steps is below eps, at step
    `earliest` or later, `settled(opt_state)` becomes True and stays so. None watches nothing. Raises
    ValueError for another `settles`, or without `frozen`."""
    if settles not in ("arithmetic", "geometric", None):
        raise ValueError(
            f"step_adamw: settles={settles!r} is unknown; use 'arithmetic', 'geometric' or None."
        )
    # Never empty, which checkpoints cannot hold.
    window = 1 if settles is None else math.floor(1 / (1 - b2) + 1e-6)

    def init(params):
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)  # two: buffers may be donated
        return StepAdamState(jnp.int32(0), mu, nu, jnp.zeros(window, jnp.float32), jnp.asarray(False))

    def watch(state, count, nu):
        if settles is None:
            return state
        moves = [jnp.abs(a - b) for a, b in zip(*map(jax.tree.leaves, (nu, state.nu)), strict=True)]
        if settles == "geometric":
            moves = [jnp.log(jnp.maximum(m, jnp.finfo(m.dtype).tiny)) for m in moves]
        mean = sum(jnp.sum(m, dtype=jnp.float32) for m in moves) / sum(m.size for m in moves)
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


def settled(opt_state) -> jax.Array:
    """Whether the second moment of the `step_adamw` in an optimiser's state has settled: a bool scalar."""
    return optax.tree.get(opt_state, "settled")
