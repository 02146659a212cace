"""A claim over the small corpus and its complete ablation, shared by the tests of the command."""

import json
import shutil

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments import ablate
from experiments.ablations import reproduction
from tests.conftest import made_once

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
                    checkpoint_every=50, keep=1, second_text={corpus!r}),
    )
    size = dataclasses.replace(size, base=base)
    dense = size.arm(s24.methods.Dense(), monitor_mask="top-2", prompts=("def ",))
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
    """(claim file, folder) of a complete ablation with two arms and two seeds. Read only."""

    def make(folder):
        path = write_claim(shared, folder)
        assert ablate.main([f"{path}:smoke", "--out", str(folder / "out")]) == 0

    folder = made_once(tmp_path_factory, "ablation", make)
    return folder / "tiny_claim.py", folder / "out"


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


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A place of its own for recorded results and their page."""
    monkeypatch.setattr(reproduction, "FOLDER", tmp_path / "docs/reproduction")
    monkeypatch.setattr(reproduction, "PAGE", tmp_path / "docs/reproduction.md")
    monkeypatch.setattr(reproduction, "COMPARED", tmp_path / "docs/verdicts.md")
    (tmp_path / "docs/reproduction").mkdir(parents=True)
    return tmp_path / "docs"
