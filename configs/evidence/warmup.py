"""The dense warm-up of Activation24 in the evidence, chosen at the size `pilot`."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import no_worse

PARTS = (8, 4, 2)


def ablation(size: Size) -> Ablation:
    """Dense, and Activation24 after an eighth, a quarter and a half of the steps dense."""
    steps = size.base.train.steps
    arms = {f"1/{part}": size.arm(s24.methods.Activation24(dense_warmup=steps // part)) for part in PARTS}
    return Ablation(
        claim="A quarter of the steps dense is enough for Activation24: half of them end at no lower loss.",
        source="arXiv 2503.16672 (1000 dense steps first)",
        arms={"dense": size.arm(s24.methods.Dense()), **arms},
        verdict=no_worse("1/4", "1/2", 0.005, metric="val_dense"),
        seeds=(0,) if size.name == "pilot" else size.seeds(),
        expects="At the size pilot, where a quarter ended 0.006 nats per token behind dense training, an "
        "eighth ends within 0.01 of it, and a half nearer to it by less than 0.005.",
        found={
            "pilot": "With an eighth, a quarter and a half of the steps dense it ends 0.006, 0.002 and 0.003 "
            "nats behind dense training, one seed each: a quarter is enough, as expected. The runs at the "
            "size 124m had a quarter before: this confirms their recipe, and did not choose it.",
        },
        differs="An eighth of the tokens of the runs whose warm-up it tests.",
    )
