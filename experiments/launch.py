"""Train one config: `python -m experiments.launch CONFIG [overrides]`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments import config as configs
from experiments.cli import command
from experiments.config import Config, UserError, require
from experiments.evaluate import bits

USAGE = """usage: python -m experiments.launch CONFIG [options] [overrides]

Trains one config into a run folder (runs/NAME).

CONFIG is a Python file with functions that return a config: path/to/file.py (function `config`) or
path/to/file.py:function. Every field can be overridden:

  python -m experiments.launch configs/fst/masked_decay.py:cpu --optim.lr 3e-4 --method.decay 1e-4
  python -m experiments.launch configs/fst/masked_decay.py:cpu --help     lists all fields with their values
  python -m experiments.launch configs/fst/masked_decay.py:cpu --resume   continues an interrupted run

Configs in this repository:
"""


@dataclass(frozen=True)
class Launch:
    """Train one config into a run folder."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Path | None = None
    """run folder; None means runs/NAME"""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """continue the run in that folder from its newest checkpoint"""
    progress: bool | None = None
    """show the progress bar even without a terminal (True), or show nothing (False)"""
    distributed: tyro.conf.FlagCreatePairsOff[bool] = False
    """join other processes, found by jax.distributed (Slurm, Kubernetes, ...), or give the next three"""
    coordinator: str | None = None
    """host:port of process 0"""
    processes: int | None = None
    """number of processes"""
    process: int | None = None
    """index of this process"""


def usage() -> str:
    """The general help: what a CONFIG is and which there are."""
    lines = []
    for file in configs.listing():
        for name, function in configs.functions_of(configs.REPOSITORY / file).items():
            spec = str(file) if name == "config" else f"{file}:{name}"
            lines.append(f"  {spec:<42} {(function.__doc__ or '').strip().split(chr(10))[0]}")
    return USAGE + "\n".join(lines)


def parse(argv) -> Launch:
    """The launch that the command line describes; UserError, or tyro's own message and exit, if none."""
    spec, overrides = argv[0], argv[1:]
    require(not spec.startswith("-"), f"The first argument must be a CONFIG, got {spec!r}.\n\n{usage()}")
    default = Launch(configs.load(spec))
    try:
        return tyro.cli(Launch, default=default, args=overrides, prog=f"python -m experiments.launch {spec}")
    except ValueError as error:  # a rule of Config or of the method
        raise UserError(str(error)) from error


def connect(launch: Launch):
    """Join the other processes, if there are any."""
    explicit = (launch.coordinator, launch.processes, launch.process)
    if not launch.distributed and explicit == (None, None, None):
        return
    given = [value is not None for value in explicit]
    require(
        all(given) or not any(given),
        "--coordinator, --processes and --process belong together: give all three, or only --distributed.",
    )
    import jax

    try:
        jax.distributed.initialize(*explicit)
    except ValueError as error:
        raise UserError(
            f"jax.distributed found no cluster to join ({error}). Give --coordinator HOST:PORT "
            "--processes N --process I."
        ) from error


@command
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return
    launch = parse(argv)
    out = launch.out or Path("runs") / launch.config.name
    connect(launch)
    from experiments.train import train  # after the processes are connected: no device may be touched before

    result = train(launch.config, out, resume=launch.resume, show=launch.progress)
    again = f"python -m experiments.launch {' '.join(argv)}" + ("" if launch.resume else " --resume")
    if not result.finished:
        print(f"Stopped and saved at step {result.step}. Continue with: {again}")
        return
    if not result.losses:
        print(f"The run in {out} was already complete at step {result.step}.")
    for name, loss in result.losses.items():
        print(f"validation loss, {name:<6} {loss:.4f} nats = {bits(loss):.4f} bits per byte")
    print(f"Next: python -m experiments.report {out} --out {out}")


if __name__ == "__main__":
    main()
