"""What nvcc makes of the kernels, where there is an nvcc; and the build's switches. No GPU is needed."""

import importlib.util
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from jax_sparse24.dispatch.generations import GENERATIONS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_cuda", ROOT / "ffi/build_cuda.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_is_compiled_for_every_generation_of_gpus(build):
    """What their rows name, for the architecture of its number; of what an older nvcc does not know, such as
    that of CUDA 12.4, nothing."""
    older = [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        "-gencode=arch=compute_90a,code=[sm_90a]",
    ]
    newer = [f"-gencode=arch=compute_{n},code=[sm_{n}]" for n in (100, 120)]
    assert build.targets(GENERATIONS) == newer + older
    assert build.targets(GENERATIONS, ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]) == newer + older
    assert build.targets(GENERATIONS, ["sm_80", "sm_90"]) == older
    assert [row.code for row in build.ROWS] == [row.code for row in GENERATIONS]


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


def test_every_source_is_built(build, monkeypatch):
    listed = SimpleNamespace(stdout="sm_80\nsm_90\n")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: listed)
    kernels = list(build.kernel_units(Path("/toolkit")))
    assert all("-gencode=arch=compute_90a,code=[sm_90a]" in command for _, _, command in kernels)
    units = [*kernels, *build.handler_units()]
    built = [str(source) for sources, *_ in units for source in sources]
    present = [p for folder in ("call", "cuda") for p in (ROOT / "ffi" / folder).rglob("*")]
    assert sorted(built) == sorted(str(p.relative_to(ROOT)) for p in present if p.suffix in (".cu", ".cc"))


@dataclass
class Kernel:
    """What nvcc made of a kernel. instructions: those that have names here, in the order of machine code."""

    registers: int
    local_bytes: int
    spilled_bytes: int
    instructions: list[str]


# Instructions of sm_80 to sm_90a: their lowest 12 bits, and 12 bits that say their types or kinds, or None.
INSTRUCTIONS = {
    (0x983, None): "LDL",
    (0x387, None): "STL",
    (0x23C, 0x45A): "HMMA.SP.16832.F32.BF16",
    (0xDF0, 0x01A): "HGMMA.SP.F32.BF16",
    (0x9F0, 0x01A): "HGMMA.SP.F32.BF16",  # of what lies in shared memory
    (0x9F0, 0x00A): "HGMMA.SP.F32",  # of float16
    (0x9F0, 0x018): "HGMMA.F32.BF16",
    (0x9C5, 0x000): "WARPGROUP.ARRIVE",
    (0x9C5, 0x100): "WARPGROUP.DEPBAR",  # 0: for all groups of products
    (0x9C5, 0x101): "WARPGROUP.DEPBAR 1",
    (0x3C6, None): "FENCE.VIEW.ASYNC",
    (0x5A7, None): "SYNCS.PHASECHK",
    (0x9A7, None): "SYNCS.ARRIVE",
    (0x9B0, None): "ARRIVES.LDGSTSBAR",
    (0x844, None): "STSM",
    (0x992, None): "MEMBAR",
    (0x9AB, None): "ERRBAR",
    (0x5B4, None): "UTMALDG",
    (0x209, 0x000): "FMNMX",
    (0x209, 0x200): "FMNMX.NAN",  # NaN, if one of two is
}


def machine_code(cubin: Path) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """The name of each function of an ELF file, and its instructions as halves of 64 bits."""
    data = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<I20xQQ", data, table + i * size) for i in range(count)]
    for name, place, length in sections:
        at = sections[names][1] + name
        title = data[at : data.index(b"\0", at)].decode()
        if title.startswith(".text."):
            halves = struct.unpack_from(f"<{length // 8}Q", data, place)
            yield title.removeprefix(".text."), list(zip(halves[::2], halves[1::2], strict=True))


