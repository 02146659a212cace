"""How every plot of the project looks: fit for print, and told apart with colour-blindness and in grey."""

import itertools
import textwrap
from pathlib import Path

import matplotlib
import numpy as np

from experiments import files

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette; sky blue and yellow last, since thin lines of them are pale on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# A method has one colour in all plots, as has what else is on several pages; spelling as `_plain` makes it.
FIXED = {
    **{"dense": "#0072B2", "fst": "#D55E00", "venom": "#009E73", "activation24": "#CC79A7"},
    **{"sste": "#E69F00", "ste": "#666666", "srste": "#56B4E9", "step": "#AA4499", "bimask": "#44AA99"},
    **{"slope": "#CC6677", "ast": "#8B6914", "torch dense": "#000000", "torch 2:4": "#888888"},
    **{"product 2:4": "#332288", "product 2:4 own kernel": "#117733"},
    **{"product 64:2:16": "#882255", "product 64:2:8": "#999933", "halfwidth": "#6A3D9A"},
}
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
    "savefig.dpi": 160,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
SIZE = 8  # points, of a line's name in a plot
LONGEST = 44  # characters of it
WIDTH = 6.4  # inches of a figure: on a narrow screen its text is still read; panels stand below one another
APART = 1.25  # lines of text between the baselines of two labels


def colours(names) -> list[str]:
    """A colour for each name of a plot: that of `FIXED`, or else the next one that no other name has."""
    fixed = [FIXED.get(_plain(name)) for name in names]
    rest = itertools.cycle([colour for colour in COLOURS if colour not in fixed] or COLOURS)
    return [colour or next(rest) for colour in fixed]


def _plain(name) -> str:
    """A name as `FIXED` spells it: "S-STE" and "SSTE" are one method."""
    return str(name).lower().replace("-", "")


def save(figure, path: Path) -> str:
    """Write a figure as PNG, and close it; its file name."""
    with files.replacing(path) as partial:
        figure.savefig(partial, bbox_inches="tight")
    plt.close(figure)
    return path.name


def name_at_end(axes) -> None:
    """Write the label of every line beside the axes, joined to its last point; no label is over another.

    axes: whose lines are all drawn and whose limits are set. Labels that begin with "_" are left out."""
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    lines = [line for line in lines if np.isfinite(line.get_ydata()).any()]
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height * 72 / axes.figure.dpi  # in points
    step = APART * SIZE / height * (high - low)
    ends = []
    for line in lines:
        y = np.asarray(line.get_ydata(), float)
        last = np.flatnonzero(np.isfinite(y))[-1]
        ends.append((float(np.clip(y[last], low, high)), line.get_xdata()[last], line))
    for (y, x, line), at in zip(
        *(sorted(ends, key=lambda end: end[0]), spread([end[0] for end in ends], step)), strict=True
    ):
        axes.annotate(
            textwrap.shorten(line.get_label(), LONGEST, placeholder="…"),
            (x, y),
            xycoords=line.get_transform(),
            xytext=(1.03, at),
            textcoords=("axes fraction", "data"),
            color=line.get_color(),
            fontsize=SIZE,
            va="center",
            annotation_clip=False,
            arrowprops={
                **{"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.5},
                **{"relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0},
            },
        )


def spread(places, step: float) -> list[float]:
    """Ascending places, each as near to its own as it can be with `step` between neighbours."""
    groups = []  # (mean of the places less their rank's share, count)
    for rank, place in enumerate(sorted(places)):
        groups.append((place - rank * step, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (a, n), (b, m) = groups[-2:]
            groups[-2:] = [((a * n + b * m) / (n + m), n + m)]
    flat = [mean for mean, count in groups for _ in range(count)]
    return [mean + rank * step for rank, mean in enumerate(flat)]
