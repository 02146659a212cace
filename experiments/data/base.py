"""What a dataset is, and its config, which opens it.

A new dataset is one file in this folder, `NAME.py`, with a subclass of `Config` that is called `Config` too.
The launcher then knows it as `--data NAME`, and a config file as `Config(data=NAME.Config(...))`. Everything
else about it, its vocabulary included, is asked of that object.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from experiments.data.vocabulary import Bytes
from experiments.errors import require


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of both splits: sequences of {"text": bytes, "path": bytes} in a fixed order."""

    name: str
    train: Sequence
    validation: Sequence
    folder: Path | None = None
    """where statistics of the text may be kept, so that they are computed once; None for nowhere"""


@dataclasses.dataclass(frozen=True)
class Config:
    """What every dataset has: how its tokens are packed into sequences and batches."""

    seq: int = 128
    """tokens that the model sees at once"""
    batch: int = 16
    """sequences per optimiser step, over all processes and micro-batches"""

    def __post_init__(self):
        for name in ("seq", "batch"):
            require(getattr(self, name) > 0, f"data.{name} must be positive, got {getattr(self, name)}.")

    @property
    def vocabulary(self):
        """What the tokens are; an object like `experiments.data.vocabulary.Bytes`."""
        return Bytes()

    def records(self) -> Records:
        """The records, prepared if they have to be. Raises UserError where there are none."""
        raise NotImplementedError
