"""Dense training at three learning rates: the recipe of the evidence, chosen at the size `pilot`."""

import dataclasses

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import lowest

FACTORS = (1, 2, 4)


def ablation(size: Size) -> Ablation:
    """Dense, at the size's own learning rate, twice and four times that."""

    def arm(factor):
        config = size.arm(s24.methods.Dense())
        return dataclasses.replace(
            config, optim=dataclasses.replace(config.optim, lr=factor * config.optim.lr)
        )

    return Ablation(
        claim="Dense training ends lowest at twice the learning rate that the size begins with.",
        source="none for this text and batch; the model has the shape of the GPT-2 124M of arXiv 2404.01847",
        arms={f"{factor}x": arm(factor) for factor in FACTORS},
        verdict=lowest("2x", ("1x", "4x"), effect=0.01, metric="val_dense"),
        expects="At the size pilot, where 1x is 6e-4, 2x ends 0.03 to 0.08 nats below it and 4x within 0.03 "
        "of 2x: short runs like high rates. At the smaller sizes, whose own rates were chosen for them, "
        "twice the rate is no better.",
        differs="No paper's claim; an eighth of the tokens of the runs that it chooses the rate for.",
    )
