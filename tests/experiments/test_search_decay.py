"""Choosing the rate of masked decay: the rule with curves made by hand, and the command on a tiny model."""

import dataclasses
import json
import re

import pytest

import jax_sparse24 as s24
from experiments import search_decay
from experiments.errors import UserError
from experiments.search_decay import search

DENSE = [0.0, 9.0, 0.02, 0.02]  # only the second half counts


def decide(dense, sparse, **options):
    return s24.methods.FST.search_decay(({None: dense} | sparse).get, tuple(sparse), **options)


def scaled(*factors):
    return [0.01 * factor for factor in (0.0, 0.0, *factors)]


@pytest.mark.parametrize(
    ("sparse", "decay", "part"),
    [
        ({1e-4: scaled(1.6, 1.6), 1e-5: scaled(3, 3)}, 1e-4, "mu = 0.800 lies in 0.6 to 0.95"),
        ({1e-4: scaled(1.9, 1.7), 2e-4: scaled(1.5, 1.6), 4e-4: scaled(1.3, 1.2)}, 2e-4, "mu = 0.775"),
        ({1e-4: scaled(2, 2), 1e-5: scaled(3, 3)}, None, "flip too much with all.*above 0.0001"),
        ({1e-4: scaled(1, 1), 1e-5: scaled(0, 2)}, None, "freeze with all.*below 1e-05"),
        ({1e-5: scaled(2, 2), 1e-4: scaled(1, 1)}, None, "candidates between 1e-05 and 0.0001"),
        ({1e-5: None, 1e-4: scaled(1.6, 1.6)}, 1e-4, "mu = 0.800"),
        ({1e-5: None}, None, "all candidates diverged"),
    ],
)
def test_choose(sparse, decay, part):
    choice = decide(DENSE, sparse)
    assert choice.decay == decay
    assert re.search(part, choice.reason), choice.reason
    assert set(choice.mu) == set(sparse)


def test_a_dense_run_that_diverges():
    with pytest.raises(ValueError, match="the dense run diverged"):
        decide(None, {1e-4: [0.0]})


def test_masks_that_do_not_move():
    choice = decide([0.0, 0.0], {1e-4: [0.0, 0.0]})
    assert choice.decay is None and "did not move" in choice.reason


@pytest.fixture
def fast(config):
    """Large steps, so that the masks of a tiny model move within twelve of them."""
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=3e-2))


@pytest.mark.slow
def test_search(fast):
    """Strong decay holds flips down; the first step has a learning rate of 0 and flips nothing."""
    choice, measured = search(fast, (100.0,), steps=12)
    assert measured == list(range(12)) and len(choice.dense) == 12 and choice.dense[0] == 0
    assert list(choice.sparse) == [100.0] and 0 <= choice.mu[100.0] < 1


def test_search_refuses_what_it_cannot_search(config):
    with pytest.raises(UserError, match="STE has no decay"):
        search(dataclasses.replace(config, method=s24.methods.STE()))
    with pytest.raises(UserError, match="4 to 12 steps, got 2"):
        search(config)  # its warm-up has two
    with pytest.raises(UserError, match="one or more rates"):
        search(config, (), steps=12)
    with pytest.raises(UserError, match="none negative"):
        search(config, (-1.0,), steps=12)


def test_command(shared, tmp_path, capsys, monkeypatch):
    dense, curves = [0.0, *[0.1] * 7], {1e-3: [0.0, *[0.08] * 7]}
    monkeypatch.setattr(search_decay, "search", lambda *_, **__: (decide(dense, curves), list(range(8))))

    def command(decays):
        arguments = [f"{shared / 'tiny.py'}", "--decays", decays, "--steps", "8", "--out", str(tmp_path)]
        try:
            search_decay.main(arguments)
            status = 0
        except SystemExit as stop:
            status = stop.code
        printed = capsys.readouterr()
        return status, printed.out + printed.err, json.loads((tmp_path / "decay.json").read_text())

    status, printed, data = command("1e-3")
    assert status == 0 and "Accepted: decay 0.001" in printed and "mu(0.001)" in printed
    assert data["decay"] == 1e-3 and len(data["sparse"]["0.001"]) == len(data["steps"]) == 8
    assert (tmp_path / "mu.png").read_bytes().startswith(b"\x89PNG")
    curves[1e-3] = [0.0, *[0.2] * 7]
    status, printed, data = command("1e-3")
    assert status == 2 and "Refused: no candidate" in printed and data["decay"] is None
    with pytest.raises(SystemExit):
        search_decay.main([f"{shared / 'tiny.py'}", "--decays", "a,b"])
    assert "numbers with commas" in capsys.readouterr().err
