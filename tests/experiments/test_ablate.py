"""The command: files, resuming after a kill, divergence, several processes, the list and the page."""

import csv
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments import ablate, study
from experiments import config as configs
from experiments.ablations import ablation as ablations
from experiments.ablations import evidence, reproduction, result, runs, text
from experiments.ablations.leaks import leaking
from experiments.analysis.outcome import METRICS
from experiments.cli import STOPPED
from experiments.config import REPOSITORY
from experiments.errors import UserError
from experiments.training import rundir
from experiments.training.loop import Result
from tests.experiments.conftest import python

pytestmark = pytest.mark.slow

STEPS = 150  # enough that a run can be killed between its checkpoints, 50 steps apart
CLAIM = '''
"""A claim for tests: its first line."""

import dataclasses

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation
from experiments.models import decoder
from experiments.data import text
from experiments.config import Optim, Train
from experiments.ablations.verdicts import all_of, between, less


def ablation(size):
    base = dataclasses.replace(
        size.base,
        model=decoder.Config(layers=1, d=8, f=16, heads=1),
        data=text.Config(corpus={corpus!r}, root={root!r}, seq=16, batch=4),
        train=Train(steps={steps}, eval_every=0, eval_batches=1, monitor_every=5, probe_every=0,
                    checkpoint_every=50, keep=1),
    )
    size = dataclasses.replace(size, base=base)
    dense = size.arm(s24.methods.Dense(), monitor_mask="top-2")
    arms = {{"dense": dense, "ste": size.arm(s24.methods.STE())}}
    if {wild}:
        hot = Optim(lr=1e30, clip=1e30, weight_decay=0.0, warmup=0)
        arms = {{"wild": dataclasses.replace(dense, optim=hot)}} | arms
    return Ablation(
        claim="STE ends at a higher loss.", source="arXiv 0000.00000",
        expects="Nothing.", differs="All.", found={{"smoke": "Something."}},
        arms=arms, seeds=(0, 1),
        verdict=all_of(less("dense", "ste"), between("ste", "kept_share", above=0.1, below=2), {more}),
    )
'''


def write_claim(shared, folder, steps=STEPS, wild=False):
    """A claim file over the small corpus."""
    folder.mkdir(exist_ok=True)
    more = 'between("wild", "kept_share", above=0)' if wild else ""
    places = {"corpus": str(shared / "corpus"), "root": str(shared / "data")}
    path = folder / "tiny_claim.py"
    path.write_text(CLAIM.format(**places, steps=steps, wild=wild, more=more))
    return path


@pytest.fixture(scope="module", autouse=True)
def own_compilation_cache():
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()  # its folder would stay that of its first use
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def done(shared, tmp_path_factory):
    """(claim file, folder, stdout) of a complete ablation with two arms and two seeds. Read only."""
    folder = tmp_path_factory.mktemp("paper")
    path, out = write_claim(shared, folder), folder / "out"
    assert ablate.main([f"{path}:smoke", "--out", str(out)]) == 0
    return path, out


def forget(run):
    """Remove a run, its record too."""
    shutil.rmtree(run)
    run.with_suffix(".json").unlink()


def run(capsys, *arguments):
    """(status, stdout + stderr) of the command in this process."""
    try:
        status = ablate.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def stable(out):
    """A result without when and how fast."""
    data = json.loads((out / "result.json").read_text())
    for seeds in data["metrics"].values():
        for seed in seeds.values():
            del seed["steps_per_s"], seed["monitor_cost"]
    keys = ("metrics", "findings", "verdict", "on the mechanism", "on loss", "arms", "config", "seeds")
    return {key: data[key] for key in keys}


