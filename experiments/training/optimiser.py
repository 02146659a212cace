"""The optimiser of a run: learning-rate schedules, and which parameters have weight decay."""

import jax
import optax

import jax_sparse24 as s24
from experiments.config import Config, Optim


def learning_rate(optim: Optim, steps: int) -> optax.Schedule:
    """Linear warm-up, then cosine, or stable and linear decay; ends at `final` times the peak."""
    last = optim.lr * optim.final
    if optim.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, optim.lr, optim.warmup, steps, last)
    decay = min(round(optim.decay_share * steps), steps - optim.warmup)
    pieces = [
        optax.linear_schedule(0.0, optim.lr, max(optim.warmup, 1)),
        optax.constant_schedule(optim.lr),
        optax.linear_schedule(optim.lr, last, max(decay, 1)),
    ]
    return optax.join_schedules(pieces, [optim.warmup, steps - decay])


def optimiser(config: Config) -> optax.GradientTransformationExtraArgs:
    """AdamW with clipping and what the method adds, see `s24.optim.for_method`."""
    optim, steps = config.optim, config.train.steps
    return s24.optim.for_method(
        config.method,
        learning_rate(optim, steps),
        steps,
        clip=optim.clip,
        b1=optim.b1,
        b2=optim.b2,
        weight_decay=optim.weight_decay,
        mask=decayed,
    )


def decayed(params):
    """Which parameters have weight decay: the matrices, not the norm scales; nor adapters, which may have to
    wait for their phase."""

    def is_matrix(path, _):
        names = {str(getattr(key, "key", "")) for key in path}
        return bool(names & {"kernel", "embedding"})

    return jax.tree_util.tree_map_with_path(is_matrix, params)
