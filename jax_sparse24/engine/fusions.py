"""Fused passes: one pass does what several rows of a plan, or a row and an activation, ask for. No other file
asks which rows a plan has, or of which kind their sparsifiers are, to choose a pass.

A rule has `matches`, whether a call can take the pass where its products run as was decided, and most have
`run`, which makes operands or a result. The engines ask the rules in the order in which a block meets them;
the benchmark asks the same ones, to time what they make. A rule of `MEASURED` computes a part of a product in
its place, and has measurements of its own: `measure/`, `explain` and the benchmark find it there.

    EIGHT_BITS       fwd, dgrad, F1, F2, B1, B3: both operands are rounded to e4m3 and multiplied as such
    BOTH_WAYS        fwd and dgrad, F1 and B3, F2 and B1: a weight is packed for both of its products at once
    UNPACKED         dgrad, B3, B1: dense values of a weight are unpacked from what the forward pass packed
    SQUARED          F1: its product gives the squared ReLU in place of Y1
    ACTIVATED        F2: what makes Y2 sparse applies the activation, too
    COUNTS           F2: the pass that packs Y2 counts the non-zeros by which dense features are chosen
    SHARED_FEATURES  B2, B4: one choice of the features that stay dense serves both
    SAMPLED_B1       B1 is computed only at the entries of a saved V:N:M Y2
    SLOPED           B1: its product is multiplied by the slope, and gives dY1 in place of dY2
    SAVED_24         one pass over dY2 makes dY1 on the support of a saved 2:4 Y2, and operands of B2 and B4;
                     tokens of X and dY3 are moved unless the kernel of a product reads them where they lie
    SLOPE_MVUE       one pass over dY2 makes dY1 and packs its estimate for B4
    SAVED_VNM        B2, B4: saved V:N:M activations are packed again along tokens from their packed form, and
                     no pass moves the tokens of X and dY3
    GATED            gated activations, by a kernel in place of what XLA fuses
    GATED_BACKWARD   the gradients of gate and up, likewise
    GATED_MVUE       one pass makes these gradients and packs their estimates for wgrad"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch.decision import Decision, decide, unless_slower
from jax_sparse24.dispatch.product import Product
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.operand import Operands, Packed
from jax_sparse24.engine.pieces import whole
from jax_sparse24.engine.plan import Plan, Row
from jax_sparse24.engine.sparsifiers import MVUE, Blocks, DenseValues, Masked, Top2
from jax_sparse24.ops import gated
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.matmul import gather, with_values
from jax_sparse24.ops.matmul_pointwise import (
    MATMUL_SLOPE,
    MATMUL_SQUARED_RELU,
    matmul_slope,
    matmul_squared_relu,
)
from jax_sparse24.ops.order import regroup
from jax_sparse24.ops.packed24 import Packed24, both_ways_faster
from jax_sparse24.ops.packed_vnm import PackedVNM, repack_vnm
from jax_sparse24.ops.reference.gated import GATES
from jax_sparse24.ops.reference.saved import SLOPES, sloped
from jax_sparse24.ops.sampled import SAMPLED_MATMUL, sampled_matmul
from jax_sparse24.ops.saved import PACK_COUNTED, saved_backward
from jax_sparse24.ops.slope import SLOPE_MVUE_PACK, slope_mvue_pack24
from jax_sparse24.patterns import VNM

DENSE = Decision("dense", "only its values are needed")


def product(
    execution: Execution,
    name: str,
    arrays,
    state,
    key,
    decision: Decision | None,
    *,
    features: jax.Array | None = None,
    operands: Operands | None = None,
    bias=None,
    saved: Packed | None = None,
) -> jax.Array:
    """One product of a plan, by the rule that matches it.

    execution: of the call.
    name: of the product.
    arrays: its operands by name.
    state, key: of the call.
    decision: of `Execution.decisions`.
    features: int32 (k,), those that stay dense; None to choose them here.
    operands: the operands to multiply, if a rule has made them; None to make them here.
    bias: see `Execution.multiply`.
    saved: see `Request.saved`.

    Returns: a 2-D array of the operands' dtype; sums are float32."""
    if operands is None:
        operands = operands_of(execution, name, arrays, state, key, decision, saved)
    return execution.masked_gradient(name, execution.multiply(name, operands, features, bias), state)


