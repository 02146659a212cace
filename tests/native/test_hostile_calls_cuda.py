"""Every FFI target of CUDA called with what it must refuse, its kernels run thread by thread on a CPU: an
error that names something, never a crash."""

import re
from pathlib import Path

import pytest

from tests.native.conftest import CALLED, FFI, compile_to
from tests.native.outcomes import ROOT, check, outcomes

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def handlers() -> list[Path]:
    return sorted([*(ROOT / "ffi/call").glob("*.cc"), *(ROOT / "ffi/cuda").glob("*.cc")])


@pytest.fixture(scope="module")
def cuda_targets(compiler, kernels, tmp_path_factory):
    """A library of CUDA's handlers for a CPU. They are one source to the compiler, which spends most of its
    time on the headers that they share; so a name is defined in one of them only."""
    folder = tmp_path_factory.mktemp("targets")
    sources = [p for p in handlers() if p.name != "module.cc"] + [HERE / "targets.cc"]
    together = folder / "handlers.cc"
    together.write_text("".join(f'#include "{source}"\n' for source in sources))
    flags = [*CALLED, *FFI, "-DS24_CUDA_MODULE", "-include", HERE / "emulated/stream.h", "-c"]
    compiled = compile_to(folder / "handlers.o", *compiler, *flags, together)
    return compile_to(folder / "targets.so", *compiler, "-shared", compiled, *kernels, "-ldl", "-pthread")


def test_targets_of_cuda(caller, cuda_targets, fake_cusparselt):
    """By their kernels run thread by thread on a CPU, and a cuSPARSELt that multiplies nothing."""
    found = outcomes(caller, cuda_targets, fake_cusparselt)
    written = {name for source in handlers() for name in re.findall(r'"(s24_\w+)"', source.read_text())}
    assert set(found["targets"]) == written
    check(found)
