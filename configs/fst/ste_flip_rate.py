"""Plain straight-through training does not settle on a mask: its flip rate stays above the dense one."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less


def ablation(size: Size) -> Ablation:
    """Dense and STE, both watched through the same row-wise top-2 masks."""
    return Ablation(
        claim="Hard 2:4 masks with a straight-through estimator and no decay flip more than the masks that "
        "dense training would have, more so the longer training lasts, and end at a higher loss.",
        source="arXiv 2404.01847, section 4 (flip rate); arXiv 2409.09099, section 3",
        arms={
            "dense": size.arm(s24.methods.Dense(), monitor_mask="top-2"),
            "ste": size.arm(s24.methods.STE()),
        },
        verdict=all_of(
            less("dense", "ste", "flip_mid"),
            less("dense", "ste", "flip_late"),
            less("dense", "ste", "flip_fade"),
            less("dense", "ste", effect=0.02),
        ),
        seeds=size.seeds(cpu=8),
        expects="Flip rate of STE about twice the dense one late in training; loss worse by some hundredths "
        "of a nat; more steps that raise the loss of their own batch.",
        differs="A byte-level model of some 10^5 (cpu) or 10^7 (gpu) parameters on source code instead of "
        "GPT-2 on OpenWebText, because it has to run anywhere; a shorter cosine, so that part of the fading "
        "is the learning rate's.",
        found={
            "cpu": "At the cpu size STE's masks flip nearly twice as often as dense training's in the last "
            "quarter, and their flip rate fades half as far. Its loss is 0.021 nats higher. No "
            "measured step of either arm raised the loss of its own batch.",
            "gpu": "STE flips a tenth more than dense training late, not twice as often, and its flip "
            "rate fades less, as claimed. Its loss is no higher: 0.005 nats below dense training, within "
            "noise. What it costs on two cores is gone in a model with more neurons than its text needs.",
        },
    )
