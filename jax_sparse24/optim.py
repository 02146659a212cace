"""Optax transformations that sparse training needs."""

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

    `update` takes `masks=`: what `s24.nn.masks(model)` returned, or any tree like the parameters whose leaves
    are bool arrays that broadcast against them (True: kept). `None` or `{}`, for a dense phase, adds nothing.
    The term is computed in float32, is not scaled by the learning rate, and must be applied once per
    optimiser step. Raises ValueError for a negative rate, or when parameters or masks are missing."""
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
