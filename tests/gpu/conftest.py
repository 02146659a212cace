"""Tests that need a CUDA device with our kernels; `tests/conftest.py` leaves them out everywhere else."""

import pytest

from jax_sparse24.dispatch import cusparselt as library
from jax_sparse24.dispatch.decision import decide


@pytest.fixture
def cusparselt():
    """The module, where the library can be used."""
    try:
        decide("the tests", "bfloat16", "cusparselt")
    except RuntimeError as error:
        pytest.skip(str(error))
    return library
