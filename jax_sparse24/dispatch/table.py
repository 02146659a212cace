"""Which products are faster with a packed operand here, by measured tables; `s24.tune` makes them."""

import dataclasses
import difflib
import functools
import importlib.metadata
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_sparse24.dispatch import cusparselt, table_file
from jax_sparse24.dispatch.generations import HOPPER
from jax_sparse24.dispatch.hardware import Hardware, hardware
from jax_sparse24.dispatch.product import Product
from jax_sparse24.patterns import BLOCK_ROWS

SHIPPED = Path(__file__).parent.parent / "tuning"
AS_FAST = 1.0  # time of the dense product over that of the packed one, from which packed runs
BORROWED = 1.1  # the same for another GPU's measurements: nothing may be slower than dense on this one
# A measurement speaks for shapes of up to so many times its size in every dimension, and down to such a share
# of it: products gain less by packing the smaller they are.
ABOVE, BELOW = 4.0, 0.5


def versions() -> dict[str, str]:
    """The versions of packages and libraries on which measured times depend, by name."""
    found = {}
    for name in ("jax_sparse24", "jaxlib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # it runs from its source folder
            found[name] = "not installed"
    if jax.default_backend() == "gpu":
        found["cusparselt"] = "none" if cusparselt.problem() else ".".join(map(str, cusparselt.version()))
    return found


def user_folder() -> Path:
    """The folder in which `s24.tune` stores the table of this machine by default, one for each jaxlib: two
    environments of one user keep their own."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "jax_sparse24/tuning" / f"jaxlib-{versions()['jaxlib']}"


@dataclasses.dataclass(frozen=True)
class Table:
    """One measured table, and how far it is trusted here.

    content: of the file, see `table_file`.
    origin: where it was measured, in words.
    least: time of the dense product over that of the packed one, from which packed runs.
    borrowed: whether it was measured on another GPU."""

    content: Mapping[str, Any]
    origin: str
    least: float = AS_FAST
    borrowed: bool = False

    def nearest(self, product: Product) -> Mapping[str, Any] | None:
        """The entry of this product whose shape is nearest; None if none is within `ABOVE` and `BELOW`."""
        if 0 in product.shape:
            return None
        best, distance = None, 1 + 1e-6
        wanted = product.kind, product.side, str(product.dtype), product.pattern
        for entry in self.content["products"]:
            if tuple(entry[k] for k in ("product", "sparse", "dtype", "pattern")) != wanted:
                continue
            far = max(_distance(n / m) for n, m in zip(product.shape, entry["shape"], strict=True))
            if far < distance:
                best, distance = entry, far
        return best


def _distance(ratio: float) -> float:
    """How far a size is from a measured one, 1 at `ABOVE` and at `BELOW`."""
    return math.log(ratio) / math.log(ABOVE if ratio > 1 else BELOW)


_adopted: Table | None = None


def use(content: Mapping[str, Any]) -> None:
    """Makes this table decide from now on, in this process."""
    global _adopted
    _adopted = Table(content, "measured on this machine")


def tables() -> tuple[tuple[Table, ...], str]:
    """The tables that decide here, the first before the next, and a note on those that cannot be used."""
    stored, note = _stored()
    return ((_adopted, *stored), "") if _adopted else (stored, note)


@functools.cache
def _stored() -> tuple[tuple[Table, ...], str]:
    """This machine's own table, then the shipped one for this hardware, then one for the like of it."""
    here = hardware()
    content, note = own()
    found = [] if content is None else [Table(content, "measured on this machine")]
    shipped, problem = table_file.read(SHIPPED / f"{here.name}.json")
    if shipped is not None:
        found.append(Table(shipped, f"measured on {shipped['hardware']}"))
    if (other := _borrowed(here)) is not None:
        found.append(other)
    return tuple(found), note or problem


def own() -> tuple[Mapping[str, Any] | None, str]:
    """This machine's table if it was measured with these versions, else None and a sentence why."""
    path = user_folder() / f"{hardware().name}.json"
    content, problem = table_file.read(path)
    if content is None or content["versions"] == versions():
        return content, problem
    measured = ", ".join(f"{k} {v}" for k, v in content["versions"].items())
    return None, f"{path} is of {measured}; run s24.tune() again"


def _borrowed(here: Hardware) -> Table | None:
    """The shipped table of another GPU of the same compute capability.

    Of several it is the one with the most similar name. CPUs borrow none: some products that ran 1.2 times as
    fast packed as dense on one AVX-512 processor ran at 0.58 times on another with as many cores (see the two
    shipped tables)."""
    like = {}
    for path in sorted(SHIPPED.glob("*.json")) if here.capability else ():
        content, _ = table_file.read(path)
        other = content is not None and path.stem != here.name
        if other and content.get("capability") == here.capability:
            like[difflib.SequenceMatcher(None, _model(here.name), _model(path.stem)).ratio()] = content
    if not like:
        return None
    content = like[max(like)]
    origin = f"measured on {content['hardware']}, borrowed as both have compute capability {here.capability}"
    return Table(content, f"{origin}; s24.tune() measures this GPU", BORROWED, borrowed=True)


def _model(name: str) -> str:
    """The part of a name that has a digit first: "h100" of "nvidia-h100-80gb-hbm3"."""
    return next((part for part in name.split("-") if re.search(r"\d", part)), name)


def find(product: Product) -> tuple[Table, Mapping[str, Any]] | None:
    """The first table that has a measurement near a product, and its entry."""
    for table in tables()[0]:
        entry = table.nearest(product)
        if entry is not None:
            return table, entry
    return None


def _of_lower_v(product: Product) -> tuple[Table, Mapping[str, Any]] | None:
    """As `find`, for the next lower V of a product with V:N:M for which there is one.

    Kernels read less the higher V is, and were faster, on Hopper and on a CPU with AVX-512
    (experiments/benchmarks/results/probe/: nvidia-h200_venom_m8_2026-11-26.md, cpu-kernels_2026-11-23.md).
    On GPUs with `mma.sp` they were slower, so that nothing is concluded there."""
    if product.pattern == "2:4" or hardware().capability not in ("", *HOPPER.capabilities):
        return None
    v, rest = product.pattern.split(":", 1)
    lower = [f"{rows}:{rest}" for rows in sorted(BLOCK_ROWS, reverse=True) if rows < int(v)]
    found = (find(dataclasses.replace(product, pattern=pattern)) for pattern in lower)
    return next(filter(None, found), None)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the tables say about a product.

    packed: whether it is worth packing the operand.
    reason: why, in words.
    entry: the measurement; None if there is none.
    gain: how many times as fast the packed product was as it must be, also if what multiplied it is not here
        and `packed` is false; 0 if none was right."""

    packed: bool
    reason: str
    entry: Mapping[str, Any] | None = None
    gain: float = 0.0


def look_up(product: Product, alternative: str = "dense") -> Measured:
    """Looks up whether the packed product is at least as fast as XLA's dense product of the same values.

    product: its shape may be one that was never measured; the nearest measured shape speaks for it. So may
        its V, for which the next lower one speaks where its own was measured nowhere near.
    alternative: "dense" while the operand is yet to be made in either form, "masked" for an operand that is
        packed and would be unpacked."""
    if math.prod(product.shape) == 0:
        return Measured(False, "empty")
    known, note = tables()
    hint = f" ({note})" if note else ""
    if not known:
        return Measured(
            False,
            f"no measurements for {hardware().description}, so dense, at the cost of what is cut; "
            f"run s24.tune(){hint}",
        )
    near = find(product) or _of_lower_v(product)
    if near is None:
        blocks = "" if product.pattern == "2:4" else f" for {product.pattern}"
        return Measured(
            False, f"nothing{blocks} {known[0].origin} near this shape; run s24.tune(shapes=...){hint}"
        )
    found, entry = near
    if entry["status"] != "ok":
        return Measured(False, f"the packed product was {entry['status']} when {found.origin}{hint}", entry)
    ratio = entry[f"{alternative}_us"] / entry["packed_us"]
    gain = ratio / found.least
    if entry["implementation"] == "cusparselt" and not same_library(found):
        measured, here = (v.get("cusparselt") for v in (found.content["versions"], versions()))
        return Measured(
            False, f"measured with cuSPARSELt {measured}, here is {here}; run s24.tune(){hint}", entry, gain
        )
    size = "x".join(map(str, entry["shape"]))
    lower = f" for {pattern}" if (pattern := entry["pattern"]) != product.pattern else ""
    reason = f"packed is {ratio:.2f}x {alternative}{lower} at {size}, {found.origin}{hint}"
    return Measured(gain >= 1, reason, entry, gain)


def same_library(table: Table) -> bool:
    """Whether a table was measured with the release of cuSPARSELt that is installed here.

    Other releases number their algorithms differently."""
    return table.content["versions"].get("cusparselt") == versions().get("cusparselt")
