"""What a device's results come to: one table and one plot, of blocks and of whole training steps."""

from typing import NamedTuple

from experiments.benchmarks import rows, select, stored

METHODS = ("FST", "Activation24", "Venom", "SSTE", "SSTE-approximate", "STE", "FST-projections")
WHAT = {
    "ffn": "feed-forward block, forward and backward",
    "train-step": "whole training step",
}
PROGRAMS = {"ffn": ("dense both", "both"), "train-step": ("dense step", "step")}


class Place(NamedTuple):
    """Where methods were measured: what, how many blocks, tokens, widths, dtype."""

    what: str
    dtype: str
    d: int
    f: int
    blocks: int
    T: int

    @property
    def words(self) -> list[str]:
        blocks = [f"{self.blocks} blocks"] if self.blocks > 1 else []
        return [f"d = {self.d}", f"f = {self.f}", *blocks, f"T = {self.T}", self.dtype]


def places(suites: dict) -> dict[Place, dict]:
    """Place -> method -> row, of all widths, blocks first, each dtype from narrow to wide."""
    found, blocks = {}, select.block_of_each_width(suites)
    for what in WHAT:
        for row in select.rows_of(suites, what):
            shown = what != "ffn" or (row["T"], row["d"], row["f"]) in blocks
            valid = rows.ratio(row, *PROGRAMS[what]) is not None
            if row["method"] in METHODS and row["implementation"] not in ("torch", "xla") and shown and valid:
                place = Place(what, row["dtype"], row["d"], row["f"], row.get("layers") or 1, row["T"])
                found.setdefault(place, {})[row["method"]] = row
    return {place: found[place] for place in sorted(found, key=lambda p: (list(WHAT).index(p.what), p[1:]))}


def table(suites: dict) -> str:
    """Ratios of the methods by place, as Markdown; empty where no method was measured."""
    found = places(suites)
    methods = [m for m in METHODS if any(m in own for own in found.values())]
    lines = [
        [
            {"ffn": "block", "train-step": f"step, {place.blocks} blocks"}[place.what],
            *(place.dtype, place.T, f"{place.d}, {place.f}"),
            *(cell(own.get(m), *PROGRAMS[place.what]) for m in methods),
        ]
        for place, own in found.items()
    ]
    header = ["what", "dtype", "T", "d, f", *methods]
    return rows.table(header, lines) if lines else ""


def cell(row: dict | None, base: str, name: str) -> str:
    """`1.31x (1.30-1.33)`; older rows are marked."""
    if row is None:
        return "-"
    return rows.show_ratio(row, base, name) + (" *" if stored.is_old(row) else "")
