"""A finished run in numbers: what claims compare. Everything comes from the run folder's metrics.jsonl."""

import numpy as np

from experiments.analysis.runs import Run, descent, monitor_cost

EARLY = 0.25  # share of the steps that "early" is the first of, and "late" the last
SHARE, ENERGY = (0.0, 1.0), (0.0, None)
# Floor and ceiling of metrics that have them: an arm that stays there exercises nothing.
LIMITS = {
    **dict.fromkeys(("flip_early", "flip_mid", "flip_late", "flipped_since_start", "kept_share"), SHARE),
    **dict.fromkeys(("rising", "density_start", "density", "cut_f", "cut_T", "overflow_T"), SHARE),
    **dict.fromkeys(("noise", "flip_fade"), ENERGY),
    "cosine": (-1.0, 1.0),
}
LOSSES = (
    "val_loss",
    "val_dense",
    "val_sparse",
    "sparse_gap",
    "leak",
    "val_causal",
    "early_loss",
    "train_loss",
)
# Quarters of the run: after the warm-up, and before a last dense phase of up to a quarter.
METRICS = {
    "val_loss": "validation loss as the run ends: dense after a dense phase, else sparse (nats per token)",
    "val_dense": "validation loss with every product dense (nats per token)",
    "val_sparse": "validation loss with the method's sparse products and fresh masks (nats per token)",
    "sparse_gap": "val_sparse minus val_dense (nats per token)",
    "leak": "how much lower val_sparse is for knowing later tokens; 0 by construction for a causal method",
    "val_causal": "val_sparse plus leak: the sparse loss without knowledge of later tokens (nats per token)",
    "early_loss": "mean training loss of the first quarter (nats per token)",
    "train_loss": "mean training loss of the last tenth (nats per token)",
    "flip_early": "mean flip rate of the first quarter",
    "flip_mid": "mean flip rate of the second and third quarter",
    "flip_late": "mean flip rate of the last quarter",
    "flip_fade": "flip_late / flip_early",
    "flipped_since_start": "share of the initial mask that differs at the end",
    "kept_share": "share of |w| that the mask keeps at the end",
    "rising": "share of measured steps that raise the loss of their own batch",
    "descent": "actual / predicted loss change, summed over measured steps",
    "cosine": "mean cosine of the sparse with the dense gradient on a fixed batch",
    "noise": "mean share of the gradient's squared norm that its random cut adds",
    "density_start": "share of non-zero activations before the first step, mean over the FFNs",
    "density": "share of non-zero activations at the end, mean over the FFNs",
    "cut_f": "share of the activations' energy that F2 cuts along features, later half of the sparse steps",
    "cut_T": "share of the energy left that B2 cuts along tokens, later half of the sparse steps",
    "overflow_T": "share of the non-zeros left that B2 cuts along tokens, later half of the sparse steps",
    "monitor_cost": "time of monitors and probe as a share of the steps' time",
    "steps_per_s": "median optimiser steps per second, without measurements",
}


def outcome(run: Run) -> dict[str, float | None]:
    """METRICS of a run; None where it was not measured, and everywhere unless its rows cover its steps."""
    return dict.fromkeys(METRICS) if run.gap else measured(run)


def measured(run: Run) -> dict[str, float | None]:
    """METRICS of a run by the rows that it has; None where it was not measured."""
    total, evaluated = run.config.train.steps, run.rows.get("eval") or [{}]

    def over(kind, name, first=0.0, last=1.0):
        at, values = run.column(kind, name)
        chosen = values[(at >= first * total) & (at < last * total)] if len(at) else values
        return float(np.mean(chosen)) if len(chosen) else None

    sparse_at_end = run.phases[-1][2].sparse
    early, late = over("monitor", "flip_rate", 0, EARLY), over("monitor", "flip_rate", 1 - EARLY)
    dense, sparse = evaluated[-1].get("dense"), evaluated[-1].get("sparse")
    leak = 0.0 if run.config.method.causal else run.last("eval", "leak")
    speeds = run.column("train", "steps_per_s")[1]
    (begin, end), *_ = [(b, e) for b, e, phase in run.phases if phase.sparse] or [(0, 0)]

    def while_sparse(name):
        return over("probe", name, (begin + end) / 2 / total, end / total) if end else None

    density = run.column("probe", "density")[1]
    return {
        "val_loss": sparse if sparse_at_end else dense,
        "val_dense": dense,
        "val_sparse": sparse,
        "sparse_gap": None if dense is None or sparse is None else sparse - dense,
        "leak": leak,
        "val_causal": None if sparse is None or leak is None else sparse + leak,
        "early_loss": over("train", "loss", 0, EARLY),
        "train_loss": over("train", "loss", 0.9),
        "flip_early": early,
        "flip_mid": over("monitor", "flip_rate", EARLY, 1 - EARLY),
        "flip_late": late,
        "flip_fade": late / early if early and late is not None else None,
        "flipped_since_start": run.last("monitor", "flipped_since_start"),
        "kept_share": run.last("monitor", "kept_share"),
        "rising": over("monitor", "rising"),
        "descent": descent(run),
        "cosine": over("probe", "cosine"),
        "noise": over("probe", "noise"),
        "density_start": float(density[0]) if len(density) else None,
        "density": float(density[-1]) if len(density) else None,
        "cut_f": while_sparse("F2_lost_energy"),
        "cut_T": while_sparse("B2_lost_energy"),
        "overflow_T": while_sparse("B2_lost"),
        "monitor_cost": monitor_cost(run),
        "steps_per_s": float(np.median(speeds)) if len(speeds) else None,
    }
