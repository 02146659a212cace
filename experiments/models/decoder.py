"""A decoder-only language model: RMSNorm, rotary positions, causal attention, a feed-forward of jax_sparse24.

Shape suffixes: B sequences, L tokens, S slots of a cache, N layers, d width, H heads, K heads of keys and
values, h head width, V vocabulary.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

import jax_sparse24 as s24
from experiments.errors import require
from experiments.models import base
from experiments.models.parts import (
    ROPE_BASE,
    Embedding,
    Head,
    Residual,
    attend,
    by_heads,
    check_heads,
    gathered,
    heads_of,
    laid,
    named,
    project,
    rotate,
    run_block,
    shards,
    with_columns,
)


@dataclass(frozen=True)
class Config(base.Config):
    """Sizes of the decoder, what its layers compute with, and which feed-forward they have."""

    layers: int = 4
    """number of blocks"""
    d: int = 128
    """model width"""
    f: int = 512
    """FFN width"""
    heads: int = 4
    """attention heads"""
    kv_heads: int = 0
    """heads of keys and values, each shared by heads / kv_heads heads of queries; 0 for as many as heads"""
    head_dim: int = 0
    """width of a head, even, since rotary positions turn pairs; 0 for d / heads"""
    rope_base: float = ROPE_BASE
    """base of the rotary frequencies"""
    qk_norm: bool = False
    """norm queries and keys per head before they are turned"""
    norm_eps: float = 1e-6
    """what every RMSNorm adds to the mean square"""
    ffn: Literal["squared_relu", "gelu", "swiglu"] = "squared_relu"
    """FFN: act(x W1) W2 with squared ReLU or (tanh) GELU, or (silu(x Wg) * x W1) W2"""
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
    attention_method: str = ""
    """method of weights, such as FST, by which the projections of attention run in sparse phases, queries,
    keys and values as one product: the run's own with its options, or another with its defaults; empty for
    dense ones. Phases and what the optimiser does are those of the run's method"""
    rank: int = 0
    """rank of the linear layers of every block, as in CoLA (arXiv 2502.10940); 0 for full rank"""
    bottleneck: Literal["silu", "identity"] = "silu"
    """with a rank: what is between the two factors"""

    def __post_init__(self):
        super().__post_init__()
        for name in ("layers", "d", "f", "heads", "rope_base", "norm_eps"):
            require(getattr(self, name) > 0, f"model.{name} must be positive, got {getattr(self, name)}.")
        for name in ("kv_heads", "head_dim"):
            require(
                getattr(self, name) >= 0, f"model.{name} must not be negative, got {getattr(self, name)}."
            )
        require(
            self.head_dim > 0 or self.d % (2 * self.heads) == 0,
            f"model.d / model.heads must be an even number, got d={self.d} and heads={self.heads}. "
            "Choose d as a multiple of 2 * heads, or give model.head_dim.",
        )
        require(self.head_dim % 2 == 0, f"model.head_dim must be even, got {self.head_dim}.")
        require(
            self.heads % (self.kv_heads or self.heads) == 0,
            f"model.kv_heads must divide model.heads, got kv_heads={self.kv_heads} and heads={self.heads}.",
        )
        require(
            not self.rank or self.own_shape == (self.heads, self.d // self.heads),
            f"model.rank {self.rank} is for as many kv_heads as heads, of width d / heads; got "
            f"kv_heads={self.kv_heads} and head_dim={self.head_dim}.",
        )
        require(
            self.attention == "xla" or self.dtype == "bfloat16",
            f"model.attention cudnn needs model.dtype bfloat16, got {self.dtype}.",
        )
        require(
            0 <= self.rank <= self.d,
            f"model.rank is 0 (full) or at most model.d = {self.d}, got {self.rank}.",
        )

        require(
            not self.rank or not self.attention_method,
            f"model.attention_method {self.attention_method} is for projections of full rank, not model.rank "
            f"{self.rank}.",
        )

    @property
    def own_shape(self) -> tuple[int, int]:
        """Heads of keys and values, and the width of a head."""
        return self.kv_heads or self.heads, self.head_dim or self.d // self.heads

    def sizes(self) -> base.Sizes:
        """See `experiments.models.base.Config`."""
        return base.Sizes(
            layers=self.layers,
            d=self.d,
            f=self.f,
            gated=self.ffn == "swiglu",
            heads=self.heads,
            head=self.own_shape[1],
            weights_kept=self.attention != "cudnn",
            remat=self.remat,
        )

    def with_layers(self, layers: int) -> "Config":
        """See `experiments.models.base.Config`."""
        return dataclasses.replace(self, layers=layers)

    def needs_gpu(self) -> bool:
        """See `experiments.models.base.Config`."""
        return self.attention == "cudnn"

    def create(self, method, vocabulary: int, *, rngs) -> "Decoder":
        """See `experiments.models.base.Config`."""
        if not self.attention_method or type(method) in (s24.methods.Dense, type(None)):
            return Decoder(self, method, vocabulary, rngs=rngs)
        # Noise keys follow from the path of a layer, which is that of the unrolled model with `scan`, too.
        model = Decoder(dataclasses.replace(self, scan=False), method, vocabulary, rngs=rngs)
        own = weights_method(self.attention_method, method)
        places = [f"blocks/{n}/attention/{name}" for n in range(self.layers) for name in ("qkv", "out")]
        rules = [s24.Rule(place, own) for place in places]
        s24.sparsify(model, rules, key=rngs.default(), implementation=self.implementation)
        if self.scan:
            model.model, model.blocks = self, stack(model.blocks)
        return model


def weights_method(name: str, of_run):
    """The method of that name: the run's own, or another with default options. Raises UserError for one that
    is none, or that makes more sparse than the products of a single layer."""
    if name == type(of_run).__name__ and of_run.linear_plan().rows:
        return of_run
    known = {entry.name: getattr(s24.methods, entry.name) for entry in s24.methods.list()}
    fit = [key for key, kind in known.items() if kind().linear_plan().rows]
    require(
        name in fit,
        f"model.attention_method {name!r} is no method that makes the products of a single layer sparse; "
        f"those are {', '.join(fit)}.",
    )
    return known[name]()


def _factors(model: Config) -> dict:
    return {"rank": model.rank, "activation": model.bottleneck, "dtype": jnp.dtype(model.dtype)}


class LowRankQKV(nnx.Module):
    """Queries, keys and values by a low-rank layer each."""

    def __init__(self, model: Config, *, rngs):
        options = {**_factors(model), "axes": ("embed", "heads"), "rngs": rngs}
        self.parts = nnx.List(s24.nn.LowRank(model.d, model.d, **options) for _ in range(3))

    def __call__(self, x_BLd):
        return [part(x_BLd) for part in self.parts]


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; its products stay dense."""

    def __init__(self, model: Config, *, rngs):
        dtype = jnp.dtype(model.dtype)
        self.model, (kv_heads, head) = model, model.own_shape
        if model.rank:
            self.qkv = LowRankQKV(model, rngs=rngs)
            options = {**_factors(model), "axes": ("heads", "embed"), "rngs": rngs}
            self.out = s24.nn.LowRank(model.d, model.d, **options)
        else:
            linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
            wide = (model.heads + 2 * kv_heads) * head
            self.qkv = linear(model.d, wide, kernel_metadata=named("embed", None))
            self.out = linear(model.heads * head, model.d, kernel_metadata=named("heads", "embed"))
        if model.qk_norm:
            norm = partial(nnx.RMSNorm, head, epsilon=model.norm_eps, dtype=dtype, rngs=rngs)
            self.query_norm, self.key_norm = norm(), norm()

    def _heads(self, x_BLd, first):
        """Queries (B, L, H, h), keys and values (B, L, K, h)."""
        batch, length, _ = x_BLd.shape
        heads, (kv_heads, head) = self.model.heads, self.model.own_shape
        if self.model.rank:
            check_heads(heads)
            parts = (y_BLd.reshape(batch, length, heads, head) for y_BLd in self.qkv(x_BLd))
        elif shards("heads") > 1:
            parts = iter(heads_of(self._in_shards(x_BLd), kv_heads, head))
        else:
            qkv = project(self.qkv, x_BLd).reshape(batch, length, heads + 2 * kv_heads, head)
            # Not indexed: XLA's kernel for the gradient of that pads three arrays and adds them.
            parts = iter(jnp.split(qkv, (heads, heads + kv_heads), axis=2))
        norms = (self.query_norm, self.key_norm) if self.model.qk_norm else (lambda x: x,) * 2
        q_BLHh, k_BLKh = (rotate(norm(next(parts)), first, self.model.rope_base) for norm in norms)
        return q_BLHh, k_BLKh, next(parts)

    def _in_shards(self, x_BLd):
        """What `parts.heads_of` takes; each device computes its own heads."""
        qkv, heads, (kv_heads, head) = self.qkv, self.model.heads, self.model.own_shape

        def moved(columns):
            ends = heads * head, (heads + kv_heads) * head
            return by_heads(jnp.split(columns, ends, axis=1), kv_heads, head)

        if isinstance(qkv, s24.nn.Linear) and qkv.active:
            return with_columns(qkv, x_BLd, moved, head)
        return jnp.dot(x_BLd.astype(qkv.dtype), moved(gathered(qkv.kernel, qkv.dtype)))

    def __call__(self, x_BLd, cache=None, first=0):
        """What `parts.attend` gives, projected, and the cache."""
        y_BLHh, cache = attend(*self._heads(x_BLd, first), cache, first, self.model.attention)
        return project(self.out, y_BLHh.reshape(*x_BLd.shape[:2], -1)), cache


class Block(Residual):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, model: Config, method, *, rngs):
        dtype = jnp.dtype(model.dtype)
        gated = model.ffn == "swiglu"
        feed_forward = s24.nn.GatedFFN if gated else s24.nn.FFN
        if model.rank:
            low_rank = {"rank": model.rank, "bottleneck": model.bottleneck, "gated": gated}
            feed_forward = partial(s24.nn.LowRankFFN, **low_rank)
        activation = "silu" if gated else model.ffn
        norm = partial(nnx.RMSNorm, model.d, epsilon=model.norm_eps, dtype=dtype, rngs=rngs)
        self.norm1 = norm()
        self.attention = Attention(model, rngs=rngs)
        self.norm2 = norm()
        self.ffn = feed_forward(
            *(model.d, model.f),
            method=method,
            activation=activation,
            dtype=dtype,
            implementation=model.implementation,
            axes=("embed", "mlp"),
            rngs=rngs,
        )

    def with_stats(self, x_BLd):
        """The block's output, and `FFN.activation_stats`."""
        x_BLd = x_BLd + self.attention(self.norm1(x_BLd))[0]
        y_BLd = self.norm2(x_BLd)
        return x_BLd + self.ffn(y_BLd), self.ffn.activation_stats(y_BLd)


class Decoder(base.LanguageModel):
    """Logits of the next token at every position; no position sees a later one.

    With `scan`, `blocks` is one Block whose variables carry a leading layer axis; the parameters are bit for
    bit those of the unrolled model with the same seed, stacked.
    """

    def __init__(self, model: Config, method, vocabulary: int, *, rngs):
        dtype = jnp.dtype(model.dtype)
        self.model = model
        self.embedding = Embedding(vocabulary, model.d, dtype, rngs)
        blocks = [Block(model, method, rngs=rngs) for _ in range(model.layers)]
        self.blocks = stack(blocks) if model.scan else nnx.List(blocks)
        self.norm = nnx.RMSNorm(model.d, epsilon=model.norm_eps, dtype=dtype, rngs=rngs)
        if not model.tied:
            self.head = Head(model.d, vocabulary, dtype, rngs)

    def features(self, tokens_BL):
        """See `LanguageModel.features`."""
        x_BLd = self.embedded(tokens_BL)
        return self.norm(self._scanned(x_BLd) if self.model.scan else self._unrolled(x_BLd))

    def embedded(self, tokens_BL):
        """int32 (B, L) to the input of the first block, (B, L, d)."""
        return laid(self.embedding(tokens_BL), "batch", None, None)

    def logits(self, x_BLd):
        """See `LanguageModel.logits`."""
        logits_BLV = self.embedding.attend(x_BLd) if self.model.tied else self.head(x_BLd)
        return logits_BLV.astype(jnp.float32)

    def empty_cache(self, batch: int, size: int):
        """Keys and values (N, B, S, K, h) of no token yet, for `decode`."""
        model = self.model
        shape = (model.layers, batch, size, *model.own_shape)
        return [jnp.zeros(shape, model.dtype) for _ in range(2)]

    def decode(self, tokens_BL, cache, first):
        """Logits (B, L, V) of tokens that follow those in the cache, and the cache with them.

        first: position of the first of them, 0 for an empty cache. L may not exceed the cache's S slots; the
        newest S tokens are seen, by their keys and values as they were made."""
        x_BLd = self.embedded(tokens_BL)
        if self.model.scan:
            graphdef, stacked = nnx.split(self.blocks)
            x_BLd, cache = jax.lax.scan(
                lambda x, layer: nnx.merge(graphdef, layer[0])(x, layer[1], first), x_BLd, (stacked, cache)
            )
            return self.logits(self.norm(x_BLd)), cache
        layers = []
        for n, block in enumerate(self.blocks):
            x_BLd, layer = block(x_BLd, [part[n] for part in cache], first)
            layers.append(layer)
        return self.logits(self.norm(x_BLd)), [jnp.stack(parts) for parts in zip(*layers, strict=True)]

    def activation_stats(self, tokens_BL) -> dict:
        """`FFN.activation_stats` of every block, each (N,); {} with a gate."""
        if self.model.ffn == "swiglu":
            return {}
        x_BLd = self.embedded(tokens_BL)
        if self.model.scan:
            graphdef, stacked = nnx.split(self.blocks)
            run = lambda x, state: nnx.merge(graphdef, state).with_stats(x)  # noqa: E731
            return jax.lax.scan(run, x_BLd, stacked)[1]
        layers = []
        for block in self.blocks:
            x_BLd, stats = block.with_stats(x_BLd)
            layers.append(stats)
        return jax.tree.map(lambda *values: jnp.stack(values), *layers)

    def projections(self):
        """See `LanguageModel.projections`."""
        blocks = [self.blocks] if self.model.scan else self.blocks
        found = [(part, axis) for b in blocks for part, axis in ((b.attention.out, 0), (b.attention.qkv, 1))]
        return [(layer, axis) for layer, axis in found if isinstance(layer, s24.nn.Linear)]

    def _unrolled(self, x_BLd):
        for block in self.blocks:
            x_BLd = run_block(*nnx.split(block), x_BLd, self.model.remat)
        return x_BLd

    def _scanned(self, x_BLd):
        graphdef, stacked = nnx.split(self.blocks)
        return jax.lax.scan(
            lambda x, state: (run_block(graphdef, state, x, self.model.remat), None), x_BLd, stacked
        )[0]


def unrolled(model: Decoder) -> Decoder:
    """The same decoder with a list of blocks, also where it has one scanned block."""
    if not model.model.scan:
        return model
    made = nnx.merge(*nnx.split(model))
    graphdef, stacked = nnx.split(model.blocks)
    layer = lambda n: jax.tree.map(lambda leaves: leaves[n], stacked)  # noqa: E731
    made.model = dataclasses.replace(model.model, scan=False)
    made.blocks = nnx.List([nnx.merge(graphdef, layer(n)) for n in range(model.model.layers)])
    return made


def stack(blocks) -> Block:
    """Blocks of equal structure as one, every variable with a leading layer axis."""
    graphdef = nnx.graphdef(blocks[0])
    return nnx.merge(graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, blocks)))
