"""Venom activations with 2:4 weights (arXiv 2602.06183)."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Size

BLOCKS = {
    "smoke": {"v": 16, "m": 8, "clusters": 4},
    "cpu": {"v": 64, "m": 16, "clusters": 16},
    **{
        name: {"v": 64, "m": 16, "clusters": 64}
        for name in ("mid", "gpu", "pilot", "124m", "widepilot", "wide", "wide4096")
    },
}
# What configs/evidence/venom_recipe.py chose at the size pilot, for its loss: larger blocks are faster.
RECIPE = {"m": 8, "sparse_share": 0.25}


def venom(size: Size, **fields) -> s24.methods.Venom:
    """Venom with the size's blocks and dense warm-up."""
    return s24.methods.Venom(**(BLOCKS[size.name] | {"dense_warmup": size.warmup} | fields))
