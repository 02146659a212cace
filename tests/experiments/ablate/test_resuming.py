"""What is trained again, and what is kept: more seeds, kills, signals, processes that fail."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments import ablate
from experiments.ablations import ablation as ablations
from experiments.ablations import runs
from experiments.cli import STOPPED
from experiments.config import REPOSITORY
from experiments.errors import UserError
from experiments.training import rundir
from experiments.training.loop import Result
from tests.experiments.ablate.conftest import STEPS, forget, run, stable, write_claim

pytestmark = pytest.mark.slow


def test_done_runs_are_kept(done, tmp_path, capsys):
    """Resuming a complete ablation trains nothing, and one more seed trains only that."""
    path, out = done
    copy = shutil.copytree(out, tmp_path / "copy")
    before = (copy / "ste/seed0/metrics.jsonl").read_bytes()
    forget(copy / "ste/seed1")
    status, printed = run(capsys, f"{path}:smoke", "--out", copy, "--resume")
    assert status == 0
    assert "1/1 ste/1: finished" in printed and "dense/0" not in printed
    assert (copy / "ste/seed0/metrics.jsonl").read_bytes() == before
    assert stable(copy) == stable(out)


@pytest.mark.parametrize("how", [["--resume"], ["--only", "dense/0"]])
def test_a_run_that_ended_without_its_record_gets_one(how, done, tmp_path, capsys):
    """As after a signal while it continued its prompts: pages were written without the run, which was said to
    be done."""
    path, out = done
    copy = shutil.copytree(out, tmp_path / "copy")
    rows = copy / "dense/seed0/metrics.jsonl"
    whole = rows.read_text()
    before = [line for line in whole.splitlines(True) if '"sample"' not in line]
    assert len(before) == len(whole.splitlines()) - 1
    rows.write_text("".join(before))
    record = copy / "dense/seed0.json"
    record.unlink()
    status, _ = run(capsys, f"{path}:smoke", "--out", copy, *how)
    assert status == 0 and rows.read_text() == whole
    assert json.loads(record.read_text()) == json.loads((out / "dense/seed0.json").read_text())


def test_more_seeds_extend_a_result(done, tmp_path, capsys, monkeypatch):
    path, out = done
    copy, asked = shutil.copytree(out, tmp_path / "copy"), []

    def in_turn(jobs, **_):
        asked.extend(job.label for job in jobs if not job.done)
        return False

    monkeypatch.setattr(runs, "run_in_turn", in_turn)
    status, printed = run(capsys, f"{path}:smoke", "--out", copy, "--more-seeds", 3)
    assert asked == ["dense/2", "ste/2", "replicate/2"] and "what was trained is kept" in printed
    for arguments, words in (
        (["--out", tmp_path / "empty", "--more-seeds", 3], "no result in"),
        (["--out", copy, "--more-seeds", 3, "--seeds", "0"], "not both"),
    ):
        status, printed = run(capsys, f"{path}:smoke", *arguments)
        assert status == 2 and words in printed


def test_at_the_end_of_its_time_it_reports_the_seeds_that_are_complete(done, tmp_path, capsys, monkeypatch):
    path, out = done
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / "report.md").unlink()
    arguments = (f"{path}:smoke", "--out", copy, "--resume", "--seeds", "0,1,2,3", "--minutes")
    status, printed = run(capsys, *arguments, "1e-9")
    assert status == 0 and "2 of 4 seeds, no report" in printed and "Continue with" in printed
    monkeypatch.setattr(ablate, "ROUND", 2)
    status, printed = run(capsys, *arguments, "1e-9")
    assert status == 0 and "2 of 4 seeds are complete" in printed
    assert json.loads((copy / "result.json").read_text())["seeds"] == [0, 1]
    assert (copy / "report.md").exists() and not (copy / "dense/seed2").exists()
    for words, message in ((["--minutes", "0"], "must be positive"), (["--until", "25:99"], "22:30")):
        status, printed = run(capsys, f"{path}:smoke", "--out", tmp_path / "x", *words)
        assert status == 2 and message in printed


def test_killed_in_the_middle_and_resumed(done, tmp_path):
    """SIGKILL in the second run, twice, between checkpoints: it ends at the result of one in a go."""
    path, whole = done
    out = tmp_path / "killed"
    for part in ("compiled", "replicate/seed0"):
        shutil.copytree(whole / part, out / part)
    arguments = [f"{path}:smoke", "--seeds", "0", "--out", str(out), "--resume"]
    command = [sys.executable, "-m", "experiments.ablate", *arguments]
    for checkpoint in ("50", "100"):
        process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        try:
            deadline = time.time() + 200
            while time.time() < deadline and not (out / "ste/seed0/checkpoints" / checkpoint).exists():
                assert process.poll() is None
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            assert process.wait(timeout=60) == -signal.SIGKILL
        finally:
            process.kill()
    first, half, _ = runs.jobs_of(ablations.load(f"{path}:smoke").ablation, (0,), out)
    assert first.finished and not half.finished
    kept = (first.out / "metrics.jsonl").read_bytes()
    assert ablate.main(arguments) == 0
    assert (first.out / "metrics.jsonl").read_bytes() == kept
    events = [row["event"] for row in half.rows if row["kind"] == "event"]
    assert events == ["start", "first batch", "resume", "resume"]
    resumed, one_go = stable(out)["metrics"], stable(whole)["metrics"]
    assert all(resumed[arm]["0"] == one_go[arm]["0"] for arm in ("dense", "ste"))
    for arm in ("dense", "ste"):
        one, other = (
            [row["loss"] for row in rundir.read_metrics(folder / arm / "seed0") if row["kind"] == "train"]
            for folder in (out, whole)
        )
        assert one == other and len(one) == STEPS


def test_a_signal_after_the_last_step_of_a_run_stops_the_others(done, tmp_path, monkeypatch):
    started = []

    def train(config, out, **_):
        started.append(config.name)
        return Result(out, config.train.steps, True, {}, stopped=True)

    monkeypatch.setattr(runs, "train", train)
    jobs = runs.jobs_of(ablations.load(f"{done[0]}:smoke").ablation, (0, 1), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runs.run_in_turn(jobs)
    assert started == ["dense-seed0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_has_its_own_status(done, tmp_path, capsys, monkeypatch, request, number):
    """Between runs, while one compiles, and in the children of --jobs: what was trained is kept."""
    before = signal.getsignal(signal.SIGTERM)
    # A shell ignores SIGINT in what it starts in the background.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ignored))
    monkeypatch.setattr(runs, "train", lambda config, out, **_: os.kill(os.getpid(), number))
    arguments = (f"{done[0]}:smoke", "--out", tmp_path / "out")
    status, printed = run(capsys, *arguments)
    assert status == STOPPED == 75
    assert f"Continue with: python -m experiments.ablate {done[0]}:smoke --out" in printed
    assert printed.rstrip().endswith("--resume")
    assert run(capsys, *arguments, "--only", "dense/0")[0] == STOPPED
    assert signal.getsignal(signal.SIGTERM) is before
    assert "75 when a signal" in " ".join(run(capsys, "--help")[1].split())


def test_a_signal_to_several_at_a_time(done, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs, "slots", lambda count, each: [runs.Slot({})] * count)
    monkeypatch.setattr(
        runs, "_begin", lambda job, *_: subprocess.Popen(["sleep", "99"], stdout=subprocess.DEVNULL)
    )
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    status, printed = run(capsys, f"{done[0]}:smoke", "--out", tmp_path / "out", "--jobs", 2)
    assert status == STOPPED and "Continue with" in printed


def test_an_arm_that_diverges(done, shared, tmp_path, capsys):
    """The others, here taken from another ablation that has them, still give their result."""
    path = write_claim(shared, tmp_path / "paper", wild=True)
    arguments = (f"{path}:smoke", "--out", tmp_path / "out", "--reuse", done[1])
    status, printed = run(capsys, *arguments)
    assert status == 0
    assert "Reused, with the same config" in printed and "1/2 wild/0" in printed and "/4" not in printed
    assert "replicate/1" in printed.split("Reused")[1]
    assert "wild/0 diverged" in printed and "The loss became nan" in printed
    found = json.loads((tmp_path / "out/result.json").read_text())
    assert found["diverged"] == ["wild/0", "wild/1"]
    assert set(found["metrics"]["wild"]["0"].values()) == {None}
    assert found["metrics"]["ste"] == json.loads((done[1] / "result.json").read_text())["metrics"]["ste"]
    assert found["findings"][2]["verdict"] == "no verdict"
    assert found["findings"][2]["note"] == "no kept_share: wild of seed 0, wild of seed 1"
    assert "Diverged, and stopped there: wild/0, wild/1." in (tmp_path / "out/report.md").read_text()
    before = (tmp_path / "out/wild/seed0/metrics.jsonl").read_bytes()
    assert run(capsys, *arguments, "--resume")[0] == 0
    assert (tmp_path / "out/wild/seed0/metrics.jsonl").read_bytes() == before


def test_a_process_that_fails(done, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs, "slots", lambda count, each: [runs.Slot({})] * count)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    status, printed = run(capsys, f"{done[0]}:smoke", "--out", tmp_path / "out", "--jobs", 2, "--seeds", 0)
    assert status == 1
    assert "failed or were stopped: dense/0, ste/0, replicate/0" in printed and "seed0.log" in printed
    assert "dense/0  failed" in printed
    assert "--resume" in printed
    assert not (tmp_path / "out/result.json").exists()


def test_children_end_with_their_parent(done, tmp_path):
    """SIGTERM, which would otherwise end this process at once and leave them."""
    jobs = runs.jobs_of(ablations.load(f"{done[0]}:smoke").ablation, (0,), tmp_path / "out")
    note = "import os, pathlib, sys, time; file = pathlib.Path(sys.argv[-1].replace('/', '-'));"
    note += "file.write_text(str(os.getpid())); time.sleep(99)"
    command = ["env", "--chdir", str(tmp_path), sys.executable, "-c", note]
    files = [tmp_path / "dense-0", tmp_path / "ste-0"]

    def terminate():
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), runs.interruptible():
        runs.run_in_parallel(jobs, lambda job: command, [runs.Slot({})] * 2)
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_arms_that_begin_otherwise_are_stopped(done, tmp_path):
    """By what each wrote down before its first step."""
    jobs = runs.jobs_of(ablations.load(f"{done[0]}:smoke").ablation, (0, 1), done[1])
    (dense, ste, replicate), others = jobs[:3], jobs[3:]
    first = [[row["first"] for row in job.rows if "first" in row] for job in (dense, ste, replicate)]
    assert [len(found) for found in first] == [1, 1, 1] and len({found[0]["batch"] for found in first}) == 1
    mine = first[1][0]
    assert mine["dense_loss"] == pytest.approx(first[0][0]["dense_loss"], rel=1e-5)
    runs.check_alike(ste, mine, jobs)
    off = mine | {"dense_loss": mine["dense_loss"] * (1 + 3e-5)}
    values = f"{off['dense_loss']:.6f} nats and that of dense/0 {first[0][0]['dense_loss']:.6f}"
    with pytest.raises(UserError, match=values):
        runs.check_alike(ste, off, jobs)
    runs.check_alike(ste, off, others)  # of another seed
    runs.check_alike(ste, off | {"parameters": mine["parameters"] + 8}, jobs)  # with adapters
    wide = dataclasses.replace(ste.config, model=dataclasses.replace(ste.config.model, f=32))
    runs.check_alike(dataclasses.replace(ste, config=wide), off, jobs)
    with pytest.raises(
        UserError, match=rf"its first batch of tokens \(0\) is not that of dense/0 \({mine['batch']}"
    ):
        runs.check_alike(dataclasses.replace(ste, config=wide), off | {"batch": "0"}, jobs)
