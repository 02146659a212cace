"""An ablation is a claim that runs: arms, seeds, and a predicate over what they measure.

A file under configs/ defines `ablation(size) -> Ablation`; `path/to/file.py:size` names it at one size. The
sizes: `smoke` shows in seconds that it runs, `cpu` takes at most ten minutes for all arms and three seeds on
two cores, `mid` is a model of 3M parameters that sees 16M bytes (32 and 20 times as much as at `cpu`), small
enough for many runs on one GPU at a time, `gpu` one of 25M parameters that sees as many. `124m` (the shape of
GPT-2's 124M, and 110.1M parameters, since the vocabulary has 32768 tokens and not 50257) and `wide` (268M in
four wide blocks) see 459M and 262M tokens of the Linux source, a quarter of an hour or more a run on an H100;
`pilot` and `widepilot` are an eighth of them, for recipes that are chosen before, `wide4096` (0.9B in four
blocks, 33M tokens) is a short one for the time that steps take.
"""

import dataclasses
import difflib
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax_sparse24 as s24
from experiments import config as configs
from experiments.ablations.verdicts import Predicate
from experiments.analysis.outcome import METRICS
from experiments.config import REPOSITORY, Config, Optim, Train
from experiments.data import linux, text
from experiments.errors import UserError, require
from experiments.models import decoder

REPLICATE = "replicate"
# What runs on the source of Linux continue: a function, a comment, and text of the second kind.
PROMPTS = (
    "static int __init ",
    "/*\n * This function returns the number of ",
    "def __repr__(self):\n",
)
# Programs that differ in the order of their sums differ by the rounding of float32 (6e-8) times the root of
# the number of summands, some hundred here: about 1e-6 of a value. Another compiler, another number of
# threads or another commit changes as much.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Size:
    """What the arms of an ablation start from, and the masked decay that suits this model."""

    name: str
    base: Config
    decay: float

    def arm(self, method, model=None, **train) -> Config:
        """The base with a method, and with other fields of Model (a dict) and Train."""
        return dataclasses.replace(
            self.base,
            method=method,
            model=dataclasses.replace(self.base.model, **(model or {})),
            train=dataclasses.replace(self.base.train, **train),
        )

    def seeds(self, **counts: int) -> range:
        """Three seeds, or as many as are given for the size of this name: `size.seeds(cpu=8)`."""
        return range(counts.get(self.name, 3))

    @property
    def warmup(self) -> int:
        """Steps of the dense warm-up that sparse activations need."""
        return self.base.train.steps // 4


def _size(name: str, decay: float, **parts) -> Size:
    return Size(name, Config(name=name, **parts), decay)


def _on_bytes(
    name: str, decay: float, *, seq: int, batch: int, lr: float, log_every: int, **model: int
) -> Size:
    """A size for a GPU whose tokens are bytes, 16384 a step."""
    return _size(
        name,
        decay,
        model=decoder.Config(**model, scan=True, dtype="bfloat16", attention="cudnn"),
        data=text.Config(seq=seq, batch=batch),
        optim=Optim(lr=lr, warmup=100),
        train=Train(
            steps=1000,
            log_every=log_every,
            eval_every=200,
            eval_batches=16,
            monitor_every=20,
            probe_every=100,
            checkpoint_every=1000,
            keep=1,
        ),
    )


def _on_linux(
    name: str,
    steps: int,
    least_speed: int,
    warmup: int = 500,
    accumulate: int = 1,
    lr: float = 1.2e-3,
    **model: int,
) -> Size:
    """A size with a vocabulary of 32768, 64 sequences of 1024 tokens a step. Rates of the widths 768 and 2048
    are the best of three by runs of an eighth of the tokens, that of the width 4096 by runs of as many."""
    return _size(
        name,
        2e-5,
        model=decoder.Config(**model, dtype="bfloat16", attention="cudnn"),
        data=linux.Config(seq=1024, batch=64, tokenizer="train:32768"),
        optim=Optim(lr=lr, warmup=warmup),
        train=Train(
            steps=steps,
            log_every=20,
            eval_every=warmup,
            eval_batches=16,
            monitor_every=100,
            probe_every=2 * warmup,
            checkpoint_every=steps,
            keep=1,
            least_speed=least_speed,
            accumulate=accumulate,
            second_text="stdlib",
            prompts=PROMPTS,
        ),
    )


