"""Suite ladder: the training step of the evidence's size 124m, from a plain one on, one change at a time."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

import jax_sparse24 as s24
from experiments.benchmarks import check, rows
from experiments.benchmarks.rows import show_mb, show_ms, show_ratio
from experiments.benchmarks.session import rows_of_times
from experiments.benchmarks.settings import RUNGS, Case, Settings
from experiments.benchmarks.suites.train_step import (
    REFRESHING,
    Expected,
    Steps,
    alike,
    config_of,
    references,
    up_to_choices,
    up_to_rounding,
)
from experiments.config import Config
from experiments.errors import UserError, require
from experiments.models import decoder
from experiments.training import speed
from jax_sparse24.dispatch.hardware import platform
from jax_sparse24.measure import interleaved

SEQUENCE, VOCABULARY = 1024, 32768
LEAST = 3  # rounds of a rung that is compared with none
PARTS = 8  # micro-batches of a step before they become one
QUEUED = 2  # steps of a sample on an accelerator
# AdamW's first update has the signs of the gradient, which rounding decides near zero: the second gradient's
# norm in bfloat16 is off that in float32 by 0.0003 of itself at width 128, by 0.012 at 16.
SECOND = 4
WHAT = """Whole optimiser steps of the dense model that the [evidence](evidence.md) trains at the size `124m`
(the shape of GPT-2's 124M, and 110.1M parameters, since the vocabulary has 32768 tokens and not 50257; 12
blocks, 64 sequences of 1024 tokens), from a plain program on: each rung changes one option more, and is
measured in turn with the rung before it. *Against the one before* is the time of that rung over this one's,
*so far* the product of all ratios. The last rung is a step of `FST`, which counts its search for masks at the
rate at which it is made. MFU counts the products of the dense model, and of causal attention, once, and
divides by the peak of dense products in 16 bits, for float32, too. Tokens are drawn by Zipf's law. Each rung
starts from the same parameters; its loss and its gradient's norm, of two steps, are those of the rung before
it up to rounding, `FST`'s those of masked dense products."""


@dataclass(frozen=True)
class Plain(decoder.Config):
    """The decoder as one would write it first."""

    scattered: bool = True
    """whether the gradient of the embedding is added where it is, token by token"""
    at_once: bool = True
    """whether all logits stand in memory at once"""

    def create(self, method, vocabulary: int, *, rngs) -> nnx.Module:
        """See `experiments.models.base.Config`."""
        kind = Scattered if self.scattered else decoder.Decoder
        made = kind(self, method, vocabulary, rngs=rngs)
        return AtOnce(made) if self.at_once else made


class Scattered(decoder.Decoder):
    """A decoder whose embedding is looked up by indexing, with the derivative that jax has for that."""

    def embedded(self, tokens_BL):
        """See `Decoder.embedded`."""
        return self.embedding.embedding[...][tokens_BL].astype(self.embedding.dtype)


class AtOnce(nnx.Module):
    """A model of which the loss knows its logits alone, so that it cannot make them in parts."""

    def __init__(self, model: decoder.Decoder):
        self.model = model

    def __call__(self, tokens_BL):
        return self.model(tokens_BL)


@dataclass(frozen=True)
class Rung:
    """What one rung changes, in words and as fields."""

    words: str
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: int = 0
    """micro-batches; 0 for as many as before"""
    method: s24.methods.Method | None = None


LADDER = {
    "plain": Rung(
        "float32; attention by XLA; one scanned block, computed again in the backward pass; "
        f"{PARTS} micro-batches; the embedding's gradient scattered; all logits at once",
        {"dtype": "float32", "attention": "xla", "scan": True, "remat": True},
        PARTS,
        s24.methods.Dense(),
    ),
    "bfloat16": Rung("products in bfloat16", {"dtype": "bfloat16"}),
    "cudnn": Rung("attention by cuDNN", {"attention": "cudnn"}),
    "embedding": Rung(
        "the embedding's gradient summed over sorted tokens, in one order", {"scattered": False}
    ),
    "logits": Rung("logits in parts, their gradient made beside the loss", {"at_once": False}),
    "no-scan": Rung("every block compiled by itself", {"scan": False}),
    "no-remat": Rung("activations kept, not computed again", {"remat": False}),
    "one-batch": Rung("one micro-batch", parts=1),
    "FST": Rung("FFNs by FST, sparse where that was measured to be faster", method=s24.methods.FST()),
}


def names(settings: Settings) -> list[str]:
    """The rungs to measure, from below; cuDNN's needs an NVIDIA GPU."""
    there = [name for name in RUNGS if name != "cudnn" or platform() == "cuda"]
    found = [name for name in there if name in (settings.rungs or RUNGS)]
    require(bool(found), "--rungs cudnn needs an NVIDIA GPU, and there is none: name another rung, too.")
    return found


