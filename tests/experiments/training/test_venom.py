"""A run whose neurons are rearranged in its middle: continued from any checkpoint it ends the same."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments import config as configs
from experiments import evaluate
from experiments.analysis import comparison, runs
from experiments.analysis.outcome import outcome
from experiments.errors import UserError
from experiments.training import evaluator, stored
from experiments.training.checkpoint import Checkpoints
from experiments.training.loop import train
from experiments.training.step import Program
from tests.experiments.conftest import whole_state

pytestmark = pytest.mark.slow

METHOD = s24.methods.Venom(v=16, m=8, clusters=4, dense_warmup=4, sparse_share=0.5)


@pytest.fixture(scope="module")
def venom(config):
    """Twelve steps: dense up to step 4, where neurons move, sparse up to step 8, then dense."""
    every = dataclasses.replace(config.train, checkpoint_every=2)
    return dataclasses.replace(config, name="venom", method=METHOD, train=every)


@pytest.fixture(scope="module")
def quiet(venom):
    """The same without what only watches it, which changes no step."""
    train = dataclasses.replace(venom.train, monitor_every=0, probe_every=0, eval_every=0, eval_batches=1)
    return dataclasses.replace(venom, train=train)


@pytest.fixture(scope="module")
def whole(venom, tmp_path_factory):
    return train(venom, tmp_path_factory.mktemp("venom") / "run", show=False).out


def checkpoint(out, step):
    return stored.load_state(out, step)[3]


def places(state):
    return [v[...] for path, v in nnx.to_flat_state(state["sparse"]) if path[-1] == "arranged"]


def test_neurons_move_as_the_sparse_phase_begins(whole):
    before, after = checkpoint(whole, 4), checkpoint(whole, 6)
    assert not any(places(before)) and all(places(after))
    rows = runs.read_run(whole, "venom").rows
    phases = {row["step"]: row["phase"] for row in rows["train"]}
    assert [phases[s] for s in (3, 4, 7, 8)] == ["dense_warmup", "sparse", "sparse", "dense"]
    probes = rows["probe"]
    assert all({"density", "density_0", "F2_lost", "B2_lost"} <= set(p) for p in probes)
    assert [("cosine" in p) for p in probes] == [p["step"] == 6 for p in probes]


def test_losses_that_depend_on_later_tokens_are_marked(whole, capsys):
    """In the rows of a run, in what launch and evaluate print, and in a report."""
    rows = runs.read_run(whole, "venom").rows
    for row in rows["train"]:
        assert row.get("no_language_model_loss") == (["loss"] if row["phase"] == "sparse" else None)
    assert all(row["no_language_model_loss"] == ["sparse"] for row in rows["eval"])
    assert all({"leak", "leak_share"} <= set(row) for row in rows["eval"])  # hardly any after so few steps
    evaluate.main([str(whole), "--batches", "2"])
    printed = capsys.readouterr().out.splitlines()
    dense, sparse = (next(line for line in printed if line.startswith(f"  {n}")) for n in ("dense", "sparse"))
    assert "no language-model loss" in sparse and "no language-model loss" not in dense
    assert any(line.startswith("  leak") for line in printed)
    text = comparison.text([runs.read_run(whole, "venom")])
    (row,) = [line for line in text.splitlines() if "loss, sparse" in line]
    assert f"{rows['eval'][-1]['sparse']:.3f} *" in row
    assert "Marked *: no language-model loss; it may depend on later tokens." in text
    measured = outcome(runs.read_run(whole, "venom"))
    assert measured["leak"] == rows["eval"][-1]["leak"]
    assert measured["val_causal"] == measured["val_sparse"] + measured["leak"]


def test_neurons_may_move_again(quiet, whole, tmp_path):
    """At steps 4 and 6; the state before step 6 is that of the run that moves them once."""
    method = dataclasses.replace(METHOD, arrange_every=3)
    out = train(dataclasses.replace(quiet, method=method), tmp_path / "run", show=False).out
    jax.tree.map(np.testing.assert_array_equal, checkpoint(out, 6)["params"], checkpoint(whole, 6)["params"])
    kernels = [checkpoint(o, 8)["params"]["blocks"][0]["ffn"]["up"]["kernel"][...] for o in (out, whole)]
    assert not np.array_equal(*kernels)


def norms(state):
    return np.stack([v[...] for path, v in nnx.to_flat_state(state["sparse"]) if path[-1] == "norms"])


def test_a_running_statistic_moves_in_the_sparse_phase_and_is_resumed(quiet, tmp_path):
    """In two micro-batches, in layers that are scanned and computed again in the backward pass."""
    run = dataclasses.replace(
        quiet,
        method=dataclasses.replace(METHOD, columns="statistic"),
        model=dataclasses.replace(quiet.model, scan=True, remat=True),
        train=dataclasses.replace(quiet.train, accumulate=2),
    )
    out = train(run, tmp_path / "run", show=False).out
    at = {step: norms(checkpoint(out, step)) for step in (2, 4, 6, 8, 12)}
    assert not at[2].any() and not at[4].any()  # neurons are arranged as the sparse phase begins
    assert at[6].any() and (at[6] != at[8]).any()
    np.testing.assert_array_equal(at[8], at[12])
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    for kept in (copy / "checkpoints").iterdir():
        if kept.name.isdigit() and int(kept.name) > 6:
            shutil.rmtree(kept)
    train(run, copy, resume=True, show=False)
    jax.tree.map(np.testing.assert_array_equal, whole_state(copy, 12), whole_state(out, 12))


@pytest.mark.parametrize(("changed", "why"), [({"m": 7}, "multiple of 7"), ({"v": 256}, "fewer than v=256")])
def test_blocks_that_do_not_fit_are_found_before_the_dense_warm_up(venom, tmp_path, changed, why):
    wrong = dataclasses.replace(venom, method=dataclasses.replace(METHOD, **changed))
    with pytest.raises(UserError, match=rf"This (model|training step) cannot be built: .*{why}"):
        train(wrong, tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [2, 4, 6])
def test_resume_before_at_and_after_the_move(whole, quiet, tmp_path, step):
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    configs.write(quiet, copy / "config.json")
    for kept in (copy / "checkpoints").iterdir():
        if kept.name.isdigit() and int(kept.name) > step:
            shutil.rmtree(kept)
    train(quiet, copy, resume=True, show=False)
    jax.tree.map(np.testing.assert_array_equal, whole_state(copy, 12), whole_state(whole, 12))


def test_moving_neurons_changes_no_loss(whole, venom):
    program, state = Program(venom), whole_state(whole, 4)
    losses = evaluator.Evaluator(program, BATCHES)
    before = losses(state["params"], state["sparse"])["dense"]
    after = program.prepare(state, 4)
    np.testing.assert_allclose(losses(after["params"], after["sparse"])["dense"], before, rtol=1e-5)
    moved = jax.tree.map(np.asarray, after["params"])
    again = program.prepare(after, 4)  # once only
    jax.tree.map(np.testing.assert_array_equal, again["params"], moved)


BATCHES = [np.random.default_rng(0).integers(0, 256, (4, 33), np.int32)]


def test_a_sparse_phase_without_the_move_is_refused(whole, venom):
    program, state = Program(venom), checkpoint(whole, 6)
    program.check_arranged(state)
    flat = nnx.to_flat_state(state["sparse"])
    blank = [(p, v.replace(np.zeros_like(v[...])) if p[-1] == "arranged" else v) for p, v in flat]
    with pytest.raises(UserError, match="the neurons were never arranged"):
        program.check_arranged(state | {"sparse": nnx.from_flat_state(blank)})


def test_a_damaged_scale_is_refused(whole, venom, tmp_path, monkeypatch):
    """By whatever reads the checkpoint; nothing of the run changes."""
    out, restore = tmp_path / "run", Checkpoints.restore
    shutil.copytree(whole, out)
    with Checkpoints(out / "checkpoints") as checkpoints:
        for later in [step for step in checkpoints.manager.all_steps() if step > 6]:
            checkpoints.manager.delete(later)

    def damaged(*arguments, **named):
        state = restore(*arguments, **named)
        flat = nnx.to_flat_state(state["sparse"])
        scaled = [(p, v.replace(-v[...]) if p[-1] == "scale" else v) for p, v in flat]
        return state | {"sparse": nnx.from_flat_state(scaled)}

    monkeypatch.setattr(Checkpoints, "restore", damaged)
    metrics = (out / "metrics.jsonl").read_text()
    for read in (lambda: checkpoint(out, 6), lambda: train(venom, out, resume=True, show=False)):
        with pytest.raises(UserError, match=r"'scale'.* is -.*must be finite and greater than 0"):
            read()
    assert (out / "metrics.jsonl").read_text() == metrics
