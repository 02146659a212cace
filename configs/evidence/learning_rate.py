"""Dense training at three learning rates: the recipe of the evidence, which the size `pilot` chose, for wide
models the size `widepilot`."""

import dataclasses

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import lowest

FACTORS = (0.5, 1, 2)


def ablation(size: Size) -> Ablation:
    """Dense, at the size's own learning rate, half and twice that."""

    def arm(factor):
        config = size.arm(s24.methods.Dense())
        return dataclasses.replace(
            config, optim=dataclasses.replace(config.optim, lr=factor * config.optim.lr)
        )

    return Ablation(
        claim="Dense training ends lowest at the learning rate of its size, and not at half or twice that.",
        source="none for this text and batch; the models of pilot and 124m have the shape of the GPT-2 124M "
        "of arXiv 2404.01847",
        arms={f"{factor:g}x": arm(factor) for factor in FACTORS},
        verdict=lowest("1x", ("0.5x", "2x"), effect=0.01, metric="val_dense"),
        seeds=size.seeds(widepilot=1),
        expects="At the size widepilot, whose rate is a guess, 1x ends 0.02 nats or more below 0.5x and 2x. "
        "One seed chooses the rate, and decides nothing."
        if size.name == "widepilot"
        else "At the size pilot 1x ends 0.32 nats below 0.5x and 0.06 below 2x, as it did with the one "
        "seed that chose the rate. At the smaller sizes, whose rates were chosen for their own text, 2x is "
        "no better.",
        found={
            "widepilot": "1x ends 0.55 nats below 0.5x and 0.12 below 2x, one seed each: the guess is the "
            "best of the three, as expected.",
        },
        differs="No paper's claim; an eighth of the tokens of the runs that it chooses the rate for.",
    )
