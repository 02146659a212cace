"""Phases of training: stretches of optimiser steps with one plan."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Phase:
    """`steps` optimiser steps, `sparse` or with every product dense. A phase is static: one compiled step per
    phase. adapters: whether the low-rank adapters of a method that has some take part."""

    name: str
    steps: int
    sparse: bool
    adapters: bool = True

    def __post_init__(self):
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
        if not self.phases:
            raise ValueError("Schedule: needs at least one Phase.")

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

    def phase_at(self, step: int) -> Phase:
        """The phase of optimiser step `step`, counted from 0; raises ValueError outside the schedule."""
        for start, end, phase in self.boundaries():
            if start <= step < end:
                return phase
        raise ValueError(f"Schedule: step {step} is outside [0, {self.total_steps}).")
