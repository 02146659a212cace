"""Files appear whole or not at all."""

import errno
import re
from pathlib import Path

import pytest

from experiments import files
from experiments.config import REPOSITORY


def test_a_write_replaces_the_old_file_at_once(tmp_path):
    path = tmp_path / "a.json"
    for content in ("old", "new"):
        files.write(path, content)
        assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write(path, "old")

    def full(self, data, *args, **kwargs):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_every_command_writes_its_files_so():
    """One helper writes: nothing at the top level of experiments writes text or pictures in place."""
    for path in sorted((REPOSITORY / "experiments").glob("*.py")):
        if path.name != "files.py":
            assert not re.search(r"write_text\(|write_bytes\(|savefig\(path", path.read_text()), path.name
