"""Executes one product of a plan: makes its sparse operand, then multiplies."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch.decision import Decision, decide, float8_sums
from jax_sparse24.dispatch.product import Product
from jax_sparse24.engine.float8 import seen, unscaled
from jax_sparse24.engine.operand import Operands, Packed, Request
from jax_sparse24.engine.partition import Partition, draw_key, permute_shards
from jax_sparse24.engine.pieces import Pieces, own_pieces, whole
from jax_sparse24.engine.plan import FFN, LINEAR, WEIGHT_GRADIENTS, Plan, Row
from jax_sparse24.ops.compressed24 import Compressed24, compress
from jax_sparse24.ops.features import ASCENDING, densest, set_columns
from jax_sparse24.ops.matmul import PACKED, contract
from jax_sparse24.ops.order import collect, permute, regroup
from jax_sparse24.ops.packed_vnm import PackedVNM
from jax_sparse24.patterns import key_of


@dataclasses.dataclass(frozen=True)
class Execution:
    """What all products of one call share.

    It is static, so that it can be an argument of `custom_vjp` that is not differentiated.

    op: the public function, for messages.
    products: "linear" or "ffn", the table that names the products.
    plan: of the method.
    implementation: as the caller named it, or None.
    activation: of an FFN, by name.
    partition: how the call is cut over a mesh; None where nothing is cut.
    joined: products that are left to be summed over shards by the caller, with others."""

    op: str
    products: str
    plan: Plan
    implementation: str | None
    activation: str = ""
    partition: Partition | None = None
    joined: tuple[str, ...] = ()

    def run(self, body, arrays: Mapping[str, jax.Array | None], state, key, saved=None, *, results):
        """Runs the body of a differentiation rule, on the shards of every device if the call is cut.

        body, state, key, saved, results: see `Partition.run`.
        arrays: the operands by name; those that are None are left out.

        Returns: as `body`."""
        arrays = {name: x for name, x in arrays.items() if x is not None}
        if self.partition is None:
            return body(arrays, state, key, saved)
        options = {"results": results, "gradient_mask": self.plan.gradient_mask}
        return self.partition.run(body, arrays, state, key, saved, **options)

    def permute(self, name: str, x_Tn: jax.Array, order_R: jax.Array, inverse_T: jax.Array) -> jax.Array:
        """Tokens in another order, see `ops.order.permute`; of a cut call, within each shard.

        name: of the operand.
        x_Tn: the operand.
        order_R, inverse_T: the order and its inverse, with the places of each shard's own tokens."""
        if self.partition is None:
            return permute(x_Tn, order_R, inverse_T)
        return permute_shards(self.partition, name, x_Tn, order_R, inverse_T)

    def layer(self, name: str) -> "Execution":
        """The execution of one layer of a gated block, within the body of its rule.

        name: "gate", "up" or "down"."""
        return (
            self
            if self.partition is None
            else dataclasses.replace(self, partition=self.partition.layer(name))
        )

    @property
    def table(self) -> Mapping[str, Any]:
        return LINEAR if self.products == "linear" else FFN

    def check(self, products, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError before any kernel runs if a sparse operand does not divide into groups.

        products: names of the products to check.
        shapes: of their operands, by name."""
        for name in products:
            row = self.plan.row(name)
            if row is None:
                continue
            for operand, axis in self.table[name]:
                by = row.by if operand == row.operand else row.other
                if by is None:
                    continue
                what = f"operand {operand} of product {name}"
                if self.partition is None:
                    by.check(self.op, shapes[operand], axis, what)
                    continue
                try:
                    by.check(self.op, shapes[operand], axis, f"{what}, one shard of it,")
                except ValueError as error:
                    cut = self.partition.shard_text(operand, shapes[operand])
                    raise ValueError(f"{error}{cut}") from error

    def states(self, state) -> Mapping[str, Mapping[str, jax.Array]]:
        """The method's state by operand."""
        return state if self.products == "ffn" else {"w": state}

    def state_of(self, operand: str, row: Row, state) -> Mapping[str, jax.Array]:
        """The state for an operand of a product: its own, or, of what is no weight, that of the weight.

        operand: its name.
        row: of the product.
        state: of the call."""
        states = self.states(state)
        return states.get(operand, states.get(row.operand, {}))

    def seen(self, products: Iterable[str], arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """What the histories of the plan observe in a call, on this shard.

        products: names of products.
        arrays: their operands by name.

        Returns: float32 (256,) for each product with a history, by its name, see `float8.seen`."""
        found = {}
        for name in products:
            row = self.plan.row(name)
            if row is not None and row.history:
                (operand,) = (operand for operand, _ in self.table[name] if operand != row.operand)
                found[name] = seen(arrays[operand])
        return found

    def observation(self, found: Mapping[str, jax.Array], state):
        """The gradient of the state, which is what its histories have observed.

        found: as `seen` returned it, summed over shards.
        state: of the call.

        Returns: a tree like the state, with None where nothing is observed."""
        states = {operand: dict.fromkeys(own) for operand, own in self.states(state).items()}
        for name, observed in found.items():
            row = self.plan.row(name)
            states[row.operand][row.history] = observed
        return states if self.products == "ffn" else states["w"]

    def draw_key(self, name: str, key) -> jax.Array:
        """The PRNG key of the random numbers that one product draws; `key` is that of the call.

        A shard of the operand that is made sparse draws what the whole operand would draw there."""
        key = jax.random.fold_in(key_of(key), list(self.table).index(name))
        return draw_key(self.products, self.partition, key, self.plan.row(name).operand)

    def summed(self, name: str) -> tuple[str, ...]:
        """The mesh axes over which the result of a product that contracts no tokens is to be summed."""
        operand, axis = self.table[name][0]
        if self.partition is None or name in (*WEIGHT_GRADIENTS, *self.joined):
            return ()
        return self.partition.over(operand, axis)

    def decisions(
        self, products: Iterable[str], shapes: Mapping[str, tuple[int, ...]], dtype
    ) -> dict[str, Decision | None]:
        """Decides what runs products of the call, for the whole of each product.

        A product can be replaced by a part of it, which a rule of `fusions.MEASURED` compares with the
        decision made here.

        products: their names.
        shapes: of their operands, by name.
        dtype: of the operands.

        Returns: a decision by product, None for one whose operands both stay as they are."""
        return {name: self._decision(name, shapes, jnp.dtype(dtype)) for name in products}

    def _decision(self, name: str, shapes, dtype) -> Decision | None:
        row = self.plan.row(name)
        if row is None:
            return None
        (a, a_axis), (b, b_axis) = self.table[name]
        left, right = shapes[a], shapes[b]
        sizes = (left[-3 - a_axis], left[a_axis], right[-3 - b_axis])
        side = "left" if row.operand == a else "right"
        product = Product((a_axis, b_axis), side, dtype, sizes, row.by.pattern)
        options = {"forms": row.by.forms, "eight_bits": row.eight_bits}
        # With V:N:M a dense product of Y2, which is saved packed, or of dY1, which is made at its entries,
        # would unpack them and mask them anew along tokens. With 2:4 dY1 is dense, and F2 alone unpacks.
        unpacked = self.plan.save_packed and (name == "F2" or row.by.pattern != "2:4")
        alternative = "masked" if unpacked else "dense"
        return decide(product, implementation=self.implementation, alternative=alternative, **options)

    def cut(
        self,
        name: str,
        arrays: Mapping[str, jax.Array],
        state,
        key,
        decision: Decision | None,
        *,
        activation: str = "",
        packed: bool = False,
        counts: bool = False,
        saved: Packed | None = None,
        allowed: jax.Array | None = None,
    ) -> Operands:
        """The operands of a product, made sparse as its row of the plan says.

        name: of the product.
        arrays: its operands by name: 2-D arrays, `Pieces` of weights, or weights packed in the forward pass,
            which are multiplied as they are if that is along the contracted axis, else unpacked.
        state, key: of the call.
        decision: of `decisions`; None for a product without a row.
        activation, counts, saved, allowed: see `Request`.
        packed: whether the sparse operand is packed, whatever multiplies it.

        Returns: `Operands`.
        Raises: ValueError if a sparsifier packed along another axis than the contracted one."""
        (a, a_axis), (b, b_axis) = self.table[name]
        row = self.plan.row(name)
        if row is None:
            return Operands(whole(arrays[a]), whole(arrays[b]))
        on_left = row.operand == a
        axis, other, other_axis = (a_axis, b, b_axis) if on_left else (b_axis, a, a_axis)
        x, y, states = arrays[row.operand], arrays[other], self.states(state)
        if row.by.stochastic:
            key = self.draw_key(name, key)
        form = "packed" if packed and not decision.sparse else decision.form
        strided = row.strides and form != "dense"
        moves = row.other is not None or isinstance(y, PACKED) or isinstance(x, (*PACKED, Pieces))
        in_place = strided and decision.reads_strided and not moves
        if isinstance(y, PACKED):
            y = self._unpacked(y, row)
        else:
            y = whole(y) if in_place else regroup(whole(y), row.tokens, row.by.group)
            if row.other is not None:
                own = whole(self.state_of(other, row, state))
                y = row.other(y, other_axis, self.request(other, own, key))
        if isinstance(x, PACKED):
            sparse = x if x.axis == axis else x.todense(implementation=self.implementation)
            return Operands(*((sparse, y) if on_left else (y, sparse)), decision)
        if isinstance(x, Pieces) and row.by.piecewise(x.piece.shape, axis):
            own = own_pieces(states.get(row.operand, {}))
            request = self.request(row.operand, own, key, form="dense" if form == "dense" else "packed")
            sparse = x.joined(row.by(x.piece, axis, request))
            if form == "compressed":
                sparse = Compressed24(compress(sparse), sparse.metadata, sparse.axis)
            return Operands(*((sparse, y) if on_left else (y, sparse)), decision)
        x = whole(x)
        request = self.request(
            row.operand,
            whole(states.get(row.operand, {})),
            key,
            form=form,
            activation=activation,
            strided=strided,
            counts=counts,
            saved=saved,
            allowed=allowed,
        )
        sparse, found = row.by(x if strided else row.arranged(x), axis, request), None
        if counts:
            sparse, found = sparse
        if isinstance(sparse, PACKED) and sparse.axis != axis:
            raise ValueError(
                f"{self.op}: {row.by} packed operand {row.operand} of product {name} along axis "
                f"{sparse.axis}; the product contracts axis {axis}."
            )
        pair = (sparse, y) if on_left else (y, sparse)
        return Operands(*pair, decision, x, counts=found, strided=in_place)

    def _unpacked(self, packed: Packed, row: Row) -> jax.Array:
        """The values of a packed weight, which the sparse operand of a row is multiplied by.

        Kernels of V:N:M read them with the contracted axis, the last one, first in memory."""
        options = {"implementation": self.implementation}
        if row.by.pattern == "2:4":
            return packed.todense(**options)
        return dataclasses.replace(packed, axis=-3 - packed.axis).todense(**options).T

    def request(self, operand: str, state, key, **options) -> Request:
        """What a sparsifier is asked to make of an operand, whose other pieces are gathered where it rests in
        pieces.

        operand: its name.
        state: of the method, of this operand.
        key: of the draws.
        options: other fields of `Request`."""
        if self.partition:
            options["cuts"] = self.partition.over(operand, -2), self.partition.over(operand, -1)
        return Request(state, key, self.implementation, **options)

    def dense_features(self, row: Row, x: jax.Array, counts: jax.Array | None = None) -> jax.Array:
        """The features of a row's operand that stay dense.

        row: of the plan, with a `dense_share`.
        x: the operand, (T, f).
        counts: int32 (f,), the non-zeros of each feature; None to count them here.

        Returns: int32 (k,), ascending."""
        # The number of non-zeros of a feature does not depend on the order of tokens.
        x = x if row.rank == "density" else regroup(x, row.tokens, row.by.group)
        over = self.partition.tokens if self.partition else ()
        return densest(x, row.dense_share, row.rank, self.implementation, counts, over=over)

    def multiply(
        self, name: str, operands: Operands, features: jax.Array | None = None, bias=None
    ) -> jax.Array:
        """The product of two operands, summed over the shards of its contracted axis.

        A gradient of a weight is not summed here but where it leaves the shards, see `Partition.run`.

        name: of the product.
        operands: as `cut` made them.
        features: int32 (k,), the features that stay dense; None to choose them here.
        bias: added to a product that does not contract tokens, along the free axis of its right operand; or
            None.

        Returns: a 2-D array of the operands' dtype."""
        if over := self.summed(name):
            whole = dataclasses.replace(self, partition=None)
            out = jax.lax.psum(whole.multiply(name, operands, features), over)
            return out if bias is None else out + bias
        (a, a_axis), (_, b_axis) = self.table[name]
        left, right, decision = operands.left, operands.right, operands.decision
        row = self.plan.row(name)
        in_place = isinstance(left, PackedVNM) and not operands.scales  # the product puts its rows back
        collected = in_place and row is not None and row.gather_features
        if operands.scales:
            dtype = operands.uncut.dtype
            sums = float8_sums(dtype)
            out = contract(left, right, a_axis, b_axis, decision=decision, out_dtype=sums)
            out = unscaled(out, *operands.scales).astype(dtype)
        else:
            fused = None if isinstance(left, PACKED) else bias
            options = {"bias": fused, "strided": operands.strided, "collected": collected}
            out = contract(left, right, a_axis, b_axis, decision=decision, **options)
            bias = bias if fused is None else None
        if bias is not None:
            out = out + bias
        if row is None:
            return out
        on_left = row.operand == a
        if row.gather_features and not collected:
            out = collect(out, row.by.group, -2 if on_left else -1)
        if row.dense_share:
            if features is None:
                features = self.dense_features(row, operands.uncut)
            few, few_axis = operands.dense_features, -1
            if few is None:
                few = jnp.take(
                    operands.uncut, features, axis=1, mode="clip"
                )  # clipping is faster than a check
                if not operands.strided:
                    # Without the barrier one pass would gather and move, and a GPU would read elements.
                    few = regroup(jax.lax.optimization_barrier(few), row.tokens, row.by.group)
                few_axis = -2
            elif operands.strided:
                few = collect(few, few.shape[-1] // row.by.group, -1)
            if on_left:
                out = out.at[features].set(contract(few, right, few_axis, b_axis), **ASCENDING)
            else:
                out = set_columns(out, features, contract(left, few, a_axis, few_axis))
        return out

    def masked_gradient(self, name: str, out: jax.Array, state) -> jax.Array:
        """The result of a product, zero outside the plan's gradient mask if it is a weight's gradient.

        name: of the product.
        out: its result.
        state: of the call."""
        if not self.plan.gradient_mask or name not in WEIGHT_GRADIENTS:
            return out
        mask = self.states(state)[WEIGHT_GRADIENTS[name]][self.plan.gradient_mask]
        if isinstance(mask, Pieces):  # the piece of the sum is masked, see `Partition.run`
            return out
        return jnp.where(mask, out, jnp.zeros_like(out))
