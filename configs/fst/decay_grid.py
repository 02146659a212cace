"""Masked decay holds the flip rate down; too little and too much of it both cost loss."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, lowest, monotone, ratio


def ablation(size: Size) -> Ablation:
    """Dense, and FST with decays from 0 to 33 times the usual one of this size."""
    usual = size.decay
    decays = {"0": 0.0, "low": usual / 10, "usual": usual, "high": usual * 10 / 3, "huge": usual * 100 / 3}
    arms = {f"decay {name}": size.arm(s24.methods.FST(decay=decay)) for name, decay in decays.items()}
    return Ablation(
        claim="The flip rate falls monotonically with the rate of masked decay on gradients, and the loss is "
        "U-shaped in it: best where the flip rate is 0.60 to 0.95 of the dense one.",
        source="arXiv 2404.01847, section 4 (masked decay on gradients, choice of the decay factor)",
        arms={"dense": size.arm(s24.methods.Dense()), **arms},
        verdict=all_of(
            monotone(arms, "flip_mid"),
            lowest("decay usual", [arm for arm in arms if arm != "decay usual"], effect=0.02),
            ratio("decay usual", "dense", "flip_mid", above=0.60, below=0.95),
        ),
        seeds=size.seeds(cpu=8),
        expects="Monotone flip rates with wide gaps. The usual decay beats 0 and the huge one, by less than "
        "0.05 nats at the cpu size. Its flip rate may lie below 0.60 of the dense one: the demo's model did "
        "best at 0.4.",
        differs="Decays are multiples of the one that suits the size (6e-4 at cpu, 6e-5 at gpu; the paper's "
        "6e-6 to 2e-3 belong to GPT-2 and 300,000 steps), on a byte-level model of source code.",
        found={
            "cpu": "At the cpu size the flip rates are ordered as the paper says, and without decay the loss "
            "is the highest; but it falls with every larger decay, and is lowest at the largest one, "
            "with masks all but frozen, which refutes the U shape. Probably a matter of length: "
            "within 800 steps a small decay leaves the pruned weights large, and they disturb the "
            "dense phase that they come back in (compare `dense_share`), while frozen masks have "
            "little time to do harm.",
            "gpu": "Flip rates fall with the decay, with wide gaps, and the means of the loss are U-shaped, "
            "with a dense phase at the end as in the paper. But the lowest is at a decay of 2e-4, whose "
            "flip rate is 0.30 of the dense one, and the usual decay's is 0.57, just below the band. "
            "The usual decay beats none by 0.006 nats; no other difference of the loss stands correction.",
        },
    )
