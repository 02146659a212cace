"""FST in e4m3 with scales of earlier steps trains as with those of its own."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import within


def ablation(size: Size) -> Ablation:
    """FST with both operands of F1, F2, B1 and B3 rounded to e4m3, activations and gradients by the largest
    magnitude of each step, and by those of the 16 steps before it."""
    return Ablation(
        claim="Scales of activations and gradients that are known before a step, powers of two by the "
        "magnitudes of the 16 steps before it, cost less than 0.01 nats beside scales of the step's own "
        "magnitudes.",
        source="this project; the code of arXiv 2409.09099 scales by the step's own magnitudes",
        arms={
            scales: size.arm(s24.methods.FST(decay=size.decay, fp8=scales))
            for scales in ("tensor", "delayed")
        },
        verdict=within("delayed", "tensor", 0.01),
        seeds=size.seeds(cpu=8),
        expects="Within 0.003 nats: e4m3 has the same relative precision over 14 powers of two, of which a "
        "factor of 2 to 3.5 is left free; magnitudes move by less than that from step to step, but for the "
        "first steps, and what saturates does so once.",
        differs="On a CPU simulated, as in `fp8`. Only FFNs are in 8 bits.",
        found={
            "gpu": "As expected: 0.001 nats apart, within noise.",
        },
    )
