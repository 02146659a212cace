"""Which implementation runs an operation, and why."""

import jax
import jax.numpy as jnp

from jax_sparse24.ops import _ffi, _measured

IMPLEMENTATIONS = ("reference", "ffi", "cusparselt")


def choose(op: str, dtype, implementation: str | None) -> tuple[str, str]:
    """The implementation (`"reference"`, `"ffi"`, or `"auto"`: ffi on CPU, reference elsewhere) and the
    reason.

    Raises ValueError for an unknown name and RuntimeError for a named implementation that cannot run here.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation {implementation!r} is unknown; use None or one of {IMPLEMENTATIONS}."
        )
    if implementation == "reference":
        return "reference", "asked for"
    obstacle = _obstacle(dtype)
    if implementation == "cusparselt":
        raise RuntimeError(
            f"{op}: implementation 'cusparselt' needs the CUDA module, which this version does not have yet."
        )
    if implementation == "ffi":
        if obstacle is None and jax.default_backend() != "cpu":
            obstacle = f"the kernels run on CPU and the default backend is {jax.default_backend()}"
        if obstacle is not None:
            raise RuntimeError(
                f"{op}: implementation 'ffi' cannot run: {obstacle}. Use implementation=None or 'reference'."
            )
        return "ffi", "asked for"
    if obstacle is not None:
        return "reference", obstacle
    return "auto", "CPU kernel; reference on other platforms"


def _obstacle(dtype) -> str | None:
    available, reason = _ffi.available()
    if not available:
        return reason
    if dtype == jnp.float64:
        return "the kernels have no float64"
    return None


def packed_pays(axes: tuple[int, int], side: str, dtype, shape, pattern: str = "2:4") -> _measured.Decision:
    """Whether `implementation=None` runs a product packed, or masked dense by XLA; see `_measured.decide`."""
    obstacle = _obstacle(dtype)
    if obstacle is None and jax.default_backend() != "cpu":
        obstacle = f"no kernels for {jax.default_backend()} yet"
    if obstacle is not None:
        return _measured.Decision(False, obstacle)
    return _measured.decide(axes, side, dtype, shape, pattern)


def run(op: str, dtype, implementation: str | None, kernel, reference, *args):
    """Calls `kernel(*args)` or `reference(*args)`. The platform is decided when the program is lowered."""
    name, _ = choose(op, dtype, implementation)
    if name == "reference":
        return reference(*args)
    if name == "ffi":
        return kernel(*args)
    return jax.lax.platform_dependent(*args, cpu=kernel, default=reference)