def forward(
    execution: Execution,
    names: tuple[str, str],
    arrays,
    state,
    key,
    decisions: Mapping[str, Decision | None],
    *,
    bias=None,
    squared: bool = False,
) -> tuple[jax.Array, dict[str, Packed]]:
    """A product of an input and a weight, in the forward pass.

    names: of the product and of that which gives the gradient of its input; of the latter there is a decision
        if a gradient is taken.
    decisions: by product.
    squared: whether the squared ReLU of the product is asked for, because `SQUARED` matches.
    Other arguments are those of `product`.

    Returns: the product, and by its name the packed weight that takes the place of the weight in the other
        one, if `BOTH_WAYS` or `UNPACKED` matches."""
    (x, _), (w, _) = execution.table[names[0]]
    decision, ahead = decisions[names[0]], {}
    if BOTH_WAYS.matches(execution, names, decisions):
        packed, ahead[w] = BOTH_WAYS.run(execution, names, arrays[w], state, decisions)
        operands = Operands(arrays[x], packed, decision)
    else:
        operands = operands_of(execution, names[0], arrays, state, key, decision)
    if UNPACKED.matches(execution, names, decisions):
        ahead[w] = operands.right
    if squared:
        return SQUARED.run(execution, operands), ahead
    return product(execution, names[0], arrays, state, key, decision, bias=bias, operands=operands), ahead


def operands_of(
    execution: Execution,
    name: str,
    arrays,
    state,
    key,
    decision: Decision | None,
    saved: Packed | None = None,
) -> Operands:
    """The operands of one product of a plan, by the rule that matches it.

    execution, name, arrays, state, key, decision, saved: see `product`."""
    if EIGHT_BITS.matches(decision):
        return EIGHT_BITS.run(decision, execution, name, whole(arrays), whole(state), key)
    return execution.cut(name, arrays, state, key, decision, saved=saved)


class EightBits:
    """Rounds both operands of a row that may be in 8 bits, each with a scale.

    Where it does not match, the row's sparsifiers simulate the rounding."""

    def matches(self, decision: Decision | None) -> bool:
        """Whether a product was decided to run in 8 bits."""
        return decision is not None and decision.eight_bits

    def run(self, decision: Decision, execution: Execution, name: str, arrays, state, key) -> Operands:
        """Rounds the two operands of the product, and packs the sparse one if that was decided."""
        (a, a_axis), (b, b_axis) = execution.table[name]
        row, states = execution.plan.row(name), execution.states(state)
        on_left = row.operand == a
        axis, other, other_axis = (a_axis, b, b_axis) if on_left else (b_axis, a, a_axis)
        x = arrays[row.operand]
        form = "packed" if decision.sparse else "dense"
        request = execution.request(row.operand, states.get(row.operand, {}), key, form=form)
        sparse, scale = row.by.quantised(x, axis, request)
        if not decision.sparse:
            sparse = _along(sparse, axis)
        request = execution.request(other, execution.state_of(other, row, state), key)
        dense, dense_scale = row.other.quantised(arrays[other], other_axis, request)
        scales = (scale, dense_scale.T) if on_left else (scale.T, dense_scale)
        return Operands(*((sparse, dense) if on_left else (dense, sparse)), decision, x, scales=scales)


def _along(w: jax.Array, axis: int) -> jax.Array:
    """A weight of 8-bit numbers with an axis contiguous in memory, as GPUs multiply them.

    The barrier keeps XLA from leaving the transposition to the product, which has no fast way to make it, and
    from choosing one layout for two products."""
    return jax.lax.optimization_barrier(w) if axis == -1 else jax.lax.optimization_barrier(w.T).T


class Ahead(NamedTuple):
    """What the forward pass of a differentiation rule has made for the backward pass.

    decisions: of the products of the backward pass, by name.
    weights: packed weights that take the place of the weights in these products, by name.
    seen: see `Execution.seen`."""

    decisions: Mapping[str, Decision | None]
    weights: Mapping[str, Packed]
    seen: Mapping[str, jax.Array]


class BothWays:
    """One pass over a weight packs it, by a mask that is 2:4 along both axes, for the product of the forward
    pass and for the gradient of its input.

    The packed weight is kept for the backward pass in place of the weight, of whose bytes it has 9/16 in 16
    bits (10/16 in cuSPARSELt's layout). A call that is cut over a mesh keeps weights as they rest, and packs
    them for each product. The pass is taken where an implementation is named, or where it was measured to be
    faster than two."""

    def matches(
        self, execution: Execution, names: tuple[str, str], decisions: Mapping[str, Decision | None]
    ) -> bool:
        """Whether both products multiply by the weight under one stored mask, and were decided to run with
        packed weights of one form.

        names: of the forward product and of that which gives the gradient of its input."""
        first, second = (execution.plan.row(name) for name in names)
        alike = first is not None and first == second and isinstance(first.by, Masked) and _only_cut(first)
        if not alike or execution.partition is not None or not decisions.keys() >= set(names):
            return False
        forward, backward = (decisions[name] for name in names)
        if not (forward.sparse and forward.form == backward.form):
            return False
        return execution.implementation is not None or both_ways_faster(forward.entry["dtype"])

    def run(
        self, execution: Execution, names: tuple[str, str], w: jax.Array, state, decisions
    ) -> tuple[Packed, Packed]:
        """The weight, packed for each of the two products."""
        row = execution.plan.row(names[0])
        own, form = execution.states(state)[row.operand], decisions[names[0]].form
        backward, forward = row.by.both_ways(w, execution.request(row.operand, own, None, form=form))
        return forward, backward


class Unpacked:
    """The gradient of an input multiplies the dense values of the weight that the forward pass has packed.

    To unpack them in the backward pass moves fewer bytes than to make them again. The packed weight is kept
    in place of the weight, as by `BothWays`, and `Execution.cut` unpacks it."""

    def matches(
        self, execution: Execution, names: tuple[str, str], decisions: Mapping[str, Decision | None]
    ) -> bool:
        """Whether the second product multiplies the values of the first, which was decided to run with a
        packed weight.

        names: of the forward product and of that which gives the gradient of its input."""
        first, second = (execution.plan.row(name) for name in names)
        _, (w, axis) = execution.table[names[0]]
        if not (first and second and first.operand == w and _only_cut(first)) or first.by.stochastic:
            return False
        if execution.partition is not None or not decisions.keys() >= set(names):
            return False
        by = second.by if second.operand == w else second.other
        return by == DenseValues(first.by, axis) and decisions[names[0]].sparse


class Squared:
    """A kernel gives the squared ReLU of F1 in place of Y1, in blocks that need Y2 alone.

    The pass is taken where our kernels are asked for, or in place of the product of a compressed weight
    where it was measured to be faster than that and XLA's activation."""

    def matches(
        self, execution: Execution, x_Td: jax.Array, f: int, decision: Decision | None, bias: jax.Array | None
    ) -> bool:
        """Whether F1 multiplies a packed W1 and is followed by squared ReLU alone, in whole tiles of a kernel
        of this machine.

        f: of Y1 (T, f).
        decision: for F1.
        bias: of Y1, or None."""
        if execution.activation != "squared_relu" or bias is not None or ACTIVATED.matches(execution):
            return False
        if not _multiplies_24(execution, "F1", "w1", decision):
            return False
        (_, d), dtype = x_Td.shape, x_Td.dtype
        w = Packed24(*Packed24.types(jax.ShapeDtypeStruct((d, f), dtype), -2), -2)
        return MATMUL_SQUARED_RELU.in_one_pass(x_Td, w, implementation=execution.implementation)

    def run(self, execution: Execution, operands: Operands) -> jax.Array:
        """Y2 (T, f). operands: of F1."""
        options = {"decision": operands.decision, "implementation": execution.implementation}
        return matmul_squared_relu(operands.left, operands.right, **options)


class Sloped:
    """A kernel gives dY1 in place of B1, in blocks that save the whole of Y2.

    The pass is taken where our kernels are asked for, or in place of the product of a compressed weight
    where it was measured to be faster than that and the pass after it."""

    def matches(
        self, execution: Execution, dy3_Td: jax.Array, saved_Tf: jax.Array, decision: Decision | None
    ) -> bool:
        """Whether B1 multiplies by a packed W2, in whole tiles of a kernel of this machine, and the slope
        follows from what was saved.

        saved_Tf: Y2 or Y1, whichever the forward pass has saved.
        decision: for B1."""
        if execution.activation not in SLOPES or execution.plan.save_packed or ACTIVATED.matches(execution):
            return False
        if not _multiplies_24(execution, "B1", "w2", decision):
            return False
        (_, d), (_, f), dtype = dy3_Td.shape, saved_Tf.shape, dy3_Td.dtype
        w = Packed24(*Packed24.types(jax.ShapeDtypeStruct((f, d), dtype), -1), -1)
        return MATMUL_SLOPE.in_one_pass(dy3_Td, w, saved_Tf, **self._options(execution))

    def run(self, execution: Execution, operands: Operands, saved_Tf: jax.Array) -> jax.Array:
        """dY1 (T, f). operands: of B1. saved_Tf: as in `matches`."""
        options = self._options(execution) | {"decision": operands.decision}
        return matmul_slope(operands.left, operands.right, saved_Tf, **options)

    def _options(self, execution: Execution):
        return {"activation": execution.activation, "implementation": execution.implementation}


class Activated:
    """Applies the activation in what makes Y2 sparse for F2."""

    def row(self, plan: Plan) -> Row | None:
        """The row of F2 if it makes Y2 sparse; else None."""
        row = plan.row("F2")
        return row if row is not None and row.operand == "y2" else None

    def matches(self, execution: Execution) -> bool:
        """Whether F2 makes Y2 sparse."""
        return self.row(execution.plan) is not None

    def run(
        self, decision: Decision, execution: Execution, y1_Tf: jax.Array, w2_fd, state, key, allowed
    ) -> Operands:
        """The operands of F2, of which Y2 is packed if it is saved, and counted if `COUNTS` matches.

        allowed: see `Request.allowed`."""
        saves = execution.plan.save_packed
        options = {"packed": saves, "counts": saves and COUNTS.matches(execution, y1_Tf), "allowed": allowed}
        arrays, activation = {"y2": y1_Tf, "w2": w2_fd}, execution.activation
        return execution.cut("F2", arrays, state, key, decision, activation=activation, **options)


class Counts:
    """The CUDA kernel that packs Y2 counts the non-zeros of each feature in the same pass."""

    def matches(self, execution: Execution, y1_Tf: jax.Array) -> bool:
        """Whether F2 is cut to 2:4, the counts are asked for, and one pass on this machine does both."""
        row = SHARED_FEATURES.row(execution.plan)
        if row is None or row.rank != "density" or not isinstance(execution.plan.row("F2").by, Top2):
            return False
        return PACK_COUNTED.in_one_pass(y1_Tf, implementation=execution.implementation)


class SharedFeatures:
    """One choice of the features that stay dense, of those of Y2, serves B2 and B4.

    Y2 and dY1 have their non-zeros in the same places (2503.16672)."""

    def row(self, plan: Plan) -> Row | None:
        """The row of B2 if B2 and B4 leave equally many features dense, by equal rank; else None."""
        first, second = plan.row("B2"), plan.row("B4")
        if not (first and second and first.operand == "y2" and second.operand == "dy1"):
            return None
        same = (first.dense_share, first.rank) == (second.dense_share, second.rank)
        return first if same and first.dense_share else None

    def matches(self, execution: Execution) -> bool:
        """Whether B2 and B4 leave the same features dense."""
        return self.row(execution.plan) is not None

    def run(self, execution: Execution, y2_Tf: jax.Array, counts_f: jax.Array | None) -> jax.Array:
        """The features, int32 (k,), ascending.

        counts_f: int32, the non-zeros of each feature of Y2; None to count them here."""
        return execution.dense_features(self.row(execution.plan), y2_Tf, counts_f)


class SampledB1:
    """Dense weights give dY2 at the entries that F2 kept of Y2, and nowhere else.

    name: of the product of which it computes a part.
    side: what is sparse, as `Product` says.
    part: which part, in words."""

    name, side, part = "B1", "result", "only at entries of Y2"

    def product(self, shape: tuple[int, int, int], dtype, pattern: str) -> Product:
        """The part as decisions and tables describe it.

        shape: (T, d, f).
        dtype: of the operands.
        pattern: of Y2."""
        return Product((-1, -1), self.side, jnp.dtype(dtype), shape, pattern)

    def kernel(self, shape: tuple[int, int, int], dtype, pattern: str) -> Decision:
        """What computes the part where nothing is measured: kernels of this package, or the reference.

        Arguments are those of `product`."""
        found, (T, d, f) = SAMPLED_MATMUL.decide(dtype), shape
        v, _, m = (int(n) for n in pattern.split(":"))
        a, b = (jax.ShapeDtypeStruct((n, d), dtype) for n in (T, f))
        if found.runs == "auto" and not SAMPLED_MATMUL.in_one_pass(a, b, v=v, m=m):
            return Decision("reference", "no kernel of this GPU takes its dtype and sizes")
        return found

    def fits(self, shape: tuple[int, int, int], dtype, pattern: VNM) -> bool:
        """Whether a Y2 of this pattern can be saved, and a kernel of this package computes the part.

        Arguments are those of `product`, but for the pattern."""
        if shape[0] % pattern.v or shape[2] % pattern.m:
            return False
        return self.kernel(shape, dtype, str(pattern)).runs == "auto"

    def values(
        self, left: jax.Array, right: jax.Array, support: PackedVNM, implementation: str | None
    ) -> jax.Array:
        """The values of the product at the entries of `support`, in its order.

        left, right: the operands, dense."""
        return sampled_matmul(left, right, support, implementation=implementation)

    def pattern(self, plan: Plan) -> str | None:
        """The pattern of a saved V:N:M Y2, at whose entries alone dY2 is needed; else None."""
        pattern = plan.row("F2").by.pattern if plan.save_packed else "2:4"
        return None if pattern == "2:4" else pattern

    def decide(
        self, execution: Execution, shape: tuple[int, int, int], dtype, whole: Decision | None
    ) -> Decision:
        """Whether the rule makes B1: where it is asked for by name, or was measured to be at least as fast as
        the whole product.

        shape: (T, d, f).
        dtype: of the operands.
        whole: the decision for the whole product."""
        pattern = self.pattern(execution.plan)
        if pattern is None:
            return Decision("dense", "dY2 is needed everywhere")
        if execution.implementation == "reference":
            return Decision("dense", "asked for")
        kernel = self.kernel(shape, dtype, pattern)
        if kernel.runs != "auto":
            return Decision("dense", kernel.reason)
        if whole is not None and whole.runs == execution.implementation == "cusparselt":
            return Decision("dense", "cuSPARSELt, which is asked for, multiplies by packed weights")
        if execution.implementation is not None:
            return Decision("auto", "asked for", "packed")
        found = decide(self.product(shape, dtype, pattern), alternative="masked")
        return unless_slower(found, whole)

    def matches(
        self, execution: Execution, dy3_Td: jax.Array, w2_fd: jax.Array, whole: Decision | None
    ) -> bool:
        """Whether `decide` says so for the operands of B1. whole: the decision for the whole product."""
        return self.decide(execution, (*dy3_Td.shape, w2_fd.shape[0]), dy3_Td.dtype, whole).sparse

    def run(self, execution: Execution, saved: PackedVNM, arrays, state, key) -> jax.Array:
        """The values of dY2 at the entries of `saved`, in its order."""
        dense = execution.cut(self.name, arrays, state, key, DENSE)
        return self.values(dense.left, dense.right, saved, execution.implementation)


class Saved24:
    """One pass over dY2 gives dY1 and the operands of B2 and B4.

    It needs B2 and B4 to keep the two largest of the same four tokens and to leave the same features dense.
    """

    def matches(self, execution: Execution, saved: Packed, decisions: Mapping[str, Decision | None]) -> bool:
        """Whether B2 and B4 are cut alike from a saved 2:4 Y2, and both were decided to run packed."""
        row, other = execution.plan.row("B2"), execution.plan.row("B4")
        if not (row and other and isinstance(saved, Packed24 | Compressed24)):
            return False
        alike = row.operand == "y2" and other == dataclasses.replace(row, operand="dy1")
        ranked = row.rank == "density" or not row.dense_share
        if not (alike and ranked and isinstance(row.by, Top2) and _only_cut(row)):
            return False
        if row.gather_features or row.tokens == "random":
            return False
        return decisions["B2"].sparse and decisions["B4"].sparse

    def run(
        self,
        decisions: Mapping[str, Decision],
        execution: Execution,
        saved: Packed24 | Compressed24,
        counts_f: jax.Array | None,
        dy2_Tf: jax.Array,
        x_Td: jax.Array,
        dy3_Td: jax.Array,
    ) -> tuple[Packed24 | Compressed24, dict[str, Operands], jax.Array | None]:
        """Makes dY1 on the support of Y2, the operands of B2 and B4, and the features that stay dense in
        both.

        counts_f: as in `SharedFeatures.run`."""
        row, implementation, features = execution.plan.row("B2"), execution.implementation, None
        if SHARED_FEATURES.matches(execution):
            y2_Tf = saved.todense(implementation=implementation)
            features = SHARED_FEATURES.run(execution, y2_Tf, counts_f)
        chosen = jnp.zeros(0, jnp.int32) if features is None else features
        dy1, y2_along, dy1_along = saved_backward(
            *(saved, dy2_Tf, chosen, execution.activation, row.tokens),
            compressed=tuple(decisions[name].form == "compressed" for name in ("B2", "B4")),
            implementation=implementation,
        )
        operands = {}
        for name, along, dense in (("B2", y2_along, dy3_Td), ("B4", dy1_along, x_Td)):
            in_place = row.tokens == "strided" and decisions[name].reads_strided
            dense = dense if in_place else regroup(dense, row.tokens)
            pair = (along.packed, dense) if name == "B2" else (dense, along.packed)
            options = {"dense_features": along.dense, "strided": in_place}
            operands[name] = Operands(*pair, decisions[name], **options)
        return dy1, operands, features


class SavedVNM:
    """Packs V:N:M activations again along tokens, from the packed Y2 and dY1."""

    def matches(self, execution: Execution, name: str, saved: Packed, decision: Decision | None) -> bool:
        """For B2 or B4, by `name`; dY1 is packed as the saved Y2 is."""
        row = execution.plan.row(name)
        if not (isinstance(saved, PackedVNM) and row and isinstance(row.by, Blocks) and _only_cut(row)):
            return False
        operand = {"B2": "y2", "B4": "dy1"}[name]
        if row.operand != operand or row.dense_share or row.tokens == "random":
            return False
        return row.by.pattern == saved.pattern and decision.sparse

    def run(
        self, decision: Decision, execution: Execution, name: str, packed: PackedVNM, dense_Td: jax.Array
    ) -> Operands:
        """The operands of B2 (Y2 and dY3) or of B4 (dY1 and X), of which the dense one stays as it lies."""
        row = execution.plan.row(name)
        options = row.tokens, row.gather_features, row.by.exact
        along = repack_vnm(packed, *options, implementation=execution.implementation)
        operands = (along, dense_Td) if name == "B2" else (dense_Td, along)
        return Operands(*operands, decision, strided=row.tokens == "strided")


class Gated:
    """A kernel computes gated activations."""

    def serves(self, dtype) -> bool:
        """Whether a kernel takes gate and up of a dtype."""
        return gated.GATED.decide(dtype).runs != "reference"

    def matches(self, execution: Execution, dtype) -> bool:
        """dtype: of gate and up."""
        return _may_gate(execution) and self.serves(dtype)

    def run(self, activation: str, gate_Tf: jax.Array, up_Tf: jax.Array) -> jax.Array:
        """`act(gate) * up`."""
        return gated.gated(gate_Tf, up_Tf, activation)


class GatedBackward:
    """A kernel computes the gradients of gate and up."""

    def serves(self, dtype) -> bool:
        """Whether a kernel takes gate, up and dz of a dtype."""
        return gated.GATED_BACKWARD.decide(dtype).runs != "reference"

    def matches(self, execution: Execution, dtype) -> bool:
        """dtype: of gate, up and dz."""
        return _may_gate(execution) and self.serves(dtype)

    def run(self, activation: str, gate_Tf, up_Tf, dz_Tf) -> tuple[jax.Array, jax.Array]:
        """dgate and dup."""
        return gated.gated_backward(gate_Tf, up_Tf, dz_Tf, activation)


class SlopeMVUE:
    """One pass over dY2 makes dY1, and packs its estimate along tokens for B4."""

    def matches(self, execution: Execution, saved_Tf: jax.Array, decision: Decision | None) -> bool:
        """Whether B4 takes a packed estimate of dY1, and one pass on this machine makes both.

        saved_Tf: Y2 or Y1, whichever the forward pass has saved.
        decision: for B4."""
        row, activation = execution.plan.row("B4"), execution.activation
        if not _estimates(row, "dy1") or activation not in SLOPES:
            return False
        # What is saved follows from the activation only where F2 multiplies the whole of Y2.
        if execution.plan.save_packed or ACTIVATED.matches(execution) or not decision.sparse:
            return False
        operands, implementation = (None, saved_Tf, saved_Tf), execution.implementation
        options = self._options(decision, execution)
        return SLOPE_MVUE_PACK.in_one_pass(*operands, **options, implementation=implementation)

    def run(
        self,
        decision: Decision,
        execution: Execution,
        saved_Tf: jax.Array,
        dy2_Tf: jax.Array,
        x_Td: jax.Array,
        key,
    ) -> tuple[jax.Array, Operands]:
        """Makes dY1, and the operands of B4.

        saved_Tf, decision: as in `matches`.
        key: of the call."""
        options = self._options(decision, execution) | {"implementation": execution.implementation}
        key = execution.draw_key("B4", key)
        dy1_Tf, packed = slope_mvue_pack24(key, saved_Tf, dy2_Tf, **options)
        return dy1_Tf, Operands(x_Td, packed, decision, dy1_Tf)

    def _options(self, decision: Decision, execution: Execution):
        exact = execution.plan.row("B4").by.exact
        return {
            "activation": execution.activation,
            "exact": exact,
            "compressed": decision.form == "compressed",
        }


class GatedMVUE:
    """One pass makes the gradients of gate and up, and packs their estimates along tokens for wgrad.

    It is taken where an implementation is named, or where it was measured to be faster than the steps."""

    def serves(self, dtype, exact: bool, implementation: str | None) -> bool:
        """Whether a kernel makes and packs exact, or approximate, estimates of a dtype.

        implementation: of the block."""
        like, options = jax.ShapeDtypeStruct((), dtype), {"exact": exact, "implementation": implementation}
        return gated.GATED_BACKWARD_PACK.in_one_pass(like, **options)

    def matches(self, execution: Execution, dtype, decisions: Iterable[Decision | None]) -> bool:
        """dtype: of the activations. decisions: for wgrad of gate and of up, which are packed in one form."""
        row = execution.plan.row("wgrad")
        if not _estimates(row, "dy"):
            return False
        if not (_may_gate(execution) and self.serves(dtype, row.by.exact, execution.implementation)):
            return False
        first, second = decisions
        return first.sparse and first == second

    def run(
        self, decision: Decision, execution: Execution, activation: str, x_Td, gate_Tf, up_Tf, dz_Tf, keys
    ):
        """Makes dgate, dup, and the operands of wgrad for each.

        decision: for both.
        keys: the keys of gate and of up."""
        row = execution.plan.row("wgrad")
        draw_keys = [execution.draw_key("wgrad", key) for key in keys]
        options = {"implementation": execution.implementation}
        if decision.form == "compressed":
            options = {"compressed": True, "implementation": "ffi"}
        dgate_Tf, dup_Tf, *packed = gated.gated_backward_pack(
            gate_Tf, up_Tf, dz_Tf, draw_keys, activation, row.by.exact, **options
        )
        operands = [
            Operands(x_Td, p, decision, dense) for p, dense in zip(packed, (dgate_Tf, dup_Tf), strict=True)
        ]
        return dgate_Tf, dup_Tf, operands


def any_gated(activation: str, dtype, implementation: str | None) -> bool:
    """Whether a rule of gated activations can match, for which one differentiation rule must cover the three
    products of the block.

    activation: by name.
    dtype: of the operands.
    implementation: of the block."""
    served = (GATED_MVUE.serves(dtype, exact, implementation) for exact in (True, False))
    return activation in GATES and any((GATED.serves(dtype), GATED_BACKWARD.serves(dtype), *served))


def _may_gate(execution: Execution) -> bool:
    """Whether kernels of gated activations know the activation of a block and may run in it."""
    return execution.activation in GATES and execution.implementation != "reference"


def _only_cut(row: Row) -> bool:
    """Whether a row makes its one operand sparse and does nothing else."""
    return row.other is None and not row.eight_bits


def _multiplies_24(execution: Execution, name: str, weight: str, decision: Decision | None) -> bool:
    """Whether our kernels are named, or a compressed operand was chosen by measurement, to multiply by a 2:4
    weight, and the product is no sum over a mesh."""
    row, forms = execution.plan.row(name), {None: "compressed", "ffi": "packed"}
    if not (row and row.operand == weight and _only_cut(row)) or execution.summed(name):
        return False
    # What is `multiplied` is dense values of a weight, see `UNPACKED`.
    sparse = row.by.pattern == "2:4" and not row.by.multiplied
    return sparse and decision.form == forms.get(execution.implementation)


def _estimates(row: Row | None, operand: str) -> bool:
    """Whether a row does nothing but to make this operand its MVUE, of groups of neighbours."""
    estimated = row is not None and isinstance(row.by, MVUE) and row.operand == operand and _only_cut(row)
    return estimated and row.tokens == "consecutive" and not row.gather_features


def dy1_in_one_pass(
    execution: Execution,
    dy3_Td: jax.Array,
    saved_Tf: jax.Array,
    decisions: Mapping[str, Decision | None],
) -> Sloped | SlopeMVUE | None:
    """The rule by which one pass makes dY1 where Y2 is not saved packed; None if no such pass does.

    saved_Tf: Y2 or Y1, whichever the forward pass has saved.
    decisions: of `Execution.decisions`, for the four products of the backward pass."""
    if SLOPED.matches(execution, dy3_Td, saved_Tf, decisions["B1"]):
        return SLOPED
    return SLOPE_MVUE if SLOPE_MVUE.matches(execution, saved_Tf, decisions["B4"]) else None


def from_saved(
    execution: Execution,
    saved: tuple[Packed, jax.Array | None],
    arrays,
    state,
    key,
    decisions: Mapping[str, Decision | None],
) -> tuple[Packed, dict[str, Operands], jax.Array | None, jax.Array | None]:
    """What the backward pass of an FFN gets from a saved packed Y2, by the rules that match.

    execution: of the call.
    saved: Y2 (T, f) and the counts of its non-zeros, int32 (f,), or None.
    arrays: "x", "w1", "w2" and "dy3".
    state, key: of the call.
    decisions: of `Execution.decisions`, for the four products of the backward pass.

    Returns: dY1 on the support of Y2, packed; the operands of B2 and B4 that a fused pass makes, by product;
        the features that stay dense, and the counts by which they are chosen, each None where there are none.
    """
    y2, counts_f = saved
    x_Td, dy3_Td = arrays["x"], arrays["dy3"]
    if SAVED_24.matches(execution, y2, decisions):
        dy2_Tf = product(execution, "B1", arrays, state, key, decisions["B1"])
        return *SAVED_24.run(decisions, execution, y2, counts_f, dy2_Tf, x_Td, dy3_Td), counts_f
    dy1, operands = _dy1_at_saved(execution, y2, arrays, state, key, decisions["B1"]), {}
    for name, packed, dense_Td in (("B2", y2, dy3_Td), ("B4", dy1, x_Td)):
        if SAVED_VNM.matches(execution, name, y2, decisions[name]):
            operands[name] = SAVED_VNM.run(decisions[name], execution, name, packed, dense_Td)
    return dy1, operands, None, counts_f


def _dy1_at_saved(
    execution: Execution, saved: Packed, arrays, state, key, decision: Decision | None
) -> Packed:
    """dY1 on the support of a saved Y2: B1, by the rule that matches, times the slope of the activation."""
    if SAMPLED_B1.matches(execution, arrays["dy3"], arrays["w2"], decision):
        dy2 = SAMPLED_B1.run(execution, saved, arrays, state, key)
    else:
        dy2_Tf = product(execution, "B1", arrays, state, key, decision)
        dy2 = gather(dy2_Tf, saved, execution.implementation)
    return with_values(saved, sloped(saved.values, dy2, execution.activation))


EIGHT_BITS = EightBits()
BOTH_WAYS = BothWays()
UNPACKED = Unpacked()
SQUARED = Squared()
SLOPED = Sloped()
ACTIVATED = Activated()
COUNTS = Counts()
SHARED_FEATURES = SharedFeatures()
SAMPLED_B1 = SampledB1()
SAVED_24 = Saved24()
SLOPE_MVUE = SlopeMVUE()
SAVED_VNM = SavedVNM()
GATED = Gated()
GATED_BACKWARD = GatedBackward()
GATED_MVUE = GatedMVUE()
MEASURED = (SAMPLED_B1,)
assert len({rule.name for rule in MEASURED}) == len(MEASURED), "fusions.MEASURED: two rules of one product"
