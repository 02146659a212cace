"""The optax chain: clipping, AdamW, and what the method's `training` adds; and the learning-rate
schedules."""

import dataclasses

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
    """`update` takes `masks=`: the layers' current masks, or {} in a dense phase; and `frozen=`, whether the
    phase is sparse, for a method that freezes a moment then.

    Masked decay acts on the gradient after clipping, which would rescale it, and before Adam, whose moments
    must see it (FST, arXiv 2404.01847, section 4); or where the method says: between the moments, on the
    smoothed gradient (AST, arXiv 2407.20584), or after them, on the weights.
    """
    optim, training = config.optim, config.method.training(config.train.steps)
    rate = learning_rate(optim, config.train.steps)
    clip = optax.clip_by_global_norm(optim.clip)
    betas = {"b1": optim.b1, "b2": optim.b2}
    weight_decay = {"weight_decay": optim.weight_decay, "mask": decayed}
    if training.freeze:
        when = dataclasses.asdict(training.freeze)
        return optax.chain(clip, s24.optim.step_adamw(rate, **betas, **weight_decay, **when))
    after = (optax.add_decayed_weights(**weight_decay), optax.scale_by_learning_rate(rate))
    pull, steps = training.decay.rate, training.decay.rise
    if training.decay.on == "momentum":
        pull = optax.linear_schedule(0.0, pull, steps) if steps else pull
        return optax.chain(clip, s24.optim.adam_masked_decay(pull, **betas), *after)
    decay, adam = s24.optim.masked_decay(pull), optax.scale_by_adam(**betas)
    if training.decay.on == "weights":
        return optax.chain(clip, adam, decay, *after)
    return optax.chain(clip, decay, adam, *after)


def decayed(params):
    """Which parameters have weight decay: the matrices, not the norm scales; nor adapters, which may have to
    wait for their phase."""

    def is_matrix(path, _):
        names = {str(getattr(key, "key", "")) for key in path}
        return bool(names & {"kernel", "embedding"})

    return jax.tree_util.tree_map_with_path(is_matrix, params)
