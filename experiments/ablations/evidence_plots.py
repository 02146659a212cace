"""The figures of a study, and of several."""

import itertools
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from experiments.ablations.ablation import REPLICATE
from experiments.ablations.evidence import PAPERS, Paper, Study, curve, places
from experiments.analysis.style import STYLE, WIDTH, colours, name_at_end, plt, save

END = 0.15  # share of a run that has a panel of its own
TRADE = "trade.png"
FORMS = ("o", "s", "^", "D", "v", "P", "X")
DASHED = {"linestyle": "--", "linewidth": 0.8}
DOTTED = {"linestyle": ":", "linewidth": 1.2}
UNITS = {"tokens": "tokens, millions", "minutes": "minutes of training"}


def write(study: Study, folder: Path) -> dict[str, str]:
    """Draw the figures into a folder; by their file names, what they show.

    study: its runs.
    folder: which exists."""
    with plt.rc_context(STYLE):
        return {
            _losses(study, over, folder / f"{study.name}_{over}.png"): f"Validation loss over {over}"
            for over in UNITS
        }


def trade(studies: list[Study], folder: Path) -> str:
    """Draw what arms lose against what they gain into a folder, which exists; the name of the file."""
    with plt.rc_context(STYLE):
        return _trade(studies, folder / TRADE)


def _losses(study: Study, over: str, path: Path) -> str:
    """Curves of all arms and which steps were sparse; below, the end, and what is paired by seed."""
    shown = {arm: _shown(study, arm, over) for arm in study.arms if arm != REPLICATE}
    arms = [arm for arm, runs in shown.items() if runs]
    heights = (3, 0.24 * len(arms), 2)
    figure = plt.figure(figsize=(WIDTH, sum(heights) + 1.4))
    grid = figure.add_gridspec(3, 2, height_ratios=heights)
    whole, end, pairs = (figure.add_subplot(place) for place in (grid[0, :], grid[2, 0], grid[2, 1]))
    phases = figure.add_subplot(grid[1, :], sharex=whole)
    curves = {arm: [curve(run, over) for run in shown[arm]] for arm in arms}
    last = max(at[-1] for own in curves.values() for at, _, _ in own)
    for axes in (whole, end):
        for colour, arm in zip(colours(arms), arms, strict=True):
            _band(axes, curves[arm], colour, arm)
        axes.set_ylabel("bits per byte")
    whole.set(xlim=(0, last))
    causal = all(one.all() for own in curves.values() for _, _, one in own)
    seeds = sorted({run.config.seed for runs in shown.values() for run in runs})
    of = f"seed {seeds[0]}" if len(seeds) == 1 else "mean and range of seeds"
    whole.set_title(
        f"{study.name}: validation loss by the products, dense or sparse, of that step,\n"
        f"{of}{'' if causal else '; dotted: not causal'}"
    )
    whole.tick_params(labelbottom=False)
    end.set(xlim=((1 - END) * last, last), xlabel=UNITS[over])
    end.set_title(f"the last {END:.0%}")
    for axes, first in ((whole, 0.1), (end, 1 - END)):
        values = [y[at >= first * last] for own in curves.values() for at, y, _ in own]
        if any(map(len, values)):
            low, high = np.min(np.concatenate(values)), np.max(np.concatenate(values))
            height = high - low or 0.01
            axes.set_ylim(low - 0.08 * height, high + 0.08 * height)
    _pairs(study, arms, pairs)
    _phases([shown[arm][0] for arm in arms], arms, over, phases)
    figure.canvas.draw()  # so that labels know the height of the axes
    name_at_end(whole)
    return save(figure, path)


def _shown(study: Study, arm: str, over: str):
    """The runs of an arm, the lowest seed first; where time counts, those whose times can be compared."""
    runs = study.arms[arm].values() if over == "tokens" else study.alike(arm)
    return sorted(runs, key=lambda run: run.config.seed)


