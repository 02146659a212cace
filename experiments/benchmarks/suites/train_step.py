"""Suite train-step: whole optimiser steps of a language model, with the share of the FFN."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse24 as s24
from experiments.benchmarks import check, rows, xla_programs
from experiments.benchmarks.rows import show_mb, show_ms, show_ratio
from experiments.benchmarks.settings import Case, Settings
from experiments.benchmarks.suites.ffn import block, data, forward_backward, made_by, state_of
from experiments.benchmarks.torch import programs as torch_programs
from experiments.config import Config, Optim, Train
from experiments.data import text
from experiments.models import decoder
from experiments.training.step import Program as StepProgram
from jax_sparse24.dispatch.hardware import platform
from jax_sparse24.measure import Program, interleaved, untuned

HEAD = 64
RATE = 0.05  # times 1 / d: the first update changes what a neuron gives by about as much at every width
REFRESHING = "step with refresh"
PARTS = ("step", REFRESHING, "ffn")
STEPS = 100_000  # of the run that a step is of: every method's dense warm-up fits into it
QUEUED = 8  # steps of a sample on an accelerator: a run, too, starts a step before the one before it is done
WHAT = """Whole optimiser steps of a small decoder: forward, backward, clipping, AdamW. A
method's step counts its search for masks at the rate at which it is made (FST: once in 40 steps). On CUDA
attention in 16-bit floats is cuDNN's, as in training, and gradients repeat up to rounding. *against* names
the fastest dense step, which ratios divide by a step's time; *share of FFN* is the time of the FFNs' forward
and backward pass, measured alone, over the step's, both by XLA as it compiles by default; *expected* is the
speed-up over that step which the FFNs measured alone leave for the whole one. *torch dense* is the same step
from the same parameters, compiled by PyTorch, with its fused AdamW and its choice of attention."""


def config_of(case: Case, dtype: str, method, layers: int, seq: int = 256) -> Config:
    """A decoder whose batch has about T tokens. cuDNN has attention for 16-bit floats."""
    attention = "cudnn" if platform() == "cuda" and jnp.dtype(dtype).itemsize == 2 else "xla"
    seq = min(seq, case.T)
    heads = max(case.d // HEAD, 1)
    while case.d % (2 * heads):
        heads -= 1
    return Config(
        model=decoder.Config(
            layers=layers, d=case.d, f=case.f, heads=heads, dtype=dtype, attention=attention
        ),
        data=text.Config(seq=seq, batch=max(case.T // seq, 1)),
        # From the first step on, so that the second one's loss tells an update that is wrong.
        optim=Optim(lr=RATE / case.d, warmup=0),
        train=Train(steps=STEPS),
        method=method,
    )


class Steps:
    """Optimiser steps of one method, one a call. options: XLA's for compiling them, which the constructor
    does; it runs nothing. devices: of the config's mesh; None for all."""

    def __init__(self, config: Config, implementation: str | None, options: dict | None = None, devices=None):
        if implementation is not None:
            model = dataclasses.replace(config.model, implementation=implementation)
            config = dataclasses.replace(config, model=model)
        self.program = StepProgram(config, options, devices=devices)
        self.advance = self.program.step(sparse=bool(config.method.ffn_plan().rows))
        data = config.data
        words = data.vocabulary.size - 1
        tokens = np.random.default_rng(0).integers(0, words, (data.batch, data.seq + 1), np.int32)
        self.tokens = self.program.batch(tokens)

    @cached_property
    def state(self):
        return self.program.initial_state()

    @cached_property
    def metrics(self) -> list:
        return self.first_two()

    def first_two(self) -> list:
        """Loss and gradient norm of the first two steps from the initial state; later calls go on."""
        vars(self).pop("state", None)  # one in memory at a time
        self.state = self.program.initial_state()
        return [jax.device_get(self()) for _ in range(2)]

    def __call__(self):
        self.state, metrics = self.advance(self.state, self.tokens)
        return metrics

    def refreshing(self):
        """A step at whose beginning the masks are searched for."""
        self.state = self.program.loop.refreshed(self.state)
        return self()

    @property
    def temp_bytes(self) -> int | None:
        plan = self.advance.memory_analysis()
        return None if plan is None else int(plan.temp_size_in_bytes)


