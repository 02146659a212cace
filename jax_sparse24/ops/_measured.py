"""Which product is faster packed here, by measured tables (`_table`). `s24.tune` makes them."""

import dataclasses
import difflib
import functools
import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_sparse24.ops import _cusparselt, _ffi, _table
from jax_sparse24.ops._table import KINDS

SHIPPED = Path(__file__).parent.parent / "tuning"
TIE = 0.97  # packed runs down to here: the difference is within the noise, and it is half the memory
BORROWED = 1.1  # of another GPU's measurements: nothing may be slower than dense on this one
NEAR = 4.0  # a measurement speaks for shapes within this factor in every dimension


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a table is measured on. `name` is fit for a file name. isa: instruction set of a CPU;
    capability: compute capability of a GPU, such as "9.0"; each "" for the other."""

    name: str
    description: str
    platform: str
    isa: str
    cores: int
    capability: str = ""


@functools.cache
def hardware() -> Hardware:
    """The device that runs by default, with its instruction set and usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    backend = jax.default_backend()
    if backend != "cpu":
        device = jax.devices()[0]
        kind, capability = device.device_kind, str(getattr(device, "compute_capability", ""))
        return Hardware(_slug(kind), kind, backend, "", cores, capability)
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
    """One measured table and how far it is trusted here. borrowed: it is another GPU's."""

    content: Mapping[str, Any]
    origin: str
    least: float = TIE  # ratio from which packed runs
    borrowed: bool = False

    def nearest(self, kind: str, side: str, dtype: str, shape, pattern: str) -> Mapping[str, Any] | None:
        """The entry of this product whose shape is nearest, if any is near."""
        best, distance = None, math.log2(NEAR) + 1e-6
        for entry in self.content["products"]:
            product = *(entry[k] for k in ("product", "sparse", "dtype")), _table.pattern_of(entry)
            if product != (kind, side, dtype, pattern):
                continue
            far = max(abs(math.log2(n / m)) for n, m in zip(shape, entry["shape"], strict=True))
            if far < distance:
                best, distance = entry, far
        return best


_adopted: Table | None = None


def use(content: Mapping[str, Any]) -> None:
    """Decide by this table from now on, in this process."""
    global _adopted
    _adopted = Table(content, "measured on this machine")


def tables() -> tuple[tuple[Table, ...], str]:
    """The tables that decide here, by rank, and a note on those that were passed over."""
    stored, note = _stored()
    return ((_adopted, *stored), "") if _adopted else (stored, note)


@functools.cache
def _stored() -> tuple[tuple[Table, ...], str]:
    """This machine's own table, then the shipped one for this hardware, then one for the like of it."""
    here = hardware()
    content, note = own()
    found = [] if content is None else [Table(content, "measured on this machine")]
    shipped, problem = _table.read(SHIPPED / f"{here.name}.json")
    if shipped is not None:
        found.append(Table(shipped, f"measured on {shipped['hardware']}"))
    if (other := _borrowed(here)) is not None:
        found.append(other)
    return tuple(found), note or problem


def own() -> tuple[Mapping[str, Any] | None, str]:
    """This machine's table if it is of these versions, and why not."""
    path = user_folder() / f"{hardware().name}.json"
    content, problem = _table.read(path)
    if content is None or content["versions"] == versions():
        return content, problem
    measured = ", ".join(f"{k} {v}" for k, v in content["versions"].items())
    return None, f"{path} is of {measured}; run s24.tune() again"


def _borrowed(here: Hardware) -> Table | None:
    """The shipped table of a GPU of the same compute capability; of several, the one whose model is called
    most alike. CPUs borrow none: of what one AVX-512 processor ran 1.2 times as fast packed as dense, another
    with as many cores ran some at 0.58 (the two shipped tables tell)."""
    like = {}
    for path in sorted(SHIPPED.glob("*.json")) if here.capability else ():
        content, _ = _table.read(path)
        other = content is not None and path.stem != here.name
        if other and content.get("capability") == here.capability:
            like[difflib.SequenceMatcher(None, _model(here.name), _model(path.stem)).ratio()] = content
    if not like:
        return None
    content = like[max(like)]
    origin = f"measured on {content['hardware']}, borrowed as both have compute capability {here.capability}"
    return Table(content, f"{origin}; s24.tune() measures this GPU", BORROWED, borrowed=True)


def _model(name: str) -> str:
    """ "h100" of "nvidia-h100-80gb-hbm3"."""
    return next((part for part in name.split("-") if re.search(r"\d", part)), name)


def find(kind: str, side: str, dtype, shape, pattern: str) -> tuple[Table, Mapping[str, Any]] | None:
    """The first table that has a measurement near a product, and its entry."""
    for table in tables()[0]:
        entry = table.nearest(kind, side, str(dtype), shape, pattern)
        if entry is not None:
            return table, entry
    return None


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
    known, note = tables()
    hint = f" ({note})" if note else ""
    if not known:
        return Decision(False, f"no measurements for {hardware().description}; run s24.tune(){hint}")
    near = find(KINDS.get(axes, "other"), side, dtype, shape, pattern)
    if near is None:
        blocks = "" if pattern == "2:4" else f" for {pattern}"
        return Decision(
            False, f"nothing{blocks} {known[0].origin} near this shape; run s24.tune(shapes=...){hint}"
        )
    found, entry = near
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
    near = find(KINDS.get(axes, "other"), side, dtype, shape, pattern)
    if near is None or near[0].content["versions"].get("cusparselt") != versions().get("cusparselt"):
        return None  # other releases number their algorithms differently
    return near[1].get("algorithm")
