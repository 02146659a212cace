"""Recorded results, their pages, and studies of records."""

import csv
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments import ablate, study
from experiments.ablations import ablation as ablations
from experiments.ablations import evidence, reproduction, result, text, together
from experiments.ablations.leaks import leaking
from experiments.config import REPOSITORY
from experiments.errors import UserError
from tests.experiments.ablate.conftest import run, write_claim
from tests.experiments.conftest import as_it_is, changed

pytestmark = pytest.mark.slow


def test_a_study_of_the_records(done, tmp_path, capsys):
    _, out = done
    copy = tmp_path / "tiny"
    for file in out.glob("*/seed*.json"):
        changed(file, copy, lambda content: content["environment"].update(tree="clean"))
    study.main([str(copy), "--out", str(tmp_path / "page")])
    page = (tmp_path / "page/evidence.md").read_text()
    found = json.loads((out / "result.json").read_text())["metrics"]
    kinds = {"ste": "val_sparse", "dense": "val_dense"}  # each as it ends
    losses = [[found[arm][seed][kind] for seed in "01"] for arm, kind in kinds.items()]
    gap = sum(ste - dense for ste, dense in zip(*losses, strict=True)) / 2
    side = "behind" if gap > 0 else "ahead of"
    assert f"ste ends {abs(gap):.3f} nats per token {side} dense training (2 seeds" in page
    assert f" {sum(losses[0]) / 2:.4f} |" in page and "not measured" in page
    dense = evidence.read(copy).arms["dense"]
    second = [evidence.second_bits(dense[seed]) for seed in (0, 1)]
    assert f" {sum(second) / 2:.4f} |" in page and second != [None, None]
    (sample,) = dense[0].rows["sample"]
    assert sample["products"] == "dense" and "dense, by" not in page
    assert sample["prompt"] == "def " and len(sample["text"].encode()) >= 16 and "### What they write" in page
    for name in ("tiny_tokens", "tiny_minutes", "trade"):
        assert (tmp_path / f"page/evidence/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"](evidence/{name}.png)" in page
    both = evidence.read(copy)
    run = both.arms["ste"][0]
    at, speeds = run.column("train", "steps_per_s")
    assert evidence.seconds_at(run, [0, at[-1]]) == pytest.approx([0, (1 / speeds).sum()], rel=1e-6)

    def refused(words):
        with pytest.raises(UserError, match=words):
            evidence.read(copy)

    file = copy / "ste/seed1.json"
    whole = file.read_text()
    commit = json.loads(whole)["environment"]["commit"]
    assert both.run_speed("ste").n == 2 and len(both.tokens_per_second("ste")) == 1
    file.write_text(whole.replace(commit, "0" * len(commit)))
    mixed = evidence.read(copy)
    assert (
        mixed.run_speed("ste").n == 1
        and mixed.gap("ste").n == 2
        and mixed.alike("ste") == [mixed.arms["ste"][0]]
    )
    assert len(mixed.tokens_per_second("ste")) == 1 and "Left out is ste/1, " in evidence.about(mixed)
    for kind, words in (("event", "different texts: "), ("second", "different second texts: ")):
        digest = re.search(rf'"{kind}":.*?"digest":\W*(\w+)', whole)[1]
        file.write_text(whole.replace(digest, "0" * len(digest)))
        refused(words)
    file.write_text(whole.replace('"step":[0,1,', '"step":[0,2,', 1))
    refused("cannot be shown: ")
    file.write_text(whole)
    other = tmp_path / "host2" / copy.name
    other.mkdir(parents=True)
    shutil.move(copy / "dense", other / "dense")
    refused("no arm 'dense'")
    study.main([str(copy), str(other), "--out", str(tmp_path / "merged")])  # as of two machines
    assert (tmp_path / "merged/evidence.md").read_text() == page
    shutil.copytree(other / "dense", copy / "dense")
    with pytest.raises(UserError, match=r"/host2/tiny/dense/seed0\.json are one run made twice"):
        evidence.read(copy, other)
    shutil.rmtree(copy / "dense")
    refused("no arm 'dense'")
    shutil.rmtree(copy)
    refused("holds no ARM/seedN.json")


