"""What a run says before its first step: what runs sparse, what dense, and why; the text; the model. And the
measurements that this needs, where no table has them."""

import sys

import jax
from flax import nnx

from experiments.config import Config
from experiments.data.batches import VOCABULARY, Corpus
from experiments.models import decoder
from jax_sparse24.explain import Choice, choices
from jax_sparse24.measure import ensure
from jax_sparse24.methods import Dense


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def opening(config: Config, corpus: Corpus, *, measure: bool, show: bool = True) -> None:
    """Measure, if asked to, the products that no table of this machine knows; say the rest (process 0 only).
    Several processes measure nothing, because they must decide alike."""
    if measure and jax.process_count() == 1:
        ensure_measured(config, say if show else None)
    if show and jax.process_index() == 0:
        say(products(config))
        say(text(config, corpus))


def shape_of(config: Config) -> tuple[int, int, int]:
    """(T, d, f) of the products of an FFN in one micro-batch."""
    tokens = config.data.batch // config.train.accumulate * config.data.seq
    return tokens, config.model.d, config.model.f


def ensure_measured(config: Config, show=say) -> None:
    """Measure the products of this run that no table of this machine knows; some seconds, once."""
    model, shape = config.model, shape_of(config)
    if model.implementation is None and not model.rank and not any(size % 4 for size in shape):
        ensure([shape], [model.dtype], [config.method], show=show)


def products(config: Config) -> str:
    """What runs sparse, what dense, and why, in one line."""
    method, model = config.method, config.model
    name = type(method).__name__
    if model.rank:
        return f"low-rank layers of rank {model.rank}; every product is dense"
    if isinstance(method, Dense):
        return "Dense: every product is dense"
    phases = [f"{start} to {end - 1}" for start, end, phase in config.schedule.boundaries() if phase.sparse]
    groups: dict[str, list[Choice]] = {}
    for choice in choices(method, shape_of(config), model.dtype, model.implementation):
        groups.setdefault(choice.runs, []).append(choice)
    said = "; ".join(f"{', '.join(c.product for c in g)} {runs} ({_why(g)})" for runs, g in groups.items())
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
    return (
        f"{corpus.name}: {known['files']:,} files, {known['bytes']:,} tokens for training, "
        f"{known['validation_bytes']:,} for validation; the run reads {reads:,}, "
        f"{reads / known['bytes']:.2g} times the text; {parameters(config):,} parameters"
    )


def parameters(config: Config) -> int:
    """How many the model has."""
    params = nnx.state(nnx.eval_shape(lambda: decoder.create(config, VOCABULARY)), nnx.Param)
    return sum(leaf.size for leaf in jax.tree.leaves(params))