# Models of four wide blocks.
WIDE = {"layers": 4, "d": 2048, "f": 8192, "heads": 16}
WIDER = {"layers": 4, "d": 4096, "f": 14336, "heads": 32}
SIZES = {
    size.name: size
    for size in (
        _size(
            "smoke",
            1e-3,
            model=decoder.Config(layers=1, d=16, f=32, heads=1),
            data=text.Config(seq=32, batch=4),
            optim=Optim(lr=3e-3, warmup=2),
            train=Train(
                steps=12,
                eval_every=6,
                eval_batches=2,
                monitor_every=2,
                probe_every=3,
                checkpoint_every=6,
                keep=1,
            ),
        ),
        _size(
            "cpu",
            6e-4,
            model=decoder.Config(layers=2, d=64, f=256, heads=2),
            data=text.Config(seq=64, batch=16),
            optim=Optim(lr=3e-3, warmup=100),
            train=Train(
                steps=800,
                eval_every=200,
                eval_batches=40,
                monitor_every=10,
                probe_every=100,
                checkpoint_every=400,
                keep=1,
            ),
        ),
        _on_bytes("mid", 1e-4, layers=4, d=256, f=1024, heads=4, seq=256, batch=64, lr=2e-3, log_every=20),
        _on_bytes("gpu", 6e-5, layers=8, d=512, f=2048, heads=8, seq=512, batch=32, lr=1e-3, log_every=5),
        _on_linux("pilot", 875, 350_000, warmup=125, layers=12, d=768, f=3072, heads=12),
        _on_linux("124m", 7000, 350_000, layers=12, d=768, f=3072, heads=12),
        _on_linux("widepilot", 500, 150_000, warmup=100, lr=6e-4, **WIDE),
        _on_linux("wide", 4000, 150_000, lr=6e-4, **WIDE),
        _on_linux("wide4096", 500, 40_000, warmup=100, accumulate=4, lr=4e-4, **WIDER),
    )
}


@dataclass(frozen=True)
class Ablation:
    """A claim about training, with everything that is needed to test it.

    All arms see the same batches in the same order, and start from the same parameters for equal seeds. One
    more arm is added to every ablation: the replicate, which is the first sparse arm (the first one if all
    are dense) from parameters perturbed by rounding. Its distance from that arm is the noise floor: masks
    that flip amplify rounding, so that a dense arm would show too little of it.
    Raises UserError for what cannot be compared.
    """

    claim: str
    """in words, as the paper makes it"""
    source: str
    """paper and where in it"""
    arms: Mapping[str, Config]
    """the first is what the others are compared with in tables; seeds are set by the run"""
    verdict: Predicate
    """what must hold of the metrics (experiments.analysis.outcome.METRICS)"""
    expects: str
    """written before the first run"""
    differs: str
    """what is not as in the paper, and why"""
    found: Mapping[str, str] = field(default_factory=dict)
    """size -> what its runs show, and where the verdict may come from; written after them"""
    equal: Literal["steps", "time"] = "steps"
    """what arms have in common; with "time" their numbers of steps may differ, and each run's batches begin
    those of a longer one"""
    start: str = ""
    """the first arm, if the others start from its trained parameters of the same seed; it may have another
    number of steps"""
    pretrained: str = ""
    """what the first arm is, in words, where it was trained before and elsewhere (pretrained.py)"""
    seeds: Sequence[int] = (0, 1, 2)
    """more than three where the effect that the claim states needs them"""
    curve: tuple[str, str] = ("monitor", "flip_rate")
    """rows and column of metrics.jsonl that show the mechanism"""

    def __post_init__(self):
        require(self.equal in ("steps", "time"), f"Ablation: equal={self.equal!r} must be 'steps' or 'time'.")
        require(bool(self.arms), "The ablation has no arms: give at least one.")
        leading = next(iter(self.arms))
        require(REPLICATE not in self.arms, f"No arm may be called {REPLICATE!r}: it is added to every one.")
        require(
            self.start in ("", leading) and not (self.start and len(self.arms) == 1),
            f"The arms cannot start from {self.start!r}: it must be the first of several arms, {leading!r}.",
        )
        other = next(name for name in self.arms if name != self.start)
        first = self.arms[other]
        for name, config in self.arms.items():
            steps = name == self.start or config.train.steps == first.train.steps or self.equal == "time"
            require(
                config.data == first.data and steps,
                f"Arm {name!r} has other data or another number of steps than {other!r}: "
                "arms must see the same batches, or seeds could not be paired. Arms that are given equal "
                'time may differ in steps; their ablation has equal="time".',
            )
        folders = {folder_of(arm) for arm in self.arms}
        require(
            len(folders) == len(self.arms), f"Two arms would share the same folder: {', '.join(self.arms)}."
        )
        comparisons = self.verdict.comparisons()
        require(bool(comparisons), "The verdict compares nothing.")
        for comparison in comparisons:
            for arm in comparison.arms:
                _known("arm", arm, self.arms)
            _known("metric", comparison.metric, METRICS)
        check_seeds(self.seeds)
        unknown = set(self.found) - set(SIZES)
        require(not unknown, f"`found` is by size: {', '.join(SIZES)}; got {', '.join(map(repr, unknown))}.")

    @property
    def replicated(self) -> str:
        """The arm that the replicate repeats."""
        names = [name for name in self.arms if name != self.start]
        sparse = [name for name in names if not isinstance(self.arms[name].method, s24.methods.Dense)]
        return (sparse or names)[0]

    @property
    def all_arms(self) -> dict[str, Config]:
        """The arms and the replicate."""
        base = self.arms[self.replicated]
        train = dataclasses.replace(base.train, perturb=ROUNDING)
        return {**self.arms, REPLICATE: dataclasses.replace(base, train=train)}

    def runs(self, seeds) -> list[tuple[str, int, Config]]:
        """(arm, seed, config) of every run, seed by seed, so that early results already compare arms."""
        return [
            (arm, seed, dataclasses.replace(config, name=f"{folder_of(arm)}-seed{seed}", seed=seed))
            for seed in check_seeds(seeds)
            for arm, config in self.all_arms.items()
        ]

    @property
    def statement(self) -> dict:
        """What is stated before the first run, as JSON data: claim, expectation, comparisons, their hash."""
        words = {
            "claim": self.claim,
            "expects": self.expects,
            "comparisons": [
                str(c) if c.effect is None else f"{c} by {c.effect:g}" for c in self.verdict.comparisons()
            ],
        }
        return words | {"hash": hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]}


