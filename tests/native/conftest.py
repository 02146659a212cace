"""Programs in C++ that check themselves."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def counts(tmp_path_factory):
    """`counts(source, *flags)`: compiles and runs a program; the number after each name that it prints."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")

    def run(source, *flags):
        program = tmp_path_factory.mktemp("native") / Path(source).stem
        fixed = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"]
        command = [*compiler.split(), *fixed, *flags, str(HERE / source), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
        return {name: int(wrong) for name, wrong in (line.rsplit(" ", 1) for line in printed.splitlines())}

    return run
