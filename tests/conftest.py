"""Fixtures shared by the whole suite. Data come from fixed seeds: a failure repeats itself."""

import jax
import numpy as np
import pytest

from jax_sparse24.ops import _choose

# Every operation's tests run against each of these; a new implementation is added here and nowhere else.
IMPLEMENTATIONS = ("reference", "ffi")
FLOATS = ("float32", "bfloat16", "float16")
if jax.default_backend() != "cpu":  # accelerators multiply float32 in fewer bits unless they are asked
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    """Name of the implementation under test. On a CPU nothing is skipped: kernels that are missing fail."""
    if jax.default_backend() == "cpu":
        return request.param
    try:
        _choose.choose("the tests", np.float32, request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def no_cusparselt(monkeypatch):
    """cuSPARSELt cannot be used, also where it is installed."""
    monkeypatch.setattr(_choose, "library_obstacle", lambda: "cuSPARSELt is not here")


@pytest.fixture(params=FLOATS)
def dtype(request) -> str:
    """Name of a supported floating dtype."""
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2404)
