"""The figures of a study."""

from pathlib import Path

import numpy as np

from experiments.ablations.ablation import REPLICATE
from experiments.ablations.evidence import Study, curve
from experiments.analysis.curves import COLOURS, STYLE, plt, save

END = 0.15  # share of a run that has a panel of its own
UNITS = {"tokens": "tokens, millions", "minutes": "minutes of training"}


def write(study: Study, folder: Path) -> list[str]:
    """Draw the figures into a folder; their file names.

    study: its runs.
    folder: which exists."""
    with plt.rc_context(STYLE):
        names = [_losses(study, over, folder / f"{study.name}_{over}.png") for over in UNITS]
        return [*names, _trade(study, folder / f"{study.name}_trade.png")]


def _losses(study: Study, over: str, path: Path) -> str:
    figure, (whole, end, pairs) = plt.subplots(
        1, 3, figsize=(12, 4.2), gridspec_kw={"width_ratios": (5, 3, 2)}
    )
    last = max(curve(run, over)[0][-1] for runs in study.arms.values() for run in runs.values())
    arms = [arm for arm in study.arms if arm != REPLICATE]
    for axes in (whole, end):
        for colour, arm in zip(_colours(arms), arms, strict=True):
            curves = [curve(run, over) for run in study.arms[arm].values()]
            _band(axes, curves, colour, arm)
        axes.set(xlabel=UNITS[over])
    whole.set(ylabel="validation loss, every product dense (bits per byte)", xlim=(0, last * 1.01))
    whole.set_title(f"{study.name}: mean and range of seeds", loc="left", fontsize=10)
    whole.legend(frameon=False, fontsize=9)
    end.set(xlim=((1 - END) * last, last * 1.005))
    end.set_title(f"the last {END:.0%}", loc="left", fontsize=10)
    for axes, first in ((whole, 0.1), (end, 1 - END)):
        shown = [
            (x, y)
            for line in axes.get_lines()
            for x, y in zip(*line.get_data(), strict=True)
            if x >= first * last
        ]
        heights = [y for _, y in shown]
        if heights:
            margin = 0.05 * (max(heights) - min(heights)) or 0.01
            axes.set_ylim(min(heights) - margin, max(heights) + margin)
    for place, (colour, arm) in enumerate(zip(_colours(arms), arms, strict=True)):
        gap = study.gap(arm)
        if arm == study.reference or gap.mean is None:
            continue
        values = study.paired(arm, lambda run: run.last("eval", "dense"))
        pairs.plot([place] * len(values), values, "o", color=colour, alpha=0.5, markersize=4)
        low, high = (gap.mean, gap.mean) if gap.low is None else (gap.low, gap.high)
        pairs.errorbar(
            place, gap.mean, [[gap.mean - low], [high - gap.mean]], color=colour, marker="_", capsize=4
        )
    pairs.axhline(0, color="grey", linewidth=0.8)
    pairs.set_xticks(range(1, len(arms)), arms[1:], rotation=60, ha="right", fontsize=9)
    pairs.set_title("behind dense, nats per token", loc="left", fontsize=10)
    figure.tight_layout()
    return save(figure, path)


def _band(axes, curves, colour, label):
    """The mean of curves, and the band between the lowest and the highest, at the places of the first."""
    places = curves[0][0]
    values = np.array([np.interp(places, *one) for one in curves])
    axes.plot(places, values.mean(0), color=colour, label=label, linewidth=1.4)
    axes.fill_between(places, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def _trade(study: Study, path: Path) -> str:
    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    arms = [arm for arm in study.arms if arm != REPLICATE]
    for colour, arm in zip(_colours(arms), arms, strict=True):
        gap, speed = study.gap(arm), study.run_speed(arm)
        if gap.mean is None or speed.mean is None:
            continue
        bars = {
            name: None if one.low is None else [[one.mean - one.low], [one.high - one.mean]]
            for name, one in (("yerr", gap), ("xerr", speed))
        }
        axes.errorbar(speed.mean, gap.mean, **bars, color=colour, marker="o", capsize=3)
        axes.annotate(arm, (speed.mean, gap.mean), xytext=(6, 5), textcoords="offset points", color=colour)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set(
        xlabel="speed of the whole run, dense time / time",
        ylabel="final loss less that of dense training, nats per token",
    )
    axes.set_title(f"{study.name}: below 0 and right of 1 sparsity wins", loc="left", fontsize=10)
    figure.tight_layout()
    return save(figure, path)


def _colours(arms):
    return [COLOURS[index % len(COLOURS)] for index in range(len(arms))]
