"""A low-rank model needs the activation between its factors."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less, within


def ablation(size: Size) -> Ablation:
    """A decoder with SwiGLU at full rank, and with every linear layer of a block at rank d/4."""
    steps, rank = size.base.train.steps // 2, size.base.model.d // 4
    models = {
        "full rank": {},
        "silu": {"rank": rank},
        "identity": {"rank": rank, "bottleneck": "identity"},
    }
    return Ablation(
        claim="With every linear layer replaced by B silu(A x) of rank d/4 a model reaches the loss of the "
        "full-rank one in equal steps; without the silu, plain low rank, it is clearly worse.",
        source="arXiv 2502.10940, section 3 and its table of perplexity on C4",
        arms={
            name: size.arm(s24.methods.Dense(), {"ffn": "swiglu", **fields}, steps=steps)
            for name, fields in models.items()
        },
        verdict=all_of(within("silu", "full rank", 0.03), less("silu", "identity", by=0.03)),
        curve=("eval", "dense"),
        expects="Both behind full rank by 0.05 nats or more at the cpu size, where rank 16 is little in "
        "absolute terms; silu ahead of identity by some hundredths of a nat.",
        differs="Equal learning rates (the paper's are three to six times those usual at full rank), a "
        "byte-level model of source code, and few steps.",
        found={
            "cpu": "At the cpu size, where the rank is 16, low rank costs 0.17 nats with silu, more than "
            "was expected. silu is ahead of identity in every seed, by three times the margin on average, "
            "but three seeds that vary this much do not confirm it.",
            "gpu": "At the gpu size, where the rank is 128, low rank with silu ends 0.16 nats behind full "
            "rank, as at the small one, and 0.02 behind plain low rank, which was expected to end some "
            "hundredths behind silu: the order of the small size is reversed.",
        },
    )
