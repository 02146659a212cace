"""Suite train-step: whole optimiser steps of a language model, with the share of the FFN."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse24 as s24
from experiments.benchmarks import check, dense_e4m3, rows, xla_programs
from experiments.benchmarks.embedding_gradient import zipf
from experiments.benchmarks.rows import show_mb, show_ms, show_ratio
from experiments.benchmarks.session import rows_of_times
from experiments.benchmarks.settings import Case, Settings
from experiments.benchmarks.suites.ffn import KEY, block, data, forward_backward, made_by, state_of
from experiments.benchmarks.torch import programs as torch_programs
from experiments.config import Config, Optim, Train
from experiments.data import text
from experiments.models import decoder
from experiments.training.opening import projections_of
from experiments.training.start import perturbed
from experiments.training.step import Program as StepProgram
from jax_sparse24.dispatch.hardware import platform
from jax_sparse24.measure import Program, interleaved, random, untuned

HEAD = 64
RATE = 0.05  # times 1 / d: the first update changes what a neuron gives by about as much at every width
REFRESHING = "step with refresh"
# Of one block of the model, measured alone; projections are those of attention.
ALONE = ("ffn", "projections")
PARTS = ("step", REFRESHING, *ALONE)
STEPS = 100_000  # of the run that a step is of: every method's dense warm-up fits into it
QUEUED = 8  # steps of a sample on an accelerator: a run, too, starts a step before the one before it is done
WHAT = """Whole optimiser steps of a small decoder: forward, backward, clipping, AdamW. A
method's step counts its search for masks at the rate at which it is made (FST: once in 40 steps). On CUDA
attention in 16-bit floats is cuDNN's, as in training, and gradients repeat up to rounding. *against* names
the fastest dense step, which ratios divide by a step's time; *share of FFN* is the time of the FFNs' forward
and backward pass, measured alone, over the step's, both by XLA as it compiles by default; *expected* is the
speed-up over that step which the FFNs measured alone leave for the whole one. `FST-projections` has the
projections of attention by FST, too, whose forward and backward pass is measured alone as well, and counted
in what is *expected* of it. The `-e4m3` of a method has both operands of its products of weights in e4m3, and
is compared with dense products in e4m3 in the same places. *torch dense* is the same step from the same
parameters, compiled by PyTorch, with its fused AdamW and its choice of attention."""


def config_of(case: Case, dtype: str, method, layers: int, seq: int = 256, **model) -> Config:
    """A decoder whose batch has about T tokens. cuDNN has attention for 16-bit floats. model: its further
    fields."""
    attention = "cudnn" if platform() == "cuda" and jnp.dtype(dtype).itemsize == 2 else "xla"
    seq = min(seq, case.T)
    sizes = {"layers": layers, "d": case.d, "f": case.f, "heads": heads_of(case.d)}
    return Config(
        model=decoder.Config(**sizes, dtype=dtype, attention=attention, **model),
        data=text.Config(seq=seq, batch=max(case.T // seq, 1)),
        # From the first step on, so that the second one's loss tells an update that is wrong.
        optim=Optim(lr=RATE / case.d, warmup=0),
        train=Train(steps=STEPS),
        method=method,
    )


def heads_of(d: int) -> int:
    """How many heads a model of this width has: one for each `HEAD` of it, of one even width."""
    return next((heads for heads in range(d // HEAD, 1, -1) if d % (2 * heads) == 0), 1)


def case_of(config: Config) -> Case:
    """The sizes of a config's steps."""
    return Case(config.data.batch * config.data.seq, config.model.d, config.model.f)


def drawn(config: Config) -> np.ndarray:
    """Tokens of a batch, int32 (B, L + 1): bytes, all alike, or those of a vocabulary by Zipf's law."""
    shape, rows = (config.data.batch, config.data.seq + 1), config.model.vocabulary
    if rows:
        return zipf(rows, shape)
    return np.random.default_rng(0).integers(0, config.data.vocabulary.size - 1, shape, np.int32)