def run(settings: Settings, progress) -> Iterator[tuple[str, Callable[[], list[dict]]]]:
    """Names of cases and what gives their rows, one per method."""
    for case in settings.cases("train-step"):
        for dtype in settings.dtypes:
            what = f"T={case.T} d={case.d} f={case.f} {dtype}"
            yield what, partial(measure_case, case, dtype, settings, progress)


def expected_metrics(arms: Mapping[str, Config]) -> dict[str, list]:
    """Of the arms that are sparse: `Steps.metrics` with masked-dense products. One block is compiled for all
    layers, whose parameters are the same bit for bit."""

    def truth(config):
        scanned = dataclasses.replace(config.model, scan=True)
        return partial(Steps, dataclasses.replace(config, model=scanned), "reference", untuned())

    sparse = {name: truth(config) for name, config in arms.items() if config.method.ffn_plan().rows}
    steps = check.compiled(sparse)
    return {name: steps.pop(name).first_two() for name in sparse}  # one state in memory at a time


def verdict(steps: Steps, truth: list | None, stochastic: bool, dtype: str, case: Case) -> str:
    """Loss and gradient norm of two steps against `truth`, and against themselves."""
    if not all(math.isfinite(value) for metrics in steps.metrics for value in metrics.values()):
        return "wrong"
    near = check.tolerance(dtype, max(case))
    # Random draws differ where gradients differ by rounding; they enter norms with their squares.
    near = check.tolerance_of_estimate(near) if stochastic else near
    if truth is not None and not alike(steps.metrics, truth, near):
        return "wrong"
    again = steps.first_two()
    if steps.program.config.model.attention == "xla":
        same = all(
            np.array_equal(a[name], b[name]) for a, b in zip(again, steps.metrics, strict=True) for name in a
        )
    else:
        same = alike(again, steps.metrics, near)
    return "ok" if same else "not repeatable"


def rival_verdict(steps, truth: list, dtype: str, case: Case) -> str:
    """Of steps by another program, by loss and gradient norm; truth: those of the dense `Steps`."""
    near = check.tolerance(dtype, max(case))
    if not alike(steps.metrics, truth, near):
        return "wrong"
    return "ok" if alike(steps.first_two(), steps.metrics, near) else "not repeatable"


def alike(ours: list, theirs: list, near: float) -> bool:
    """Whether losses and gradient norms differ by a share of `near` at most."""
    return all(
        abs(float(a[name]) - float(b[name])) <= near * abs(float(b[name]))
        for a, b in zip(ours, theirs, strict=True)
        for name in ("loss", "grad_norm")
    )


def measure_case(case: Case, dtype: str, settings: Settings, progress=lambda text: None) -> list[dict]:
    """All methods of one case. progress: called with what is worked on."""
    arms = {
        name: config_of(case, dtype, method, settings.layers) for name, method in settings.methods.items()
    }

    def rivals(config, dense):
        found = dense_variants(config, settings.exhaustive)
        return found | (rival_steps(config, dense) if settings.torch else {})

    by, seed = settings.implementation, settings.seed_of("train-step", *case, dtype)
    return compare(arms, by, settings.repeats, settings.seconds, progress, rivals, seed)


def dense_variants(config: Config, exhaustive: bool) -> dict:
    """XLA's steps of the dense model besides the default ones, by name."""
    found = {}
    for name, variant in xla_programs.variants(config.model.dtype, exhaustive).items():
        own = dataclasses.replace(config.model, dtype=variant.dtype or config.model.dtype)

        def build(name=name, variant=variant, own=own):
            steps = Steps(dataclasses.replace(config, model=own), None, variant.options)
            steps.metrics  # noqa: B018 - what compiles and cannot run is left out, too
            return {f"Dense: {name}": steps}

        found |= torch_programs.or_warn(f"XLA's dense step, {name},", build)
    return found


def rival_steps(config: Config, dense: Steps) -> dict:
    """PyTorch's optimiser steps of the dense model, by name."""

    def build():
        from experiments.benchmarks.torch import model as torch_model

        params = dense.program.initial_state()["params"]
        return {"torch dense": torch_model.Steps(config, params, dense.tokens[0])}

    return torch_programs.where_possible("step", build)


