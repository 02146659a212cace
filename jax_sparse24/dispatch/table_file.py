"""The file of a measured table: what it holds, how it is read, checked and written.

It is JSON: `format`, `hardware`, `isa`, `versions`, and one entry in `products` per measured product, with
times in microseconds. An entry names its product by the product's name in a linear layer (which says the
contracted axes), by the side of its sparse operand and by the pattern of that; its shape is (M, K, N). Format
2 lacks the `capability` of a GPU, the `order` of samples, and the joules, MHz and seed of an entry."""

import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_sparse24.dispatch.product import KINDS

FORMAT = 3
FORMATS = (2, FORMAT)
SIDES = ("left", "right", "result")
STATUSES = ("ok", "wrong", "not repeatable", "without a valid dense product")
IMPLEMENTATIONS = ("ffi", "cusparselt")
TIMES = ("dense_us", "masked_us", "packed_us")


class Rule(NamedTuple):
    """What a value must be.

    words: the rule, for messages.
    holds: a test of a value.
    default: stands for a value that is missing."""

    words: str
    holds: Callable[[Any], bool]
    default: Any = None


def _is_number(value) -> bool:
    return type(value) in (int, float) and 0 < value < 1e15  # neither NaN nor Inf


def _is_size(value) -> bool:
    return type(value) is int and value > 0


def _one_of(values: Sequence) -> Rule:
    *most, last = map(repr, values)
    return Rule(f"{', '.join(most)} or {last}", lambda value: value in values)


def _numbers_by_name(value) -> bool:
    return isinstance(value, dict) and all(v is None or _is_number(v) for v in value.values())


_BY_NAME = Rule("an object of positive finite numbers, or null, by name", _numbers_by_name, {})
_TIME = Rule("a positive finite number", _is_number)
_TEXT = Rule("a text", lambda value: isinstance(value, str))
HEAD = {
    "format": Rule("2 or 3", lambda value: type(value) is int and value in FORMATS),
    "hardware": _TEXT,
    "isa": _TEXT,
    "versions": Rule(
        "an object of texts by name",
        lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
    ),
    "products": Rule("a list of entries", lambda value: isinstance(value, list)),
    "capability": _TEXT._replace(default=""),
}
ENTRY = {
    "product": _one_of(tuple(KINDS.values())),
    "sparse": _one_of(SIDES),
    "pattern": Rule(
        "'2:4' or such as '64:2:16'",
        lambda value: isinstance(value, str) and re.fullmatch(r"2:4|[1-9]\d*:2:[1-9]\d*", value) is not None,
    ),
    "dtype": _TEXT,
    "shape": Rule(
        "three positive whole numbers",
        lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_size, value)),
    ),
    "implementation": _one_of(IMPLEMENTATIONS),
    "algorithm": Rule("a whole number", lambda value: value is None or type(value) is int),
    "status": _one_of(STATUSES),
    "producers_us": _BY_NAME._replace(default=None),
    "joules": _BY_NAME,
    "mhz": _BY_NAME,
}


def fault(content) -> str:
    """What is wrong with the content of a table, as a sentence without its subject; "" if nothing is."""
    if not isinstance(content, dict):
        return f"it holds {content!r:.40} and must hold an object"
    if wrong := _wrong(content, HEAD):
        return wrong
    for index, entry in enumerate(content["products"]):
        if not isinstance(entry, dict):
            return f"entry {index} is {entry!r:.40} and must be an object"
        ok = entry.get("status") == "ok"
        times = dict.fromkeys(TIMES, _TIME if ok else _TIME_OR_NULL)
        if wrong := _wrong(entry, ENTRY | times):
            return f"entry {index}: {wrong}"
    return ""


_TIME_OR_NULL = Rule(f"{_TIME.words} or null", lambda value: value is None or _is_number(value))


def _wrong(found: Mapping[str, Any], rules: Mapping[str, Rule]) -> str:
    for name, rule in rules.items():
        value = found.get(name, rule.default)
        if not rule.holds(value):
            what = f"is {value!r:.40}" if name in found else "is missing"
            return f"{name!r} {what} and must be {rule.words}"
    return ""


def read(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """Reads a table.

    Returns: (content, ""), or (None, why the file cannot be used); a file that does not exist gives (None,
        "")."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path} is unreadable ({error}); run s24.tune() again"
    wrong = fault(content)
    return (None, f"{path} is damaged: {wrong}; run s24.tune() again") if wrong else (content, "")


def identity(entry: Mapping[str, Any]) -> tuple:
    """What an entry measures: product, sparse operand, dtype, shape and pattern."""
    return (*(entry[k] for k in ("product", "sparse", "dtype")), tuple(entry["shape"]), entry["pattern"])


def write(content: Mapping[str, Any], path: Path) -> None:
    """Replaces the file as a whole.

    A reader finds the old or the new one, even if others write at the same time."""
    lines = ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in content["products"])
    head = json.dumps({k: v for k, v in content.items() if k != "products"}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # a name that no other writer uses
    try:
        own.write_text(f'{head[:-2]},\n "products": [\n  {lines}\n ]\n}}\n')
        os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)
