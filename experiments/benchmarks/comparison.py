"""The 2:4 products as they were measured in an order that rotates and as they are in a random one."""

import statistics

from experiments.benchmarks import rows, stored
from experiments.benchmarks.session import SCHEME

TITLE = "## Rotating and random order"
WORDS = """The same 2:4 products in bfloat16, both by `python -m experiments.bench gemm`. *Rotating* is how
they were measured first: programs took turns, each round beginning one program later, which leaves each
behind the same other one in all but one of its turns (*mostly after*). At its limit of power a GPU's clock is
what the last tenths of a second left, and a sample lasted 50 ms: what followed a program that draws little
power, such as our own kernels or packing, ran at a higher clock than it can keep, and what followed one that
draws much at a lower one. *Random* draws another order for each round and runs each program for 200 ms before
its sample; it also compares with the fastest of several dense programs."""


def table(files: list[dict]) -> str:
    """Markdown, or nothing where no product was measured in both ways on one hardware."""
    parts = []
    for hardware in dict.fromkeys(result["hardware"]["name"] for result in files):
        own = [result for result in files if result["hardware"]["name"] == hardware]
        old, new = (products(own, scheme) for scheme in (stored.ROTATING, SCHEME))
        both = [place for place in old if place in new]
        if both:
            parts.append(of_hardware(own[0]["hardware"]["description"], [(old[p], new[p]) for p in both]))
    return "\n\n".join([WORDS, *parts]) if parts else ""


def products(files: list[dict], scheme: str) -> dict:
    """Identity -> newest row of the 2:4 products in bfloat16 on an accelerator, with the file's name, the
    order of the programs that were measured with it, and their times."""
    found = {}
    for result in files:
        there = result["suite"] == "gemm" and result["scheme"] == scheme
        if there and result["hardware"]["platform"] == "gpu":
            for row in result["rows"]:
                if row["format"] == "2:4" and row["dtype"] == "bfloat16":
                    beside = [other for other in result["rows"] if place(other) == place(row)]
                    found[stored.identity(row)] = row | {
                        "file": result["file"],
                        "order": order_of(beside),
                        "others": {name: t for other in beside for name, t in other["ms"].items()},
                    }
    return found


def place(row: dict) -> tuple:
    return tuple(row[key] for key in ("T", "d", "f", "dtype", "product", "operand"))


def order_of(found: list[dict]) -> list[str]:
    """The programs of one product, from the rows of its formats, as a rotation's first round ran them."""
    order = [name for name in found[0]["status"] if name in ("dense", "torch dense", "torch dense fp8")]
    for row in found:
        form = row["format"]
        own = (form, f"{form} masked", f"{form} with packing", f"torch {form}")
        order += [name for name in own if name in row["status"]]
    return order


def of_hardware(name: str, pairs: list[tuple[dict, dict]]) -> str:
    """One table, with what it comes to."""
    header = [
        *("product", "sparse", "T", "d", "f", "rotating", "random", "against"),
        *("dense mostly after", "2:4 mostly after", "with packing: rotating", "random"),
    ]
    lines = [
        [
            *(after[key] for key in ("product", "operand", "T", "d", "f")),
            *(rows.show_ratio(row, "dense", "2:4") for row in (before, after)),
            rows.against(after, "dense"),
            *(before["order"][before["order"].index(program) - 1] for program in ("dense", "2:4")),
            *(rows.show_ratio(row, "dense", "2:4 with packing") for row in (before, after)),
        ]
        for before, after in pairs
    ]
    faster = sum(b["ms"]["2:4 with packing"]["median"] < b["ms"]["2:4"]["median"] for b, _ in pairs)
    again = sum(rows.contradicts(after, "2:4 with packing", "2:4") for _, after in pairs)
    ends = [spread(found) for found in zip(*pairs, strict=True)]
    files = sorted({row["file"] for pair in pairs for row in pair})
    links = ", ".join(f"[`{file}`](../experiments/benchmarks/results/{file})" for file in files)
    return (
        f"{name}, {len(pairs)} products: {ends[0]} dense in rotating order, {ends[1]} in random order. With "
        f"packing {faster} were faster than without in rotating order, and {again} by more than noise in "
        f"random order.{powers(pairs)} From {links}.\n\n{rows.table(header, lines)}"
    )


def powers(pairs: list[tuple[dict, dict]]) -> str:
    """A sentence on what the programs draw by themselves, at which clock."""
    parts = []
    for program in ("dense", "2:4", "2:4 with packing", "64:2:16", "64:2:16 with packing"):
        drawn = [after["others"].get(program, {}) for _, after in pairs]
        drawn = [t for t in drawn if {"watts", "mhz"} <= set(t)]
        if drawn:
            watts, mhz = (statistics.median(t[unit] for t in drawn) for unit in ("watts", "mhz"))
            parts.append(f"*{program}* {watts:.0f} W at {mhz:.0f} MHz")
    return f" In steady state (medians): {', '.join(parts)}." if parts else ""


def spread(found) -> str:
    gains = [gain for row in found if (gain := rows.ratio(row, "dense", "2:4")) is not None]
    return f"{min(gains):.2f}x to {max(gains):.2f}x (median {statistics.median(gains):.2f}x)"
