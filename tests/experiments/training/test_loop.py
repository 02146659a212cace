"""Whole runs: what they write, how they stop and resume, what is made of them."""

import asyncio
import dataclasses
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import nnx

import jax_sparse24 as s24
from experiments import config as configs
from experiments import evaluate, generate, report
from experiments.analysis import comparison, sampling
from experiments.cli import STOPPED
from experiments.data import batches as datas
from experiments.errors import UserError
from experiments.training import loop, metrics, rundir, speed, stored
from experiments.training.checkpoint import Checkpoints, quiet_failure, sums_of_bits
from experiments.training.loop import Diverged, train
from experiments.training.metrics import Progress
from jax_sparse24.measure.nvml import Reading
from tests.experiments.conftest import REPOSITORY, python, whole_state

pytestmark = pytest.mark.slow


def rows(out, kind):
    return [row for row in rundir.read_metrics(out) if row["kind"] == kind]


def without_speed(row):
    speeds = ("steps_per_s", "tokens_per_s", "joules_per_step", "seconds")
    return {key: value for key, value in row.items() if key not in speeds}


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run that a test may damage."""
    return shutil.copytree(finished, tmp_path / "copy")


def test_what_a_run_leaves(finished, config):
    assert configs.read(finished / "config.json") == config
    environment = json.loads((finished / "environment.json").read_text())
    assert {"python", "devices", "packages", "command"} <= set(environment)
    training = rows(finished, "train")
    assert [row["step"] for row in training] == list(range(12))
    assert [row["phase"] for row in training] == ["sparse"] * 9 + ["dense"] * 3
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in training)
    assert training[0]["lr"] == 0 and training[2]["lr"] == pytest.approx(1e-3)
    assert all(row["tokens_per_s"] > 0 for row in training[1:])
    assert [row["step"] for row in rows(finished, "monitor")] == [0, 3, 6, 9]
    assert all(
        0 <= row["flip_rate"] <= 1 and 0.5 < row["kept_share"] <= 1 for row in rows(finished, "monitor")
    )
    assert all(
        row["rising"] == (row["loss_change"] > 0) and row["seconds"] > 0 for row in rows(finished, "monitor")
    )
    assert [row["step"] for row in rows(finished, "probe")] == [0, 6]
    assert all(-1 <= row["cosine"] <= 1 and 0 <= row["noise"] < 2 for row in rows(finished, "probe"))
    assert [row["step"] for row in rows(finished, "eval")] == [5, 10, 12]
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["10", "12", "5"]


def test_resume_in_a_new_process_is_bit_exact(finished, copy, shared):
    """From step 5 to the end: across refreshes at 6 and 8 and the switch to the dense phase at 9."""
    for step in ("10", "12"):
        shutil.rmtree(copy / "checkpoints" / step)
    result = python("experiments.launch", "--resume", copy, "--no-tune")
    assert result.returncode == 0, result.stderr
    for step in (10, 12):
        states = [whole_state(out, step) for out in (finished, copy)]
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(states[0]), jax.tree.leaves(states[1]), strict=True
        ):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))
        position = "checkpoints/{}/data/process_0-of-1.json".format(step)  # noqa: UP032
        assert json.loads((finished / position).read_text()) == json.loads((copy / position).read_text())
    for kind in ("train", "monitor", "probe", "eval"):
        one, other = ([without_speed(row) for row in rows(out, kind)] for out in (finished, copy))
        assert one == other
    assert [row["event"] for row in rows(copy, "event")] == ["start", "resume"]


def test_resume_of_a_complete_run_changes_nothing(copy, config):
    before = rows(copy, "train")
    result = train(config, copy, resume=True, show=False)
    assert result.finished and result.step == 12
    assert rows(copy, "train") == before


def test_sigterm_saves_and_exits_cleanly(shared, tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "experiments.launch",
        str(shared / "tiny.py"),
        "--out",
        str(out),
        "--no-tune",
    ]
    command += ["--train.steps", "100000", "--train.eval-every", "0", "--train.checkpoint-every", "0"]
    command += ["--train.monitor-every", "0", "--train.probe-every", "0"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.time() + 200
        while time.time() < deadline and not (
            (out / "metrics.jsonl").exists() and len(rows(out, "train")) > 5
        ):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == STOPPED == 75, errors
    assert "Traceback" not in errors
    (saved,) = [int(path.name) for path in (out / "checkpoints").iterdir()]
    assert f"saved at step {saved}" in printed and f"--resume {out}" in printed
    assert len(rows(out, "train")) == saved
    assert int(stored.load_state(out)[3]["step"]) == saved


def test_a_checkpoint_from_before_layers_had_modes_and_ages_is_restored(tmp_path):
    """What it lacks says: sparse mode, masks that are not due, and no step that was told."""
    old = {"step": jnp.int32(3), "sparse": {"up": {"mask": jnp.ones((4, 4), bool)}}}
    now = {"refreshed": jnp.int32(9), "dense_from": jnp.uint32(9), "checksum": jnp.full(2, 9, jnp.uint32)}
    new = {**old, "sparse": {"up": old["sparse"]["up"] | now}}
    batches = datas.Batches(grain.MapDataset.range(3).to_iter_dataset())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), new)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, old, batches)
        checkpoints.manager.wait_until_finished()
        found = checkpoints.restore(3, abstract)
        with pytest.raises(UserError, match="sparse/up/scale is absent"):
            more = abstract["sparse"]["up"] | {"scale": jax.ShapeDtypeStruct((), jnp.float32)}
            checkpoints.restore(3, {**abstract, "sparse": {"up": more}})
    assert found["sparse"]["up"]["mask"].all() and int(found["step"]) == 3
    for name, like in now.items():
        value = found["sparse"]["up"][name]
        assert value.shape == like.shape and value.dtype == like.dtype and not value.any()


def test_steps_that_reuse_the_memory_leave_a_checkpoint_alone(tmp_path):
    """A checkpoint is written while the next steps, which donate the state, already run."""
    step = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    state = {str(i): jnp.zeros((500, 500)) for i in range(20)}
    batches = datas.Batches(grain.MapDataset.range(3).to_iter_dataset())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, batches)
        for _ in range(10):
            state = step(state)
        jax.block_until_ready(state)
        checkpoints.manager.wait_until_finished()
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        assert not any(x.any() for x in checkpoints.restore(1, abstract).values())


def test_truncated_checkpoint(copy):
    for file in (copy / "checkpoints" / "12" / "state").rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)
    result = python("experiments.evaluate", copy)
    assert result.returncode == 2
    assert "checkpoints/12 cannot be read" in result.stderr and "continue from step 10" in result.stderr
    assert "Traceback" not in result.stderr
    shutil.rmtree(copy / "checkpoints" / "12")
    assert stored.load_state(copy)[2] == 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_bit_of_a_checkpoint_is_found(copy):
    """Neither orbax nor tensorstore finds it: a run went on from other parameters."""
    step, found = 12, []
    state = whole_state(copy, step)
    for file in (copy / "checkpoints" / str(step)).rglob("ocdbt.process_0/d/*"):
        whole = file.read_bytes()
        for at in range(5, len(whole), len(whole) // 3):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                same = whole_state(copy, step)
            except UserError as error:
                found.append(str(error))
            else:  # in what is not read
                jax.tree.map(np.testing.assert_array_equal, same, state)
        file.write_bytes(whole)
    assert any("other numbers than were written" in words for words in found)
    assert all("Delete it to continue from step 10" in words for words in found)


def test_the_optimisers_state_is_read_by_training_alone(copy, config):
    """A checkpoint of which it is deleted is loaded as before, but no longer continued."""
    shutil.rmtree(copy / "checkpoints" / "12")
    _, _, step, before = stored.load_state(copy)
    base = f"file://{copy / 'checkpoints' / str(step) / 'state'}/"
    arrays = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    numbers = [key for key in arrays.list().result() if key.startswith(b"opt.") and b".zarray" not in key]
    assert len(numbers) > 2 * len(jax.tree.leaves(before["params"]))
    for key in numbers:  # shapes and dtypes stay
        arrays.write(key, None).result()
    after = stored.load_state(copy)[3]
    assert set(after) == {"step", "params", "sparse"}
    jax.tree.map(np.testing.assert_array_equal, after, before)
    with pytest.raises(UserError, match=r"checkpoints/10 cannot be read: it is damaged or incomplete"):
        train(config, copy, resume=True, show=False)


def test_another_position_in_the_text_is_found(copy, config):
    shutil.rmtree(copy / "checkpoints" / "12")
    file = copy / "checkpoints" / "10" / "data" / "process_0-of-1.json"
    position = json.loads(file.read_text())
    file.write_text(json.dumps(position | {"pos_in_window": position["pos_in_window"] + 4}))
    with pytest.raises(
        UserError, match=r"checkpoints/10 cannot be read.*the position in the data is another"
    ):
        train(config, copy, resume=True, show=False)


def test_a_checkpoint_without_sums_is_read(copy):
    """Of an earlier version of this project."""
    file = copy / "checkpoints" / "12" / "_CHECKPOINT_METADATA"
    known = json.loads(file.read_text())
    assert set(known["custom_metadata"]) == {"sums", "position"}
    file.write_text(json.dumps(known | {"custom_metadata": {}}))
    assert stored.load_state(copy)[2] == 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint32", "bool", "int8"])
def test_sums_of_bits_tell_numbers_and_places(dtype):
    numbers = np.random.default_rng(0).integers(0, 2, (2, 3, 4))
    sums = {"0": sums_of_bits(jnp.asarray(numbers, dtype))[""]}
    for place in np.ndindex(numbers.shape):
        other = numbers.copy()
        other[place] = 1 - other[place]
        sums[str(place)] = sums_of_bits(jnp.asarray(other, dtype))[""]
    sums["turned"] = sums_of_bits(jnp.asarray(numbers[::-1], dtype))[""]
    assert len(set(sums.values())) == len(sums)
    assert sums_of_bits(jnp.zeros((0, 3), dtype)) == {"": 0}


def test_reads_abandoned_by_a_failed_restore_are_silent(caplog):
    loop = asyncio.new_event_loop()
    with pytest.raises(ValueError, match="the failure itself"), quiet_failure():
        abandoned = loop.create_future()
        abandoned.set_exception(ValueError("a read"))
        raise ValueError("the failure itself")
    loop.close()
    del abandoned
    gc.collect()
    assert not caplog.records


def test_checkpoint_of_another_model(copy, config):
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, f=64))
    configs.write(wider, copy / "config.json")
    with pytest.raises(
        UserError, match=r"params/blocks/0/ffn/down/kernel is \(32, 16\) .* there, \(64, 16\)"
    ):
        stored.load_state(copy)
    configs.write(dataclasses.replace(config, method=s24.methods.Dense()), copy / "config.json")
    with pytest.raises(UserError, match=r"sparse/blocks/0/ffn/down/key is \(2,\) uint32 there, absent"):
        stored.load_state(copy)


def test_missing_folders(tmp_path, copy):
    with pytest.raises(UserError, match="There is no folder"):
        stored.load_state(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        stored.load_state(tmp_path / "empty")
    with pytest.raises(UserError, match=r"no checkpoint of step 7; it has \[5, 10, 12\]"):
        stored.load_state(copy, 7)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoints yet"):
        stored.load_state(copy)


def test_divergence_stops_and_keeps_the_metrics(config, tmp_path):
    wild = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, lr=1e30, clip=1e30, weight_decay=0.0, warmup=0),
        train=dataclasses.replace(config.train, monitor_every=0, eval_every=0),
        method=s24.methods.Dense(),
    )
    for resume in (False, True):  # without a checkpoint, resuming starts anew and replaces the old rows
        with pytest.raises(Diverged, match="The loss became nan at step") as error:
            train(wild, tmp_path / "run", show=False, resume=resume)
        assert "--optim.lr" in str(error.value)
        training = rows(tmp_path / "run", "train")
        assert [row["step"] for row in training] == list(range(len(training)))
        assert training[-1]["loss"] is None and all(row["loss"] for row in training[:-1])
        assert rows(tmp_path / "run", "event")[-1]["event"] == "diverged"


@pytest.mark.parametrize(("steps", "kept"), [(3, ["2"]), (9, ["2"])])
def test_parameters_that_are_not_finite_replace_no_checkpoint(config, tmp_path, steps, kept):
    """The loss of a step is that before its update: it is finite where the parameters no longer are."""
    wild = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, lr=1e36, warmup=1),
        train=dataclasses.replace(
            config.train,
            steps=steps,
            monitor_every=0,
            probe_every=0,
            eval_every=0,
            checkpoint_every=1,
            keep=1,
        ),
        method=s24.methods.Dense(),
    )
    with pytest.raises(Diverged, match=r"Parameters are no longer finite after step 2.*--optim\.lr"):
        train(wild, tmp_path / "run", show=False)
    assert rows(tmp_path / "run", "event")[-1]["event"] == "diverged"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == kept
    assert all(row["loss"] for row in rows(tmp_path / "run", "train"))


def test_the_collector_leaves_alone_what_was_there_before_the_steps(config, tmp_path):
    during = []
    short = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=3))
    train(short, tmp_path / "run", show=False, on_first_batch=lambda _: during.append(gc.get_freeze_count()))
    assert during[0] > 100_000 and gc.get_freeze_count() == 0


def test_a_run_that_is_too_slow_is_stopped_and_says_its_speed(config, tmp_path):
    slow = dataclasses.replace(config, train=dataclasses.replace(config.train, least_speed=10**12))
    with pytest.raises(
        UserError, match=r"tokens/s, less than train.least_speed=1,000,000,000,000.* at step 5"
    ):
        train(slow, tmp_path / "run", show=False)
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == list(range(6))


def test_energy_is_that_of_training_alone(monkeypatch):
    at = [(10.0, 100.0)]
    monkeypatch.setattr(
        metrics, "gauge", lambda: (SimpleNamespace(read=lambda: Reading(at[0][0], 1.0, at[0][1])), "")
    )
    clock = metrics.Clock()
    assert clock.tick(1) == (None, None)
    at[0] = 12.0, 160.0
    with clock.paused("monitor"):
        at[0] = 15.0, 1000.0
    at[0] = 16.0, 1060.0
    assert clock.tick(4) == (4 / 3, 30.0) and clock.spent("monitor") == 3.0
    monkeypatch.setattr(metrics, "gauge", lambda: (None, "no GPU"))
    clock = metrics.Clock()
    clock.tick(1)
    assert clock.tick(1)[1] is None


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    devices = [SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n}) for n in (3, 5)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert loop.peak_memory() == {"peak_bytes": 5}
    devices.append(SimpleNamespace(memory_stats=lambda: None))
    assert loop.peak_memory() == {}


def test_memory_of_an_earlier_run_is_not_that_of_a_run(config, tmp_path, monkeypatch):
    """A process keeps the most bytes of all its runs: those of one that needs fewer are not known."""
    used = iter([7, 7, 7, 9])  # before the run, and at each evaluation
    monkeypatch.setattr(loop, "peak_memory", lambda: {"peak_bytes": next(used)})
    shorter = dataclasses.replace(config.train, steps=6, eval_every=2, checkpoint_every=6)
    loop.train(dataclasses.replace(config, train=shorter), tmp_path / "run", show=False)
    assert [row.get("peak_bytes") for row in rows(tmp_path / "run", "eval")] == [None, None, 9]


def test_evaluate_prints_both_losses(finished, capsys):
    evaluate.main([str(finished), "--batches", "2"])
    printed = capsys.readouterr().out
    last = rows(finished, "eval")[-1]
    assert f"dense   {last['dense']:.4f} nats" in printed
    assert f"sparse  {last['sparse']:.4f} nats" in printed
    assert "order-1" in printed


def test_evaluate_leaves_out_devices_that_do_not_divide_a_batch(finished):
    """Of four sequences; it has no option for a mesh."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=6"
    result = python("experiments.evaluate", finished, "--batches", "2", env=os.environ | {"XLA_FLAGS": flags})
    assert f"dense   {rows(finished, 'eval')[-1]['dense']:.4f} nats" in result.stdout, result.stderr


