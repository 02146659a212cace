"""`intercept` makes products with parameters sparse in any function, whatever library its model is of.

The function is traced to a jaxpr, which is evaluated with other products in place of those of parameters:
`jnp.einsum`, `jnp.dot`, `@` and `jax.lax.dot_general` all are `dot_general` there."""

import difflib
import functools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_sparse24.dispatch.decision import IMPLEMENTATIONS
from jax_sparse24.engine.call import plan_of
from jax_sparse24.engine.contraction import of_axes
from jax_sparse24.engine.linear import sparse_dot

# What these make of a parameter is the parameter in another shape or dtype, or a part of it.
PASSING = {
    *("convert_element_type", "transpose", "reshape", "squeeze", "copy", "copy_p", "sharding_constraint"),
    *("slice", "dynamic_slice", "optimization_barrier", "reduce_precision", "pvary"),
}


def intercept(
    function: Callable, method, where: str | None = None, *, implementation: str | None = None
) -> Callable:
    """A function that computes the same with sparse products of its parameters.

    It is for models of any library, which stay as they are: every product of an array with a parameter, which
    may be cast, reshaped, transposed or sliced before, runs as `method` says, also in functions that
    `jax.jit`, `jax.checkpoint`, `jax.lax.scan`, `jax.lax.cond` and `jax.vmap` transform. Products of two
    activations, as in attention, or of two parameters, and products with axes of a batch stay dense. The
    method may have no state, as `STE`, `SRSTE` and `STEP`; for others there are `s24.sparsify` and
    `s24.linen`.

    function: takes the parameters, a pytree of arrays, first, such as the `apply` of a Linen model.
    method: from `s24.methods`, without state or noise.
    where: a regular expression that the whole path of a parameter must match, such as ".*/mlp/.*"; names and
        indices are joined by "/". None for every parameter with at least two axes but those of embeddings and
        heads, which have a name such as "embedding" or "head" on their path.
    implementation: as in `s24.sparse_dot`.

    Returns: a function with the arguments of `function`, to be transformed as any other. Its trace warns of
        products that the method does not fit and that stay dense, with the reason. Its attribute `explain`
        takes the same arguments, computes nothing, and returns a text with a line for each parameter.
    Raises: TypeError (function, method), ValueError (a method with state, noise or without a plan for a
        single layer, an expression that does not compile); a call raises ValueError where no product is with
        a parameter that matches."""
    if not callable(function):
        raise TypeError(f"intercept: needs a function of (params, ...), got {type(function).__name__}.")
    plan = plan_of("intercept", method, "linear_plan")
    name = type(method).__name__
    if not plan.rows:
        raise ValueError(
            f"intercept: {name} makes no product of a single layer sparse; use s24.sparsify, which finds "
            "feed-forward blocks, or a method such as STE()."
        )
    if method.state_shapes((8, 8)) or method.stochastic:
        raise ValueError(
            f"intercept: {name} keeps masks or draws noise, for which a function has no place; use "
            "s24.sparsify or s24.linen, or a method without state, such as STE()."
        )
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"intercept: implementation {implementation!r} is unknown; use None or one of {IMPLEMENTATIONS}."
        )
    if where is not None and not isinstance(where, str):
        raise TypeError(f"intercept: where must be a string, got {where!r}.")
    try:
        re.compile(where or "")
    except re.error as error:
        raise ValueError(
            f"intercept: where={where!r} is no regular expression: {error}. Write '.*' for any text."
        ) from error

    def evaluated(params, args, options):
        """What the function returns, and what was found."""
        leaves, structure = jax.tree.flatten((params, args, options))
        dynamic = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        told: list = []  # what the function returns, as a tree

        def flat(*arrays):
            given = iter(arrays)
            whole = [next(given) if moves else leaf for leaf, moves in zip(leaves, dynamic, strict=True)]
            params, args, options = jax.tree.unflatten(structure, whole)
            out = function(params, *args, **options)
            told.append(jax.tree.structure(out))
            return jax.tree.leaves(out)

        arrays = [leaf for leaf, moves in zip(leaves, dynamic, strict=True) if moves]
        paths = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        paths = [path for path, moves in zip(paths, dynamic, strict=False) if moves]
        places = [*paths, *[None] * (len(arrays) - len(paths))]
        found = Found(method, implementation, where)
        traced = jax.make_jaxpr(flat)(*arrays)
        inputs = [Value(x, path) for x, path in zip(arrays, places, strict=True)]
        outputs = _evaluate(traced, inputs, found)
        return jax.tree.unflatten(told[0], outputs), found, paths

    @functools.wraps(function)
    def run(params, *args, **options):
        out, found, paths = evaluated(params, args, options)
        found.check(paths)
        return out

    def explain(params, *args, **options):
        leaves, structure = jax.tree.flatten((params, args, options))
        dynamic = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        told = []

        def traced(arrays):
            given = iter(arrays)
            whole = [next(given) if moves else leaf for leaf, moves in zip(leaves, dynamic, strict=True)]
            told.append(evaluated(*jax.tree.unflatten(structure, whole))[1])

        jax.eval_shape(traced, [leaf for leaf, moves in zip(leaves, dynamic, strict=True) if moves])
        return told[0].lines(params)

    run.explain = explain
    return run


