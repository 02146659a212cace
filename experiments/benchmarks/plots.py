"""Plots of stored results as PNG files."""

import statistics
from functools import partial
from pathlib import Path

import matplotlib

from experiments.benchmarks import rows, select
from experiments.benchmarks.suites import ffn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Distinguishable also with colour-blindness and in grey (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREYS = ("#000000", "#888888")
PARTS = {"producers": "#E69F00", "products": "#0072B2", "rest": "#999999"}
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
}


def write(suites: dict, path: Path) -> Path:
    """Draw the plot that the end of the file name says."""
    draw = {"width": _width, "tokens": _tokens, "cost": _cost}[path.stem.rpartition("-")[2]]
    with plt.rc_context(STYLE):
        figure = draw(suites)
        figure.savefig(path, dpi=120, bbox_inches="tight")
        plt.close(figure)
    return path


def _title(suites: dict) -> str:
    return next(iter(suites.values()))["hardware"]["description"]


def _dtypes(suites: dict) -> list[str]:
    """Those of whole FFNs, where these were measured."""
    found = select.current(suites, "ffn") or select.current(suites, "gemm")
    return list(dict.fromkeys(row["dtype"] for row in found))


def _panels(suites: dict, names, **size):
    figure, axes = plt.subplots(1, len(names), sharey=True, squeeze=False, **size)
    for panel, name in zip(axes[0], names, strict=True):
        panel.set_title(name)
    figure.suptitle(_title(suites))
    return figure, dict(zip(names, axes[0], strict=True))


def _width(suites: dict):
    cases = select.widths(suites)
    names = [f"{d}\n{f}" for _, d, f in cases]
    return _speedup(suites, cases, names, f"widths d and f (T = {cases[0][0]} tokens)")


def _tokens(suites: dict):
    cases = select.tokens(suites)
    return _speedup(
        suites, cases, [str(T) for T, *_ in cases], "tokens T (d = {1}, f = {2})".format(*cases[0])
    )


def _speedup(suites: dict, cases, names, label: str):
    """Methods' forward and backward passes as lines, the median packed product dashed, PyTorch dotted."""
    dtypes = _dtypes(suites)
    figure, panels = _panels(suites, dtypes, figsize=(5.2 * len(dtypes), 4.2))
    for dtype, axes in panels.items():
        for text, found, gain, style in _curves(suites):
            points = []
            for at, case in enumerate(cases):
                gains = [
                    gain(row)
                    for row in found
                    if (row["T"], row["d"], row["f"], row["dtype"]) == (*case, dtype)
                ]
                gains = [value for value in gains if value is not None]
                if gains:
                    points.append((at, statistics.median(gains)))
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=text, **style)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(cases)), names)
        axes.set_xlabel(label)
    first = next(iter(panels.values()))
    first.set_ylabel("dense time / time")
    first.set_ylim(bottom=0)
    lines, labels = first.get_legend_handles_labels()
    last = list(panels.values())[-1]
    last.legend(lines, labels, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _curves(suites: dict):
    """(label, rows, speed-up of a row, style), those of a kind in different colours."""
    kinds = {"-": [], "--": [], ":": []}
    for method, found in select.by_method(select.current(suites, "ffn")).items():
        kind = ":" if method.startswith("torch") else "-"
        gain = partial(rows.ratio, base="dense both", name="both")
        kinds[kind].append((f"FFN forward + backward, {method}", found, gain))
    for name, found in select.by_format(select.current(suites, "gemm")).items():
        gain = partial(rows.ratio, base="dense", name=name)
        kinds["--"].append((f"packed {name} product alone, median", found, gain))
    for kind, curves in kinds.items():
        colours = GREYS if kind == ":" else COLOURS
        for index, curve in enumerate(curves):
            yield *curve, {"linestyle": kind, "color": colours[index % len(colours)]}


def _cost(suites: dict):
    """Stacked shares of the dense block's time: producers, products, rest."""
    found = select.with_parts(suites)
    dtypes = list(dict.fromkeys(row["dtype"] for row in found))
    figure, panels = _panels(suites, dtypes, figsize=(6.5 * len(dtypes), 4.2))
    cases = select.widths({"ffn": {"rows": found}})
    for dtype, axes in panels.items():
        labels, at = [], 0
        for case in cases:
            for row in found:
                parts = ffn.part(row, "producer"), ffn.part(row, "product"), ffn.rest(row)
                there = (row["T"], row["d"], row["f"], row["dtype"]) == (*case, dtype) and None not in parts
                if not there or rows.ratio(row, "dense both", "both") is None:
                    continue
                whole, bottom = row["ms"]["dense both"]["median"], 0.0
                for part, height in zip(PARTS, parts, strict=True):
                    label = part if not labels else None
                    axes.bar(at, height / whole, bottom=bottom, color=PARTS[part], label=label)
                    bottom += height / whole
                labels.append((at, f"{row['method']}, {case[1]} x {case[2]}"))
                at += 1
            at += 0.6
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks([x for x, _ in labels], [text for _, text in labels], rotation=90, fontsize=7)
        axes.grid(axis="x", visible=False)
    first = next(iter(panels.values()))
    first.set_ylabel("FFN forward + backward, share of dense time")
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    list(panels.values())[-1].legend(*first.get_legend_handles_labels(), frameon=False, fontsize=8, **beside)
    return figure
