"""An ablation as PNGs: curves of its runs, and what its arms reached, which needs the result alone."""

import textwrap
from pathlib import Path

import numpy as np

from experiments.ablations.leaks import leaking, marked
from experiments.analysis.curves import smooth
from experiments.analysis.outcome import LOSSES, METRICS
from experiments.analysis.style import LONGEST, STYLE, WIDTH, colours, name_at_end, plt, save

PANELS = 3  # metrics of a figure of arms at most
LINE = 80  # characters of a label below an axis
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
        figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 7))
        kind, name = named.ablation.curve
        labels = {
            arm: arm if config.method.causal else f"{arm} (where sparse, no language-model loss)"
            for arm, config in named.ablation.all_arms.items()
        }
        _curves(above, runs, "train", "loss", windows=40, labels=labels)
        _curves(below, runs, kind, name, windows=15 if kind == "monitor" else None, labels=labels)
        above.set(xlabel="optimiser step", ylabel="training loss (nats per token)")
        below.set(xlabel="optimiser step", ylabel=LABELS.get((kind, name), name))
        seeds = max(map(len, runs.values()))
        band = "" if seeds == 1 else f"; bands: lowest to highest of {seeds} seeds"
        above.set_title(f"{named.claim}, {named.size}{band}")
        _focus(above)
        for axes in (above, below):
            name_at_end(axes)
        return save(figure, path)


def _curves(axes, runs, kind, name, windows, labels):
    """Mean over seeds and the band between the lowest and the highest, smoothed over a share of the curve."""
    for colour, (arm, own) in zip(colours(runs), runs.items(), strict=True):
        curves = [run.column(kind, name) for run in own]
        length = min(len(steps) for steps, _ in curves)
        if not length:
            continue
        steps = curves[0][0][:length]
        window = max(length // windows, 1) if windows else 1
        values = np.array([smooth(v[:length], window) for _, v in curves])
        marker = "" if windows else "."
        axes.plot(steps, values.mean(0), color=colour, label=labels[arm], marker=marker)
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def _focus(axes):
    """Cut off the first, steep part of the loss."""
    curves = [line.get_ydata() for line in axes.get_lines()]
    heights = np.array([y for curve in curves for y in curve[len(curve) // 8 :] if np.isfinite(y)])
    if len(heights):
        axes.set_ylim(heights.min() - 0.05, heights.max() + 0.05)


def arms(result: dict, path: Path) -> str:
    """Draw what every arm of a recorded result reached, in the metrics that its claim compares: a row for an
    arm, a dot for a seed, a line for the mean.

    Losses are differences from the first arm with the same seed, because seeds differ by more than arms do.
    Returns the file name."""
    names, leaks = list(result["metrics"]), leaking(result)
    compared = dict.fromkeys(found["metric"] for found in result["findings"])
    measured = [metric for metric in compared if any(_reached(result, name, metric) for name in names)]
    metrics = measured[:PANELS] or ["val_loss"]
    with plt.rc_context(STYLE):
        size = (WIDTH, len(metrics) * (0.27 * len(names) + 0.6) + 0.4)
        figure, panels = plt.subplots(len(metrics), 1, figsize=size, sharey=True, squeeze=False)
        for axes, metric in zip(panels[:, 0], metrics, strict=True):
            for row, (colour, name) in enumerate(zip(colours(names), names, strict=True)):
                values = _reached(result, name, metric)
                axes.plot(values, [row] * len(values), ".", color=colour, alpha=0.6, markersize=7)
                if values:
                    mark = marked(name, metric, leaks)
                    axes.plot(np.mean(values), row, "|", color=colour, markersize=14, markeredgewidth=1.8)
                    axes.annotate(mark, (max(values), row), (5, -3), textcoords="offset points")
            paired = metric in LOSSES
            what = f"{metric} minus {names[0]}, nats per token" if paired else f"{metric}: {METRICS[metric]}"
            axes.set_xlabel(textwrap.fill(what, LINE))
            axes.locator_params(axis="x", nbins=5)
            axes.margins(x=0.1)
            if paired:
                axes.axvline(0, color="#888888", linewidth=0.8)
        first = panels[0, 0]
        first.set_yticks(range(len(names)), [textwrap.shorten(n, LONGEST, placeholder="…") for n in names])
        first.set_ylim(len(names) - 0.5, -0.5)
        seeds = len(result["seeds"])
        first.set_title(
            f"{result['name']}, {result['size']}: {seeds} seed{'s' * (seeds > 1)} and mean", loc="left"
        )
        return save(figure, path)


def _reached(result: dict, arm: str, metric: str) -> list[float]:
    """A metric for each seed of an arm; of a loss, its difference from the first arm with that seed."""
    own, first = result["metrics"][arm], next(iter(result["metrics"].values()))
    if metric not in LOSSES:
        return [seed[metric] for seed in own.values() if seed.get(metric) is not None]
    pairs = [(own[seed].get(metric), first[seed].get(metric)) for seed in own if seed in first]
    return [one - other for one, other in pairs if None not in (one, other)]
