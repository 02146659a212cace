"""What a benchmark run measures: command-line options, shape presets and the cases they make."""

import functools
import math
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro

import jax_sparse24 as s24
from experiments.benchmarks import dense_e4m3
from experiments.config import REPOSITORY, Mesh, nearest
from experiments.errors import UserError, require
from jax_sparse24.dispatch.decision import decide
from jax_sparse24.measure import PATTERNS
from jax_sparse24.patterns import FLOAT8, VNM

SUITES = ("gemm", "producers", "ffn", "train-step")
RESULTS = REPOSITORY / "experiments/benchmarks/results"
# Model width and FFN width of known models. (Llama's FFN has a third matrix of the same size.)
PRESETS = {
    "demo": (128, 512),
    "gpt2-124m": (768, 3072),
    "gpt2-355m": (1024, 4096),
    "gpt2-774m": (1280, 5120),
    "gpt2-1.5b": (1600, 6400),
    "llama-1b": (2048, 8192),
    "llama-3b": (3072, 8192),
    "llama-7b": (4096, 11008),
    "llama3-8b": (4096, 14336),
    "opt-6.7b": (4096, 16384),
}


class Arm(NamedTuple):
    """What is measured under one name: a method, and fields of the model of whole steps, which blocks alone
    do not have."""

    method: s24.methods.Method
    model: Mapping[str, str] = MappingProxyType({})

    @property
    def rival(self) -> str:
        """The name of its dense rival in 8 bits; "" for an arm without."""
        return dense_e4m3.rival(self.method, "attention_method" in self.model)


def with_projections(method: s24.methods.Method) -> Arm:
    """The method, in the projections of attention, too."""
    return Arm(method, MappingProxyType({"attention_method": type(method).__name__}))


METHODS = {
    "Dense": s24.methods.Dense(),
    "STE": s24.methods.STE(),
    "FST": s24.methods.FST(),
    "FST-approximate": s24.methods.FST(mvue="approximate"),
    "FST-dense-wgrad": s24.methods.FST(mvue=None),
    "FST-e4m3": s24.methods.FST(fp8="tensor"),
    "FST-e4m3-rows": s24.methods.FST(fp8="row"),
    "FST-e4m3-delayed": s24.methods.FST(fp8="delayed"),
    "SSTE": s24.methods.SSTE(),
    # Stored rows from before 2026-11-28, when this was the default of SSTE, have this name, too.
    "SSTE-approximate": s24.methods.SSTE(mvue="approximate"),
    "SSTE-e4m3": s24.methods.SSTE(fp8="tensor", fp8_backward="e4m3"),
    "Activation24": s24.methods.Activation24(),
    "Venom": s24.methods.Venom(),
    "Venom-m8": s24.methods.Venom(m=8),
    "Venom-v128": s24.methods.Venom(v=128),
    **dense_e4m3.METHODS,
}
OF_STEPS = {
    "FST-projections": with_projections(s24.methods.FST()),
    "FST-projections-e4m3": with_projections(s24.methods.FST(fp8="tensor")),
    **{name: with_projections(method) for name, method in dense_e4m3.WITH_PROJECTIONS.items()},
}
DEFAULT_METHODS = ("STE", "FST", "SSTE", "Activation24", "Venom")
DTYPES = ("float32", "bfloat16", "float16")
# Of the suite ladder, from below.
RUNGS = ("plain", "bfloat16", "cudnn", "embedding", "logits", "no-scan", "no-remat", "one-batch", "FST")


class Case(NamedTuple):
    """Tokens, model width, FFN width."""

    T: int
    d: int
    f: int


# The default on a CPU: GPT-2 widths scaled down, one sweep over widths and one over tokens.
CPU_WIDTHS = ((128, 512), (512, 2048), (1024, 4096))
CPU_TOKENS, CPU_SWEEP, CPU_SWEPT = 2048, (256, 1024), (512, 2048)
CPU_STEPS = ((128, 512), (512, 2048))
WIDTHS = tuple(PRESETS.values())[1:]
TOKENS, SWEEP, SWEPT = 16384, (1024, 4096), PRESETS["gpt2-1.5b"]
STEPS = (PRESETS["gpt2-124m"],)
BLOCKS, LADDER_BLOCKS = 2, 12  # of the ladder those of the size 124m, whose steps it has
LADDER_TOKENS = 65536


