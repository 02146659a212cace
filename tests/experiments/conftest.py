"""A small corpus, a config file and one finished run, shared by the tests of the experiments."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import config as configs
from experiments.training.checkpoint import Checkpoints
from experiments.training.loop import train
from experiments.training.stored import load_state
from tests.conftest import made_once

REPOSITORY = Path(__file__).resolve().parents[2]

CONFIG_FILE = '''
import dataclasses

import jax_sparse24 as s24
from experiments.models import decoder
from experiments.data import text
from experiments.config import Config, Optim, Train

def config():
    """A run of twelve steps: masks refreshed at 0, 2, 4, 6 and 8, dense from step 9."""
    return Config(
        name="tiny",
        model=decoder.Config(layers=1, d=16, f=32, heads=2),
        data=text.Config(corpus={corpus!r}, root={root!r}, seq=32, batch=4),
        optim=Optim(warmup=2),
        train=Train(
            steps=12,
            eval_every=5,
            eval_batches=2,
            monitor_every=3,
            probe_every=6,
            checkpoint_every=5,
            keep=10,
        ),
        method=s24.methods.FST(decay=1e-3, refresh_every=2, dense_fraction=0.25),
    )

def dense():
    """The same, dense."""
    return dataclasses.replace(config(), method=s24.methods.Dense())
'''


def write_corpus(folder: Path, files: int = 8, words: int = 1500):
    """Deterministic text that has something to learn: words of a small vocabulary."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(40)]
    folder.mkdir(parents=True)
    for index in range(files):
        text = " ".join(draw.choices(vocabulary, k=words)).replace("a ", "a\n")
        (folder / f"text{index}.txt").write_text(text)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder with `corpus`, `data` (prepared corpora) and `tiny.py`."""

    def write(folder):
        write_corpus(folder / "corpus")
        places = {"corpus": str(folder / "corpus"), "root": str(folder / "data")}
        (folder / "tiny.py").write_text(CONFIG_FILE.format(**places))

    return made_once(tmp_path_factory, "experiments", write)


@pytest.fixture(scope="session")
def config(shared):
    return configs.load(str(shared / "tiny.py"))


@pytest.fixture(scope="session")
def finished(config, tmp_path_factory) -> Path:
    """The folder of the run of `config`, trained to its end. Read only."""
    whole = made_once(tmp_path_factory, "finished", lambda folder: train(config, folder / "run", show=False))
    return whole / "run"


def as_it_is(content):
    """No change of a record."""


def changed(record: Path, folder: Path, change=as_it_is):
    """A copy of a record in a folder, as of another machine, after a change of its JSON data."""
    content = json.loads(record.read_text())
    change(content)
    copy = folder / record.parent.name / record.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(json.dumps(content, separators=(",", ":")))


def whole_state(out: Path, step: int):
    """The state that training would go on with, moments too."""
    program = load_state(out, step)[1]
    with Checkpoints(out / "checkpoints") as checkpoints:
        return checkpoints.restore(step, program.abstract_state())


def python(*arguments, **kwargs) -> subprocess.CompletedProcess:
    """Run a module of this repository in a new process."""
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, **kwargs)
