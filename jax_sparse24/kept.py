"""FFN plans that keep the packed Y2: what is counted as it is made, and the backward pass where one pass over
dY2 serves three products."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_sparse24.formats import Compressed24, Packed24
from jax_sparse24.ops._choose import choose, platform
from jax_sparse24.ops.compressed import reads
from jax_sparse24.ops.kept import in_tiles, kept_backward
from jax_sparse24.ops.tokens import regroup
from jax_sparse24.plan import Cut


def counted(run, y1_Tf) -> bool:
    """Whether the forward pass of a call (an `engine.Execution`) counts the non-zeros of Y2's features, by
    which the backward pass chooses dense ones: a kernel of CUDA does so as it packs, others take a pass."""
    row = run.plan.shared_split
    if row is None or row.rank != "density" or not getattr(run.plan.row("F2").by, "largest", False):
        return False
    if platform() != "cuda" or not in_tiles(y1_Tf):
        return False
    return choose(run.op, y1_Tf.dtype, run.implementation)[0] != "reference"


def in_one_pass(run, saved, x_Td, dy3_Td) -> bool:
    """Whether `backward` gives the operands of B2 and B4 in a call (an `engine.Execution`): both take the two
    largest of the same tokens, packed, and leave the same features dense."""
    row, other = run.plan.row("B2"), run.plan.row("B4")
    if not (row and other and isinstance(saved, Packed24 | Compressed24)):
        return False
    if isinstance(saved, Compressed24) and not in_tiles(saved):  # what is cut again is packed for cuSPARSELt
        return False
    alike = row.operand == "y2" and other == dataclasses.replace(row, operand="dy1")
    plain = getattr(row.by, "largest", False) and row.other is None and not (row.eight_bits or row.collected)
    ranked = row.rank == "density" or not row.dense_share
    if not (alike and plain and ranked and row.tokens in ("consecutive", "strided")):
        return False
    return run.packs("B2", saved, dy3_Td) and run.packs("B4", x_Td, saved)


def backward(
    run, saved: Packed24 | Compressed24, counts_f: jax.Array | None, dy2_Tf, x_Td, dy3_Td
) -> tuple[Packed24 | Compressed24, dict[str, Cut], jax.Array | None]:
    """dY1 on the support of Y2; the operands of B2 and B4; which features stay dense in both. counts_f: as
    `Execution.dense_features` takes them."""
    row, implementation = run.plan.row("B2"), run.implementation
    features = run.dense_features(saved.todense(implementation=implementation), counts_f)
    chosen = jnp.zeros(0, jnp.int32) if features is None else features
    places = run.place("B2", saved, dy3_Td), run.place("B4", x_Td, saved)
    dy1, y2_along, dy1_along = kept_backward(
        *(saved, dy2_Tf, chosen, run.activation, row.tokens),
        compressed=tuple(reads(*place, implementation) for place in places),
        implementation=implementation,
    )
    dy3, x = (regroup(dense, row.tokens) for dense in (dy3_Td, x_Td))
    cuts = {
        "B2": Cut(y2_along.packed, dy3, few=y2_along.dense),
        "B4": Cut(x, dy1_along.packed, few=dy1_along.dense),
    }
    return dy1, cuts, features
