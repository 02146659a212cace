"""What a run is: frozen dataclasses, the config files that return them, and their JSON form.

A config file is Python: functions that take nothing and return a `Config`. `path/to/file.py` names its
function `config`, `path/to/file.py:other` names another one. The launcher overrides single fields on the
command line.
"""

import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import json
import sys
import traceback
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax_sparse24 as s24
from experiments import files

REPOSITORY = Path(__file__).resolve().parent.parent


class UserError(ValueError):
    """A mistake that the user can correct: shown as one message, without a traceback."""


def require(condition: bool, message: str):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class Model:
    """The decoder-only language model."""

    layers: int = 4
    """number of blocks"""
    d: int = 128
    """model width"""
    f: int = 512
    """FFN width"""
    heads: int = 4
    """attention heads; d / heads must be even (rotary positions turn pairs)"""
    ffn: Literal["squared_relu", "swiglu"] = "squared_relu"
    """FFN: act(x W1) W2 with squared ReLU, or (silu(x Wg) * x W1) W2"""
    tied: bool = True
    """use the embedding as output head"""
    scan: bool = False
    """one scanned block with stacked parameters instead of unrolled blocks: compiles faster"""
    remat: bool = False
    """recompute each block in the backward pass: less memory, more time"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the products; parameters stay float32"""
    implementation: Literal["reference", "ffi", "cusparselt"] | None = None
    """what runs the sparse products: None for the fastest as measured, "reference" for masked dense ones"""
    attention: Literal["xla", "cudnn"] = "xla"
    """what computes attention: "cudnn" is several times faster on an NVIDIA GPU with dtype bfloat16, but its
    gradients differ in their last bits from run to run"""
    rank: int = 0
    """rank of the linear layers of every block, as in CoLA (arXiv 2502.10940); 0 for full rank"""
    bottleneck: Literal["silu", "identity"] = "silu"
    """with a rank: what is between the two factors"""

    def __post_init__(self):
        for name in ("layers", "d", "f", "heads"):
            require(getattr(self, name) > 0, f"model.{name} must be positive, got {getattr(self, name)}.")
        require(
            self.d % (2 * self.heads) == 0,
            f"model.d / model.heads must be an even number, got d={self.d} and heads={self.heads}. "
            "Choose d as a multiple of 2 * heads.",
        )
        require(
            self.attention == "xla" or self.dtype == "bfloat16",
            f"model.attention cudnn needs model.dtype bfloat16, got {self.dtype}.",
        )
        require(
            0 <= self.rank <= self.d,
            f"model.rank is 0 (full) or at most model.d = {self.d}, got {self.rank}.",
        )


@dataclass(frozen=True)
class Data:
    """The text: bytes, packed into sequences."""

    corpus: str = "stdlib"
    """`stdlib` (the Python standard library's own source files) or a folder of text files"""
    patterns: tuple[str, ...] = ("*.txt", "*.md", "*.rst", "*.py")
    """which files of a folder to take (not used for stdlib)"""
    root: str = "data"
    """where prepared corpora are kept"""
    seq: int = 128
    """tokens that the model sees at once"""
    batch: int = 16
    """sequences per optimiser step, over all processes and micro-batches"""

    def __post_init__(self):
        for name in ("seq", "batch"):
            require(getattr(self, name) > 0, f"data.{name} must be positive, got {getattr(self, name)}.")
        require(bool(self.patterns), "data.patterns is empty: give at least one, such as '*.txt'.")


@dataclass(frozen=True)
class Optim:
    """AdamW, clipping and the learning-rate schedule."""

    lr: float = 1e-3
    """peak learning rate"""
    final: float = 0.1
    """learning rate at the end, as a share of the peak"""
    warmup: int = 50
    """steps of linear warm-up"""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """cosine, or warm-up, stable, linear decay"""
    decay_share: float = 0.2
    """wsd only: share of all steps spent decaying"""
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    """decoupled decay of the matrices (norm scales are left alone)"""
    clip: float = 1.0
    """largest global gradient norm"""

    def __post_init__(self):
        for name in ("lr", "clip"):
            require(getattr(self, name) > 0, f"optim.{name} must be positive, got {getattr(self, name)}.")
        for name in ("warmup", "weight_decay"):
            require(
                getattr(self, name) >= 0, f"optim.{name} must not be negative, got {getattr(self, name)}."
            )
        for name in ("final", "decay_share", "b1", "b2"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"optim.{name} is a share and must lie in [0, 1], got {value}.")


