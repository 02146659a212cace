"""The state that a run folder holds."""

import dataclasses
import math
from pathlib import Path

import jax

from experiments.config import Mesh
from experiments.errors import require
from experiments.training import rundir
from experiments.training.checkpoint import Checkpoints
from experiments.training.step import Program


def load_state(out: Path, step: int | None = None, mesh: Mesh | None = None):
    """(config, program, step, state) of the newest or the given checkpoint; UserError if there is none. The
    state has no "opt" and no "teacher": these stay on the disk, for training alone reads them.

    mesh: takes the place of that of the run, whose devices need not be here. None for as many of those that
        are here as divide its micro-batches, each with the whole state."""
    config = dataclasses.replace(rundir.open_run(out), mesh=mesh or Mesh())
    n = math.gcd(config.data.batch // config.train.accumulate, jax.device_count())
    devices = None if mesh or n == jax.device_count() else jax.devices()[:n]
    rundir.vocabulary(out)
    folder = out / "checkpoints"
    require(folder.is_dir(), f"{out} has no checkpoints yet.")
    program = Program(config, devices=devices)
    with Checkpoints(folder) as checkpoints:
        steps = sorted(checkpoints.manager.all_steps())
        require(bool(steps), f"{out} has no complete checkpoint yet.")
        require(step is None or step in steps, f"{out} has no checkpoint of step {step}; it has {steps}.")
        step = checkpoints.latest if step is None else step
        state = checkpoints.restore(step, program.abstract_state(), entries=("step", "params", "sparse"))
    program.check_values(state)
    return config, program, step, state
