"""Programs that show numbers of runs."""

import dataclasses
import sys
import types

import pytest

from experiments import config as configs
from experiments.errors import UserError
from experiments.training import trackers
from experiments.training.loop import train
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

    package = types.SimpleNamespace(init=init, login=lambda: True)
    monkeypatch.setitem(sys.modules, "wandb", package)
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


def test_what_weights_and_biases_refuses_is_one_sentence(config, tmp_path, calls, monkeypatch):
    """Before anything is written where nobody is logged in."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, wandb="words"))

    def refused(**_):
        raise RuntimeError("no answer.\nDetails")

    monkeypatch.setattr(sys.modules["wandb"], "init", refused)
    with pytest.raises(UserError, match=r"no answer\. Give a key .* WANDB_MODE=offline .* --resume"):
        trackers.opened(config, tmp_path)
    monkeypatch.setattr(sys.modules["wandb"], "login", refused)
    with pytest.raises(UserError, match=r"train\.wandb: no answer\. Give a key by `wandb login`"):
        train(config, tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "package"), [({"wandb": "words"}, "wandb"), ({"tensorboard": True}, "tensorboardX")]
)
def test_missing_packages(config, monkeypatch, option, package):
    trackers.check(config.train)
    monkeypatch.setitem(sys.modules, package, None)
    needed = rf"train\.{next(iter(option))} needs .*{package}: pip install -e '\.\["
    with pytest.raises(UserError, match=needed):
        trackers.check(dataclasses.replace(config.train, **option))
