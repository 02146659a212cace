"""Dense training at three learning rates, in an eighth of the steps: the recipe that the evidence uses."""

import dataclasses

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import lowest

RATES = ("6e-4", "1.2e-3", "2.4e-3")


def ablation(size: Size) -> Ablation:
    """Dense, at rates of RATES times the size's own over 6e-4, with an eighth of the large sizes' steps."""
    part = 8 if size.name in ("124m", "wide") else 1

    def arm(rate):
        config = size.arm(s24.methods.Dense(), steps=size.base.train.steps // part)
        lr = size.base.optim.lr * float(rate) / float(RATES[0])
        optim = dataclasses.replace(config.optim, lr=lr, warmup=config.optim.warmup // part)
        train = dataclasses.replace(config.train, checkpoint_every=config.train.steps)
        return dataclasses.replace(config, optim=optim, train=train)

    return Ablation(
        claim="Dense training for an eighth of the steps ends lowest at twice the learning rate of the "
        "size (1.2e-3 at 124m): neither at the rate itself nor at four times that.",
        source="ours: the rate that a batch of 65536 tokens of this text wants",
        arms={f"lr-{rate}": arm(rate) for rate in RATES},
        verdict=lowest("lr-1.2e-3", ("lr-6e-4", "lr-2.4e-3"), effect=0.01, metric="val_dense"),
        expects="At 124m, with 57M tokens, 1.2e-3 ends 0.03 to 0.08 nats below 6e-4 and 2.4e-3 within 0.03 "
        "of 1.2e-3: short runs like high rates. At the smaller sizes, whose own rates were chosen for them, "
        "twice the rate is no better.",
        differs="An eighth of the tokens of the runs that it chooses the rate for; one seed decides.",
    )
