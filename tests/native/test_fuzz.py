"""The CPU kernels of every instruction set on random calls that follow from the shared cases, under the
address and the undefined-behaviour sanitizer: what they read or write outside an array ends the program.
Among the numbers are NaN, infinities and subnormals. Instruction sets give the same bits; products are
rounded, and so compared where they are exact: in half of the calls, whose numbers are small and whole."""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.native.conftest import CALLED, FFI, compile_handlers, compile_to, handlers, read_once
from tests.native.derived import Call, random_sizes, templates_of
from tests.ops.sizes import SIZED

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
V4 = ["-march=x86-64-v4"]
LEVELS = {"generic": [], "avx2": ["-march=x86-64-v3"], "avx512": V4, "amx": [*V4, "-DS24_TILES"]}
CALLS = 140  # of each entry of `SIZED`


def instruction_set(isa: str, command: list[str], folder: Path, pool: ThreadPoolExecutor) -> Path:
    """A library of the kernels of one set. In its own, a set has its own copy of every function, in its own
    instructions."""
    folder = folder / isa
    folder.mkdir()
    command = [*command, "-fno-trapping-math", "-fvisibility-inlines-hidden", f"-DS24_ISA={isa}"]
    command += LEVELS.get(isa, [])
    command += read_once(folder, command, ROOT / "ffi/cpu/vectors.h", ROOT / "ffi/cpu/work.h")
    kernels = [s for s in KERNELS if isa != "amx" or s.name.endswith(".fma.cc")]
    compiled = pool.map(lambda s: compile_to(folder / f"{s.stem}.o", *command, "-c", s), kernels)
    return compile_to(folder / "kernels.so", *command, "-shared", *compiled)


def filled(call: Call, whole: bool) -> Iterator[str]:
    """What is in each array, in the words of fuzz.cc. Of two arrays of bytes the second one names columns."""
    bytes_before = False
    for _, dtype in call.operands.values():
        if dtype == "uint8":
            yield "columns" if bytes_before else "pairs" if whole else "bytes"
            bytes_before = True
        else:
            number = "whole" if whole else "numbers"
            yield {"bool": "flags", "uint32": "words", "int32": "ranks"}.get(dtype, number)
    yield from ("nothing" for _ in call.results)


def lines() -> Iterator[str]:
    """The calls, as fuzz.cc reads them."""
    number = 0
    for sized in SIZED:
        own = templates_of(sized, "cpu")
        for _ in range(CALLS if own else 0):
            rng = np.random.default_rng(number)
            template = own[rng.integers(len(own))]
            sizes = random_sizes([template], "cpu", rng, sized.most)
            if sized.places and rng.integers(5) == 0:
                _, sizes = sized.places[rng.integers(len(sized.places))]
            call = template.at(**sizes)
            whole = sized.sums and bool(rng.integers(2))
            compared = whole or not sized.sums
            words = [template.target, number, int(compared), 1 << rng.integers(7)]
            words += [len(call.operands), len(call.results), len(call.attributes)]
            arrays = (*call.operands.values(), *call.results.values())
            for (shape, dtype), content in zip(arrays, filled(call, whole), strict=True):
                words += [dtype, content, len(shape), *shape]
            for name, value in sorted(call.attributes.items()):
                words += [name, value]
            yield " ".join(map(str, words))
            number += 1


def test_random_calls_stay_within_their_arrays(compiler, tmp_path):
    native = pytest.importorskip("jax_sparse24._cpu", reason="the native module is not built")
    sets = native.isas()
    fuzzed = f"-DS24_ISAS(X)={' '.join(f'X({isa})' for isa in sets)}"
    command = [*compiler, *SANITIZED, fuzzed]

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        split = ["-include", str(HERE / "pieces.h")]
        handling = pool.submit(compile_handlers, tmp_path, handlers("cpu"), *command, *FFI, *split)
        libraries = [instruction_set(isa, [*compiler, *SANITIZED], tmp_path, pool) for isa in sets]
        sources = [HERE / "fuzz.cc", HERE / "calls.cc"]
        program = compile_to(tmp_path / "fuzz", *command, *FFI, *sources, handling.result(), *libraries)
    environment = os.environ | {"ASAN_OPTIONS": "handle_sigill=1"}
    calls = "\n".join(lines())
    done = subprocess.run([str(program)], input=calls, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = {name: int(n) for name, n in (line.rsplit(" ", 1) for line in done.stdout.splitlines())}
    print(sets, counts)
    assert {name.split()[0] for name in counts} == set(native.registrations())
    assert all(n for name, n in counts.items() if name.endswith(("called", "compared"))), counts
    assert not any(n for name, n in counts.items() if name.endswith("that differ")), done.stderr