def compiled(build, source: str, arch: str, cubin: Path, *flags) -> dict[str, Kernel]:
    """What nvcc makes of the kernels of a source, by their names. It has nothing to complain of."""
    toolkit = build._toolkit()
    if toolkit is None:
        pytest.skip("needs nvcc")
    flags = ["-std=c++17", "-O3", f"-arch={arch}", "-Xptxas=-v", "-cubin", *flags]
    command = [str(toolkit / "bin/nvcc"), *flags, str(ROOT / f"ffi/cuda/{source}.cu"), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"warning|\(C\d+\)", done.stderr), done.stderr
    lines = (
        r"properties for (\S+)\n *(\d+) bytes stack frame, (\d+) bytes spill stores",
        r"Used (\d+) registers",
    )
    found = re.findall(r".*\n.*".join(lines), done.stderr)
    kernels = {name: Kernel(int(n), int(local), int(spilled), []) for name, local, spilled, n in found}
    for name, instructions in machine_code(cubin):
        for low, high in instructions:
            code, kind = low & 0xFFF, high >> 8 & 0xFFF
            known = INSTRUCTIONS.get((code, kind), INSTRUCTIONS.get((code, None)))
            if known is not None:
                kernels[name].instructions.append(known)
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kernel", "instances"),
    [("packed24_columns", "pack_columns", 3 * 6 + 2), ("packed24_both", "pack_both", 4)],
)
def test_what_packing_reads_ahead_stays_in_registers(build, source, kernel, instances, tmp_path):
    """Storing it would wait for it. Estimates, operations 3 and 4, need more registers for other things."""
    kernels = compiled(build, source, "sm_90a", tmp_path / "kernels.cubin", "-fmad=false")
    named = re.compile(rf"\d+{kernel}I(?!.*PackOpE[34]E).*Groups")
    spilled = {name: k.spilled_bytes for name, k in kernels.items() if named.search(name)}
    assert len(spilled) == instances
    assert not any(spilled.values()), spilled


def test_gradients_of_gates_read_their_arguments_where_they_are(build, tmp_path):
    """One that is indexed by a number not known before would be copied to every thread's own memory."""
    kernels = compiled(build, "gated", "sm_90a", tmp_path / "kernels.cubin", "-fmad=false")
    packing = {name: k for name, k in kernels.items() if re.search("PackOpE[34]E", name)}
    assert len(packing) == 3 * 2
    for name, kernel in packing.items():
        assert kernel.local_bytes - kernel.spilled_bytes <= 8, (name, kernel)


def assert_all_in_registers(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        assert kernel.local_bytes == kernel.spilled_bytes == 0, (name, kernel)
        assert not {"LDL", "STL"} & set(kernel.instructions), (name, kernel)


# A pass for each of two types, activations and estimates.
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_gradients_stay_in_registers_until_they_are_packed(build, arch, tmp_path):
    """Three blocks of 256 threads share a multiprocessor, or two where estimates are not exact."""
    kernels = compiled(build, "slope", arch, tmp_path / "slope.cubin", "-fmad=false")
    passes = {name: kernel for name, kernel in kernels.items() if "elementwise_tiles" in name}
    assert len(passes) == 8
    assert_all_in_registers(passes)
    for name, kernel in passes.items():
        assert kernel.registers <= (80 if "PackOpE3E" in name else 128), (name, kernel)


# A 2:4 product has a kernel for each layout and alignment of the dense operand; a V:2:M product two for
# whole tiles of 128 and 64 rows and three for what is left. The least number of sparse MMAs: 2 for each
# 16 x 8 of what a warp computes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "arch", "instances", "least"),
    [
        ("matmul.fma", "sm_80", 4, 4 * 32),
        ("matmul.fma", "sm_90a", 4, 4 * 32),
        ("matmul.fma", "sm_100", 4, 4 * 32),
        ("matmul.fma", "sm_120", 4, 4 * 32),
        ("matmul_vnm.fma", "sm_90a", 5, 2 * 64 + 16 + 2 * 4),
        ("matmul_vnm.fma", "sm_100", 5, 2 * 64 + 16 + 2 * 4),
        ("matmul_vnm.fma", "sm_120", 5, 2 * 64 + 16 + 2 * 4),
    ],
)
def test_products_run_on_sparse_tensor_cores_without_spills(build, source, arch, instances, least, tmp_path):
    kernels = compiled(build, source, arch, tmp_path / "product.cubin", "-DS24_ONE_DTYPE")
    assert len(kernels) == instances
    if (source, arch) == ("matmul.fma", "sm_120"):  # a word is stored before the products, loaded after them
        spilled = {name: kernel for name, kernel in kernels.items() if kernel.spilled_bytes}
        for name, kernel in spilled.items():
            assert kernel.spilled_bytes == 4 and kernel.instructions.count("LDL") == 1, (name, kernel)
            del kernels[name]
        assert len(spilled) == 1
        least -= 32
    assert_all_in_registers(kernels)
    assert sum(k.instructions.count("HMMA.SP.16832.F32.BF16") for k in kernels.values()) >= least


# A warpgroup waits for copies, shows them to wgmma, multiplies twice, waits for the products and gives the
# stage back; the others wait for a stage and arrive once their copies are there.
STAGE = (
    *("SYNCS.PHASECHK", "MEMBAR", "FENCE.VIEW.ASYNC", "WARPGROUP.ARRIVE", *2 * ["HGMMA.SP.F32.BF16"]),
    *("WARPGROUP.DEPBAR", "SYNCS.ARRIVE", "SYNCS.PHASECHK", "ARRIVES.LDGSTSBAR"),
)