class Steps:
    """Optimiser steps of one method, one a call. options: XLA's for compiling them, which the constructor
    does; it runs nothing. devices: of the config's mesh; None for all."""

    def __init__(self, config: Config, implementation: str | None, options: dict | None = None, devices=None):
        if implementation is not None:
            model = dataclasses.replace(config.model, implementation=implementation)
            config = dataclasses.replace(config, model=model)
        self.program = StepProgram(config, options, devices=devices)
        self.advance = self.program.step(sparse=bool(config.method.ffn_plan().rows))
        self.program.begin  # noqa: B018 - compiled here, too, which takes as long as a step
        self.tokens = self.program.batch(drawn(config))

    @cached_property
    def state(self):
        return self.program.initial_state()

    @cached_property
    def metrics(self) -> list:
        return self.first_two()

    def first_two(self, noise: float = 0.0, seed: int = 0) -> list:
        """Loss and gradient norm of the first two steps from the initial state; later calls go on.
        noise, seed: as in `perturbed`, of the parameters."""
        vars(self).pop("state", None)  # one in memory at a time
        self.state = self.program.initial_state()
        if noise:
            self.state = perturbed(self.state, self.program, noise, seed)
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


def projections(config: Config, method: s24.methods.Method, implementation: str | None) -> Program:
    """Forward and backward of the projections of attention in one block of a config, by the method given."""
    T, _, _ = case_of(config)
    widths = [layer.shape[1:] for layer, _ in projections_of(config)]
    key = KEY if method.stochastic else None

    def run(*layers):
        found = []
        for x, w, dy, state in layers:

            def dot(x, w, state=state):
                if type(method) is s24.methods.Dense:
                    return x @ w
                return s24.sparse_dot(x, w, method, state, key, implementation=implementation)

            y, vjp = jax.vjp(dot, x, w)
            found.append((y, *vjp(dy)))
        return found

    def layer(d, f):
        x, w, dy = (random(s, config.model.dtype, n) for n, s in enumerate(((T, d), (d, f), (T, f))))
        return x, w, dy, method.init(w)

    return Program(run, *(layer(*two) for two in widths))


class Expected(NamedTuple):
    """Loss and gradient norm of each of two steps, and by what share of it each may be off."""

    metrics: list
    near: list[dict[str, float]]


def references(arms: Mapping[str, Config]) -> dict[str, Callable[[], Steps]]:
    """What makes steps with masked-dense products, untuned, of each arm that is sparse. One block is compiled
    for all layers, whose parameters are the same bit for bit."""

    def steps(config):
        scanned = dataclasses.replace(config.model, scan=True)
        return partial(Steps, dataclasses.replace(config, model=scanned), "reference", untuned())

    return {name: steps(config) for name, config in arms.items() if config.method.ffn_plan().rows}


def up_to_choices(steps: Steps, config: Config) -> Expected:
    """The metrics of steps in which values are cut or drawn, which roundings decide."""
    dtype, case = config.model.dtype, case_of(config)
    metrics, near = up_to_rounding(steps.first_two(), dtype, case)
    replicates = [steps.first_two(check.tolerance(dtype, max(case)), n) for n in range(check.REPLICATES)]

    def share(step: int, name: str) -> float:
        others = [replicate[step][name] for replicate in replicates]
        return check.tolerance_of_replicates(near[step][name], metrics[step][name], others)

    return Expected(metrics, [{name: share(n, name) for name in of_step} for n, of_step in enumerate(near)])


def up_to_rounding(metrics: list, dtype: str, case: Case) -> Expected:
    """The metrics of steps by dense products."""
    return Expected(metrics, [dict.fromkeys(("loss", "grad_norm"), check.tolerance(dtype, max(case)))] * 2)


def verdict(steps, expected: Expected, bitwise: bool) -> str:
    """Of two steps, and of the same once more: equal to the bit, or as near to the first as to `expected`."""
    if not alike(steps.metrics, expected):
        return "wrong"
    again, first = steps.first_two(), steps.metrics
    same = again == first if bitwise else alike(again, expected._replace(metrics=first))
    return rows.OK if same else "not repeatable"


