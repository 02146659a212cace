"""A list of all methods with their papers, sparse products and memory."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jax_sparse24.engine.plan import FFN
from jax_sparse24.methods.base import Method
from jax_sparse24.patterns import check_size


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method with its default options.

    name: its class in `s24.methods`.
    papers: arXiv numbers; the method is named after the first.
    products: how each product of an FFN is sparse, in words, by the product's name; "dense" if it is not.
    state_bytes, adapter_bytes: memory beside the weights of one FFN (d, f) in float32; adapters are
        parameters, so an optimiser adds its moments to them.
    when: whom the method is for."""

    name: str
    papers: tuple[str, ...]
    products: dict[str, str]
    state_bytes: int
    adapter_bytes: int
    when: str


def list(d: int = 768, f: int = 3072) -> Sequence[Entry]:
    """Lists every method of `s24.methods`.

    d, f: model and FFN width for which memory is counted.

    Returns: an `Entry` for each method, in the order of their names.
    Raises: TypeError or ValueError for a width that is no positive int."""
    for name, value in (("d", d), ("f", f)):
        check_size("methods.list", name, value)
    public = vars(sys.modules["jax_sparse24.methods"]).values()
    classes = {c for c in public if inspect.isclass(c) and issubclass(c, Method) and c is not Method}
    return [_entry(c, d, f) for c in sorted(classes, key=lambda c: c.__name__)]


def _entry(kind: type[Method], d: int, f: int) -> Entry:
    method = kind()
    plan = method.ffn_plan()
    products = {}
    for product in FFN:
        row, words = plan.row(product), plan.describe(product)
        products[product] = f"{row.operand}: {words}" if row else f"dense{words and ', '}{words}"
    papers = tuple(re.findall(r"\d{4}\.\d{5}", sys.modules[kind.__module__].__doc__ or ""))
    shapes = {"w1": (d, f), "w2": (f, d)}
    state = [method.state_shapes(shape, role) for role, shape in shapes.items()]
    adapters = [
        jax.eval_shape(partial(method.adapters, role=role), jax.ShapeDtypeStruct(shape, jnp.float32))
        for role, shape in shapes.items()
    ]
    return Entry(kind.__name__, papers, products, _bytes(state), _bytes(adapters), method.when)


def _bytes(shapes) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
