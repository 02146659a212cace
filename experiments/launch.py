"""Train one config: `python -m experiments.launch CONFIG [overrides]`."""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments import config as configs
from experiments.cli import STOPPED, command
from experiments.config import Config
from experiments.data import text
from experiments.errors import UserError, require
from experiments.training.evaluator import mark, said

USAGE = """usage: python -m experiments.launch CONFIG [options] [overrides]

Trains one config into a run folder (runs/NAME).

CONFIG is a Python file with functions that return a config: path/to/file.py (function `config`) or
path/to/file.py:function. Every field can be overridden:

  python -m experiments.launch configs/fst/masked_decay.py:cpu --optim.lr 3e-4 --method.decay 1e-4
  python -m experiments.launch configs/fst/masked_decay.py:cpu --help     lists all fields with their values
  python -m experiments.launch configs/dense.py:cpu --method SLoPe --method.rank 0.1    any method, any config
  python -m experiments.launch configs/dense.py:cpu --model qwen3 --data files --data.files 'text/*.jsonl'
                                          a file of experiments/models, and one of experiments/data
  python -m experiments.launch --resume runs/NAME                     continues an interrupted run
  python -m experiments.launch CONFIG --resume                        the same, and its first start too: one
                                          command for a job that is interrupted and begun again
  python -m experiments.launch --resume runs/NAME --train.steps 2000  lengthens it: from its checkpoint on,
                                          phases and learning rate are those of a run of 2000 steps
  python -m experiments.launch CONFIG --out sweep --array method=Dense,FST seed=0,1,2
                                          prints one command a line for each combination: for the job
                                          arrays of a cluster (of ablations: experiments.ablate --array)

Exit status: 0 when the run is complete; 75 when a signal (SIGTERM, Ctrl-C) stopped it: it was saved, and
--resume continues it; 2 for a mistake, a full disk or a run that diverged: one sentence says which.

Configs in this repository, each with its parameters and what it needs: a CPU (or anything else), an NVIDIA
GPU, for cuDNN's attention, or several GPUs of 80 GB that share parameters, gradients and moments
(--mesh.fsdp). A claim is several runs, of the size shown or of another: `python -m experiments.ablate CONFIG`
runs it, and `--list` says what came out.
"""
GPU_BYTES = 80e9


@dataclass(frozen=True)
class Launch:
    """Train one config into a run folder."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Path | None = None
    """run folder; None means runs/NAME"""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """continue the run in that folder from its newest checkpoint; with a CONFIG, start it if there is none"""
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
    tune: bool = True
    """measure, before the first step, those products of this run that no table of this machine knows: some
    seconds, once, kept in ~/.cache/jax_sparse24; without measurements all products run dense. Never with
    several processes, which must decide alike, nor where a run goes on from a checkpoint on the same machine
    and mesh, whose products stay what they were"""


def usage() -> str:
    """The general help: what a CONFIG is and which there are."""
    lines, above = [USAGE.rstrip("\n")], None
    files = sorted(configs.listing(), key=lambda file: (len(file.parts), file))
    found = [(file, *one) for file in files for one in offered(file)]
    width = max(len(spec) for _, spec, _, _ in found)
    for file, spec, config, words in found:
        if above != (above := heading(file)):
            lines.append(f"\n{above}")
        count = parameters(config.model, config.data.tokenizer)
        what = first_sentence(words, 72)
        lines.append(f"  {spec:<{width}} {rounded(count):>5}  {needs(config, count):<7}  {what}")
    return "\n".join(lines)


def offered(file: Path):
    """Yield (name, config, what it is) for the configs of a file and for the claim that it may have, whose
    config is that of its largest model at the size cpu."""
    from experiments.ablations import ablation as ablations

    for name, function in configs.functions_of(configs.REPOSITORY / file).items():
        yield str(file) if name == "config" else f"{file}:{name}", function(), inspect.getdoc(function) or ""
    if "ablation" in configs.public_functions(configs.REPOSITORY / file):
        arms = ablations.load(str(file)).ablation.arms.values()
        largest = max(arms, key=lambda arm: parameters(arm.model, arm.data.tokenizer))
        yield f"{file}:cpu", largest, f"claim: {documentation(file)}"


def documentation(file: Path) -> str:
    return ast.get_docstring(ast.parse((configs.REPOSITORY / file).read_text())) or ""


def heading(file: Path) -> str:
    """What the configs of a file belong to: the paper of their folder, or, in no paper's folder, the file."""
    folder = len(file.parts) > 2
    return first_sentence(documentation(file.parent / "__init__.py" if folder else file), 120)


def first_sentence(words: str, width: int) -> str:
    return textwrap.shorten(re.split(r"\.(\s|$)", words)[0], width, placeholder=" ...")


@functools.cache
def parameters(model, tokenizer: str) -> int:
    """How many parameters a model has, without adapters. Its blocks are alike, so that a model of one block
    and one of two tell it."""
    from experiments.training import opening

    def count(model) -> int:
        return opening.parameters(Config(model=model, data=text.Config(tokenizer=tokenizer)))

    sizes = model.sizes()
    if sizes is None:
        return count(model)
    one, two = (count(model.with_layers(n)) for n in (1, 2))
    return one + (sizes.layers - 1) * (two - one)


def rounded(count: int) -> str:
    """A number of parameters to two digits, such as 85M."""
    scale, unit = (1e9, "B") if count >= 1e9 else (1e6, "M")
    return f"{count / scale:.{0 if count >= 10 * scale else 1}f}{unit}"


