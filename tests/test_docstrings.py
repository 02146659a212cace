"""Docstrings of what users call: every argument has a line that explains it, and so has the result."""

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re

from flax import linen as nn

import jax_sparse24 as s24
from jax_sparse24 import interception, linen, surgery, verification
from jax_sparse24.engine import contraction, operand, plan
from jax_sparse24.methods import base
from jax_sparse24.nn import fitting, replaced

MODULES = [
    *(s24, s24.measure, s24.methods, s24.nn, s24.optim, s24.patterns, s24.sparsifiers, base, operand, plan),
    *(contraction, interception, linen, surgery, verification, fitting, replaced, s24.sharding),
    *(
        importlib.import_module(f"jax_sparse24.ops.{module.name}")
        for module in pkgutil.iter_modules(s24.ops.__path__)
        if not module.ispkg
    ),
]
if importlib.util.find_spec("safetensors"):  # of the extra huggingface
    MODULES.append(importlib.import_module("jax_sparse24.huggingface"))


def is_public(module, name: str, thing) -> bool:
    """A package shows what it imports, any other module what it defines."""
    if name.startswith("_") or not (inspect.isclass(thing) or inspect.isfunction(inspect.unwrap(thing))):
        return False
    own = thing.__module__.startswith("jax_sparse24.") if hasattr(module, "__path__") else False
    return own or thing.__module__ == module.__name__


def members(kind: type) -> dict[str, list]:
    """The public methods that a class defines, each with all classes that define it, the nearest first."""
    fields = getattr(kind, "__dataclass_fields__", {})  # of which a function may be the default
    functions = [n for n, v in vars(kind).items() if inspect.isfunction(unbound(v)) and n not in fields]
    names = [name for name in functions if not name.startswith("_")]
    return {name: [c for c in kind.__mro__ if name in vars(c)] for name in names}


def unbound(value):
    return getattr(value, "__func__", value)


def arguments(thing) -> list[str]:
    """Names of the arguments of a function or a class, and of the fields of a dataclass or a tuple."""
    if dataclasses.is_dataclass(thing):
        inherited = {"parent", "name"} if issubclass(thing, nn.Module) else set()  # of every Linen module
        names = [field.name for field in dataclasses.fields(thing) if field.name not in inherited]
    elif inspect.isclass(thing) and issubclass(thing, tuple):
        names = thing._fields
    elif inspect.isclass(thing):
        names = inspect.signature(thing.__init__).parameters if "__init__" in vars(thing) else ()
    else:
        names = inspect.signature(thing).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def explained(doc: str) -> set[str]:
    """Names before the colon of a line such as "x, axis: as in `mask24`."."""
    lines = re.findall(r"^ *((?:\w+, )*\w+): ", doc, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def documented() -> dict[str, tuple[list[str], str]]:
    """Arguments and docstring of every public function, class and method, by its full name.

    A method has the docstrings of the classes that define it; a class has those of its dataclass bases."""
    found = {}
    for module in MODULES:
        for name, thing in vars(module).items():
            if not is_public(module, name, thing):
                continue
            full = f"{thing.__module__}.{name}"
            docs = (
                [c.__doc__ or "" for c in thing.__mro__] if inspect.isclass(thing) else [thing.__doc__ or ""]
            )
            found[full] = arguments(thing), "\n".join(docs[: len(docs) if docs[0] else 1])
            for member, classes in members(thing).items() if inspect.isclass(thing) else ():
                docs = [unbound(vars(c)[member]).__doc__ or "" for c in classes]
                found[f"{full}.{member}"] = arguments(unbound(vars(thing)[member])), "\n".join(docs)
    return found


FOUND = documented()


def test_all_rooms_are_seen():
    assert len(FOUND) > 200
    names = ("ops.matmul.matmul", "nn.linear.Linear.refresh", "methods.venom.Venom", "optim.masked_decay")
    assert {f"jax_sparse24.{name}" for name in names} <= set(FOUND)
    assert explained("A line.\n\n    x, axis: an array.\n    m: what: ever\n") == {"x", "axis", "m"}


def test_every_argument_has_a_line():
    missing = {
        name: [argument for argument in names if argument not in explained(doc)]
        if doc.strip()
        else "all of it"
        for name, (names, doc) in FOUND.items()
    }
    missing = {name: what for name, what in missing.items() if what}
    assert not missing, "no line of the docstring explains:\n" + "\n".join(map(str, missing.items()))


def test_every_result_has_a_line():
    """The first sentence of a predicate says what is true or false, and needs no further line."""
    missing = []
    for module in MODULES:
        for name, thing in vars(module).items():
            if is_public(module, name, thing) and not inspect.isclass(thing):
                result = inspect.signature(thing).return_annotation
                told = result in (None, bool) or "\n    Returns: " in (thing.__doc__ or "")
                missing += [] if told else [f"{thing.__module__}.{name}"]
    assert not missing, f"no line of the docstring says what is returned: {', '.join(sorted(set(missing)))}"
