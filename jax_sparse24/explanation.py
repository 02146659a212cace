"""`explain` shows which products of a method or model are sparse, what runs each of them, and why."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_sparse24.choices import choice_table, decided_block, method_table
from jax_sparse24.dispatch.decision import decide
from jax_sparse24.methods.base import Method
from jax_sparse24.nn import sparse_layers
from jax_sparse24.nn.function import Function
from jax_sparse24.nn.state import equinox_of
from jax_sparse24.patterns import as_dtype, check_block
from jax_sparse24.surgery import left_dense


def explain(
    what: Any,
    *,
    shape: tuple[int, int, int] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> None:
    """Prints which operand of which product becomes sparse, by which implementation it runs, and why.

    what: a method from `s24.methods`, or a layer or model of NNX or Equinox, whose sparse layers are listed
        with the table of each method, and its dense linear layers with the reason; or a `s24.Function`, whose
        parameters are.
    shape: (T, d, f), tokens, model width and FFN width; prints the decision for each product of an FFN of
        that shape, with the measurements behind it, instead of the table.
    dtype: of the products.
    implementation: for a method, as in `s24.nn.FFN`; layers have their own.

    Raises: TypeError if `what` is neither, or for a dtype that products do not have; ValueError for a shape
        that is not three positive ints or does not divide into the method's groups, or an unknown
        implementation, RuntimeError for one that cannot run here."""
    if shape is not None:
        check_block("explain", "shape", shape)
    if isinstance(what, Method) or shape is not None:
        dtype = as_dtype("explain", dtype)
    if isinstance(what, Method):
        decide("explain", dtype, implementation)  # whether the name is known and can run here

    def table(method, implementation):
        if shape is None:
            return method_table(method, dtype, implementation)
        return choice_table(decided_block(method, shape, dtype, implementation))

    print(table(what, implementation) if isinstance(what, Method) else _described(what, table))


def _described(what: Any, table: Callable[[Method, str | None], str]) -> str:
    """The layers of a model, with the table of each method that they have."""
    if isinstance(what, Function):
        return what.explain()
    library = equinox_of(what)
    if library is None and not isinstance(what, nnx.Module):
        raise TypeError(
            "explain: needs a method from s24.methods, an nnx.Module or an equinox.Module, got "
            f"{type(what).__name__}."
        )
    by_method: dict[tuple[Method, str | None], list] = {}
    for path, layer in sparse_layers(library.products(what) if library else what):
        by_method.setdefault((layer.method, layer.implementation), []).append((path, layer))
    lines = [] if by_method else ["No sparse layers: every product is dense."]
    for (method, chosen), layers in by_method.items():
        lines.append(f"{len(layers)} layers with {method}:")
        for path, layer in layers:
            mode = "" if layer.sparse else "   (dense mode)"
            path = "/".join(map(str, path)).replace("/", ".")
            lines.append(f"  {path or '(the model)'}: kernel {tuple(layer.kernel.shape)}{mode}")
        lines.append(table(method, chosen))
    methods = {method for method, _ in by_method}
    dense = left_dense(what, methods.pop() if len(methods) == 1 else None)
    if dense:
        lines.append("Dense linear layers:")
    for path, shape, reason in dense:
        lines.append(f"  {path.replace('/', '.') or '(the model)'}: kernel {shape}: {reason}")
    return "\n".join(lines)
