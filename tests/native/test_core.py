"""The shared core compiled for the CPU: what CUDA kernels decide, and how they read metadata."""

import os
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest

from jax_sparse24.ops._philox import philox4x32

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, int]:
    """Wrong cases by check, as core_test.cc counts them; random words by draw and group."""
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


@pytest.mark.parametrize("draw", [0, 1])
def test_a_group_takes_its_word_of_four(report, draw):
    """As the reference: word g % 4 of the call for g // 4."""
    key = jnp.asarray([0x12345678, 0x9ABCDEF0], jnp.uint32)
    for group in range(9):
        counter = [jnp.uint32(c) for c in (group // 4, 0, draw, 0)]
        assert report[f"word {draw} {group}"] == int(philox4x32(key, counter)[group % 4])
