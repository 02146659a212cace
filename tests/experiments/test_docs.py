"""The page that helps to choose, and the list in code."""

import re

import pytest

import jax_sparse24 as s24
from experiments import docs
from experiments.ablations import reproduction
from jax_sparse24.engine.plan import FFN

pytestmark = pytest.mark.slow

ENTRIES = {entry.name: entry for entry in s24.methods.list()}


def test_the_list_has_every_method_with_its_own_table():
    classes = {
        name: kind
        for name, kind in vars(s24.methods).items()
        if isinstance(kind, type) and issubclass(kind, s24.methods.Method) and name != "Method"
    }
    assert ENTRIES.keys() == classes.keys() >= {"Dense", "FST", "SLoPe", "AST"}
    for name, entry in ENTRIES.items():
        assert len(entry.when) > 20 and (entry.papers or name == "Dense"), f"{name} needs `when`, a paper"
        plan = classes[name]().ffn_plan()
        assert list(entry.products) == list(FFN)
        for product, words in entry.products.items():
            row = plan.row(product)
            assert words.startswith(f"{row.operand}: {row}" if row else "dense")
    assert ENTRIES["SLoPe"].products["B2"] == "dense, masked result"


def test_bytes_of_state_and_adapters():
    d, f = 64, 128
    found = {entry.name: (entry.state_bytes, entry.adapter_bytes) for entry in s24.methods.list(d, f)}
    assert found["Dense"] == found["STE"] == (0, 0)
    assert found["FST"] == (2 * d * f, 0)  # a bool per weight
    assert found["SLoPe"] == (2 * 2 * d * f, 2 * 4 * (d + f) * 4)  # two of them; rank 4 in both matrices


def test_the_committed_page_is_what_the_results_give():
    page = docs.PAGE.read_text()
    assert page == docs.page(), "docs/methods.md differs from its sources: run `python -m experiments.docs`"
    for name in ENTRIES:
        assert len(re.findall(rf"^\| `{name}` ", page, re.M)) >= 3, name


def test_help_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(docs, "PAGE", tmp_path / "methods.md")
    with pytest.raises(SystemExit) as stop:
        docs.main(["--help"])
    assert stop.value.code == 0 and "usage:" in capsys.readouterr().out
    assert not docs.PAGE.exists()


def test_losses_under_a_leaking_mask_are_marked():
    page = docs.loss(reproduction.recorded())
    rows = [line.split(" | ") for line in page.split("\n") if line.startswith("| `Venom`")]
    marked = {row[2] for row in rows if row[5].endswith("*")}
    assert marked == {"both, sparse to the end", "by data", "by data, not sorted"}
    assert {"both", "activations", "by statistic"} < {row[2] for row in rows}
    assert "no language-model loss" in page
