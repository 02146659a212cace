"""The dense baselines of the other configs: the same model, data and optimiser without sparsity. With
`--method NAME` the launcher trains them by any other method."""

import dataclasses

import jax_sparse24 as s24
from configs.fst import masked_decay
from experiments.config import Config


def config() -> Config:
    """GPT-2 size (85M parameters, since tokens are bytes), the dense arm of FST's recipe; its 300,000 steps
    take days."""
    return _without_sparsity(masked_decay.config(), "dense-124m")


def cpu() -> Config:
    """Small enough for a laptop's processor, dense: some minutes."""
    return _without_sparsity(masked_decay.cpu(), "dense-cpu")


def _without_sparsity(config: Config, name: str) -> Config:
    return dataclasses.replace(config, name=name, method=s24.methods.Dense())
