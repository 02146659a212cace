"""Blocks and phases of Venom in the evidence, chosen at the size `pilot`."""

import jax_sparse24 as s24
from configs.venom import BLOCKS, venom
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import lowest


def ablation(size: Size) -> Ablation:
    """Dense, Venom as it is, with smaller M, with a shorter sparse phase, and with both."""
    smaller, shorter = {"m": BLOCKS[size.name]["m"] // 2}, {"sparse_share": 0.25}
    recipes = {
        "as it is": {},
        "smaller M": smaller,
        "shorter": shorter,
        "smaller M, shorter": smaller | shorter,
    }
    return Ablation(
        claim="Of four recipes of Venom the one with blocks of half the M and half the sparse steps ends at "
        "the lowest loss.",
        source="arXiv 2602.06183, which names no V and M, and ratios of sparse to dense steps from 1:1 to "
        "1:3.5",
        arms={
            "dense": size.arm(s24.methods.Dense()),
            **{name: size.arm(venom(size, **fields)) for name, fields in recipes.items()},
        },
        verdict=lowest(
            "smaller M, shorter", ("as it is", "smaller M", "shorter"), effect=0.02, metric="val_dense"
        ),
        seeds=(0,) if size.name == "pilot" else size.seeds(),
        expects="At the size pilot, where Venom as it is ended 0.22 nats per token behind dense training: "
        "smaller M 0.15, shorter 0.12, both 0.08 behind it. M of 8 keeps twice the neurons and gains less "
        "time.",
        differs="An eighth of the tokens of the runs that it chooses the recipe for.",
    )
