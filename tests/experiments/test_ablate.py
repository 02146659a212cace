"""The command: files, resuming after a kill, divergence, several processes, the list and the page."""

import csv
import json
import os
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

from experiments import ablation as ablations
from experiments import config as configs
from experiments import rundir
from experiments.ablate import __main__ as ablate
from experiments.ablate import reproduction, result, runs, text
from experiments.config import REPOSITORY
from experiments.outcome import METRICS
from experiments.train import Result
from tests.experiments.conftest import python

STEPS = 150  # enough that a run can be killed between its checkpoints, 50 steps apart
CLAIM = '''
"""A claim for tests: its first line."""

import dataclasses

import jax_sparse24 as s24
from experiments.ablation import Ablation
from experiments.config import Data, Model, Optim, Train
from experiments.verdicts import all_of, between, less


def ablation(size):
    base = dataclasses.replace(
        size.base,
        model=Model(layers=1, d=8, f=16, heads=1),
        data=Data(corpus={corpus!r}, root={root!r}, seq=16, batch=4),
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
        verdict=all_of(less("dense", "ste"), between("ste", "kept_share", above=0.5, below=1), {more}),
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
    assert found["seeds"] == [0, 1] and list(found["metrics"]) == ["dense", "ste"]
    for arm in ("dense", "ste"):
        for seed in ("0", "1"):
            rows = [
                row for row in rundir.read_metrics(out / arm / f"seed{seed}") if row.get("kind") == "eval"
            ]
            sparse = arm == "ste"
            assert found["metrics"][arm][seed]["val_loss"] == rows[-1]["sparse" if sparse else "dense"]
    assert [f["claim"] for f in found["findings"]] == [
        "val_loss of dense minus ste < 0",
        "kept_share of ste in (0.5, 1)",
    ]
    assert found["findings"][1]["verdict"] == found["on the mechanism"] == "confirmed"
    assert found["arms"]["ste"] == [
        "train.monitor_mask: top-2 -> transposable",
        "method.class: Dense -> STE",
    ]
    report = (out / "report.md").read_text()
    for part in (found["claim"], "Nothing.", "Something.", "All.", "curves.png", "Student's t", "kept_share"):
        assert part in report
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


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
    shutil.rmtree(copy / "ste" / "seed1")
    status, printed = run(capsys, f"{path}:smoke", "--out", copy, "--resume")
    assert status == 0
    assert "1/1 ste/1: finished" in printed and "dense/0" not in printed
    assert (copy / "ste/seed0/metrics.jsonl").read_bytes() == before
    assert stable(copy) == stable(out)


def test_killed_in_the_middle_and_resumed(done, tmp_path):
    """SIGKILL in the second run, between checkpoints: resumed, it ends at the result of one in a go."""
    path, whole = done
    out = tmp_path / "killed"
    shutil.copytree(whole / "compiled", out / "compiled")
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
    first, half = runs.jobs_of(ablations.load(f"{path}:smoke").ablation, (0,), out)
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
    assert not runs.run_in_turn(jobs, show=False)
    assert started == ["dense-seed0"]


def test_an_arm_that_diverges(done, shared, tmp_path, capsys):
    """The others, here taken from another ablation that has them, still give their result."""
    path = write_claim(shared, tmp_path / "paper", wild=True)
    arguments = (f"{path}:smoke", "--out", tmp_path / "out", "--reuse", done[1])
    status, printed = run(capsys, *arguments)
    assert status == 0
    assert "Reused, with the same config" in printed and "1/2 wild/0" in printed and "/4" not in printed
    assert "wild/0 diverged" in printed and "The loss became nan" in printed
    found = json.loads((tmp_path / "out/result.json").read_text())
    assert found["diverged"] == ["wild/0", "wild/1"]
    assert set(found["metrics"]["wild"]["0"].values()) == {None}
    assert found["metrics"]["ste"] == json.loads((done[1] / "result.json").read_text())["metrics"]["ste"]
    assert found["findings"][2]["verdict"] == "inconclusive"
    assert found["findings"][2]["note"] == "no kept_share: wild of seed 0, wild of seed 1"
    assert "Diverged, and stopped there: wild/0, wild/1." in (tmp_path / "out/report.md").read_text()
    before = (tmp_path / "out/wild/seed0/metrics.jsonl").read_bytes()
    assert run(capsys, *arguments, "--resume")[0] == 0
    assert (tmp_path / "out/wild/seed0/metrics.jsonl").read_bytes() == before


def test_two_at_a_time(done, tmp_path, capsys):
    """Two processes get the same result as one; whatever was not started yet shares their programs."""
    path, out = done
    (tmp_path / "out").mkdir()
    shutil.copytree(out / "compiled", tmp_path / "out/compiled")
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
    monkeypatch.setattr(runs, "slots", lambda count: [{}] * count)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # nothing is trained
    arguments = (f"{tmp_path / 'paper'}:smoke", "--out", tmp_path / "out", "--jobs", count, "--resume")
    status, printed = run(capsys, *arguments)
    assert status == 0, printed
    assert "tiny_claim ste/1" in printed
    one, other = (tmp_path / "out/paper" / f"{name}_smoke" for name in ("other", "tiny_claim"))
    assert stable(one) == stable(other)
    assert "# paper: tiny_claim, smoke" in (other / "report.md").read_text()
    assert configs.read(other / "ste/seed1/config.json") == configs.read(one / "ste/seed1/config.json")


def test_runs_share_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runs.shares(2, 2) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    three = runs.shares(3, 2)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in three] == ["4", "7", "4"]
    assert {share["XLA_PYTHON_CLIENT_PREALLOCATE"] for share in three} == {"false"}


def test_a_process_that_fails(done, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs, "slots", lambda count: [{}] * count)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    status, printed = run(capsys, f"{done[0]}:smoke", "--out", tmp_path / "out", "--jobs", 2, "--seeds", 0)
    assert status == 1
    assert "failed or were stopped: dense/0, ste/0" in printed and "seed0.log" in printed
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
    with pytest.raises(SystemExit) as stop:
        runs.run_in_parallel(jobs, lambda job: command, [{}, {}], show=False)
    assert stop.value.code == 143
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
        (["--only", "fst/0"], ["no run 'fst/0'", "dense/0, ste/0, dense/1"]),
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


def test_the_page_is_what_the_recorded_results_say():
    assert reproduction.PAGE.read_text() == reproduction.page(reproduction.recorded())


def test_recorded_results_are_of_claims_that_exist():
    known = {(file.parent.name, file.stem) for file in ablations.listing()}
    for path, found in reproduction.recorded():
        assert (found["paper"], found["name"]) in known, path
        assert found["size"] != "smoke"
        assert all(path.with_suffix(kind).exists() for kind in (".csv", ".png"))


def test_results_hold_no_number_that_json_lacks(tmp_path):
    with pytest.raises(ValueError):
        result.write({"x": float("nan")}, tmp_path / "x.json")
