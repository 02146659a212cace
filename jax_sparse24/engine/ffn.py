"""The engine of a feed-forward block: `Y3 = act(X W1) W2` and its gradients under one `custom_vjp` that
executes a plan of six products."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_sparse24.engine import fusions
from jax_sparse24.engine.call import check_bias, check_state, plan_of, prepare
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.fusions import product
from jax_sparse24.engine.linear import over_tokens
from jax_sparse24.engine.operand import ACTIVATIONS, check_activation
from jax_sparse24.engine.plan import FFN
from jax_sparse24.ops.order import inverse_of, permute
from jax_sparse24.ops.reference.saved import SLOPES
from jax_sparse24.patterns import GROUP


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(run: Execution, x_Td, w1_df, w2_fd, b1_f, allowed_Tf, state, key):
    return _forward(run, x_Td, w1_df, w2_fd, b1_f, allowed_Tf, state, key)[0]


def _forward(run, x_Td, w1_df, w2_fd, b1_f, allowed_Tf, state, key):
    """Y3, and what the backward pass needs of the activations: Y1, or the packed Y2 and the counts of its
    non-zeros, None if it is to count them itself."""
    T, f = x_Td.shape[0], w1_df.shape[1]
    run.check(["F1", "F2"], {"x": x_Td.shape, "w1": w1_df.shape, "y2": (T, f), "w2": w2_fd.shape})
    y1_Tf = product(run, "F1", {"x": x_Td, "w1": w1_df}, state, key, bias=b1_f)
    row = run.plan.row("F2")
    if row is None or row.operand != "y2":
        arrays = {"y2": ACTIVATIONS[run.activation](y1_Tf), "w2": w2_fd}
        return product(run, "F2", arrays, state, key), y1_Tf
    keeps = run.plan.save_packed
    operands = run.cut(
        "F2",
        {"y2": y1_Tf, "w2": w2_fd},
        state,
        key,
        activation=run.activation,
        packed=keeps,
        counts=keeps and fusions.COUNTS.matches(run, y1_Tf),
        allowed=allowed_Tf,
    )
    y3_Td = run.multiply("F2", operands)
    return y3_Td, (operands.left, operands.counts) if keeps else y1_Tf


def ffn_fwd(run, x_Td, w1_df, w2_fd, b1_f, allowed_Tf, state, key):
    """Y3 and the residuals of the backward pass."""
    T, d, f = *x_Td.shape, w1_df.shape[1]
    run.check(
        FFN,
        {"x": (T, d), "w1": (d, f), "w2": (f, d), "y2": (T, f), "dy1": (T, f), "dy3": (T, w2_fd.shape[1])},
    )
    y3_Td, saved = _forward(run, x_Td, w1_df, w2_fd, b1_f, allowed_Tf, state, key)
    return y3_Td, (x_Td, saved, w1_df, w2_fd, b1_f, state, key)


def _ffn_bwd(run, residuals, dy3_Td):
    x_Td, saved, w1_df, w2_fd, b1_f, state, key = residuals
    arrays = {"x": x_Td, "w1": w1_df, "w2": w2_fd, "dy3": dy3_Td}
    if run.plan.save_packed:
        dy1, operands, features, counts_f = _from_saved(run, saved, arrays, state, key)
        arrays["y2"] = saved[0].todense(implementation=run.implementation)
        arrays["dy1"] = dy1.todense(implementation=run.implementation)
    else:
        dy1, operands, features, counts_f = None, {}, None, None
        arrays["y2"], activation_vjp = jax.vjp(ACTIVATIONS[run.activation], saved)
        (arrays["dy1"],) = activation_vjp(product(run, "B1", arrays, state, key))
    if features is None:
        features = run.shared_dense_features(arrays["y2"], counts_f)
    dw2_fd = product(run, "B2", arrays, state, key, features=features, operands=operands.get("B2"))
    dx_Td = product(run, "B3", arrays, state, key, saved=dy1)
    dw1_df = product(run, "B4", arrays, state, key, features=features, operands=operands.get("B4"))
    return dx_Td, dw1_df, dw2_fd, over_tokens(arrays["dy1"], b1_f), None, None, None


def _from_saved(run, saved, arrays, state, key):
    """dY1 on the support of the packed Y2; the operands of B2 and B4 that a rule makes, by name; the features
    that stay dense, and the counts to choose them by, None where there are none."""
    y2, counts_f = saved
    x_Td, dy3_Td = arrays["x"], arrays["dy3"]
    if decisions := fusions.SAVED_24.matches(run, y2, x_Td, dy3_Td):
        dy2_Tf = product(run, "B1", arrays, state, key)
        return *fusions.SAVED_24.run(decisions, run, y2, counts_f, dy2_Tf, x_Td, dy3_Td), counts_f
    dy1, operands = fusions.dy1_at_saved(run, y2, arrays, state, key), {}
    for name, packed, dense_Td in (("B2", y2, dy3_Td), ("B4", dy1, x_Td)):
        if decision := fusions.SAVED_VNM.matches(run, name, y2, x_Td, dy3_Td):
            operands[name] = fusions.SAVED_VNM.run(decision, run, name, packed, dense_Td)
    return dy1, operands, None, counts_f


_ffn.defvjp(ffn_fwd, _ffn_bwd)


def check_fits(op: str, method, activation: str) -> None:
    """Raises ValueError for an activation that is unknown, or with which the method cannot be differentiated.

    op: the operation or layer, for the message."""
    check_activation(op, activation)
    if method.ffn_plan().save_packed and activation not in SLOPES:
        raise ValueError(
            f"{op}: {method} saves the packed activations for the backward pass, which needs an activation "
            f"whose slope follows from its value: {', '.join(SLOPES)}, not {activation!r}."
        )


def check_widths(op: str, method, d: int, f: int) -> None:
    """Raises ValueError if the plan's patterns do not divide the widths of a block; any fitting number of
    tokens is taken for granted.

    op: the layer, for the message. d, f: model and FFN width."""
    plan = method.ffn_plan()
    cuts = [by for _, row in plan.rows for by in (row.by, row.other) if by is not None]
    sizes = (int(size) for by in cuts for size in (*by.pattern.split(":"), by.group))
    T = math.lcm(GROUP, method.token_multiple, *sizes)
    shapes = {"x": (T, d), "w1": (d, f), "w2": (f, d), "y2": (T, f), "dy1": (T, f), "dy3": (T, d)}
    Execution(op, "ffn", plan, None).check(FFN, shapes)


def sparse_ffn(
    x,
    w1,
    w2,
    method,
    state=None,
    key=None,
    *,
    b1=None,
    activation="squared_relu",
    implementation: str | None = None,
) -> jax.Array:
    """`act(x @ w1 + b1) @ w2` with the sparse products of `method`, forward and backward, as one
    differentiation rule.

    x: (..., d). w1: (d, f), w2: (f, d'), dense weights; b1: (f,) or None. state: `{"w1": method.init(w1,
    "w1"), "w2": method.init(w2, "w2")}`, if the method has state. activation: "squared_relu", "relu", "gelu"
    or "silu". Key, dtypes, differentiation and errors as `sparse_dot`."""
    plan = plan_of("sparse_ffn", method, "ffn_plan")
    check_fits("sparse_ffn", method, activation)
    tokens, (w1, w2), state, key = prepare("sparse_ffn", plan, implementation, state, key, x, w1=w1, w2=w2)
    b1 = check_bias("sparse_ffn", "b1", b1, "w1", w1)
    check_state("sparse_ffn", method, state, w1=w1, w2=w2)
    run = Execution("sparse_ffn", "ffn", plan, implementation, activation)
    route = method.route(tokens, w1, state) if tokens.size else None
    if route is None:
        out = _ffn(run, tokens, w1, w2, b1, None, state, key)
    else:
        back = inverse_of(route.order, tokens.shape[0])
        out = _ffn(run, permute(tokens, route.order, back), w1, w2, b1, route.allowed, state, key)
        out = permute(out, back, route.order)
    return checkpoint_name(out.reshape(*jnp.shape(x)[:-1], w2.shape[1]), "s24_ffn")
