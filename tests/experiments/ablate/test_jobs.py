"""Which runs there are, in which order, and where each runs: processes, cores and GPUs."""

import dataclasses
import datetime
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter

import pytest

from experiments import ablate
from experiments import config as configs
from experiments.ablations import ablation as ablations
from experiments.ablations import runs
from experiments.errors import UserError
from experiments.training import rundir
from tests.experiments.ablate.conftest import STEPS, run, stable, write_claim

pytestmark = pytest.mark.slow


def test_until_is_the_next_such_time():
    for minutes, expected in ((5, 300), (-5, 24 * 3600 - 300)):
        at = datetime.datetime.now() + datetime.timedelta(minutes=minutes)
        args = ablate.parser().parse_args(["x", "--until", at.strftime("%H:%M")])
        assert abs(ablate.deadline(args) - time.time() - expected) <= 61


def test_the_first_seeds_of_all_come_before_more_of_any(done, shared, tmp_path, capsys, monkeypatch):
    path = write_claim(shared, tmp_path / "paper")
    other = path.with_name("other.py")
    other.write_text(path.read_text().replace("above=0.1", "above=0.2").replace("d=8", "d=16"))
    seen = []
    monkeypatch.setattr(runs, "run_in_turn", lambda jobs, **_: seen.extend(jobs))
    run(capsys, f"{path}:smoke", f"{other}:smoke", "--out", tmp_path / "out", "--seeds", "0,1,2,3")
    assert [job.seed for job in seen] == [0] * 3 + [1] * 3 + [2] * 3 + [0] * 3 + [1] * 3 + [2] * 3 + [3] * 6


def test_array_prints_a_command_for_each_run(capsys, tmp_path):
    out = tmp_path / "runs"
    status, text = run(capsys, "configs/ast/retraining.py:smoke", "--out", out, "--seeds", "0,1", "--array")
    commands = [line for line in text.splitlines() if line.startswith("python -m experiments.ablate /")]
    assert status == 0 and not out.exists() and len(commands) == 2 * 5
    options = [ablate.parser().parse_intermixed_args(shlex.split(line)[3:]) for line in commands]
    assert options[0].only == "dense/0" and {o.only for o in options} >= {"ste + decay/0", "replicate/1"}
    assert all((o.out, o.seeds) == (out, "0,1") for o in options)
    assert "start from the runs of dense, which must have ended before" in text
    assert f"this reports: python -m experiments.ablate configs/ast/retraining.py:smoke --out {out}" in text


def test_array_of_some_runs_at_any_speed(capsys, tmp_path):
    """Of the runs that are named alone; their least speed is gone in every process."""
    argv = ["configs/evidence/methods.py:124m", "--out", tmp_path / "o", "--only", "FST/0,dense/2"]
    status, text = run(capsys, *argv, "--array", "--any-speed")
    lines = [line for line in text.splitlines() if line.startswith("python -m experiments.ablate /")]
    assert status == 0 and [line.split()[-1] for line in lines] == ["FST/0", "dense/2"]
    assert all(" --any-speed " in line for line in lines)
    args = ablate.parser().parse_intermixed_args([*map(str, argv), "--any-speed"])
    (claim,) = ablate.claims_of(args)
    assert {job.config.train.least_speed for job in claim.jobs} == {0}
    (claim,) = ablate.claims_of(ablate.parser().parse_intermixed_args(list(map(str, argv))))
    assert {job.config.train.least_speed for job in claim.jobs} == {350_000}
    status, text = run(capsys, *argv[:3], "--only", "FST/9", "--array")
    assert status == 2 and "There is no run 'FST/9'" in text


def test_two_at_a_time(done, tmp_path, capsys):
    """Two processes get the same result as one; whatever was not started yet shares their programs."""
    path, out = done
    for part in ("compiled", "replicate/seed0"):
        shutil.copytree(out / part, tmp_path / "out" / part)
    status, printed = run(
        capsys, f"{path}:smoke", "--out", tmp_path / "out", "--jobs", 2, "--seeds", 0, "--resume"
    )
    assert status == 0, printed
    assert "dense/0  running" in printed and f"ste/0  finished  {STEPS}/{STEPS}" in printed
    one, two = stable(out), stable(tmp_path / "out")
    for arm in ("dense", "ste"):
        assert two["metrics"][arm]["0"] == one["metrics"][arm]["0"]
    assert two["verdict"] == "inconclusive"  # one seed
    assert (tmp_path / "out/ste/seed0.log").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_several_ablations_have_runs_in_common(done, shared, tmp_path, capsys, monkeypatch, count):
    """Those of a folder; what two of them train alike is trained once, and each gets its report."""
    path = write_claim(shared, tmp_path / "paper")
    shutil.copy(path, path.with_name("other.py"))
    shutil.copytree(done[1], tmp_path / "out/paper/other_smoke")
    monkeypatch.setattr(runs, "slots", lambda count, each: [runs.Slot({})] * count)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # nothing is trained
    arguments = (f"{tmp_path / 'paper'}:smoke", "--out", tmp_path / "out", "--jobs", count, "--resume")
    status, printed = run(capsys, *arguments)
    assert status == 0, printed
    assert "tiny_claim ste/1" in printed
    one, other = (tmp_path / "out/paper" / f"{name}_smoke" for name in ("other", "tiny_claim"))
    assert stable(one) == stable(other)
    assert "# paper: tiny_claim, smoke" in (other / "report.md").read_text()
    assert configs.read(other / "ste/seed1/config.json") == configs.read(one / "ste/seed1/config.json")