def compare(
    arms: Mapping[str, Config],
    implementation: str = "auto",
    repeats: int = 15,
    seconds: float = 2.0,
    progress=lambda text: None,
    rivals=lambda config, steps: {},
    seed: int | None = None,
) -> list[dict]:
    """One row per configuration: optimiser steps in its sparse phase, all sampled in turn, and its FFNs
    alone. They differ in the method only; the first one is dense. rivals: gives the dense model's steps by
    other programs, by name, for its configuration and `Steps`. seed: of the order."""
    baseline, config = next(iter(arms.items()))
    model, dtype = config.model, config.model.dtype
    case = Case(config.data.batch * config.data.seq, model.d, model.f)
    where = f"T={case.T} d={case.d} f={case.f} {dtype}"
    named = None if implementation == "auto" else implementation
    operands = data(case, dtype)
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    progress(f"{where}: what the results must be")
    truths = expected_metrics(arms)
    programs, steps, status = {}, {}, {}
    for name, config in arms.items():
        method = config.method
        progress(f"{where}: {name} is checked")
        steps[name] = Steps(config, named)
        status[name] = verdict(steps[name], truths.get(name), method.stochastic, dtype, case)
        programs[name, "step"] = steps[name]
        if s24.due(method, 0):
            programs[name, REFRESHING] = steps[name].refreshing
        state = state_of(method, operands)
        programs[name, "ffn"] = Program(forward_backward(block(method, named)), *args, state)
    progress(f"{where}: dense steps by other programs")
    others = rivals(arms[baseline], steps[baseline])
    for name, other in others.items():
        steps[name] = programs[name, "step"] = other
        status[name] = rival_verdict(other, steps[baseline].metrics, dtype, case)
    progress(f"{where}: all in turn")
    times = rows.times(interleaved(programs, repeats, seconds, QUEUED, seed))
    times = {place: t for place, t in times.items() if place[1] == "ffn" or status[place[0]] == "ok"}
    found, dense = [], {name: name for name in others} | {baseline: "Dense"}
    for name in (baseline, *others, *list(arms)[1:]):
        own = {part: times[name, part] for part in PARTS if (name, part) in times}
        own |= {
            called: times[place, part]
            for place, part in times
            if place in dense and part != REFRESHING and (called := rows.dense_name(dense[place], part))
        }
        if REFRESHING in own and "step" in own:
            own["step"] = rows.amortised(own["step"], own[REFRESHING], arms[name].method.refresh_every)
        found.append(
            {
                **case._asdict(),
                "dtype": dtype,
                "method": name,
                "implementation": made_by(name) if name in others else implementation,
                "layers": model.layers,
                "status": {"step": status[name], "dense step": status[baseline]},
                "ms": own,
                "loss": [float(m["loss"]) for m in steps[name].metrics],
                "temp_bytes": steps[name].temp_bytes,
            }
        )
    return found


def share(row: dict) -> float | None:
    """Of the dense step that is spent in the FFNs."""
    step, ffn = row["ms"].get("dense step"), row["ms"].get("dense ffn")
    return row["layers"] * ffn["median"] / step["median"] if step and ffn else None


def expected(row: dict) -> float | None:
    """Speed-up of the step if only its FFNs change, as measured alone."""
    part, dense, own = share(row), row["ms"].get("dense ffn"), row["ms"].get("ffn")
    return 1 / (1 - part + part * own["median"] / dense["median"]) if part is not None and own else None


def table(found: list[dict]) -> str:
    """Ratios first, then times, energy and memory."""
    header = [
        *("method", "T", "d", "f", "blocks", "dtype", "step", "against", "sessions: step", "expected"),
        *("share of FFN", "step ms", "dense step ms", *rows.ENERGY_HEADER, "FFN ms", "dense FFN ms"),
        "XLA temporaries MB",
    ]
    lines = []
    for row in found:
        part, gain = share(row), expected(row)
        lines.append(
            [
                *(row[k] for k in ("method", "T", "d", "f", "layers", "dtype")),
                show_ratio(row, "dense step", "step"),
                rows.against(row, "dense step"),
                rows.over_sessions(row, "dense step", "step"),
                "-" if gain is None else f"{gain:.2f}x",
                "-" if part is None else f"{part:.0%}",
                *(show_ms(row, name) for name in ("step", rows.base_of(row, "dense step"))),
                *rows.energy(row, "dense step", "step"),
                *(show_ms(row, name) for name in ("ffn", "dense ffn")),
                show_mb(row["temp_bytes"]),
            ]
        )
    return rows.table(header, lines)
