"""Where and with what a result was measured, as JSON data."""

import importlib.metadata
import os
import platform
import subprocess

from experiments.config import REPOSITORY
from jax_sparse24.dispatch.hardware import hardware

PACKAGES = ("jax_sparse24", "jax", "jaxlib", "flax", "numpy", "torch")
# Results and pages change while benchmarks run; they change no measurement.
OUTPUT = (":!experiments/benchmarks/results", ":!docs")


def describe() -> dict:
    """Hardware, versions, commit, and how busy the machine was before."""
    here = hardware()
    return {
        "hardware": {
            "name": here.name,
            "description": here.description,
            "platform": here.platform,
            "isa": here.isa,
            "cores": here.cores,
        },
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "commit": git("rev-parse", "HEAD"),
        "tree": tree(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def gpu() -> str | None:
    """Name, driver, limit of power and highest SM clock of the first GPU, as its driver tells."""
    asked = "name,driver_version,power.limit,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0] if done.returncode == 0 else None


def flags() -> dict[str, str]:
    """The variables of the environment by which XLA and NCCL compile and send in another way."""
    names = sorted(name for name in os.environ if name == "XLA_FLAGS" or name.startswith("NCCL_"))
    return {name: os.environ[name] for name in names}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tree() -> str | None:
    """Whether tracked files differ from the commit; None outside a git repository."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *OUTPUT)
    if changed is None:
        return None
    return "with uncommitted changes" if changed else "clean"


def git(*args) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