class Value(NamedTuple):
    """A value of a trace.

    array: the value.
    path: of the parameter that it is, maybe cast or in another shape; None for other values."""

    array: Any
    path: str | None = None


class Found:
    """The products with parameters that a trace has met.

    method, implementation, where: as in `intercept`."""

    def __init__(self, method, implementation, where):
        self.method, self.implementation, self.where = method, implementation, where
        self.taken: set[str] = set()
        self.unfit: dict[str, str] = {}

    def takes(self, path: str | None) -> bool:
        """Whether products with a parameter become sparse.

        path: of the parameter; None for what is none."""
        if path is None:
            return False
        if self.where is not None:
            return re.fullmatch(self.where, path) is not None
        return not re.search(r"embed|(^|[/_])(lm_)?head([/_]|$)|logits|router", path)

    def lines(self, params) -> str:
        """A line for each parameter with two axes or more: its path, its shape, and what its products are.

        params: what the function was traced with."""
        said = []
        for place, leaf in jax.tree_util.tree_leaves_with_path(params):
            path = _name(place)
            reason = self.unfit.get(path, "no product with it is met")
            reason = reason if self.takes(path) else "it is left alone"
            by = f"sparse by {self.method}" if path in self.taken else f"dense: {reason}"
            if jnp.ndim(leaf) > 1:
                said.append(f"{path}: {jnp.shape(leaf)}, {by}")
        return "\n".join(said)

    def check(self, paths: list[str]) -> None:
        """Warns of products that stay dense, and raises ValueError if all do.

        paths: of all parameters."""
        listed = "; ".join(f"{path}: {reason}" for path, reason in self.unfit.items())
        if not self.taken and self.unfit:
            raise ValueError(f"intercept: no product of a parameter that matches can be sparse. {listed}.")
        if not self.taken:
            literal = re.sub(r"\\?[.*^$+?()\[\]|]+", "", self.where or "")
            near = max(
                paths, key=lambda path: difflib.SequenceMatcher(None, path, literal).ratio(), default=""
            )
            matched = [path for path in paths if self.takes(path)]
            what = (
                f"multiplies by {matched[0]!r}, which where={self.where!r} takes"
                if matched
                else (f"has a parameter that where={self.where!r} matches; the nearest path is {near!r}")
            )
            raise ValueError(f"intercept: no product of the function {what}.")
        if self.unfit:
            warnings.warn(f"intercept: {len(self.unfit)} products stay dense. {listed}.", stacklevel=4)


def _name(path) -> str:
    return "/".join(re.sub(r"^[.\[']+|['\]]+$", "", str(part)) for part in path)


