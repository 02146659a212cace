"""Phases of training: stretches of optimiser steps with one plan."""

import dataclasses

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
