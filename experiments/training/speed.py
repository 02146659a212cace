"""How much of a device's arithmetic a training step uses: the share of the peak of dense products (MFU).

Counted are the products of the dense model, forward and backward, and those of causal attention, whatever a
method leaves out and whatever is computed twice; so shares of methods compare.
"""

import re

import jax
from flax import nnx

from experiments.config import Config
from experiments.training.step import abstract_model

# Dense products of 16-bit floats, in FLOP/s, by the name of the device (the manufacturer's data sheets);
# float32 runs as TF32, at half of that.
PEAKS = {
    r"H100 PCIe|H100 NVL": 756e12,
    r"H100|H200": 989e12,
    r"B200": 2250e12,
    r"A100": 312e12,
}
NO_PRODUCTS = {"scale", "bias"}


def flops_per_token(config: Config) -> float:
    """Of forward and backward pass, of a token in a sequence of `data.seq`."""
    flat = nnx.to_flat_state(nnx.state(abstract_model(config), nnx.Param))
    sizes = {path: leaf.size for path, leaf in flat if path[-1] not in NO_PRODUCTS}
    if any(path[0] == "head" for path in sizes):  # else the embedding is the head, too
        sizes = {path: size for path, size in sizes.items() if path[-1] != "embedding"}
    attended = 0
    if blocks := config.model.sizes():  # of half of all pairs, two products
        attended = config.data.seq * blocks.layers * blocks.heads * blocks.head
    return 6.0 * (sum(sizes.values()) + attended)


def peak(config: Config) -> float | None:
    """FLOP/s of all devices of a run; None for devices without a known peak."""
    kinds = [device.device_kind for device in jax.devices()]
    known = [next((peak for name, peak in PEAKS.items() if re.search(name, kind)), None) for kind in kinds]
    if None in known:
        return None
    return sum(known) / (1 if config.model.dtype != "float32" else 2)
