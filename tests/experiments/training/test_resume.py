"""The run folder: who may write into it, what a run goes on with, and what a full disk leaves."""

import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments import evaluate, files, launch
from experiments.analysis import comparison, runs
from experiments.data import batches as datas
from experiments.errors import UserError
from experiments.training import opening, rundir
from experiments.training.checkpoint import Checkpoints, StopSignal
from experiments.training.loop import train
from experiments.training.metrics import Writer
from experiments.training.step import Program
from experiments.training.stored import load_state
from tests.experiments.conftest import write_corpus

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run that a test may damage."""
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.fixture
def compiles_nothing(monkeypatch):
    def compiled(*_):
        raise AssertionError("something was compiled")

    for name in ("check", "step", "initial_state"):
        monkeypatch.setattr(Program, name, compiled)


def content(out):
    return {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def with_steps(config, steps, **fields):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps), **fields)


def test_ctrl_c_says_what_a_second_one_does(capfd):
    """It was silent until the checkpoint was written, and a second one left a trail of tracebacks."""
    with StopSignal(None) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.at(0) and "a second Ctrl-C ends at once, without saving" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# ---- one process at a time


def test_two_launches_into_one_folder(config, tmp_path, compiles_nothing):
    with (
        rundir.alone(tmp_path / "run"),
        pytest.raises(UserError, match=r"Process \d+ on .* is training into"),
    ):
        train(config, tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


def test_the_second_launch_ends_with_a_sentence(shared, tmp_path, capsys):
    with rundir.alone(tmp_path / "run"), pytest.raises(SystemExit) as stop:
        launch.main([str(shared / "tiny.py"), "--out", str(tmp_path / "run")])
    errors = capsys.readouterr().err
    assert stop.value.code == 2 and errors.count("error: ") == 1 and "--out" in errors


def test_a_lock_ends_with_its_process(tmp_path):
    code = f"""if True:
        import os, pathlib
        from experiments.training import rundir
        with rundir.alone(pathlib.Path({str(tmp_path / "run")!r})):
            os._exit(9)
    """
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert (tmp_path / ".run.lock").exists()
    with rundir.alone(tmp_path / "run"):
        pass
    assert not list(tmp_path.iterdir())


# ---- what a run goes on with


def test_resume_takes_its_config_from_the_folder(copy, capsys):
    shutil.rmtree(copy / "checkpoints" / "12")
    launch.main(["--resume", str(copy), "--progress", "False", "--no-tune"])
    assert [row["event"] for row in rundir.read_metrics(copy) if row["kind"] == "event"] == [
        "start",
        "resume",
    ]
    for arguments, words in [
        (["--resume"], "needs the folder of a run"),
        (["--resume", "--out"], "needs the folder of a run"),
        (["--resume", str(copy.parent / "none")], "There is no folder"),
        (["--resume", str(copy), "--optim.lr", "1"], "optim.lr: 0.001 -> 1.0"),
        (["--resume", str(copy), "--train.steps", "11"], "can only be lengthened"),
    ]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            launch.main(arguments)
        assert stop.value.code == 2 and words in capsys.readouterr().err


def test_a_run_that_goes_on_where_it_was_measures_nothing(copy, shared, capsys, monkeypatch):
    """So that its products stay what they were; on another machine they are measured, as at its start."""
    calls = []
    monkeypatch.setattr(opening, "ensure", lambda *args, **kwargs: calls.append(args))
    again = [str(shared / "tiny.py"), "--out", str(copy), "--resume", "--progress", "False"]
    for machine, measured in (("", False), ("another", True), ("another", False)):
        if machine:
            monkeypatch.setattr(rundir, "place", lambda: {"machine": "another", "gpu": None})
        shutil.rmtree(copy / "checkpoints" / "12")
        launch.main(again)
        assert bool(calls) == measured, machine
        calls.clear()
    config = rundir.open_run(copy)
    assert rundir.goes_on_here(copy, config)
    with monkeypatch.context() as other:
        other.setattr(rundir, "devices", lambda: ["NVIDIA H200"])
        assert not rundir.goes_on_here(copy, config)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not rundir.goes_on_here(copy, config), "dp is -1: as many as there are"


def test_what_delayed_scales_remember_is_resumed(config, tmp_path):
    """In two micro-batches, in layers that are scanned and computed again in the backward pass."""
    method = dataclasses.replace(config.method, fp8="delayed", dense_fraction=0.0)
    model = dataclasses.replace(config.model, scan=True, remat=True)
    run = with_steps(config, 8, method=method, model=model)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, accumulate=2))
    out = train(run, tmp_path / "run", show=False).out
    copy = shutil.copytree(out, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / "8")
    train(run, copy, resume=True, show=False)
    states = [load_state(folder, 8)[3]["sparse"] for folder in (out, copy)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    histories = [v[...] for path, v in nnx.to_flat_state(states[0]) if path[-1] in method.histories]
    assert len(histories) == 4 and all(history.any() for history in histories)


def test_another_text_is_refused(config, tmp_path, compiles_nothing, finished):
    """Also where names and sizes of its files are the same."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    write_corpus(tmp_path / "text")
    (tmp_path / "text" / "text3.txt").write_text("other")
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, corpus=str(tmp_path / "text")))
    files.write(
        copy / "config.json",
        (copy / "config.json").read_text().replace(config.data.corpus, other.data.corpus),
    )
    before = content(copy)
    with pytest.raises(UserError, match=r"text is not that which the run .* has read \(digest: \w+ -> \w+\)"):
        train(other, copy, resume=True, show=False)
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    del rows[0]["corpus"]["digest"]  # a run of an earlier version
    files.write(copy / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"\(bytes: \d+ -> \d+"):
        train(other, copy, resume=True, show=False)
    files.write(copy / "metrics.jsonl", before[copy / "metrics.jsonl"].decode())
    assert content(copy) == before


