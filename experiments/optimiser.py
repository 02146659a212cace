"""The optax chain: clip, masked decay, AdamW; and the learning-rate schedules."""

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
    """`update` takes `masks=`: the layers' current masks, or {} in a dense phase.

    Masked decay acts on the gradient after clipping, which would rescale it, and before Adam, whose moments
    must see it (FST, arXiv 2404.01847, section 4); or between the moments, on the smoothed gradient, if the
    method says so (AST, arXiv 2407.20584).
    """
    optim, method = config.optim, config.method
    if method.decay_on == "momentum":
        rate = (
            optax.linear_schedule(0.0, method.decay, method.decay_steps)
            if method.decay_steps
            else method.decay
        )
        return optax.chain(
            optax.clip_by_global_norm(optim.clip),
            s24.optim.adam_masked_decay(rate, optim.b1, optim.b2),
            optax.add_decayed_weights(optim.weight_decay, decayed),
            optax.scale_by_learning_rate(learning_rate(optim, config.train.steps)),
        )
    adamw = optax.adamw(
        learning_rate(optim, config.train.steps),
        b1=optim.b1,
        b2=optim.b2,
        weight_decay=optim.weight_decay,
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(optim.clip), s24.optim.masked_decay(method.decay), adamw)


def decayed(params):
    """Which parameters have weight decay: the matrices, not the norm scales; nor adapters, which may have to
    wait for their phase."""

    def is_matrix(path, _):
        names = {str(getattr(key, "key", "")) for key in path}
        return bool(names & {"kernel", "embedding"})

    return jax.tree_util.tree_map_with_path(is_matrix, params)
