"""The two engines: a linear layer and an FFN, each one `custom_vjp` that executes a plan.

A *plan* is a table with one row per product: which operand is sparse, and by which sparsifier. A product
without a row is dense. The products and their contraction axes are fixed by the mathematics; flax kernels are
(in, out):

    linear   Y = X W                fwd, dgrad, wgrad
    FFN      Y1 = X W1, Y2 = act(Y1), Y3 = Y2 W2      F1, F2 forward; B1 = dY2, B2 = dW2, B3 = dX, B4 = dW1
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_sparse24 import patterns
from jax_sparse24._reverse_only import reverse_only
from jax_sparse24.formats import Packed24
from jax_sparse24.ops._choose import choose
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.mvue import key_words

# Product -> ((operand, contracted axis), (operand, contracted axis)). The result has the free axis of
# the first operand, then that of the second.
LINEAR = {
    "fwd": (("x", -1), ("w", -2)),
    "dgrad": (("dy", -1), ("w", -1)),
    "wgrad": (("x", -2), ("dy", -2)),
}
FFN = {
    "F1": (("x", -1), ("w1", -2)),
    "F2": (("y2", -1), ("w2", -2)),
    "B1": (("dy3", -1), ("w2", -1)),
    "B2": (("y2", -2), ("dy3", -2)),
    "B3": (("dy1", -1), ("w1", -1)),
    "B4": (("x", -2), ("dy1", -2)),
}
# How the products of the two linear layers inside an FFN are called there.
LINEAR_IN_FFN = {
    "w1": {"x": "x", "w": "w1", "dy": "dy1", "fwd": "F1", "dgrad": "B3", "wgrad": "B4"},
    "w2": {"x": "y2", "w": "w2", "dy": "dy3", "fwd": "F2", "dgrad": "B1", "wgrad": "B2"},
}

ACTIVATIONS = {
    "squared_relu": lambda y: jnp.square(jax.nn.relu(y)),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}


class Sparsifier(Protocol):
    """Turns a matrix into the sparse operand of one product. Hashable; frozen dataclasses are."""

    divides: tuple[int, ...]  # axes (-1, -2, or 0 for the contracted one) that must be multiples of four
    stochastic: bool  # needs a key
    needs: tuple[str, ...]  # entries of the layer's state that it reads

    def __call__(
        self,
        x: jax.Array,
        axis: int,
        state: Mapping[str, jax.Array],
        key: jax.Array | None,
        implementation: str | None,
    ) -> Packed24 | jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Row:
    """One product of a plan: `operand` goes sparse through `by`."""

    operand: str
    by: Sparsifier


@dataclasses.dataclass(frozen=True)
class Plan:
    """A table: product name -> Row. Products that are not named are dense."""

    rows: tuple[tuple[str, Row], ...] = ()

    @classmethod
    def of(cls, products: Mapping[str, tuple], **rows: Row) -> "Plan":
        """Checks every row against the products of the engine; raises ValueError for an impossible one."""
        for name, row in rows.items():
            if name not in products:
                raise ValueError(
                    f"plan: product {name!r} does not exist; the products are {', '.join(products)}."
                )
            operands = [operand for operand, _ in products[name]]
            if row.operand not in operands:
                raise ValueError(
                    f"plan: product {name} has operands {' and '.join(operands)}, not {row.operand!r}."
                )
        return cls(tuple(rows.items()))

    def row(self, product: str) -> Row | None:
        return dict(self.rows).get(product)

    @property
    def stochastic(self) -> bool:
        return any(row.by.stochastic for _, row in self.rows)


def ffn_plan(linear: Plan) -> Plan:
    """The FFN plan that treats both matrices as `linear` does."""
    rows = {}
    for names in LINEAR_IN_FFN.values():
        for product, row in linear.rows:
            rows[names[product]] = Row(names[row.operand], row.by)
    return Plan.of(FFN, **rows)


@dataclasses.dataclass(frozen=True)
class Execution:
    """What every product of one call shares: static, so it can be an argument of `custom_vjp` that is not
    differentiated."""

    op: str
    products: str  # "linear" or "ffn"
    plan: Plan
    implementation: str | None
    activation: str = ""

    @property
    def table(self) -> Mapping[str, Any]:
        return LINEAR if self.products == "linear" else FFN

    def check(self, products, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises before any kernel runs if a sparse operand of `products` does not divide into groups."""
        for name in products:
            row = self.plan.row(name)
            if row is None:
                continue
            axis = dict(self.table[name])[row.operand]
            for divided in row.by.divides:
                what = f"operand {row.operand} of product {name}"
                patterns.check_divides(self.op, shapes[row.operand], divided or axis, what=what)

    def product(self, name: str, operands: Mapping[str, jax.Array], state, key) -> jax.Array:
        """One product of the plan. Its result has the operands' dtype; sums are float32."""
        (a, a_axis), (b, b_axis) = self.table[name]
        left, right = operands[a], operands[b]
        row = self.plan.row(name)
        if row is not None:
            if row.by.stochastic:
                key = jax.random.fold_in(jax.random.wrap_key_data(key), list(self.table).index(name))
            own_state = state.get(row.operand, {}) if self.products == "ffn" else state
            axis = a_axis if row.operand == a else b_axis
            sparse = row.by(operands[row.operand], axis, own_state, key, self.implementation)
            if isinstance(sparse, Packed24) and sparse.axis != axis:
                raise ValueError(
                    f"{self.op}: {row.by} packed operand {row.operand} of product {name} along axis "
                    f"{sparse.axis}; the product contracts axis {axis}."
                )
            left, right = (sparse, right) if row.operand == a else (left, sparse)
        return contract(left, right, a_axis, b_axis, self.implementation)


