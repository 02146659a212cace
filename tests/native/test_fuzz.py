"""The CPU kernels of every instruction set on random calls, NaN, infinities and subnormals among the numbers,
under the address and the undefined-behaviour sanitizer: what they read or write outside an array ends the
program. Instruction sets give the same bits."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native.conftest import CALLED, compile_to

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


def test_random_calls_stay_within_their_arrays(compiler, tmp_path):
    native = pytest.importorskip("jax_sparse24._cpu", reason="the native module is not built")
    sets = native.isas()
    fuzzed = f"-DS24_FUZZED(X)={''.join(f'X({isa})' for isa in sets)}"

    def compile_one(unit):
        isa, source = unit
        flags = [
            "-fno-trapping-math",
            "-fvisibility-inlines-hidden",
            f"-DS24_ISA={isa}",
            *LEVELS.get(isa, []),
        ]
        return compile_to(tmp_path / f"{source.stem}_{isa}.o", *compiler, *SANITIZED, *flags, "-c", source)

    def link(isa):
        """In a library of its own a set has its own copy of every function, in its own instructions."""
        objects = sorted(tmp_path.glob(f"*_{isa}.o"))
        return compile_to(tmp_path / f"{isa}.so", *compiler, *SANITIZED, "-shared", *objects)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, [(isa, source) for source in KERNELS for isa in sets]))
    libraries = [link(isa) for isa in sets]
    program = compile_to(tmp_path / "fuzz", *compiler, *SANITIZED, fuzzed, HERE / "fuzz.cc", *libraries)
    environment = os.environ | {"ASAN_OPTIONS": "handle_sigill=1"}
    done = subprocess.run([str(program), str(CALLS), "0"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = {name: int(n) for name, n in (line.rsplit(" ", 1) for line in done.stdout.splitlines())}
    print(sets, counts)
    assert all(n for name, n in counts.items() if name.endswith(("called", "compared"))), counts
    assert not any(n for name, n in counts.items() if name.endswith("that differ")), done.stderr