def test_what_it_leaves(done):
    out = done[1]
    found = json.loads((out / "result.json").read_text())
    assert {"claim", "source", "expects", "differs", "hardware", "packages", "commit", "date"} <= set(found)
    assert found["seeds"] == [0, 1] and list(found["metrics"]) == ["dense", "ste", "replicate"]
    for arm in ("dense", "ste"):
        for seed in ("0", "1"):
            rows = [
                row for row in rundir.read_metrics(out / arm / f"seed{seed}") if row.get("kind") == "eval"
            ]
            sparse = arm == "ste"
            assert found["metrics"][arm][seed]["val_loss"] == rows[-1]["sparse" if sparse else "dense"]
    assert [f["claim"] for f in found["findings"]] == [
        "val_loss of dense minus ste < 0",
        "kept_share of ste in (0.1, 2)",
    ]
    assert found["replicates"] == "ste" and "train.perturb: 0.0 -> 1e-06" in found["arms"]["replicate"]
    ste, again = ([found["metrics"][arm][seed]["val_loss"] for seed in "01"] for arm in ("ste", "replicate"))
    squares = [(a - b) ** 2 for a, b in zip(ste, again, strict=True)]
    assert found["noise"]["val_loss"] == pytest.approx((sum(squares) / 2) ** 0.5) and sum(squares) > 0
    assert found["findings"][0]["floor"] > 0
    assert found["corpus"]["bytes"] > 0 and len(found["commits"]) == 1
    assert found["findings"][1]["verdict"] == found["on the mechanism"] == "confirmed"
    assert found["arms"]["ste"] == [
        "train.monitor_mask: top-2 -> transposable",
        "method.class: Dense -> STE",
    ]
    report = (out / "report.md").read_text()
    for part in (
        found["claim"],
        "Nothing.",
        "Something.",
        "All.",
        "curves.png",
        "Student's t",
        "kept_share",
        "Replicate of ste",
    ):
        assert part in report
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_statement_is_stored_before_the_first_run(done, tmp_path, capsys, monkeypatch):
    path, out = done
    written = json.loads((out / "statement.json").read_text())
    now = ablations.load(f"{path}:smoke").ablation.statement
    assert {key: written[key] for key in now} == now and written["runs before"] == 0
    assert json.loads((out / "result.json").read_text())["registered"] == written
    assert (
        f"Predicate {now['hash']}, written {written['written']}, before the first run."
        in (out / "report.md").read_text()
    )

    begun = []
    monkeypatch.setattr(
        runs, "train", lambda config, out, **_: begun.append((tmp_path / "out/statement.json").exists())
    )
    monkeypatch.setattr(runs, "run_in_turn", lambda jobs, **_: runs.train(None, None))
    run(capsys, f"{path}:smoke", "--out", tmp_path / "out")
    assert begun == [True]


def test_a_predicate_that_changed_after_the_runs(done, tmp_path, capsys):
    path, out = done
    changed = tmp_path / "paper" / path.name
    changed.parent.mkdir()
    changed.write_text(path.read_text().replace("above=0.1", "above=0.2"))
    copy = shutil.copytree(out, tmp_path / "copy")
    assert run(capsys, f"{changed}:smoke", "--out", copy, "--resume")[0] == 0
    found = json.loads((copy / "result.json").read_text())
    assert found["registered"]["hash"] != found["statement"]["hash"]
    page = (copy / "report.md").read_text()
    assert f"Recorded under an earlier predicate, {found['registered']['hash']}" in page


def test_runs_of_two_commits_are_not_combined(done, tmp_path, capsys):
    path, out = done
    copy = shutil.copytree(out, tmp_path / "copy")
    other = copy / "ste/seed1/environment.json"
    other.write_text(
        json.dumps(json.loads(other.read_text()) | {"commit": "0123456789abcdef", "tree": "clean"})
    )
    before = (copy / "result.json").read_text()
    status, printed = run(capsys, f"{path}:smoke", "--out", copy, "--resume")
    assert status == 2 and "different commits" in printed and "0123456789ab" in printed
    assert (copy / "result.json").read_text() == before
    forget(copy / "ste/seed0")  # nor is a run begun that could not be combined
    status, printed = run(capsys, f"{path}:smoke", "--out", copy, "--resume")
    assert status == 2 and "different commits" in printed and not (copy / "ste/seed0").exists()
    status, printed = run(
        capsys, f"{path}:smoke", "--out", tmp_path / "new", "--reuse", copy, "--minutes", "1e-9"
    )
    assert "ste/1" not in printed.split("Reused")[1] and "dense/0" in printed


