"""The folder of a run: config.json, environment.json, metrics.jsonl, checkpoints/."""

import importlib.metadata
import json
import platform
import sys
from pathlib import Path

import jax

from experiments import config as configs
from experiments import files
from experiments.bench.environment import git, tree
from experiments.config import Config, UserError, require


def check_new(out: Path, config: Config, resume: bool):
    """Raise UserError unless `out` can be started, or with `resume` continued, with this config."""
    started = (out / "config.json").exists()
    if resume:
        require(started, f"There is no run to resume in {out}. Leave out --resume to start one.")
        changed = configs.differences(configs.read(out / "config.json"), config)
        require(
            not changed,
            f"The run in {out} has another config, so resuming it would mix two runs. Different:\n  "
            + "\n  ".join(changed)
            + "\nGive the same config, or start another run with --out OTHER_FOLDER.",
        )
        return
    require(
        not started,
        f"{out} already holds a run. Continue it with --resume, or start another one with --out "
        "OTHER_FOLDER.",
    )
    occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    require(not occupied, f"{out} exists and is not an empty folder. Choose another folder with --out.")


def create(out: Path, config: Config):
    """Make the folder and write config.json and environment.json (process 0 only)."""
    if jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        configs.write(config, out / "config.json")
        files.write(out / "environment.json", json.dumps(environment(), indent=2) + "\n")


def open_run(out: Path) -> Config:
    """The config of an existing run; UserError when the folder is missing or is no run."""
    require(out.is_dir(), f"There is no folder {out}. Give the folder of a run, such as runs/demo/fst.")
    require((out / "config.json").exists(), f"{out} is not the folder of a run: it has no config.json.")
    return configs.read(out / "config.json")


def environment() -> dict:
    """What a reader needs to repeat or compare the run."""
    names = (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "tensorflow-datasets",
        "numpy",
        "jax_sparse24",
    )
    return {
        "command": sys.argv,
        "commit": git("rev-parse", "HEAD"),
        "tree": tree(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
        "packages": {name: version(name) for name in names},
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def read_metrics(out: Path) -> list[dict]:
    """The rows of metrics.jsonl; a last line cut short by a crash is dropped."""
    path = out / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{out} has no metrics.jsonl, so there is nothing to report yet.")
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def truncate_metrics(out: Path, step: int):
    """Forget rows of steps that will be written again (process 0 only)."""
    if jax.process_index() == 0 and (out / "metrics.jsonl").exists():
        # Rows of eval and event name the number of steps done; the others, the step they belong to.
        rows = [row for row in read_metrics(out) if row["step"] < step + (row["kind"] in ("eval", "event"))]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        files.write(out / "metrics.jsonl", text)