# ---- linear


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(run: Execution, x_Td, w_df, state, key):
    run.check(["fwd"], {"x": x_Td.shape, "w": w_df.shape})
    return run.product("fwd", {"x": x_Td, "w": w_df}, state, key)


def _linear_fwd(run, x_Td, w_df, state, key):
    run.check(LINEAR, {"x": x_Td.shape, "w": w_df.shape, "dy": (x_Td.shape[0], w_df.shape[1])})
    return _linear(run, x_Td, w_df, state, key), (x_Td, w_df, state, key)


def _linear_bwd(run, residuals, dy_Tf):
    x_Td, w_df, state, key = residuals
    operands = {"x": x_Td, "w": w_df, "dy": dy_Tf}
    dx_Td = run.product("dgrad", operands, state, key)
    dw_df = run.product("wgrad", operands, state, key)
    return dx_Td, dw_df, None, None


_linear.defvjp(_linear_fwd, _linear_bwd)


# ---- FFN


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(run: Execution, x_Td, w1_df, w2_fd, b1_f, state, key):
    return _ffn_forward(run, x_Td, w1_df, w2_fd, b1_f, state, key)[0]


def _ffn_forward(run, x_Td, w1_df, w2_fd, b1_f, state, key):
    T, f = x_Td.shape[0], w1_df.shape[1]
    run.check(["F1", "F2"], {"x": x_Td.shape, "w1": w1_df.shape, "y2": (T, f), "w2": w2_fd.shape})
    y1_Tf = run.product("F1", {"x": x_Td, "w1": w1_df}, state, key)
    if b1_f is not None:
        y1_Tf = y1_Tf + b1_f[None, :]
    y2_Tf = ACTIVATIONS[run.activation](y1_Tf)
    return run.product("F2", {"y2": y2_Tf, "w2": w2_fd}, state, key), y1_Tf


def _ffn_fwd(run, x_Td, w1_df, w2_fd, b1_f, state, key):
    T, d, f = *x_Td.shape, w1_df.shape[1]
    run.check(
        FFN,
        {"x": (T, d), "w1": (d, f), "w2": (f, d), "y2": (T, f), "dy1": (T, f), "dy3": (T, w2_fd.shape[1])},
    )
    y3_Td, y1_Tf = _ffn_forward(run, x_Td, w1_df, w2_fd, b1_f, state, key)
    return y3_Td, (x_Td, y1_Tf, w1_df, w2_fd, b1_f, state, key)


def _ffn_bwd(run, residuals, dy3_Td):
    x_Td, y1_Tf, w1_df, w2_fd, b1_f, state, key = residuals
    y2_Tf, activation_vjp = jax.vjp(ACTIVATIONS[run.activation], y1_Tf)
    operands = {"x": x_Td, "w1": w1_df, "w2": w2_fd, "y2": y2_Tf, "dy3": dy3_Td}
    dy2_Tf = run.product("B1", operands, state, key)
    dw2_fd = run.product("B2", operands, state, key)
    (operands["dy1"],) = activation_vjp(dy2_Tf)
    dx_Td = run.product("B3", operands, state, key)
    dw1_df = run.product("B4", operands, state, key)
    sum_dtype = jnp.promote_types(dy3_Td.dtype, jnp.float32)
    db1_f = None if b1_f is None else operands["dy1"].sum(0, dtype=sum_dtype).astype(b1_f.dtype)
    return dx_Td, dw1_df, dw2_fd, db1_f, None, None


_ffn.defvjp(_ffn_fwd, _ffn_bwd)


# ---- entry points, shared by functions and layers


def _plan(op: str, method, name: str) -> Plan:
    if isinstance(method, type) or not hasattr(method, name):
        raise TypeError(f"{op}: method must be one of s24.methods, such as FST(), got {method!r}.")
    return getattr(method, name)()