def _evaluate(jaxpr, inputs: list[Value], found: Found) -> list:
    """The results of a jaxpr, with products of parameters made sparse."""
    consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    values = dict(zip(jaxpr.constvars, map(Value, consts), strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(var) -> Value:
        return Value(var.val) if isinstance(var, Literal) else values[var]

    for equation in jaxpr.eqns:
        given = [read(var) for var in equation.invars]
        values |= dict(zip(equation.outvars, _step(equation, given, found), strict=True))
    return [read(var).array for var in jaxpr.outvars]


def _step(equation, given: list[Value], found: Found) -> list[Value]:
    """The results of one equation."""
    name, options = equation.primitive.name, equation.params
    arrays = [value.array for value in given]
    if not any(found.takes(value.path) for value in given):
        return _as_written(equation, arrays, name, given)
    if name == "dot_general":
        product = _product(equation, given, found)
        return _as_written(equation, arrays, name, given) if product is None else [Value(product)]
    inside = options.get("jaxpr")
    paths = [value.path for value in given]

    def run(jaxpr, *arrays, paths=paths):
        return _evaluate(jaxpr, [Value(x, path) for x, path in zip(arrays, paths, strict=True)], found)

    if name in ("jit", "pjit", "closed_call"):
        return [Value(x) for x in run(inside, *arrays)]
    if name in ("remat2", "checkpoint"):
        again = jax.checkpoint(
            functools.partial(run, inside), prevent_cse=options["prevent_cse"], policy=options["policy"]
        )
        return [Value(x) for x in again(*arrays)]
    if name == "cond":
        branches = [functools.partial(run, branch, paths=paths[1:]) for branch in options["branches"]]
        return [Value(x) for x in jax.lax.switch(arrays[0], branches, *arrays[1:])]
    if name == "scan":
        return [Value(x) for x in _scan(equation, given, found)]
    if any("jaxpr" in key for key in options):
        for path in {value.path for value in given if found.takes(value.path)}:
            found.unfit.setdefault(path, f"it is used within {name}, whose products are not looked at")
    return _as_written(equation, arrays, name, given)


def _as_written(equation, arrays, name: str, given: list[Value]) -> list[Value]:
    options = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        out = equation.primitive.bind(*arrays, **options)
    path = given[0].path if name in PASSING else None
    return [Value(x, path) for x in (out if equation.primitive.multiple_results else [out])]


def _scan(equation, given: list[Value], found: Found) -> list:
    """A scan whose body is evaluated. What is constant, carried or scanned is told by the number of axes."""
    body, options = equation.params["jaxpr"], equation.params
    inner = getattr(body, "jaxpr", body)
    carried = sum(
        out.aval.ndim == var.aval.ndim for out, var in zip(equation.outvars, inner.outvars, strict=True)
    )
    whole = sum(
        var.aval.ndim == value.aval.ndim for var, value in zip(inner.invars, equation.invars, strict=True)
    )
    consts, init, xs = given[: whole - carried], given[whole - carried : whole], given[whole:]

    def step(carry, slices):
        values = [*consts, *map(Value, carry), *(Value(x, v.path) for x, v in zip(slices, xs, strict=True))]
        out = _evaluate(body, values, found)
        return out[:carried], out[carried:]

    carry, ys = jax.lax.scan(
        step,
        [value.array for value in init],
        [value.array for value in xs],
        length=options["length"],
        reverse=options["reverse"],
        unroll=options["unroll"],
    )
    return [*carry, *ys]


def _product(equation, given: list[Value], found: Found):
    """A product with a parameter by the method; None if it stays dense, with the reason in `found`."""
    options = equation.params
    (left, right), (of_left, of_right) = given, options["dimension_numbers"][0]
    weight_first = found.takes(left.path)
    if left.path is not None and right.path is not None:
        return None  # of two parameters
    (weight, at_weight), (x, at_x) = (left, of_left), (right, of_right)
    if not weight_first:
        weight, at_weight, x, at_x = x, at_x, weight, at_weight
    w, x = weight.array, x.array
    if options["dimension_numbers"][1] != ((), ()) and any(options["dimension_numbers"][1]):
        found.unfit.setdefault(weight.path, "an axis of a batch makes several products of it")
        return None
    if w.ndim < 2 or not at_weight:
        return None
    dtype = equation.outvars[0].aval.dtype
    contraction = of_axes(at_x, at_weight, x.ndim, w.ndim)
    left_axes, sizes = x.ndim - len(at_x), [w.shape[axis] for axis in contraction.free]
    try:
        _check_precision(options["precision"])
        y = contraction.product(x, w.shape, lambda x: _multiply(x, contraction.matrix(w), found))
    except (TypeError, ValueError) as error:
        found.unfit.setdefault(weight.path, str(error).removeprefix("sparse_dot: ").rstrip("."))
        return None
    found.taken.add(weight.path)
    if weight_first:  # whose axes come first in the result
        y = jnp.moveaxis(y, range(left_axes, left_axes + len(sizes)), range(len(sizes)))
    return y.astype(dtype)


def _multiply(x, w, found: Found):
    method = found.method
    lead, (d, f) = x.shape[:-1], w.shape
    for name, row in method.linear_plan().rows:
        if row.operand == "w":
            row.by.check("sparse_dot", (d, f), -1 if name == "dgrad" else -2, "parameter")
    rows = x.reshape(math.prod(lead), d)
    return sparse_dot(rows, w, method, implementation=found.implementation).reshape(*lead, f)


def _check_precision(precision) -> None:
    each = precision if isinstance(precision, tuple) else (precision,)
    if any(one not in (None, jax.lax.Precision.DEFAULT) for one in each):
        raise ValueError(f"precision={precision} is an option that sparse products do not have")
