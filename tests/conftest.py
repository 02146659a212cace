"""Fixtures shared by the whole suite. Data come from fixed seeds: a failure repeats itself."""

import os
import shutil
import tempfile
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jax_sparse24.dispatch import cusparselt, decision, native
from tests.ops import library

# Every operation's tests run against each of these; a new implementation is added here and nowhere else.
IMPLEMENTATIONS = ("reference", "ffi")
FLOATS = ("float32", "bfloat16", "float16")
if jax.default_backend() != "cpu":  # accelerators multiply float32 in fewer bits unless they are asked
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_configure(config):
    """What several tests or processes compile is compiled once, half of the suite's time being compilers'."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # of the process that started this one
        return
    folder = tempfile.mkdtemp(prefix="jax_sparse24-compiled-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    for name, value in {
        "compilation_cache_dir": folder,
        "persistent_cache_min_compile_time_secs": 0.0,
    }.items():
        os.environ[f"JAX_{name.upper()}"] = str(value)  # for processes that this one starts
        jax.config.update(f"jax_{name}", value)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    """Name of the implementation under test. On a CPU nothing is skipped: kernels that are missing fail."""
    if jax.default_backend() == "cpu":
        return request.param
    try:
        decision.decide("the tests", np.float32, request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def no_cusparselt(monkeypatch):
    """cuSPARSELt cannot be used, also where it is installed."""
    monkeypatch.setattr(decision, "library_obstacle", lambda: "cuSPARSELt is not here")


class LibraryCall(NamedTuple):
    operands: str
    biases: int
    activation: int


@pytest.fixture
def documented_cusparselt(monkeypatch) -> list[LibraryCall]:
    """cuSPARSELt 0.10.0 in jnp, in place of the custom calls; the products that were made."""
    calls, kernels = [], native.call

    def call(name, out_types, *args, **flags):
        if name != "s24_cusparselt_matmul":
            return library.kernel_call(kernels, name, out_types, *args, **flags)
        compressed, dense, *bias = args
        calls.append(LibraryCall(str(compressed.dtype), len(bias), flags["activation"]))
        out = out_types[0]
        packed = library.decompress(compressed, out.shape[-1 if flags["out_packed_last"] else -2])
        return [library.multiply(packed, dense, *bias, **flags).astype(out.dtype)]

    monkeypatch.setattr(decision, "library_obstacle", lambda: None)
    monkeypatch.setattr(cusparselt, "version", lambda: (0, 10, 0))
    monkeypatch.setattr(native, "call", call)
    return calls


@pytest.fixture(params=FLOATS)
def dtype(request) -> str:
    """Name of a supported floating dtype."""
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2404)