@dataclass(frozen=True)
class Train:
    """Length of the run and what is recorded when. All intervals count optimiser steps; 0 means never."""

    steps: int = 600
    """optimiser steps"""
    accumulate: int = 1
    """micro-batches per optimiser step; divides data.batch"""
    log_every: int = 1
    """steps between rows of loss, learning rate, gradient norm and speed"""
    eval_every: int = 100
    """steps between evaluations (one more at the end)"""
    eval_batches: int = 16
    """validation batches per evaluation"""
    start_from: str = ""
    """folder of a finished run, or one of its checkpoints (RUN/checkpoints/STEP), whose parameters training
    starts from; they also teach a method that distils"""
    perturb: float = 0.0
    """noise on the initial parameters, relative to each: at 1e-6, that of rounding, the run is a replicate"""
    dense_first: float = 0.0
    """share of the steps, at the start, that are dense; the method's own phases share the rest"""
    monitor_every: int = 10
    """steps between measurements of flip rate, kept share of |w| and predicted and actual loss change; an
    interval that has no factor in common with the refresh period samples the refreshes too"""
    monitor_mask: Literal["transposable", "top-2"] = "transposable"
    """the mask that is watched where the method has none: FST's, or two of every four along `in`"""
    probe_every: int = 200
    """steps between comparisons of the sparse gradient with the dense one: about five gradients each"""
    checkpoint_every: int = 200
    """steps between checkpoints (one more at the end)"""
    keep: int = 2
    """newest checkpoints to keep"""
    tensorboard: bool = False
    """also write TensorBoard events (needs tensorboardX)"""

    def __post_init__(self):
        for name in ("steps", "accumulate", "log_every", "eval_batches", "keep"):
            require(getattr(self, name) > 0, f"train.{name} must be positive, got {getattr(self, name)}.")
        for name in ("eval_every", "monitor_every", "probe_every", "checkpoint_every"):
            require(
                getattr(self, name) >= 0, f"train.{name} must not be negative, got {getattr(self, name)}."
            )
        require(
            0 <= self.perturb < 1,
            f"train.perturb is relative to each parameter and below 1, got {self.perturb}.",
        )
        require(
            0 <= self.dense_first < 1,
            f"train.dense_first is a share below 1, got {self.dense_first}.",
        )


@dataclass(frozen=True)
class Config:
    """One training run, complete."""

    name: str = "run"
    """name of the run folder"""
    seed: int = 0
    """of initialisation, data order and the method's noise"""
    model: Model = Model()
    data: Data = Data()
    optim: Optim = Optim()
    train: Train = Train()
    method: object = s24.methods.Dense()

    def __post_init__(self):
        require(
            self.name not in ("", ".", "..") and not set(self.name) & set("/\\\0"),
            f"name must be that of one folder, without slashes, got {self.name!r}. --out names any folder.",
        )
        batch, parts = self.data.batch, self.train.accumulate
        require(
            batch % parts == 0,
            f"train.accumulate must divide data.batch, got accumulate={parts} and batch={batch}.",
        )
        require(
            self.optim.warmup < self.train.steps,
            f"optim.warmup must be shorter than train.steps, got {self.optim.warmup} and {self.train.steps}.",
        )

    @property
    def schedule(self) -> s24.Schedule:
        """The phases of the run: `train.dense_first`, then those of the method."""
        dense = round(self.train.dense_first * self.train.steps)
        try:
            own = self.method.schedule(self.train.steps - dense)
        except ValueError as error:
            raise UserError(f"This method does not suit {self.train.steps} steps: {error}") from error
        first = s24.Phase("dense first", dense, sparse=False, adapters=False) if dense else None
        return s24.Schedule((first, *own.phases)) if first else own