def test_runs_on_two_texts_are_not_combined(done, tmp_path, capsys):
    path, out = done
    copy = shutil.copytree(out, tmp_path / "copy")
    rows = copy / "ste/seed1/metrics.jsonl"
    rows.write_text(re.sub(r'"bytes": \d+', '"bytes": 1', rows.read_text(), count=1))
    status, printed = run(capsys, f"{path}:smoke", "--out", copy, "--resume")
    assert status == 2 and "saw different texts" in printed


def test_a_run_with_missing_rows_gives_no_verdict(done, tmp_path, capsys):
    path, out = done
    copy = shutil.copytree(out, tmp_path / "copy")
    file = copy / "ste/seed1/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [row for row in rows if not (row["kind"] == "train" and 20 <= row["step"] < 30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert run(capsys, f"{path}:smoke", "--out", copy, "--resume")[0] == 0
    found = json.loads((copy / "result.json").read_text())
    gap = f"rows of 10 of {STEPS} steps are missing, the first is step 20"
    assert found["incomplete"] == {"ste/1": gap}
    assert found["verdict"] == "no verdict" and {f["verdict"] for f in found["findings"]} == {"no verdict"}
    assert f"ste/1: {gap}" in (copy / "report.md").read_text()


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


def test_csv(done):
    with (done[1] / "metrics.csv").open() as file:
        rows = {(row["arm"], row["metric"]): row for row in csv.DictReader(file)}
    found = json.loads((done[1] / "result.json").read_text())["metrics"]
    losses = {arm: [found[arm][seed]["val_loss"] for seed in ("0", "1")] for arm in ("dense", "ste")}
    ste = rows["ste", "val_loss"]
    assert float(ste["mean"]) == pytest.approx(sum(losses["ste"]) / 2, rel=1e-5)
    paired = [s - d for s, d in zip(losses["ste"], losses["dense"], strict=True)]
    assert float(ste["difference"]) == pytest.approx(sum(paired) / 2, rel=1e-4, abs=1e-6)
    assert float(ste["difference_low"]) <= float(ste["difference"]) <= float(ste["difference_high"])
    assert {metric for _, metric in rows} <= set(METRICS)


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


def test_runs_of_several_machines_are_reported_from_their_records(done, tmp_path, capsys, monkeypatch):
    path, out = done
    copy = tmp_path / "copy"
    for file in [out / "statement.json", *out.glob("*/seed*.json")]:
        (copy / file.relative_to(out)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy / file.relative_to(out))
    monkeypatch.setattr(runs, "train", lambda *_, **__: pytest.fail("all runs are done"))
    assert run(capsys, f"{path}:smoke", "--out", copy, "--resume")[0] == 0
    here, there = (json.loads((folder / "result.json").read_text()) for folder in (copy, out))
    when = ("date", "load_before")
    assert {k: v for k, v in here.items() if k not in when} == {
        k: v for k, v in there.items() if k not in when
    }
    file = copy / "ste/seed1.json"
    whole = file.read_text()
    for damaged, words in (
        (whole[:-9], "seed1.json is not the record of a run"),
        (whole.replace('"format":1', '"format":9'), "has the format 9 and not 1"),
        (whole.replace('"steps":150', '"steps":140'), "train.steps: 140 -> 150"),
    ):
        file.write_text(damaged)
        status, printed = run(capsys, f"{path}:smoke", "--out", copy, "--resume")
        assert status == 2 and words in printed


