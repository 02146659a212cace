"""The sparse and dense layers of a model in words, for `explain`."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from jax_sparse24.methods.base import Method
from jax_sparse24.nn import sparse_layers
from jax_sparse24.nn.function import Function
from jax_sparse24.nn.state import equinox_of
from jax_sparse24.surgery import left_dense


def described(what: Any, table: Callable[[Method, str | None], str]) -> str:
    """The layers of a model, with the table of each method that they have.

    what: a layer or model of NNX or Equinox, or a `s24.Function`.
    table: (method, implementation) -> its table.

    Returns: lines of text.
    Raises: TypeError if `what` is none of these."""
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
