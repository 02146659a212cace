"""Every FFI target of CUDA called with what it must refuse, its kernels run thread by thread on a CPU: an
error that names something, never a crash."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jaxlib
import pytest

from tests.native.conftest import compile_to
from tests.native.outcomes import ROOT, check, outcomes

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cuda_targets(compiler, kernels, tmp_path_factory):
    """A library of CUDA's handlers for a CPU."""
    folder = tmp_path_factory.mktemp("targets")
    flags = ["-O0", "-fPIC", "-isystem", Path(jaxlib.__file__).parent / "include"]
    flags += ["-include", HERE / "emulated/stream.h", "-c"]
    sources = [p for p in sorted((ROOT / "ffi/cuda").glob("*.cc")) if p.name != "module.cc"]
    sources += [HERE / "targets.cc"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda s: compile_to(folder / f"{s.stem}.o", *compiler, *flags, s), sources))
    cuda = ROOT / "ffi/cuda"
    names = sorted(str(p.relative_to(cuda).with_suffix("")) for p in cuda.rglob("*.cu"))
    return compile_to(
        folder / "targets.so", *compiler, "-shared", *objects, *kernels(*names), "-ldl", "-pthread"
    )


def test_targets_of_cuda(cuda_targets, fake_cusparselt):
    """By their kernels run thread by thread on a CPU, and a cuSPARSELt that multiplies nothing."""
    found = outcomes(cuda_targets, fake_cusparselt)
    written = {
        name
        for source in (ROOT / "ffi/cuda").glob("*.cc")
        for name in re.findall(r'"(s24_\w+)"', source.read_text())
    }
    assert set(found["targets"]) == written
    check(found)
