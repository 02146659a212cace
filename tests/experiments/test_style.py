"""What all plots share."""

import pytest

pytest.importorskip("matplotlib")

from experiments.analysis import style


def test_a_name_has_one_colour_in_all_plots():
    demo = dict(zip(names := ["dense", "fst", "venom"], style.colours(names), strict=True))
    assert style.colours(["Activation24", "Venom", "FST"])[1:] == [demo["venom"], demo["fst"]]
    assert style.colours(["S-STE", "last"])[0] == style.colours(["none", "SSTE"])[1]
    mixed = style.colours(["first", "dense", *"abcde"])
    assert mixed[1] == demo["dense"] and len(set(mixed)) == len(mixed)
    assert len(set(style.FIXED.values())) == len(style.FIXED)
    assert len(style.colours(range(20))) == 20


def test_labels_keep_their_distance_and_their_order():
    found = style.spread([0.0, 0.1, 0.15, 5.0], 1.0)
    assert found == pytest.approx([-0.91667, 0.08333, 1.08333, 5.0], abs=1e-4)
    assert style.spread([3.0, 7.0], 1.0) == [3.0, 7.0] and style.spread([], 1.0) == []


def test_every_line_has_its_name_beside_it():
    with style.plt.rc_context(style.STYLE):
        figure, axes = style.plt.subplots()
        axes.plot([0, 1], [0, 1.00], label="one")
        axes.plot([0, 1], [0, 1.01], label="two")
        axes.plot([0, 1], [0, 0.50], label="_raw")
        style.name_at_end(axes)
        figure.canvas.draw()
    texts = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert texts.keys() == {"one", "two"} and not texts["one"].overlaps(texts["two"])
    style.plt.close(figure)
