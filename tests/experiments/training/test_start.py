"""Runs that start from other runs, that distil, and that have a phase of adapters."""

import dataclasses
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments.ablations.ablation import SIZES, Ablation
from experiments.ablations.runs import Slot, jobs_of, run_in_parallel
from experiments.ablations.verdicts import less
from experiments.errors import UserError
from experiments.models import decoder
from experiments.training import rundir
from experiments.training import start as starts
from experiments.training.loop import train
from experiments.training.step import Program, cross_entropy, loss_of
from experiments.training.stored import load_state
from tests.experiments.conftest import whole_state

AST = s24.methods.AST(decay=0.1, decay_steps=3, refresh_every=2, slorb=16)


def short(config, method, **train):
    """Six steps, with a checkpoint after three and nothing measured but at the end."""
    quiet = {"eval_every": 0, "monitor_every": 0, "probe_every": 0, "eval_batches": 1}
    fields = {"steps": 6, "checkpoint_every": 3, **quiet, **train}
    return dataclasses.replace(config, method=method, train=dataclasses.replace(config.train, **fields))


@pytest.mark.slow
def test_a_run_with_late_adapters_resumes_bit_for_bit(config, tmp_path):
    """It stops in the phase without adapters and goes on into the one with them."""
    config = short(config, s24.methods.SLoPe(adapter_share=0.34, refresh_every=2, rank=4))
    out = train(config, tmp_path / "whole", show=False).out
    waiting, trained = (whole_state(out, step) for step in (3, 6))
    rows = rundir.read_metrics(out)
    shutil.rmtree(out / "checkpoints" / "6")
    assert train(config, out, resume=True, show=False).finished
    assert losses(rows) == losses(rundir.read_metrics(out))
    assert [phase for _, phase, _ in losses(rows)] == ["sparse"] * 4 + ["adapters"] * 2
    jax.tree.map(np.testing.assert_array_equal, trained, whole_state(out, 6))
    check_adapters(waiting, trained)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["there", "gone", "longer"])
def test_a_run_goes_on_without_the_run_that_it_started_from(source, config, finished, tmp_path):
    """What is watched since the start is left out then, and was since another one."""
    first = shutil.copytree(finished, tmp_path / "first")
    config = short(config, AST, start_from=str(first), monitor_every=1)
    out = train(config, tmp_path / "out", show=False).out
    whole = rundir.read_metrics(out)
    shutil.rmtree(out / "checkpoints" / "6")
    if source == "gone":
        shutil.rmtree(first)
    if source == "longer":
        (first / "checkpoints" / "10").rename(first / "checkpoints" / "13")
    assert train(config, out, resume=True, show=False).finished
    rows = rundir.read_metrics(out)
    assert losses(rows) == losses(whole)
    since = [
        [row.get("flipped_since_start") for row in some if row["kind"] == "monitor"] for some in (whole, rows)
    ]
    assert None not in since[0] and since[1] == since[0][: 6 if source == "there" else 3] + (
        [] if source == "there" else [None] * 3
    )


