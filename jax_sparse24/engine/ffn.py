"""The engine of a feed-forward block: `Y3 = act(X W1) W2` and its gradients under one `custom_vjp` that
executes a plan of six products."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jax_sparse24.dispatch.shards import with_tokens_of
from jax_sparse24.engine import fusions
from jax_sparse24.engine.call import check_bias, check_state, cut_over_mesh, in_shards, plan_of, prepare
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.fusions import product
from jax_sparse24.engine.linear import over_tokens
from jax_sparse24.engine.operand import ACTIVATIONS, check_activation
from jax_sparse24.engine.pieces import whole
from jax_sparse24.engine.plan import FFN
from jax_sparse24.ops.order import inverse_of
from jax_sparse24.ops.reference.saved import SLOPES
from jax_sparse24.ops.reference.slope import gives_input, input_of
from jax_sparse24.patterns import GROUP


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(execution: Execution, x_Td, w1_df, w2_fd, b1_f, allowed_Tf, state, key):
    """Without a gradient any number of tokens will do: rows of zeros fill the last block of tokens."""

    def body(arrays, state, key, _):
        x_Td, allowed_Tf = arrays["x"], arrays.get("allowed")
        T, row = x_Td.shape[0], fusions.ACTIVATED.row(execution.plan)
        missing = 0 if row is None else -T % row.by.rows
        if missing:
            arrays = {**arrays, "x": jnp.pad(x_Td, ((0, missing), (0, 0)))}
        if missing and allowed_Tf is not None:
            arrays["allowed"] = jnp.pad(allowed_Tf, ((0, missing), (0, 0)))
        return {"y3": _forward(execution, ["F1", "F2"], arrays, state, key)[0][:T]}, None

    operands = {"x": x_Td, "w1": w1_df, "w2": w2_fd, "b1": b1_f, "allowed": allowed_Tf}
    return execution.run(body, operands, state, key, results=["y3"])[0]["y3"]


def _forward(execution, products, arrays, state, key):
    """Y3, what the backward pass needs of the activations, and `Ahead`. products: those that are decided.

    Of the activations that is the packed Y2 with the counts of its non-zeros, which are None if nothing has
    counted them; or Y2 where F2 multiplies the whole of it and Y1 follows from it, so that not both are kept;
    or Y1."""
    x_Td, w1_df, w2_fd = (arrays[name] for name in ("x", "w1", "w2"))
    (T, d), (f, out) = x_Td.shape, w2_fd.shape
    shapes = {"x": (T, d), "w1": (d, f), "w2": (f, out), "y2": (T, f), "dy1": (T, f), "dy3": (T, out)}
    execution.check(products, shapes)
    decisions = execution.decisions(products, shapes, x_Td.dtype)
    first, b1_f, saves_y2 = {"x": x_Td, "w1": w1_df}, arrays.get("b1"), _saves_y2(execution, x_Td.dtype)
    squared = saves_y2 and fusions.SQUARED.matches(execution, x_Td, f, decisions["F1"], b1_f)
    options = {"bias": b1_f, "squared": squared}  # squared: what is called Y1 here is Y2
    y1_Tf, weights = fusions.forward(execution, ("F1", "B3"), first, state, key, decisions, **options)
    if not fusions.ACTIVATED.matches(execution):
        y2_Tf = y1_Tf if squared else ACTIVATIONS[execution.activation](y1_Tf)
        second = {"y2": y2_Tf, "w2": w2_fd}
        y3_Td, more = fusions.forward(execution, ("F2", "B1"), second, state, key, decisions)
        saved = y2_Tf if saves_y2 else y1_Tf
        seen = execution.seen(["F1", "F2"], {**first, **second})
        return y3_Td, saved, fusions.Ahead(decisions, weights | more, seen)
    allowed = arrays.get("allowed")
    operands = fusions.ACTIVATED.run(decisions["F2"], execution, y1_Tf, w2_fd, state, key, allowed)
    y3_Td = execution.multiply("F2", operands)
    saved = (operands.left, operands.counts) if execution.plan.save_packed else y1_Tf
    return y3_Td, saved, fusions.Ahead(decisions, weights, execution.seen(["F1"], first))


def _saves_y2(execution: Execution, dtype) -> bool:
    """Whether the backward pass gets the whole Y2 in place of Y1."""
    return not fusions.ACTIVATED.matches(execution) and gives_input(execution.activation, dtype)


def ffn_fwd(execution, x_Td, w1_df, w2_fd, b1_f, allowed_Tf, state, key):
    """Y3 and the residuals of the backward pass."""

    def body(arrays, state, key, _):
        y3_Td, saved, ahead = _forward(execution, FFN, arrays, state, key)
        return {"y3": y3_Td}, (saved, ahead)

    operands = {"x": x_Td, "w1": w1_df, "w2": w2_fd, "b1": b1_f, "allowed": allowed_Tf}
    found, (saved, ahead) = execution.run(body, operands, state, key, results=["y3"])
    w1_df, w2_fd = (None if name in ahead.weights else operands[name] for name in ("w1", "w2"))
    return found["y3"], (x_Td, saved, ahead, w1_df, w2_fd, b1_f, state, key)


def _ffn_bwd(execution, residuals, dy3_Td):
    x_Td, saved, ahead, w1_df, w2_fd, b1_f, state, key = residuals

    def body(arrays, state, key, saved):
        saved, ahead = saved
        decisions, arrays = ahead.decisions, arrays | ahead.weights
        if execution.plan.save_packed:
            dy1, operands, features, counts_f = fusions.from_saved(
                execution, saved, arrays, state, key, decisions
            )
            arrays["y2"] = saved[0].todense(implementation=execution.implementation)
            arrays["dy1"] = dy1.todense(implementation=execution.implementation)
        else:
            dy1, operands, features, counts_f = None, {}, None, None
            y2_given = _saves_y2(execution, saved.dtype)
            y1_Tf = input_of(saved, execution.activation) if y2_given else saved
            y2_Tf, activation_vjp = jax.vjp(ACTIVATIONS[execution.activation], y1_Tf)
            arrays["y2"] = saved if y2_given else y2_Tf
            rule = fusions.dy1_in_one_pass(execution, arrays["dy3"], saved, decisions)
            b1 = execution, "B1", arrays, state, key, decisions["B1"]
            if rule is fusions.SLOPED:
                arrays["dy1"] = fusions.SLOPED.run(execution, fusions.operands_of(*b1), saved)
            elif rule is fusions.SLOPE_MVUE:
                arrays["dy1"], operands["B4"] = fusions.SLOPE_MVUE.run(
                    decisions["B4"], execution, saved, product(*b1), arrays["x"], key
                )
            else:
                (arrays["dy1"],) = activation_vjp(product(*b1))
        if features is None and fusions.SHARED_FEATURES.matches(execution):
            features = fusions.SHARED_FEATURES.run(execution, arrays["y2"], counts_f)

        def run(name, **options):
            return product(execution, name, arrays, state, key, decisions[name], **options)

        found = {
            "w2": run("B2", features=features, operands=operands.get("B2")),
            "x": run("B3", saved=dy1),
            "w1": run("B4", features=features, operands=operands.get("B4")),
        }
        if "b1" in arrays:
            found["b1"] = over_tokens(arrays["dy1"], arrays["b1"])
        if execution.plan.observes:
            found["seen"] = {**ahead.seen, **execution.seen(["B1", "B3"], arrays)}
        return found, None

    operands = {"x": x_Td, "w1": w1_df, "w2": w2_fd, "b1": b1_f, "dy3": dy3_Td}
    results = ["x", "w1", "w2", *["b1"] * (b1_f is not None), *["seen"] * execution.plan.observes]
    found, _ = execution.run(body, operands, state, key, (saved, ahead), results=results)
    observed = execution.observation(found["seen"], state) if "seen" in found else None
    return found["x"], found["w1"], found["w2"], found.get("b1"), None, observed, None


_ffn.defvjp(ffn_fwd, _ffn_bwd)


def _routed(execution: Execution, router, x_Td, w1_df, state):
    """The order of the tokens, its inverse, and what they may keep; of a cut call, within each shard."""

    def body(arrays, state, key, _):
        route = router.route(arrays["x"], whole(arrays["w1"]), whole(state["w1"]))
        found = {"order": route.order, "back": inverse_of(route.order, arrays["x"].shape[0])}
        return found if route.allowed is None else {**found, "allowed": route.allowed}, None

    results = ["order", "back", *(["allowed"] if router.chooses else [])]
    operands, states = jax.lax.stop_gradient(({"x": x_Td, "w1": w1_df}, {"w1": state}))
    found, _ = execution.run(body, operands, states, None, results=results)
    return found["order"], found["back"], found.get("allowed")


def check_fits(op: str, method, activation: str) -> None:
    """Raises ValueError for an activation that is unknown, or with which the method cannot be differentiated.

    op: the operation or layer, for the message.
    method: from `s24.methods`.
    activation: its name."""
    check_activation(op, activation)
    if method.ffn_plan().save_packed and activation not in SLOPES:
        raise ValueError(
            f"{op}: {method} saves the packed activations for the backward pass, which needs an activation "
            f"whose slope follows from its value: {', '.join(SLOPES)}, not {activation!r}."
        )


def check_widths(op: str, method, d: int, f: int) -> None:
    """Raises ValueError if the plan's patterns do not divide the widths of a block.

    The number of tokens is not checked, because it is not known when a layer is constructed.

    op: the layer, for the message.
    method: from `s24.methods`.
    d, f: model and FFN width."""
    plan = method.ffn_plan()
    cuts = [by for _, row in plan.rows for by in (row.by, row.other) if by is not None]
    sizes = (int(size) for by in cuts for size in (*by.pattern.split(":"), by.group))
    T = math.lcm(GROUP, method.token_multiple, *sizes)
    shapes = {"x": (T, d), "w1": (d, f), "w2": (f, d), "y2": (T, f), "dy1": (T, f), "dy3": (T, d)}
    Execution(op, "ffn", plan, None).check(FFN, shapes)


def sparse_ffn(
    x: jax.typing.ArrayLike,
    w1: jax.typing.ArrayLike,
    w2: jax.typing.ArrayLike,
    method: Any,
    state: Mapping[str, Mapping[str, jax.Array]] | None = None,
    key: jax.typing.ArrayLike | None = None,
    *,
    b1: jax.typing.ArrayLike | None = None,
    activation: str = "squared_relu",
    implementation: str | None = None,
    specs: Mapping[str, PartitionSpec] | None = None,
) -> jax.Array:
    """`act(x @ w1 + b1) @ w2` with the sparse products of `method`, under one differentiation rule.

    Dtypes and differentiation are those of `sparse_dot`.

    x: (..., d); float32, bfloat16 or float16 (float64 by the reference).
    w1, w2: (d, f) and (f, d'), dense weights.
    method: from `s24.methods`.
    state: `{"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}`, if the method has state.
    key: as in `sparse_dot`.
    b1: (f,) or None.
    activation: "squared_relu", "relu", "gelu" or "silu".
    implementation: None to choose, or "reference", "ffi" or "cusparselt".
    specs: as in `sparse_dot`, of "x", "w1" and "w2", such as {"x": P("dp"), "w1": P(None, "tp"),
        "w2": P("tp", None)}.

    Returns: (..., d') in the promoted dtype of x, w1 and w2.
    Raises: as `sparse_dot`, and ValueError for an activation that the method cannot use."""
    plan = plan_of("sparse_ffn", method, "ffn_plan")
    check_fits("sparse_ffn", method, activation)
    tokens, (w1, w2), state, key = prepare("sparse_ffn", plan, implementation, state, key, x, w1=w1, w2=w2)
    b1 = check_bias("sparse_ffn", "b1", b1, "w1", w1)
    check_state("sparse_ffn", method, state, w1=w1, w2=w2)
    cut = cut_over_mesh("sparse_ffn", "ffn", method, specs, state, x=x, w1=w1, w2=w2)
    operands = {"x": tokens, "w1": w1, "w2": w2, "b1": b1}
    key, operands, state = in_shards("sparse_ffn", cut, key, operands, state)
    tokens, w1, w2, b1 = (operands[name] for name in ("x", "w1", "w2", "b1"))
    execution = Execution("sparse_ffn", "ffn", plan, implementation, activation, cut)
    if not (method.router and method.router.sorts and tokens.size):
        out = _ffn(execution, tokens, w1, w2, b1, None, state, key)
    else:
        order, back, allowed = _routed(execution, method.router, tokens, w1, state["w1"])
        out = _ffn(execution, execution.permute("x", tokens, order, back), w1, w2, b1, allowed, state, key)
        out = execution.permute("y3", out, back, order)
    y = with_tokens_of(out.reshape(*jnp.shape(x)[:-1], w2.shape[1]), x)
    return checkpoint_name(y, "s24_ffn")
