"""What the input gradient is made of: dense values of the forward mask, pruned again, or transposable."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less, no_worse

MASKS = {"dense": "top-2", "double-pruned": "double-pruned", "transposable": "transposable"}


def ablation(size: Size) -> Ablation:
    """FST without its gradient cut and dense phase; the arm "dense" has a dense input gradient."""
    arms = {
        name: size.arm(s24.methods.FST(decay=size.decay, mask=mask, mvue=None, dense_fraction=0))
        for name, mask in MASKS.items()
    }
    return Ablation(
        claim="Row-wise masks whose values are pruned once more for the input gradient train nearly as well "
        "as with a dense input gradient, and better than transposable masks, which constrain the forward "
        "pass.",
        source="arXiv 2405.16325 (double-pruned backward pass)",
        arms=arms,
        verdict=all_of(
            less("double-pruned", "transposable", effect=0.02),
            no_worse("double-pruned", "dense", 0.03),
        ),
        curve=("probe", "cosine"),
        seeds=size.seeds(cpu=8),
        expects="Double-pruned within 0.03 nats of the dense input gradient; both ahead of transposable by "
        "about 0.02 nats, which three seeds may not tell from zero.",
        found={
            "cpu": "At the cpu size double-pruned is within 0.03 nats of a dense input gradient, as claimed; "
            "that it is better than transposable masks does not show: it is 0.010 behind them on "
            "average, which eight seeds do not tell from zero.",
            "gpu": "Double-pruned ends 0.010 nats behind a dense input gradient and 0.008 behind "
            "transposable masks, as on two cores: the second half of the claim shows nowhere, and "
            "three seeds do not decide the first.",
        },
        differs="Masks follow the weights, searched every 40 steps, where the paper fixes them at the first "
        "step: only the backward weight differs between the first two arms. Masked decay in all of them.",
    )
