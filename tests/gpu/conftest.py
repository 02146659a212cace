"""Tests that need a CUDA device with our kernels; everywhere else they are skipped."""

import pytest

from jax_sparse24.ops._choose import choose, platform


@pytest.fixture(autouse=True, scope="session")
def cuda():
    if platform() != "cuda":
        pytest.skip("needs a CUDA device")
    try:
        choose("the tests", "bfloat16", "ffi")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def cusparselt():
    try:
        choose("the tests", "bfloat16", "cusparselt")
    except RuntimeError as error:
        pytest.skip(str(error))
