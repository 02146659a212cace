"""Phases of training, stretches of optimiser steps with one plan; and which steps a method's state is due
at."""

import dataclasses
from typing import Literal

import jax


@dataclasses.dataclass(frozen=True)
class Phase:
    """`steps` optimiser steps, `sparse` or with every product dense. A phase is static: one compiled step per
    phase.

    until_settled: it ends earlier, once `s24.optim.settled(opt_state)`, which the training loop asks on the
    host before every step of it. adapters: whether the low-rank adapters of a method that has some take
    part."""

    name: str
    steps: int
    sparse: bool
    until_settled: bool = False
    adapters: bool = True

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise ValueError(f"Phase: name={self.name!r} must be a string.")
        for flag in ("sparse", "until_settled", "adapters"):
            if not isinstance(getattr(self, flag), bool):
                raise ValueError(
                    f"Phase {self.name!r}: {flag}={getattr(self, flag)!r} must be True or False."
                )
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(
                f"Phase {self.name!r}: steps={self.steps!r} must be a whole number of optimiser steps, >= 1."
            )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Consecutive phases. Optimiser state and learning-rate schedule run through their boundaries.

    Schedule((Phase("sparse", 250_000, sparse=True), Phase("dense", 50_000, sparse=False)))
    """

    phases: tuple[Phase, ...]

    def __post_init__(self):
        if not isinstance(self.phases, tuple) or not all(isinstance(p, Phase) for p in self.phases):
            raise ValueError(
                f"Schedule: phases={self.phases!r} must be a tuple of Phase, such as (Phase(...),): "
                "schedules are static, so they are hashed."
            )
        if not self.phases:
            raise ValueError("Schedule: needs at least one Phase.")
        if self.phases[-1].until_settled:
            raise ValueError("Schedule: the last Phase cannot end early; nothing follows it.")

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def boundaries(self) -> tuple[tuple[int, int, Phase], ...]:
        """(first step, step after the last, phase) of every phase."""
        out, start = [], 0
        for phase in self.phases:
            out.append((start, start + phase.steps, phase))
            start += phase.steps
        return tuple(out)

    def phase_at(self, step: int, settled: bool = False) -> Phase:
        """The phase of optimiser step `step`, counted from 0; with `settled`, instead of one that then ends,
        the next. Raises ValueError outside the schedule, TypeError for a step that is not whole or traced."""
        if isinstance(step, jax.core.Tracer) or not hasattr(step, "__index__"):
            raise TypeError(
                f"Schedule: step={step!r} must be an int on the host; phases are static, so ask before jit."
            )
        for number, (start, end, phase) in enumerate(self.boundaries()):
            if start <= step < end:
                return self.phases[number + 1] if settled and phase.until_settled else phase
        raise ValueError(f"Schedule: step {step} is outside [0, {self.total_steps}).")


def due(method, step, what: Literal["refresh", "arrange"] = "refresh"):
    """Whether a method's cached state is to be recomputed before an optimiser step of a sparse phase.

    This is the one place that knows: `s24.refresh` asks it for a step, and a training loop on the host asks
    it before it calls `s24.refresh(model, step, due=...)` or a compiled refresh of its own. At step 0, and at
    multiples of the method's period, it is; without a period, never.

    method: of `s24.methods`. step: the number of the optimiser step, from 0, an int or a traced integer.
    what: "refresh", of masks and other state, every `method.refresh_every` steps, or "arrange", of neurons
    (`s24.nn.arrange`), every `method.arrange_every` steps.

    Returns a bool, or a traced one for a traced step that a period decides. Raises ValueError for a step that
    is not a number of a step, or another `what`."""
    if what not in ("refresh", "arrange"):
        raise ValueError(f"due: what={what!r} is unknown; use 'refresh' or 'arrange'.")
    traced = isinstance(step, jax.core.Tracer)
    if not traced and (isinstance(step, bool) or not hasattr(step, "__index__") or step < 0):
        raise ValueError(f"due: step={step!r} must be the number of the optimiser step, an int >= 0.")
    every = method.refresh_every if what == "refresh" else method.arrange_every
    if not every:
        return False
    return step % every == 0 if traced else bool(step % every == 0)