@pytest.mark.parametrize("left", [None, "", "rows without the first"])
def test_a_run_that_does_not_say_which_text_it_read_is_refused(copy, config, compiles_nothing, left):
    """It went on with whatever text there was, and was then said to have read that one from its start."""
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.unlink()
    if left is not None:
        files.write(path, left and "".join(lines[1:]))
    shutil.move(copy / "checkpoints" / "12", copy / "checkpoints" / "12.orbax-checkpoint-tmp")
    before = content(copy)
    with pytest.raises(
        UserError, match=r"metrics\.jsonl is gone, or has lost .* --train\.start-from .*/checkpoints/\d"
    ):
        train(config, copy, resume=True, show=False)
    assert content(copy) == before


def test_an_evaluation_on_another_text_says_so(copy, config, tmp_path, capsys):
    evaluate.main([str(copy), "--batches", "2"])
    assert "warning" not in capsys.readouterr().err
    write_corpus(tmp_path / "text")
    (tmp_path / "text" / "text3.txt").write_text("other")
    text = (copy / "config.json").read_text()
    files.write(copy / "config.json", text.replace(config.data.corpus, str(tmp_path / "text")))
    evaluate.main([str(copy), "--batches", "2"])
    assert re.search(r"warning: the text is not that .* \(digest: \w+ -> \w+\)", capsys.readouterr().err)


def test_a_damaged_environment_ends_with_a_sentence(copy, capsys):
    shutil.rmtree(copy / "checkpoints" / "12")
    files.write(copy / "environment.json", "")
    with pytest.raises(SystemExit, match="2"):
        launch.main(["--resume", str(copy), "--progress", "False"])
    assert "environment.json is damaged" in capsys.readouterr().err
    (copy / "environment.json").unlink()
    launch.main(["--resume", str(copy), "--progress", "False", "--no-tune"])


