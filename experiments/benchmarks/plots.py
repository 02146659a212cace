"""Plots of stored results as PNG files."""

import statistics
from functools import partial
from pathlib import Path

from experiments.analysis.style import STYLE, WIDTH, colours, name_at_end, plt, save
from experiments.benchmarks import lead, rows, select, stored
from experiments.benchmarks.suites import ffn, ladder

KINDS = {
    "-": "solid: block, forward + backward",
    "--": "dashed: packed product alone, median",
    ":": "dotted: PyTorch",
}
OLD = "an older measurement, in a fixed cyclic order"
PARTS = {"producers": "#E69F00", "products": "#0072B2", "rest": "#999999"}


def write(suites: dict, path: Path) -> Path:
    """Draw the plot that the end of the file name says."""
    kinds = {"lead": _lead, "width": _width, "tokens": _tokens, "cost": _cost, "ladder": _ladder}
    draw = kinds[path.stem.rpartition("-")[2]]
    with plt.rc_context(STYLE):
        save(draw(suites), path)
    return path


def _title(suites: dict) -> str:
    return next(iter(suites.values()))["hardware"]["description"]


def _lead(suites: dict):
    """Methods by place with their 95 % intervals, blocks and whole steps side by side."""
    places = lead.places(suites)
    columns = [what for what in lead.WHAT if any(place.what == what for place in places)]
    methods = dict(zip(lead.METHODS, colours(lead.METHODS), strict=True))
    heights = [sum(len(own) + 1.6 for place, own in places.items() if place.what == w) for w in columns]
    size = (WIDTH * max(len(columns), 1.4) / 2, 0.9 + 0.2 * max(heights))
    figure, panels = plt.subplots(1, len(columns), squeeze=False, sharex=True, figsize=size)
    common = [word for word in next(iter(places)).words if all(word in place.words for place in places)]
    marks, ends = {}, [0.95, 1.05]
    for what, axes in zip(columns, panels[0], strict=True):
        at, names = 0.0, []
        for place, found in places.items():
            if place.what != what:
                continue
            names.append((at, ", ".join(word for word in place.words if word not in common)))
            for method, colour in methods.items():
                if method not in found:
                    continue
                at += 1
                pair, hollow = _interval(axes, found[method], what, at, method, colour)
                bars = pair.low is not None
                kinds = {"bars: 95 % intervals": bars, f"hollow: {OLD}": hollow}
                marks |= {words: None for words, there in kinds.items() if there}
                ends += [pair.low, pair.high] if bars else [pair.ratio]
            at += 1.6
        axes.axvline(1, color="black", linewidth=1)
        axes.set_ylim(max(heights) - 0.6, -0.8)
        axes.set_yticks([])
        for y, name in names:
            axes.annotate(
                name,
                (0.005, y),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8,
                fontweight="bold",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        axes.grid(axis="y", visible=False)
        axes.set_title(lead.WHAT[what])
        axes.locator_params(axis="x", nbins=4)  # more would run into those of the next panel
        axes.set_xlabel("dense time / time; right of 1 is faster")
    room = max(ends) - min(ends)
    panels[0][0].set_xlim(min(ends) - 0.03 * room, max(ends) + 0.7 * room)
    figure.suptitle(f"{', '.join([_title(suites), *common])}\n{'; '.join(marks)}", fontsize=9)
    return figure


def _interval(axes, row: dict, what: str, at: float, method: str, colour: str):
    """Draw the ratio of a method at a height, with its interval and its name. The ratio, and whether its mark
    is hollow, as of an older measurement."""
    pair, hollow = rows.paired(row, *lead.PROGRAMS[what]), stored.is_old(row)
    bar = None if pair.low is None else [[pair.ratio - pair.low], [pair.high - pair.ratio]]
    axes.errorbar(
        pair.ratio,
        at,
        xerr=bar,
        color=colour,
        marker="o",
        capsize=2,
        markerfacecolor="white" if hollow else colour,
    )
    axes.annotate(
        f"{method}  {pair.ratio:.2f}x",
        (pair.ratio if pair.high is None else pair.high, at),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )
    return pair, hollow


def _dtypes(suites: dict) -> list[str]:
    """Those of whole FFNs, where these were measured."""
    found = select.current(suites, "ffn") or select.current(suites, "gemm")
    return list(dict.fromkeys(row["dtype"] for row in found))


def _panels(suites: dict, names, **size):
    figure, axes = plt.subplots(len(names), 1, sharex=True, sharey=True, squeeze=False, **size)
    for panel, name in zip(axes[:, 0], names, strict=True):
        panel.set_title(name)
    figure.suptitle(_title(suites), fontsize=10)
    return figure, dict(zip(names, axes[:, 0], strict=True))


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
    """Methods' forward and backward passes as lines with the range of their 95 % interval, the median packed
    product dashed, PyTorch dotted."""
    dtypes, any_old = _dtypes(suites), False
    figure, panels = _panels(suites, dtypes, figsize=(WIDTH, 0.7 + 3.3 * len(dtypes)))
    for dtype, axes in panels.items():
        for text, found, pair, style in _curves(suites):
            points, old = [], []
            for at, case in enumerate(cases):
                own = [r for r in found if (r["T"], r["d"], r["f"], r["dtype"]) == (*case, dtype)]
                pairs = [one for row in own if (one := pair(row)) is not None]
                if pairs:
                    middle = statistics.median(one.ratio for one in pairs)
                    low, high = (pairs[0].low, pairs[0].high) if len(pairs) == 1 else (None, None)
                    points.append(
                        (at, middle, middle if low is None else low, middle if low is None else high)
                    )
                    old += [(at, middle)] if any(map(stored.is_old, own)) else []
            if points:
                x, y, low, high = zip(*points, strict=True)
                axes.plot(x, y, marker="o", label=text, **style)
                axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
            if old:
                any_old = True
                axes.plot(
                    *zip(*old, strict=True), "o", color=style["color"], markerfacecolor="white", label="_old"
                )
        axes.axhline(1, color="black", linewidth=1, label="_dense")
        axes.set_xticks(range(len(cases)), names)
        axes.set_ylabel("dense time / time")
    axes.set_ylim(bottom=0)  # of all, once everything is drawn
    axes.set_xlabel(label)
    figure.canvas.draw()
    for axes in panels.values():
        name_at_end(axes)
    lines = [line for axes in panels.values() for line in axes.get_lines()]
    drawn = {line.get_linestyle() for line in lines if not line.get_label().startswith("_")}
    words = "; ".join(words for kind, words in KINDS.items() if kind in drawn)
    figure.supxlabel(f"{words}\nhollow: {OLD}" if any_old else words, fontsize=8)
    return figure


def _curves(suites: dict):
    """(label, rows, speed-up of a row, style), the style of one of `KINDS`."""
    curves = []
    for method, found in select.by_method(select.current(suites, "ffn")).items():
        kind = ":" if method.startswith("torch") else "-"
        curves.append((method, found, partial(rows.paired, base="dense both", name="both"), kind))
    for name, found in select.by_format(select.current(suites, "gemm")).items():
        curves.append((f"product {name}", found, partial(rows.paired, base="dense", name=name), "--"))
    for colour, (*curve, kind) in zip(colours([name for name, *_ in curves]), curves, strict=True):
        yield *curve, {"linestyle": kind, "color": colour}


def _cost(suites: dict):
    """Stacked shares of the dense block's time: producers, products, rest."""
    found = select.with_parts(suites)
    dtypes = list(dict.fromkeys(row["dtype"] for row in found))
    cases = select.widths({"ffn": {"rows": found}})
    bars = max(
        sum((r["T"], r["d"], r["f"], r["dtype"]) in [(*c, t) for c in cases] for r in found) for t in dtypes
    )
    figure, panels = _panels(suites, dtypes, figsize=(WIDTH, 1.2 + 0.2 * bars * len(dtypes)))
    for dtype, axes in panels.items():
        labels, at = [], 0.0
        for case in cases:
            axes.annotate(
                f"d = {case[1]}, f = {case[2]}",
                (0.01, at - 1),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8,
                fontweight="bold",
            )
            for row in found:
                parts = ffn.part(row, "producer"), ffn.part(row, "product"), ffn.rest(row)
                there = (row["T"], row["d"], row["f"], row["dtype"]) == (*case, dtype) and None not in parts
                if not there or rows.ratio(row, "dense both", "both") is None:
                    continue
                whole, left = row["ms"]["dense both"]["median"], 0.0
                for part, width in zip(PARTS, parts, strict=True):
                    axes.barh(at, width / whole, left=left, color=PARTS[part])
                    left += width / whole
                labels.append((at, row["method"] + (" *" if stored.is_old(row) else "")))
                at += 1
            at += 1.4
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=8)
        axes.set_ylim(at - 1.6, -1.8)
        axes.grid(axis="y", visible=False)
    note = f"\n*: {OLD}" if any(map(stored.is_old, found)) else ""
    axes.set_xlabel(f"share of the dense block's time, forward + backward{note}")
    first = next(iter(panels.values()))
    x = 0.0
    for part, colour in PARTS.items():
        first.annotate(
            part,
            (x, 1.0),
            xycoords="axes fraction",
            xytext=(70, 4),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            fontweight="bold",
        )
        x += 0.22
    return figure