def _pairs(study: Study, arms, axes):
    """What each arm is behind the reference, a mark for each seed and the mean with its interval."""
    others = {arm: colour for arm, colour in zip(arms, colours(arms), strict=True) if arm != study.reference}
    for place, (arm, colour) in enumerate(others.items(), 1):
        gap = study.gap(arm)
        if gap.mean is None:
            continue
        values = [*study.gaps(arm).values()]
        axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.4, markersize=3)
        low, high = (gap.mean, gap.mean) if gap.low is None else (gap.low, gap.high)
        bar = [[gap.mean - low], [high - gap.mean]]
        axes.errorbar(gap.mean, place, xerr=bar, color=colour, marker="|", markersize=8, capsize=2)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(1, len(others) + 1), others)
    for label, colour in zip(axes.get_yticklabels(), others.values(), strict=True):
        label.set_color(colour)
    axes.set_ylim(len(others) + 0.6, 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_title("behind dense")
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel("nats per token")


def _phases(runs, arms, over: str, axes):
    """A bar for each arm: dense steps pale, sparse steps in its colour."""
    for place, (colour, run) in enumerate(zip(colours(arms), runs, strict=True)):
        spans = [(places(run, over, [start, end]), phase.sparse) for start, end, phase in run.phases]
        longest = spans[-1][0][1]
        for (start, end), sparse in spans:
            alpha = 0.6 if sparse else 0.12
            axes.barh(place, end - start, 0.75, start, color=colour, alpha=alpha, linewidth=0)
            if end - start > 0.08 * longest:
                words = {"ha": "center", "va": "center", "fontsize": 7}
                axes.text((start + end) / 2, place, "sparse" if sparse else "dense", **words)
    axes.set_yticks(range(len(arms)), arms)
    for label, colour in zip(axes.get_yticklabels(), colours(arms), strict=True):
        label.set_color(colour)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlabel(UNITS[over])


def _band(axes, curves, colour, label):
    """The mean of curves, and the band between the lowest and the highest, at the places of the first; dotted
    where it is not causal."""
    places, _, causal = curves[0]
    values = np.array([np.interp(places, x, y) for x, y, _ in curves])
    axes.plot(places, np.where(causal, values.mean(0), np.nan), color=colour, label=label)
    if not causal.all():
        axes.plot(places, values.mean(0), color=colour, **DOTTED)
    axes.fill_between(places, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def _trade(studies: list[Study], path: Path) -> str:
    """A mark for each arm of each study, by colour and form; dashed, the speeds that papers state."""
    figure, axes = plt.subplots(figsize=(WIDTH, 4.2))
    arms = list(dict.fromkeys(arm for study in studies for arm in study.others))
    colour = dict(zip(arms, colours(["dense", *arms])[1:], strict=True))  # that of dense training is taken
    for study, form in zip(studies, itertools.cycle(FORMS)):
        for arm in study.others:
            gap, speed = study.gap(arm), study.run_speed(arm)
            if gap.mean is None or speed.mean is None:
                continue
            bars = {
                name: None if one.low is None else [[one.mean - one.low], [one.high - one.mean]]
                for name, one in (("yerr", gap), ("xerr", speed))
            }
            axes.errorbar(
                speed.mean, gap.mean, **bars, color=colour[arm], marker=form, markersize=6, capsize=3
            )
    papers = [paper for paper in PAPERS if paper.arm in colour]
    for paper in papers:
        _paper(axes, paper, colour[paper.arm])
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.margins(0.1)
    place = {"transform": axes.get_xaxis_transform(), "color": "grey", "fontsize": 8}
    axes.text(1, 0.02, " sparsity wins here", **place)
    axes.set_xlabel("speed of the whole run, dense time / time")
    axes.set_ylabel("final loss minus that of dense training,\nnats per token")
    axes.set_title("What the speed of an arm costs in loss, at equal steps")
    point = {"linestyle": "none", "color": "#444444"}
    handles = [Line2D([], [], **point | {"color": colour[arm]}, marker="o", label=arm) for arm in arms]
    forms = zip(studies, itertools.cycle(FORMS))
    handles += [Line2D([], [], **point, marker=form, label=f"size {study.name}") for study, form in forms]
    handles += [
        Line2D([], [], **DASHED, color=colour[paper.arm], label=f"{paper.arm}, {paper.source}:\nspeed alone")
        for paper in papers
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=7, handletextpad=0.2)
    return save(figure, path)


def _paper(axes, paper: Paper, colour: str):
    """A band over all losses: the speed alone is known."""
    axes.axvspan(*paper.speed, color=colour, alpha=0.06, linewidth=0)
    for speed in paper.speed:
        axes.axvline(speed, color=colour, **DASHED)