def alike(found: list, expected: Expected) -> bool:
    """Whether losses and gradient norms are as near as they must be; none is that is not finite."""
    return all(
        abs(float(own[name]) - float(other[name])) <= share * abs(float(other[name]))
        for own, other, near in zip(found, *expected, strict=True)
        for name, share in near.items()
    )


def measure_case(case: Case, dtype: str, settings: Settings, progress=lambda text: None) -> list[dict]:
    """All arms of one case. progress: called with what is worked on."""
    arms = {
        name: config_of(case, dtype, arm.method, settings.blocks("train-step"), **arm.model)
        for name, arm in settings.arms.items()
    }

    variants = dense_variants(arms["Dense"], settings.exhaustive)
    rivals = rival_steps if settings.torch else lambda config, dense: {}
    by, seed = settings.implementation, settings.seed_of("train-step", *case, dtype)
    return compare(arms, by, settings.repeats, settings.seconds, progress, variants, rivals, seed)


def dense_variants(config: Config, exhaustive: bool) -> dict[str, Callable[[], Steps]]:
    """What makes XLA's steps of the dense model besides the default ones, by name."""

    def steps(variant):
        own = dataclasses.replace(config.model, dtype=variant.dtype or config.model.dtype)
        return partial(Steps, dataclasses.replace(config, model=own), None, variant.options)

    found = xla_programs.variants(config.model.dtype, exhaustive)
    return {f"Dense: {name}": steps(variant) for name, variant in found.items()}


def or_left_out(name: str, make: Callable[[], Steps]) -> dict[str, Steps]:
    """Steps by their name; none, with a warning, where they cannot be compiled or run."""
    return torch_programs.or_warn(f"XLA's step, {name},", lambda: {name: make()})


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
    variants: Mapping[str, Callable[[], Steps]] = MappingProxyType({}),
    rivals=lambda config, steps: {},
    seed: int | None = None,
) -> list[dict]:
    """One row per configuration: optimiser steps in its sparse phase, all sampled in turn, and its FFNs
    alone. They differ in the method only; the first one is dense. variants: see `dense_variants`, compiled
    with all the others before any runs. rivals: gives the dense model's steps by other programs, by name, for
    its configuration and `Steps`. seed: of the order.

    Raises `Stopped` where it is interrupted as all are measured."""
    baseline, config = next(iter(arms.items()))
    dtype, case = config.model.dtype, case_of(config)
    where = f"T={case.T} d={case.d} f={case.f} {dtype}"
    named = None if implementation == "auto" else implementation
    make = {("reference", name): steps for name, steps in references(arms).items()}
    make |= {("own", name): partial(Steps, config, named) for name, config in arms.items()}
    make |= {("variant", name): partial(or_left_out, name, steps) for name, steps in variants.items()}
    progress(f"{where}: {len(make)} programs of steps are compiled")
    made = check.compiled(make)
    truths = {}
    for name in references(arms):
        progress(f"{where}: {name} runs with masked-dense products, {1 + check.REPLICATES} times")
        truths[name] = up_to_choices(made.pop(("reference", name)), arms[name])
    operands = data(case, dtype)
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    programs, steps, status = {}, {}, {}
    for name, config in arms.items():
        method = config.method
        progress(f"{where}: {name} is checked")
        steps[name] = made["own", name]
        truth = truths.get(name) or up_to_rounding(steps[name].metrics, dtype, case)
        status[name] = verdict(steps[name], truth, bitwise=config.model.attention == "xla")
        programs[name, "step"] = steps[name]
        if s24.due(method, 0):
            programs[name, REFRESHING] = steps[name].refreshing
        progress(f"{where}: {name} is compiled alone, without the rest of the step")
        state = state_of(method, operands)
        programs[name, "ffn"] = Program(forward_backward(block(method, named)), *args, state)
        for _, own in projections_of(config)[:1]:
            programs[name, "projections"] = projections(config, own, named)
            if (baseline, "projections") not in programs:
                programs[baseline, "projections"] = projections(config, arms[baseline].method, named)
    progress(f"{where}: dense steps by other programs")
    others = {}
    for compiled in (made["variant", name] for name in variants):
        for name, own in compiled.items():
            others |= or_left_out(name, lambda own=own: own.metrics and own)
    others |= rivals(arms[baseline], steps[baseline])
    for name, other in others.items():
        steps[name] = programs[name, "step"] = other
        truth = up_to_rounding(steps[baseline].metrics, dtype, case)
        status[name] = verdict(other, truth, bitwise=False)
    progress(f"{where}: all in turn")
    measure = partial(interleaved, programs, repeats, seconds, QUEUED, seed)
    return rows_of_times(measure, partial(rows_of, arms, others, steps, status, implementation))


