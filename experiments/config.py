"""What a run is: frozen dataclasses, the config files that return them, and their JSON form.

A config file is Python: functions that take nothing and return a `Config`. `path/to/file.py` names its
function `config`, `path/to/file.py:other` names another one. The launcher overrides single fields on the
command line.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
from flax import nnx

import jax_sparse24 as s24
from experiments import files
from experiments.data import base as datas
from experiments.data import text
from experiments.errors import UserError, require
from experiments.models import base as models
from experiments.models import decoder

REPOSITORY = Path(__file__).resolve().parent.parent


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
    least_speed: int = 0
    """tokens per second; a run that is slower at its start is stopped"""
    second_text: str = ""
    """a text of another kind, on whose held-out part the run is evaluated too as it ends: `stdlib` (the
    Python standard library's own source files) or a folder of text files; "" for none"""
    prompts: tuple[str, ...] = ()
    """texts that the trained model continues as a run of an ablation ends: its record holds, for each, the
    tokens that are likeliest in turn"""
    tensorboard: bool = False
    """also write TensorBoard events (needs tensorboardX)"""
    wandb: str = ""
    """also report to this project of Weights & Biases (needs wandb; `wandb offline` works without network)"""

    def __post_init__(self):
        for name in ("steps", "accumulate", "log_every", "eval_batches", "keep"):
            require(getattr(self, name) > 0, f"train.{name} must be positive, got {getattr(self, name)}.")
        for name in ("eval_every", "monitor_every", "probe_every", "checkpoint_every", "least_speed"):
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
class Mesh:
    """How the devices of all processes are arranged, see docs/scaling.md. One of the sizes may be -1."""

    dp: int = -1
    """devices along which only the batch is cut; -1 for all that the other two leave"""
    fsdp: int = 1
    """devices along which the batch is cut, and parameters, moments and masks rest in pieces"""
    tp: int = 1
    """devices along which heads and the FFN width are cut"""
    gather: Literal["product", "step"] = "step"
    """when weights that rest in pieces over `fsdp` are gathered, and their gradients summed, with
    train.accumulate > 1: once per optimiser step, which needs room for whole parameters, masks and gradients,
    or for each product of each micro-batch, which sends more"""

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {name: getattr(self, name) for name in ("dp", "fsdp", "tp")}

    def __post_init__(self):
        for name, size in self.sizes.items():
            require(size > 0 or size == -1, f"mesh.{name} must be positive, or -1 for the rest, got {size}.")
        rest = [f"mesh.{name}" for name, size in self.sizes.items() if size == -1]
        require(len(rest) <= 1, f"{' and '.join(rest)} are both -1; only one can be what the others leave.")


def _check_fixed(config, place: str = "") -> None:
    """UserError for a value that can change, such as a list: what a run is must stay what it was."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{place}{field.name}"
        if dataclasses.is_dataclass(value):
            _check_fixed(value, f"{name}.")
            continue
        try:
            hash(value)
        except TypeError:
            kind = type(value).__name__
            raise UserError(
                f"{name} is a {kind}, which can change after the config is made; write a tuple."
            ) from None


DEFAULTS = {"model": decoder.Config(), "data": text.Config()}


@dataclass(frozen=True)
class Config:
    """One training run, complete."""

    name: str = "run"
    """name of the run folder"""
    seed: int = 0
    """of initialisation, data order and the method's noise"""
    model: models.Config = DEFAULTS["model"]
    data: datas.Config = DEFAULTS["data"]
    optim: Optim = Optim()
    train: Train = Train()
    mesh: Mesh = Mesh()
    method: object = s24.methods.Dense()

    def __post_init__(self):
        _check_fixed(self)
        require(
            self.name not in ("", ".", "..") and not set(self.name) & set("/\\\0"),
            f"name must be that of one folder, without slashes, got {self.name!r}. --out names any folder.",
        )
        require(
            0 <= self.seed < 2**32 - 1,  # the method's noise has the next one
            f"seed must lie in 0 to {2**32 - 2}, got {self.seed}.",
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
    def keys(self) -> dict:
        """From which the model is initialised. A method's noise has its own, so that it does not shift the
        parameters."""
        return {"params": jax.random.key(self.seed), "default": jax.random.key(self.seed + 1)}

    def create_model(self, keys: dict | None = None) -> models.LanguageModel:
        """The model, initialised from the seed, or from `keys`, which then are another seed's."""
        rngs = nnx.Rngs(**(keys or self.keys))
        tokens = self.data.vocabulary
        require(
            self.model.vocabulary == 0 or self.model.vocabulary >= tokens.tokens,
            f"model.vocabulary {self.model.vocabulary} is less than the {tokens.tokens} tokens of "
            f"data.tokenizer {self.data.tokenizer}. Write 0 for as many as it needs.",
        )
        return self.model.create(self.method, self.model.vocabulary or tokens.size, rngs=rngs)

    @property
    def ends_sparse(self) -> bool:
        """Whether the last step is by sparse weights, and the kernels alone are another model."""
        return self.schedule.phase_at(self.train.steps - 1).sparse and self.method.sparse_weights

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


# What the launcher takes by its name, with an example of one.
PARTS_BY_NAME = {"model": "decoder", "data": "text", "method": "SLoPe"}


def with_part(config: "Config", part: str, name: str) -> "Config":
    """The config with another model, dataset or method. Raises UserError with the nearest name."""
    return with_method(config, name) if part == "method" else with_component(config, part, name)


def nearest(name: str, known) -> str:
    """` Did you mean ...?` with the nearest of some names, whatever their case; "" if none is near."""
    lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.4)
    return f" Did you mean {lower[near[0]]}?" if near else ""


def with_method(config: Config, name: str) -> Config:
    """The config with the method `name` of `s24.methods` in its place and in its name, with default options;
    dense first steps last a quarter of the run at most. Raises UserError with the nearest name."""
    known = {entry.name: getattr(s24.methods, entry.name) for entry in s24.methods.list()}
    require(
        name in known, f"There is no method {name!r}; there are {', '.join(known)}.{nearest(name, known)}"
    )
    method = known[name]()
    if getattr(method, "dense_warmup", 0) > config.train.steps // 4:
        method = dataclasses.replace(method, dense_warmup=config.train.steps // 4)
    label = renamed(config.name, type(config.method).__name__, name)
    return dataclasses.replace(config, name=label, method=method)


def renamed(name: str, old: str, new: str) -> str:
    """The name of a run in which a component takes another's place."""
    old, new = old.lower(), new.lower()
    return name.replace(old, new) if old in name else f"{name}-{new}"


def with_component(config: Config, field: str, name: str) -> Config:
    """The config with the model or the data `name` in its place and in its name. Fields that the old one has
    too keep their values. Raises UserError with the nearest name."""
    known, old = components(field), getattr(config, field)
    require(
        name in known, f"There is no {field} {name!r}; there are {', '.join(known)}.{nearest(name, known)}"
    )
    own = {f.name for f in dataclasses.fields(known[name])}
    common = {f.name: getattr(old, f.name) for f in dataclasses.fields(old) if f.name in own}
    new = {"name": renamed(config.name, name_of(old), name), field: known[name](**common)}
    return dataclasses.replace(config, **new)


ROOMS = {"model": ("experiments.models", models.Config), "data": ("experiments.data", datas.Config)}


def components(field: str) -> dict[str, type]:
    """The models, or the datasets, of this repository by name."""
    return datas.configs_in(*ROOMS[field])


def name_of(component) -> str:
    """The name of a model or of a dataset: that of its module, in full where it is not of this repository."""
    module = type(component).__module__
    room, _, name = module.rpartition(".")
    return name if room in [room for room, _ in ROOMS.values()] else module


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
    """The config file, relative to the current folder or to the repository; UserError when there is none."""
    for candidate in (Path(path), REPOSITORY / path):
        if candidate.is_file():
            require(
                candidate.suffix == ".py",
                f"{path} is no Python file, as a config file is one, such as configs/dense.py:cpu.",
            )
            return candidate.resolve()
    require(
        not (Path(path) / "config.json").is_file(),
        f"{path} is the folder of a run and no config file. To continue the run: "
        f"python -m experiments.launch --resume {path}",
    )
    known = [str(file) for file in listing()]
    beside = [file for file in known if Path(file).parent == Path(path).parent]
    raise UserError(f"There is no config file {path!r}.{nearest(path, beside) or nearest(path, known)}")


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


def to_dict(config: Config) -> dict:
    """A config as JSON data. A method carries the name of its class, a model or data whose class is not that
    of `DEFAULTS` the name of its module."""
    data = plain(config)
    data["method"] = {"class": type(config.method).__name__, **data["method"]}
    for field in ROOMS:
        component = getattr(config, field)
        if type(component) is not type(DEFAULTS[field]):
            data[field] = {"class": name_of(component), **data[field]}
    return data


def plain(value):
    """Dataclasses as dictionaries, tuples as lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def from_dict(data: dict) -> Config:
    """The config that `to_dict` wrote. Raises UserError on an unknown field, method, model or dataset."""
    fields = dict(data)
    for name, value in data.items():
        if isinstance(value, dict) and name in PARTS:
            rest = {key: item for key, item in value.items() if key != "class"}
            fields[name] = built(PARTS[name](value.get("class")), rest)
    return built(Config, fields)


def built(kind: type, data: dict):
    """A dataclass from the values of its fields."""
    unknown = sorted(set(data) - {field.name for field in dataclasses.fields(kind)})
    label = kind.__name__ if kind.__name__ != "Config" or kind is Config else f"{kind.__module__}.Config"
    require(not unknown, f"config.json has fields that {label} does not know: {', '.join(unknown)}.")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def method_class(name: str | None) -> type:
    """The method of that name."""
    kind = getattr(s24.methods, str(name), None)
    require(
        kind is not None,
        f"config.json names the method {name!r}, which jax_sparse24.methods does not have.",
    )
    return kind


def component_class(field: str, name: str | None) -> type:
    """The config of a model or of data by its name, or by its module where that is not of this repository."""
    if name is None:
        return type(DEFAULTS[field])
    if name in components(field):
        return components(field)[name]
    try:
        return importlib.import_module(name).Config
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"config.json names the {field} {name!r}, which is neither one of {', '.join(components(field))} "
            "nor a module that can be imported and has a Config."
        ) from error


PARTS = {
    "optim": lambda name: Optim,
    "train": lambda name: Train,
    "mesh": lambda name: Mesh,
    "method": method_class,
    **{field: functools.partial(component_class, field) for field in ROOMS},
}


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
