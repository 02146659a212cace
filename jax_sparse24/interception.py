"""`intercept` makes products with parameters sparse in any function, whatever library its model is of.

The function is traced to a jaxpr, which is evaluated with other products in place of those of parameters:
`jnp.einsum`, `jnp.dot`, `@` and `jax.lax.dot_general` all are `dot_general` there."""

import difflib
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_sparse24.dispatch.decision import check_implementation
from jax_sparse24.engine.call import plan_of
from jax_sparse24.engine.contraction import of_axes
from jax_sparse24.engine.linear import sparse_dot

# What these make of a parameter is the parameter in another shape or dtype, or a part of it.
PASSING = {
    *("convert_element_type", "transpose", "reshape", "squeeze", "copy", "copy_p", "sharding_constraint"),
    *("slice", "dynamic_slice", "split", "optimization_barrier", "reduce_precision", "pvary", "name"),
}


def intercept(
    function: Callable, method: Any, where: str | None = None, *, implementation: str | None = None
) -> Callable:
    """A function that computes the same with sparse products of its parameters.

    It is for models of any library, which stay as they are: every product of an array with a parameter, which
    may be cast, reshaped, transposed or sliced before, runs as `method` says, also in functions that
    `jax.jit`, `jax.checkpoint`, `jax.lax.scan`, `jax.lax.cond` and `jax.vmap` transform. Products of two
    activations, as in attention, or of two parameters, and products with axes of a batch stay dense. The
    method may have no state, as `STE`, `SRSTE` and `STEP`; for others there is `s24.Function`.

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
    checked("intercept", function, method, where, implementation)
    if not method.linear_plan().rows:
        raise ValueError(f"intercept: {method} makes no product sparse; use a method such as STE().")
    if method.state_shapes((8, 8)) or method.stochastic:
        raise ValueError(
            f"intercept: {type(method).__name__} keeps masks or draws noise, for which a call has no place; "
            "use s24.Function with s24.Loop, s24.sparsify or s24.linen, or a method without state, such as "
            "STE()."
        )

    @functools.wraps(function)
    def run(params, *args, **options):
        found = Found(method, implementation, where)
        out = evaluate(function, found, params, args, options)
        found.check(params)
        return out

    def explain(params, *args, **options):
        found = Found(method, implementation, where)
        abstractly(functools.partial(evaluate, function, found), params, args, options)
        return found.lines(params)

    run.explain = explain
    return run


def checked(op: str, function, method, where, implementation) -> None:
    """Raises TypeError or ValueError for arguments of another kind, as `intercept` says.

    op: the caller, for messages.
    function, method, where, implementation: as in `intercept`."""
    if not callable(function):
        raise TypeError(f"{op}: needs a function of (params, ...), got {type(function).__name__}.")
    plan = plan_of(op, method, "linear_plan")
    if not plan.rows and method.ffn_plan().rows:
        raise ValueError(
            f"{op}: {type(method).__name__} makes no product of a single layer sparse; use s24.sparsify, "
            "which finds feed-forward blocks, or a method with sparse weights, such as STE()."
        )
    check_implementation(op, implementation)
    if where is not None:
        check_where(op, where)


def check_where(op: str, where) -> None:
    """Raises TypeError or ValueError for what is no regular expression.

    op: the caller, for messages.
    where: from its caller."""
    if not isinstance(where, str):
        raise TypeError(f"{op}: where must be a string, got {where!r}.")
    try:
        re.compile(where)
    except re.error as error:
        raise ValueError(
            f"{op}: where={where!r} is no regular expression: {error}. Write '.*' for any text, as in "
            "'.*/mlp/.*'."
        ) from error


def evaluate(function: Callable, found: "Found", params, args=(), options=None):
    """What a function returns with sparse products of its parameters.

    function: takes the parameters first.
    found: says which products are sparse, and is told what is met.
    params, args, options: what the function is called with; leaves that are no arrays are as they are.

    Returns: as the function does."""
    arrays, rebuild = parted((params, args, options or {}), is_array)
    told: list = []  # what the function returns, as a tree

    def flat(*arrays):
        params, args, options = rebuild(arrays)
        out = function(params, *args, **options)
        told.append(jax.tree.structure(out))
        return jax.tree.leaves(out)

    named = zip(paths_of(params), jax.tree.leaves(params), strict=True)
    paths = [path for path, leaf in named if is_array(leaf)]
    places = [*paths, *[None] * (len(arrays) - len(paths))]
    traced = jax.make_jaxpr(flat)(*arrays)
    out = _evaluate(traced, list(map(Value, arrays, places)), found)
    return jax.tree.unflatten(told[0], [value.array for value in out])


def abstractly(call: Callable, *arguments) -> None:
    """Traces a call, which computes nothing.

    call: of the arguments, in which every array is traced.
    arguments: pytrees of arrays, of their shapes (`jax.ShapeDtypeStruct`), and of other leaves, which stay as
        they are."""
    arrays, rebuild = parted(arguments, lambda leaf: is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))

    def traced(arrays):
        call(*rebuild(arrays))

    jax.eval_shape(traced, arrays)


def is_array(leaf) -> bool:
    """Whether a leaf of a pytree is an array of JAX or NumPy.

    leaf: any object."""
    return isinstance(leaf, jax.Array | np.ndarray)


def parted(tree, taken: Callable[[Any], bool]) -> tuple[list, Callable]:
    """Takes some leaves out of a pytree.

    tree: a pytree.
    taken: says of a leaf whether it is taken out.

    Returns: these leaves, and a function that takes as many others and returns the tree with them in these
        places."""
    leaves, structure = jax.tree.flatten(tree)
    chosen = [taken(leaf) for leaf in leaves]
    out = [leaf for leaf, is_taken in zip(leaves, chosen, strict=True) if is_taken]
    rest = [None if is_taken else leaf for leaf, is_taken in zip(leaves, chosen, strict=True)]

    def rebuild(others):
        given = iter(others)
        whole = [next(given) if is_taken else leaf for leaf, is_taken in zip(rest, chosen, strict=True)]
        return jax.tree.unflatten(structure, whole)

    return out, rebuild


class Value(NamedTuple):
    """A value of a trace.

    array: the value.
    path: of the parameter that it is, maybe cast or in another shape; None for other values."""

    array: Any
    path: str | None = None


class Found:
    """The products with parameters that a trace meets, and how they run. Methods have no state here.

    method, implementation, where: as in `intercept`.
    op: the function that the user called, for messages."""

    branches = True  # whether products within `jax.lax.cond` may be sparse

    def __init__(self, method, implementation, where, op: str = "intercept"):
        self.method, self.implementation, self.where, self.op = method, implementation, where, op
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

    def named(self, path: str) -> str | None:
        """Names the next product with a parameter.

        path: of the parameter.

        Returns: the name; None if the product stays dense.
        Raises: ValueError of a `Function` for a product that its example did not have."""
        return path

    def refuse(self, path: str, name: str, error: Exception) -> None:
        """Takes note of a product that the method does not fit, and that stays dense.

        path: of the parameter.
        name: of the product.
        error: says why.

        Raises: the error itself where a `Function` runs, whose products were found before."""
        self.unfit.setdefault(path, str(error).removeprefix("sparse_dot: ").rstrip("."))

    def multiply(self, name: str, x, w):
        """A product by the method.

        name: of the product.
        x: (..., in).
        w: (in, out), what was made of the parameter.

        Returns: (..., out).
        Raises: TypeError, ValueError for a product that the method does not fit."""
        return self.product(x, w, None, None)

    def product(self, x, w, state, key):
        """`s24.sparse_dot` after a check of the groups along the parameter.

        x, w: as in `multiply`.
        state, key: of the method.

        Returns: (..., out)."""
        lead, (d, f) = x.shape[:-1], w.shape
        for name, row in self.method.linear_plan().rows:
            if row.operand == "w":
                row.by.check("sparse_dot", (d, f), -1 if name == "dgrad" else -2, "parameter")
        rows = x.reshape(math.prod(lead), d)
        y = sparse_dot(rows, w, self.method, state, key, implementation=self.implementation)
        return y.reshape(*lead, f)

    def inside(self, slices: dict | None = None) -> "Found":
        """What meets the products of a function that is traced by itself, such as the body of a scan.

        slices: of what `scanned` returned; None where nothing is scanned.

        Returns: a `Found`."""
        return self

    def scanned(self, run: Callable[["Found"], Any]) -> dict:
        """What a scan must slice, besides what the function scans.

        run: evaluates the scan's body.

        Returns: a pytree whose arrays have the scan's leading axis."""
        return {}

    def left(self, inner: "Found", told: dict) -> None:
        """Takes over what was met in a function that `inside` was asked for.

        inner: of `inside`.
        told: its `matrices` as the transformed function returned them, so with a scan's leading axis."""

    @property
    def matrices(self) -> dict:
        """The parameters of all products as they are multiplied, where a subclass collects them."""
        return {}

    def lines(self, params) -> str:
        """Says of each parameter with two axes or more what its products are.

        params: what the function was traced with.

        Returns: lines with a path, a shape, and whether its products are sparse; if not, why."""
        said = []
        for path, leaf in zip(paths_of(params), jax.tree.leaves(params), strict=True):
            reason = self.unfit.get(path, "no product with it is met")
            reason = reason if self.takes(path) else "it is left alone"
            by = f"sparse by {self.method}" if path in self.taken else f"dense: {reason}"
            if len(getattr(leaf, "shape", ())) > 1:
                said.append(f"{path}: {jnp.shape(leaf)}, {by}")
        return "\n".join(said)

    def check(self, params) -> None:
        """Warns of products that stay dense.

        params: what the function was traced with.

        Raises: ValueError if all of them do."""
        listed = "; ".join(f"{path}: {reason}" for path, reason in self.unfit.items())
        if not self.taken and self.unfit:
            raise ValueError(f"{self.op}: no product of a parameter that matches can be sparse. {listed}.")
        if not self.taken:
            paths = paths_of(params)
            matched = [path for path in paths if self.takes(path)]
            what = (
                f"multiplies by {matched[0]!r}, which where={self.where!r} takes"
                if matched
                else f"has a parameter that where={self.where!r} matches; the nearest path is "
                f"{nearest_path(paths, self.where)!r}"
            )
            raise ValueError(f"{self.op}: no product of the function {what}.")
        if self.unfit:
            warnings.warn(f"{self.op}: {len(self.unfit)} products stay dense. {listed}.", stacklevel=3)


