"""What hardware this machine has, and one row of facts per generation of GPUs."""

import dataclasses
import functools
import os
import platform as system
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import native
from jax_sparse24.patterns import FLOAT8


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the kernels and cuSPARSELt can do on GPUs of some compute capabilities.

    capabilities: the compute capabilities, such as "9.0".
    machine_code: which part of the built code runs there.
    layout: the order in which cuSPARSELt has metadata, if kernels write it: "sm_90", that of `Compressed24`;
        "" where it is not known.
    algorithms: release of cuSPARSELt -> (dtype, whether the dense operand is column-major, whether the result
        is) -> the algorithm that was the fastest nearly everywhere, taken where nothing was measured.
    tried: dtype -> how many algorithms a search tries.
    verified: releases whose 8-bit products and epilogues were compared with float64.
    faster: (hardware, operation, dtype, transposed) for which a kernel was measured to beat XLA's fusion."""

    capabilities: tuple[str, ...]
    machine_code: str
    layout: str = ""
    algorithms: Mapping[tuple[int, int, int], Mapping] = dataclasses.field(default_factory=dict)
    tried: Mapping[str, int] = dataclasses.field(default_factory=dict)
    verified: tuple[tuple[int, int, int], ...] = ()
    faster: frozenset[tuple[str, str, str, bool]] = frozenset()


AMPERE = Generation(("8.0", "8.6", "8.7", "8.9"), "sm_80")
HOPPER = Generation(
    ("9.0",),
    "sm_90a",
    layout="sm_90",
    algorithms={
        (0, 10, 0): {
            ("bfloat16", True, True): 17,
            ("bfloat16", False, True): 17,
            ("bfloat16", True, False): 20,
            ("bfloat16", False, False): 3,
            (FLOAT8.name, True, True): 8,
        }
    },
    # For float16, algorithms 36 to 45 of release 0.8.0 end the process with an illegal instruction on an
    # H200; with later releases they were not tried.
    tried={"bfloat16": 64, "float16": 36, FLOAT8.name: 64},
    verified=((0, 10, 0),),
    # experiments/benchmarks/results/probe/nvidia-h200_gated_2026-11-20.md. Elementwise from rows, both are as
    # fast as a copy, and with approximate estimates whole blocks gain nothing. The suite `producers` of
    # experiments.bench measures other hardware.
    faster=frozenset(
        {
            ("nvidia-h200", "gated", "bfloat16", True),
            ("nvidia-h200", "gated_backward", "bfloat16", True),
            ("nvidia-h200", "gated_backward_pack exact", "bfloat16", False),
            ("nvidia-h200", "gated_backward_pack exact", "bfloat16", True),
        }
    ),
)
BLACKWELL = Generation(("10.0", "10.3", "11.0", "12.0", "12.1"), "PTX of sm_80")
GENERATIONS = (AMPERE, HOPPER, BLACKWELL)
CAPABILITIES = {c: generation for generation in GENERATIONS for c in generation.capabilities}


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
        return Hardware(_slug(kind), kind, backend, "", cores, capability())
    model, short = _cpu_model()
    isa = native.versions()["isa"] or "no-kernels"
    plural = "core" if cores == 1 else "cores"
    return Hardware(f"{_slug(short)}-{isa}-{cores}c", f"{model}, {isa}, {cores} {plural}", "cpu", isa, cores)


def _slug(text: str) -> str:
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
