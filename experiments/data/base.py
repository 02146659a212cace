"""What a dataset is, and its config, which opens it.

A new dataset is one file in this folder, `NAME.py`, with a subclass of `Config` that is called `Config` too.
The launcher then knows it as `--data NAME`, and a config file as `Config(data=NAME.Config(...))`. Everything
else about it is asked of that object.
"""

import bisect
import dataclasses
import importlib
import itertools
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from experiments.data import vocabulary
from experiments.errors import require


class Mixture(Sequence):
    """The records of several sources, one source after the other; training reads each by its weight."""

    def __init__(self, sources: list[Sequence], weights: list[float]):
        self.sources, self.weights = sources, weights
        self._starts = list(itertools.accumulate(map(len, sources), initial=0))

    def __len__(self):
        return self._starts[-1]

    def __getitem__(self, index):
        part = bisect.bisect_right(self._starts, index) - 1
        return self.sources[part][index - self._starts[part]]


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of both splits: sequences of {"text": bytes, "path": bytes} in a fixed order."""

    name: str
    train: Sequence
    validation: Sequence
    fingerprint: str
    """a short name, fit for a folder, that is another one where the text may be another one"""
    folder: Path | None = None
    """where statistics of the text may be kept, so that they are computed once; None for nowhere"""
    parts: tuple["Records", ...] = ()
    """of which the splits are a `Mixture`"""


@dataclasses.dataclass(frozen=True)
class Config:
    """What every dataset has: how its tokens are packed into sequences and batches."""

    seq: int = 128
    """tokens that the model sees at once"""
    batch: int = 16
    """sequences per optimiser step, over all processes and micro-batches"""
    tokenizer: str = "bytes"
    """what the tokens are: bytes, the path of a tokenizer.json, or train:32768 to train one of so many tokens
    on this text; needs the package tokenizers"""
    root: str = "data"
    """where prepared text, tokens and tokenizers are kept"""

    def __post_init__(self):
        for name in ("seq", "batch"):
            require(getattr(self, name) > 0, f"data.{name} must be positive, got {getattr(self, name)}.")

    @property
    def vocabulary(self):
        """What the tokens are, see `experiments.data.vocabulary`. Raises UserError where there is no such
        tokenizer. A tokenizer that is still to be trained is known when the corpus is opened."""
        return vocabulary.named(self.tokenizer)

    def records(self) -> Records:
        """The records, prepared if they have to be. Raises UserError where there are none."""
        raise NotImplementedError


def configs_in(package: str, base: type) -> dict[str, type]:
    """`Config` of each module of a package that has one of this base, by the name of the module."""
    names = [info.name for info in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    kinds = {name: getattr(importlib.import_module(f"{package}.{name}"), "Config", base) for name in names}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, base) and kind is not base}