@dataclass(frozen=True)
class Settings:
    """Measure this machine: dense against 2:4 and V:N:M, ratios first, every timed result checked.

    Suites (default: all that measure):
      gemm        one matrix product, dense and with either operand sparse, as forward and backward use it
      producers   mask, prune, soft threshold, pack, transposable mask, MVUE, squared ReLU, V:N:M; gated
                  activations
      ffn         forward, and forward with backward, per method, with everything counted
      train-step  whole steps of a language model, with the share of the FFN
      mesh        whole steps over several devices of this host, beside one; only where it is named
      ladder      steps of the evidence's size 124m from a plain program on, one option changed at a time;
                  only where it is named
      report      measures nothing: docs/benchmarks.md and its plots from the files in --out

    Ratios are medians of paired samples with 95 % intervals, against the fastest dense program: XLA's by
    default and with cuBLASLt; in 16 bits on a CPU also in float32; of one product in e4m3 also with sums in
    fewer bits than float32; and PyTorch's, where it is installed, whose 2:4 products, blocks and packing take
    part, too: rows and columns "torch".
    Each suite prints a table and writes HARDWARE_SUITE_DATETIME.json (UTC) after each case, complete or not;
    no file is overwritten. The exit status is 1 if any result is wrong, if a case could not be measured, or
    if packing and multiplying took less time than multiplying alone, by more than noise: then the measurement
    is unsound."""

    suites: tyro.conf.Positional[
        tuple[Literal["gemm", "producers", "ffn", "train-step", "mesh", "ladder", "report"], ...]
    ] = ()
    """what to run"""
    shape: Annotated[tuple[str, ...], tyro.conf.arg(metavar="D,F|PRESET"), tyro.conf.UseAppendAction] = ()
    """model and FFN width, as 512,2048 or as a preset: demo, gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1.5b,
    llama-1b, llama-3b, llama-7b, llama3-8b, opt-6.7b. Default: sweeps over widths and tokens that suit the
    device"""
    tokens: Annotated[tuple[int, ...], tyro.conf.arg(metavar="T"), tyro.conf.UseAppendAction] = ()
    """tokens in the batch; for mesh, of it on each device, or on each group of tp"""
    dtype: Annotated[
        tuple[Literal["float32", "bfloat16", "float16", "float8_e4m3fn"], ...], tyro.conf.UseAppendAction
    ] = ()
    """default: float32 and bfloat16, of mesh alone on a CPU float32, because XLA cannot sum bfloat16 there;
    float8_e4m3fn is for gemm alone, which has it by default where the device does"""
    vnm: Annotated[tuple[str, ...], tyro.conf.arg(metavar="V,M"), tyro.conf.UseAppendAction] = ()
    """for gemm and producers: blocks of V:2:M, as 64,16, measured where they fit. Default: 64,8 and 64,16"""
    method: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME"), tyro.conf.UseAppendAction] = ()
    """for ffn, train-step and mesh: FST-approximate, FST-dense-wgrad, FST-e4m3, FST-e4m3-rows,
    FST-e4m3-delayed, SSTE-approximate, SSTE-e4m3, Venom-m8 (64:2:8), Venom-v128 (128:2:16), or any of
    s24.methods; for train-step and mesh also FST-projections and FST-projections-e4m3, whose projections of
    attention are by FST, too. Default: STE, FST, SSTE, Activation24, Venom. Dense is always there, and beside
    methods with products in 8 bits also their dense rival: Dense-e4m3, Dense-e4m3-rows, Dense-e4m3-delayed or
    Dense-projections-e4m3"""
    implementation: Literal["auto", "ffi", "cusparselt", "reference"] = "auto"
    """for ffn and whole steps: auto is what users get, which decides per product"""
    mesh: Annotated[tuple[str, ...], tyro.conf.arg(metavar="AXIS=N,..."), tyro.conf.UseAppendAction] = ()
    """for mesh: devices along dp, fsdp and tp, as dp=2 or dp=2,tp=2. Default: dp and fsdp over all devices,
    and tp=2"""
    rungs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME"), tyro.conf.UseAppendAction] = ()
    """for ladder: plain, bfloat16, cudnn, embedding, logits, no-scan, no-remat, one-batch, FST, each with the
    changes of those before it. Default: all"""
    layers: int | None = None
    """for train-step, mesh and ladder: blocks of the model (default: 2, of ladder 12)"""
    repeats: int = 9
    """samples of each program: rounds, in each of which all programs take their turn in random order"""
    seconds: float = 4.0
    """a program whose samples took this long together takes no more, but 3 at least; 6 make an interval"""
    seed: int | None = None
    """of the orders (default: one of its own for each run); it is stored"""
    torch: bool = True
    """whether PyTorch takes part where it is installed"""
    exhaustive: bool = False
    """on a GPU: also dense programs for which XLA tries every tiling, which takes minutes each to compile"""
    producer: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME"), tyro.conf.UseAppendAction] = ()
    """for producers: those alone, as "mvue_pack24 exact" or "gated backward". Default: all"""
    own_kernel: bool = False
    """for gemm, in 16 bits on a GPU with cuSPARSELt: also 2:4 by our own kernel"""
    parts: bool = True
    """for ffn: also each producer and each product by itself"""
    out: Path | None = None
    """folder of the JSON files (default: experiments/benchmarks/results of this repository)"""

    def __post_init__(self):
        require(self.repeats >= 1, f"--repeats must be at least 1, got {self.repeats}.")
        require(self.layers is None or self.layers >= 1, f"--layers must be at least 1, got {self.layers}.")
        require(self.seconds > 0, f"--seconds must be positive, got {self.seconds}.")
        alone = "report" not in self.suites or len(self.suites) == 1
        require(alone, "report makes pages from stored results and measures nothing: run it alone.")
        require(
            FLOAT8.name not in self.dtype or self.suites == ("gemm",),
            f"--dtype {FLOAT8.name} is for the suite gemm alone.",
        )
        require(
            self.seed is None or self.seed >= 0, f"--seed must be a non-negative number, got {self.seed}."
        )
        for tokens in self.tokens:
            require(
                tokens >= 4 and tokens % 4 == 0, f"--tokens must be a positive multiple of 4, got {tokens}."
            )
        for shape in self.shape:
            widths(shape)
        for name in self.method:
            blocks = not arm(name).model or "ffn" not in (self.suites or SUITES)
            require(
                blocks,
                f"--method {name}: the suite ffn does not have it, but train-step and mesh do, as it differs "
                "in the model around the blocks. Name the suite to run, such as train-step.",
            )
        for name in self.rungs:
            known = ", ".join(RUNGS)
            require(name in RUNGS, f"--rungs {name!r} is unknown; there are {known}.{nearest(name, RUNGS)}")
        if self.suites == ("ladder",):
            for option in ("dtype", "method"):
                require(
                    not getattr(self, option),
                    f"--{option} is not for the suite ladder, whose rungs have their own.",
                )
        require(
            not self.producer or "producers" in (self.suites or SUITES),
            "--producer is for the suite producers: name that, or leave it out.",
        )
        require(
            not self.rungs or "ladder" in self.suites,
            "--rungs is for the suite ladder: name that, or leave it out.",
        )
        _ = self.patterns
        if "mesh" in self.suites:
            _ = self.meshes

    @functools.cached_property
    def first_seed(self) -> int:
        """The seed asked for, or one that no other run has."""
        return secrets.randbits(32) if self.seed is None else self.seed

    def seed_of(self, *place) -> int:
        """The seed of the orders in which programs of one place (a case, a product) take turns."""
        return zlib.crc32(repr((self.first_seed, *place)).encode())

    @property
    def folder(self) -> Path:
        return self.out or RESULTS

    @property
    def dtypes(self) -> tuple[str, ...]:
        if self.dtype:
            return self.dtype
        return DTYPES[:1] if self.suites == ("mesh",) and jax.default_backend() == "cpu" else DTYPES[:2]

    @property
    def patterns(self) -> tuple[VNM, ...]:
        return tuple(pattern(text) for text in self.vnm) or PATTERNS

    def blocks(self, suite: str) -> int:
        """Of the model whose whole steps the suite measures."""
        return self.layers or (LADDER_BLOCKS if suite == "ladder" else BLOCKS)

    @property
    def meshes(self) -> dict[str, Mesh]:
        """By name. Raises UserError for one with more devices than there are."""
        count = jax.device_count()
        require(
            count > 1,
            "The suite mesh needs several devices, and there is one. On a CPU write "
            "XLA_FLAGS=--xla_force_host_platform_device_count=4 before the command.",
        )
        return dict(mesh_of(text, count) for text in self.mesh or (f"dp={count}", f"fsdp={count}", "tp=2"))

    @property
    def arms(self) -> dict[str, Arm]:
        """What is measured in whole steps, by name; Dense first, and after it the rivals of methods in 8
        bits."""
        asked = {name: arm(name) for name in self.method or DEFAULT_METHODS}
        rivals = filter(None, (one.rival for one in asked.values()))
        return {name: arm(name) for name in ("Dense", *rivals)} | asked

    @property
    def methods(self) -> dict[str, s24.methods.Method]:
        """The methods of blocks by name, in the same order: the arms that do not differ in the model."""
        return {name: arm.method for name, arm in self.arms.items() if not arm.model}

    def cases(self, suite: str) -> list[Case]:
        """What `suite` measures: the shapes asked for at all tokens asked for, or the default sweeps."""
        cpu = jax.default_backend() == "cpu"
        usual = LADDER_TOKENS if suite == "ladder" else TOKENS
        tokens = self.tokens or (CPU_TOKENS if cpu else usual,)
        if self.shape:
            return [Case(T, *widths(shape)) for shape in self.shape for T in tokens]
        swept = CPU_WIDTHS if cpu else WIDTHS
        if suite == "train-step":
            swept = CPU_STEPS if cpu else STEPS
        if suite == "ladder":
            swept = CPU_STEPS[:1] if cpu else STEPS
        cases = [Case(T, *shape) for shape in swept for T in tokens]
        if suite in ("gemm", "ffn") and not self.tokens:
            sweep, shape = (CPU_SWEEP, CPU_SWEPT) if cpu else (SWEEP, SWEPT)
            cases += [Case(T, *shape) for T in sweep]
        return cases