def test_generate(finished, capsys):
    arguments = [str(finished), "--prompt", "abc", "--tokens", "50", "--seed"]
    texts = []
    for seed in ("1", "1", "2"):
        generate.main([*arguments, seed])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("abc") for text in texts)
    with pytest.raises(SystemExit) as stop:
        generate.main([str(finished), "--tokens", "0"])
    assert stop.value.code == 2 and "--tokens must be positive" in capsys.readouterr().err


def test_generate_from_files_of_prompts(finished, tmp_path, capsys):
    """Text lines are continued one after the other, JSON lines to JSON; prompts of other lengths share a
    program, and change nothing for each other."""
    arguments = [str(finished), "--tokens", "9", "--temperature", "0"]
    alone = []
    for prompt in ("abc", "ab\u00e9"):
        generate.main([*arguments, "--prompt", prompt])
        alone.append(capsys.readouterr().out.removesuffix("\n"))
    (tmp_path / "a.txt").write_text("abc\n\nab\u00e9\n")
    generate.main([*arguments, "--prompts", str(tmp_path / "a.txt")])
    assert capsys.readouterr().out == f"{alone[0]}\n\n{'-' * 20}\n\n{alone[1]}\n"
    (tmp_path / "a.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "ab\u00e9"}\n')
    generate.main([*arguments, "--prompts", str(tmp_path / "a.jsonl")])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] + row["text"] for row in rows] == alone
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n')
    (tmp_path / "c.jsonl").write_text('{"prompt": "\\ud800"}\n')
    for words, said in (
        ([str(tmp_path / "c.jsonl")], "The prompt '\\ud800' is no UTF-8"),
        ([str(tmp_path / "b.jsonl")], "line 1, is no JSON object with a field 'prompt'"),
        ([str(tmp_path / "no.txt")], "is no file of text"),
        ([str(tmp_path / "a.txt"), "--prompt", "a"], "--prompt or --prompts, not both"),
        ([str(tmp_path / "a.txt"), "--seed", str(2**32 - 1)], "--seed must lie in 0 to 4294967294, got"),
        ([str(tmp_path / "a.txt"), "--seed", "-1"], "--seed must lie in 0 to 4294967294, got -1"),
    ):
        with pytest.raises(SystemExit):
            generate.main([*arguments, "--prompts", *words])
        assert said in capsys.readouterr().err