def rows_of(
    arms: Mapping[str, Config], others, steps: Mapping[str, Steps], status, implementation: str, times
) -> list[dict]:
    """One row per arm, and per dense step by another program. status: of the steps. times: of all parts."""
    baseline, config = next(iter(arms.items()))
    times = {place: t for place, t in times.items() if place[1] in ALONE or status[place[0]] == "ok"}
    found, dense = [], {name: name for name in others} | {baseline: "Dense"}
    for name in (baseline, *others, *list(arms)[1:]):
        own = {part: times[name, part] for part in PARTS if (name, part) in times}
        own |= {
            called: times[place, part]
            for place, part in times
            if place in dense and part != REFRESHING and (called := rows.dense_name(dense[place], part))
        }
        rival = ""
        if name in arms:
            rival = dense_e4m3.rival(arms[name].method, bool(arms[name].model.attention_method))
        if rival:
            of_rival = {part: times.get((rival, part)) for part in ("step", *ALONE)}
            own |= {dense_e4m3.named(part): t for part, t in of_rival.items() if t is not None}
        if REFRESHING in own and "step" in own:
            own["step"] = rows.amortised(own["step"], own[REFRESHING], arms[name].method.refresh_every)
        found.append(
            {
                **case_of(config)._asdict(),
                "dtype": config.model.dtype,
                "method": name,
                "implementation": made_by(name) if name in others else implementation,
                "layers": config.model.layers,
                "status": {"step": status[name], "dense step": status[baseline]},
                "ms": own,
                "loss": [float(m["loss"]) for m in steps[name].metrics],
                "temp_bytes": steps[name].temp_bytes,
                **dense_e4m3.simulated(rival),
            }
        )
    return found


def share(row: dict, part: str = "ffn") -> float | None:
    """Of the dense step that is spent in the FFNs, or in another part of all blocks."""
    step, own = row["ms"].get("dense step"), row["ms"].get(f"dense {part}")
    return row["layers"] * own["median"] / step["median"] if step and own else None


def expected(row: dict) -> float | None:
    """Speed-up of the step if only those parts change that were measured alone; None without FFNs."""
    left = 1.0
    for part in ALONE:
        own, dense, of_step = row["ms"].get(part), row["ms"].get(f"dense {part}"), share(row, part)
        if own and of_step is not None:
            left -= of_step * (1 - own["median"] / dense["median"])
        elif part == "ffn":
            return None
    return 1 / left


def table(found: list[dict]) -> str:
    """Ratios first, then times, energy and memory."""
    in_8_bits = rows.any_in_8_bits(found)
    header = [
        *("method", "T", "d", "f", "blocks", "dtype", "step", "against", "sessions: step", "expected"),
        *rows.IN_8_BITS_HEADER * in_8_bits,
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
                *rows.in_8_bits(row, "step") * in_8_bits,
                "-" if part is None else f"{part:.0%}",
                *(show_ms(row, name) for name in ("step", rows.base_of(row, "dense step"))),
                *rows.energy(row, "dense step", "step"),
                *(show_ms(row, name) for name in ("ffn", "dense ffn")),
                show_mb(row["temp_bytes"]),
            ]
        )
    return rows.table(header, lines)
