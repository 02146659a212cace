"""S-STE needs no decay and no dense phase: against dense training, STE, SR-STE and FST."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less, no_worse, ratio


def ablation(size: Size) -> Ablation:
    """Six ways to train; STE, SR-STE, S-STE and FST without its dense phase are measured sparse."""
    return Ablation(
        claim="S-STE is better than STE, and than transposable SR-STE with MVUE but without a dense phase; "
        "it is as good as SR-STE and FST, behind dense training, and its masks flip no more than dense "
        "training's would, without any decay.",
        source="arXiv 2409.09099, sections 3 and 5",
        arms={
            "dense": size.arm(s24.methods.Dense(), monitor_mask="top-2"),
            "S-STE": size.arm(s24.methods.SSTE(mvue="approximate")),
            "SR-STE": size.arm(s24.methods.SRSTE(decay=size.decay)),
            "STE": size.arm(s24.methods.STE()),
            "FST": size.arm(s24.methods.FST(decay=size.decay)),
            "FST, sparse to the end": size.arm(s24.methods.FST(decay=size.decay, dense_fraction=0)),
        },
        verdict=all_of(
            less("dense", "S-STE", effect=0.02),
            less("S-STE", "STE", effect=0.02),
            less("S-STE", "FST, sparse to the end", effect=0.02),
            no_worse("S-STE", "SR-STE", 0.03),
            no_worse("S-STE", "FST", 0.03),
            ratio("S-STE", "dense", "flip_mid", below=1.1),
        ),
        seeds=size.seeds(cpu=8),
        expects="S-STE flips hardly more than dense training, STE about half as much again. Dense training "
        "has the lowest loss. S-STE loses against SR-STE and STE by about 0.05 nats at the cpu size: it pays "
        "for its shrunk weights and its cut gradient, and flips have little time to do harm.",
        differs="SR-STE and STE have dense weight gradients, as in their paper; S-STE and FST cut them. A "
        "small byte-level model and a short run instead of GPT-2.",
        found={
            "cpu": "At the cpu size S-STE flips as dense training does, STE a quarter more. Both kinds of "
            "FST are 0.03 to 0.04 nats behind S-STE. S-STE, STE and SR-STE are equally far behind "
            "dense training, 0.020 to 0.024 nats: a quarter more flips do no harm in 800 steps.",
            "gpu": "Sparse S-STE, SR-STE and STE end where dense training does, within 0.006 nats; FST is "
            "0.010 behind S-STE with its dense phase or without it, which transposable masks and the cut "
            "gradient explain. S-STE flips as dense training does, to 0.1 %.",
        },
    )
