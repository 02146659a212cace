"""Every FFI target of CUDA called with what it must refuse, its kernels run thread by thread on a CPU: an
error that names something, never a crash."""

import re

import pytest

from tests.native.conftest import handlers
from tests.native.outcomes import check, outcomes

pytestmark = pytest.mark.slow


def test_targets_of_cuda(caller, cuda_targets, fake_cusparselt):
    """By their kernels run thread by thread on a CPU, and a cuSPARSELt that multiplies nothing."""
    found = outcomes(caller, cuda_targets, fake_cusparselt)
    written = {name for source in handlers("cuda") for name in re.findall(r'"(s24_\w+)"', source.read_text())}
    assert set(found["targets"]) == written
    check(found, least=13_500)