def nearest_path(paths: Iterable[str], where: str | None) -> str:
    """The path that was probably meant by an expression which matches none.

    paths: names with "/" between them.
    where: a regular expression; None as "".

    Returns: the path which has the stretch of names that is most like the text of the expression; "" of no
        path."""
    text = re.sub(r"\\?[.*^$+?()\[\]|]+", "", where or "").strip("/")

    def likeness(path: str) -> float:
        names = path.split("/")
        ends = itertools.combinations(range(len(names) + 1), 2)
        stretches = ("/".join(names[start:end]) for start, end in ends)
        return max(difflib.SequenceMatcher(None, words, text, autojunk=False).ratio() for words in stretches)

    return max(paths, key=likeness, default="")


def paths_of(params, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The path of every leaf of a pytree, such as "mlp/layers/0/weight".

    params: a pytree.
    is_leaf: as in `jax.tree.flatten`.

    Returns: names and indices joined by "/", in the order of the leaves."""
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf)]


def _name(path) -> str:
    return "/".join(re.sub(r"^[.\[']+|['\]]+$", "", str(part)) for part in path)


def _evaluate(jaxpr, inputs: list[Value], found: Found) -> list[Value]:
    """The results of a jaxpr, with products of parameters made sparse."""
    consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    values = dict(zip(jaxpr.constvars, map(Value, consts), strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(var) -> Value:
        return Value(var.val) if isinstance(var, Literal) else values[var]

    for equation in jaxpr.eqns:
        given = [read(var) for var in equation.invars]
        values |= dict(zip(equation.outvars, _step(equation, given, found), strict=True))
    return [read(var) for var in jaxpr.outvars]


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
    if name in ("jit", "pjit", "closed_call"):
        return _evaluate(inside, given, found)
    if name in ("remat2", "checkpoint"):
        inner = found.inside()

        def body(*arrays):
            return _arrays(inside, arrays, given, inner, "checkpoint"), inner.matrices

        again = jax.checkpoint(body, prevent_cse=options["prevent_cse"], policy=options["policy"])
        out, told = again(*arrays)
        found.left(inner, told)
        return list(map(Value, out))
    if name == "cond" and found.branches:
        branches = [
            lambda *arrays, branch=branch: _arrays(branch, arrays, given[1:], found, name)
            for branch in options["branches"]
        ]
        return list(map(Value, jax.lax.switch(arrays[0], branches, *arrays[1:])))
    if name == "scan":
        return list(map(Value, _scan(equation, given, found)))
    if any("jaxpr" in key or key == "branches" for key in options):
        for path in {value.path for value in given if found.takes(value.path)}:
            found.unfit.setdefault(path, f"it is used within {name}, whose products are not looked at")
    return _as_written(equation, arrays, name, given)


def _arrays(jaxpr, arrays, given: list[Value], found: Found, name: str) -> list:
    """The results of a jaxpr that a transformation runs, which hands out arrays alone.

    arrays: what stands in place of those of `given`.
    name: of the transformation."""
    values = [Value(x, value.path) for x, value in zip(arrays, given, strict=True)]
    return _without_paths(_evaluate(jaxpr, values, found), found, name)


def _without_paths(values: list[Value], found: Found, name: str) -> list:
    """The arrays of values; `found` takes note of each that is a parameter, with which products stay dense.

    name: of the transformation through which they pass."""
    for path in {value.path for value in values if found.takes(value.path)}:
        found.unfit.setdefault(path, f"it passes through {name}, behind which it is not followed")
    return [value.array for value in values]


def _as_written(equation, arrays, name: str, given: list[Value]) -> list[Value]:
    options = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        out = equation.primitive.bind(*arrays, **options)
    results = out if equation.primitive.multiple_results else [out]
    paths = [None] * len(results)
    if name in PASSING:
        paths = [value.path for value in given]
        if len(paths) != len(results):  # places to slice at are no parameters, and one is split into several
            paths = [paths[0]] * len(results)
    return [Value(x, path) for x, path in zip(results, paths, strict=True)]


def _scan(equation, given: list[Value], found: Found) -> list:
    """A scan whose body is evaluated. What is constant, carried or scanned is told by the number of axes."""
    body, options = equation.params["jaxpr"], equation.params
    inner_jaxpr = getattr(body, "jaxpr", body)
    carried = sum(
        out.aval.ndim == var.aval.ndim for out, var in zip(equation.outvars, inner_jaxpr.outvars, strict=True)
    )
    whole = sum(
        var.aval.ndim == value.aval.ndim
        for var, value in zip(inner_jaxpr.invars, equation.invars, strict=True)
    )
    consts, init, xs = given[: whole - carried], given[whole - carried : whole], given[whole:]

    inner = []

    def step(carry, slices):
        slices, own = slices
        inner.append(found.inside(own))
        values = [*consts, *map(Value, carry), *(Value(x, v.path) for x, v in zip(slices, xs, strict=True))]
        out = _without_paths(_evaluate(body, values, inner[-1]), found, "scan")
        return out[:carried], (out[carried:], inner[-1].matrices)

    def once(meets):
        shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in inner_jaxpr.invars]
        paths = [value.path for value in (*consts, *map(Value, init), *xs)]
        jax.eval_shape(lambda *a: _evaluate(body, list(map(Value, a, paths)), meets), *shapes)

    carry, (ys, told) = jax.lax.scan(
        step,
        _without_paths(init, found, "scan"),
        ([value.array for value in xs], found.scanned(once)),
        length=options["length"],
        reverse=options["reverse"],
        unroll=options["unroll"],
    )
    found.left(inner[-1], told)
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
    if (name := found.named(weight.path)) is None:
        return None
    dtype = equation.outvars[0].aval.dtype
    contraction = of_axes(at_x, at_weight, x.ndim, w.ndim)
    left_axes, sizes = x.ndim - len(at_x), [w.shape[axis] for axis in contraction.free]
    try:
        _check_precision(options["precision"])
        _check_result(dtype, jnp.result_type(x, w))
        y = contraction.product(x, w.shape, lambda x: found.multiply(name, x, contraction.matrix(w)))
    except (TypeError, ValueError) as error:
        found.refuse(weight.path, name, error)
        return None
    found.taken.add(weight.path)
    if weight_first:  # whose axes come first in the result
        y = jnp.moveaxis(y, range(left_axes, left_axes + len(sizes)), range(len(sizes)))
    return y.astype(dtype)


def _check_precision(precision) -> None:
    each = precision if isinstance(precision, tuple) else (precision,)
    if any(one not in (None, jax.lax.Precision.DEFAULT) for one in each):
        raise ValueError(f"precision={precision} is an option that sparse products do not have")


def _check_result(dtype, promoted) -> None:
    """ValueError for a result that is wider than the operands: cast from theirs it would be rounded."""
    if jnp.promote_types(dtype, promoted) != promoted:
        raise ValueError(
            f"preferred_element_type={dtype} is an option that sparse products of {promoted} do not have"
        )