def _ladder(suites: dict):
    """A bar of tokens per second for each rung, dense ones in one colour, with what it changes."""
    found = ladder.longest(select.rows_of(suites, "ladder"))
    figure, axes = plt.subplots(figsize=(WIDTH, 1.3 + 0.42 * len(found)))
    dense, sparse = colours(["dense", "FST"])
    for at, row in enumerate(found):
        tokens, share, ratio = ladder.tokens_per_second(row), ladder.mfu(row), None
        if row["before"]:
            ratio = rows.ratio(row, "step before", "step")
        axes.barh(at, tokens, color=dense if row["method"] == "Dense" else sparse)
        parts = [f"{tokens:,.0f}"]
        parts += [f"{ratio:.2f}x {row['before']}"] if ratio else []
        parts += [f"{share:.0%} of the peak"] if share else []
        axes.annotate(
            "  ".join(parts), (tokens, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(found)), [row["rung"] for row in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 1.9 * max(map(ladder.tokens_per_second, found)))
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:,.0f}k" if value >= 1e3 else f"{value:g}")
    axes.set_xlabel("tokens per second")
    first = found[0]
    figure.suptitle(
        f"{_title(suites)}: whole training steps, one change after another\n"
        f"d = {first['d']}, f = {first['f']}, {first['layers']} blocks, {first['T']} tokens a step",
        fontsize=9,
    )
    return figure
