"""Measured tables: on which hardware which product is faster packed. `s24.tune` writes them.

A table is JSON: `format`, `hardware`, `isa`, `versions`, and one entry per measured product with times in
microseconds. A *product* is named by what it is in a linear layer (its contracted axes), by the side of
its sparse operand and by the pattern of that; its shape is (M, K, N).
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_sparse24.ops import _cusparselt, _ffi

FORMAT = 2  # in format 1, entries name no pattern and are 2:4
SHIPPED = Path(__file__).parent.parent / "tuning"
KINDS = {(-1, -2): "fwd", (-1, -1): "dgrad", (-2, -2): "wgrad"}  # by the contracted axes of both operands
TIE = 0.97  # packed runs down to here: the difference is within the noise, and it is half the memory
NEAR = 4.0  # a measurement speaks for shapes within this factor in every dimension


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a table is measured on. `name` is fit for a file name."""

    name: str
    description: str
    platform: str
    isa: str
    cores: int


@functools.cache
def hardware() -> Hardware:
    """The device that runs by default, with its instruction set and usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    backend = jax.default_backend()
    if backend != "cpu":
        kind = jax.devices()[0].device_kind
        return Hardware(_slug(kind), kind, backend, "", cores)
    model, short = _cpu_model()
    isa = _ffi.versions()["isa"] or "no-kernels"
    plural = "core" if cores == 1 else "cores"
    return Hardware(f"{_slug(short)}-{isa}-{cores}c", f"{model}, {isa}, {cores} {plural}", "cpu", isa, cores)


def _slug(text: str) -> str:
    text = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor)\b", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def _cpu_model() -> tuple[str, str]:
    """Description and name; virtual machines hide the model, so its numbers are part of both."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text, re.M))
    model = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in fields:
        return model, model
    family, number = fields["cpu family"], fields.get("model", "?")
    # Before slug cuts the frequency off.
    return f"{model} (family {family}, model {number})", f"{model.split('@')[0]} f{family}m{number}"


def versions() -> dict[str, str]:
    """Versions that the times depend on."""
    found = {}
    for name in ("jax_sparse24", "jaxlib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from its folder
            found[name] = "not installed"
    if jax.default_backend() == "gpu":
        found["cusparselt"] = "none" if _cusparselt.problem() else ".".join(map(str, _cusparselt.version()))
    return found


def user_folder() -> Path:
    """Where `s24.tune` keeps the table of this machine by default."""
    return Path(os.path.expanduser("~/.cache/jax_sparse24/tuning"))


@dataclasses.dataclass(frozen=True)
class Table:
    """One measured table and how far it is trusted here."""

    content: Mapping[str, Any]
    origin: str
    least: float  # ratio from which packed runs

    def nearest(self, kind: str, side: str, dtype: str, shape, pattern: str) -> Mapping[str, Any] | None:
        """The entry of this product whose shape is nearest, if any is near."""
        best, distance = None, math.log2(NEAR) + 1e-6
        for entry in self.content["products"]:
            product = *(entry[k] for k in ("product", "sparse", "dtype")), entry.get("pattern", "2:4")
            if product != (kind, side, dtype, pattern):
                continue
            far = max(abs(math.log2(n / m)) for n, m in zip(shape, entry["shape"], strict=True))
            if far < distance:
                best, distance = entry, far
        return best


def read(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """(content, "") or (None, why the file cannot be used)."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{path} is unreadable ({error})"
    entries = {"format", "hardware", "isa", "versions", "products"}
    if not isinstance(content, dict) or not entries <= content.keys() or content["format"] not in (1, FORMAT):
        return None, f"{path} is not a table of format {FORMAT}"
    return content, ""


_adopted: tuple[Table, str] | None = None


def use(content: Mapping[str, Any]) -> None:
    """Decide by this table from now on, in this process."""
    global _adopted
    _adopted = Table(content, "measured on this machine", TIE), ""


def table() -> tuple[Table | None, str]:
    """The table that decides here, and a note on one that was passed over."""
    return _adopted or _stored()


@functools.cache
def _stored() -> tuple[Table | None, str]:
    """This machine's own table, or the shipped one for this hardware. Tables of other machines say too
    little: core counts and matrix units move the crossovers."""
    here = hardware()
    own = user_folder() / f"{here.name}.json"
    content, note = read(own)
    if content is not None and content["versions"] == versions():
        return Table(content, "measured on this machine", TIE), ""
    if content is not None:
        measured = ", ".join(f"{k} {v}" for k, v in content["versions"].items())
        note = f"{own} is of {measured}; run s24.tune() again"
    content, problem = read(SHIPPED / f"{here.name}.json")
    if content is not None:
        return Table(content, f"measured on {content['hardware']}", TIE), note
    return None, note or problem


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a product runs packed, why, and the measurement behind it (None if there is none)."""

    packed: bool
    reason: str
    entry: Mapping[str, Any] | None = None

    @property
    def implementation(self) -> str:
        """What multiplies when it is packed."""
        return (self.entry or {}).get("implementation", "ffi")


def decide(
    axes: tuple[int, int],
    side: str,
    dtype,
    shape: tuple[int, int, int],
    pattern: str = "2:4",
    alternative: str = "dense",
) -> Decision:
    """For a product (M, K, N) with contracted `axes`, sparse on `side` ("left" or "right") by `pattern`
    ("2:4" or such as "64:2:16"): packed, or XLA's dense product of the same values. alternative: "dense"
    while the operand is yet to be made as either, "masked" for one that is packed and would be unpacked."""
    if math.prod(shape) == 0:
        return Decision(False, "empty")
    found, note = table()
    hint = f" ({note})" if note else ""
    if found is None:
        return Decision(False, f"no measurements for {hardware().description}; run s24.tune(){hint}")
    entry = found.nearest(KINDS.get(axes, "other"), side, str(dtype), shape, pattern)
    if entry is None:
        known = "" if pattern == "2:4" else f" for {pattern}"
        return Decision(
            False, f"nothing{known} {found.origin} near this shape; run s24.tune(shapes=...){hint}"
        )
    if entry["status"] != "ok":
        return Decision(False, f"the packed product was {entry['status']} when {found.origin}{hint}", entry)
    measured, here = (v.get("cusparselt") for v in (found.content["versions"], versions()))
    if entry.get("implementation") == "cusparselt" and measured != here:
        return Decision(
            False, f"measured with cuSPARSELt {measured}, here is {here}; run s24.tune(){hint}", entry
        )
    ratio = entry[f"{alternative}_us"] / entry["packed_us"]
    size = "x".join(map(str, entry["shape"]))
    reason = f"packed is {ratio:.2f}x {alternative} at {size}, {found.origin}{hint}"
    return Decision(ratio >= found.least, reason, entry)


def algorithm(
    axes: tuple[int, int], side: str, dtype, shape: tuple[int, int, int], pattern: str = "2:4"
) -> int | None:
    """The fastest algorithm of cuSPARSELt for the nearest measured product, if cuSPARSELt won there."""
    found, _ = table()
    if found is None or found.content["versions"].get("cusparselt") != versions().get("cusparselt"):
        return None  # other releases number their algorithms differently
    entry = found.nearest(KINDS.get(axes, "other"), side, str(dtype), shape, pattern)
    return entry.get("algorithm") if entry else None
