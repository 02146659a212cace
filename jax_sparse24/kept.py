"""FFN plans that keep the packed Y2: what is counted as it is made, B1 at its entries alone, and the backward
pass where one pass over dY2 serves three products, or packed activations are packed again along tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_sparse24.formats import Compressed24, Packed24, PackedVNM
from jax_sparse24.ops._choose import choose, decide, platform
from jax_sparse24.ops._measured import Decision
from jax_sparse24.ops.compressed import reads
from jax_sparse24.ops.kept import in_tiles, kept_backward, repack_vnm
from jax_sparse24.ops.matmul import gather
from jax_sparse24.ops.sampled import sampled_matmul
from jax_sparse24.ops.tokens import regroup
from jax_sparse24.plan import Cut, Plan


def counted(run, y1_Tf) -> bool:
    """Whether the forward pass of a call (an `engine.Execution`) counts the non-zeros of Y2's features, by
    which the backward pass chooses dense ones: a kernel of CUDA does so as it packs, others take a pass."""
    row = run.plan.shared_split
    if row is None or row.rank != "density" or not getattr(run.plan.row("F2").by, "largest", False):
        return False
    if platform() != "cuda" or not in_tiles(y1_Tf):
        return False
    return choose(run.op, y1_Tf.dtype, run.implementation)[0] != "reference"


def decide_sampled(plan: Plan, dtype, shape: tuple[int, int, int]) -> Decision:
    """Whether `implementation=None` makes dY2 at the entries of V:2:M activations alone, by dense weights:
    where that was measured to take no longer than what B1 runs otherwise. shape: (T, d, f)."""
    by_kernel, reason = choose("sampled_matmul", dtype, None)
    if not plan.keep or by_kernel != "auto":
        return Decision(False, reason if plan.keep else "dY2 is needed everywhere")
    found = decide((-1, -1), "result", dtype, shape, plan.row("F2").by.pattern, "masked")
    weights = plan.row("B1")
    if found.packed and weights is not None:
        packed = decide((-1, -1), "right", dtype, shape, weights.by.pattern)
        if packed.packed and packed.entry["packed_us"] < found.entry["packed_us"]:
            return Decision(False, f"slower than packed weights; {packed.reason}", found.entry)
    return found


def samples(run, saved, dy3_Td, w2_fd) -> bool:
    """Whether a call (an `engine.Execution`) makes dY2 at the entries of `saved` alone, or whole."""
    if not isinstance(saved, PackedVNM) or run.implementation == "reference":
        return False
    if run.implementation is not None:
        return choose("sampled_matmul", dy3_Td.dtype, None)[0] == "auto"
    return decide_sampled(run.plan, dy3_Td.dtype, (*dy3_Td.shape, w2_fd.shape[0])).packed


def dy2_at(run, saved: PackedVNM | Packed24 | Compressed24, operands, state, key) -> jax.Array:
    """B1 in a call (an `engine.Execution`) at the entries of `saved`, in its order."""
    if not samples(run, saved, operands["dy3"], operands["w2"]):
        return gather(run.product("B1", operands, state, key), saved, run.implementation)
    cut = run.cut("B1", operands, state, key, packed=False)
    return sampled_matmul(cut.left, cut.right, saved, implementation=run.implementation)


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


def recut(run, saved, kept, x_Td, dy3_Td) -> dict[str, Cut]:
    """The operands of B2 and B4 in a call (an `engine.Execution`), where they are V:N:M activations that are
    cut again along tokens: from the packed Y2 and dY1."""
    cuts = {}
    for name, operand, packed, dense in (("B2", "y2", saved, dy3_Td), ("B4", "dy1", kept, x_Td)):
        row = run.plan.row(name)
        if not (isinstance(packed, PackedVNM) and row and getattr(row.by, "repacks", False)):
            continue
        places = (packed, dense) if name == "B2" else (dense, packed)
        plain = row.operand == operand and row.other is None and not (row.eight_bits or row.dense_share)
        same = row.by.pattern == packed.pattern and row.tokens != "random"
        if plain and same and run.packs(name, *places):
            along = repack_vnm(
                packed, row.tokens, row.collected, row.by.exact, implementation=run.implementation
            )
            dense = regroup(dense, row.tokens, row.by.group)
            cuts[name] = Cut(along, dense) if name == "B2" else Cut(dense, along)
    return cuts
