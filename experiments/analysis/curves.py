"""Curves of runs as PNG files: loss.png and flip_rate.png."""

from pathlib import Path

import numpy as np

import jax_sparse24 as s24
from experiments.analysis.style import STYLE, WIDTH, colours, name_at_end, plt, save
from experiments.data.vocabulary import bits_per_byte


def write(runs, out: Path) -> list[str]:
    """Write the plots; returns their file names."""
    with plt.rc_context(STYLE):
        names = [save(_loss(runs), out / "loss.png")]
        if any(len(run.column("monitor", "flip_rate")[0]) for run in runs):
            names.append(save(_flip_rate(runs), out / "flip_rate.png"))
    return names


def _axes(axes, runs, title: str, ylabel: str):
    axes.set_title(title)
    axes.set_ylabel(ylabel)
    axes.set_xlabel("optimiser step")
    axes.set_xlim(0, max(run.config.train.steps for run in runs) * 1.01)
    _phases(axes, runs)


def _phases(axes, runs):
    """Name each phase but the first of a run where it begins, and shade the dense ones."""
    named = 0
    for colour, run in zip(colours([run.label for run in runs]), runs, strict=True):
        for start, end, phase in run.phases[1:]:
            axes.axvline(start, color=colour, linestyle="--", linewidth=1, label="_phase")
            if not phase.sparse:
                axes.axvspan(start, end, color=colour, alpha=0.08, linewidth=0)
            axes.annotate(
                f"{run.label}: {phase.name}",
                (start, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -3 - 10 * named),
                textcoords="offset points",
                va="top",
                color=colour,
                fontsize=8,
            )
            named += 1


def smooth(values, window: int):
    """Centred running mean; near the ends over what is there, so that no step leaks past the curve."""
    kernel = np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _loss(runs):
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 6.8), sharex=True, sharey=True)
    # Losses of several kinds of tokens compare only per byte of their text.
    per_byte = any(run.bytes_per_token != 1 for run in runs)
    unit = "loss, bits per byte" if per_byte else "loss, nats per byte"
    _axes(above, runs, f"training{', of cross entropies' * (not all(map(_crosses, runs)))}", unit)
    above.set_xlabel("")
    leak = "" if all(run.config.method.causal for run in runs) else "; *: no language-model loss"
    _axes(below, runs, f"validation: dense products (solid), sparse (dashed){leak}", unit)
    heights = []
    for colour, run in zip(colours([run.label for run in runs]), runs, strict=True):
        scale = bits_per_byte(1.0, run.bytes_per_token) if per_byte else 1.0
        steps, losses = run.column("train", "loss")
        losses = scale * np.asarray(losses)
        if len(steps) and _crosses(run):
            above.plot(steps, losses, color=colour, alpha=0.15, linewidth=0.8, label="_raw")
            above.plot(steps, smooth(losses, max(len(losses) // 40, 1)), color=colour, label=run.label)
            heights += list(losses)
        for name, line in (("dense", "o-"), ("sparse", "v--")):
            steps, values = run.column("eval", name)
            values = scale * np.asarray(values)
            label = run.label if name == "dense" else _cut(run)
            below.plot(steps, values, line, color=colour, markersize=5, clip_on=False, label=label)
            heights += list(values)
    for order1 in sorted({run.order1 for run in runs if run.order1}):
        order1 = bits_per_byte(order1) if per_byte else order1
        for axes in (above, below):
            axes.axhline(order1, color="grey", linestyle=":", label=f"order-1 entropy {order1:.2f}")
        heights.append(order1)
    if heights:
        low, high = np.min(heights), np.percentile(heights, 95)
        above.set_ylim(low - 0.1, max(high, low + 0.5) + 0.3)
    for axes in (above, below):
        name_at_end(axes)
    return figure


def _cut(run) -> str:
    """What the line of a run's losses with sparse products is called."""
    if isinstance(run.config.method, s24.methods.Dense):
        return f"{run.label}, cut to 2:4"
    return f"{run.label}, sparse{'' if run.config.method.causal else ' *'}"


def _crosses(run) -> bool:
    """Whether a run is trained with the cross entropy, not with a loss of its method's own."""
    return run.config.method.training(run.config.train.steps).loss is None


def _flip_rate(runs):
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    _axes(axes, runs, "flip rate: share of FFN mask entries that one step changes", "flip rate per step")
    for colour, run in zip(colours([run.label for run in runs]), runs, strict=True):
        steps, values = run.column("monitor", "flip_rate")
        axes.plot(steps, values, color=colour, marker=".", label=run.label)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # with room for the names of phases
    name_at_end(axes)
    return figure
