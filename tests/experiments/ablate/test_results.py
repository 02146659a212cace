"""What a complete ablation leaves, what refuses to be combined, and what the command says of mistakes."""

import csv
import json
import re
import shutil

import pytest

from experiments.ablations import ablation as ablations
from experiments.ablations import runs, text
from experiments.analysis.outcome import METRICS
from experiments.training import rundir
from tests.experiments.ablate.conftest import STEPS, forget, run, write_claim
from tests.experiments.conftest import python

pytestmark = pytest.mark.slow


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
        "train.prompts: ['def '] -> []",
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
    assert f"{text.verdict(found)}**, by comparisons that were rewritten after results were known" in page


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
    file.write_text(whole)
    devices = re.search(r'"devices":\[.*?\]', whole)[0]
    gpus = '"devices":["NVIDIA H200","NVIDIA H200"]'
    file.write_text(whole.replace(devices, gpus))
    status, printed = run(capsys, f"{path}:smoke", "--out", copy, "--resume")
    assert status == 2 and "made on different devices: cpu (" in printed and "NVIDIA H200 (" in printed
    for record in copy.glob("*/seed*.json"):
        record.write_text(record.read_text().replace(devices, gpus))
    assert run(capsys, f"{path}:smoke", "--out", copy, "--resume")[0] == 0
    made = json.loads((copy / "result.json").read_text())
    assert made["hardware"] | {"cores": 0} == {
        **{"name": "nvidia-h200", "description": "NVIDIA H200", "platform": "gpu", "isa": "", "cores": 0}
    }
    assert made["metrics"] == here["metrics"] and made["packages"]["jax"] == here["packages"]["jax"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--seeds", ""], ["list of seeds is empty", "--seeds 0,1,2"]),
        (["--seeds", "0,x"], ["whole numbers", "'0,x'"]),
        (["--seeds", "1,1"], ["given twice"]),
        (["--jobs", "-1"], ["--jobs must be positive"]),
        (["--jobs", "10000"], ["--jobs 10000 is more than"]),
        (["--cores", "1"], ["give --jobs too"]),
        (["--only", "fst/0"], ["no run 'fst/0'", "dense/0, ste/0, replicate/0, dense/1"]),
        (["--only", "dense/0,ste, again/10"], ["no run 'ste, again/10'"]),
        (["--only", "dense/0", "configs/fst:smoke"], ["--only is for one ablation"]),
        (["tests/dispatch:smoke"], ["No file in tests/dispatch defines ablation(size)"]),
        (["--record"], ["smoke size shows only"]),
        (["--reuse", "/nowhere"], ["no folder /nowhere"]),
        (["--list"], ["are for all ablations", ":smoke' out"]),
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
