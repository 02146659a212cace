"""The launcher's words: help, typing mistakes, folders. Nothing here trains."""

import pytest

from experiments import launch
from tests.experiments.conftest import python


def run(capsys, *arguments):
    """(status, everything printed) of the launcher, in this process."""
    try:
        launch.main([str(argument) for argument in arguments])
        status = 0
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    return status, " ".join((printed.out + printed.err).replace("│", " ").split())


def test_help_lists_the_configs(capsys):
    status, text = run(capsys, "--help")
    assert status == 0
    for part in ("CONFIG", "configs/fst/masked_decay.py", "configs/demo.py:fst", "--resume"):
        assert part in text
    assert run(capsys) == (0, text)


def test_help_of_a_config_lists_its_fields(capsys):
    status, text = run(capsys, "configs/demo.py:fst", "--help")
    assert status == 0
    for part in ("--optim.lr", "(default: 0.003)", "--method.decay", "--out", "peak learning rate"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--optim.lrr", "1"], ["--optim.lrr", "--optim.lr FLOAT"]),
        (["--method.decya", "1"], ["--method.decya", "--method.decay FLOAT"]),
        (["--optim.schedule", "cosin"], ["'cosin'", "'cosine', 'wsd'"]),
        (["--optim.lr", "fast"], ["--optim.lr", "'fast'"]),
        (["--method.mvue", "exat"], ["mvue", "exat", "exact"]),
        (["--model.heads", "3"], ["heads=3", "multiple of 2"]),
        (["--train.accumulate", "5"], ["accumulate=5"]),
        (["--process", "1"], ["--coordinator, --processes and --process belong together"]),
    ],
)
def test_mistakes_name_the_right_thing(capsys, tmp_path, arguments, parts):
    status, text = run(capsys, "configs/demo.py:fst", *arguments, "--out", tmp_path / "run")
    assert status == 2
    assert all(part in text for part in parts), text
    assert not (tmp_path / "run").exists()


def test_config_first(capsys):
    status, text = run(capsys, "--optim.lr", "1")
    assert status == 2
    assert "first argument must be a CONFIG" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model.f", "30"], ["cannot be built", "30", "multiple of 4", "28 or 32"]),
        (["--data.seq", "15", "--data.batch", "3"], ["cannot be built", "45", "multiple of 4"]),
        (["--data.corpus", "/nowhere"], ["/nowhere", "not a folder"]),
        (["--data.seq", "10000"], ["validation split", "less than one batch"]),
    ],
)
def test_what_cannot_run_leaves_no_folder(capsys, shared, tmp_path, arguments, parts):
    status, text = run(capsys, shared / "tiny.py", *arguments, "--out", tmp_path / "run")
    assert status == 2
    assert all(part in text for part in parts), text
    assert not (tmp_path / "run").exists()


def test_folders(capsys, shared, finished, tmp_path):
    tiny = shared / "tiny.py"
    before = sorted(str(path) for path in finished.rglob("*"))
    status, text = run(capsys, tiny, "--out", finished)
    assert status == 2
    assert "--resume" in text and "--out" in text
    status, text = run(capsys, tiny, "--out", finished, "--resume", "--optim.lr", "1", "--method.decay", "0")
    assert status == 2
    assert "optim.lr: 0.001 -> 1.0" in text and "method.decay: 0.001 -> 0.0" in text
    status, text = run(capsys, tiny, "--out", tmp_path / "new", "--resume")
    assert status == 2
    assert "no run to resume" in text
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    status, text = run(capsys, tiny, "--out", tmp_path / "other")
    assert status == 2
    assert "not an empty folder" in text
    assert sorted(str(path) for path in finished.rglob("*")) == before


def test_as_a_module():
    result = python("experiments.launch", "configs/demo.py:fst", "--optim.lrr", "1")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "--optim.lr" in result.stderr
