"""The CPU kernels on random calls, NaN, infinities and subnormals among the numbers, under the address and
the undefined-behaviour sanitizer: what they read or write outside an array ends the program."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native.conftest import compile_to

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
KERNELS = ("packing", "maps", "tiles", "vnm", "matmul", "variant")
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-march=native", "-Wno-psabi"]
SECONDS = 15


def test_random_calls_stay_within_their_arrays(compiler, tmp_path):
    def compile_one(source):
        flags = [*SANITIZED, "-O0", "-fno-trapping-math", "-DS24_ISA=here", "-DS24_FUZZED(X)=X(here)", "-c"]
        return compile_to(tmp_path / f"{source.stem}.o", *compiler, *flags, source)

    sources = [*(HERE.parent.parent / f"ffi/cpu/{name}.cc" for name in KERNELS), HERE / "fuzz.cc"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sources))
    program = compile_to(tmp_path / "fuzz", *compiler, *SANITIZED, *objects)
    done = subprocess.run([str(program), str(SECONDS), "0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert all(int(n) > 0 for name, n in counts.items() if name.endswith(" called")), counts