def test_prompts_of_a_file_have_draws_of_their_own(finished, tmp_path, capsys):
    """Which are those of a prompt alone with the next seed; an empty prompt is one, too."""
    arguments, alone = [str(finished), "--tokens", "40"], []
    for seed in ("5", "6"):
        generate.main([*arguments, "--prompt", "", "--seed", seed])
        alone.append(capsys.readouterr().out.removesuffix("\n"))
    (tmp_path / "a.jsonl").write_text('{"prompt": ""}\n' * 2)
    generate.main([*arguments, "--prompts", str(tmp_path / "a.jsonl"), "--seed", "5"])
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts == alone and texts[0] != texts[1]
    assert not any(text.startswith("def ") for text in alone)


def test_text_comes_in_parts_and_ends_with_its_document(finished, monkeypatch, capsys):
    """And where Ctrl-C asks for its end."""
    sampler = sampling.Sampler(finished)
    options = {"tokens": 20, "temperature": 5.0, "seed": 3}
    parts = list(sampler("abc", **options))
    assert len(parts) == 4  # 8, 8 and 4 tokens, and what is left of a character
    whole, ended = (b"".join(_bytes(sampler, to_end)) for to_end in (False, True))
    assert b"\f" in whole and ended == whole.split(b"\f")[0]

    def interrupted(self, prompt, **_):
        yield "made"
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling.Sampler, "__call__", interrupted)
    with pytest.raises(SystemExit) as stop:
        generate.main([str(finished), "--prompt", "abc"])
    assert stop.value.code == 130 and capsys.readouterr().out == "abcmade\n"


