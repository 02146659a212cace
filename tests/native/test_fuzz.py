"""The CPU kernels of every instruction set on random calls, NaN, infinities and subnormals among the numbers,
under the address and the undefined-behaviour sanitizer: what they read or write outside an array ends the
program. Instruction sets give the same bits."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native.conftest import CALLED, compile_to, read_once

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# The address sanitizer finds null pointers too; a check of its own before every access doubles the compiling.
# Undefined behaviour runs into an illegal instruction, which compiles in half the time of a message; without
# -fsanitize-undefined-trap-on-error the message says what it was.
SANITIZED = [
    *("-fsanitize=address,undefined", "-fno-sanitize=null", "-fno-sanitize-recover=all"),
    *("-fsanitize-undefined-trap-on-error", "-Wno-psabi", *CALLED),
]
KERNELS = sorted(p for kind in ("*.simd.cc", "*.fma.cc") for p in (ROOT / "ffi/cpu").glob(kind))
LEVELS = {"generic": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
CALLS = 1200


def instruction_set(isa: str, command: list[str], folder: Path, pool: ThreadPoolExecutor) -> Path:
    """A library of the kernels of one set. In its own, a set has its own copy of every function, in its own
    instructions."""
    folder = folder / isa
    folder.mkdir()
    command = [*command, "-fno-trapping-math", "-fvisibility-inlines-hidden", f"-DS24_ISA={isa}"]
    command += LEVELS.get(isa, [])
    command += read_once(folder, command, ROOT / "ffi/cpu/vectors.h", ROOT / "ffi/cpu/work.h")
    compiled = pool.map(lambda s: compile_to(folder / f"{s.stem}.o", *command, "-c", s), KERNELS)
    return compile_to(folder / "kernels.so", *command, "-shared", *compiled)


def test_random_calls_stay_within_their_arrays(compiler, tmp_path):
    native = pytest.importorskip("jax_sparse24._cpu", reason="the native module is not built")
    sets = native.isas()
    fuzzed = f"-DS24_ISAS(X)={' '.join(f'X({isa})' for isa in sets)}"

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        libraries = [instruction_set(isa, [*compiler, *SANITIZED], tmp_path, pool) for isa in sets]
    program = compile_to(tmp_path / "fuzz", *compiler, *SANITIZED, fuzzed, HERE / "fuzz.cc", *libraries)
    environment = os.environ | {"ASAN_OPTIONS": "handle_sigill=1"}
    done = subprocess.run([str(program), str(CALLS), "0"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = {name: int(n) for name, n in (line.rsplit(" ", 1) for line in done.stdout.splitlines())}
    print(sets, counts)
    assert all(n for name, n in counts.items() if name.endswith(("called", "compared"))), counts
    assert not any(n for name, n in counts.items() if name.endswith("that differ")), done.stderr