@pytest.mark.slow
def test_products_of_blocks_on_hopper_run_as_designed(build, tmp_path):
    """The registers of as many threads as a multiprocessor has."""
    kernels = compiled(build, "sm90/matmul_vnm.fma", "sm_90a", tmp_path / "product.cubin", "-DS24_ONE_DTYPE")
    assert_all_in_registers(kernels)
    threads = {("128", "256"): 384, ("64", "512"): 384, ("64", "256"): 2 * 192}
    for name, kernel in kernels.items():
        shape = re.search(r"5ShapeILi(\d+)ELi(\d+)E", name).groups()
        assert threads.pop(shape) * kernel.registers <= 64 << 10, (name, kernel)
        assert " ".join(STAGE) in " ".join(kernel.instructions), (name, kernel)
        for once in ("WARPGROUP.DEPBAR", "SYNCS.ARRIVE", "ARRIVES.LDGSTSBAR"):
            assert kernel.instructions.count(once) == 1, (name, kernel)
    assert not threads


@pytest.mark.slow
def test_products_at_entries_on_hopper_run_as_designed(build, tmp_path):
    """The registers that 384 threads have; a warpgroup waits for copies, shows them to wgmma, multiplies four
    times and gives the stage back."""
    source = "sm90/sampled.fma"
    kernels = compiled(build, source, "sm_90a", tmp_path / "product.cubin", "-DS24_ONE_DTYPE")
    assert_all_in_registers(kernels)
    assert len(kernels) == 2
    stage = ["FENCE.VIEW.ASYNC", "WARPGROUP.ARRIVE", *4 * ["HGMMA.F32.BF16"], "WARPGROUP.DEPBAR"]
    for name, kernel in kernels.items():
        assert kernel.registers <= 168, (name, kernel)
        assert " ".join(["SYNCS.PHASECHK", "MEMBAR", *stage, "SYNCS.ARRIVE"]) in " ".join(kernel.instructions)
        assert kernel.instructions.count("HGMMA.F32.BF16") == 4
        for once in ("WARPGROUP.DEPBAR", "ARRIVES.LDGSTSBAR"):
            assert kernel.instructions.count(once) == 1, (name, kernel)


@pytest.mark.slow
def test_products_and_what_follows_them_on_hopper_run_as_designed(build, tmp_path):
    """The registers that 384 threads have; two stages in turn, each given back while the next is multiplied;
    no fence of all memory but where blocks of a cluster meet, at the begin and at the end."""
    kernels = compiled(build, "sm90/matmul_pointwise.fma", "sm_90a", tmp_path / "product.cubin")
    assert_all_in_registers(kernels)
    operations = {re.search(r"PointwiseE(\d)", name)[1]: kernel for name, kernel in kernels.items()}
    assert sorted(operations) == ["0", "1", "2"]
    for kernel in kernels.values():
        assert_multiplies_as_designed(kernel)
    named = operations["0"].instructions
    assert named.count("FMNMX.NAN") == 64 and "FMNMX" not in named, "NaN stays NaN"


def assert_stages_as_designed(
    named: list[str], multiplied: str = "HGMMA.SP.F32.BF16"
) -> tuple[list[str], list[str]]:
    """What stands before the loop over stages and behind it, where nothing is multiplied."""
    first, end = named.index("WARPGROUP.ARRIVE"), named.index("WARPGROUP.DEPBAR")
    stage = ["WARPGROUP.ARRIVE", multiplied, multiplied, "WARPGROUP.DEPBAR 1", "SYNCS.ARRIVE"]
    assert named[first:end] == [*stage, "SYNCS.PHASECHK", *stage]
    assert multiplied not in named[:first] + named[end:]
    return named[:first], named[end:]


def assert_multiplies_as_designed(kernel: Kernel) -> None:
    assert kernel.registers <= 168
    named = kernel.instructions
    before, after = assert_stages_as_designed(named)
    assert named.count("STSM") == 16
    assert "MEMBAR" in before and after[after.index("UTMALDG") :].count("MEMBAR") == 2
    assert not {"MEMBAR", "ERRBAR"} & set(after[: after.index("UTMALDG")])


@pytest.mark.slow
def test_products_of_compressed_matrices_on_hopper_run_as_designed(build, tmp_path):
    """The registers that twelve warps have, of which there are nine; stages as in the products above."""
    kernels = compiled(build, "sm90/matmul_compressed24.fma", "sm_90a", tmp_path / "product.cubin")
    assert len(kernels) == 4
    assert_all_in_registers(kernels)
    for name, kernel in kernels.items():
        assert kernel.registers <= 168
        assert_stages_as_designed(
            kernel.instructions, "HGMMA.SP.F32.BF16" if "BF16" in name else "HGMMA.SP.F32"
        )
        assert kernel.instructions.count("STSM") == 16 and "UTMALDG" in kernel.instructions


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
