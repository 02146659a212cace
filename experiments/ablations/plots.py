"""The curves of an ablation as one PNG: loss and mechanism of every arm, with the spread of its seeds."""

from pathlib import Path

import numpy as np

from experiments.analysis.curves import COLOURS, STYLE, plt, save, smooth

LABELS = {
    ("monitor", "flip_rate"): "flip rate per step",
    ("probe", "noise"): "share of |g|² that the cut adds",
    ("probe", "cosine"): "cosine of sparse and dense gradient",
    ("eval", "dense"): "validation loss, dense (nats per token)",
    ("eval", "sparse"): "validation loss, sparse (nats per token)",
}


def write(named, runs: dict, path: Path):
    """Draw `runs`, arm -> list of Run, one per seed."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        kind, name = named.ablation.curve
        labels = {
            arm: arm if config.method.causal else f"{arm} (where sparse, no language-model loss)"
            for arm, config in named.ablation.all_arms.items()
        }
        _curves(left, runs, "train", "loss", windows=40, labels=labels)
        _curves(right, runs, kind, name, windows=15 if kind == "monitor" else None, labels=labels)
        left.set(xlabel="optimiser step", ylabel="training loss (nats per token)")
        right.set(xlabel="optimiser step", ylabel=LABELS.get((kind, name), name))
        seeds = max(map(len, runs.values()))
        band = "" if seeds == 1 else f"; bands: lowest to highest of {seeds} seeds"
        left.set_title(f"{named.claim}, {named.size}{band}", loc="left", fontsize=10)
        left.legend(frameon=False, fontsize=9)
        _focus(left)
        figure.tight_layout()
        return save(figure, path)


def _curves(axes, runs, kind, name, windows, labels):
    """Mean over seeds and the band between the lowest and the highest, smoothed over a share of the curve."""
    for index, (arm, own) in enumerate(runs.items()):
        curves = [run.column(kind, name) for run in own]
        length = min(len(steps) for steps, _ in curves)
        if not length:
            continue
        steps = curves[0][0][:length]
        window = max(length // windows, 1) if windows else 1
        values = np.array([smooth(v[:length], window) for _, v in curves])
        colour, marker = COLOURS[index % len(COLOURS)], "" if windows else "."
        axes.plot(steps, values.mean(0), color=colour, label=labels[arm], linewidth=1.3, marker=marker)
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def _focus(axes):
    """Cut off the first, steep part of the loss."""
    curves = [line.get_ydata() for line in axes.get_lines()]
    heights = np.array([y for curve in curves for y in curve[len(curve) // 8 :] if np.isfinite(y)])
    if len(heights):
        axes.set_ylim(heights.min() - 0.05, heights.max() + 0.05)