def _prepare(op: str, plan: Plan, implementation, state, key, x, **weights):
    """Validates, promotes dtypes, flattens x to (tokens, features)."""
    x = patterns.as_array(op, "x", x)
    weights = {name: patterns.as_array(op, name, w) for name, w in weights.items()}
    for name, w in weights.items():
        if w.ndim != 2:
            raise ValueError(f"{op}: {name} must be a matrix (in, out), got shape {w.shape}.")
    width = x.shape[-1] if x.ndim else None
    for name, w in weights.items():
        if w.shape[0] != width:
            raise ValueError(
                f"{op}: {name} of shape {w.shape} takes {w.shape[0]} features, but its input has {width}."
            )
        width = w.shape[1]
    if plan.stochastic:
        if key is None:
            raise ValueError(
                f"{op}: this method draws random numbers; pass key=jax.random.key(...), a new one every step."
            )
        key = key_words(op, key)
    else:
        key = None
    dtype = jnp.result_type(x, *weights.values())
    if implementation is not None:  # a dense plan is no reason to accept a name that cannot run
        choose(op, dtype, implementation)
    tokens = reverse_only(op, x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(dtype))
    return tokens, [reverse_only(op, w.astype(dtype)) for w in weights.values()], state or {}, key


def _check_state(op: str, plan: Plan, state, shapes: Mapping[str, tuple[int, ...]], nested: bool) -> None:
    for name, row in plan.rows:
        for entry in row.by.needs:
            own = state.get(row.operand, {}) if nested else state
            if entry not in own:
                place = f"state[{row.operand!r}][{entry!r}]" if nested else f"state[{entry!r}]"
                raise ValueError(
                    f"{op}: product {name} reads {place}, which is missing; build it with method.init(w)."
                )
            if tuple(own[entry].shape) != shapes[row.operand]:
                raise ValueError(
                    f"{op}: the {entry} of {row.operand} has shape {tuple(own[entry].shape)}, "
                    f"the weight {shapes[row.operand]}; "
                    f"build the state with method.init(w)."
                )


def sparse_dot(x, w, method, state=None, key=None, *, implementation: str | None = None) -> jax.Array:
    """`x @ w` with the sparse products of `method`, forward and backward.

    x: (..., d). w: (d, f), the dense weight. method: from `s24.methods`. state: what `method.init(w)`
    returned, if the method has state. key: a PRNG key, if the method is stochastic; use a new one every step
    and layer. float32, bfloat16, float16 (float64 by the reference); sums are float32 and the result (..., f)
    has the promoted dtype. Reverse-mode differentiable: `w` gets the gradient its method defines, dense in
    shape. Products along the token axis need a multiple of four tokens, which is checked when a gradient is
    taken. Raises TypeError, ValueError (shapes, missing state or key), RuntimeError (implementation)."""
    plan = _plan("sparse_dot", method, "linear_plan")
    tokens, (w,), state, key = _prepare("sparse_dot", plan, implementation, state, key, x, w=w)
    _check_state("sparse_dot", plan, state, {"w": w.shape}, nested=False)
    run = Execution("sparse_dot", "linear", plan, implementation)
    out = _linear(run, tokens, w, state, key)
    return checkpoint_name(out.reshape(*jnp.shape(x)[:-1], w.shape[1]), "s24_dot")


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

    x: (..., d). w1: (d, f), w2: (f, d'), dense weights; b1: (f,) or None. state: `{"w1": method.init(w1),
    "w2": method.init(w2)}`, if the method has state. activation: "squared_relu", "relu", "gelu" or "silu".
    Key, dtypes, differentiation and errors as `sparse_dot`."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"sparse_ffn: activation {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}."
        )
    plan = _plan("sparse_ffn", method, "ffn_plan")
    tokens, (w1, w2), state, key = _prepare("sparse_ffn", plan, implementation, state, key, x, w1=w1, w2=w2)
    if b1 is not None:
        if jnp.shape(b1) != (w1.shape[1],):
            raise ValueError(
                f"sparse_ffn: b1 has shape {jnp.shape(b1)}, w1 of shape {w1.shape} needs ({w1.shape[1]},)."
            )
        b1 = reverse_only("sparse_ffn", jnp.asarray(b1).astype(tokens.dtype))
    _check_state("sparse_ffn", plan, state, {"w1": w1.shape, "w2": w2.shape}, nested=True)
    run = Execution("sparse_ffn", "ffn", plan, implementation, activation)
    out = _ffn(run, tokens, w1, w2, b1, state, key)
    return checkpoint_name(out.reshape(*jnp.shape(x)[:-1], w2.shape[1]), "s24_ffn")
