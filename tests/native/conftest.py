"""Programs in C++ that check themselves, and what they are linked with."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jaxlib
import pytest

from jax_sparse24.dispatch.generations import CAPABILITIES
from tests.conftest import made_once
from tests.native.derived import CAPABILITY

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "ffi"
CUDA = SOURCES / "cuda"
FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas", f"-I{HERE / 'emulated'}"]
# Where compiling takes longer than running, functions of the core are called instead of forced inline.
CALLED = ["-O0", "-fPIC", "-DS24_HD=inline"]
# An access that an address is not aligned for, which a GPU refuses, ends the program.
ALIGNED = ["-fsanitize=alignment", "-fno-sanitize-recover=all", "-fsanitize-undefined-trap-on-error"]
FFI = ["-isystem", str(Path(jaxlib.__file__).parent / "include")]


class Counts(dict):
    """The number after each name that a program printed, and the first wrong inputs that it showed."""

    def __init__(self, found: dict[str, int], inputs: str):
        super().__init__(found)
        self.inputs = inputs

    def of(self, *words: str) -> "Counts":
        """Those whose name has all of these words."""
        return Counts({n: k for n, k in self.items() if all(word in n for word in words)}, self.inputs)

    def check(self) -> None:
        """Fails if any case is wrong, with the names of the checks and the inputs."""
        wrong = {name: n for name, n in self.items() if n}
        assert not wrong, f"{wrong}\n{self.inputs}"


@pytest.fixture(scope="session")
def compiler() -> list[str]:
    """The command of a C++ compiler, and flags for all that is compiled here."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    return [*found.split(), *FLAGS]


def compile_to(output: Path, *command) -> Path:
    """Runs a compiler; its messages are those of the failure."""
    done = subprocess.run([*map(str, command), "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def read_once(folder: Path, command: list[str], *headers: Path) -> list[str]:
    """Flags that include headers, which the compiler reads here for all sources compiled with these flags."""
    together = folder / "headers.h"
    together.write_text("".join(f'#include "{header}"\n' for header in headers))
    compile_to(folder / "headers.h.gch", *command, "-x", "c++-header", together)
    return ["-include", str(together)]


@pytest.fixture(scope="session")
def kernels(compiler, tmp_path_factory) -> list[Path]:
    """Objects of all CUDA kernels for a CPU, each compiled once for all processes."""
    command = [*compiler, *CALLED, *ALIGNED]

    def read(folder):
        read_once(folder, command, HERE / "emulated/instructions.h")

    instructions = made_once(tmp_path_factory, "instructions", read) / "headers.h"

    def compile_one(source):
        # Products run for longer than they compile.
        flags = [*(["-O1"] if ".fma" in source.suffixes else []), "-include", instructions, "-x", "c++"]

        def make(folder):
            compile_to(folder / "kernel.o", *command, *flags, "-c", source)

        name = " ".join(source.relative_to(CUDA).with_suffix("").parts)
        return made_once(tmp_path_factory, f"kernels of {name}", make) / "kernel.o"

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(compile_one, sorted(CUDA.rglob("*.cu"))))


def handlers(platform: str) -> list[Path]:
    """The sources of the handlers of a platform, without Python's."""
    found = [*(SOURCES / "call").glob("*.cc"), *(SOURCES / platform).glob("*.cc")]
    return sorted(p for p in found if p.name != "module.cc" and not p.match("*.*.cc"))


def compile_handlers(folder: Path, sources: list[Path], *command) -> Path:
    """An object of handlers. They are one source to the compiler, which spends most of its time on the
    headers that they share; so a name is defined in one of them only."""
    together = folder / "handlers.cc"
    together.write_text("".join(f'#include "{source}"\n' for source in sources))
    return compile_to(folder / "handlers.o", *command, *FFI, "-c", together)


@pytest.fixture(scope="session")
def cuda_targets(compiler, kernels, tmp_path_factory) -> Path:
    """A library of CUDA's handlers for a CPU, see targets.cc."""

    def make(folder):
        flags = [*CALLED, "-DS24_CUDA_MODULE", "-include", HERE / "emulated/stream.h"]
        compiled = compile_handlers(folder, [*handlers("cuda"), HERE / "targets.cc"], *compiler, *flags)
        compile_to(folder / "targets.so", *compiler, "-shared", compiled, *kernels, "-ldl", "-pthread")

    return made_once(tmp_path_factory, "targets of CUDA", make) / "targets.so"


@pytest.fixture(scope="session")
def fake_cusparselt(compiler, tmp_path_factory) -> Path:
    """A library with the functions of cuSPARSELt, which says how it was used."""
    output = tmp_path_factory.mktemp("fake") / "libcusparseLt.so.0"
    padded = f"-DS24_PADDED_ROWS={CAPABILITIES[CAPABILITY].layout.rows}"
    return compile_to(output, *compiler, "-O1", "-shared", "-fPIC", padded, HERE / "fake_cusparselt.cc")


@pytest.fixture(scope="session")
def caller(compiler, tmp_path_factory) -> Path:
    """A library that makes calls of handlers, see calls.h."""
    output = tmp_path_factory.mktemp("caller") / "calls.so"
    return compile_to(output, *compiler, "-O0", "-shared", "-fPIC", *FFI, HERE / "calls.cc")


@pytest.fixture(scope="session")
def counts(compiler, tmp_path_factory):
    """`counts(source, *flags)`: compiles and runs a program; the number after each name that it prints."""

    def run(source, *flags):
        output = tmp_path_factory.mktemp("native") / Path(source).stem
        program = compile_to(output, *compiler, HERE / source, *flags)
        done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
        found = {name: int(n) for name, n in (line.rsplit(" ", 1) for line in done.stdout.splitlines())}
        return Counts(found, inputs=done.stderr)

    return run