@pytest.mark.parametrize("folder", [True, False])
def test_a_folder_without_its_checkpoints_is_refused(copy, config, compiles_nothing, folder):
    shutil.rmtree(copy / "checkpoints")
    if folder:
        (copy / "checkpoints").mkdir()
    before = content(copy)
    with pytest.raises(UserError, match="has made 12 steps, but its checkpoints are gone"):
        train(config, copy, resume=True, show=False)
    assert content(copy) == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(copy, config):
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines]
    files.write(copy / "metrics.jsonl", "".join(lines[:4]) + lines[4][:9])
    assert train(config, copy, resume=True, show=False).finished
    losses = [
        [(r["step"], r["loss"]) for r in rows if r["kind"] == "train"]
        for rows in (whole, rundir.read_metrics(copy))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["tokenizer.json", "environment.json", "config.json"])
def test_a_run_killed_while_its_folder_was_made_starts_again(name, config, tmp_path):
    """With what it has left of a file."""
    with files.replacing(tmp_path / "elsewhere" / name) as partial:
        left = tmp_path / "run" / partial.name
        left.parent.mkdir()
        left.touch()
        (tmp_path / "elsewhere").mkdir()
        partial.touch()
    (tmp_path / "run" / "environment.json").touch()
    rundir.check_new(tmp_path / "run", config, resume=False)
    rundir.create(tmp_path / "run", config, config.data.vocabulary)
    assert {path.name for path in left.parent.iterdir()} == {"config.json", "environment.json"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".hidden-file").touch()
    with pytest.raises(UserError, match="is not an empty folder"):
        rundir.check_new(tmp_path / "other", config, resume=False)


# ---- lengthening


def dense(config, **optim):
    return dataclasses.replace(
        config, method=s24.methods.Dense(), optim=dataclasses.replace(config.optim, **optim)
    )


def test_a_run_is_lengthened_as_if_it_had_been_longer_where_that_is_true(config, tmp_path, capsys):
    """A stable learning rate: stopped before its decay, a run is that of any length."""
    config = dense(config, schedule="wsd", decay_share=0.25)
    whole = train(with_steps(config, 16), tmp_path / "whole", show=False)
    out = train(with_steps(config, 12), tmp_path / "run", show=False).out
    for step in (10, 12):
        shutil.rmtree(out / "checkpoints" / str(step))
    found = train(with_steps(config, 16), out, resume=True, show=True)
    assert "goes on as a run of 16 steps from the start would" in capsys.readouterr().err
    assert found.step == 16 and found.losses == whole.losses
    assert rundir.open_run(out).train.steps == 16 and not runs.read_run(out, "run").gap
    events = [row for row in rundir.read_metrics(out) if row["kind"] == "event"]
    assert events[-1] == {"kind": "event", "step": 5, "event": "lengthened", "from": 12, "to": 16}


def test_a_warm_restart_is_said(config, tmp_path, capsys):
    config = dense(config)
    out = train(with_steps(config, 6), tmp_path / "run", show=False).out
    assert train(with_steps(config, 8), out, resume=True, show=True).step == 8
    said = capsys.readouterr().err
    assert (
        "lengthened from 6 to 8 steps after step 6: train in steps 6 to 7." in said and "warm restart" in said
    )
    assert "0.0001 here" in said


def test_steps_of_another_phase_cannot_be_lengthened(copy, config):
    """The dense end of a run of 12 steps begins at 9; of one of 24, at 18."""
    before = content(copy)
    with pytest.raises(UserError, match=r"from step 9 on .* 'dense', which a run of 24 .*--train.start-from"):
        train(with_steps(config, 24), copy, resume=True, show=False)
    assert content(copy) == before


# ---- metrics


