"""Weight gradients need the opposite order: tokens of different clusters in a group, neurons collected."""

from configs.venom import venom
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less


def ablation(size: Size) -> Ablation:
    """B2 and B4 cut in an order of their own, and in the order of F2."""

    def arm(**fields):
        return size.arm(venom(size, weights="dense", sparse_share=1.0, **fields))

    return Ablation(
        claim="Sorted tokens fire the same neurons, so V:2:M blocks along tokens lose most of them; tokens "
        "from different clusters in each group of M, and neurons of one cluster in each block of V, lose "
        "less and give a gradient nearer to the dense one.",
        source="this project: arXiv 2602.06183 does not say how its pattern serves the transposed products",
        arms={"regrouped": arm(), "plain": arm(transposed="plain")},
        verdict=all_of(
            less("regrouped", "plain", "cut_T"),
            less("plain", "regrouped", "cosine"),
            less("regrouped", "plain"),
        ),
        curve=("probe", "B2_lost_energy"),
        expects="In a simulation with 32 token types 66 % instead of 41 % of the magnitude is kept at V=64, "
        "M=16; the loss follows.",
        found={
            "cpu": "Regrouping cuts 53 instead of 67 % of the energy left and ends 0.08 nats lower in every "
            "seed. The cosines do not differ; that of a cut with columns chosen on the fly is small "
            "in both.",
            "gpu": "Regrouping cuts 35 instead of 56 % of the energy left and ends 0.028 nats lower. The "
            "cosines do not differ.",
        },
        differs="A claim of this project and not of a paper, on a small byte-level model.",
    )
