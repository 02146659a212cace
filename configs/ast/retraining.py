"""Every part of AST brings a trained model that is made 2:4 nearer to the dense one."""

import dataclasses

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less


def ablation(size: Size) -> Ablation:
    """A dense model, cut once, and retrained: STE and annealed decay, then distillation, then SLoRB."""
    steps = size.base.train.steps * 3 // 8
    base = {"decay": size.decay, "decay_steps": steps // 4}
    methods = {
        "ste + decay": s24.methods.AST(**base, distill=0.0),
        "+ distillation": s24.methods.AST(**base),
        "+ slorb": s24.methods.AST(**base, slorb=16),
    }
    train = {"checkpoint_every": 0, "least_speed": size.base.train.least_speed // 2}  # a teacher costs time
    optim = dataclasses.replace(size.base.optim, lr=size.base.optim.lr / 3, warmup=max(steps // 20, 1))
    retrained = {
        name: dataclasses.replace(size.arm(m, steps=steps, **train), optim=optim)
        for name, m in methods.items()
    }
    return Ablation(
        claim="Each step lowers the loss of the 2:4 model: retraining with a straight-through estimator and "
        "annealed decay instead of cutting once by magnitude, then distillation, then SLoRB adapters.",
        source="arXiv 2407.20584, section 3 and its tables of perplexity",
        arms={
            "dense": size.arm(
                s24.methods.Dense(), steps=size.base.train.steps * 3 // 4, monitor_mask="top-2"
            ),
            **retrained,
        },
        start="dense",
        verdict=all_of(
            less("ste + decay", "dense", "val_sparse", effect=0.1),
            less("+ distillation", "ste + decay", "val_sparse"),
            less("+ slorb", "+ distillation", "val_sparse", effect=0.01),
        ),
        curve=("eval", "sparse"),
        seeds=size.seeds(cpu=8),
        expects="Cutting once costs some tenths of a nat; retraining wins all of that back and may end below "
        "the dense model, which is trained too shortly to be at its end. Distillation then holds the student "
        "back at that teacher's level: worse than cross entropy alone. SLoRB helps by about 0.01 nats.",
        differs="`dense` is the pre-trained model, its val_sparse the one-shot cut by magnitude to two of "
        "every four. Retraining repeats the first half of its batches, at a third of its peak learning rate, "
        "with the paper's proportions of warm-up (1/20) and annealing (1/4). FFN only; gradual magnitude "
        "pruning and the Wanda metric were left out.",
        found={
            "cpu": "Retraining does as expected: it takes back more than the one-shot cut costs and ends "
            "0.07 nats below the dense model that it started from. Distillation, which the claim says to "
            "help, costs 0.035 nats over cross entropy alone in eight seeds, since its teacher is not a "
            "better model; SLoRB takes 0.009 of that back.",
            "gpu": "As on two cores and as expected: cutting once costs 0.10 nats, retraining takes back "
            "0.14, distillation costs 0.015 over cross entropy alone. SLoRB, which took 0.009 back "
            "there, takes nothing back here.",
            "124m": "One seed, so that nothing is decided. Cutting once costs 0.28 nats here, three times "
            "what it costs the smaller model; retraining takes that back and ends 0.05 nats below the dense "
            "model that it started from. Distillation costs 0.013 nats over cross entropy alone, as at the "
            "smaller sizes, and SLoRB takes nothing back.",
        },
    )
