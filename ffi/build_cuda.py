"""How `jax_sparse24._cuda` is compiled: kernels by nvcc to plain objects, FFI handlers by the C++ compiler.

Used by build_modules.py alone. The CUDA runtime is linked statically and cuSPARSELt is opened at run time, so
that the module imports on a machine without a GPU or driver."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

# Relative to the folder that is built, as setuptools wants sources: the repository, or its folder cuda13.
FFI = Path(os.path.relpath(Path(__file__).parent))
ROOT = FFI.parent
CALL, CUDA = FFI / "call", FFI / "cuda"
GENERATIONS = ROOT / "jax_sparse24/dispatch/generations.py"
# A file's suffix says how it is compiled: *.cc are handlers, for the C++ compiler; *.cu are kernels in which
# every rounding is as written; in *.fma.cu a product and a sum may be rounded once.
FUSED = ".fma.cu"


def targets(generations, known=None) -> list[str]:
    """Flags of nvcc for the code that the rows of jax_sparse24/dispatch/generations.py name.

    known: the machine code that this nvcc can make, as it names it, without the rest of which GPUs run PTX;
        None for all."""
    kinds: dict[str, list[str]] = {}
    for code in sorted({generation.code for generation in generations}, reverse=True):
        if known is None or code.startswith("compute_") or code.rstrip("af") in known:
            kinds.setdefault(code.split("_")[1], []).append(code)
    return [f"-gencode=arch=compute_{arch},code=[{','.join(codes)}]" for arch, codes in sorted(kinds.items())]


ROWS = runpy.run_path(str(GENERATIONS))["GENERATIONS"]
# The host compiler, which nvcc runs too, does not know nvcc's pragmas.
HOST = "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-unknown-pragmas"
COMMON = ["-std=c++17", "-O3", HOST]
WHEELS = (
    "nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 "
    "nvidia-cuda-cccl==13.0.85"
)
INSTALL = (
    "install CUDA 12 or 13 and put nvcc on PATH (or name its folder in CUDA_HOME), or: pip install " + WHEELS
)


def wanted() -> Path | None:
    """Folder of the CUDA toolkit to build `jax_sparse24._cuda` with, or None. S24_CUDA: 1 insists, 0 leaves
    CUDA out; without it CUDA is built where nvcc is found."""
    switch = os.environ.get("S24_CUDA", "")
    if switch not in ("", "0", "1"):
        raise SystemExit(f"jax_sparse24: S24_CUDA={switch!r} is not understood; use 1, 0, or leave it unset.")
    if switch == "1":
        return required("S24_CUDA=1")
    return None if switch == "0" else _toolkit()


def required(why: str) -> Path:
    """Folder of the CUDA toolkit. Raises SystemExit, which names who needs it, where there is none."""
    toolkit = _toolkit()
    if toolkit is None:
        raise SystemExit(f"jax_sparse24: {why}, but there is no nvcc: {INSTALL}.")
    return toolkit


def _toolkit() -> Path | None:
    candidates = [os.environ.get("CUDA_HOME")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:  # it may be a wrapper, so it is asked for its folder
        command = [nvcc, "--dryrun", "-x", "cu", os.devnull, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.*)$", done.stderr, re.M)
        candidates += [top.group(1).strip()] if top else []
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations if packages else []:
        candidates += [os.path.join(folder, "cu13")]
    for folder in candidates:
        if folder and os.access(os.path.join(folder, "bin", "nvcc"), os.X_OK):
            return Path(folder).resolve()
    return None


def kernel_units(toolkit: Path):
    """Yield (sources, name of the object, command without files) for each file of kernels."""
    nvcc = str(toolkit / "bin" / "nvcc")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    flags = [*COMMON, *targets(ROWS, listed.stdout.split())]
    for source in sorted(CUDA.rglob("*.cu")):
        fused = "true" if source.name.endswith(FUSED) else "false"
        yield [source], str(source.relative_to(FFI).with_suffix("")), [nvcc, *flags, f"-fmad={fused}"]


def handler_units():
    """Yield (sources, name of the object, flags): the handlers together, and the module."""
    flags, module = ["-O1", "-DS24_CUDA_MODULE"], CUDA / "module.cc"
    yield sorted({*CALL.glob("*.cc"), *CUDA.rglob("*.cc")} - {module}), "cuda/handlers", flags
    yield [module], "cuda/module", flags


def runtime(toolkit: Path) -> str:
    """The static CUDA runtime library."""
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (toolkit / folder / "libcudart_static.a").is_file():
            return str(toolkit / folder / "libcudart_static.a")
    raise SystemExit(f"jax_sparse24: no libcudart_static.a under {toolkit}; {INSTALL}.")
