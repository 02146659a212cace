"""The engine of a linear layer: `Y = X W` and its gradients under one `custom_vjp` that executes a plan."""

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
from jax_sparse24.engine.operand import Request
from jax_sparse24.engine.plan import FFN, LINEAR, LINEAR_IN_FFN


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(execution: Execution, x_Td, w_df, bias_f, state, key):
    return _forward(execution, ["fwd"], x_Td, w_df, bias_f, state, key)[0]


def _forward(execution, products, x_Td, w_df, bias_f, state, key):
    def body(arrays, state, key, _):
        x_Td, w_df = arrays["x"], arrays["w"]
        shapes = {"x": x_Td.shape, "w": w_df.shape, "dy": (x_Td.shape[0], w_df.shape[1])}
        execution.check(products, shapes)
        decisions = execution.decisions(products, shapes, x_Td.dtype)
        bias_f = arrays.get("bias")
        names = "fwd", "dgrad"
        dy_Tf, weights = fusions.forward(execution, names, arrays, state, key, decisions, bias=bias_f)
        return {"dy": dy_Tf}, fusions.Ahead(decisions, weights, execution.seen(["fwd"], arrays))

    operands = {"x": x_Td, "w": w_df, "bias": bias_f}
    found, ahead = execution.run(body, operands, state, key, results=["dy"])
    return found["dy"], ahead


def _linear_fwd(execution, x_Td, w_df, bias_f, state, key):
    y_Tf, ahead = _forward(execution, LINEAR, x_Td, w_df, bias_f, state, key)
    return y_Tf, (x_Td, None if "w" in ahead.weights else w_df, bias_f, state, key, ahead)


def _linear_bwd(execution, residuals, dy_Tf):
    x_Td, w_df, bias_f, state, key, ahead = residuals

    def body(arrays, state, key, ahead):
        arrays = arrays | ahead.weights
        found = {
            operand: product(execution, name, arrays, state, key, ahead.decisions[name])
            for operand, name in (("x", "dgrad"), ("w", "wgrad"))
        }
        if "bias" in arrays:
            found["bias"] = over_tokens(arrays["dy"], arrays["bias"])
        if execution.plan.observes:
            found["seen"] = {**ahead.seen, **execution.seen(["dgrad"], arrays)}
        return found, None

    operands = {"x": x_Td, "w": w_df, "bias": bias_f, "dy": dy_Tf}
    results = ["x", "w", *["bias"] * (bias_f is not None), *["seen"] * execution.plan.observes]
    found, _ = execution.run(body, operands, state, key, ahead, results=results)
    observed = execution.observation(found["seen"], state) if "seen" in found else None
    return found["x"], found["w"], found.get("bias"), observed, None


_linear.defvjp(_linear_fwd, _linear_bwd)


def over_tokens(dy_Tf, bias_f):
    """The gradient of a bias: the sum of its output's gradient over tokens.

    dy_Tf: the gradient of the output.
    bias_f: the bias, or None.

    Returns: (f,) in the bias's dtype, summed in float32 or float64; None without a bias."""
    if bias_f is None:
        return None
    sums = jnp.float64 if dy_Tf.dtype == jnp.float64 else jnp.float32
    return dy_Tf.sum(0, dtype=sums).astype(bias_f.dtype)


def weight_in(product: str, w: jax.Array, method, state, role: str = "w") -> jax.Array:
    """The weight by which a product multiplies: `w` made sparse by its method, with zeros.

    product: "fwd" or "dgrad".
    w: (..., in, out).
    method: from `s24.methods`.
    state: of the method, by name, with the leading axes of w.
    role: the weight's name in the plan: "w" alone, "w1" or "w2" in an FFN.

    Returns: an array like w; w itself if the method leaves it dense in this product."""
    if role == "w":
        plan, axes = method.linear_plan(), LINEAR[product]
    else:
        product = LINEAR_IN_FFN[role][product]
        plan, axes = method.ffn_plan(), FFN[product]
    row = plan.row(product)
    by = None if row is None else row.by if row.operand == role else row.other
    if by is None:
        return w

    def cut(w, state):
        return by(w, dict(axes)[role], Request(state, None, "reference"))

    for _ in w.shape[:-2]:  # a scale is one of each matrix
        cut = jax.vmap(cut)
    return cut(w, state)


def sparse_dot(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    method: Any,
    state: Mapping[str, jax.Array] | None = None,
    key: jax.typing.ArrayLike | None = None,
    *,
    bias: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
    specs: Mapping[str, PartitionSpec] | None = None,
) -> jax.Array:
    """`x @ w + bias` with the sparse products of `method`, forward and backward.

    It is differentiable in reverse mode: `w` gets the gradient that its method defines, dense in shape.
    Products that contract tokens need a multiple of four of them, which is checked when a gradient is taken.

    x: (..., d); float32, bfloat16 or float16 (float64 by the reference).
    w: (d, f), the dense weight.
    method: from `s24.methods`.
    state: what `method.init(w)` returned, if the method has state.
    key: a PRNG key, if the method is stochastic; use a new one every step and layer.
    bias: (f,) or None.
    implementation: None to choose, or "reference", "ffi" or "cusparselt".
    specs: how "x" and "w" are cut over the axes of the mesh in the context (`jax.set_mesh`), such as
        {"x": P("dp"), "w": P(None, "tp")}; every device then multiplies its own shards, and sums go over
        the mesh axes that cut what a product contracts. None where nothing is cut; explicit axes tell it.

    Returns: (..., f) in the promoted dtype of x and w; sums are float32, and those over shards are of results
        in their dtype.
    Raises: TypeError (types, dtypes), ValueError (shapes, missing state or key, specs that do not fit, a
        method without a plan for a single layer), RuntimeError (implementation)."""
    plan = plan_of("sparse_dot", method, "linear_plan")
    if method.needs_block:
        raise ValueError(
            f"sparse_dot: {method} makes activations sparse and has no table for a single linear layer; use "
            "s24.sparse_ffn."
        )
    tokens, (w,), state, key = prepare("sparse_dot", plan, implementation, state, key, x, w=w)
    bias = check_bias("sparse_dot", "bias", bias, "w", w)
    check_state("sparse_dot", method, state, w=w)
    cut = cut_over_mesh("sparse_dot", "linear", method, specs, {"w": state}, x=x, w=w)
    operands = {"x": tokens, "w": w, "bias": bias}
    key, operands, state = in_shards("sparse_dot", cut, key, operands, state)
    tokens, w, bias = (operands[name] for name in ("x", "w", "bias"))
    execution = Execution("sparse_dot", "linear", plan, implementation, partition=cut)
    out = _linear(execution, tokens, w, bias, state, key)
    y = with_tokens_of(out.reshape(*jnp.shape(x)[:-1], w.shape[1]), x)
    return checkpoint_name(y, "s24_dot")
