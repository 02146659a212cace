"""What all plots share."""

import itertools

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import jax_sparse24 as s24
from experiments.ablations import plots, reproduction
from experiments.analysis import curves, style
from experiments.analysis.outcome import LOSSES, METRICS
from experiments.analysis.runs import Run
from experiments.config import Config, Train
from tests import pages


def test_a_name_has_one_colour_in_all_plots():
    demo = dict(zip(names := ["dense", "fst", "venom"], style.colours(names), strict=True))
    assert style.colours(["Activation24", "Venom", "FST"])[1:] == [demo["venom"], demo["fst"]]
    assert style.colours(["S-STE", "last"])[0] == style.colours(["none", "SSTE"])[1]
    mixed = style.colours(["first", "dense", *"abcde"])
    assert mixed[1] == demo["dense"] and len(set(mixed)) == len(mixed)
    assert len(set(style.FIXED.values())) == len(style.FIXED)
    assert {style._plain(entry.name) for entry in s24.methods.list()} <= style.FIXED.keys()
    assert len(style.colours(range(20))) == 20


def test_figures_of_pages_are_read_on_a_narrow_screen():
    """All are as wide as what was chosen for one, but for curves whose runs are gone."""
    docs = pages.ROOT / "docs"
    figures = [file for folder in ("images", "evidence") for file in (docs / folder).glob("*.png")]
    figures += (docs / "reproduction").rglob("*_arms.png")
    assert len(figures) > 50
    for file in figures:
        width = int.from_bytes(file.read_bytes()[16:20], "big")
        assert width <= (style.WIDTH + 0.2) * style.STYLE["savefig.dpi"], file


def test_labels_keep_their_distance_and_their_order():
    found = style.spread([0.0, 0.1, 0.15, 5.0], 1.0)
    assert found == pytest.approx([-0.91667, 0.08333, 1.08333, 5.0], abs=1e-4)
    assert style.spread([3.0, 7.0], 1.0) == [3.0, 7.0] and style.spread([], 1.0) == []


def test_every_line_has_its_name_beside_it():
    with style.plt.rc_context(style.STYLE):
        figure, axes = style.plt.subplots()
        axes.plot([0, 1], [0, 1.00], label="one")
        axes.plot([0, 0.5, 1], [0, 1.01, np.nan], label="two")
        axes.plot([0, 1], [0, 0.50], label="_raw")
        axes.axhline(0.2, label="entropy")
        style.name_at_end(axes)
        figure.canvas.draw()
    texts = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert texts.keys() == {"one", "two", "entropy"} and not texts["one"].overlaps(texts["two"])
    assert {text.get_text(): text.xy for text in axes.texts}["two"] == (0.5, 1.01)  # where its line ends
    style.plt.close(figure)


def flips(height: float) -> dict:
    """What a run writes down of its masks."""
    return {"monitor": [{"step": step, "flip_rate": height} for step in range(0, 100, 10)]}


def test_every_phase_and_loss_has_a_name_that_stands_free(tmp_path, monkeypatch):
    """No curve of flip rates runs through a phase's name, and none stands over another."""
    found = []
    monkeypatch.setattr(curves, "save", lambda figure, path: found.append(figure) or path.name)
    methods = {
        "dense": s24.methods.Dense(),
        "fst": s24.methods.FST(),
        "venom": s24.methods.Venom(dense_warmup=10, sparse_share=0.5),
    }
    losses = {"eval": [{"step": step, "dense": 2.0, "sparse": 2.1} for step in (50, 100)]}
    runs = [
        Run(name, tmp_path, Config(method=method, train=Train(steps=100)), flips(height) | losses)
        for (name, method), height in zip(methods.items(), (0.002, 0.001, 0.004), strict=True)
    ]
    curves.write(runs, tmp_path)
    *_, loss, figure = found
    names = {text.get_text() for text in loss.axes[1].texts if ": " not in text.get_text()}
    assert names == {"dense", "dense, cut to 2:4", "fst", "fst, sparse", "venom", "venom, sparse *"}
    figure.canvas.draw()
    (axes,) = figure.axes
    names = [text for text in axes.texts if ": " in text.get_text()]
    assert [text.get_text() for text in names] == ["fst: dense", "venom: sparse", "venom: dense"]
    boxes = [text.get_window_extent() for text in names]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    points = np.concatenate([axes.transData.transform(line.get_xydata()) for line in axes.get_lines()[-3:]])
    assert points[:, 1].max() < min(box.y0 for box in boxes)


@pytest.mark.slow
def test_axes_of_arms_say_what_a_metric_is(tmp_path, monkeypatch):
    """And losses in which unit; a label is no wider than its figure."""
    found, by_metrics = [], {}
    monkeypatch.setattr(plots, "save", lambda figure, path: found.append(figure) or path.name)
    for _, result in reproduction.recorded():
        by_metrics[frozenset(finding["metric"] for finding in result["findings"])] = result
    for result in by_metrics.values():
        plots.arms(result, tmp_path / "arms.png")
        (figure,) = found
        for axes in figure.axes:
            label = axes.get_xlabel().replace("\n", " ")
            metric = label.split(":")[0].split(" minus ")[0]
            assert label.endswith(", nats per token" if metric in LOSSES else METRICS[metric])
        figure.canvas.draw()
        assert all(axes.xaxis.label.get_window_extent().x1 <= figure.bbox.x1 for axes in figure.axes)
        style.plt.close(found.pop())
