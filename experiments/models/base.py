"""What a language model of the experiments is, and its config, which builds it.

A new architecture is one file in this folder, `NAME.py`, with a subclass of `Config` that is called `Config`
too. The launcher then knows it as `--model NAME`, and a config file as `Config(model=NAME.Config(...))`.
Nothing else names architectures or reads the fields of their configs: monitors, and the lines before the
first step, ask the layers of the model that was built, and estimates ask the config for its `Sizes`. Without
them the estimate of memory refuses the model, and the count of operations leaves attention out.
"""

import dataclasses
from typing import ClassVar

from flax import nnx

import jax_sparse24 as s24
from experiments.errors import require


class LanguageModel(nnx.Module):
    """A causal language model. Its sparse layers are those of `s24.nn`."""

    def __call__(self, tokens_BL):
        """int32 (B, L) to float32 logits (B, L, V) of the next token at every position."""
        return self.logits(self.features(tokens_BL))

    def features(self, tokens_BL):
        """int32 (B, L) to what the logits are made of, (B, L, d), each position by itself."""
        raise NotImplementedError

    def logits(self, x_BLd):
        """Features (B, L, d) to float32 logits (B, L, V)."""
        raise NotImplementedError

    def empty_cache(self, batch: int, size: int):
        """The cache of `decode` before the first token, for `size` tokens."""
        raise NotImplementedError

    def decode(self, tokens_BL, cache, first):
        """Logits (B, L, V) of tokens that follow those in the cache, and the cache with them.

        first: the position of the first of these tokens."""
        raise NotImplementedError

    def activation_stats(self, tokens_BL) -> dict:
        """`s24.nn.FFN.activation_stats` of every feed-forward block, each (N,); {} if the model has none."""
        return {}

    def projections(self) -> list[tuple[s24.nn.Linear, int]]:
        """The sparse layers of attention, each with which of its widths the axis tp of a mesh cuts: 0 for the
        width of its input, 1 for that of its output."""
        return []


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What estimates ask of a model whose blocks are alike, each of attention and a feed-forward block."""

    layers: int
    """number of blocks"""
    d: int
    """model width"""
    f: int
    """FFN width"""
    gated: bool
    """whether the feed-forward block has a gate"""
    heads: int
    """heads of queries"""
    head: int
    """width of a head"""
    weights_kept: bool
    """whether attention keeps its weights for the backward pass"""
    remat: bool
    """whether each block is computed again in the backward pass"""


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields that a model is built from."""

    vocabulary: int = 0
    """rows of the embedding; 0 for as many as the tokenizer needs"""
    dtype: ClassVar[str] = "float32"
    """of the products, if it is no field"""

    def __post_init__(self):
        require(self.vocabulary >= 0, f"model.vocabulary must not be negative, got {self.vocabulary}.")

    def create(self, method, vocabulary: int, *, rngs: nnx.Rngs) -> LanguageModel:
        """The model with `method` in its sparse layers.

        Parameters come from the stream `params` of `rngs`, in an order that does not depend on the method, so
        that methods start from the same ones.

        vocabulary: rows of the embedding: how many tokens there are, padded, or `self.vocabulary`."""
        raise NotImplementedError

    def sizes(self) -> Sizes | None:
        """The sizes of the model's blocks; None if these are not alike."""
        return None

    def with_layers(self, layers: int) -> "Config":
        """The same model with so many blocks; asked of one that has `sizes`."""
        raise NotImplementedError

    def needs_gpu(self) -> bool:
        """Whether the model is built of what runs on GPUs alone."""
        return False
