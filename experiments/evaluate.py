"""Validation loss with dense and with sparse weights: `python -m experiments.evaluate RUN`.

Dense: every product dense. Sparse: the method's own products with masks computed freshly from the weights;
for a run without sparsity, a mask cut once from its dense weights: FST's transposable one, or two of every
four along `in` if that is its `train.monitor_mask`. A sparse loss under masks that depend on later tokens is
marked as no language model's, and how much they leak is measured (`experiments.monitor.Leak`).
"""

import argparse
import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import jax_sparse24 as s24
from experiments import data, rundir
from experiments.checkpoint import Checkpoints
from experiments.cli import command
from experiments.config import Config, require
from experiments.data import VOCABULARY
from experiments.models import decoder
from experiments.monitor import Leak
from experiments.step import Program, graphdefs_of, loss_of


class Evaluator:
    """`evaluator(params, sparse)` is {"dense": nats, "sparse": nats} over fixed batches int32 (B, L + 1)."""

    def __init__(self, config: Config, graphdefs: dict, batches, sharding):
        self.batches = [jax.device_put(batch, sharding) for batch in batches]
        cut_once = not config.method.ffn_plan().rows
        if cut_once:
            top2 = config.train.monitor_mask == "top-2"
            masked = s24.methods.STE() if top2 else s24.methods.FST(mvue=None)
            cut = dataclasses.replace(config, method=masked)
            cut_graphdefs = graphdefs_of(cut)
            _, _, blank = nnx.split(
                nnx.eval_shape(lambda: decoder.create(cut, VOCABULARY)), nnx.Param, s24.nn.SparseState
            )

        def dense_loss(params, sparse, tokens_BL):
            return loss_of(nnx.merge(graphdefs[False], params, sparse), tokens_BL)

        def sparse_loss(params, sparse, tokens_BL):
            if cut_once:
                sparse = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), blank)
            model = nnx.merge((cut_graphdefs if cut_once else graphdefs)[True], params, sparse)
            s24.refresh(model)  # on this copy only: the run keeps its masks
            return loss_of(model, tokens_BL)

        self._losses = {"dense": jax.jit(dense_loss), "sparse": jax.jit(sparse_loss)}

    def __call__(self, params, sparse) -> dict:
        losses = {
            name: [loss(params, sparse, b) for b in self.batches] for name, loss in self._losses.items()
        }
        return {name: float(np.mean(jax.device_get(values))) for name, values in losses.items()}


def load_state(out: Path, step: int | None = None):
    """(config, program, step, state) of the newest or the given checkpoint; UserError if there is none."""
    config = rundir.open_run(out)
    folder = out / "checkpoints"
    require(folder.is_dir(), f"{out} has no checkpoints yet.")
    program = Program(config)
    with Checkpoints(folder) as checkpoints:
        steps = sorted(checkpoints.manager.all_steps())
        require(bool(steps), f"{out} has no complete checkpoint yet.")
        require(step is None or step in steps, f"{out} has no checkpoint of step {step}; it has {steps}.")
        step = checkpoints.latest if step is None else step
        return config, program, step, checkpoints.restore(step, program.abstract_state())


def mark(method, name: str) -> str:
    """What has to stand beside a method's loss "dense" or "sparse": "" for a language model's."""
    return "" if name == "dense" or method.causal else " (no language-model loss: it depends on later tokens)"


def bits(nats: float) -> float:
    """Bits per byte of a loss in nats per token; a token is a byte."""
    return nats / math.log(2)


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evaluate", description=__doc__.split("\n")[0]
    )
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/demo/fst")
    parser.add_argument("--batches", type=int, default=200, help="validation batches (default: 200)")
    parser.add_argument("--step", type=int, help="checkpoint to evaluate (default: the newest)")
    args = parser.parse_args(argv)
    require(args.batches > 0, f"--batches must be positive, got {args.batches}.")
    config, program, step, state = load_state(args.run, args.step)
    corpus = data.open_corpus(config.data)
    batches = data.validation_batches(corpus, config.data, args.batches)
    losses = Evaluator(config, program.graphdefs, batches, program.replicated)(
        state["params"], state["sparse"]
    )
    tokens = len(batches) * config.data.batch * config.data.seq
    print(f"{args.run}, step {step}, {tokens:,} validation tokens of {corpus.name}")
    for name, loss in losses.items():
        print(f"  {name:<7} {loss:.4f} nats, {bits(loss):.4f} bits per byte{mark(config.method, name)}")
    if not config.method.causal and len(batches) > 1:
        found = Leak(program.graphdefs, batches)(state["params"], state["sparse"])
        error = "" if found["leak_error"] is None else f" ± {found['leak_error']:.4f}"
        print(
            f"  leak    {found['leak']:.4f}{error} nats by which the sparse loss is lower for knowing later "
            f"tokens; they change {found['leak_share']:.0%} of the logits before them"
        )
    order1 = corpus.statistics["order1_nats"]
    print(f"  (order-1 byte entropy of the training text: {order1:.4f} nats, {bits(order1):.4f} bits)")


if __name__ == "__main__":
    main()