def kernels() -> str:
    """The implementation whose kernels are measured: the reference stands in where there are none."""
    try:
        return decide("bench", jnp.bfloat16, "ffi").runs
    except RuntimeError:
        return "reference"


def widths(shape: str) -> tuple[int, int]:
    """(d, f) of a preset or of "d,f"; UserError for anything else."""
    if shape in PRESETS:
        return PRESETS[shape]
    parts = shape.split(",")
    good = len(parts) == 2 and all(part.strip().isdigit() for part in parts)
    require(
        good,
        f"--shape {shape!r} is neither D,F (such as 512,2048) nor one of {', '.join(PRESETS)}."
        f"{nearest(shape, PRESETS)}",
    )
    d, f = map(int, parts)
    require(
        d > 0 and f > 0 and d % 4 == f % 4 == 0,
        f"--shape {shape}: both widths must be positive multiples of 4.",
    )
    return d, f


def mesh_of(text: str, count: int) -> tuple[str, Mesh]:
    """Name and mesh of "dp=2,tp=2"; UserError for anything else, and for more than `count` devices."""
    parts = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    good = parts and set(parts) <= {"dp", "fsdp", "tp"} and all(size.isdigit() for size in parts.values())
    require(good, f"--mesh {text!r} is not devices along dp, fsdp or tp, such as dp=2,tp=2.")
    found = {"dp": 1} | {axis: int(size) for axis, size in parts.items()}
    needed = math.prod(found.values())
    require(0 < needed <= count, f"--mesh {text} is of {needed} devices, but there are {count}.")
    return ", ".join(f"{axis} {size}" for axis, size in found.items() if size > 1) or "dp 1", Mesh(**found)


def pattern(text: str) -> VNM:
    """V:2:M of "v,m"; UserError for anything else."""
    parts = text.split(",")
    good = len(parts) == 2 and all(part.strip().isdigit() for part in parts)
    require(good, f"--vnm {text!r} is not V,M, such as 64,16.")
    try:
        return VNM(*map(int, parts))
    except ValueError as error:
        raise UserError(f"--vnm {text}: {error}") from error


def arm(name: str) -> Arm:
    """The arm of that name; UserError with the nearest name if there is none."""
    known = METHODS | {
        n: kind
        for n, kind in vars(s24.methods).items()
        if isinstance(kind, type) and issubclass(kind, s24.methods.Method) and kind is not s24.methods.Method
    }
    known |= OF_STEPS
    names = ", ".join(sorted(known))
    require(name in known, f"--method {name!r} is unknown; there are {names}.{nearest(name, known)}")
    found = known[name]
    if isinstance(found, Arm):
        return found
    return Arm(found() if isinstance(found, type) else found)
