"""The demo's numbers in the README come from a stored result; what the demo measures, and records."""

import copy
import dataclasses
import json
import re
import shutil

import pytest

from experiments import config as configs
from experiments import demo, files
from experiments.benchmarks import demo_page
from experiments.config import REPOSITORY
from experiments.training import opening
from experiments.training.loop import Result


def readme_block():
    text = (REPOSITORY / "README.md").read_text()
    (found,) = demo_page.BLOCK.finditer(text)
    return found.group(), found.group(1)


def test_the_readme_says_what_the_stored_result_says():
    block, file = readme_block()
    result = json.loads((REPOSITORY / demo_page.FOLDER / file).read_text())
    assert block == demo_page.block(file, result), "run `python -m experiments.demo --record`"
    for arm in demo.ARMS:
        assert configs.from_dict(result["arms"][arm]["config"]) == configs.load(f"configs/demo.py:{arm}")
        assert not result["arms"][arm]["gap"]


def test_a_leaking_mask_is_no_language_model_loss():
    block, _ = readme_block()
    (venom,) = [line for line in block.splitlines() if line.startswith("| Venom")]
    assert "no language-model loss" in venom and "no language-model loss" not in block.replace(venom, "")


@pytest.fixture
def quick(monkeypatch, finished, tmp_path):
    """The demo without training and timing: its arms are copies of one run; what `ensure` is asked for."""
    config = configs.read(finished / "config.json")
    _, file = readme_block()
    stored = json.loads((REPOSITORY / demo_page.FOLDER / file).read_text())
    calls = []

    def train(config, out, **_):
        shutil.copytree(finished, out)
        return Result(out, 12, True, {})

    def load(spec):
        method = configs_load(spec).method
        if hasattr(method, "dense_warmup"):  # of a run of twelve steps
            method = dataclasses.replace(method, dense_warmup=3)
        if hasattr(method, "v"):  # of 32 neurons
            method = dataclasses.replace(method, v=32)
        return dataclasses.replace(config, method=method)

    configs_load = configs.load
    monkeypatch.setattr(configs, "load", load)
    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "share_compilations", lambda out: None)
    monkeypatch.setattr(demo.train_step, "compare", lambda arms, **_: copy.deepcopy(stored["speed"]))
    monkeypatch.setattr(demo.sampling, "sample_run", lambda *_, **__: "text")
    monkeypatch.setattr(opening, "ensure", lambda *args, **_: calls.append(args))
    monkeypatch.setattr(demo, "REPOSITORY", tmp_path / "repository")
    readme = tmp_path / "repository" / "README.md"
    (tmp_path / "repository" / "docs" / "images").mkdir(parents=True)
    files.write(readme, (REPOSITORY / "README.md").read_text())
    return calls, readme


@pytest.mark.slow
def test_the_demo_measures_its_own_shape_first_and_records(quick, tmp_path, capsys):
    calls, readme = quick
    demo.main(["--out", str(tmp_path / "demo"), "--record"])
    assert [(shapes, dtypes) for shapes, dtypes, _ in calls] == [([(4 * 32, 16, 32)], ["float32"])] * 3
    result = json.loads((tmp_path / "demo" / "demo.json").read_text())
    (stored,) = (tmp_path / "repository" / "docs" / "demo").iterdir()
    assert json.loads(stored.read_text()) == result
    text = readme.read_text()
    assert demo_page.block(stored.name, result) in text
    before = (REPOSITORY / "README.md").read_text()
    assert demo_page.BLOCK.sub("", text) == demo_page.BLOCK.sub("", before)
    assert re.search(r"docs/images/demo-loss.png", capsys.readouterr().out)


def test_a_result_of_a_busy_machine_is_called_so():
    _, file = readme_block()
    result = json.loads((REPOSITORY / demo_page.FOLDER / file).read_text())
    cores = result["hardware"]["cores"]
    quiet, busy = (demo_page.block(file, result | {"load_before": load}) for load in (cores, 9.0 * cores))
    assert "Other programs ran" in busy and "Other programs ran" not in quiet


@pytest.mark.slow
def test_neither_measures_nor_records_unless_asked(quick, tmp_path):
    calls, readme = quick
    before = readme.read_text()
    demo.main(["--out", str(tmp_path / "demo"), "--no-tune"])
    assert not calls and readme.read_text() == before
    assert not (tmp_path / "repository" / "docs" / "demo").exists()
