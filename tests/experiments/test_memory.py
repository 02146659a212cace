"""What a run needs in memory, before it runs."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from experiments import config as configs
from experiments import memory as command
from experiments.benchmarks.settings import Case
from experiments.benchmarks.suites import train_step
from experiments.errors import UserError
from experiments.models import base
from experiments.training import memory
from experiments.training.opening import parameters
from experiments.training.step import Program
from tests.experiments.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/memory.md").read_text()
COMPARED = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| (.+) \|$", PAGE, re.M)
RUNS = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
SIZES = {"cpu": 10.5, "config": 110, "m350": 336, "m774": 750, "b1_3": 1275, "b7": 6744, "wide270": 268}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_of_the_configs(name):
    """Of as many blocks as there are, from models of one and of two."""
    config = configs.load(f"configs/sizes.py:{name}")
    one, two = (
        parameters(dataclasses.replace(config, model=dataclasses.replace(config.model, layers=n)))
        for n in (1, 2)
    )
    assert (one + (config.model.layers - 1) * (two - one)) / 1e6 == pytest.approx(SIZES[name], rel=0.005)


def test_terms(config):
    """By hand, for the tiny config: 2 blocks, d 16, f 32, four sequences of 32, bytes, float32, FST."""
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, layers=2))
    found = memory.estimate(config, Program(config)).terms
    weights = 257 * 16 + 2 * (4 * 16 * 16 + 2 * 16 * 32 + 2 * 16) + 16
    assert found["parameters"] == found["gradients"] == 4 * weights
    assert found["moments"] == pytest.approx(8 * weights, rel=0.01)  # and two counts of steps
    assert 2 * 2 * 16 * 32 <= found["masks and other state"] < 2 * 2 * 16 * 32 + 500  # a bool per weight
    assert found["activations"] == 2 * 2 * (16 * 16 + 4 * 32) * 4 * 32
    assert found["attention weights"] == 2 * 8 * 2 * 32 * 4 * 32
    assert found["logits"] == 4 * 32 * 257 * 16
    shared = memory.estimate(config, Program(config, devices=4)).terms  # which are not here
    assert shared["activations"] == found["activations"] / 4 and shared["moments"] == found["moments"]
    pieces = dataclasses.replace(config, mesh=configs.Mesh(dp=1, fsdp=4))
    pieces = memory.estimate(pieces, Program(pieces, devices=4)).terms
    assert pieces["activations"] == shared["activations"]
    assert pieces["moments"] == pytest.approx(found["moments"] / 4, rel=0.05)  # those of norms are whole
    train = dataclasses.replace(config.train, accumulate=2)
    sizes = [configs.Mesh(fsdp=4, gather=gather) for gather in ("step", "product")]
    both = [dataclasses.replace(config, mesh=mesh, train=train) for mesh in sizes]
    wide = dataclasses.replace(config.model, d=256, f=1024)  # weights, not logits, are what is large
    both = [dataclasses.replace(c, model=wide, data=dataclasses.replace(c.data, batch=8)) for c in both]
    once, each = (memory.estimate(c, Program(c, devices=4)) for c in both)
    assert once.terms["gradients"] == pytest.approx(4 * each.terms["gradients"], rel=0.05)
    assert (
        once.terms["gathered parameters"] > once.terms["parameters"]
        and "gathered parameters" not in each.terms
    )
    assert once.remedy == "mesh.gather product" and each.largest != once.largest
    model = dataclasses.replace(config.model, remat=True)
    remat = dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, accumulate=2))
    less = memory.estimate(remat, Program(remat)).terms
    assert less["activations"] == 2 * 2 * 16 * 2 * 32 * 2 + found["activations"] / 4
    assert less["gradients"] == 2 * found["gradients"]
    assert less["attention weights"] == found["attention weights"] / 4


def test_a_teacher_has_logits_of_its_own(config):
    wide = dataclasses.replace(config.model, vocabulary=8192)
    large = dataclasses.replace(config.data, seq=1024, batch=16)
    start = dataclasses.replace(config.train, start_from="a run")
    first = dataclasses.replace(config, model=wide, data=large, train=start)
    distilled = dataclasses.replace(first, method=s24.methods.AST())
    alone, taught = (memory.estimate(c, Program(c)).terms for c in (first, distilled))
    assert taught["teacher"] == alone["parameters"]
    assert alone["logits"] == 2**26 * 16 and taught["logits"] == 2**26 * 20


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: f"{row[0]}x{row[1]}")
def test_the_formula_is_near_what_was_planned_on_gpus(row):
    """docs/memory.md has both, for four shapes."""
    layers, d, f, tokens, formula, planned, file = row
    assert len(COMPARED) == 4
    stored = json.loads((REPOSITORY / "experiments/benchmarks/results" / file).read_text())["rows"]
    shape = [int(n) for n in (layers, d, f, tokens)]
    (found,) = (
        row
        for row in stored
        if [row[name] for name in ("layers", "d", "f", "T")] == shape and row["method"] == "Dense"
    )
    config = train_step.config_of(
        Case(*(found[n] for n in "Tdf")), found["dtype"], s24.methods.Dense(), shape[0]
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="cudnn"))
    terms = memory.estimate(config, Program(config)).terms
    ours = sum(terms[name] for name in ("gradients", "activations", "logits"))
    assert f"{ours / 1e9:.2f}" == formula and f"{found['temp_bytes'] / 1e9:.2f}" == planned
    assert ours == pytest.approx(found["temp_bytes"], rel=0.1)


@pytest.mark.parametrize(("arm", "formula", "used"), RUNS)
def test_the_formula_against_what_whole_runs_used(arm, formula, used):
    """Near it; of two methods until the first probe of a sparse phase, of which docs/memory.md tells."""
    files = sorted((REPOSITORY / "docs/evidence/pilot" / arm).glob("seed*.json"))
    run = json.loads(files[0].read_text())
    config = configs.from_dict(run["config"])
    ours = memory.estimate(config, Program(config, devices=1)).total
    peaks = dict(zip(run["rows"]["eval"]["step"], run["rows"]["eval"]["peak_bytes"], strict=True))
    peak = max(peaks.values())
    assert len(RUNS) == 5 and (f"{ours / 1e9:.2f}", f"{peak / 1e9:.2f}") == (formula, used)
    train = dict(zip(run["rows"]["train"]["step"], run["rows"]["train"]["phase"], strict=True))
    if arm in ("Activation24", "Venom"):
        assert train[240] == "sparse" and 250 in run["rows"]["probe"]["step"]
        assert 1.1 < peak / ours < 1.4
        peak = peaks[250]
    assert ours == pytest.approx(peak, rel=0.01)


def test_what_cannot_fit_is_refused(config, monkeypatch):
    class Device:
        memory_stats = staticmethod(lambda: {"bytes_limit": 1_000_000})

    program = Program(config)
    memory.check(config, program)  # the memory of a CPU is not known
    monkeypatch.setattr(jax, "local_devices", lambda: [Device])
    memory.check(config, program)
    large = dataclasses.replace(config, data=dataclasses.replace(config.data, seq=4096))
    with pytest.raises(
        UserError, match=r"have 0\.0 GB. The largest part is attention weights.*give model.attention cudnn"
    ):
        memory.check(large, Program(large))
    with pytest.raises(UserError, match="must be a multiple of the 3 devices"):
        memory.estimate(config, Program(config, devices=3))
    with pytest.raises(UserError, match=r"models.base.Config.sizes\(\) returns None"):
        memory.estimate(dataclasses.replace(config, model=base.Config()), program)


@pytest.mark.slow
def test_the_command(shared, capsys):
    """XLA's arguments are the state and the tokens, to the byte."""
    command.main([f"{shared / 'tiny.py'}:dense", "--mesh.fsdp", "2"])
    printed = capsys.readouterr().out
    assert "micro-batches of 4 x 32 tokens on 2 devices (fsdp 2)" in printed
    assert "The largest part is" in printed
    config = configs.load(f"{shared / 'tiny.py'}:dense")
    program = Program(config)
    names = [f"XLA, phase train: {name}s" for name in ("argument", "output", "temp")]
    assert [name for name, _ in command.xla_rows(program)] == names
    found = program.step(False).memory_analysis().argument_size_in_bytes
    tokens = np.dtype(np.int32).itemsize * config.data.batch * (config.data.seq + 1)
    assert found == memory.size_of(program.abstract_state()) + tokens
    for words in (["--devices", "0"], ["--devices", "3"], ["--devices", "2", "--xla"]):
        with pytest.raises(SystemExit):
            command.main([f"{shared / 'tiny.py'}:dense", *words])
        assert "error:" in capsys.readouterr().err
