"""How the native modules `_cpu` and `_cuda` (build_cuda.py) become extensions of setuptools.

Used by setup.py and cuda13/setup.py. The CPU kernels are compiled several times with different instruction
sets; the module picks one at run time. The XLA FFI headers come from the jaxlib of the build environment: the
oldest supported one, because a handler runs on the FFI version it was built with and on newer ones, never on
older ones.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_cuda
from build_cuda import CALL, FFI, GENERATIONS, ROOT
from setuptools import Extension
from setuptools.command.build_ext import build_ext

CPU = FFI / "cpu"
# A file's suffix says how it is compiled: *.simd.cc once per instruction set with every rounding as written;
# *.fma.cc once per instruction set, where a product and a sum may be rounded once; every other *.cc once.
SIMD, FUSED = ".simd.cc", ".fma.cc"
AVX2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
AMX = [*AVX512, "-DS24_TILES"]  # by inline assembly, which not every assembler knows; for *.fma.cc alone
# Without the assumption that comparisons trap, conditionals become vector selections; without errno, roots
# become instructions.
OPTIMISE = ["-O3", "-fno-trapping-math", "-fno-math-errno"]
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def version() -> str:
    """The version of both distributions, as the package states it."""
    text = (ROOT / "jax_sparse24/versions.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.M).group(1)


def jaxlib_include():
    """Folder of the XLA FFI headers, found without importing jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None:
        raise SystemExit("jax_sparse24: building needs jaxlib (its FFI headers): pip install jaxlib==0.10.2")
    include = Path(spec.origin).parent / "include"
    if not (include / "xla/ffi/api/ffi.h").is_file():
        raise SystemExit(f"jax_sparse24: no xla/ffi/api/ffi.h under {include}; install jaxlib==0.10.2")
    return str(include)


def compiler() -> list[str]:
    """The C++ compiler: CXX as the user set it, else what Python was built with."""
    return (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()


def why_not(code: str, *flags: str) -> str | None:
    """What the compiler says of code that it does not compile; None if it does."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cc"
        probe.write_text(code)
        try:
            command = [*compiler(), *flags, "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as e:
            return str(e)
    return done.stderr.strip()[-400:] if done.returncode else None


def variants() -> dict[str, list[str]]:
    """The instruction sets of this platform, the best last, and the flags of each."""
    found = {"generic": []}
    if platform.machine().lower() in ("x86_64", "amd64"):
        found |= {"avx2": AVX2, "avx512": AVX512}
        tiles = 'void f() { asm volatile("tdpbf16ps %tmm0, %tmm1, %tmm2"); }\n'
        if platform.system() == "Linux" and why_not(tiles) is None:
            found["amx"] = AMX
    return found


def cpu_units():
    """Yield (sources, name of the object, flags): the handlers together, and every kernel by itself."""
    sets = variants()
    isas = f"-DS24_ISAS(X)={' '.join(f'X({isa})' for isa in sets)}"
    kernels = {source for source in CPU.glob("*.cc") if source.name.endswith((SIMD, FUSED))}
    module = CPU / "module.cc"
    yield sorted({*CALL.glob("*.cc"), *CPU.glob("*.cc")} - kernels - {module}), "cpu/handlers", ["-O1", isas]
    yield [module], "cpu/module", ["-O1", isas]
    for source in sorted(kernels):
        contract = "fast" if source.name.endswith(FUSED) else "off"
        for isa, arch in sets.items():
            if isa == "amx" and source.name.endswith(SIMD):
                continue
            flags = [*OPTIMISE, f"-ffp-contract={contract}", f"-DS24_ISA={isa}", *arch]
            yield [source], f"{isa}/{source.stem}", flags


class BuildNative(build_ext):
    """Compiles each translation unit with its own flags, as many at a time as there are cores, and only what
    is out of date. Of a unit with several sources the compiler reads the headers that they share once.

    Objects lie under build/, in a folder for each jaxlib. Only `module.cc` includes Python's headers: all
    other objects are the same for every Python, and are compiled once for the wheels of all."""

    def build_extension(self, ext):
        self._require_cpp17()
        objects = ROOT / f"build/objects-jaxlib-{importlib.metadata.version('jaxlib')}"
        shared = [GENERATIONS, *(p for kind in ("*.h", "*.cuh", "*.py") for p in FFI.rglob(kind))]
        newest = max(p.stat().st_mtime for p in shared)
        includes = [flag for folder in ext.include_dirs + self.include_dirs for flag in ("-isystem", folder)]

        def compile_one(unit):
            sources, name, command = unit
            if name.endswith("/module"):
                name += "." + sysconfig.get_config_var("SOABI")
            target = objects / f"{name}.o"
            newer = max(newest, *(source.stat().st_mtime for source in sources))
            if not self.force and target.exists() and target.stat().st_mtime > newer:
                return str(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            source = sources[0]
            if len(sources) > 1:
                source = target.with_suffix(".cc")
                source.write_text("".join(f'#include "{part.resolve()}"\n' for part in sources))
            self._run([*command, "-c", str(source), "-o", str(target)])
            return str(target)

        host = [*compiler(), *COMMON]
        units = [(sources, name, [*host, *flags, *includes]) for sources, name, flags in ext.host_units]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            compiled = list(pool.map(compile_one, [*ext.kernel_units, *units]))
        output = self.get_ext_fullpath(ext.name)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            [*compiled, *ext.extra_objects],
            output,
            libraries=ext.libraries,
            extra_postargs=ext.extra_link_args,
            target_lang="c++",
        )

    @staticmethod
    def _run(command):
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as e:
            text = f"jax_sparse24: the compiler failed ({e.returncode}): {' '.join(command)}"
            raise SystemExit(text) from None

    def _require_cpp17(self):
        invocable = "#include <type_traits>\nstatic_assert(std::is_invocable_v<int (*)()>);\n"
        why = why_not(invocable, "-std=c++17")
        if why is not None:
            raise SystemExit(
                f"jax_sparse24: no C++17 compiler: {' '.join(compiler())} does not work ({why}). "
                "Install g++ >= 9 or clang >= 10 (Debian, Ubuntu: apt-get install g++), or name one in CXX."
            )


class NativeExtension(Extension):
    """A module of `host_units`, (sources, name of the object, flags) for the C++ compiler, and of
    `kernel_units`, (sources, name of the object, command) for nvcc."""

    def __init__(self, name, host_units, kernel_units=(), include_dirs=(), **options):
        import pybind11

        self.host_units, self.kernel_units = list(host_units), list(kernel_units)
        units = [*self.host_units, *self.kernel_units]
        sources = sorted({str(source) for sources, *_ in units for source in sources})
        headers = [*sorted(str(p) for kind in ("*.h", "*.cuh") for p in FFI.rglob(kind)), str(GENERATIONS)]
        include_dirs = [jaxlib_include(), pybind11.get_include(), *include_dirs]
        super().__init__(name, sources, include_dirs=include_dirs, depends=headers, language="c++", **options)


def cpu(name: str) -> NativeExtension:
    """The module of the CPU kernels."""
    return NativeExtension(name, cpu_units())


def cuda(name: str, toolkit: Path) -> NativeExtension:
    """The module of the CUDA kernels, compiled by the nvcc of a toolkit."""
    return NativeExtension(
        name,
        build_cuda.handler_units(),
        build_cuda.kernel_units(toolkit),
        include_dirs=[str(toolkit / "include")],
        extra_objects=[build_cuda.runtime(toolkit)],
        libraries=["dl", "rt", "pthread"],
        extra_link_args=["-Wl,--exclude-libs,ALL"],
    )