def test_runs_have_cores_of_their_own(tmp_path, done, monkeypatch):
    """If asked for; a child runs on no others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    assert [slot.cores for slot in runs.slots(2, 2)] == [(0, 1), (2, 3)]
    assert [slot.cores for slot in runs.slots(2)] == [(), ()]
    with pytest.raises(UserError, match="--jobs 3 with --cores 2 is more than the 5 cores"):
        runs.slots(3, 2)
    monkeypatch.undo()
    (job, *_) = runs.jobs_of(ablations.load(f"{done[0]}:smoke").ablation, (0,), tmp_path / "out")
    note = "import os, pathlib; pathlib.Path('cores').write_text(str(sorted(os.sched_getaffinity(0))))"
    command = ["env", "--chdir", str(tmp_path), sys.executable, "-c", note]
    core = max(os.sched_getaffinity(0))
    runs.run_in_parallel([job], lambda job: command, [runs.Slot({}, (core,))])
    assert (tmp_path / "cores").read_text() == f"[{core}]"


def test_runs_share_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runs.shares(2, 2) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    three = runs.shares(3, 2)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in three] == ["4", "7", "4"]
    assert {share["XLA_PYTHON_CLIENT_PREALLOCATE"] for share in three} == {"false"}


@pytest.mark.parametrize(("arms", "gpus"), [(6, 4), (4, 4), (6, 8), (8, 8), (6, 2), (5, 2), (6, 1)])
def test_arms_rotate_over_gpus(tmp_path, arms, gpus):
    """No arm has one GPU for all seeds, where there are several, and no GPU gets more runs than it must."""
    job = runs.Job("", 0, configs.Config(), tmp_path)
    places = [
        [runs.gpu_of(dataclasses.replace(job, turn=(arm, seed, arms)), gpus) for seed in range(4)]
        for arm in range(arms)
    ]
    assert gpus == 1 or all(len(set(own)) > 1 for own in places)
    counts = Counter(place for own in places for place in own)
    assert max(counts.values()) <= -(-4 * arms // gpus) + 1 and set(counts) == set(range(gpus))


@pytest.mark.parametrize(("count", "places"), [(0, [0, 1, 2]), (2, [0, 1]), (5, [0, 1, 2, 0, 1])])
def test_slots_are_dealt_over_gpus(monkeypatch, count, places):
    """Those of GPUs that no slot is on get no runs."""
    asked = subprocess.CompletedProcess([], 0, '["gpu", 3]', "")
    monkeypatch.setattr(runs.subprocess, "run", lambda *_, **__: asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    slots = runs.slots(count)
    assert [slot.gpu for slot in slots] == places
    assert {slot.gpus for slot in slots} == {len(set(places))}


def test_a_run_waits_for_its_own_gpu(tmp_path, monkeypatch):
    """Although another one is free."""
    jobs = runs.jobs_of(ablations.load("configs/fst/mask_kind.py:smoke").ablation, (0, 1), tmp_path)
    slots, begun = [runs.Slot({"gpu": gpu}, gpu=gpu, gpus=2) for gpu in (0, 1)], []

    def begin(job, command, slot):
        begun.append((job.turn, slot.environment["gpu"]))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(runs, "_begin", begin)
    monkeypatch.setattr(runs.time, "sleep", lambda _: None)
    assert len(runs.run_in_parallel(jobs, lambda job: [], slots)) == len(jobs)
    arms = jobs[0].turn[2]
    assert sorted(begun) == sorted((job.turn, runs.gpu_of(job, 2)) for job in jobs)
    assert {gpu for (arm, _, _), gpu in begun if arm == 0} == {0, 1} and len(begun) == 2 * arms


def test_a_run_stays_on_its_machine(done, monkeypatch):
    (job, *_) = runs.jobs_of(ablations.load(f"{done[0]}:smoke").ablation, (0,), done[1])
    runs.check_place(job)
    monkeypatch.setattr(rundir.platform, "node", lambda: "another")
    with pytest.raises(UserError, match="was begun on another machine"):
        runs.check_place(job)


def test_seeds_of_an_arm_wait_for_its_programs(tmp_path, monkeypatch):
    """While there is anything else to do, and on no longer than the first of them."""
    jobs = runs.jobs_of(ablations.load("configs/fst/mask_kind.py:smoke").ablation, (0, 1, 2), tmp_path)
    arms, begun, sleeps = jobs[0].turn[2], [], iter(range(100))

    class Child:
        def __init__(self, job):
            self.job = job

        def poll(self):  # the first arm lasts longest
            return 0 if self.job.turn[0] or turn > 1 else None

    def begin(job, command, slot):
        begun.append((turn, job.turn[:2]))
        return Child(job)

    def sleep(_):
        nonlocal turn
        turn = next(sleeps)

    turn = -1
    monkeypatch.setattr(runs, "_begin", begin)
    monkeypatch.setattr(runs.time, "sleep", sleep)
    runs.run_in_parallel(jobs, lambda job: [], [runs.Slot({})] * (arms + 1))
    assert [arm for _, (arm, seed) in begun if seed == 0] == list(range(arms))
    assert begun[arms] == (-1, (0, 1))  # nothing else was there to do
    ends = next(at for at, (arm, seed) in begun if (arm, seed) == (1, 1))
    assert ends == 0 and len(begun) == len(jobs)
