"""A run that goes on for more steps than it was begun with: what that changes, and where it is refused.

Phases and learning rate are functions of the number of steps. A lengthened run follows those of its new
length from its checkpoint on; what it has done stays as it was.
"""

from pathlib import Path

import numpy as np

from experiments.config import Config
from experiments.errors import UserError
from experiments.training.optimiser import learning_rate


def lengthen(old: Config, new: Config, done: int, out: Path) -> str:
    """What becomes of the run in `out` with config `old`, after `done` steps, as one with `new`, in words.

    UserError where a run of the new length would have made steps that are done in another kind of phase.
    """
    before, after = old.train.steps, new.train.steps
    first = next((step for step in range(done) if _kind(old, step) != _kind(new, step)), None)
    if first is not None:
        raise UserError(
            f"The run in {out} cannot be lengthened from {before} to {after} steps. It has made {done}; from "
            f"step {first} on they were of its phase {old.schedule.phase_at(first).name!r}, which a run of "
            f"{after} steps enters at another time. Delete its checkpoints of steps after {first} from "
            f"{out / 'checkpoints'}, if there is an earlier one, or start another run from its parameters: "
            f"--train.start-from {out}.",
        )
    phases = ", ".join(
        f"{phase.name} in steps {max(start, done)} to {end - 1}"
        for start, end, phase in new.schedule.boundaries()
        if end > done
    )
    text = f"lengthened from {before} to {after} steps after step {done}: {phases}. "
    rates = [learning_rate(config.optim, config.train.steps) for config in (old, new)]
    if np.array_equal(*(np.asarray(rate(np.arange(done))) for rate in rates)):
        return text + f"It goes on as a run of {after} steps from the start would."
    was, now = (float(rate(done)) for rate in rates)
    return text + (
        f"Its learning rate has followed the schedule of {before} steps so far ({was:.3g} here) and follows "
        f"that of {after} from now on ({now:.3g}): a warm restart, which a run of {after} steps from the "
        "start does not have."
    )


def _kind(config: Config, step: int):
    phase = config.schedule.phase_at(step)
    return phase.sparse, phase.adapters
