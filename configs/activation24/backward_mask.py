"""Keeping the forward support in the backward pass is at least as stable as cutting anew."""

import jax_sparse24 as s24
from experiments.ablations.ablation import Ablation, Size
from experiments.ablations.verdicts import all_of, less, no_worse


def ablation(size: Size) -> Ablation:
    """The mask of F2 kept in dY1 and B2, or every operand cut from its uncut values."""
    arms = {
        mask: size.arm(s24.methods.Activation24(dense_warmup=size.warmup, backward_mask=mask))
        for mask in ("keep", "redraw")
    }
    return Ablation(
        claim="The gradient through the entries that the forward pass kept trains at least as well as one "
        "that cuts dY1 by its own magnitude, and raises the loss of its batch less often.",
        source="arXiv 2503.16672 (dropped activations have no gradient)",
        arms=arms,
        verdict=all_of(no_worse("keep", "redraw", 0.005), less("keep", "redraw", "rising")),
        curve=("probe", "cosine"),
        expects="Equal losses within 0.005 nats; no visible difference in stability at this size, so the "
        "second comparison will be inconclusive.",
        found={
            "cpu": "Keeping the mask is better by 0.008 nats. In none of the measured steps did either arm "
            "raise the loss of its batch, so nothing can be said of stability.",
            "gpu": "No difference in loss (0.0005 nats). The gradient with a redrawn mask is nearer to the "
            "dense one (cosine 0.999 and 0.998), which changes nothing. Again the loss of no batch rose.",
        },
        differs="A small byte-level model, where nothing is unstable.",
    )
