"""Fixtures of tests that decide by measured tables."""

import pytest

from jax_sparse24.dispatch import table as tables


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders in place of this machine's own table and the shipped ones."""
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    own.mkdir()
    shipped.mkdir()
    monkeypatch.setattr(tables, "user_folder", lambda: own)
    monkeypatch.setattr(tables, "SHIPPED", shipped)
    monkeypatch.setattr(tables, "_adopted", None)
    tables._stored.cache_clear()
    yield own, shipped
    tables._stored.cache_clear()
