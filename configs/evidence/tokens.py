"""Dense training and FST with more tokens: at the size 124m, of 110.1M parameters
(experiments/ablations/ablation.py), 1.05 billion."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import no_worse

TIMES = 16, 7  # as many steps as at the size, over


def ablation(size: Size) -> Ablation:
    """Dense and FST with 16/7 of the steps, which are 16000 at the size 124m."""
    steps = size.base.train.steps * TIMES[0] // TIMES[1]
    return Ablation(
        claim="With more tokens FST stays within 0.05 nats per token of dense training.",
        source="arXiv 2404.01847 (similar convergence to dense training, as its abstract says; the margin is "
        "this project's)",
        arms={
            "dense": size.arm(s24.methods.Dense(), steps=steps),
            "FST": size.arm(s24.methods.FST(decay=size.decay), steps=steps),
        },
        verdict=no_worse("FST", "dense", 0.05, metric="val_dense"),
        seeds=(0,) if size.name in ("124m", "wide") else size.seeds(),
        expects="At the size 124m FST 0.015 to 0.03 nats per token behind dense training: after 57M tokens "
        "it was 0.083, after 459M 0.023. The text, of 267M tokens, is read four times.",
        found={
            "124m": "FST ends 0.024 nats per token behind dense training, one seed each, over two H200s "
            "each; after 459M tokens the gap was 0.020. With its own sparse products it stays 0.03 behind "
            "from 300M tokens on, until its dense steps begin. Both arms waited for text, about a twelfth of "
            "their time.",
        },
        differs="Source code, read four times, in place of OpenWebText; one seed at the size 124m.",
    )