def needs(config: Config, count: int) -> str:
    """What a config with so many parameters trains on: "CPU" for any device, "GPU", or at least how many."""
    # In float32: parameters, two moments, and gradients, of which accumulation has two.
    state = count * (16 if config.train.accumulate == 1 else 20)
    gpus = math.ceil(state / GPU_BYTES)
    if gpus > 1:
        return f"{gpus}+ GPUs"
    return "GPU" if config.model.needs_gpu() else "CPU"


def parse(argv) -> Launch:
    """The launch that the command line describes; UserError, or tyro's own message and exit, if none."""
    spec, overrides = argv[0], argv[1:]
    if spec == "--resume":
        require(
            bool(overrides) and not overrides[0].startswith("-"),
            "--resume needs the folder of a run, such as --resume runs/NAME, where no CONFIG comes first.",
        )
        from experiments.training.rundir import open_run

        folder, *overrides = overrides
        spec, default = f"--resume {folder}", Launch(open_run(Path(folder)), out=Path(folder), resume=True)
    else:
        if spec.startswith("-"):  # the usage reads all configs
            raise UserError(f"The first argument must be a CONFIG, got {spec!r}.\n\n{usage()}")
        default = Launch(configs.load(spec))
    chosen, overrides = components_of(overrides)
    for part, name in chosen.items():
        default = dataclasses.replace(default, config=configs.with_part(default.config, part, name))
    try:
        launch = tyro.cli(
            Launch, default=default, args=overrides, prog=f"python -m experiments.launch {spec}"
        )
        _ = launch.config.schedule
        return launch
    except ValueError as error:  # a rule of Config or of the method
        raise UserError(str(error)) from error


def components_of(overrides) -> tuple[dict[str, str], list[str]]:
    """The names of `--model NAME`, `--data NAME` and `--method NAME`, which decide what options each has, and
    the other words."""
    chosen, rest, words = {}, [], iter(overrides)
    for word in words:
        option, equals, name = word.partition("=")
        part = option.removeprefix("--")
        if option.startswith("--") and part in configs.PARTS_BY_NAME:
            example = configs.PARTS_BY_NAME[part]
            name = name if equals else next(words, None)
            require(name is not None, f"{option} needs the name of a {part}, such as {option} {example}.")
            chosen[part] = name
        else:
            rest.append(word)
    return chosen, rest


def array(argv) -> list[str]:
    """A command for each combination of the values after `--array`, each into a folder of its own. Raises
    UserError, or tyro's own message and exit, where one of them cannot run."""
    at = argv.index("--array")
    fixed, choices = list(argv[:at]), [word.partition("=") for word in argv[at + 1 :]]
    require(
        bool(fixed) and bool(choices) and all(name and values for name, _, values in choices),
        "--array comes last and takes options with values, such as --array method=Dense,FST seed=0,1,2.",
    )
    given = parse(fixed)
    require(not given.resume, "--array is for new runs; each of its commands can be resumed by itself.")
    out, commands = given.out or Path("runs") / given.config.name, {}
    fixed = without_folder(fixed)
    for values in itertools.product(*(values.split(",") for _, _, values in choices)):
        named = [(name, value) for (name, _, _), value in zip(choices, values, strict=True)]
        folder = out / ",".join(f"{name.rpartition('.')[2]}={value}" for name, value in named).replace(
            "/", "-"
        )
        words = [
            *fixed,
            *(word for name, value in named for word in (f"--{name}", value)),
            "--out",
            str(folder),
        ]
        parse(words)
        require(folder not in commands, f"--array names the folder {folder} twice. Give each value once.")
        commands[folder] = shlex.join(["python", "-m", "experiments.launch", *words])
    return list(commands.values())


def without_folder(words) -> list[str]:
    """The words of a command line but for `--out FOLDER`."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == "--out":
            next(rest, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return kept


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
    if "--array" in argv:
        print("\n".join(array(argv)))
        return
    launch = parse(argv)
    out = launch.out or Path("runs") / launch.config.name
    connect(launch)
    from experiments.training.loop import train
    from experiments.training.opening import (
        opening,  # after the processes are connected: no device may be touched
    )
    from experiments.training.rundir import goes_on_here, started

    known = {}  # about the text

    resume = launch.resume and started(out)

    def begins(config, corpus):
        known.update(corpus.statistics)
        measure = launch.tune and not (resume and goes_on_here(out, config))
        opening(config, corpus, measure=measure, show=launch.progress is not False)

    result = train(launch.config, out, resume=resume, show=launch.progress, begins=begins)
    if not result.finished:
        again = ["python", "-m", "experiments.launch", "--resume", str(out)]
        again = shlex.join(again if launch.tune else [*again, "--no-tune"])
        print(f"Stopped and saved at step {result.step}. Continue with: {again}")
        sys.exit(STOPPED)
    if not result.losses:
        print(f"The run in {out} was already complete at step {result.step}.")
    for name, loss in result.losses.items():
        loss = said(loss, result.bytes_per_token)
        print(f"validation loss, {name:<6} {loss}{mark(launch.config.method, name)}")
    if result.losses and "xz_bits" in known:
        print(f"xz compresses the training text to {known['xz_bits']:.4f} bits per byte")
    print(f"Next: python -m experiments.report {out} --out {out}")


if __name__ == "__main__":
    main()