def test_a_pair_is_trained_and_shown_by_one_command(shared, tmp_path, capsys):
    """And said before; the same command again keeps what was trained."""
    claim = write_claim(shared, tmp_path, steps=8)
    argv = ["--run", f"{claim}:smoke", "--only", "dense/0,ste/0", "--out", str(tmp_path / "pair")]
    assert study.main([*argv, "--plan"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in said[2:]] == ["dense/0", "ste/0"]
    assert all("not recorded" in line and "to be trained" in line for line in said[2:])
    assert not (tmp_path / "pair").exists(), "a plan trains nothing"
    assert study.main(argv) == 0
    page = (tmp_path / "pair/evidence.md").read_text()
    assert "## smoke" in page and "ste ends " in page
    trained = (tmp_path / "pair/smoke/ste/seed0/metrics.jsonl").stat().st_mtime_ns
    assert study.main(argv) == 0 and (tmp_path / "pair/evidence.md").read_text() == page
    assert (tmp_path / "pair/smoke/ste/seed0/metrics.jsonl").stat().st_mtime_ns == trained
    capsys.readouterr()
    study.main([*argv, "--plan"])
    assert capsys.readouterr().out.count("done") == 2
    with pytest.raises(SystemExit) as stop:
        study.main([str(tmp_path / "pair/smoke"), "--only", "dense/0", "--out", str(tmp_path / "x")])
    assert stop.value.code == 2 and "--only needs --run CONFIG:SIZE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        study.main([str(tmp_path / "pair/smoke"), "--any-speed", "--plan", "--out", str(tmp_path / "x")])
    assert "--any-speed, --plan needs --run CONFIG:SIZE" in capsys.readouterr().err


def test_folders_beside_runs(tmp_path, capsys, monkeypatch):
    """Without records in one nothing is trained, and no plan is made."""
    monkeypatch.setattr(
        study.ablate, "main", lambda argv: pytest.fail("trained before the records were read")
    )
    out = tmp_path / "out"
    for plan in ([], ["--plan"]):
        with pytest.raises(SystemExit) as stop:
            argv = [str(tmp_path / "nothing"), "--run", study.PLAN, "--only", "dense/0", "--out", str(out)]
            study.main([*argv, *plan])
        assert stop.value.code == 2 and not out.exists()
        assert f"{tmp_path}/nothing holds no ARM/seedN.json" in capsys.readouterr().err


def faster(content):
    content["config"]["optim"]["lr"] = 1.0


def in_longer_sequences(content):
    content["config"]["data"]["seq"] = 2048


@pytest.mark.parametrize(
    ("only", "arm", "change", "words"),
    [
        ("FST/0", "dense", faster, "are of one arm, but have different configs:\n  optim.lr: 0.0012 -> 1.0"),
        ("FST/0", "dense", in_longer_sequences, "but have different configs:\n  data.seq: 1024 -> 2048"),
        ("FST/0,dense/0", "dense", as_it_is, "are one run made twice: take one of them out; --only"),
        ("Venom/0", "FST", as_it_is, "has no arm 'dense'"),
    ],
    ids=["config", "data", "twice", "dense"],
)
@pytest.mark.parametrize("plan", [[], ["--plan"]], ids=["run", "plan"])
def test_records_that_do_not_fit_are_refused_before_a_run(
    plan, only, arm, change, words, tmp_path, capsys, monkeypatch
):
    """By the words that would be said of the page after it, and as it is planned."""
    monkeypatch.setattr(study.ablate, "main", lambda argv: pytest.fail("trained before the records fitted"))
    changed(study.STORED / f"{arm}/seed0.json", tmp_path / "124m", change)
    argv = [tmp_path / "124m", "--run", study.PLAN, "--only", only, "--out", tmp_path / "out", *plan]
    with pytest.raises(SystemExit):
        study.main([str(word) for word in argv])
    printed, said = capsys.readouterr()
    assert re.search(".*".join(map(re.escape, words.split("*"))), said) and not printed, said
    assert not (tmp_path / "out").exists()


def test_records_where_runs_would_be_must_be_of_their_commit(tmp_path, capsys, monkeypatch):
    """As they are planned, too."""
    monkeypatch.setattr(study.ablate, "main", lambda argv: pytest.fail("trained before the records fitted"))
    changed(study.STORED / "FST/seed0.json", tmp_path / "124m")
    held = sorted(tmp_path.rglob("*"))
    for plan in ([], ["--plan"]):
        with pytest.raises(SystemExit):
            study.main(["--run", study.PLAN, "--seeds", "0", "--out", str(tmp_path), *plan])
        printed, said = capsys.readouterr()
        assert (
            "These runs are of different commits: " in said
            and f"{tmp_path}/124m/FST/seed0" in said
            and not printed
        )
    assert sorted(tmp_path.rglob("*")) == held


@pytest.mark.parametrize(
    ("devices", "said", "why"),
    [
        (["NVIDIA H100 80GB HBM3"], "NVIDIA H100 80GB HBM3 or NVIDIA H200", "another kind of GPU"),
        (["NVIDIA H200"] * 2, "2 x NVIDIA H200 or NVIDIA H200", "another number of GPUs"),
    ],
    ids=["kind", "number"],
)
def test_losses_compare_over_kinds_of_gpu_and_times_within_each(devices, said, why, tmp_path):
    def on_another(content):
        content["environment"]["devices"] = devices

    for arm in ("dense", "FST"):
        changed(study.STORED / f"{arm}/seed0.json", tmp_path / "124m")
    changed(study.STORED / "half-width/seed0.json", tmp_path / "124m", on_another)
    found = evidence.read(tmp_path / "124m")
    assert found.gap("half-width").n == found.gap("FST").n == 1
    assert found.run_speed("half-width").mean is None and found.run_speed("FST").mean is not None
    assert found.left_out == {f"of {why} than the runs beside": ["half-width/0"]}
    assert f"on {said}." in evidence.about(found)


def test_statements_that_differ_are_refused(tmp_path, capsys):
    """Of two folders of records, and of a folder beside runs of an ablation that states something else."""
    folder = tmp_path / "124m"
    changed(study.STORED / "FST/seed0.json", folder)
    (folder / "statement.json").write_text('{"hash": "0", "written": "2020", "runs before": 0}')
    with pytest.raises(UserError, match=r"different statements: 0 .*11d39976dfd1"):
        evidence.read(folder, study.STORED)
    with pytest.raises(SystemExit):
        out = str(tmp_path / "out")
        study.main([str(folder), "--run", study.PLAN, "--only", "dense/0", "--out", out])
    said = capsys.readouterr().err
    assert "different statements: 0 (" in said and f"({study.PLAN})" in said


def test_of_machines_that_state_the_same_that_with_most_runs_before_counts(tmp_path):
    """What is said of the first run is true of all."""
    stated = json.loads((study.STORED / "statement.json").read_text())
    other = tmp_path / "124m"
    changed(study.STORED / "FST/seed0.json", other, lambda content: content["config"].update(seed=77))
    (other / "FST/seed0.json").rename(other / "FST/seed77.json")
    (other / "statement.json").write_text(json.dumps(stated | {"runs before": 2}))
    assert evidence.read(study.STORED, other).registered["runs before"] == 2


def test_configs_of_an_arm():
    """Where files lie is no matter; whether a run starts from another, and from which kind of tokens, is."""
    (member,) = together.records([study.STORED])[:1]

    def having(start="", words="train:32768"):
        train = dataclasses.replace(member.config.train, start_from=start)
        data = dataclasses.replace(member.config.data, tokenizer=words)
        return together.in_common(dataclasses.replace(member.config, train=train, data=data))

    assert having(start="/a/run") == having(start="/b/run") != having()
    assert having(words="/a/tokenizer.json") == having(words="/b/tokenizer.json") != having()


def test_a_run_that_diverged_stops_no_other(tmp_path):
    def diverged(content):
        content["rows"]["eval"]["dense"][-1] = None

    changed(study.STORED / "FST/seed0.json", tmp_path / "124m", diverged)
    assert len(together.records([tmp_path / "124m"], whole=False)) == 1
    with pytest.raises(UserError, match="cannot be shown: its last loss is no number"):
        together.records([tmp_path / "124m"])


def other_text(content):
    content["rows"]["event"]["corpus"][0]["digest"] = "0"


def other_second_text(content):
    content["rows"]["second"]["digest"][0] = "0"


@pytest.mark.parametrize(
    ("change", "words"),
    [(other_text, "different texts: 0 ("), (other_second_text, "different second texts: 0 (")],
)
def test_a_run_on_another_text_is_stopped_before_its_folder_is_made(change, words, done, tmp_path, capsys):
    changed(done[1] / "dense/seed0.json", tmp_path / "smoke", change)
    argv = [tmp_path / "smoke", "--run", f"{done[0]}:smoke", "--only", "ste/0", "--out", tmp_path / "out"]
    with pytest.raises(SystemExit):
        study.main([str(word) for word in argv])
    said = capsys.readouterr().err
    assert words in said and "ste/seed0.json, to be trained" in said
    assert not (tmp_path / "out/smoke/ste/seed0").exists()


def test_a_run_beside_the_records_of_another_machine(done, tmp_path, capsys):
    """Fits, and is on a page with them."""
    changed(done[1] / "dense/seed0.json", tmp_path / "smoke")
    argv = [tmp_path / "smoke", "--run", f"{done[0]}:smoke", "--only", "ste/0", "--out", tmp_path / "out"]
    assert study.main([str(word) for word in argv]) == 0
    assert "ste ends " in (tmp_path / "out/evidence.md").read_text()


def test_runs_at_a_time_know_what_they_are_shown_with(done, tmp_path):
    beside = ["--beside", str(done[1]), "--beside", str(tmp_path / "out")]
    argv = [f"{done[0]}:smoke", "--out", str(tmp_path / "out"), *beside]
    (claim,) = ablate.claims_of(ablate.parser().parse_args(argv))
    assert claim.command(tmp_path)[-4:] == beside
    assert all(job.beside == (done[1], tmp_path / "out") for job in claim.jobs)
    with pytest.raises(UserError, match=r"out holds no ARM/seedN\.json"):
        ablate.claims_of(ablate.parser().parse_args([f"{done[0]}:smoke", *beside]))


def test_a_folder_that_is_trained_into_may_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(study.ablate, "main", lambda argv: 0)
    folder = shutil.copytree(study.STORED, tmp_path / "124m")
    argv = ["--run", study.PLAN, "--only", "dense/0", "--out", str(tmp_path)]
    study.main(argv)
    page = (tmp_path / "evidence.md").read_text()
    study.main([str(folder), *argv])
    assert (tmp_path / "evidence.md").read_text() == page


def test_the_plan_says_what_the_recorded_pair_took():
    words = study.plan([study.PLAN, "--only", "dense/0,FST/1,Venom/0", "--any-speed", "--out", "nowhere"])
    dense, fst, venom = ([cell.strip() for cell in line.split("|")[1:-1]] for line in words.splitlines()[2:])
    assert dense[:3] == ["dense/0", "7000", "459"] and fst[0] == "FST/1"
    assert 12 <= int(dense[3]) <= 16 and 12 <= int(fst[3]) <= 16 and 0.4 < float(dense[4]) < 0.7
    assert venom[3] in ("not recorded", *map(str, range(10, 20)))


def test_the_page_is_what_the_records_say(tmp_path):
    stored = REPOSITORY / "docs/evidence"
    studies = [str(folder) for folder in sorted(stored.glob("*/")) if any(folder.glob("*/seed*.json"))]
    study.main([*studies, "--out", str(tmp_path)])
    page = (tmp_path / "evidence.md").read_text()
    assert page == (REPOSITORY / "docs/evidence.md").read_text()
    assert page.index("## 124m\n") < page.index("## 124m-controls\n") < page.index("## pilot\n")
    assert page.startswith("# Evidence\n\n**Sparsity loses at the size `124m-tokens` (one seed)**: ")
    assert "\n\n**Sparsity shows no gain at the size `124m`**: " in page
    assert "that long), arms end, in nats per token, at most 0.01 behind it: Activation24 -0.003; " in page
    assert "corrected for 6 comparisons" in page
    assert page.count("### The claim") == page.count("### What they write") == 5  # pilots decide none
    assert "11d39976dfd1, written 2026-11-25T02:00:01, before the first run" in page


def test_a_curve_is_by_the_products_of_its_step():
    """By the records: FST ends dense, Activation24 begins so, and in Venom's sparse steps tokens know of
    later ones."""
    stored = evidence.read(REPOSITORY / "docs/evidence/124m")
    for arm, ends, seed in (("FST", 5 / 6, 0), ("Activation24", 1, 0), ("Venom", 3063 / 7000, 2)):
        run = stored.arms[arm][seed]
        begins = 0 if arm == "FST" else 1 / 4
        at, values, causal = evidence.curve(run, "tokens")
        dense, sparse = (run.column("eval", name)[1] for name in ("dense", "sparse"))
        inside = (at > 459 * begins) & (at <= 459 * ends)
        expected = np.where(inside, sparse, dense) / run.bytes_per_token / np.log(2)
        assert values == pytest.approx(expected) and inside.any()
        assert (causal == (~inside if arm == "Venom" else True)).all()


def test_what_is_drawn_of_papers_is_said():
    """The page has each speed in words, with its source, and states no paper's loss as a number."""
    words = " ".join(study.TRADE.split())
    for paper in evidence.PAPERS:
        low, high = paper.speed
        assert f"{low:g} to {high:g} times as fast (`{paper.arm}`, {paper.source})" in words
    for file in ("methods", "tokens"):
        source = ablations.load(f"configs/evidence/{file}.py:124m").ablation.source
        assert "abstract" in source and "this project's" in source and " nats" not in source


def of_one_seed():
    """The study 124m without its further seeds."""
    (found,) = [study for study in evidence.studies() if study.name == "124m"]
    return dataclasses.replace(
        found, arms={arm: {0: runs[0]} for arm, runs in found.arms.items() if 0 in runs}
    )


def test_the_share_of_the_peak_of_a_record():
    """As the run wrote it down."""
    runs = of_one_seed()
    run = runs.arms["FST"][0]
    (share,) = runs.mfu("FST")
    assert share == pytest.approx(sum(run.column("train", "mfu")[1]) / len(run.rows["train"][1:]), rel=0.01)
    assert f" {share:.1%} |" in evidence.table(runs)
    rows = [{k: v for k, v in row.items() if k != "mfu"} for row in run.rows["train"]]
    unknown = dataclasses.replace(run, rows=run.rows | {"train": rows})
    assert dataclasses.replace(runs, arms=runs.arms | {"FST": {0: unknown}}).mfu("FST") == []


def test_a_study_at_equal_time_says_so():
    """Records of methods whose steps differ from those of dense training."""
    runs = of_one_seed()
    runs = dataclasses.replace(runs, arms={arm: runs.arms[arm] for arm in ("dense", "FST")})
    assert not runs.equal_time and "the run of none is clearly faster" in evidence.losing([runs])[0]
    run = runs.arms["FST"][0]
    longer = dataclasses.replace(run.config.train, steps=run.config.train.steps + 1)
    config = dataclasses.replace(run.config, train=longer)
    run = dataclasses.replace(run, config=config)
    timed = dataclasses.replace(runs, arms=runs.arms | {"FST": {0: run}})
    assert timed.equal_time and "its steps 1.00 times as fast" in evidence.summary(timed)
    assert "with more steps, which were to take the time of dense" in evidence.losing([timed])[0]
    assert "to take the time" not in evidence.summary(timed), "it took it, but for a step"
    shorter = dataclasses.replace(run.config, train=dataclasses.replace(longer, steps=875))
    mixed = {"FST": {0: dataclasses.replace(run, config=shorter)}}
    assert not evidence.losing([dataclasses.replace(runs, arms=runs.arms | mixed)])
    assert study.trade([timed], Path("nowhere")) == []


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
    arms = image.replace(".png", "_arms.png")
    assert f"({image})" in page and f"({arms})" in page
    assert all((elsewhere / file).read_bytes().startswith(b"\x89PNG") for file in (image, arms))


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


def test_what_of_a_predicate_was_written_after_results_were_known():
    """By what was stated before the runs, or else by what the result was recorded with."""
    plain, effect, other = "loss of a minus b < 0", "loss of a minus b < 0 by 0.1", "loss of a minus c < 0"
    for before, now, what in (
        ([plain], [plain], ""),
        ([plain], [effect], "effects"),
        ([plain], [plain, other], "comparisons"),
    ):
        for earlier in ({"registered": {"comparisons": before}}, {"recorded with": before}):
            found = {"statement": {"comparisons": now, "hash": "1"}, **earlier}
            assert text.rewritten(found) == what
    assert text.rewritten({"statement": {"comparisons": [plain]}}) == ""


def test_pages_mark_what_was_written_after_results_were_known():
    found = reproduction.recorded()
    later = [(r["paper"], r["name"]) for _, r in found if text.rewritten(r)]
    assert later and reproduction.page(found).count("after results were known\n") == len(later)
    lines = [
        line.split(" | ") for line in reproduction.comparison(found).splitlines() if line.startswith("| [")
    ]
    marked = [line for line in lines if line[5] in ("comparisons", "effects")]
    assert len(marked) == len(later)
    controls, wide = (
        evidence.claim(evidence.read(REPOSITORY / "docs/evidence" / name))
        for name in ("124m-controls", "wide")
    )
    assert "**, by comparisons that were rewritten after results were known" in controls
    assert "after results were known" not in wide and "only words differ, not the comparisons" in wide


def test_a_verdict_on_one_thing_is_said_once():
    both = {"verdict": "refuted", "on the mechanism": "confirmed", "on loss": "refuted"}
    assert text.verdict(both) == "Refuted (on the mechanism: confirmed; on loss: refuted)"
    assert text.verdict(both | {"on the mechanism": None}) == "Refuted (on loss)"


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
    assert "curves of its runs" not in reproduction.page(reproduction.recorded())


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


def test_the_largest_size_leads(tmp_path):
    """And what it reverses of a smaller one is marked, the claim before its comparisons."""
    path = next(
        path for path, r in reproduction.recorded() if r["name"] == "refresh_period" and len(r["seeds"]) == 8
    )
    small = result.read(path) | {"date": "2030-01-01"}
    large = json.loads(json.dumps(small)) | {"size": "gpu", "date": "2020-01-01", "seeds": [0, 1, 2]}
    large["hardware"]["name"] = "some-gpu"
    first = small["findings"][0]["claim"]
    assert [f["verdict"] for f in small["findings"]] == ["confirmed", "confirmed"]
    page = reproduction.page([(path, small), (path, large)])
    assert page.index("### refresh_period gpu on some-gpu") < page.index("### refresh_period cpu on")
    assert "| [fst/refresh_period](#refresh_period-gpu-on-some-gpu) |" in page
    assert "1 of 1 claims were run at a size above `cpu`" in page
    assert reproduction.reversed_by(large, small) == []
    large["findings"][0]["verdict"] = "refuted"
    assert reproduction.reversed_by(large, small) == [f"{first}: confirmed at cpu, refuted at gpu"]
    large["verdict"] = "refuted"
    assert "**the claim, confirmed at cpu**" in reproduction.page([(path, small), (path, large)])
    large["verdict"] = large["findings"][0]["verdict"] = "inconclusive"
    assert reproduction.reversed_by(large, small) == []


def test_recorded_results_are_of_claims_that_exist():
    known = {(file.parent.name, file.stem) for file in ablations.listing()}
    for path, found in reproduction.recorded():
        assert (found["paper"], found["name"]) in known, path
        assert found["size"] != "smoke"
        assert all(path.with_name(path.stem + kind).exists() for kind in (".csv", ".png", "_arms.png"))


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
