"""A mask that may move trains better than the one of the first step."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less


def ablation(size: Size) -> Ablation:
    """Dense; static masks of SLoPe, by magnitude and random, no adapters; STE and FST, whose masks move."""
    steps = size.base.train.steps // 2
    arms = {
        "dense": s24.methods.Dense(),
        "static": s24.methods.SLoPe(rank=0),
        "static random": s24.methods.SLoPe(rank=0, mask="random"),
        "ste": s24.methods.STE(),
        "fst": s24.methods.FST(decay=size.decay, mvue=None, dense_fraction=0),
    }
    return Ablation(
        claim="Dynamic masks end at a lower loss than a static one; the static one keeps its weights apart: "
        "fresh masks of its weights flip less.",
        source="arXiv 2405.16325, section 2.1 (static masks, for memory); arXiv 2102.04010 (dynamic masks)",
        arms={name: size.arm(m, steps=steps, monitor_mask="top-2") for name, m in arms.items()},
        verdict=all_of(
            less("ste", "static", effect=0.01),
            less("fst", "static", effect=0.01),
            less("static", "ste", "flip_mid"),
        ),
        seeds=size.seeds(cpu=8),
        expects="STE below static by 0.01 to 0.05 nats; FST, whose masks are held to 4x4 tiles, hardly "
        "below it; a random mask is about as good as one by magnitude: initial weights mean nothing yet.",
        differs="Plain STE and FST stand for SR-STE, the dynamic rival. The memory that a static mask "
        "saves (the paper: 0.63 to 0.68 of dense training, FST 1.15 to 1.27) is not measured: parameters "
        "and moments are dense arrays here. All arms sparse to the end.",
        found={
            "cpu": "At the cpu size eight seeds do not tell the losses of these masks apart: on average "
            "STE is 0.017 nats ahead of static, about what was expected, and FST, with its tiles, 0.008 "
            "behind it. That fresh masks of static weights flip less is clear. The gradient of a random "
            "mask has a small cosine with the dense one, whose model has all the pruned weights; "
            "val_dense of static arms means nothing.",
            "gpu": "STE ends 0.036 nats below the static mask and FST 0.019, in every seed, but seeds "
            "differ by too much for three to decide it. Fresh masks of static weights flip less: 0.0017 "
            "of the weights a step, those of STE 0.0028. Contrary to what was expected, a random mask is "
            "0.014 nats ahead of one by magnitude.",
        },
    )
