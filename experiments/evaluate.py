"""Validation loss with dense and with sparse weights: `python -m experiments.evaluate RUN`.

Dense: every product dense. Sparse: the method's own products with masks computed freshly from the weights;
for a run without sparsity, a mask cut once from its dense weights: FST's transposable one, or two of every
four along `in` if that is its `train.monitor_mask`. A sparse loss under masks or scales that may depend on
later tokens is marked as no language model's, and how much they leak is measured
(`experiments.training.monitor.Leak`).
"""

import argparse
import sys
from pathlib import Path

from experiments.cli import command
from experiments.data.batches import bytes_per_token, open_corpus, validation_batches
from experiments.data.vocabulary import bits_per_byte
from experiments.errors import require
from experiments.training import mesh as meshes
from experiments.training import rundir
from experiments.training.evaluator import Evaluator, mark, said
from experiments.training.monitor import Leak
from experiments.training.stored import load_state


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
    meshes.check(config, program.mesh)
    corpus = open_corpus(config.data, rundir.vocabulary(args.run))
    rows = rundir.read_metrics(args.run) if (args.run / "metrics.jsonl").exists() else []
    if changed := rundir.changed_text(rows, corpus.statistics):
        print(
            f"warning: the text is not that which the run has read ({changed}): it may have been trained on "
            "what is validation now, and its losses compare with no others.",
            file=sys.stderr,
        )
    batches = validation_batches(corpus, config.data, args.batches)
    losses = Evaluator(program, batches)(state["params"], state["sparse"])
    size = bytes_per_token(corpus.vocabulary, batches)
    tokens = len(batches) * config.data.batch * config.data.seq
    print(f"{args.run}, step {step}, {tokens:,} validation tokens of {corpus.name}")
    for name, loss in losses.items():
        print(f"  {name:<7} {said(loss, size, ', ')}{mark(config.method, name)}")
    if not config.method.causal and len(batches) > 1:
        with program.inside():
            placed = [meshes.place(batch, program.rows) for batch in batches]
            found = Leak(program.graphdefs)(state["params"], state["sparse"], placed)
        error = "" if found["leak_error"] is None else f" ± {found['leak_error']:.4f}"
        print(
            f"  leak    {found['leak']:.4f}{error} nats by which the sparse loss is lower for knowing later "
            f"tokens; they change {found['leak_share']:.0%} of the logits before them"
        )
    order1 = corpus.statistics["order1_nats"]
    xz = corpus.statistics.get("xz_bits")  # not in statistics of before November 2026
    print(
        f"  (order-1 byte entropy of the training text: {order1:.4f} nats, {bits_per_byte(order1):.4f} bits"
        f"{f'; xz compresses it to {xz:.4f} bits per byte' if xz else ''})"
    )


if __name__ == "__main__":
    main()
