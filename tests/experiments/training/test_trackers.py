"""Programs that show numbers of runs."""

import dataclasses
import sys
import types

import pytest

from experiments import config as configs
from experiments.errors import UserError
from experiments.training import trackers
from experiments.training.metrics import Writer


@pytest.fixture
def calls(monkeypatch) -> list:
    """Stands in for the package wandb; what was asked of it."""
    made = []

    class Run:
        log = staticmethod(lambda numbers, step: made.append((step, numbers)))
        finish = staticmethod(lambda: made.append("finish"))

    def init(**options):
        made.append(options)
        return Run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return made


def test_weights_and_biases_go_on_with_a_run(config, tmp_path, calls):
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, wandb="words"))
    trackers.check(config.train)
    for _ in range(2):
        with Writer(tmp_path, trackers.opened(config, tmp_path)) as writer:
            writer.write("train", 3, {"loss": 1.5, "phase": "sparse"})
    assert calls[1:3] == [(3, {"train/loss": 1.5}), "finish"] and calls[3:] == calls[:3]
    options = calls[0]
    assert (options["project"], options["name"], options["resume"]) == ("words", "tiny", "allow")
    assert options["config"] == configs.to_dict(config) and len(options["id"]) == 16
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("option", "package"), [({"wandb": "words"}, "wandb"), ({"tensorboard": True}, "tensorboardX")]
)
def test_missing_packages(config, monkeypatch, option, package):
    trackers.check(config.train)
    monkeypatch.setitem(sys.modules, package, None)
    needed = rf"train\.{next(iter(option))} needs .*{package}: pip install -e '\.\["
    with pytest.raises(UserError, match=needed):
        trackers.check(dataclasses.replace(config.train, **option))