def test_a_study_of_the_records(done, tmp_path, capsys):
    _, out = done
    copy = tmp_path / "tiny"
    for file in out.glob("*/seed*.json"):
        (copy / file.relative_to(out)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy / file.relative_to(out))
    study.main([str(copy), "--out", str(tmp_path / "page")])
    page = (tmp_path / "page/evidence.md").read_text()
    found = json.loads((out / "result.json").read_text())["metrics"]
    losses = [[found[arm][seed]["val_dense"] for seed in "01"] for arm in ("ste", "dense")]
    gap = sum(ste - dense for ste, dense in zip(*losses, strict=True)) / 2
    side = "behind" if gap > 0 else "ahead of"
    assert f"ste ends {abs(gap):.3f} nats per token {side} dense training (2 seeds" in page
    assert f" {sum(losses[0]) / 2:.4f} |" in page and "not measured" in page
    for name in ("tokens", "minutes", "trade"):
        assert (tmp_path / f"page/tiny_{name}.png").read_bytes().startswith(b"\x89PNG")
    run = evidence.read(copy).arms["ste"][0]
    at, speeds = run.column("train", "steps_per_s")
    assert evidence.seconds_at(run, [0, at[-1]]) == pytest.approx([0, (1 / speeds).sum()], rel=1e-6)

    def refused(words):
        with pytest.raises(UserError, match=words):
            evidence.read(copy)

    file = copy / "ste/seed1.json"
    whole = file.read_text()
    digest = re.search(r'"digest":"(\w+)"', whole)[1]
    file.write_text(whole.replace(digest, "0" * len(digest)))
    refused("different texts: ")
    file.write_text(whole.replace('"step":[0,1,', '"step":[0,2,', 1))
    refused("cannot be shown: ")
    file.write_text(whole)
    shutil.rmtree(copy / "dense")
    refused("no arm 'dense'")
    shutil.rmtree(copy)
    refused("holds no ARM/seedN.json")


def test_killed_in_the_middle_and_resumed(done, tmp_path):
    """SIGKILL in the second run, between checkpoints: resumed, it ends at the result of one in a go."""
    path, whole = done
    out = tmp_path / "killed"
    for part in ("compiled", "replicate/seed0"):
        shutil.copytree(whole / part, out / part)
    arguments = [f"{path}:smoke", "--seeds", "0", "--out", str(out), "--resume"]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.ablate", *arguments], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.time() + 200
        while time.time() < deadline and not (out / "ste/seed0/checkpoints/50").exists():
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
    assert events == ["start", "resume"]
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
        runs.run_in_turn(jobs, show=False)
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
    runs.run_in_parallel([job], lambda job: command, [runs.Slot({}, (core,))], show=False)
    assert (tmp_path / "cores").read_text() == f"[{core}]"


def test_runs_share_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runs.shares(2, 2) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    three = runs.shares(3, 2)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in three] == ["4", "7", "4"]
    assert {share["XLA_PYTHON_CLIENT_PREALLOCATE"] for share in three} == {"false"}


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
        runs.run_in_parallel(jobs, lambda job: command, [runs.Slot({})] * 2, show=False)
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--seeds", ""], ["list of seeds is empty", "--seeds 0,1,2"]),
        (["--seeds", "0,x"], ["whole numbers", "'0,x'"]),
        (["--seeds", "1,1"], ["given twice"]),
        (["--jobs", "0"], ["--jobs must be positive"]),
        (["--jobs", "10000"], ["--jobs 10000 is more than"]),
        (["--cores", "1"], ["give --jobs too"]),
        (["--only", "fst/0"], ["no run 'fst/0'", "dense/0, ste/0, replicate/0, dense/1"]),
        (["--only", "dense/0", "configs/fst:smoke"], ["--only is for one ablation"]),
        (["tests:smoke"], ["No file in tests defines ablation(size)"]),
        (["--record"], ["smoke size shows only"]),
        (["--reuse", "/nowhere"], ["no folder /nowhere"]),
    ],
)
def test_mistakes(done, tmp_path, capsys, arguments, parts):
    status, printed = run(capsys, f"{done[0]}:smoke", "--out", tmp_path / "out", *arguments)
    assert status == 2
    assert all(part in printed for part in parts), printed
    assert not (tmp_path / "out").exists()


def test_folders(done, shared, tmp_path, capsys):
    path, out = done
    status, printed = run(capsys, f"{path}:smoke", "--out", out)
    assert status == 2 and "is not empty" in printed and "--resume" in printed
    other = write_claim(shared, tmp_path / "paper", steps=STEPS + 1)
    status, printed = run(capsys, f"{other}:smoke", "--out", out, "--resume")
    assert status == 2 and f"train.steps: {STEPS} -> {STEPS + 1}" in printed
    status, printed = run(capsys)
    assert status == 2 and "Give a CONFIG" in printed