def test_damaged_metrics(copy, capsys):
    path = copy / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text + text.split("\n")[1][:20])
    assert runs.read_run(copy, "run").gap == ""
    assert f"The last line of {path} is cut short and was left out." in capsys.readouterr().err
    path.write_text(text.replace('"kind": "monitor"', '"kind: "monitor"', 1))
    with pytest.raises(UserError, match=r"metrics.jsonl, line \d+, is damaged"):
        runs.read_run(copy, "run")


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (lambda row: row["kind"] == "train" and row["step"] in (4, 5), "rows of 2 of 12 steps .* step 4"),
        (lambda row: row["kind"] == "eval" and row["step"] == 12, "the evaluation at its end is missing"),
    ],
)
def test_a_run_with_gaps_is_called_so(copy, tmp_path, without, words):
    rows = [row for row in rundir.read_metrics(copy) if not without(row)]
    files.write(copy / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    text = comparison.write_report([copy], tmp_path / "report")
    assert re.search(f"copy is not a whole run: {words}", text)


def test_rows_written_twice(config, finished):
    rows = rundir.read_metrics(finished)
    assert rundir.gap(config, rows) == ""
    assert rundir.gap(config, rows + [row for row in rows if row["step"] == 3]) == "1 steps have several rows"


# ---- full and read-only disks


def test_the_threads_that_write_checkpoints_print_no_tracebacks(tmp_path, caplog):
    absl = logging.getLogger("absl")
    with Checkpoints(tmp_path), pytest.raises(ZeroDivisionError):
        try:
            _ = 1 / 0
        except ZeroDivisionError:
            absl.exception("a thread failed")
            absl.error("a word of its own")
            raise
    assert [record.message for record in caplog.records if record.name == "absl"] == ["a word of its own"]
    assert not absl.filters


def test_a_full_disk_under_the_metrics(config, tmp_path):
    """/dev/full refuses every byte."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with Writer(tmp_path) as writer, pytest.raises(UserError) as error:
        writer.write("train", 3, {"loss": 1.0})
    assert "could not be written at step 3: No space left on device" in str(error.value)
    assert f"--resume {tmp_path}" in str(error.value)


def test_a_full_disk_under_the_checkpoints(config, copy, monkeypatch):
    """What was written before is kept, and the run goes on from it once there is space."""
    shutil.rmtree(copy / "checkpoints" / "12")
    kept = content(copy / "checkpoints")

    def full(self, step, **_):
        raise ValueError("RESOURCE_EXHAUSTED: write: No space left on device [os_error_code='28']")

    with monkeypatch.context() as m:
        import orbax.checkpoint as ocp

        m.setattr(ocp.CheckpointManager, "save", full)
        with pytest.raises(UserError, match=rf"the disk is full\. .* are kept; .*--resume {copy}"):
            train(config, copy, resume=True, show=False)
    assert content(copy / "checkpoints") == kept
    assert train(config, copy, resume=True, show=False).finished


def test_a_read_only_place(shared, tmp_path, capsys, monkeypatch, compiles_nothing):
    opened = rundir.Path.open

    def refused(path, *args, **options):
        if tmp_path not in path.parents:  # Python reads files of its own
            return opened(path, *args, **options)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(rundir.Path, "open", refused)
    with pytest.raises(SystemExit) as stop:
        launch.main([str(shared / "tiny.py"), "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert f"error: Read-only file system: {tmp_path / '.run.lock'}" in capsys.readouterr().err


def test_damaged_statistics_are_made_again(config):
    corpus = datas.open_corpus(config.data)
    path = config.data.records().folder / "statistics.json"
    whole = path.read_text()
    path.write_text(whole[:30])
    assert datas.open_corpus(config.data).statistics == corpus.statistics
    assert path.read_text() == whole
    assert corpus.statistics["files"] == 8 and corpus.statistics["validation_bytes"] > 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("corpus", "/nowhere", "not a folder"), ("batch", 5000, "less than one batch")],
)
def test_errors_of_text_and_batch_come_before_compiling(
    config, tmp_path, compiles_nothing, field, value, words
):
    data = dataclasses.replace(config.data, **{field: value})
    with pytest.raises(UserError, match=words):
        train(dataclasses.replace(config, data=data), tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()
