"""Tests that need a CUDA device with our kernels; everywhere else they are skipped."""

import pytest

from jax_sparse24.dispatch.decision import decide
from jax_sparse24.dispatch.hardware import platform


@pytest.fixture(autouse=True, scope="session")
def cuda():
    if platform() != "cuda":
        pytest.skip("needs a CUDA device")
    try:
        decide("the tests", "bfloat16", "ffi")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def cusparselt():
    try:
        decide("the tests", "bfloat16", "cusparselt")
    except RuntimeError as error:
        pytest.skip(str(error))
