"""The CPU kernels of every instruction set on random calls, NaN, infinities and subnormals among the numbers,
under the address and the undefined-behaviour sanitizer: what they read or write outside an array ends the
program. Instruction sets give the same bits."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native.conftest import compile_to

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# The address sanitizer finds null pointers too; a check of its own before every access doubles the compiling.
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize=null", "-fno-sanitize-recover=all", "-Wno-psabi"]
KERNELS = sorted(p for kind in ("*.simd.cc", "*.fma.cc") for p in (ROOT / "ffi/cpu").glob(kind))
LEVELS = {"generic": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
SECONDS = 10


def test_random_calls_stay_within_their_arrays(compiler, tmp_path):
    native = pytest.importorskip("jax_sparse24._cpu", reason="the native module is not built")
    sets = native.isas()
    fuzzed = f"-DS24_FUZZED(X)={''.join(f'X({isa})' for isa in sets)}"

    def compile_one(unit):
        isa, source = unit
        flags = [*SANITIZED, "-O0", "-fno-trapping-math", f"-DS24_ISA={isa}", *LEVELS.get(isa, [])]
        return compile_to(tmp_path / f"{source.stem}_{isa}.o", *compiler, *flags, fuzzed, "-c", source)

    units = [("all", HERE / "fuzz.cc")]
    units += [(isa, source) for source in KERNELS for isa in sets]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, units))
    program = compile_to(tmp_path / "fuzz", *compiler, *SANITIZED, *objects)
    done = subprocess.run([str(program), str(SECONDS), "0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = {name: int(n) for name, n in (line.rsplit(" ", 1) for line in done.stdout.splitlines())}
    print(sets, counts)
    assert all(n for name, n in counts.items() if name.endswith(("called", "compared"))), counts
    assert not any(n for name, n in counts.items() if name.endswith("that differ")), done.stderr
