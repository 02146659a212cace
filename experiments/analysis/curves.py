"""Curves of runs as PNG files: loss.png and flip_rate.png."""

from pathlib import Path

import matplotlib
import numpy as np

from experiments import files
from experiments.data.vocabulary import bits_per_byte
from experiments.training.evaluator import mark

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Distinguishable also with colour-blindness and in grey (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
}


def write(runs, out: Path) -> list[str]:
    """Write the plots; returns their file names."""
    with plt.rc_context(STYLE):
        names = [save(_loss(runs), out / "loss.png")]
        if any(len(run.column("monitor", "flip_rate")[0]) for run in runs):
            names.append(save(_flip_rate(runs), out / "flip_rate.png"))
    return names


def save(figure, path: Path) -> str:
    """Write a figure as PNG, and close it; its file name."""
    with files.replacing(path) as partial:
        figure.savefig(partial, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return path.name


def _axes(axes, runs, title: str, ylabel: str):
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel(ylabel)
    axes.set_xlabel("optimiser step")
    axes.set_xlim(0, max(run.config.train.steps for run in runs) * 1.01)
    _phases(axes, runs)


def _phases(axes, runs):
    """Shade the dense phase that ends a run; a run with one phase has nothing to mark."""
    for colour, run in zip(_cycle(runs), runs, strict=True):
        for (start, end, phase), earlier in zip(run.phases[1:], run.phases, strict=False):
            axes.axvline(start, color=colour, linestyle="--", linewidth=1)
            if earlier[2].sparse and not phase.sparse:
                axes.axvspan(
                    start, end, color=colour, alpha=0.10, linewidth=0, label=f"{run.label}: dense phase"
                )


def _cycle(runs):
    return [COLOURS[index % len(COLOURS)] for index in range(len(runs))]


def smooth(values, window: int):
    """Centred running mean; near the ends over what is there, so that no step leaks past the curve."""
    kernel = np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _loss(runs):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    # Losses of several kinds of tokens compare only per byte of their text.
    per_byte = any(run.bytes_per_token != 1 for run in runs)
    _axes(left, runs, "training", "loss, bits per byte" if per_byte else "loss, nats per byte")
    _axes(right, runs, "validation: dense weights (solid) and sparse weights (dashed)", "")
    heights = []
    for colour, run in zip(_cycle(runs), runs, strict=True):
        scale = bits_per_byte(1.0, run.bytes_per_token) if per_byte else 1.0
        steps, losses = run.column("train", "loss")
        losses = scale * np.asarray(losses)
        if len(steps):
            left.plot(steps, losses, color=colour, alpha=0.15, linewidth=0.8)
            left.plot(steps, smooth(losses, max(len(losses) // 40, 1)), color=colour, label=run.label)
            heights += list(losses)
        for name, line in (("dense", "o-"), ("sparse", "v--")):
            steps, values = run.column("eval", name)
            values = scale * np.asarray(values)
            label = f"{run.label}, {name}{mark(run.config.method, name)}"
            right.plot(steps, values, line, color=colour, markersize=5, clip_on=False, label=label)
            heights += list(values)
    for order1 in sorted({run.order1 for run in runs if run.order1}):
        order1 = bits_per_byte(order1) if per_byte else order1
        for axes in (left, right):
            axes.axhline(order1, color="grey", linestyle=":", label=f"order-1 byte entropy {order1:.2f}")
        heights.append(order1)
    if heights:
        low, high = np.min(heights), np.percentile(heights, 95)
        left.set_ylim(low - 0.1, max(high, low + 0.5) + 0.3)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def _flip_rate(runs):
    figure, axes = plt.subplots(figsize=(8, 4.5))
    _axes(axes, runs, "flip rate: share of FFN mask entries that one step changes", "flip rate per step")
    for colour, run in zip(_cycle(runs), runs, strict=True):
        steps, values = run.column("monitor", "flip_rate")
        axes.plot(steps, values, color=colour, marker=".", markersize=4, linewidth=1.2, label=run.label)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure
