"""Which products of a method are sparse, what runs each of them, and why: decisions, and tables of them."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch.decision import Decision, decide, dense_float8_obstacle, eight_bits_obstacle
from jax_sparse24.engine import fusions
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.plan import FFN, LINEAR, LINEAR_IN_FFN, ffn_plan
from jax_sparse24.engine.stats import saved_bytes
from jax_sparse24.measure.products import product_of
from jax_sparse24.methods import Dense
from jax_sparse24.methods.base import Method

_SYMBOLS = {
    "fwd": "X W", "dgrad": "dY Wᵀ", "wgrad": "Xᵀ dY",
    "F1": "X W1", "F2": "Y2 W2", "B1": "dY3 W2ᵀ", "B2": "Y2ᵀ dY3", "B3": "dY1 W1ᵀ", "B4": "Xᵀ dY1",
}  # fmt: skip
_AXES = {"x": "Td", "w": "df", "dy": "Tf", "w1": "df", "w2": "fd", "y2": "Tf", "dy1": "Tf", "dy3": "Td"}


def method_table(method: Method, dtype: jax.typing.DTypeLike, implementation: str | None = None) -> str:
    """A table with one row per product, of a linear layer and, where it differs, of an FFN.

    method: from `s24.methods`.
    dtype, implementation: as in `s24.explain`.

    Returns: lines of text.
    Raises: as `s24.explain`."""
    decision = decide("explain", jnp.dtype(dtype), implementation)
    name, reason = decision.runs, decision.reason
    runs_sparse = f"{name}: {reason}"
    if implementation is None:
        runs_sparse = (
            "by measurement: explain(method, shape=(T, d, f))" if name == "auto" else f"XLA: {reason}"
        )
    rows = [("product", "in an FFN", "computes", "sparse operand", "by", "groups along", "implementation")]
    linear = method.linear_plan()
    inside = {linear_name: "/".join(n[linear_name] for n in LINEAR_IN_FFN.values()) for linear_name in LINEAR}
    plans = [(LINEAR, linear)]
    if method.ffn_plan() != ffn_plan(linear):
        plans.append((FFN, method.ffn_plan()))
    for products, plan in plans:
        for product in products:
            row = plan.row(product)
            place = inside.get(product, product)
            if row is None:
                by = plan.describe(product)
                rows.append((product, place, _SYMBOLS[product], "none", by, "", "XLA dense product"))
                continue
            _, axis = row.by.chosen(dict(products[product])[row.operand])
            along = _AXES[row.operand][axis]
            runs = row.by.multiplied or runs_sparse
            if row.eight_bits:
                runs = _eight_bits(implementation, "packed" in row.eight_bits)
            rows.append((product, place, _SYMBOLS[product], row.operand, plan.describe(product), along, runs))
    return _aligned(rows)


def _eight_bits(implementation, packs: bool) -> str:
    """What runs a product of e4m3 operands, in words.

    packs: whether its sparse operand can be packed."""
    obstacle = eight_bits_obstacle() if packs else dense_float8_obstacle()
    if implementation not in (None, "cusparselt") or obstacle:
        return f"simulated by XLA's dense product{f': {obstacle}' if obstacle else ''}"
    if not packs:
        return "XLA's dense product of e4m3"
    if implementation is None:
        return "cuSPARSELt or XLA, in e4m3, by measurement: explain(method, shape=(T, d, f))"
    return "cuSPARSELt in e4m3 where sizes fit"


def _aligned(rows) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The decision for one product of an FFN.

    product: its name, "F1" to "B4".
    runs: what runs it, in words.
    reason: why, in words.
    decision: the decision of `dispatch.decision`, with the measurement behind it; None if the method leaves
        no choice."""

    product: str
    runs: str
    reason: str
    decision: Decision | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """An FFN with squared ReLU and no bias on one device, and what was decided, once, of its products.

    method: from `s24.methods`.
    shape: (T, d, f), tokens, model width and FFN width.
    dtype: of the products.
    execution: of the call.
    decisions: by product; None for one whose operands both stay as they are."""

    method: Method
    shape: tuple[int, int, int]
    dtype: jnp.dtype
    execution: Execution
    decisions: Mapping[str, Decision | None]

    def choices(self) -> list[Choice]:
        """What runs each product, in words.

        Returns: a `Choice` per product."""
        plan, named = self.execution.plan, self.execution.implementation is not None
        parts = {
            rule.name: (rule, rule.decide(self.execution, self.shape, self.dtype, self.decisions[rule.name]))
            for rule in fusions.MEASURED
        }
        found = []
        for product, decision in self.decisions.items():
            row = plan.row(product)
            rule, part = parts.get(product, (None, None))
            if part is not None and part.sparse:
                found.append(Choice(product, rule.part, part.reason, part))
            elif row is None or (row.by.multiplied and not row.eight_bits):
                found.append(Choice(product, "XLA dense product", "as the method says"))
            elif row.eight_bits:
                in_e4m3 = "cuSPARSELt, e4m3" if decision.sparse else "XLA, dense e4m3"
                runs = in_e4m3 if decision.eight_bits else "simulated, dense"
                found.append(Choice(product, runs, decision.reason, decision))
            else:
                runs = "packed" if decision.sparse else "masked dense"
                found.append(Choice(product, decision.runs if named else runs, decision.reason, decision))
        return found

    def shared_kernels(self) -> list[str]:
        """What one kernel does in place of two.

        Returns: a phrase for each such kernel."""
        (T, d, f), execution, decisions = self.shape, self.execution, self.decisions
        x, y2 = (jax.ShapeDtypeStruct(size, self.dtype) for size in ((T, d), (T, f)))
        by = fusions.dy1_in_one_pass(execution, x, y2, decisions)
        found = {
            "F1 and the activation": fusions.SQUARED.matches(execution, x, f, decisions["F1"], None),
            "W1 packed for F1 and for B3": fusions.BOTH_WAYS.matches(execution, ("F1", "B3"), decisions),
            "W2 packed for F2 and for B1": fusions.BOTH_WAYS.matches(execution, ("F2", "B1"), decisions),
            "B1 and the slope": by is fusions.SLOPED,
            "dY1 and its estimate for B4": by is fusions.SLOPE_MVUE,
        }
        return [phrase for phrase, matches in found.items() if matches]


def decided_block(
    method: Method,
    shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> Block:
    """Decides what runs each product of an FFN.

    method: from `s24.methods`.
    shape: (T, d, f), tokens, model width and FFN width.
    dtype, implementation: as in `s24.explain`.

    Returns: the block with its decisions."""
    dtype = jnp.dtype(dtype)
    execution = Execution("explain", "ffn", method.ffn_plan(), implementation, "squared_relu")
    return Block(method, tuple(shape), dtype, execution, execution.decisions(FFN, _operands(shape), dtype))


def _operands(shape) -> dict[str, tuple[int, int]]:
    T, d, f = shape
    return {"x": (T, d), "w1": (d, f), "w2": (f, d), "y2": (T, f), "dy1": (T, f), "dy3": (T, d)}


def choice_table(block: Block) -> str:
    """A table with one row per product of a block; times are in ms, at the nearest measured shape.

    block: by `decided_block`.

    Returns: lines of text.
    Raises: ValueError for a shape that a pattern of the method does not divide."""
    (method, shape, dtype), plan = (block.method, block.shape, block.dtype), block.execution.plan
    dataclasses.replace(block.execution, op=f"explain: shape={shape}").check(FFN, _operands(shape))
    numbers = ("vs dense", "dense", "packed", "producer")
    rows = [("product", "M x K x N", "sparse", "by", "runs", *numbers, "why")]
    losing = []  # estimates that take longer to make than their products save
    measure = f's24.tune([{shape}], ["{dtype}"])'  # of this block, where a product alone knows no (T, d, f)
    for choice in block.choices():
        product, row = choice.product, plan.row(choice.product)
        ((operand, _), _) = FFN[product]
        size = " x ".join(map(str, product_of(product, row.operand if row else operand, *shape).shape))
        cells = (product, size, row.operand if row else "none", plan.describe(product))
        times = _numbers(choice.decision, row.by) if choice.decision else [""] * 4
        ratio = _gain(choice.decision, row.by) if choice.decision else None
        if ratio is not None and ratio < 1 and row.by.stochastic and hasattr(method, "mvue"):
            losing.append(product)
        rows.append((*cells, choice.runs, *times, choice.reason.replace("s24.tune(shapes=...)", measure)))
    heading = f"{method} at T={shape[0]}, d={shape[1]}, f={shape[2]}, {dtype}. "
    heading += "\nTimes in ms at the nearest measured shape: dense product; packed product; producer of the "
    heading += "packed\noperand. vs dense: dense / (producer + what runs).\n"
    saved, dense = (saved_bytes(m, shape, dtype) / 2**20 for m in (method, Dense()))
    footing = f"\nActivations saved for the backward pass, besides the input: {saved:.4g} MiB"
    footing += f" ({dense:.4g} MiB with dense products)"
    if kernels := block.shared_kernels():
        footing += f"\nIn one kernel each, with squared ReLU and no bias: {'; '.join(kernels)}"
    if losing:
        footing += f"\nEstimates that take longer to make than {' and '.join(losing)} save by them; "
        footing += "mvue=None multiplies the gradient itself"
    return heading + _aligned(rows) + footing


def _gain(decision, by) -> float | None:
    """The dense product's time over that of what runs and of its operand's producer; None if not measured."""
    entry = decision.entry
    if entry is None or entry["status"] != "ok" or by.producer not in entry["producers_us"]:
        return None
    runs = entry["packed_us" if decision.sparse else "dense_us"]
    return entry["dense_us"] / (entry["producers_us"][by.producer] + runs)


def _numbers(decision, by) -> list[str]:
    entry, gain = decision.entry, _gain(decision, by)
    if entry is None or entry["status"] != "ok":
        return ["-"] * 4
    times = (entry["dense_us"], entry["packed_us"], entry["producers_us"].get(by.producer))
    return [
        "-" if gain is None else f"{gain:.2f}x",
        *("-" if us is None else f"{us / 1e3:.3g}" for us in times),
    ]
