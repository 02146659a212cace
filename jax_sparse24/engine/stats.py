"""Statistics of an FFN's activations, and of what sparse products drop of them."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_sparse24.engine.call import check_bias, check_state, cut_over_mesh, in_shards, plan_of, prepare
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.ffn import ffn_fwd
from jax_sparse24.engine.fusions import DENSE, product
from jax_sparse24.engine.operand import ACTIVATIONS, check_activation
from jax_sparse24.engine.pieces import whole
from jax_sparse24.ops.features import densest
from jax_sparse24.ops.order import inverse_of, permute


def saved_bytes(method, shape: tuple[int, int, int], dtype) -> int:
    """Bytes of activations that `sparse_ffn` with squared ReLU saves for its backward pass besides its input.

    They are those of Y1, or of the packed Y2 without the counts of its non-zeros that CUDA adds, 4 bytes per
    feature.

    method: from `s24.methods`.
    shape: (T, d, f): tokens, model width and FFN width.
    dtype: of the activations.

    Returns: int, bytes."""
    T, d, f = shape
    x, w1, w2 = (jax.ShapeDtypeStruct(s, dtype) for s in ((T, d), (d, f), (f, d)))
    state = {role: method.state_shapes(w.shape, role) for role, w in (("w1", w1), ("w2", w2))}
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    execution = Execution("saved_bytes", "ffn", method.ffn_plan(), "reference", "squared_relu")
    _, (_, saved, *_) = jax.eval_shape(partial(ffn_fwd, execution), x, w1, w2, None, None, state, key)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))


def activation_stats(
    x: jax.typing.ArrayLike,
    w1: jax.typing.ArrayLike,
    method: Any,
    state: Mapping[str, Mapping[str, jax.Array]] | None = None,
    key: jax.typing.ArrayLike | None = None,
    *,
    b1: jax.typing.ArrayLike | None = None,
    activation: str = "squared_relu",
    specs: Mapping[str, PartitionSpec] | None = None,
) -> dict[str, jax.Array]:
    """How sparse the activations of `sparse_ffn` are, and which share of them its sparse products drop.

    x, w1, method, key, b1, activation: as in `sparse_ffn`.
    specs: as in `sparse_ffn`, of "x" and "w1"; every device then counts its own activations.
    state: {"w1": method.init(w1, "w1")}, if the method has state.

    Returns: a dict of float32 scalars. "density" is the share of non-zeros of Y2. For each product with a
        sparse Y2 (F2 along features, B2 along tokens), "F2_lost" and "B2_lost" are the share of the non-zeros
        given to it that it drops, and "F2_lost_energy" and "B2_lost_energy" the share of their squares. B2 is
        given what F2 kept, if the plan saves the packed Y2; features that stay dense in it lose nothing. With
        MVUE, which scales what it keeps, the energy is the relative squared error.
    Raises: as `sparse_ffn`."""
    check_activation("activation_stats", activation)
    plan = plan_of("activation_stats", method, "ffn_plan")
    tokens, (w1,), state, key = prepare("activation_stats", plan, None, state, key, x, w1=w1)
    check_state("activation_stats", method, {"w1": state.get("w1", {})}, w1=w1)
    b1 = check_bias("activation_stats", "b1", b1, "w1", w1)
    states = {"w1": state.get("w1", {})}
    cut = cut_over_mesh("activation_stats", "ffn", method, specs, states, x=x, w1=w1)
    operands = {"x": tokens, "w1": w1, "b1": b1}
    key, operands, states = in_shards("activation_stats", cut, key, operands, states)
    execution = Execution("activation_stats", "ffn", plan, None, activation, cut)

    def body(arrays, states, key, _):
        return {}, _sums(execution, method, arrays, states, key)

    _, sums = execution.run(body, operands, states, key, results=[])
    if cut is not None:  # numbers of every block, one after the other of every shard
        sums = jax.tree.map(jnp.sum, sums)
    least = {"density": 0, "lost": 1, "energy": 1e-30}  # of the denominators
    return {name: part / jnp.maximum(of, least[name.split("_")[-1]]) for name, (part, of) in sums.items()}


def _sums(execution: Execution, method, arrays, state, key) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Of the statistics of one block of tokens: the numerators and the denominators."""
    plan, activation, (tokens, w1) = execution.plan, execution.activation, (arrays["x"], arrays["w1"])
    route = method.router.route(tokens, whole(w1), whole(state["w1"])) if method.router else None
    real = jnp.ones((tokens.shape[0], 1), bool)
    if route is not None:
        back = inverse_of(route.order, tokens.shape[0])
        tokens, real = (permute(x, route.order, back) for x in (tokens, real))
    shapes = {"x": tokens.shape, "w1": w1.shape}
    decision = execution.decisions(["F1"], shapes, tokens.dtype)["F1"]
    first = {"x": tokens, "w1": w1}
    y1_Tf = product(execution, "F1", first, state, key, decision, bias=arrays.get("b1"))
    y2_Tf = jnp.where(real, ACTIVATIONS[activation](y1_Tf), 0)
    non_zeros = jnp.sum(y2_Tf != 0, dtype=jnp.float32)
    sums = {"density": (non_zeros, jnp.sum(real, dtype=jnp.float32) * y2_Tf.shape[1])}
    given, allowed = y2_Tf, None if route is None else route.allowed
    alone = tuple((name, dataclasses.replace(row, other=None)) for name, row in plan.rows)
    execution = dataclasses.replace(execution, plan=dataclasses.replace(plan, rows=alone))
    over = execution.partition.tokens if execution.partition else ()
    for name in ("F2", "B2"):
        row = plan.row(name)
        if row is None or row.operand != "y2":
            continue
        arrays = {"y2": given, "w2": given.T, "dy3": given}  # only their shapes matter but for y2
        kept = execution.cut(name, arrays, state, key, DENSE, allowed=allowed).left
        uncut = row.arranged(given)
        if row.dense_share:
            features = densest(uncut, row.dense_share, row.rank, over=over)
            kept = kept.at[:, features].set(uncut[:, features])
        lost = jnp.sum((uncut != 0) & (kept == 0), dtype=jnp.float32)
        sums[f"{name}_lost"] = lost, jnp.sum(given != 0, dtype=jnp.float32)
        sums[f"{name}_lost_energy"] = _energy(uncut - kept), _energy(given)
        given = kept if plan.save_packed else y2_Tf
    return sums


def _energy(x):
    return jnp.sum(jnp.square(x.astype(jnp.float32)))
