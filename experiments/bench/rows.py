"""Rows of results as JSON data, and their tables."""

OK = "ok"


def times(measured) -> dict:
    """`Times` by name, in milliseconds."""
    return {
        name: {
            "median": ms(t.median),
            "low": ms(t.low),
            "high": ms(t.high),
            "samples": len(t.samples),
        }
        for name, t in measured.items()
    }


def ms(seconds: float) -> float:
    """Milliseconds with five digits."""
    return significant(seconds * 1e3)


def significant(value: float) -> float:
    return float(f"{value:.5g}")


def ratio(row: dict, base: str, name: str) -> float | None:
    """Median of `base` over median of `name`: above 1, `name` is faster. None unless both are valid."""
    a, b = row["ms"].get(base), row["ms"].get(name)
    return a["median"] / b["median"] if a and b else None


def bad(row: dict) -> dict:
    """Our programs of a row whose results were wrong or not repeatable. Tables show PyTorch's, too."""
    if row.get("implementation") == "torch":
        return {}
    ours = {name: status for name, status in row["status"].items() if not name.startswith("torch")}
    return {name: status for name, status in ours.items() if status != OK}


def show_ratio(row: dict, base: str, name: str) -> str:
    """`1.31x`, the verdict on a program that is not valid, or `-` where there was none."""
    if row["status"].get(name, OK) != OK:
        return row["status"][name].upper()
    found = ratio(row, base, name)
    return "-" if found is None else f"{found:.2f}x"


def show_ms(row: dict, name: str) -> str:
    """`12.3 (12.1-12.6)`: median and quartiles."""
    t = row["ms"].get(name)
    if t is None:
        return row["status"].get(name, "-").upper() if name in row["status"] else "-"
    return f"{t['median']:.3g} ({t['low']:.3g}-{t['high']:.3g})"


def show_mb(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.3g}"


def table(header, lines) -> str:
    """A Markdown table, aligned so that it also reads well as plain text; the first columns to the left."""
    cells = [list(map(str, header)), *(list(map(str, line)) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    out = [cells[0], rule, *cells[1:]]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in out
    )