@pytest.mark.slow
def test_perturbed_parameters_are_off_by_rounding(config):
    def start(perturb, seed=0):
        own = dataclasses.replace(config, seed=seed, train=dataclasses.replace(config.train, perturb=perturb))
        return starts.initial_state(Program(own))["params"]

    exact, moved, again, other = start(0.0), start(1e-6), start(1e-6), start(1e-6, seed=1)
    jax.tree.map(np.testing.assert_array_equal, moved, again)
    for a, b, c in zip(*map(jax.tree.leaves, (exact, moved, other)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        relative = (np.asarray(b, np.float64) - np.asarray(a, np.float64)) / np.abs(np.asarray(a)).max()
        assert 0 < np.abs(relative).max() < 1e-5
        assert a.ndim < 2 or not np.array_equal(b, c)
    flat = np.concatenate(
        [np.ravel(b / a - 1) for a, b in zip(*map(jax.tree.leaves, (exact, moved)), strict=True)]
    )
    assert np.std(flat) == pytest.approx(1e-6, rel=0.05)


def losses(rows):
    return [(row["step"], row["phase"], row["loss"]) for row in rows if row["kind"] == "train"]


def check_adapters(waiting, trained):
    """Untouched for four steps, moments too, then trained."""
    flat = [dict(nnx.to_flat_state(state["params"])) for state in (waiting, trained)]
    moments = [dict(nnx.to_flat_state(optax.tree.get(state["opt"], "mu"))) for state in (waiting, trained)]
    paths = [path for path in flat[0] if "adapters" in path]
    assert len(paths) == 4
    for path in paths:
        before, after = (np.asarray(params[path][...]) for params in flat)
        assert path[-1] == "left" or not before.any()
        assert (before != after).any()
        assert not np.asarray(moments[0][path][...]).any() and np.asarray(moments[1][path][...]).any()


@pytest.mark.slow
def test_the_start_is_the_other_run_with_masks_of_its_weights(config, finished):
    program = Program(short(config, AST, start_from=f"{finished}/checkpoints/10"))
    state = starts.initial_state(program)
    there = dict(nnx.to_flat_state(load_state(finished, 10)[3]["params"]))
    params, sparse, teacher = (
        dict(nnx.to_flat_state(state[part])) for part in ("params", "sparse", "teacher")
    )
    for path, value in there.items():
        for copy in (params, teacher):
            np.testing.assert_array_equal(copy[path][...], value[...])
    masks = {path: mask[...] for path, mask in sparse.items() if path[-1] == "mask"}
    assert len(masks) == 2
    for path, mask in masks.items():
        np.testing.assert_array_equal(mask, s24.mask24(params[(*path[:-2], "kernel")][...], 0))
    assert state["step"] == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state["opt"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "start", "message"),
    [
        ({"d": 32}, "", r"parameter blocks.0.attention.* is \(16, 16\) in .* and \(32, 32\) in this model"),
        ({}, "/checkpoints/7", "has no checkpoint of step 7"),
    ],
)
def test_starts_that_do_not_fit(model, start, message, config, finished, tmp_path):
    config = short(config, AST, start_from=f"{finished}{start}")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    with pytest.raises(UserError, match=message):
        starts.initial_state(Program(config))


@pytest.mark.slow
def test_an_unfinished_run_is_no_start(config, finished, tmp_path):
    part = shutil.copytree(finished, tmp_path / "part")
    shutil.rmtree(part / "checkpoints" / "12")
    program = Program(short(config, AST, start_from=str(part)))
    with pytest.raises(UserError, match="has not finished, its newest checkpoint is of step 10 of 12"):
        starts.initial_state(program)


def test_distilling_needs_a_teacher(config, tmp_path):
    with pytest.raises(UserError, match=r"AST with distill=0.67 learns from a trained dense model: name its"):
        train(short(config, s24.methods.AST()), tmp_path / "out", show=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_distilled_loss_is_not_told_in_bits_per_byte(config, finished, tmp_path):
    out = train(short(config, AST, steps=3, start_from=str(finished)), tmp_path / "out", show=False).out
    trained = [row for row in rundir.read_metrics(out) if row["kind"] == "train"]
    assert trained and not any("bits_per_byte" in row for row in trained)
    plain = short(config, dataclasses.replace(AST, distill=0.0), steps=3, start_from=str(finished))
    out = train(plain, tmp_path / "plain", show=False).out
    assert all("bits_per_byte" in row for row in rundir.read_metrics(out) if row["kind"] == "train")


def test_the_distilled_loss():
    """(1 - a) CE + a t^2 KL(teacher || student), both at temperature t, mean over tokens."""
    rng = np.random.default_rng(0)
    own, taught = (jnp.asarray(rng.normal(size=(2, 5, 7)), jnp.float32) for _ in range(2))
    tokens = jnp.asarray(rng.integers(0, 7, (2, 6)))
    method = s24.methods.AST(distill=0.25, temperature=3.0)
    training = method.training(10)
    assert training.teacher == "distill" and not s24.methods.AST(distill=0.0).training(10).teacher
    got = training.loss(cross_entropy(own, tokens), own, taught)
    p, q = (np.asarray(jax.nn.softmax(x / 3), np.float64) for x in (taught, own))
    divergence = (p * np.log(p / q)).sum(-1).mean()
    want = 0.75 * float(loss_of(lambda _: own, tokens)) + 0.25 * 9 * divergence
    assert float(got) == pytest.approx(want, rel=1e-5)


def test_a_low_rank_decoder(config):
    """Every linear layer of a block has two factors, queries, keys and values their own."""
    model = decoder.Config(layers=1, d=16, f=32, heads=2, ffn="swiglu", rank=4, scan=True)
    config = dataclasses.replace(config, method=s24.methods.Dense(), model=model)
    made = nnx.eval_shape(config.create_model)
    logits = nnx.eval_shape(lambda made: made(jnp.zeros((2, 8), jnp.int32)), made)
    assert logits.shape == (2, 8, config.data.vocabulary.size)
    kernels = {path: v.shape for path, v in nnx.to_flat_state(nnx.state(made, nnx.Param)) if "kernel" in path}
    assert len(kernels) == 7 * 2
    assert all(4 in shape[-2:] for shape in kernels.values())
    with pytest.raises(UserError, match=r"model.rank is 0 .full. or at most model.d = 16, got 17"):
        dataclasses.replace(model, rank=17)


# ---- ablations


WORDS = dict.fromkeys(("claim", "source", "expects", "differs"), "words")


@pytest.fixture
def jobs(tmp_path):
    """A dense and an AST run of two seeds, by label."""
    size = SIZES["smoke"]
    arms = {"dense": size.arm(s24.methods.Dense(), steps=8), "ast": size.arm(s24.methods.AST())}
    made = Ablation(**WORDS, arms=arms, verdict=less("ast", "dense", "val_sparse"), start="dense")
    return {job.label: job for job in jobs_of(made, (0, 1), tmp_path)}


@pytest.mark.slow
def test_arms_start_from_the_first_one_of_their_seed(jobs):
    for seed in (0, 1):
        dense, ast = jobs[f"dense/{seed}"], jobs[f"ast/{seed}"]
        assert ast.needs == dense and dense.needs is None
        assert ast.config.train.start_from == str(dense.out) and not dense.config.train.start_from
    arms = {arm: jobs[f"{arm}/0"].config for arm in ("dense", "ast")}
    for start, order in (("ast", arms), ("none", arms), ("dense", {"dense": arms["dense"]})):
        with pytest.raises(UserError, match=f"cannot start from {start!r}: it must be the first"):
            Ablation(**WORDS, arms=order, verdict=less("dense", "dense"), start=start)


@pytest.mark.slow
def test_in_parallel_arms_wait_for_their_start(jobs, tmp_path):
    """Each run is a process that notes its name and leaves its last checkpoint; dense/1 fails."""
    program = f"""
import pathlib, sys
label = sys.argv[-1]
folder = pathlib.Path({str(tmp_path)!r})
with (folder / "order").open("a") as file:
    file.write(label + " ")
if label != "dense/1":
    arm, seed = label.split("/")
    (folder / arm / f"seed{{seed}}" / "checkpoints" / ("8" if arm == "dense" else "12")).mkdir(parents=True)
"""
    command = [sys.executable, "-c", program]
    failed = run_in_parallel(list(jobs.values()), lambda job: command, [Slot({})] * 2)
    assert [job.label for job in failed] == ["dense/1", "ast/1", "replicate/1"]
    order = (tmp_path / "order").read_text().split()
    assert sorted(order) == ["ast/0", "dense/0", "dense/1", "replicate/0"]
    assert order.index("dense/0") < min(order.index("ast/0"), order.index("replicate/0"))