def with_method(config: Config, name: str) -> Config:
    """The config with the method `name` of `s24.methods` in its place and in its name, with default options;
    dense first steps last a quarter of the run at most. Raises UserError with the nearest name."""
    known = {entry.name: getattr(s24.methods, entry.name) for entry in s24.methods.list()}
    if name not in known:
        lower = {key.lower(): key for key in known}
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.4)
        hint = f" Did you mean {lower[near[0]]}?" if near else ""
        raise UserError(f"There is no method {name!r}; there are {', '.join(known)}.{hint}")
    method = known[name]()
    if getattr(method, "dense_warmup", 0) > config.train.steps // 4:
        method = dataclasses.replace(method, dense_warmup=config.train.steps // 4)
    old, new = type(config.method).__name__.lower(), name.lower()
    label = config.name.replace(old, new) if old in config.name else f"{config.name}-{new}"
    return dataclasses.replace(config, name=label, method=method)


def load(spec: str) -> Config:
    """The config named by `path/to/file.py` or `path/to/file.py:function`.

    Raises UserError with the nearest file or function when the name does not exist.
    """
    path, _, function = spec.partition(":")
    functions = functions_of(find(path))
    function = function or "config"
    if function not in functions:
        near = difflib.get_close_matches(function, functions, n=1)
        hint = f" Did you mean {path}:{near[0]}?" if near else ""
        raise UserError(
            f"{path} has no function {function!r}; it has: {', '.join(functions) or 'none'}.{hint}"
        )
    with blaming(find(path)):
        config = functions[function]()
    require(
        isinstance(config, Config),
        f"{path}:{function} must return an experiments.config.Config, not {type(config).__name__}.",
    )
    return config


def find(path: str) -> Path:
    """The config file, relative to the current folder or to the repository; UserError when absent."""
    for candidate in (Path(path), REPOSITORY / path):
        if candidate.is_file():
            return candidate.resolve()
    known = [str(file) for file in listing()]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UserError(f"There is no config file {path!r}.{hint}")


@contextlib.contextmanager
def blaming(path: Path):
    """Inside, what a config file raises becomes a UserError that names it and the line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise UserError(f"The config file {path} raises {type(error).__name__}{where}: {error}") from error


def listing() -> list[Path]:
    """The config files of this repository, relative to it."""
    files = sorted((REPOSITORY / "configs").rglob("*.py"))
    return [file.relative_to(REPOSITORY) for file in files if file.name != "__init__.py"]


def functions_of(path: Path) -> dict:
    """The functions that a config file offers: public, defined there, without required arguments."""
    return {key: f for key, f in public_functions(path).items() if not inspect.signature(f).parameters}


def public_functions(path: Path) -> dict:
    """All public functions that a file of configs defines."""
    name = "config_file_" + str(path).replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with blaming(path):
        spec.loader.exec_module(module)
    return {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
    }


def to_dict(value) -> dict:
    """A config as JSON data; a method carries its class name."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
        is_method = type(value) not in (Config, Model, Data, Optim, Train)
        return {"class": type(value).__name__, **fields} if is_method else fields
    return list(value) if isinstance(value, tuple) else value


def from_dict(data: dict, kind=Config):
    """The config that `to_dict` wrote. Raises UserError on an unknown field or method."""
    data = dict(data)
    if kind is object:
        name = data.pop("class", None)
        kind = getattr(s24.methods, str(name), None)
        require(
            kind is not None,
            f"config.json names the method {name!r}, which jax_sparse24.methods does not have.",
        )
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    require(not unknown, f"config.json has fields that {kind.__name__} does not know: {', '.join(unknown)}.")
    for key, value in data.items():
        if isinstance(value, dict):
            data[key] = from_dict(value, hints[key])
        elif isinstance(value, list):
            data[key] = tuple(value)
    return kind(**data)


def write(config: Config, path: Path):
    """Write the resolved config as JSON."""
    files.write(path, json.dumps(to_dict(config), indent=2) + "\n")


def read(path: Path) -> Config:
    """Read what `write` wrote; UserError when it is not readable JSON."""
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable JSON ({error}).") from error
    return from_dict(data)


def differences(old: Config, new: Config) -> list[str]:
    """Lines `field: old -> new` for every field in which two configs differ."""
    a, b = flatten(to_dict(old)), flatten(to_dict(new))
    keys = list(a) + [key for key in b if key not in a]
    return [
        f"{key}: {a.get(key, 'absent')} -> {b.get(key, 'absent')}" for key in keys if a.get(key) != b.get(key)
    ]


def flatten(data: dict, prefix: str = "") -> dict:
    """Nested dictionaries as one, keys joined by dots."""
    flat = {}
    for key, value in data.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
