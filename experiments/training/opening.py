"""What a run says before its first step: what runs sparse, what dense, and why; the text; the model. And the
measurements that this needs, where no table has them."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

import jax_sparse24 as s24
from experiments.config import Config
from experiments.data.batches import Corpus
from experiments.data.prepared import say
from experiments.training.mesh import sizes
from experiments.training.step import abstract_model
from jax_sparse24.choices import Choice, decided_block
from jax_sparse24.measure import ensure
from jax_sparse24.methods import Dense
from jax_sparse24.methods.base import Method


def opening(config: Config, corpus: Corpus, *, measure: bool, show: bool = True) -> None:
    """Measure, if asked to, the products that no table of this machine knows; say the rest (process 0 only).
    Several processes measure nothing, because they must decide alike."""
    if measure and jax.process_count() == 1:
        ensure_measured(config, say if show else None)
    if show and jax.process_index() == 0:
        say(products(config))
        say(text(config, corpus))


@dataclass(frozen=True)
class Block:
    """The feed-forward blocks of one shape that a method may make sparse."""

    shape: tuple[int, int, int]
    """(T, d, f): tokens of a micro-batch, model width, FFN width; on one device of the mesh"""
    dtype: str
    implementation: str | None


def blocks_of(config: Config) -> list[Block]:
    """The `FFN` and `GatedFFN` blocks of the model, without two that are alike."""
    tokens, tp = _one_device(config)
    # Shapes are the same under every method, and Dense refuses none.
    model = abstract_model(dataclasses.replace(config, method=Dense()))
    layers = [m.up for _, m in nnx.iter_modules(model) if isinstance(m, s24.nn.FFN | s24.nn.GatedFFN)]
    found = [
        Block(
            (tokens, v.in_features, v.out_features // tp),
            jnp.dtype(v.dtype or v.param_dtype).name,
            v.implementation,
        )
        for v in layers
    ]
    return list(dict.fromkeys(found))


def _one_device(config: Config) -> tuple[int, int]:
    """Tokens of a micro-batch on one device of the mesh, and the devices that cut a layer's width."""
    along = sizes(config.mesh, jax.device_count())
    sequences = config.data.batch // config.train.accumulate // (along["dp"] * along["fsdp"])
    return sequences * config.data.seq, along["tp"]


def projections_of(config: Config) -> list[tuple[Block, Method]]:
    """The projections of attention that a method makes sparse, without two that are alike, each with its
    widths in place of a block's, and with its method."""
    tokens, tp = _one_device(config)
    found = []
    for layer, cut in abstract_model(config).projections():
        widths = [layer.in_features, layer.out_features]
        widths[cut] //= tp
        block = Block((tokens, *widths), jnp.dtype(layer.dtype).name, layer.implementation)
        found.append((block, layer.method))
    return list(dict.fromkeys(found))


def ensure_measured(config: Config, show=say) -> None:
    """Measure the products of this run that no table of this machine knows; some seconds, once."""
    blocks = blocks_of(config)
    if any(size % 4 for block in blocks for size in block.shape):
        return  # nothing packs such blocks, and most methods refuse them as the model is built
    layers = [(block, config.method, False) for block in blocks]
    layers += [(layer, method, True) for layer, method in projections_of(config)]
    for layer, method, linear in layers:
        if layer.implementation is None:
            ensure([layer.shape], [layer.dtype], [method], linear=linear, show=show)


def products(config: Config) -> str:
    """What runs sparse, what dense, and why, in one line."""
    method, blocks = config.method, blocks_of(config)
    name = type(method).__name__
    if isinstance(method, Dense):
        return "Dense: every product is dense"
    if not blocks:
        return (
            f"{name}: this model has no s24.nn.FFN or GatedFFN, so what runs its products is not listed here"
        )
    phases = [f"{start} to {end - 1}" for start, end, phase in config.schedule.boundaries() if phase.sparse]
    groups: dict[str, list[Choice]] = {}
    for block in blocks:
        for choice in decided_block(method, block.shape, block.dtype, block.implementation).choices():
            groups.setdefault(choice.runs, []).append(choice)
    said = "; ".join(f"{', '.join(c.product for c in g)} {runs} ({_why(g)})" for runs, g in groups.items())
    others = {
        f"{type(method).__name__} in the projections of attention" for _, method in projections_of(config)
    }
    said = "; ".join([said, *sorted(others)])
    return f"{name}, sparse in steps {' and '.join(phases)} of {config.train.steps}: {said}"


def _why(group: list[Choice]) -> str:
    """One reason for several products: their ratios to the dense product where these were measured."""
    entries = [choice.decision and choice.decision.entry for choice in group]
    if all(entry and entry["status"] == "ok" for entry in entries):
        ratios = sorted(entry["dense_us"] / entry["packed_us"] for entry in entries)
        ends = " to ".join(dict.fromkeys(f"{ratio:.2f}x" for ratio in (ratios[0], ratios[-1])))
        return f"packed is {ends} dense"
    return "; ".join(dict.fromkeys(choice.reason for choice in group))


def text(config: Config, corpus: Corpus) -> str:
    """Files, tokens and parameters, in one line."""
    known, data = corpus.statistics, config.data
    reads = config.train.steps * data.batch * data.seq
    xz = f", which xz compresses to {known['xz_bits']:.2f} bits per byte" if "xz_bits" in known else ""
    size, held_out, each = known["bytes"], known["validation_bytes"], ""
    if corpus.vocabulary.unit != "byte":
        each = f" of {size / known['tokens']:.2f} bytes each"
        size, held_out = known["tokens"], known["validation_tokens"]
    return (
        f"{corpus.name}: {known['files']:,} files, {size:,} tokens{each} for training, "
        f"{held_out:,} for validation; the run reads {reads:,}, "
        f"{reads / size:.2g} times the text{xz}; {parameters(config):,} parameters"
    )


def parameters(config: Config) -> int:
    """How many the model has."""
    params = nnx.state(abstract_model(config), nnx.Param)
    return sum(leaf.size for leaf in jax.tree.leaves(params))
