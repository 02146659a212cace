"""What it costs that blocks of Venom have 128 tokens in place of 64, which makes its products faster."""

import jax_sparse24 as s24
from configs.venom import venom
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less, no_worse


def ablation(size: Size) -> Ablation:
    """Dense, and blocks of 64 and of 128 tokens."""
    return Ablation(
        claim="Blocks of 128 tokens cut more of the activations' energy than blocks of 64, and end within "
        "0.02 nats per byte of them.",
        source="this project: arXiv 2602.06183 names no V; a product of 64:2:16 reads twice the bytes of one "
        "of 128:2:16",
        arms={
            "dense": size.arm(s24.methods.Dense()),
            "V = 64": size.arm(venom(size, v=64)),
            "V = 128": size.arm(venom(size, v=128)),
        },
        verdict=all_of(
            less("V = 64", "V = 128", "cut_f"), no_worse("V = 128", "V = 64", 0.02, metric="val_dense")
        ),
        curve=("probe", "F2_lost_energy"),
        expects="At the size gpu, where blocks of 16 tokens ended 0.06 nats below blocks of 64 in a run that "
        "was sparse to its end, 0.01 to 0.02 more after the dense steps at the end. At the size cpu the same "
        "order within the noise.",
        differs="A small byte-level model; the paper names no V.",
    )
