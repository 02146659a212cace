"""Docstrings of what users call: every argument has a line that explains it, and so has the result."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
import typing
from pathlib import Path

from flax import linen as nn

import jax_sparse24 as s24
from jax_sparse24 import choices, explanation, interception, linen, loop, schedule, surgery, verification
from jax_sparse24.engine import contraction, operand, plan
from jax_sparse24.methods import base
from jax_sparse24.nn import fitting, function, replaced, view

MODULES = [
    *(s24, s24.measure, s24.methods, s24.nn, s24.optim, s24.patterns, s24.sparsifiers, base, operand, plan),
    *(contraction, interception, linen, surgery, verification, fitting, function, replaced, view, loop),
    *(s24.sharding, schedule, choices, explanation),
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
    elif inspect.isclass(thing) and vars(thing).get("_is_protocol"):  # nobody makes one
        names = typing.get_type_hints(thing)
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


# What users call. Types of what floors below hand to each other are their own business.
ROOMS = [s24, s24.measure, s24.methods, s24.nn, s24.optim, s24.sparsifiers, s24.sharding, linen, surgery]


def untyped(function) -> list[str]:
    """Arguments of a function without a type, and "return" where its result has none."""
    signature = inspect.signature(function)
    types = {name: argument.annotation for name, argument in signature.parameters.items()}
    if function.__name__ != "__init__":
        types["return"] = signature.return_annotation
    named = {name: kind for name, kind in types.items() if name not in ("self", "cls") and name[0] != "_"}
    return [name for name, kind in named.items() if kind is inspect.Parameter.empty]


def typed_functions(kind: type):
    """The public methods that a class defines, and those beneath a call of it; none that overrides one with
    types, from which a reader has them."""
    for name in vars(kind).keys() & {*members(kind), "__init__", "__call__"}:
        above = [vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)]
        if not any(inspect.isfunction(unbound(one)) and not untyped(unbound(one)) for one in above):
            yield f"{kind.__name__}.{name}", unbound(vars(kind)[name])


def test_every_argument_and_result_has_a_type():
    """A checker takes what has none for anything."""
    found = [
        (name, thing) for room in ROOMS for name, thing in vars(room).items() if is_public(room, name, thing)
    ]
    found += [(name, getattr(s24, name)) for name in ("Loop", "refresh", "verify")]
    functions = {}
    for name, thing in found:
        if inspect.isclass(thing):
            functions |= typed_functions(thing)
        elif inspect.isfunction(inspect.unwrap(thing)) and not typing.get_overloads(thing):
            functions[name] = thing
    assert {"mask24", "Linear.__call__", "Schedule.phase_at", "Method.refresh"} <= functions.keys()
    missing = {name: left for name, function in functions.items() if (left := untyped(function))}
    assert not missing, "without types:\n" + "\n".join(map(str, missing.items()))


def test_a_checker_knows_what_is_loaded_on_first_use():
    tree = ast.parse(inspect.getsource(s24))
    [block] = [
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "typing.TYPE_CHECKING"
    ]
    shown = {alias.asname: (node.module, alias.name) for node in block.body for alias in node.names}
    loaded = {name: (module, attribute or name) for name, (module, attribute) in s24._LAZY.items()}
    for name, (module, attribute) in loaded.items():
        assert shown.pop(name) in ((module, attribute), (module.rpartition(".")[0], attribute)), name
    assert not shown


def functions_of(thing, full: str):
    """Name, definition and docstrings of a public function, or of each public method of a class, that of the
    class itself being its `__init__`. A method has the docstrings of all classes that define it."""
    if not inspect.isclass(thing):
        yield full, [inspect.unwrap(thing)]
        return
    for member, classes in members(thing).items():
        yield f"{full}.{member}", [inspect.unwrap(unbound(vars(c)[member])) for c in classes]


def defined():
    """Every public function and method of MODULES: its name, and its definitions, the nearest class first."""
    for module in MODULES:
        for name, thing in vars(module).items():
            if is_public(module, name, thing):
                yield from functions_of(thing, f"{thing.__module__}.{name}")


def told(definitions, word: str) -> bool:
    return any(re.search(rf"(^|\n){word}[: ]", inspect.getdoc(one) or "") for one in definitions)


def result_of(definitions):
    """The annotation of a result, which a method without types has from the class above."""
    typed = (inspect.signature(one).return_annotation for one in definitions)
    return next((result for result in typed if result is not inspect.Parameter.empty), "without a type")


def test_every_result_has_a_line():
    """The first sentence of a predicate says what is true or false, and needs no further line. Nor does that
    of a property, which is a noun phrase that names the value."""
    missing = {
        name
        for name, definitions in defined()
        if result_of(definitions) not in (None, bool) and not told(definitions, "Returns")
    }
    assert not missing, f"no line of the docstring says what is returned: {', '.join(sorted(missing))}"


def raises(function) -> bool:
    """Whether a function's own code has a statement `raise`, but for a method that subclasses must define."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return any(not text.startswith("raise NotImplementedError") for text in found)


def test_what_is_raised_has_a_line():
    """A line "Raises: ...", or a docstring that begins with what a check raises; for what is raised when an
    object is made, in the docstring of its class."""
    missing = {name for name, found in defined() if raises(found[0]) and not told(found, "Raises")}
    for module in MODULES:
        for name, kind in vars(module).items():
            if is_public(module, name, kind) and inspect.isclass(kind):
                made = [
                    inspect.unwrap(vars(kind)[n]) for n in ("__init__", "__post_init__") if n in vars(kind)
                ]
                made = [one for one in made if inspect.isfunction(one) and one.__module__ == kind.__module__]
                made = [one for one in made if Path(one.__code__.co_filename).is_file()]  # else generated
                if any(map(raises, made)) and not told([kind], "Raises"):
                    missing.add(f"{kind.__module__}.{name}")
    assert not missing, f"no line of the docstring says what is raised: {', '.join(sorted(missing))}"
