"""The curves of an ablation as one PNG: loss and mechanism of every arm, with the spread of its seeds."""

from pathlib import Path

import numpy as np

from experiments.plots import COLOURS, STYLE, plt, save, smooth

LABELS = {
    ("monitor", "flip_rate"): "flip rate per step",
    ("probe", "noise"): "share of |g|² that the cut adds",
    ("probe", "cosine"): "cosine of sparse and dense gradient",
    ("eval", "dense"): "validation loss, dense (nats per byte)",
    ("eval", "sparse"): "validation loss, sparse (nats per byte)",
}


def write(named, runs: dict, path: Path):
    """Draw `runs`, arm -> list of Run, one per seed."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        kind, name = named.ablation.curve
        _curves(left, runs, "train", "loss", width=40)
        _curves(right, runs, kind, name, width=15 if kind == "monitor" else 1)
        left.set(xlabel="optimiser step", ylabel="training loss (nats per byte)")
        right.set(xlabel="optimiser step", ylabel=LABELS.get((kind, name), name))
        seeds = max(map(len, runs.values()))
        band = "" if seeds == 1 else f"; bands: lowest to highest of {seeds} seeds"
        left.set_title(f"{named.claim}, {named.size}{band}", loc="left", fontsize=10)
        left.legend(frameon=False, fontsize=9)
        _focus(left)
        figure.tight_layout()
        return save(figure, path)


def _curves(axes, runs, kind, name, width):
    """Mean over seeds of smoothed curves, and the band between the lowest and the highest."""
    for index, (arm, own) in enumerate(runs.items()):
        curves = [run.column(kind, name) for run in own]
        length = min(len(steps) for steps, _ in curves)
        if not length:
            continue
        steps = curves[0][0][:length]
        values = np.array([smooth(v[:length], max(length // width, 1)) for _, v in curves])
        if width == 1:
            values = np.array([v[:length] for _, v in curves])
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(
            steps, values.mean(0), color=colour, label=arm, linewidth=1.3, marker="." if width == 1 else ""
        )
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def _focus(axes):
    """Cut off the first, steep part of the loss."""
    heights = np.concatenate([line.get_ydata()[len(line.get_ydata()) // 8 :] for line in axes.get_lines()])
    heights = heights[np.isfinite(heights)]
    if len(heights):
        axes.set_ylim(heights.min() - 0.05, heights.max() + 0.05)