def test_as_a_module():
    result = python("experiments.ablate", "configs/fst/decay_gird.py")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "Did you mean configs/fst/decay_grid.py?" in result.stderr


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A place of its own for recorded results and their page."""
    monkeypatch.setattr(reproduction, "FOLDER", tmp_path / "docs/reproduction")
    monkeypatch.setattr(reproduction, "PAGE", tmp_path / "docs/reproduction.md")
    monkeypatch.setattr(reproduction, "COMPARED", tmp_path / "docs/verdicts.md")
    (tmp_path / "docs/reproduction").mkdir(parents=True)
    return tmp_path / "docs"


def test_list_and_page(done, elsewhere, capsys):
    path, out = done
    assert "configs/fst/decay_grid.py\n  Masked decay" in run(capsys, "--list")[1]
    status, printed = run(capsys, "--write-docs")
    assert status == 0 and "no results yet" in (elsewhere / "reproduction.md").read_text()
    named = ablations.load(f"{path}:smoke")
    found = json.loads((out / "result.json").read_text()) | {"paper": "fst", "name": "decay_grid"}
    named = type(named)(Path("fst/decay_grid.py"), "cpu", named.ablation)
    files = reproduction.record(named, found | {"size": "cpu"}, out)
    assert sorted(os.path.splitext(file)[1] for file in files) == [".csv", ".json", ".png"]
    assert all(os.path.basename(f).startswith(f"decay_grid_cpu_{found['hardware']['name']}") for f in files)
    status, printed = run(capsys, "--list")
    assert f"cpu: {text.verdict(found)}; 2 seeds, {found['date']}" in printed
    assert "configs/fst/gradient_cut.py\n" in printed and "not run" in printed
    run(capsys, "--write-docs")
    page = (elsewhere / "reproduction.md").read_text()
    for part in ("## FST (arXiv 2404.01847)", found["claim"], "Nothing.", "All.", found["date"]):
        assert part in page
    image = f"reproduction/fst/decay_grid_cpu_{found['hardware']['name']}.png"
    assert f"({image})" in page and (elsewhere / image).exists()


def test_a_file_that_is_no_result(elsewhere, capsys):
    (elsewhere / "reproduction/thing.json").write_text("{}")
    status, printed = run(capsys, "--list")
    assert status == 2 and "thing.json is not a result" in printed


def test_the_pages_are_what_the_recorded_results_say():
    found = reproduction.recorded()
    assert reproduction.PAGE.read_text() == reproduction.page(found)
    assert reproduction.COMPARED.read_text() == reproduction.comparison(found)


def test_recorded_results_are_judged_by_the_claims_and_rules_of_today():
    """python -m experiments.ablate --rejudge makes them so; a statement stored before the runs stays."""
    for path, found in reproduction.recorded():
        named = ablations.load(f"configs/{found['paper']}/{found['name']}.py:{found['size']}")
        again = json.loads(json.dumps(result.judged(found, named.ablation)))
        assert {key: again[key] for key in ("verdict", "statement")} == {
            key: found[key] for key in ("verdict", "statement")
        }, path
        assert [f["verdict"] for f in again["findings"]] == [f["verdict"] for f in found["findings"]], path
        assert "recorded with" in found or found["registered"]["runs before"] == 0


def test_a_result_without_curves_is_recorded(done, elsewhere, tmp_path):
    """They need matplotlib, and can be drawn later."""
    path, out = done
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / "curves.png").unlink()
    named = ablations.load(f"{path}:smoke")
    named = type(named)(Path("fst/decay_grid.py"), "cpu", named.ablation)
    found = result.read(copy / "result.json") | {"paper": "fst", "name": "decay_grid", "size": "cpu"}
    files = reproduction.record(named, found, copy)
    assert [Path(file).suffix for file in files] == [".json", ".csv"]
    assert "curves of every arm" not in reproduction.page(reproduction.recorded())


def test_rejudging_keeps_the_metrics(done, elsewhere, capsys):
    old = json.loads((done[1] / "result.json").read_text())
    for key in ("statement", "registered", "noise"):
        del old[key]
    old |= {"paper": "fst", "name": "ste_flip_rate", "size": "cpu", "format": 1, "verdict": "refuted"}
    del old["metrics"]["replicate"]
    file = elsewhere / "reproduction/fst/ste_flip_rate_cpu_x.json"
    file.parent.mkdir()
    result.write(old, file)
    assert run(capsys, "--rejudge")[0] == 0
    new = result.read(file)
    assert new["metrics"] == old["metrics"] and new["claim"] == old["claim"] and new["noise"] is None
    assert new["statement"] == ablations.load("configs/fst/ste_flip_rate.py:cpu").ablation.statement
    assert new["recorded with"] == [f["claim"] for f in old["findings"]]
    page = (elsewhere / "reproduction.md").read_text()
    for words in (
        "it was not stored before the first run",
        "no longer compared: kept_share of ste",
        "not measured",
    ):
        assert words in page
    run(capsys, "--rejudge")
    assert result.read(file) == new


def test_shared_runs_are_said(done):
    found = json.loads((done[1] / "result.json").read_text()) | {"paper": "paper"}
    other = found | {"name": "other", "metrics": {"first": found["metrics"]["ste"]}}
    words = reproduction.shared_runs([(Path("a"), found), (Path("b"), other)])
    assert words[Path("a")] == "Runs that other results have too: paper/other (ste, there first)."
    assert words[Path("b")] == "Runs that other results have too: paper/tiny_claim (first, there ste)."


def test_recorded_results_are_of_claims_that_exist():
    known = {(file.parent.name, file.stem) for file in ablations.listing()}
    for path, found in reproduction.recorded():
        assert (found["paper"], found["name"]) in known, path
        assert found["size"] != "smoke"
        assert all(path.with_suffix(kind).exists() for kind in (".csv", ".png"))


def test_results_hold_no_number_that_json_lacks(tmp_path):
    with pytest.raises(ValueError):
        result.write({"x": float("nan")}, tmp_path / "x.json")


def leaky(result, arms):
    """The recorded result whose file begins so, which has these arms."""
    path = next(p for p, _ in reproduction.recorded() if p.stem.startswith(result))
    found = json.loads(path.read_text())
    assert set(arms) <= set(found["arms"])
    return found


def test_losses_that_depend_on_later_tokens_are_marked():
    """By the stored config: in the table of the arms, in the comparisons, in the CSV, never where dense."""
    found = leaky("weights_cpu", ["S-STE", "both", "both, sparse to the end"])
    lines = {
        line.split("|")[1].strip(): line for line in text.arms(found).split("\n") if line.startswith("|")
    }
    columns = {arm: n + 2 for n, arm in enumerate(found["metrics"])}

    def is_marked(metric, arm):
        return lines[metric].split("|")[columns[arm]].rstrip().endswith(" *")

    leaks = ("activations", "both", "both, sparse to the end")
    assert {arm for arm in columns if is_marked("val_sparse", arm)} == set(leaks)
    assert {arm for arm in columns if is_marked("val_loss", arm)} == {"both, sparse to the end"}
    assert not any(is_marked("val_dense", arm) for arm in columns)
    assert "no language-model loss" in text.arms(found)
    rows = list(csv.DictReader(result.table(found).splitlines()))
    noted = {(row["arm"], row["metric"]) for row in rows if row["note"] == "no language-model loss"}
    assert ("both", "val_sparse") in noted and ("both", "val_loss") not in noted
    assert not {arm for arm, _ in noted} - set(leaks)
    comparison = leaky("blocks_cpu", ["smaller V"])
    for line, f in zip(text.findings(comparison).split("\n")[2:], comparison["findings"], strict=False):
        assert line.split("|")[2].rstrip().endswith(" *") == (f["metric"] in ("val_loss", "val_sparse"))
    clean = leaky("decay_grid_cpu", ["decay 0"])
    assert "language-model" not in text.body(clean, None, "") and "no lang" not in result.table(clean)


def test_columns_of_a_first_token_leaked():
    """Recorded as columns="cluster" before leaks were measured; today's run of the same config does not."""
    found = leaky("leak_cpu", ["by cluster"])
    assert "val_loss" in leaking(found)["by cluster"]
    for metrics in found["metrics"]["by cluster"].values():
        metrics["leak"] = 0.0
    assert not leaking(found)["by cluster"] and "val_loss" in leaking(found)["by data"]


def test_recorded_tables_are_those_of_the_results():
    for path, found in reproduction.recorded():
        assert path.with_suffix(".csv").read_text() == result.table(found), path