def _bytes(sampler, to_end: bool):
    """1000 tokens, nearly at random, so that some record ends."""
    state = sampler.state["params"], sampler.state["sparse"]
    options = {
        "vocabulary": sampler.vocabulary,
        "length": 32,
        "tokens": 1000,
        "temperature": 100.0,
        "seed": 0,
    }
    return sampling.stream(sampler.graphdef, *state, b"abc", **options, to_end=to_end)


def test_sparse_samples_are_by_masks_of_the_weights_as_they_are(finished, monkeypatch):
    """As evaluations are, and not by those of the last refresh."""
    *known, state = stored.load_state(finished)
    older = jax.tree.map(lambda x: ~x if x.dtype == bool else x, state["sparse"])
    monkeypatch.setattr(sampling, "load_state", lambda run: (*known, state | {"sparse": older}))
    sampler = sampling.Sampler(finished, sparse=True)
    params = dict(nnx.to_flat_state(sampler.state["params"]))
    masks = {path: v[...] for path, v in nnx.to_flat_state(sampler.state["sparse"]) if path[-1] == "mask"}
    assert len(masks) == 2
    for path, mask in masks.items():
        (kernel,) = (v[...] for at, v in params.items() if at == (*path[:-2], "kernel"))
        np.testing.assert_array_equal(mask, s24.transposable_mask24(kernel))


