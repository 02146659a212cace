"""docs/training.md runs as it stands, and what it promises holds."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments.config import Config, Optim, Train
from experiments.data import text
from experiments.data.batches import open_corpus, train_batches
from experiments.models import base
from experiments.training.checkpoint import Checkpoints
from experiments.training.loop import train
from experiments.training.optimiser import optimiser
from experiments.training.start import initial_state
from experiments.training.step import Program
from tests.experiments.conftest import write_corpus

PAGE = (Path(__file__).parent.parent / "docs" / "training.md").read_text()


CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.slow
def test_the_page_trains_by_each_method():
    scope = {"__name__": "page"}
    for code in CODE:
        exec(code, scope)
    for name in ("losses", "activation_losses", "venom_losses", "tree_losses"):
        values = scope[name]
        assert sum(values[-2:]) < 0.95 * sum(values[:2]), name


def test_the_transformer_is_short_and_is_not_ours():
    code = CODE[0]
    assert len(code.split("def loss")[0].strip().splitlines()) <= 60
    assert "experiments" not in code


@pytest.fixture
def page(tmp_path):
    """What the page defines, and a config with which our trainer trains the page's transformer."""
    scope = {"__name__": "page"}
    exec(CODE[0] + CODE[1].split("fst = ")[0], scope)

    @dataclasses.dataclass(frozen=True)
    class Model(base.Config):
        def create(self, method, vocabulary, *, rngs):
            return scope["Transformer"](method, rngs)

    write_corpus(tmp_path / "corpus", files=2)
    data = text.Config(corpus=str(tmp_path / "corpus"), root=str(tmp_path), seq=scope["LENGTH"], batch=8)
    scope["VOCABULARY"] = data.vocabulary.size
    return scope, Config(model=Model(), data=data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        s24.methods.FST(refresh_every=4, decay=2e-4, dense_fraction=0.25),
        s24.methods.Venom(v=16, m=8, clusters=4, dense_warmup=2, sparse_share=0.5),
    ],
    ids=lambda method: type(method).__name__,
)
def test_our_trainer_trains_the_page_bit_for_bit(page, method, tmp_path):
    """Phases, refreshes, noise, micro-batches and arrangement as in the page's loop."""
    scope, config = page
    train_steps = Train(steps=8, accumulate=2, eval_every=0, eval_batches=1, monitor_every=0, probe_every=0)
    config = dataclasses.replace(config, method=method, optim=Optim(warmup=2), train=train_steps)
    found = train(config, tmp_path / "run", show=False)
    batches = train_batches(open_corpus(config.data), config.data, config.seed)
    scope["batch"] = lambda step: next(batches)["tokens"]
    program, model = Program(config), scope["Transformer"](method, nnx.Rngs(0))
    loop = s24.Loop(model, scope["loss"], optimiser(config), 8, accumulate=2)
    state, losses = scope["run"](loop, initial_state(program), range(8))
    rows = [json.loads(line) for line in (found.out / "metrics.jsonl").read_text().splitlines()]
    assert losses == [row["loss"] for row in rows if row["kind"] == "train"]
    with Checkpoints(found.out / "checkpoints", keep=1) as checkpoints:
        trained = checkpoints.restore(8, program.abstract_state(), batches)
    jax.tree.map(np.testing.assert_array_equal, state, trained)
