"""What a training step needs in the memory of each device: the state exactly, the rest by a formula.

Bytes of activations that dense products of bfloat16 keep for the backward pass, per token and block, are
16 d + 4 f (8 f with a gate), twice that in float32; attention by XLA keeps its weights besides, for every
head and earlier token once in float32 and once as they are multiplied. With `remat` only what enters each
block is kept, 2 d, and one block's own. docs/memory.md compares this with what XLA planned on GPUs.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from experiments.config import Config
from experiments.errors import UserError, require
from experiments.training import mesh as meshes
from experiments.training.step import Program, parts_of

REMEDIES = {
    **dict.fromkeys(("parameters", "gradients", "moments"), "a larger mesh.fsdp, or a smaller model"),
    "masks and other state": "another method, or a larger mesh.fsdp",
    "teacher": "a method without a teacher",
    "activations": "a larger train.accumulate, or model.remat",
    "attention weights": "model.attention cudnn, which keeps none, a larger train.accumulate, or model.remat",
    "logits": "a larger train.accumulate",
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on each device by what they are for; whether whole weights stand there while micro-batches are
    added up."""

    terms: dict[str, int]
    gathers: bool = False

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        return max(self.terms, key=self.terms.get)

    @property
    def remedy(self) -> str:
        """What makes the largest term smaller."""
        whole = self.gathers and self.largest in ("gathered parameters", "gradients")
        return "mesh.gather product" if whole else REMEDIES[self.largest]


def size_of(tree) -> int:
    """Bytes on each device of all arrays of a tree, of shapes alone too, cut as their shardings say; a key is
    counted by its words."""

    def one(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(one(leaf) for leaf in jax.tree.leaves(tree))


def estimate(config: Config, program: Program) -> Estimate:
    """What a step needs on each device of the program's mesh, which cuts the state, micro-batches, the widths
    of blocks, and heads.

    Raises UserError for a model whose config has no `sizes`, and for a batch or a width that the mesh does
    not divide."""
    blocks, data = config.model.sizes(), config.data
    require(
        blocks is not None,
        f"The formula needs the sizes of the model's blocks: {type(config.model).__module__}.Config.sizes() "
        "returns None; let it return them.",
    )
    meshes.check(config, program.mesh)
    sequences = data.batch // config.train.accumulate
    sequences //= math.prod(program.mesh.shape[axis] for axis in meshes.TOKENS)  # of each device
    state = program.abstract_state()
    tokens, wide = sequences * data.seq, 2 if config.model.dtype == "float32" else 1
    tp = program.mesh.shape["tp"]
    block = wide * (16 * blocks.d + (8 if blocks.gated else 4) * blocks.f // tp) * tokens
    weights = (4 + 2 * wide) * (blocks.heads // tp) * data.seq * tokens if blocks.weights_kept else 0
    whole = 1 if blocks.remat else blocks.layers  # blocks whose activations stand in memory at once
    rows = state["params"]["embedding"]["embedding"].shape[0]
    at_once = tokens * rows // parts_of(sequences, data.seq, rows)
    params = size_of(state["params"])
    once = config.mesh.gather == "step" and config.train.accumulate > 1
    whole_params = params * program.mesh.shape["fsdp"] if once else params
    masks = size_of(state["sparse"]) * (program.mesh.shape["fsdp"] - 1) if once else 0
    terms = {
        "parameters": params,
        "gathered parameters": whole_params + masks if whole_params > params else 0,
        "gradients": whole_params * (2 if config.train.accumulate > 1 else 1),
        "moments": size_of(state["opt"]),
        "masks and other state": size_of(state["sparse"]),
        "teacher": size_of(state.get("teacher", ())),
        "activations": block * whole + (2 * wide * blocks.d * tokens * blocks.layers if blocks.remat else 0),
        "attention weights": weights * whole,
        # In float32, their gradient, and both as they are multiplied.
        "logits": at_once * (8 + 2 * 2 * wide + (4 if "teacher" in state else 0)),
    }
    return Estimate({name: bytes_ for name, bytes_ in terms.items() if bytes_}, whole_params > params)


def check(config: Config, program: Program) -> None:
    """UserError for a step that cannot fit into the memory of this machine's accelerators, before it is
    compiled; nothing where that memory is not known."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if not limit:
        return
    try:
        needed = estimate(config, program)
    except UserError:  # nothing is known of such a model
        return
    largest, least = needed.largest, needed.total
    if all(phase.sparse for phase in config.schedule.phases):  # Venom keeps half of what dense blocks keep
        least -= needed.terms["activations"] // 2
    require(
        least < 1.1 * limit,  # the formula is some percent above what was measured
        f"A step of this run needs about {needed.total / 1e9:.1f} GB on each device, which have "
        f"{limit / 1e9:.1f} GB. The largest part is {largest}, {needed.terms[largest] / 1e9:.1f} GB: "
        f"give {needed.remedy}. `python -m experiments.memory CONFIG` lists all parts.",
    )
