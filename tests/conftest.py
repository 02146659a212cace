"""Fixtures shared by the whole suite. Data come from fixed seeds: a failure repeats itself."""

import collections
import fcntl
import functools
import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jax_sparse24.dispatch import cusparselt, decision, hardware, native
from tests import contexts
from tests.ops import library

# Every operation's tests run against each of these; a new implementation is added here and nowhere else.
IMPLEMENTATIONS = ("reference", "ffi")
GPU = Path(__file__).parent / "gpu"
FLOATS = ("float32", "bfloat16", "float16")
# Compilers take most of the suite's time. LLVM optimises only in tests that are marked `optimised`; a session
# that leaves these out also does without XLA's slower emitters, a flag that XLA reads once in a process.
PLAINLY = "jax_disable_most_optimizations"
QUICKLY = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
gc.set_threshold(50_000, 20, 100)  # what tracing leaves behind is looked through less often
contexts.share()


def pytest_addoption(parser):
    parser.addoption(
        "--limit", type=float, default=0, help="CPU seconds above which a test fails that is not marked slow"
    )
    parser.addoption("--record", help="file for the forty slowest tests of this session")


def compile_plainly(plainly: bool) -> None:
    """Whether LLVM leaves out what it can, here and in processes that are started from here."""
    jax.config.update(PLAINLY, plainly)
    os.environ[PLAINLY.upper()] = str(int(plainly))


def pytest_configure(config):
    """What several tests or processes compile is compiled once, and quickly."""
    if "not optimised" in config.option.markexpr and jax.version.__version_info__ < (0, 11):  # gone since
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"
    compile_plainly(jax.default_backend() == "cpu")  # what modules compute on import, too
    if jax.default_backend() != "cpu":  # accelerators multiply float32 in fewer bits unless they are asked
        jax.config.update("jax_default_matmul_precision", "highest")
    config.pluginmanager.register(Durations(config), "durations of the slowest tests")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # of the process that started this one
        return
    folder = tempfile.mkdtemp(prefix="jax_sparse24-compiled-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["XDG_CACHE_HOME"] = folder  # what was measured on this machine decides in no test
    for name, value in {
        "compilation_cache_dir": folder,
        "persistent_cache_min_compile_time_secs": 0.0,
        "traceback_in_locations_limit": 0,  # where an operation was written, which is looked up for each
    }.items():
        os.environ[f"JAX_{name.upper()}"] = str(value)  # for processes that this one starts
        jax.config.update(f"jax_{name}", value)


@functools.cache
def gpu_obstacle() -> str:
    """Why tests/gpu cannot run here; empty where it can."""
    if hardware.platform() != "cuda":
        return "its tests need a CUDA device"
    try:
        decision.decide("the tests", "bfloat16", "ffi")
    except RuntimeError as error:
        return str(error)
    return ""


def slow_values(mark):
    """(parameter, its slow values) of a marker `slow_where`."""
    return [(name, v if isinstance(v, tuple) else (v,)) for name, v in mark.kwargs.items()]


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at markers
def pytest_collection_modifyitems(config, items):
    """The reference is slow: XLA compiles it for long. Files with slow tests come first, so that no process
    ends with one of them alone. Without a GPU, its tests are imported, which finds what they name wrongly,
    and left out."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("implementation") == "reference":
            item.add_marker(pytest.mark.slow)
        for mark in item.iter_markers("slow_where"):
            if any(params.get(name, "") in values for name, values in slow_values(mark)):
                item.add_marker(pytest.mark.slow)
    left_out = [item for item in items if gpu_obstacle() and GPU in item.path.parents]
    config.hook.pytest_deselected(items=left_out)
    out = set(left_out)
    items[:] = [item for item in items if item not in out]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter):
    if gpu_obstacle():
        terminalreporter.write_line(f"tests/gpu is left out: {gpu_obstacle()}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    plainly = jax.default_backend() == "cpu" and item.get_closest_marker("optimised") is None
    if jax.config.read(PLAINLY) != plainly:
        compile_plainly(plainly)
        jax.clear_caches()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """CPU seconds, of child processes too, depend little on what else the machine does."""
    before = sum(os.times()[:4])
    result = yield
    spent, limit = sum(os.times()[:4]) - before, item.config.getoption("--limit")
    if 0 < limit < spent and item.get_closest_marker("slow") is None:
        pytest.fail(
            f"took {spent:.1f} s of CPU time and is not marked slow, the limit being {limit:g} s: "
            "make it cheaper, or mark it with pytest.mark.slow"
        )
    return result


class Durations:
    """Prints the forty slowest tests with their fixtures, and writes them to the file of `--record`."""

    def __init__(self, config):
        self.file, self.seconds = config.getoption("--record"), collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        if self.file is None:
            return
        lines = [f"{seconds:8.2f} s  {test}" for test, seconds in self.seconds.most_common(40)]
        terminalreporter.write_sep("=", "forty slowest tests")
        terminalreporter.write("\n".join([*lines, ""]))
        Path(self.file).parent.mkdir(parents=True, exist_ok=True)
        Path(self.file).write_text("\n".join([*lines, ""]))


def made_once(tmp_path_factory, name: str, make) -> Path:
    """A folder that `make(folder)` fills, once for all processes of a session."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder, whole = root / name, root / f"{name}.whole"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


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
    """cuSPARSELt 0.10.0 of Hopper in jnp, in place of the custom calls; the products that were made."""
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
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    monkeypatch.setattr(native, "call", call)
    return calls


@pytest.fixture(params=[*FLOATS[:2], pytest.param("float16", marks=pytest.mark.slow)])
def dtype(request) -> str:
    """Name of a supported floating dtype."""
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2404)
