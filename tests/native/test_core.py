"""The shared core compiled for the CPU: what CUDA kernels decide, and how they read metadata."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, int]:
    """Wrong cases by check, as core_test.cc counts them."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path_factory.mktemp("core") / "core_test"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command = [*compiler.split(), *flags, str(HERE / "core_test.cc"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: int(wrong) for name, wrong in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("what", ["largest", "masked", "squared", "drawn", "unpacked"])
def test_kept_pairs_are_what_masks_keep(report, dtype, what):
    assert report[f"{dtype} {what}"] == 0


@pytest.mark.parametrize("layout", ["cusparselt 16 bit", "cusparselt 8 bit", "cutlass sm80"])
def test_layouts_are_permutations(report, layout):
    assert report[layout] == 0


def test_an_emulated_sparse_product_reads_stored_metadata(report):
    assert report["emulated product"] == 0
