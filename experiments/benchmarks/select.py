"""Which rows a plot or a summary is made of."""

from collections import Counter

from experiments.benchmarks import dense_e4m3, stored


def rows_of(suites: dict, suite: str) -> list[dict]:
    return suites[suite]["rows"] if suite in suites else []


def current(suites: dict, suite: str) -> list[dict]:
    """Rows in random order, where the suite has some; otherwise the older ones. Never both."""
    found = rows_of(suites, suite)
    return [row for row in found if not stored.is_old(row)] or found


def with_parts(suites: dict) -> list[dict]:
    """Rows of feed-forward blocks whose producers and products were measured by themselves."""
    found = [current(suites, "ffn"), rows_of(suites, "ffn")]
    return next((own for rows in found if (own := [row for row in rows if "parts_ms" in row])), [])


def by_dtype(found) -> dict:
    return _by(found, "dtype")


def by_method(found) -> dict:
    """Of the sparse methods, and of PyTorch's programs."""
    return {name: own for name, own in _by(found, "method").items() if not is_dense(name)}


def is_dense(method: str) -> bool:
    """Whether a row of that name is XLA's dense program, by default or otherwise, or in 8 bits."""
    return method.partition(":")[0] == "Dense" or method in dense_e4m3.NAMES


def by_format(found) -> dict:
    return _by(found, "format")


def _by(found, key: str) -> dict:
    groups = {}
    for row in found:
        groups.setdefault(row[key], []).append(row)
    return groups


def _speed_rows(suites: dict) -> list[dict]:
    return current(suites, "ffn") + current(suites, "gemm")


def widths(suites: dict) -> list[tuple[int, int, int]]:
    """Cases of the sweep over widths: those at the number of tokens with most of them."""
    cases = {(row["T"], row["d"], row["f"]) for row in _speed_rows(suites)}
    counts = Counter(T for T, _, _ in cases)
    main = max(counts, key=lambda T: (counts[T], T), default=None)
    return sorted((case for case in cases if case[0] == main), key=lambda case: case[1:])


def block_of_each_width(suites: dict) -> list[tuple[int, int, int]]:
    """Blocks of the sweep over widths, and of each width without one the block with most tokens."""
    blocks = {(row["T"], row["d"], row["f"]) for row in current(suites, "ffn")}
    swept = blocks.intersection(widths(suites))
    others = {block[1:] for block in blocks} - {block[1:] for block in swept}
    return sorted(swept) + [max(block for block in blocks if block[1:] == shape) for shape in sorted(others)]


def tokens(suites: dict) -> list[tuple[int, int, int]]:
    """Cases of the sweep over tokens: those at the widths with most of them."""
    cases = {(row["T"], row["d"], row["f"]) for row in _speed_rows(suites)}
    counts = Counter(case[1:] for case in cases)
    main = max(counts, key=lambda shape: (counts[shape], shape), default=None)
    return sorted(case for case in cases if case[1:] == main)
