"""The benchmark command on sizes that take no time."""

import json

import pytest

from experiments.bench import main

SMALL = ["--shape", "8,16", "--tokens", "8", "--dtype", "float32", "--repeats", "1", "--seconds", "1e-6"]


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the command; returns (exit status, result file as data, stdout, stderr)."""

    def run(*argv):
        small = SMALL if "--shape" not in argv else SMALL[4:]
        status = main([*argv, *small, "--no-torch", "--out", str(tmp_path)])
        files = list(tmp_path.glob("*.json"))
        out = capsys.readouterr()
        return status, json.loads(files[0].read_text()) if len(files) == 1 else files, out.out, out.err

    return run
