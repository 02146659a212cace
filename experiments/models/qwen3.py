"""A decoder of the shape of Qwen3 (arXiv 2505.09388): grouped-query attention whose queries and keys are
normed, and SwiGLU.

Shape suffixes: B sequences, L tokens, S slots of a cache, N layers, d width, H query heads, K key and value
heads, h head width, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax.numpy as jnp
from flax import nnx

import jax_sparse24 as s24
from experiments.errors import require
from experiments.models import base
from experiments.models.parts import (
    Embedding,
    Head,
    Residual,
    attend,
    by_heads,
    gathered,
    heads_of,
    laid,
    named,
    project,
    rotate,
    run_block,
    shards,
)

EPSILON = 1e-6  # of every RMSNorm


@dataclass(frozen=True)
class Config(base.Config):
    """Sizes of the model, and what its layers compute with."""

    layers: int = 4
    """number of blocks"""
    d: int = 128
    """model width"""
    f: int = 384
    """FFN width"""
    heads: int = 4
    """heads of queries"""
    kv_heads: int = 2
    """heads of keys and values, each shared by heads / kv_heads heads of queries; 0 for one of every two"""
    head: int = 32
    """width of a head; even, since rotary positions turn pairs"""
    rope: float = 1e6
    """base of the rotary frequencies"""
    tied: bool = True
    """use the embedding as output head"""
    remat: bool = False
    """recompute each block in the backward pass: less memory, more time"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the products; parameters stay float32"""
    implementation: Literal["reference", "ffi", "cusparselt"] | None = None
    """what runs the sparse products: None for the fastest as measured, "reference" for masked dense ones"""
    attention: Literal["xla", "cudnn"] = "xla"
    """what computes attention: "cudnn" is faster on an NVIDIA GPU with dtype bfloat16, but its gradients
    differ in their last bits from run to run"""

    def __post_init__(self):
        super().__post_init__()
        for name in ("layers", "d", "f", "heads", "head", "rope"):
            require(getattr(self, name) > 0, f"model.{name} must be positive, got {getattr(self, name)}.")
        require(self.head % 2 == 0, f"model.head must be even, got {self.head}: rotary positions turn pairs.")
        require(self.kv_heads >= 0, f"model.kv_heads must not be negative, got {self.kv_heads}.")
        require(
            self.heads % self.shared_heads == 0,
            f"model.kv_heads must divide model.heads, got kv_heads={self.kv_heads} and heads={self.heads}.",
        )
        require(
            self.attention == "xla" or self.dtype == "bfloat16",
            f"model.attention cudnn needs model.dtype bfloat16, got {self.dtype}.",
        )

    @property
    def shared_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or max(self.heads // 2, 1)

    def sizes(self) -> base.Sizes:
        """See `experiments.models.base.Config`."""
        return base.Sizes(
            layers=self.layers,
            d=self.d,
            f=self.f,
            gated=True,
            heads=self.heads,
            head=self.head,
            weights_kept=self.attention != "cudnn",
            remat=self.remat,
        )

    def with_layers(self, layers: int) -> "Config":
        """See `experiments.models.base.Config`."""
        return replace(self, layers=layers)

    def needs_gpu(self) -> bool:
        """See `experiments.models.base.Config`."""
        return self.attention == "cudnn"

    def create(self, method, vocabulary: int, *, rngs) -> "Qwen3":
        """See `experiments.models.base.Config`."""
        return Qwen3(self, method, vocabulary, rngs=rngs)


class Attention(nnx.Module):
    """Causal grouped-query attention; queries and keys are normed per head before they are turned."""

    def __init__(self, model: Config, *, rngs):
        dtype = jnp.dtype(model.dtype)
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        by_heads = {"kernel_metadata": named("embed", "heads")}
        norm = partial(nnx.RMSNorm, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.model = model
        self.query = linear(model.d, model.heads * model.head, **by_heads)
        self.key = linear(model.d, model.shared_heads * model.head, **by_heads)
        self.value = linear(model.d, model.shared_heads * model.head, **by_heads)
        self.out = linear(model.heads * model.head, model.d, kernel_metadata=named("heads", "embed"))
        self.query_norm, self.key_norm = norm(model.head), norm(model.head)

    def __call__(self, x_BLd, cache=None, first=0):
        """What `parts.attend` gives, projected, and the cache."""
        batch, length, _ = x_BLd.shape
        layers = self.query, self.key, self.value
        if shards("heads") > 1:
            own = self.model.shared_heads, self.model.head
            columns = by_heads([gathered(layer.kernel, layer.dtype) for layer in layers], *own)
            parts = heads_of(jnp.dot(x_BLd, columns), *own)
        else:
            parts = [project(layer, x_BLd).reshape(batch, length, -1, self.model.head) for layer in layers]
        turned = partial(rotate, first=first, base=self.model.rope)
        q_BLHh, k_BLKh = turned(self.query_norm(parts[0])), turned(self.key_norm(parts[1]))
        y_BLHh, cache = attend(q_BLHh, k_BLKh, parts[2], cache, first, self.model.attention)
        return project(self.out, y_BLHh.reshape(batch, length, -1)), cache


class Block(Residual):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, model: Config, method, *, rngs):
        dtype = jnp.dtype(model.dtype)
        norm = partial(nnx.RMSNorm, model.d, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.norm1, self.attention = norm(), Attention(model, rngs=rngs)
        options = {"method": method, "dtype": dtype, "implementation": model.implementation}
        options["axes"] = ("embed", "mlp")
        self.norm2, self.ffn = norm(), s24.nn.GatedFFN(model.d, model.f, **options, rngs=rngs)


class Qwen3(base.LanguageModel):
    """Logits of the next token at every position; no position sees a later one."""

    def __init__(self, model: Config, method, vocabulary: int, *, rngs):
        dtype = jnp.dtype(model.dtype)
        self.model = model
        self.embedding = Embedding(vocabulary, model.d, dtype, rngs)
        self.blocks = nnx.List([Block(model, method, rngs=rngs) for _ in range(model.layers)])
        self.norm = nnx.RMSNorm(model.d, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        if not model.tied:
            self.head = Head(model.d, vocabulary, dtype, rngs)

    def features(self, tokens_BL):
        """See `LanguageModel.features`."""
        x_BLd = self._embedded(tokens_BL)
        for block in self.blocks:
            x_BLd = run_block(*nnx.split(block), x_BLd, self.model.remat)
        return self.norm(x_BLd)

    def empty_cache(self, batch: int, size: int):
        """Keys and values (N, B, S, K, h) of no token yet, for `decode`."""
        model = self.model
        shape = (model.layers, batch, size, model.shared_heads, model.head)
        return [jnp.zeros(shape, model.dtype) for _ in range(2)]

    def decode(self, tokens_BL, cache, first):
        """See `LanguageModel.decode`. L may not exceed the cache's S slots; the newest S tokens are seen."""
        x_BLd, layers = self._embedded(tokens_BL), []
        for n, block in enumerate(self.blocks):
            x_BLd, layer = block(x_BLd, [part[n] for part in cache], first)
            layers.append(layer)
        return self.logits(self.norm(x_BLd)), [jnp.stack(parts) for parts in zip(*layers, strict=True)]

    def _embedded(self, tokens_BL):
        return laid(self.embedding(tokens_BL), "batch", None, None)

    def logits(self, x_BLd):
        """See `LanguageModel.logits`."""
        logits_BLV = self.embedding.attend(x_BLd) if self.model.tied else self.head(x_BLd)
        return logits_BLV.astype(jnp.float32)