def config_at(name: str, case: Case, layers: int) -> Config:
    """The config of a rung, with all changes up to its own."""
    model, parts, method = {}, 0, None
    for below in RUNGS[: RUNGS.index(name) + 1]:
        rung = LADDER[below]
        model |= rung.model if below != "cudnn" or platform() == "cuda" else {}
        parts, method = rung.parts or parts, rung.method or method
    dtype, attention = model.pop("dtype"), model.pop("attention")
    whole = PARTS * SEQUENCE if case.T >= PARTS * SEQUENCE else PARTS  # below, sequences are shorter
    require(
        case.T % whole == 0,
        f"--tokens {case.T} do not divide into {PARTS} micro-batches of whole sequences, of {SEQUENCE} tokens"
        f" where there are enough: give a multiple of {whole}.",
    )
    base = config_of(case, dtype, method, layers, seq=min(SEQUENCE, case.T // PARTS))
    plain = model.get("scattered", True) or model.get("at_once", True)
    kind = Plain if plain else decoder.Config
    own = {key: value for key, value in model.items() if plain or key not in ("scattered", "at_once")}
    fields = {field.name: getattr(base.model, field.name) for field in dataclasses.fields(base.model)}
    fields |= {"vocabulary": VOCABULARY, "attention": attention, **own}
    return dataclasses.replace(
        base, model=kind(**fields), train=dataclasses.replace(base.train, accumulate=parts)
    )


def run(settings: Settings, progress) -> Iterator[tuple[str, Callable[[], list[dict]]]]:
    """Names of rungs and what gives the row of each."""
    for case in settings.cases("ladder"):
        climb = Climb(case, settings, progress)
        for name in climb.configs:
            yield f"{climb.where} {name}", partial(climb.rung, name)


class Climb:
    """The rungs of one case, in their order. progress: called with what is worked on."""

    def __init__(self, case: Case, settings: Settings, progress=lambda text: None):
        self.case, self.settings, self.progress = case, settings, progress
        self.layers = settings.blocks("ladder")
        self.where = f"T={case.T} d={case.d} f={case.f}"
        self.configs = {name: config_at(name, case, self.layers) for name in names(settings)}
        self._made: dict[Hashable, Steps | Exception] = {}
        self.below: tuple[str, Steps] | None = None  # the last rung that could be run
        self.right = True  # whether it is

    def rung(self, name: str) -> list[dict]:
        """Measure a rung beside the last one below it. Too little memory is a result, too."""
        config = self.configs[name]
        in_16_bits = dataclasses.replace(config.model, dtype="bfloat16")
        row = {
            **self.case._asdict(),
            "dtype": config.model.dtype,
            "layers": self.layers,
            "method": type(config.method).__name__,
            "implementation": self.settings.implementation,
            "rung": name,
            "before": self.below and self.below[0],
            "flops_per_token": speed.flops_per_token(config),
            "peak": speed.peak(dataclasses.replace(config, model=in_16_bits)),
            "ms": {},
        }
        try:
            return self._measured(row, name, config)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        except UserError as error:  # the rungs above may run
            raise RuntimeError(str(error)) from error
        if self.below:
            self.below[1].first_two()  # the state of a step that failed was given away
        return [row | {"status": {"step": rows.OUT_OF_MEMORY}}]

    def _steps(self, name: Hashable) -> Steps:
        """The steps of a rung, or of ("reference", rung). All are compiled at the first call, before any is
        run."""
        named = None if self.settings.implementation == "auto" else self.settings.implementation
        if not self._made:
            every = {rung: partial(Steps, config, named) for rung, config in self.configs.items()}
            every |= {("reference", rung): steps for rung, steps in self._references().items()}
            self.progress(f"{self.where}: {len(every)} programs of steps are compiled")
            # The error of a rung is raised when it is its turn.
            every = {rung: partial(check.or_error, steps) for rung, steps in every.items()}
            self._made = check.compiled(every)
        found, self._made[name] = self._made[name], RuntimeError(f"the rung {name} was measured before")
        if isinstance(found, Exception):
            raise found
        return found

    def _references(self) -> dict[str, Callable[[], Steps]]:
        """See `references`; activations are not kept, as masked dense products need more memory."""
        small = {
            rung: dataclasses.replace(config, model=dataclasses.replace(config.model, remat=True))
            for rung, config in self.configs.items()
        }
        return references(small)

    def _truth(self, steps: Steps, name: str, config: Config) -> Expected:
        """What the metrics of a rung's steps must be."""
        if config.method.ffn_plan().rows:
            self.progress(
                f"{self.where} {name} runs with masked-dense products, {1 + check.REPLICATES} times"
            )
            return up_to_choices(self._steps(("reference", name)), config)
        below = self.below[1].metrics if self.below else steps.metrics
        truth = up_to_rounding(below, config.model.dtype, self.case)
        first, second = truth.near
        return truth._replace(near=[first, second | {"grad_norm": SECOND * second["grad_norm"]}])

    def _measured(self, row: dict, name: str, config: Config) -> list[dict]:
        settings, where = self.settings, f"{self.where} {name}"
        steps = self._steps(name)
        truth = self._truth(steps, name, config)
        self.progress(f"{where} is checked")
        status = _verdict(steps, truth)
        programs = {"step": steps}
        if s24.due(config.method, 0):
            programs[REFRESHING] = steps.refreshing
        if self.below and self.right:
            programs["step before"] = self.below[1]
        self.progress(f"{where} is measured")
        seed = settings.seed_of("ladder", *self.case, name)
        rounds = settings.repeats if "step before" in programs else min(settings.repeats, LEAST)

        def rows_of(times):
            if REFRESHING in times:
                every = config.method.refresh_every
                times["step"] = rows.amortised(times["step"], times.pop(REFRESHING), every)
            return [
                {
                    **row,
                    "status": {"step": status},
                    "ms": times,
                    "loss": [float(m["loss"]) for m in steps.metrics],
                    "grad_norm": [float(m["grad_norm"]) for m in steps.metrics],
                    "temp_bytes": steps.temp_bytes,
                }
            ]

        measure = partial(interleaved, programs, rounds, settings.seconds, QUEUED, seed)
        found = rows_of_times(measure, rows_of)
        self.below, self.right = (name, steps), status == rows.OK
        return found


def _verdict(steps: Steps, expected: Expected) -> str:
    """Whether two steps are as expected, and the same once more: up to rounding, since what scatters adds in
    any order."""
    if not alike(steps.metrics, expected):
        return "wrong"
    again = steps.first_two()
    return rows.OK if alike(again, expected._replace(metrics=steps.metrics)) else "not repeatable"


def tokens_per_second(row: dict) -> float | None:
    """Of a rung that was measured and is right."""
    there = row["status"]["step"] == rows.OK
    return 1e3 * row["T"] / row["ms"]["step"]["median"] if there else None


def mfu(row: dict) -> float | None:
    """Share of the peak; None where there is none, or no speed."""
    tokens, peak = tokens_per_second(row), row["peak"]
    return tokens * row["flops_per_token"] / peak if tokens and peak else None


def so_far(found: list[dict]) -> list[float | None]:
    """Of each rung: how many times as fast as the first one of its climb; None where a rung is missing."""
    totals, out = {}, []
    for row in found:
        own = (*(row[key] for key in ("T", "d", "f", "layers", "implementation")),)
        ratio = rows.ratio(row, "step before", "step") if row["status"]["step"] == rows.OK else None
        total = 1.0 if row["before"] is None and row["status"]["step"] == rows.OK else None
        if ratio and totals.get((*own, row["before"])):
            total = ratio * totals[*own, row["before"]]
        totals[*own, row["rung"]] = total
        out.append(total)
    return out


def ordered(found: list[dict]) -> list[dict]:
    """Rows case by case, in each from below."""
    found = sorted(found, key=lambda row: RUNGS.index(row["rung"]))
    return sorted(found, key=_case_of)


def _case_of(row: dict) -> tuple:
    return tuple(row[key] for key in ("d", "f", "T", "layers"))


def longest(found: list[dict]) -> list[dict]:
    """The rungs of the case of which most have a speed, from below; [] unless there are two."""
    found = [row for row in ordered(found) if tokens_per_second(row)]
    cases = [[row for row in found if _case_of(row) == case] for case in dict.fromkeys(map(_case_of, found))]
    climb = max(cases, key=len, default=[])
    return climb if len(climb) > 1 else []


def table(found: list[dict]) -> str:
    """Ratios first, then speed, energy and memory."""
    found = ordered(found)
    header = [
        *("rung", "what changes", "T", "d, f", "blocks", "dtype", "against the one before", "so far"),
        *("tokens/s", "MFU", "step ms", "mJ per token", rows.ENERGY_HEADER[-1], "XLA temporaries MB"),
    ]
    lines = []
    for row, total in zip(found, so_far(found), strict=True):
        tokens, share, step = tokens_per_second(row), mfu(row), row["ms"].get("step", {})
        right = tokens is not None
        skipped = row["before"] and RUNGS.index(row["before"]) + 1 < RUNGS.index(row["rung"])
        versus = show_ratio(row, "step before", "step") + (f", {row['before']}" if skipped and right else "")
        lines.append(
            [
                *(row["rung"], LADDER[row["rung"]].words, row["T"], f"{row['d']}, {row['f']}"),
                *(row["layers"], row["dtype"], versus),
                "-" if total is None else f"{total:.2f}x",
                "-" if tokens is None else f"{tokens:,.0f}",
                "-" if share is None else f"{share:.0%}",
                show_ms(row, "step") if right else "-",
                f"{1e3 * step['joules'] / row['T']:.3g}" if right and "joules" in step else "-",
                f"{step['watts']:.0f}, {step['mhz']:.0f}" if right and {"watts", "mhz"} <= set(step) else "-",
                show_mb(row.get("temp_bytes")),
            ]
        )
    return rows.table(header, lines)