def test_greedy_generation_is_that_of_the_model_without_a_cache(finished):
    """Greedy bytes are the likeliest of the model without a cache."""
    config, program, _, state = stored.load_state(finished)
    made = sampling.generate(
        program.graphdefs[False],
        state["params"],
        state["sparse"],
        b"x" * 20,
        vocabulary=config.data.vocabulary,
        length=32,
        tokens=6,
        temperature=0.0,
        seed=0,
    )

    @jax.jit
    def logits_of(tokens):
        return nnx.merge(program.graphdefs[False], state["params"], state["sparse"])(tokens)

    context = [256, *b"x" * 20]
    for byte in made[20:]:
        padded = np.zeros((1, 32), np.int32)  # later tokens change nothing of those before
        padded[0, : len(context)] = context
        likeliest = int(logits_of(padded)[0, len(context) - 1].argmax())
        assert byte == (0x0C if likeliest == 256 else likeliest)
        context.append(likeliest)


def test_report(finished, copy, tmp_path):
    pytest.importorskip("matplotlib")
    table = comparison.write_report([finished, copy], tmp_path / "report", extra="more")
    text = (tmp_path / "report" / "report.md").read_text()
    assert table in text and "(loss.png)" in text and text.endswith("more")
    last = rows(finished, "eval")[-1]
    assert f"{last['dense']:.3f}" in table and f"{last['dense'] / math.log(2):.3f}" in table
    assert "Byte entropy" in table and "order 1" in table and "12/12" in table
    header, rule, *body = [line for line in table.split("\n") if line.startswith("|")]
    assert len({line.count("|") for line in (header, rule, *body)}) == 1
    for name in ("loss.png", "flip_rate.png"):
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and ".png" not in page, "it needs no other file"
    assert "<title>Report</title>" in page and page.count("<td") == len(body) * (header.count("|") - 1)


