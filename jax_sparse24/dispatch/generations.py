"""Generations of GPUs, one row of facts for each.

The build reads this file, too (ffi/build_cuda.py), so that it imports only what Python itself has."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Layout:
    """How cuSPARSELt has the metadata of a compressed matrix.

    name: of the order, that of its struct in ffi/cuda/metadata_order.cuh.
    rows: to a multiple of how many rows metadata are padded."""

    name: str
    rows: int


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the kernels and cuSPARSELt can do on GPUs of some compute capabilities.

    Tiles of kernels are facts of their sources; see docs/architecture.md for what is no fact of a generation.

    capabilities: the compute capabilities, such as "9.0".
    code: what is compiled for them, as nvcc names it: machine code, such as "sm_90a", or PTX, such as
        "compute_80", which the driver compiles.
    layout: that of cuSPARSELt's compressed matrices, if kernels write it; None where it is not known.
    algorithms: release of cuSPARSELt -> (dtype, whether the dense operand is column-major, whether the result
        is) -> the algorithm that was the fastest nearly everywhere, taken where nothing was measured.
    tried: dtype -> how many algorithms a search tries.
    verified: releases whose 8-bit products and epilogues were compared with float64.
    float8: whether XLA's dense products of float8_e4m3fn were measured to beat those of 16-bit floats.
    faster: (hardware, operation, dtype, transposed) for which a kernel was measured to beat XLA's fusion.
    by_default: whether kernels run that are not asked for by name; False where none ever ran
        on such a GPU."""

    capabilities: tuple[str, ...]
    code: str
    layout: Layout | None = None
    algorithms: Mapping[tuple[int, int, int], Mapping] = dataclasses.field(default_factory=dict)
    tried: Mapping[str, int] = dataclasses.field(default_factory=dict)
    verified: tuple[tuple[int, int, int], ...] = ()
    float8: bool = False
    faster: frozenset[tuple[str, str, str, bool]] = frozenset()
    by_default: bool = True


AMPERE = Generation(("8.0", "8.6", "8.7", "8.9"), "sm_80")
HOPPER = Generation(
    ("9.0",),
    "sm_90a",
    layout=Layout("Sm90", rows=64),
    algorithms={
        (0, 10, 0): {
            ("bfloat16", True, True): 17,
            ("bfloat16", False, True): 17,
            ("bfloat16", True, False): 20,
            ("bfloat16", False, False): 3,
            ("float8_e4m3fn", True, True): 16,  # at five of six shapes of tuning/nvidia-h200.json
        }
    },
    # For float16, algorithms 36 to 45 of release 0.8.0 end the process with an illegal instruction on an
    # H200; with later releases they were not tried.
    tried={"bfloat16": 64, "float16": 36, "float8_e4m3fn": 64},
    verified=((0, 10, 0),),
    float8=True,  # experiments/benchmarks/results/probe/nvidia-h200_fp8_2026-11-20.md
    # experiments/benchmarks/results/probe/nvidia-h200_gated_2026-11-20.md. Elementwise from rows, both are as
    # fast as a copy, and with approximate estimates whole blocks gain nothing. The suite `producers` of
    # experiments.bench measures other hardware.
    faster=frozenset(
        {
            ("nvidia-h200", "gated", "bfloat16", True),
            ("nvidia-h200", "gated_backward", "bfloat16", True),
            ("nvidia-h200", "gated_backward_pack exact", "bfloat16", False),
            ("nvidia-h200", "gated_backward_pack exact", "bfloat16", True),
            # Whole blocks: experiments/benchmarks/results/probe/nvidia-h200_fused_2026-11-25.md.
            ("nvidia-h200", "slope_mvue exact", "bfloat16", False),
            ("nvidia-h200", "pack24_masked_both", "bfloat16", False),
            ("nvidia-h200", "matmul_squared_relu", "bfloat16", False),
            # The same: experiments/benchmarks/results/probe/nvidia-h200_slope_2026-11-28.md.
            ("nvidia-h200", "matmul_slope", "bfloat16", False),
        }
    ),
)
# Compiled, and never run.
BLACKWELL = Generation(("10.0", "10.3"), "sm_100", by_default=False)
BLACKWELL_RTX = Generation(("12.0", "12.1"), "sm_120", by_default=False)
THOR = Generation(("11.0",), "compute_80", by_default=False)
GENERATIONS = (AMPERE, HOPPER, BLACKWELL, BLACKWELL_RTX, THOR)
CAPABILITIES = {c: generation for generation in GENERATIONS for c in generation.capabilities}
