"""What hardware this machine has."""

import dataclasses
import functools
import os
import platform as system
import re
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.generations import CAPABILITIES, Generation


def platform() -> str:
    """The platform on which programs run by default: "cpu", "cuda", or another name of JAX."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" and capability()[:1].isdigit() else backend


def capability() -> str:
    """The compute capability of the default device, such as "9.0"; another text if it is no CUDA device."""
    return str(getattr(jax.devices()[0], "compute_capability", ""))


def generation() -> Generation | None:
    """The row of facts of the default device; None if it is no GPU that the kernels were written for."""
    return CAPABILITIES.get(capability())


def runs_code(code: str) -> bool:
    """Whether the default device runs machine code that the build has made for one generation of GPUs.

    Where CUDA_FORCE_PTX_JIT is 1 the driver compiles PTX in its place, which is of an older generation.

    code: as nvcc names it, such as "sm_90a"."""
    row = generation()
    return row is not None and row.code == code and os.environ.get("CUDA_FORCE_PTX_JIT") != "1"


def faster(operation: str, dtype, transposed: bool = False) -> bool:
    """Whether the kernel of an operation that XLA can fuse was measured to be faster than that here."""
    row = generation() if platform() == "cuda" else None
    return row is not None and (hardware().name, operation, str(jnp.dtype(dtype)), transposed) in row.faster


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The machine on which a table is measured.

    name: fit for a file name.
    description: for readers.
    platform: as JAX names it.
    isa: instruction set of a CPU; "" for a GPU.
    cores: CPU cores that this process may use.
    capability: compute capability of a GPU, such as "9.0"; "" for a CPU."""

    name: str
    description: str
    platform: str
    isa: str
    cores: int
    capability: str = ""


@functools.cache
def hardware() -> Hardware:
    """The default device, with its instruction set and the usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    backend = jax.default_backend()
    if backend != "cpu":
        device = jax.devices()[0]
        kind = device.device_kind
        return Hardware(name_of(kind), kind, backend, "", cores, capability())
    model, short = _cpu_model()
    isa = native.versions()["isa"] or "no-kernels"
    plural = "core" if cores == 1 else "cores"
    return Hardware(
        f"{name_of(short)}-{isa}-{cores}c", f"{model}, {isa}, {cores} {plural}", "cpu", isa, cores
    )


def name_of(text: str) -> str:
    """The description of a device, fit for a file name."""
    text = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor)\b", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def _cpu_model() -> tuple[str, str]:
    """Description and short name; virtual machines hide the model, so its numbers are part of both."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text, re.M))
    model = fields.get("model name") or system.processor() or system.machine()
    if "cpu family" not in fields:
        return model, model
    family, number = fields["cpu family"], fields.get("model", "?")
    # The part behind the @ is the frequency, which is no part of the name.
    return f"{model} (family {family}, model {number})", f"{model.split('@')[0]} f{family}m{number}"