def test_report_of_an_unfinished_run(copy, tmp_path):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])  # a crash cut the last line
    assert "1/12" in comparison.write_report([copy], tmp_path / "report")
    (copy / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        comparison.write_report([copy], tmp_path / "report")


def test_report_without_matplotlib(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stop:
        report.main([str(finished), "--out", str(tmp_path / "report")])
    errors = capsys.readouterr().err
    assert stop.value.code == 2
    assert "pip install -e '.[plots]'" in errors and "12/12" in errors
    assert "12/12" in (tmp_path / "report" / "report.md").read_text()


def test_large_recipe_made_small(shared, config, tmp_path):
    """The GPU's config made small: bfloat16, accumulation, approximate MVUE, and scan and remat."""
    large = configs.load("configs/fst/masked_decay.py")
    model = {"layers": 2, "d": 16, "f": 32, "heads": 2, "scan": True, "remat": True}
    small = dataclasses.replace(
        large,
        model=dataclasses.replace(large.model, **model),
        data=dataclasses.replace(config.data, batch=4),
        optim=dataclasses.replace(large.optim, warmup=1),
        train=dataclasses.replace(large.train, steps=3, accumulate=2, log_every=1, eval_batches=1),
    )
    if jax.default_backend() == "cpu":
        with pytest.raises(UserError, match=r"Write --model\.attention xla"):
            train(small, tmp_path / "run", show=False)
    small = dataclasses.replace(small, model=dataclasses.replace(small.model, attention="xla"))
    result = train(small, tmp_path / "run", show=False)
    assert result.finished and 4 < result.losses["dense"] < 7
    assert [row["phase"] for row in rows(result.out, "train")] == ["sparse", "sparse", "sparse"]


@pytest.mark.parametrize(
    ("show", "parts"),
    [
        (True, ["10/10 steps", "left", "loss 1.500", "2,000 tokens/s"]),
        (None, ["arm: step 10/10", "loss 1.500"]),
    ],
)
def test_progress_bar_and_plain_lines(capsys, show, parts):
    with Progress("arm", 0, 10, show) as progress:
        for step in range(1, 11):
            progress.update(step, "sparse", 1.5, 2.164, 2000.0)
    shown = capsys.readouterr().err
    assert all(part in shown for part in parts)


def test_a_loss_that_is_no_cross_entropy_has_no_bits_per_byte(capsys):
    with Progress("arm", 0, 1, None) as progress:
        progress.update(1, "sparse", 1.5, None, 2000.0)
    assert "loss 1.500 (no cross entropy), 2,000" in capsys.readouterr().err


def test_plain_lines_come_at_intervals(capsys, monkeypatch):
    """At the first step, every 30 seconds, and at the end."""
    seconds = iter(range(0, 700, 7))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(seconds))
    with Progress("arm", 0, 20, None) as progress:
        for step in range(1, 21):
            progress.update(step, "sparse", 1.5, 2.164, 2000.0, 0.41)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"arm: step {n}/20" for n in (1, 6, 11, 16, 20)]
    assert "2,000 tokens/s (41% of peak), 01:03 left" in lines[2] and "left" not in lines[0] + lines[4]


