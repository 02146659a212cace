"""What a dataset is, and its config, which opens it.

A new dataset is one file in this folder, `NAME.py`, with a subclass of `Config` that is called `Config` too.
The launcher then knows it as `--data NAME`, and a config file as `Config(data=NAME.Config(...))`. Everything
else about it is asked of that object.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from experiments.data import vocabulary
from experiments.errors import require


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
