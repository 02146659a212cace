"""What the plots of the stored results show."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from experiments.benchmarks import plots, shown, stored
from experiments.benchmarks.settings import Settings

RESULTS = stored.load(Settings().folder)


@pytest.mark.parametrize("kind", ["lead", "width", "tokens", "cost"])
def test_all_that_was_measured_is_within_its_axes(kind, monkeypatch, tmp_path):
    """And a kind of line that is explained is there."""
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    for suites in RESULTS.values():
        for name in shown.images(suites):
            if name.endswith(f"-{kind}.png"):
                plots.write(suites, tmp_path / name)
    assert figures
    for figure in figures:
        figure.canvas.draw()
        lines = [line for axes in figure.axes for line in axes.get_lines()]
        for line in lines:
            points = line.get_transform().transform(np.asarray(line.get_xydata(), float))
            box = line.axes.get_window_extent().padded(1)
            assert all(box.contains(*point) for point in points), line.get_label()
        explained = figure.get_supxlabel()
        assert ("dotted" in explained) == any(line.get_linestyle() == ":" for line in lines)
        plots.plt.close(figure)
