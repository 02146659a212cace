"""Which implementation runs an operation, and why."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_sparse24.ops import _cusparselt, _ffi, _measured
from jax_sparse24.patterns import FLOAT8

IMPLEMENTATIONS = ("reference", "ffi", "cusparselt")
# Compute capability -> machine code that runs on it. Those after 9.0 compile the PTX of sm_80.
CAPABILITIES = {
    **dict.fromkeys(("8.0", "8.6", "8.7", "8.9"), "sm_80"),
    "9.0": "sm_90a",
    **dict.fromkeys(("10.0", "10.3", "11.0", "12.0", "12.1"), "PTX of sm_80"),
}
# Operations without any kernel.
REFERENCE_ONLY = frozenset({"mask_nm", "transposable_mask24 with exact=False", "random24"})
# Operations that XLA:CPU fuses into one loop by itself.
CUDA_ONLY = frozenset({"gated"})
CPU_ONLY = frozenset({"sampled_matmul"})


def platform() -> str:
    """Where programs run by default: "cpu", "cuda", or another name of JAX."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" and capability()[:1].isdigit() else backend


def capability() -> str:
    """Compute capability of the default device, such as "9.0"; something else if it is no CUDA device."""
    return str(getattr(jax.devices()[0], "compute_capability", ""))


def choose(op: str, dtype, implementation: str | None) -> tuple[str, str]:
    """The implementation (`"reference"`, `"ffi"`, `"cusparselt"`, or `"auto"`: ffi where there are kernels,
    reference elsewhere) and the reason.

    Raises ValueError for an unknown name and RuntimeError for a named implementation that cannot run here."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation {implementation!r} is unknown; use None or one of {IMPLEMENTATIONS}."
        )
    if implementation == "reference":
        return "reference", "asked for"
    obstacle = _obstacle(op, dtype, platform())
    if implementation == "cusparselt":
        obstacle = obstacle or library_obstacle()
    if implementation is not None:
        if obstacle is not None:
            raise RuntimeError(
                f"{op}: implementation {implementation!r} cannot run: {obstacle}. "
                "Use implementation=None or 'reference'."
            )
        return implementation, "asked for"
    if obstacle is not None and platform() in _ffi.PLATFORMS:
        return "reference", obstacle
    kind = {"cpu": "CPU", "cuda": "CUDA"}
    found = " and ".join(kind[p] for p in _ffi.PLATFORMS if _obstacle(op, dtype, p) is None)
    return ("auto", f"{found} kernel; reference on other platforms") if found else ("reference", obstacle)


def _obstacle(op: str, dtype, where: str) -> str | None:
    """Why the kernels of a platform cannot run an operation, or None."""
    if op in REFERENCE_ONLY:
        return f"{op} has no kernel"
    if op in CUDA_ONLY and where == "cpu":
        return f"{op} has no CPU kernel, XLA fuses it there"
    if op in CPU_ONLY and where == "cuda":
        return f"{op} has no CUDA kernel"
    if where not in _ffi.PLATFORMS:
        return f"the kernels run on CPU and CUDA and the default backend is {where}"
    built, reason = _ffi.available(where)
    if not built:
        return reason
    if dtype == jnp.float64:
        return "the kernels have no float64"
    if where == "cuda" and platform() == "cuda" and capability() not in CAPABILITIES:
        known = ", ".join(CAPABILITIES)
        return f"this GPU has compute capability {capability()}; the kernels are for {known}"
    return None


def library_obstacle() -> str | None:
    """Why cuSPARSELt cannot run, or None."""
    if platform() != "cuda":
        return f"cuSPARSELt runs on CUDA and the default backend is {platform()}"
    if capability() not in _cusparselt.CAPABILITIES:
        known = ", ".join(_cusparselt.CAPABILITIES)
        return (
            f"this GPU has compute capability {capability()}; the order of its metadata is known for {known}"
        )
    return _cusparselt.problem() or None


def decide(
    axes: tuple[int, int], side: str, dtype, shape, pattern="2:4", alternative="dense"
) -> _measured.Decision:
    """Whether and by what `implementation=None` runs a product packed, or dense by XLA; see
    `_measured.decide`."""
    obstacle = _obstacle("matmul", dtype, platform())
    if obstacle is not None:
        return _measured.Decision(False, obstacle)
    decision = _measured.decide(axes, side, dtype, shape, pattern, alternative)
    if decision.packed and decision.implementation == "cusparselt":
        obstacle = library_obstacle()
        if obstacle is not None:
            return _measured.Decision(False, obstacle, decision.entry)
    return decision


def float8_sums(dtype):
    """The dtype in which cuSPARSELt gives a product of scaled e4m3 operands whose result is to have `dtype`:
    the scaled sums are beyond float16."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def decide_float8(
    axes: tuple[int, int], side: str, dtype, shape: tuple[int, int, int], implementation: str | None
) -> _measured.Decision:
    """Whether cuSPARSELt multiplies e4m3 operands for a product whose result has `dtype`: where it is asked
    for and can, or where a measured table says so. Otherwise such products are simulated."""
    if implementation not in (None, "cusparselt"):
        return _measured.Decision(False, f"implementation={implementation!r} has no 8-bit products")
    asked = _cusparselt.Product.of(axes, side, FLOAT8, shape, float8_sums(dtype))
    obstacle = library_obstacle() or asked.misfit()
    if obstacle:
        return _measured.Decision(False, obstacle)
    if implementation == "cusparselt":
        return _measured.Decision(True, "asked for")
    decision = decide(axes, side, FLOAT8, shape)
    by_library = decision.packed and decision.implementation == "cusparselt"
    return decision if by_library else dataclasses.replace(decision, packed=False)


def run(op: str, dtype, implementation: str | None, kernel, reference, *args, cusparselt=None):
    """Calls `kernel(*args)`, `cusparselt(*args)` (None: the kernel) or `reference(*args)`. The platform is
    decided when the program is lowered."""
    name, _ = choose(op, dtype, implementation)
    if name == "reference":
        return reference(*args)
    if name == "cusparselt":
        return (cusparselt or kernel)(*args)
    if name == "ffi":
        return kernel(*args)
    kernels = {p: kernel for p in _ffi.PLATFORMS if _obstacle(op, dtype, p) is None}
    return jax.lax.platform_dependent(*args, **kernels, default=reference)
