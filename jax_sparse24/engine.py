"""The two engines: a linear layer and an FFN, each one `custom_vjp` that executes a plan (see `plan`)."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_sparse24 import kept as kept_plans
from jax_sparse24 import patterns
from jax_sparse24._reverse_only import reverse_only
from jax_sparse24.ops._choose import choose, decide, decide_float8, float8_sums
from jax_sparse24.ops._groups import compute_format
from jax_sparse24.ops.compressed import reads
from jax_sparse24.ops.matmul import PACKED, contract, with_values
from jax_sparse24.ops.mvue import key_words
from jax_sparse24.ops.reference import SLOPES, sloped
from jax_sparse24.ops.tokens import ASCENDING, collect, densest, inverse_of, permute, regroup, set_columns
from jax_sparse24.plan import ACTIVATIONS, FFN, LINEAR, WEIGHT_GRADIENTS, Context, Cut, Plan


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
            for operand, axis in self.table[name]:
                by = row.by if operand == row.operand else row.other
                if by is not None:
                    by.check(self.op, shapes[operand], axis, f"operand {operand} of product {name}")

    def product(
        self,
        name: str,
        operands: Mapping[str, jax.Array],
        state,
        key,
        features=None,
        cut: Cut | None = None,
        bias=None,
        **context,
    ) -> jax.Array:
        """One product of the plan. Its result has the operands' dtype; sums are float32. features, bias: see
        `multiply`; cut: the operands, if something has made them as `cut` does; context: see `Context`."""
        out = self.multiply(name, cut or self.cut(name, operands, state, key, **context), features, bias)
        if self.plan.gradient_mask and name in WEIGHT_GRADIENTS:
            mask = self._by_operand(state)[WEIGHT_GRADIENTS[name]][self.plan.gradient_mask]
            out = jnp.where(mask, out, jnp.zeros_like(out))
        return out

    def _by_operand(self, state) -> Mapping[str, Any]:
        return state if self.products == "ffn" else {"w": state}

    def draw_key(self, name: str, key) -> jax.Array:
        """The key of what a product draws."""
        return jax.random.fold_in(jax.random.wrap_key_data(key), list(self.table).index(name))

    def place(self, name: str, left, right) -> tuple:
        """What a table knows a product by: its contracted axes, the side of its sparse operand, its dtype and
        (M, K, N)."""
        (a, a_axis), (_, b_axis) = self.table[name]
        side = "left" if self.plan.row(name).operand == a else "right"
        shape = (left.shape[-3 - a_axis], left.shape[a_axis], right.shape[-3 - b_axis])
        return (a_axis, b_axis), side, jnp.promote_types(left.dtype, right.dtype), shape

    def packs(self, name: str, left, right) -> bool:
        """Whether the sparse operand of a product of these shapes and dtypes is packed."""
        if self.implementation is not None:
            return True
        return decide(*self.place(name, left, right), self.plan.row(name).by.pattern).packed

    def cut(self, name: str, operands: Mapping[str, jax.Array], state, key, **context) -> Cut:
        """The operands of a product as its row makes them. `context`: see `Context`."""
        (a, a_axis), (b, b_axis) = self.table[name]
        row = self.plan.row(name)
        if row is None:
            return Cut(operands[a], operands[b])
        on_left = row.operand == a
        axis, other, other_axis = (a_axis, b, b_axis) if on_left else (b_axis, a, a_axis)
        x, y = operands[row.operand], regroup(operands[other], row.tokens, row.by.group)
        if row.by.stochastic:
            key = self.draw_key(name, key)
        states = self._by_operand(state)
        own = partial(Context, key=key, implementation=self.implementation)
        left, right = (x, y) if on_left else (y, x)
        if row.eight_bits and decide_float8(*self.place(name, left, right), self.implementation).packed:
            sparse, scale = row.by.quantised(x, axis, own(states.get(row.operand, {}), packed=True))
            other, other_scale = row.other.quantised(y, other_axis, own(states.get(other, {}), packed=False))
            return Cut(*((sparse, other) if on_left else (other, sparse)), x, (scale, other_scale))
        if row.other is not None:
            y = row.other(y, other_axis, own(states.get(other, {}), packed=False))
        if "packed" not in context:
            context["packed"] = self.packs(name, left, right)
        if context["packed"] and row.compresses:
            context["compressed"] = reads(*self.place(name, left, right), self.implementation)
        if row.strides and context["packed"]:
            sparse = row.by(x, axis, own(states.get(row.operand, {}), **context, strided=True))
        else:
            sparse = row.by(row.arranged(x), axis, own(states.get(row.operand, {}), **context))
        sparse, counts = sparse if context.get("counted") else (sparse, None)
        if isinstance(sparse, PACKED) and sparse.axis != axis:
            raise ValueError(
                f"{self.op}: {row.by} packed operand {row.operand} of product {name} along axis "
                f"{sparse.axis}; the product contracts axis {axis}."
            )
        return Cut(*((sparse, y) if on_left else (y, sparse)), x, counts=counts)

    def dense_features(self, y2_Tf: jax.Array, counts_f: jax.Array | None = None) -> jax.Array | None:
        """The features that stay dense in both B2 and B4, if one choice serves both. counts_f: int32 (f,),
        the non-zeros of each feature of Y2, if something has counted them."""
        row = self.plan.shared_split
        return None if row is None else self._densest(row, y2_Tf, counts_f)

    def _densest(self, row, x: jax.Array, counts: jax.Array | None = None) -> jax.Array:
        # How many non-zeros a feature has does not depend on the order of tokens.
        x = x if row.rank == "density" else row.arranged(x)
        return densest(x, row.dense_share, row.rank, self.implementation, counts)

    def multiply(self, name: str, cut: Cut, features: jax.Array | None = None, bias=None) -> jax.Array:
        """The product of what `cut` returned. features: those that stay dense; chosen here if not given.
        bias: added to a product that contracts no tokens, along the free axis of its right operand."""
        (a, a_axis), (_, b_axis) = self.table[name]
        if cut.scales:
            dtype = cut.uncut.dtype
            sums = float8_sums(dtype)
            out = contract(cut.left, cut.right, a_axis, b_axis, "cusparselt", sums).astype(jnp.float32)
            for scale in cut.scales:  # their product may be beyond float32
                out = out / scale
            out = out.astype(dtype)
        else:
            fused = None if isinstance(cut.left, PACKED) else bias
            out = contract(cut.left, cut.right, a_axis, b_axis, self.implementation, bias=fused)
            bias = bias if fused is None else None
        if bias is not None:
            out = out + bias
        row = self.plan.row(name)
        if row is None:
            return out
        on_left = row.operand == a
        if row.dense_share:
            if features is None:
                features = self._densest(row, cut.uncut)
            few, few_axis = cut.few, -1
            if few is None:
                few = jnp.take(cut.uncut, features, axis=1, mode="clip")  # no check of bounds: faster
                # Gathered and moved in one pass, a GPU would read single elements.
                few = regroup(jax.lax.optimization_barrier(few), row.tokens, row.by.group)
                few_axis = -2
            if on_left:
                out = out.at[features].set(contract(few, cut.right, few_axis, b_axis), **ASCENDING)
            else:
                out = set_columns(out, features, contract(cut.left, few, a_axis, few_axis))
        return collect(out, row.by.group, -2 if on_left else -1) if row.collected else out


# ---- linear


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(run: Execution, x_Td, w_df, bias_f, state, key):
    run.check(["fwd"], {"x": x_Td.shape, "w": w_df.shape})
    return run.product("fwd", {"x": x_Td, "w": w_df}, state, key, bias=bias_f)


def _linear_fwd(run, x_Td, w_df, bias_f, state, key):
    run.check(LINEAR, {"x": x_Td.shape, "w": w_df.shape, "dy": (x_Td.shape[0], w_df.shape[1])})
    return _linear(run, x_Td, w_df, bias_f, state, key), (x_Td, w_df, bias_f, state, key)


def _linear_bwd(run, residuals, dy_Tf):
    x_Td, w_df, bias_f, state, key = residuals
    operands = {"x": x_Td, "w": w_df, "dy": dy_Tf}
    dx_Td = run.product("dgrad", operands, state, key)
    dw_df = run.product("wgrad", operands, state, key)
    return dx_Td, dw_df, _over_tokens(dy_Tf, bias_f), None, None


def _over_tokens(dy_Tf, bias_f):
    """The gradient of a bias, if there is one."""
    if bias_f is None:
        return None
    return dy_Tf.sum(0, dtype=compute_format(dy_Tf.dtype).dtype).astype(bias_f.dtype)


_linear.defvjp(_linear_fwd, _linear_bwd)


# ---- FFN


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(run: Execution, x_Td, w1_df, w2_fd, b1_f, state, key):
    return _ffn_forward(run, x_Td, w1_df, w2_fd, b1_f, state, key)[0]


def _ffn_forward(run, x_Td, w1_df, w2_fd, b1_f, state, key):
    """Y3, and what the backward pass needs of the activations: Y1, or the packed Y2 and the counts of its
    non-zeros, None if it is to count them itself."""
    T, f = x_Td.shape[0], w1_df.shape[1]
    run.check(["F1", "F2"], {"x": x_Td.shape, "w1": w1_df.shape, "y2": (T, f), "w2": w2_fd.shape})
    y1_Tf = run.product("F1", {"x": x_Td, "w1": w1_df}, state, key, bias=b1_f)
    row = run.plan.row("F2")
    if row is None or row.operand != "y2":
        operands = {"y2": ACTIVATIONS[run.activation](y1_Tf), "w2": w2_fd}
        return run.product("F2", operands, state, key), y1_Tf
    context = {"activation": run.activation}
    if run.plan.keep:
        context |= {"packed": True, "counted": kept_plans.counted(run, y1_Tf)}
    cut = run.cut("F2", {"y2": y1_Tf, "w2": w2_fd}, state, key, **context)
    return run.multiply("F2", cut), (cut.left, cut.counts) if run.plan.keep else y1_Tf


def ffn_fwd(run, x_Td, w1_df, w2_fd, b1_f, state, key):
    T, d, f = *x_Td.shape, w1_df.shape[1]
    run.check(
        FFN,
        {"x": (T, d), "w1": (d, f), "w2": (f, d), "y2": (T, f), "dy1": (T, f), "dy3": (T, w2_fd.shape[1])},
    )
    y3_Td, saved = _ffn_forward(run, x_Td, w1_df, w2_fd, b1_f, state, key)
    return y3_Td, (x_Td, saved, w1_df, w2_fd, b1_f, state, key)


def _ffn_bwd(run, residuals, dy3_Td):
    x_Td, saved, w1_df, w2_fd, b1_f, state, key = residuals
    operands = {"x": x_Td, "w1": w1_df, "w2": w2_fd, "dy3": dy3_Td}
    kept, counts_f, cuts, features = None, None, {}, None
    if run.plan.keep:
        saved, counts_f = saved
        if kept_plans.in_one_pass(run, saved, x_Td, dy3_Td):
            dy2_Tf = run.product("B1", operands, state, key)
            kept, cuts, features = kept_plans.backward(run, saved, counts_f, dy2_Tf, x_Td, dy3_Td)
        else:
            dy2 = kept_plans.dy2_at(run, saved, operands, state, key)
            kept = with_values(saved, sloped(saved.values, dy2, run.activation))
            cuts = kept_plans.recut(run, saved, kept, x_Td, dy3_Td)
        operands["y2"] = saved.todense(implementation=run.implementation)
        operands["dy1"] = kept.todense(implementation=run.implementation)
    else:
        operands["y2"], activation_vjp = jax.vjp(ACTIVATIONS[run.activation], saved)
        (operands["dy1"],) = activation_vjp(run.product("B1", operands, state, key))
    if features is None:
        features = run.dense_features(operands["y2"], counts_f)
    dw2_fd = run.product("B2", operands, state, key, features, cuts.get("B2"))
    dx_Td = run.product("B3", operands, state, key, kept=kept)
    dw1_df = run.product("B4", operands, state, key, features, cuts.get("B4"))
    return dx_Td, dw1_df, dw2_fd, _over_tokens(operands["dy1"], b1_f), None, None


_ffn.defvjp(ffn_fwd, _ffn_bwd)


# ---- entry points, shared by functions and layers


def plan_of(op: str, method, name: str) -> Plan:
    if isinstance(method, type):
        raise TypeError(f"{op}: method must be an instance, got the class; call it: {method.__name__}().")
    if not hasattr(method, name):
        raise TypeError(f"{op}: method must be one of s24.methods, such as FST(), got {method!r}.")
    return getattr(method, name)()


def prepare(op: str, plan: Plan, implementation, state, key, x, **weights):
    """Validates, promotes dtypes, flattens x to (tokens, features)."""
    state = {} if state is None else state
    if not isinstance(state, Mapping):
        raise TypeError(f"{op}: state must be a dict of arrays, got {type(state).__name__}.")
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
    return tokens, [reverse_only(op, w.astype(dtype)) for w in weights.values()], state, key


def _check_bias(op: str, name: str, bias, weight_name: str, weight):
    """A bias in the dtype of its weight, or None; raises ValueError unless its shape fits."""
    if bias is None:
        return None
    if jnp.shape(bias) != (weight.shape[1],):
        raise ValueError(
            f"{op}: {name} has shape {jnp.shape(bias)}, {weight_name} of shape {weight.shape} needs "
            f"({weight.shape[1]},)."
        )
    return reverse_only(op, patterns.as_array(op, name, bias).astype(weight.dtype))


def check_state(op: str, method, state, **weights) -> None:
    """Raises ValueError or TypeError unless `state` has the entries and shapes that the method gives to `w`,
    or, under their names, to `w1` and `w2`."""
    single = "w" in weights
    fix = "method.init(w)" if single else '{"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}'
    fix = f"pass state={fix} of this {type(method).__name__}"
    expected = {role: jax.eval_shape(partial(method.init, role=role), w) for role, w in weights.items()}
    unknown = [] if single else [repr(role) for role in state if role not in weights]
    for role, entries in expected.items():
        own, place = (state, "state") if single else (state.get(role, {}), f"state[{role!r}]")
        if not isinstance(own, Mapping):
            raise TypeError(f"{op}: {place} must be a dict of arrays, got {type(own).__name__}; {fix}.")
        others = [entry for entry in own if entry not in entries]
        if others and single:  # a layer of an FFN, called alone, brings what it has there
            w = weights[role]
            there = [jax.eval_shape(partial(method.init, role=r), w) for r in ("w1", "w2")]
            others = [entry for entry in others if not any(entry in state for state in there)]
        unknown += [f"{place}[{entry!r}]" for entry in others]
        for entry, like in entries.items():
            if entry not in own:
                raise ValueError(f"{op}: {place}[{entry!r}] is missing; {fix}.")
            if not hasattr(own[entry], "dtype"):
                raise TypeError(f"{op}: {place}[{entry!r}] must be an array, got {own[entry]!r:.40}; {fix}.")
            shape, dtype = jnp.shape(own[entry]), own[entry].dtype
            if shape != like.shape or dtype != like.dtype:
                needs = f"a weight of shape {weights[role].shape} needs {like.dtype} {like.shape}"
                raise ValueError(f"{op}: {place}[{entry!r}] is {dtype} {shape}, {needs}; {fix}.")
    if unknown:
        raise ValueError(f"{op}: {', '.join(unknown)} is no state that this method has; {fix}.")


def sparse_dot(
    x, w, method, state=None, key=None, *, bias=None, implementation: str | None = None
) -> jax.Array:
    """`x @ w + bias` with the sparse products of `method`, forward and backward.

    x: (..., d). w: (d, f), the dense weight. bias: (f,) or None. method: from `s24.methods`. state: what
    `method.init(w)` returned, if the method has state. key: a PRNG key, if the method is stochastic; use a
    new one every step and layer. float32, bfloat16, float16 (float64 by the reference); sums are float32 and
    the result (..., f) has the promoted dtype of x and w. Reverse-mode differentiable: `w` gets the gradient
    its method defines, dense in shape. Products along the token axis need a multiple of four tokens, which is
    checked when a gradient is taken. Raises TypeError, ValueError (shapes, missing state or key),
    RuntimeError (implementation)."""
    plan = plan_of("sparse_dot", method, "linear_plan")
    tokens, (w,), state, key = prepare("sparse_dot", plan, implementation, state, key, x, w=w)
    bias = _check_bias("sparse_dot", "bias", bias, "w", w)
    check_state("sparse_dot", method, state, w=w)
    run = Execution("sparse_dot", "linear", plan, implementation)
    out = _linear(run, tokens, w, bias, state, key)
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

    x: (..., d). w1: (d, f), w2: (f, d'), dense weights; b1: (f,) or None. state: `{"w1": method.init(w1,
    "w1"), "w2": method.init(w2, "w2")}`, if the method has state. activation: "squared_relu", "relu", "gelu"
    or "silu". Key, dtypes, differentiation and errors as `sparse_dot`."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"sparse_ffn: activation {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}."
        )
    plan = plan_of("sparse_ffn", method, "ffn_plan")
    if plan.keep and activation not in SLOPES:
        raise ValueError(
            f"sparse_ffn: {method} keeps the packed activations for the backward pass, which needs an "
            f"activation whose slope follows from its value: {', '.join(SLOPES)}, not {activation!r}."
        )
    tokens, (w1, w2), state, key = prepare("sparse_ffn", plan, implementation, state, key, x, w1=w1, w2=w2)
    b1 = _check_bias("sparse_ffn", "b1", b1, "w1", w1)
    check_state("sparse_ffn", method, state, w1=w1, w2=w2)
    run = Execution("sparse_ffn", "ffn", plan, implementation, activation)
    route = method.route(tokens, w1, state) if tokens.size else None
    if route is None:
        out = _ffn(run, tokens, w1, w2, b1, state, key)
    else:
        order, places = route
        back = inverse_of(order, tokens.shape[0])
        out = _ffn(run, permute(tokens, order, back), w1, w2, b1, {**state, **places}, key)
        out = permute(out, back, order)
    return checkpoint_name(out.reshape(*jnp.shape(x)[:-1], w2.shape[1]), "s24_ffn")
