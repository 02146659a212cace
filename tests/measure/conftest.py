"""Tests that measure store nothing in the user's folder."""

import pytest

from jax_sparse24.dispatch import table


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """An empty folder in place of the user's, and no shipped tables."""
    folder = tmp_path / "own"
    monkeypatch.setattr(table, "user_folder", lambda: folder)
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(table, "_adopted", None)
    table._stored.cache_clear()
    yield folder
    table._stored.cache_clear()
