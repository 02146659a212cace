"""The state that a run folder holds."""

import dataclasses
from pathlib import Path

from experiments.config import Mesh
from experiments.errors import require
from experiments.training import rundir
from experiments.training.checkpoint import Checkpoints
from experiments.training.step import Program


def load_state(out: Path, step: int | None = None, mesh: Mesh = Mesh()):  # noqa: B008
    """(config, program, step, state) of the newest or the given checkpoint; UserError if there is none.

    mesh: takes the place of that of the run, whose devices need not be here."""
    config = dataclasses.replace(rundir.open_run(out), mesh=mesh)
    rundir.vocabulary(out)
    folder = out / "checkpoints"
    require(folder.is_dir(), f"{out} has no checkpoints yet.")
    program = Program(config)
    with Checkpoints(folder) as checkpoints:
        steps = sorted(checkpoints.manager.all_steps())
        require(bool(steps), f"{out} has no complete checkpoint yet.")
        require(step is None or step in steps, f"{out} has no checkpoint of step {step}; it has {steps}.")
        step = checkpoints.latest if step is None else step
        state = checkpoints.restore(step, program.abstract_state())
    program.check_values(state)
    return config, program, step, state
