"""What nvcc makes of the kernels, where there is an nvcc; and the build's switches. No GPU is needed."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jax_sparse24.dispatch.generations import AMPERE, BLACKWELL, GENERATIONS, HOPPER

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_cuda", ROOT / "ffi/build_cuda.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_is_compiled_for_every_generation_of_gpus(build):
    """What their rows name, for the architecture of its number."""
    assert build.targets([AMPERE, HOPPER, BLACKWELL]) == [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        "-gencode=arch=compute_90a,code=[sm_90a]",
    ]
    for generation in GENERATIONS:
        flag = f"-gencode=arch=compute_{generation.code.split('_')[1]},code="
        (codes,) = [target.removeprefix(flag) for target in build.TARGETS if target.startswith(flag)]
        assert generation.code in codes.strip("[]").split(",")


def test_the_switch(build, monkeypatch):
    monkeypatch.setattr(build, "_toolkit", lambda: None)
    for value, found in (("0", None), ("", None)):
        monkeypatch.setenv("S24_CUDA", value)
        assert build.wanted() is found
    monkeypatch.setenv("S24_CUDA", "1")
    with pytest.raises(SystemExit, match=r"S24_CUDA=1, but there is no nvcc: install CUDA .*pip install"):
        build.wanted()
    monkeypatch.setenv("S24_CUDA", "yes")
    with pytest.raises(SystemExit, match="S24_CUDA='yes' is not understood"):
        build.wanted()
    monkeypatch.setattr(build, "_toolkit", lambda: Path("/toolkit"))
    monkeypatch.setenv("S24_CUDA", "0")
    assert build.wanted() is None
    monkeypatch.delenv("S24_CUDA")
    assert build.wanted() == Path("/toolkit")


def test_every_source_is_built(build):
    units = [*build.kernel_units(Path("/toolkit")), *build.handler_units()]
    built = [str(source) for sources, *_ in units for source in sources]
    present = [p for folder in ("call", "cuda") for p in (ROOT / "ffi" / folder).rglob("*")]
    assert sorted(built) == sorted(str(p.relative_to(ROOT)) for p in present if p.suffix in (".cu", ".cc"))


def spilled_bytes(build, source: str, arch: str, cubin: Path, *flags) -> dict[str, int]:
    """What every function of a source stores for want of registers."""
    toolkit = build._toolkit()
    if toolkit is None:
        pytest.skip("needs nvcc")
    flags = ["-std=c++17", "-O3", f"-arch={arch}", "-Xptxas=-v", "-cubin", *flags]
    command = [str(toolkit / "bin/nvcc"), *flags, str(ROOT / f"ffi/cuda/{source}.cu"), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"properties for (\S+)\n.*?(\d+) bytes spill stores", done.stderr)
    return {function: int(spilled) for function, spilled in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kernel", "instances"),
    [("packed24_columns", "pack_columns", 3 * 5 + 2), ("packed24_both", "pack_both", 4)],
)
def test_what_packing_reads_ahead_stays_in_registers(build, source, kernel, instances, tmp_path):
    """Storing it would wait for it. Estimates, operations 3 and 4, need more registers for other things."""
    spills = spilled_bytes(build, source, "sm_90a", tmp_path / "kernels.cubin", "-fmad=false")
    named = re.compile(rf"\d+{kernel}I(?!.*PackOpE[34]E).*Groups")
    packing = {f: n for f, n in spills.items() if named.search(f)}
    assert len(packing) == instances
    assert not any(packing.values()), packing


# A 2:4 product has a kernel for each layout and alignment of the dense operand; a V:2:M product four for
# whole tiles of 128 and 64 rows, half of them by wgmma, and three for what is left. The least number of
# sparse MMAs: 2 for each 16 x 8 of what a warp computes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "arch", "kernels", "instructions"),
    [
        ("matmul.fma", "sm_80", 4, 4 * 32),
        ("matmul.fma", "sm_90a", 4, 4 * 32),
        ("matmul_vnm.fma", "sm_90a", 7, 2 * 64 + 16 + 2 * 4),
    ],
)
def test_products_run_on_sparse_tensor_cores_without_spills(
    build, source, arch, kernels, instructions, tmp_path
):
    cubin = tmp_path / "product.cubin"
    spills = spilled_bytes(build, source, arch, cubin, "-DS24_ONE_DTYPE")
    assert len(spills) == kernels
    assert not any(spills.values())
    cuobjdump = shutil.which("cuobjdump") or shutil.which(str(build._toolkit() / "bin/cuobjdump"))
    if cuobjdump is not None:
        sass = subprocess.run(
            [cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        assert sass.count("HMMA.SP.16832.F32.BF16") >= instructions
        assert "LDL" not in sass
        assert (sass.count("HGMMA.SP.64x256x32.F32.BF16") == 4) == (source == "matmul_vnm.fma")


def test_the_module_imports_without_a_driver():
    if importlib.util.find_spec("jax_sparse24._cuda") is None:
        pytest.skip("the CUDA module is not built")
    code = "import jax_sparse24._cuda as m; print(len(m.registrations()), m.ffi_api_version())"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+ \(0, \d+\)", done.stdout)
