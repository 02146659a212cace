"""Phases of training, in each of which products run alike, and the steps at which a method's state is due."""

import dataclasses
from typing import Any, Literal

import jax


@dataclasses.dataclass(frozen=True)
class Phase:
    """A number of optimiser steps in which products are sparse, or all are dense.

    A phase is static: a training loop compiles one step per phase.

    name: of the phase.
    steps: number of optimiser steps, >= 1.
    sparse: whether products run as the method says; otherwise all are dense.
    until_settled: whether the phase ends earlier, once `s24.optim.settled(opt_state)` is True, which the
        training loop asks on the host before every step of the phase.
    adapters: whether the low-rank adapters of a method that has some take part.

    Raises: ValueError for a field of another type, or fewer steps than one."""

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
    """Consecutive phases; optimiser state and learning-rate schedule continue across their boundaries.

    For example:

        Schedule((Phase("sparse", 250_000, sparse=True), Phase("dense", 50_000, sparse=False)))

    phases: a tuple of `Phase`, at least one; the last one cannot be `until_settled`.

    Raises: ValueError for other phases."""

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
        """Optimiser steps of all phases together."""
        return sum(phase.steps for phase in self.phases)

    def boundaries(self) -> tuple[tuple[int, int, Phase], ...]:
        """Where every phase begins and ends.

        Returns: for every phase its first step, the step after its last, and the phase itself."""
        out, start = [], 0
        for phase in self.phases:
            out.append((start, start + phase.steps, phase))
            start += phase.steps
        return tuple(out)

    def phase_at(self, step: int, settled: bool = False) -> Phase:
        """The phase of an optimiser step.

        step: number of the step, an int from 0.
        settled: whether `s24.optim.settled` is True; a phase that then ends gives way to the next.

        Returns: a `Phase`.
        Raises: ValueError outside the schedule, TypeError for a step that is no int or is traced."""
        if isinstance(step, jax.core.Tracer) or not hasattr(step, "__index__"):
            raise TypeError(
                f"Schedule: step={step!r} must be an int on the host; phases are static, so ask before jit."
            )
        for number, (start, end, phase) in enumerate(self.boundaries()):
            if start <= step < end:
                return self.phases[number + 1] if settled and phase.until_settled else phase
        raise ValueError(f"Schedule: step {step} is outside [0, {self.total_steps}).")


def due(
    method: Any, step: jax.typing.ArrayLike, what: Literal["refresh", "arrange"] = "refresh"
) -> bool | jax.Array:
    """Whether a method's state is to be recomputed before an optimiser step of a sparse phase.

    It is at step 0 and at multiples of the method's period; without a period, never. No other function
    decides this: `s24.refresh` asks it for a step, and a training loop on the host asks it before it calls
    `s24.refresh(model, step, due=...)` or a compiled refresh of its own.

    method: from `s24.methods`.
    step: number of the optimiser step, from 0, an int or a traced integer.
    what: "refresh", of masks and other state, every `method.refresh_every` steps, or "arrange", of neurons
        (`s24.nn.arrange`), every `method.router.arrange_every` steps.

    Returns: a bool; a traced one for a traced step, if the method has a period.
    Raises: TypeError for what is no method, such as "FST", or the class FST for FST(); ValueError for a step
        that is negative or no int, or another `what`."""
    if isinstance(method, type) or not hasattr(method, "refresh_every"):
        got = f"the class {method.__name__}" if isinstance(method, type) else repr(method)
        raise TypeError(f"due: method must be one of s24.methods, such as FST(), got {got}.")
    if what not in ("refresh", "arrange"):
        raise ValueError(f"due: what={what!r} is unknown; use 'refresh' or 'arrange'.")
    traced = isinstance(step, jax.core.Tracer)
    if not traced and (isinstance(step, bool) or not hasattr(step, "__index__") or step < 0):
        raise ValueError(f"due: step={step!r} must be the number of the optimiser step, an int >= 0.")
    if what == "refresh":
        every = method.refresh_every
    else:
        every = method.router.arrange_every if method.router else None
    if not every:
        return False
    return step % every == 0 if traced else bool(step % every == 0)