def test_the_last_line_tells_of_the_last_step(config, tmp_path, capsys):
    """Also where `log_every` passes over it; such a step has no row."""
    every = dataclasses.replace(config, train=dataclasses.replace(config.train, log_every=5))
    train(every, tmp_path / "run")
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines() if ": step " in line]
    assert lines == [f"{config.name}: step {n}/12" for n in (1, 12)]
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [0, 5, 10]


def test_the_share_of_the_peak(config, monkeypatch):
    """By hand, for the tiny config: 6 for each weight of a product, 2 * 3 for each pair in attention."""
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, layers=2))
    weights = 257 * 16 + 2 * (4 * 16 * 16 + 2 * 16 * 32)
    assert speed.flops_per_token(config) == 6 * (weights + 2 * 16 * 32)
    untied = dataclasses.replace(config, model=dataclasses.replace(config.model, tied=False))
    assert speed.flops_per_token(untied) == speed.flops_per_token(config)
    sizes = configs.load("configs/sizes.py")
    assert speed.peak(config) is None

    class Device:
        device_kind = "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert speed.peak(config) == 989e12 / 2 and speed.peak(sizes) == 989e12
    Device.device_kind = "NVIDIA H100 PCIe"
    assert speed.peak(sizes) == 756e12


def test_silence(capsys):
    with Progress("arm", 0, 10, False) as progress:
        progress.update(10, "sparse", 1.5, 2.164, 2000.0)
    assert capsys.readouterr().err == ""
