"""Ablations whose first arm was trained before, or comes from elsewhere."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import ablate, import_model
from experiments import config as configs
from experiments import export as exporting
from experiments.ablations import ablation as ablations
from experiments.ablations import pretrained, reproduction
from experiments.errors import UserError
from experiments.training import stored
from experiments.training.loop import train
from tests.experiments.ablate.conftest import run

CLAIM = '''
"""A claim about retraining: its first line."""

import dataclasses

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation
from experiments.ablations.verdicts import less
from experiments.config import Optim, Train
from experiments.data import text
from experiments.models import decoder


def ablation(size):
    base = dataclasses.replace(
        size.base,
        model=decoder.Config(layers=1, d=8, f=16, heads=1),
        data=text.Config(corpus={corpus!r}, root={root!r}, seq=16, batch=4),
        optim=Optim(lr=1e-3, warmup=1),
        train=Train(
            steps=8, eval_every=4, eval_batches=1, monitor_every=2, probe_every=0, checkpoint_every=0
        ),
    )
    size = dataclasses.replace(size, base=base)
    return Ablation(
        claim="Retraining helps.", source="arXiv 0000.00000", expects="Nothing.", differs="All.",
        arms={{
            "dense": size.arm(s24.methods.Dense(), monitor_mask="top-2"),
            "ast": size.arm(s24.methods.AST(decay=1e-4, decay_steps=2), {{"implementation": "ffi"}}),
        }},
        start="dense", seeds=(0, 1), verdict=less("ast", "dense", "val_sparse"), curve=("eval", "sparse"),
    )
'''


@pytest.fixture
def claim(shared, tmp_path) -> Path:
    path = tmp_path / "retraining_claim.py"
    path.write_text(CLAIM.format(corpus=str(shared / "corpus"), root=str(shared / "data")))
    return path


def test_arms_have_the_model_of_the_run_and_the_rest_of_their_size(claim, finished):
    own = configs.read(finished / "config.json")
    before = ablations.load(f"{claim}:smoke")
    after = pretrained.started(before, finished).ablation
    assert after.statement == before.ablation.statement, "what is claimed stays, and what was registered"
    dense, ast = (after.arms[name] for name in ("dense", "ast"))
    assert dense.model == own.model != before.ablation.arms["dense"].model
    assert ast.model == dataclasses.replace(own.model, implementation="ffi") != own.model
    assert ast.data == before.ablation.arms["ast"].data and ast.optim == before.ablation.arms["ast"].optim
    assert ast.method == before.ablation.arms["ast"].method and ast.train.steps == 8
    assert dense.train.steps == 1 and dense.train.start_from == str(finished.resolve())
    assert after.pretrained == ("tiny by FST, 1 block of d = 16 and f = 32, after 12 steps of 4 x 32 tokens")
    step = finished / "checkpoints" / "5"
    assert pretrained.started(before, step).ablation.arms["dense"].train.start_from == str(step.resolve())


def test_what_is_no_start(claim, finished, done, tmp_path):
    named = ablations.load(f"{claim}:smoke")
    with pytest.raises(UserError, match="do not start from a trained model: leave out --start"):
        pretrained.started(ablations.load(f"{done[0]}:smoke"), finished)
    with pytest.raises(UserError, match="There is no folder"):
        pretrained.started(named, tmp_path / "none")
    with pytest.raises(UserError, match="has no checkpoint of step 4"):
        pretrained.started(named, finished / "checkpoints" / "4")


@pytest.mark.slow
def test_tokens_are_those_of_the_run(claim, finished, tmp_path, capsys):
    """Also where its tokenizer was trained as it began: of less text another one would be."""
    pytest.importorskip("tokenizers")
    config = configs.read(finished / "config.json")
    data = dataclasses.replace(config.data, tokenizer="train:384")
    steps = dataclasses.replace(config.train, steps=3, probe_every=0, monitor_every=0)
    source = tmp_path / "words"
    train(dataclasses.replace(config, data=data, train=steps), source, show=False)
    arm = pretrained.started(ablations.load(f"{claim}:smoke"), source).ablation.arms["ast"]
    assert arm.data.tokenizer == str(source / "tokenizer.json") and arm.model.vocabulary == 384
    status, said = run(
        capsys, f"{claim}:smoke", "--start", source, "--only", "dense/0", "--out", tmp_path / "out"
    )
    assert status == 0, said
    params = [stored.load_state(place)[3]["params"] for place in (source, tmp_path / "out/dense/seed0")]
    jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.mark.slow
@pytest.mark.parametrize("imported", [False, True])
def test_retraining_of_a_trained_and_of_an_imported_model(
    imported, claim, finished, tmp_path, capsys, elsewhere
):
    """The first arm is that model bit for bit; the others start from it, in processes of their own too."""
    source = finished
    if imported:
        pytest.importorskip("safetensors")
        pytest.importorskip("tokenizers")
        source = tmp_path / "imported"
        exporting.main([str(finished), "--out", str(tmp_path / "huggingface")])
        import_model.main([str(tmp_path / "huggingface"), "--out", str(source), "--seq", "16"])
        assert f"configs/ast/retraining.py --start {source}" in capsys.readouterr().out
    out = tmp_path / "out"
    jobs = [] if imported else ["--jobs", "2"]
    argv = ["--seeds", "0", "--start", source, "--out", out, "--record", *jobs]
    status, said = run(capsys, f"{claim}:cpu", *argv)
    assert status == 0, said
    params = [stored.load_state(place)[3]["params"] for place in (source, out / "dense/seed0")]
    jax.tree.map(np.testing.assert_array_equal, *params)
    result = json.loads((out / "result.json").read_text())
    assert result["pretrained"].endswith("imported" if imported else "after 12 steps of 4 x 32 tokens")
    assert result["metrics"]["dense"]["0"]["val_sparse"] != result["metrics"]["ast"]["0"]["val_sparse"]
    ast = configs.read(out / "ast/seed0/config.json")
    assert ast.train.start_from == str(out / "dense/seed0")
    rows = [json.loads(line) for line in (out / "ast/seed0/metrics.jsonl").read_text().splitlines()]
    assert rows[1]["kind"] == "event" and rows[1]["first"]["dense_loss"] > 0
    assert f"All arms start from {result['pretrained']}" in (out / "report.md").read_text()
    copied = tmp_path / "another machine"  # with records alone, which name the folder where they started
    for file in (out / "statement.json", *out.glob("*/seed0.json")):
        place = copied / file.relative_to(out)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    status, said = run(capsys, f"{claim}:cpu", *argv[:4], "--out", copied, "--resume")
    assert status == 0, said
    assert json.loads((copied / "result.json").read_text())["metrics"] == result["metrics"]
    (copied / "ast/seed0.json").unlink()
    status, said = run(capsys, f"{claim}:cpu", *argv[:4], "--out", copied, "--resume")
    assert status == 2 and "ast/0 is still to be trained and starts from dense/0, of which this" in said
    kept = shutil.copytree(out / "ast/seed0", tmp_path / "kept/ast/seed0") / "config.json"
    kept.write_text(kept.read_text().replace(str(out / "dense/seed0"), str(copied / "dense/seed0")))
    reused = ["--out", copied, "--resume", "--reuse", tmp_path / "kept"]
    status, said = run(capsys, f"{claim}:cpu", *argv[:4], *reused)
    assert status == 0 and "Reused, with the same config" in said, said
    ((path, recorded),) = reproduction.recorded(elsewhere / "reproduction")
    assert "_cpu_pretrained_" in path.name
    page = reproduction.page([(path, recorded)])
    heading = next(line for line in page.splitlines() if line.startswith("### "))
    assert "cpu, pretrained, on" in heading and "](#retraining_claim-cpu-pretrained-on-" in page


def test_processes_of_their_own_are_told(claim, finished, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(finished.parent)
    assert (
        ablate.main([f"{claim}:smoke", "--start", finished.name, "--array", "--out", str(tmp_path / "o")])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(f"--start {finished.resolve()} " in line for line in lines)