def folder_of(arm: str) -> str:
    """The name of an arm as that of a folder: `+ slorb` is in slorb, as a command would take --slorb for an
    option."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in arm).lstrip("-")


def _known(what: str, name: str, names):
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    require(name in names, f"The verdict names the {what} {name!r}; there are: {', '.join(names)}.{hint}")


def check_seeds(seeds) -> tuple[int, ...]:
    """The seeds; UserError for none, for one that is given twice, or for a negative one."""
    seeds = tuple(seeds)
    require(bool(seeds), "The list of seeds is empty: give at least one, such as --seeds 0,1,2.")
    require(len(set(seeds)) == len(seeds), f"A seed is given twice: {', '.join(map(str, seeds))}.")
    require(min(seeds) >= 0, f"Seeds must not be negative, got {min(seeds)}.")
    return seeds


@dataclass(frozen=True)
class Named:
    """An ablation at one size, with the names that its results carry."""

    file: Path
    size: str
    ablation: Ablation

    @property
    def paper(self) -> str:
        return self.file.parent.name

    @property
    def claim(self) -> str:
        return self.file.stem

    @property
    def found(self) -> str:
        """What its author found at this size, "" if nothing was written."""
        return self.ablation.found.get(self.size, "")

    @property
    def slug(self) -> str:
        return f"{self.paper}/{self.claim}_{self.size}"


def load(spec: str) -> Named:
    """The ablation named by `path/to/file.py` (size cpu) or `path/to/file.py:size`; UserError if none."""
    path, _, size = spec.partition(":")
    size, file = size or "cpu", configs.find(path)
    function = configs.public_functions(file).get("ablation")
    if function is None or len(inspect.signature(function).parameters) != 1:
        known = ", ".join(map(str, listing()))
        raise UserError(f"{path} defines no ablation(size). Ablations of this repository: {known}.")
    near = difflib.get_close_matches(size, SIZES, n=1)
    require(
        size in SIZES,
        f"There is no size {size!r}; there are {', '.join(SIZES)}."
        + (f" Did you mean {path}:{near[0]}?" if near else ""),
    )
    found = function(SIZES[size])
    require(
        isinstance(found, Ablation),
        f"{path}: ablation must return an experiments.ablations.ablation.Ablation, "
        f"not {type(found).__name__}.",
    )
    return Named(file, size, found)


def load_all(spec: str) -> list[Named]:
    """The ablation of a file, or those of all files in a folder; either may end in `:size`."""
    path, _, size = spec.partition(":")
    folders = [folder for folder in (Path(path), REPOSITORY / path) if folder.is_dir()]
    if not path or not folders:
        return [load(spec)]
    files = [f for f in sorted(folders[0].glob("*.py")) if "ablation" in configs.public_functions(f)]
    require(bool(files), f"No file in {path} defines ablation(size).")
    return [load(f"{file}:{size or 'cpu'}") for file in files]


def listing() -> list[Path]:
    """The ablations of this repository, relative to it."""
    return [f for f in configs.listing() if "ablation" in configs.public_functions(REPOSITORY / f)]
