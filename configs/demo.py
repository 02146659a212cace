"""The two arms of `make demo`: the same small model and text, once dense, once with FST in its FFNs."""

import jax_sparse24 as s24
from experiments.config import Config, Data, Model, Optim, Train


def dense() -> Config:
    """The demo's dense arm: about a minute on two cores."""
    return Config(
        name="demo-dense",
        model=Model(layers=4, d=128, f=512, heads=2),
        data=Data(seq=128, batch=12),
        optim=Optim(lr=3e-3, warmup=40),
        train=Train(steps=480, eval_every=80, eval_batches=16, monitor_every=5, checkpoint_every=240),
    )


def fst() -> Config:
    """The demo's sparse arm: FST in every FFN, dense in its last sixth.

    Of the decays 0, 6e-5, 2e-4, 4e-4, 6e-4, 1e-3 and 2e-3 tried at this size, 6e-4 gave the lowest
    validation loss among those that let the mask move at about half the dense arm's flip rate.
    """
    arm = dense()
    return Config(
        name="demo-fst",
        model=arm.model,
        data=arm.data,
        optim=arm.optim,
        train=arm.train,
        method=s24.methods.FST(decay=6e-4, refresh_every=40),
    )
