"""Numbers of results on pages besides docs/benchmarks.md."""

import re

import pytest

from experiments.ablations import reproduction
from experiments.benchmarks import quoted, session, stored
from experiments.benchmarks.settings import Settings


@pytest.mark.parametrize("name", quoted.PAGES)
def test_what_pages_quote_is_what_the_results_give(name):
    text = (quoted.REPOSITORY / name).read_text()
    results = stored.load(Settings().folder)
    assert text == quoted.renewed(name, results, reproduction.recorded()), (
        f"{name} differs from the stored results: run `python -m experiments.bench report`"
    )


@pytest.mark.parametrize("name", quoted.PAGES)
def test_pages_hold_no_ratio_that_was_written_by_hand(name):
    """A measured ratio, time or share is in a block, or on no page; limits and settings have fewer digits."""
    prose = quoted.BLOCK.sub("", (quoted.REPOSITORY / name).read_text())
    if name == "README.md":
        prose = prose.partition("## Speed")[2].partition("\n## ")[0]
    assert re.findall(r"\d\.\d\d+x|\d\.\d+ m?s\b|\d %", prose) == []


def test_tables_fit_a_page():
    """What is wider scrolls within its page, which hides the numbers at its right."""
    results = stored.load(Settings().folder)
    for text in quoted.speed(results, [], "docs/"), quoted.blocks(results, [], ""):
        assert all(line.count("|") <= 9 for line in text.splitlines())


def test_the_readme_says_first_what_it_gives_and_at_what_loss():
    text = (quoted.REPOSITORY / "README.md").read_text()
    first, speed = (match[0] for match in quoted.BLOCK.finditer(text))
    assert all(f"| `{method}` " in first and "x (" in first for method in quoted.METHODS)
    assert "Loss: nats per byte above dense training" in first and "-lead.png)" in first
    assert text.index("`make demo`") < text.index("`make test`") < text.index(first)
    assert text.index(first) < text.index("Stay dense where") < text.index("## Two commands")
    pays, loss, *_ = speed.partition("-->")[2].strip().split("\n\n")
    assert pays.startswith("Whole training steps, dense time / time, on an NVIDIA")
    assert loss.startswith("At equal steps the loss is not that of dense training") and "`FST` +0." in loss


def test_quoted_numbers_follow_the_results():
    """Slower steps at one width are the ratio of that width, in the sentence and in the table."""
    results = stored.load(Settings().folder)
    for row in quoted.gpus(results)["NVIDIA H200"]["train-step"]["rows"]:
        if (row["method"], row["dtype"], row["d"]) == ("FST", "bfloat16", 2048):
            t = {"median": 8.0, "low": 8.0, "high": 8.0, "rounds": [8.0] * 6, "joules": 4.0}
            row["ms"] = {"dense step": t, "step": t | {"rounds": [16.0] * 6, "joules": 3.0}}
            row["scheme"] = session.SCHEME
    text = quoted.speed(results, [], "docs/")
    wide, _, narrow = text.partition("\n")[0].partition(quoted.NARROW)
    assert re.search(r"`FST` 0\.50x[^;]* at d, f = 2048, 8192 \(2 blocks\)", narrow) and "0.50x" not in wide
    assert "| 0.50x (0.50-0.50), J 0.75 " in text, "time, and energy"
    assert "At equal steps" not in text, "there is no loss without a recorded one"
    assert quoted.first(results, [], "docs/").count("not measured") == 3


def test_the_first_table_is_of_the_gpu_with_most_of_it():
    """Of two GPUs the one with all three methods in more places; of equal ones the one measured last."""
    found = {}
    for kept in ({768, 2048, 4096}, {4096}, set()):
        results = stored.load(Settings().folder)
        h200 = quoted.gpus(results)["NVIDIA H200"]["train-step"]
        h200["rows"] = [row for row in h200["rows"] if row["d"] in kept]
        (found[len(kept)],) = re.findall(r"on an (NVIDIA .*) in bfloat16", quoted.first(results, [], ""))
    assert found == {3: "NVIDIA H200", 1: "NVIDIA H200", 0: "NVIDIA H100 80GB HBM3"}


def test_no_loss_is_missing_at_a_width_that_a_study_has():
    """The step of d = 768 has a loss by the study of larger models, those of wider models have none."""
    results, recorded = stored.load(Settings().folder), reproduction.recorded()
    studies = quoted.studies_at_equal_steps()
    studied = {run.config.model.d for study in studies for run in study.arms["dense"].values()}
    sentence = quoted.without_loss(results, recorded)
    widths = {int(d) for d in re.findall(r"\d+", sentence)}
    assert 768 in studied and sentence == ("At d = 2048 or 4096 losses were measured at equal time.")
    assert not studied & widths and widths <= {2048, 4096}
    assert all(f"(d = {d}, " in quoted.of_studies("") for d in studied)


def test_steps_over_meshes_are_compared_with_one_device_and_with_dense_ones():
    results = stored.load(Settings().folder)
    times = {"median": 4.0, "low": 4.0, "high": 4.0, "rounds": [4.0] * 6}
    twice = times | {"rounds": [8.0] * 6, "median": 8.0}
    for row in quoted.gpus(results)["NVIDIA H100 80GB HBM3"]["mesh"]["rows"]:
        if (row["mesh"], row["method"]) == ("dp 2", "FST"):
            row["ms"] |= {"step": times, "dense step": twice, "one device step": times}
            row["ms"]["slowest device step"] = twice
            row["state_bytes"] = 3_072_000_000
    text = quoted.over_meshes(results, [], "")
    one, two = (rf"\| {ratio}\.00x \(.{{9}}\) +" for ratio in (1, 2))
    assert re.search(rf"\| dp 2 +\| `FST` +{one}{two}{two}.* 3072 +\| \d\.\d\d +\|", text)
    halves = re.findall(r"\| fsdp 2 .*", text)
    assert len(halves) >= 3 and all("| 0.50 " in line for line in halves), "of one device's state"
    assert all(line.count("|") <= 9 for line in text.splitlines())
    for suites in results.values():
        suites.pop("mesh", None)
    assert quoted.over_meshes(results, [], "") == "No steps were measured over several GPUs."
