"""The script that times three ways to sum the gradient of an embedding."""

import json

import jax.numpy as jnp
import pytest

from experiments.benchmarks import embedding_gradient
from experiments.errors import UserError

SMALL = ["--rows", "9", "40", "--tokens", "64", "--widths", "8", "--repeats", "3", "--seconds", "0.001"]


def test_every_way_is_timed(tmp_path, capsys):
    embedding_gradient.main([*SMALL, "--out", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["seconds_per_call"]
    assert [row["rows"] for row in rows] == [9, 40]
    assert all(min(row[name]) > 0 for row in rows for name in ("product", "sorted", "scatter"))
    assert "| 40   |     8 |" in capsys.readouterr().out


def test_a_wrong_way_is_refused(monkeypatch):
    more = lambda tokens, ct, rows: 1.5 * embedding_gradient.by_scatter(tokens, ct, rows)  # noqa: E731
    monkeypatch.setitem(embedding_gradient.WAYS, "product", more)
    with pytest.raises(UserError, match=r"'product' is wrong at 9 rows: it is off by 50"):
        embedding_gradient.measure(9, 64, 8, 3, 0.001)
    assert embedding_gradient.zipf(9, (4, 16)).dtype == jnp.int32
