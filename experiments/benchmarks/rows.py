"""Rows of results as JSON data, their ratios, and their tables.

A row's "ms" holds for each program, by name, {"median", "low", "high"} (quartiles) and, since format 2,
"rounds", the milliseconds of each round, from which ratios are paired; on a GPU also "joules" per call,
"watts" and "mhz". Dense programs are named "dense ..." (as XLA compiles by default), "dense ...: VARIANT" and
"torch dense ...": the fastest of them is what other programs are compared with."""

import shlex

from experiments.analysis.tables import markdown
from experiments.benchmarks import dense_e4m3
from jax_sparse24 import measure
from jax_sparse24.measure import Paired, Times

OK = "ok"
CONTRADICTORY = "CONTRADICTORY"
OUT_OF_MEMORY = "out of memory"  # a result: it says that the program needs more
DETAILS = ("joules", "watts", "mhz")
IN_8_BITS_HEADER = ("over dense e4m3", "dense e4m3 ms")
ENERGY_HEADER = ("dense J", "J", "dense W, MHz", "W, MHz")


def times(measured) -> dict:
    """`Times` by name, in milliseconds."""
    found = {}
    for name, t in measured.items():
        rounds = [ms(sample) for sample in t.samples]
        details = {detail: getattr(t, detail) for detail in DETAILS}
        found[name] = {
            **{"median": ms(t.median), "low": ms(t.low), "high": ms(t.high), "rounds": rounds},
            **{detail: significant(value) for detail, value in details.items() if value is not None},
        }
    return found


def ms(seconds: float) -> float:
    """Milliseconds with five digits."""
    return significant(seconds * 1e3)


def significant(value: float) -> float:
    return float(f"{value:.5g}")


def amortised(usual: dict, rare: dict, every: int) -> dict:
    """The mean call when every `every`-th one is of the `rare` program."""
    more = (rare["median"] - usual["median"]) / every
    mean = {name: significant(usual[name] + more) for name in ("median", "low", "high")}
    mean["rounds"] = [significant(sample + more) for sample in usual["rounds"]]
    if "joules" in usual and "joules" in rare:
        mean["joules"] = significant(usual["joules"] + (rare["joules"] - usual["joules"]) / every)
    return {**usual, **mean}


def dense_name(method: str, part: str) -> str | None:
    """In a row's "ms": the name of the part of a dense program, "Dense", "Dense: VARIANT" or "torch dense".
    None for any other."""
    if method == "torch dense":
        return f"torch dense {part}"
    dense, colon, variant = method.partition(": ")
    return f"dense {part}{colon}{variant}" if dense == "Dense" else None


# ---- ratios


def base_of(row: dict, base: str) -> str:
    """The name of the fastest dense program that computes `base`, such as "dense both"."""
    there = row["ms"]
    names = [name for name in there if name in (base, f"torch {base}") or name.startswith(f"{base}: ")]
    # Of rows in the older format ratios are those that were published, to XLA's default.
    names = [name for name in names if "rounds" in there[name]] or [base]
    return min(names, key=lambda name: there[name]["median"]) if names != [base] else base


def paired(row: dict, base: str, name: str) -> Paired | None:
    """Time of the fastest `base` over that of `name`: above 1, `name` is faster. None unless both are valid.

    Of rows in the older format the ratio of medians, without an interval."""
    there, base = row["ms"], base_of(row, base)
    if base not in there or name not in there:
        return None
    if "rounds" not in there[base] or "rounds" not in there[name]:
        return Paired(there[base]["median"] / there[name]["median"], None, None, 0)
    return measure.paired(_as_times(row, base, name), base, name)


def _as_times(row: dict, *names: str) -> dict:
    return {name: Times(tuple(row["ms"][name]["rounds"])) for name in names}


def ratio(row: dict, base: str, name: str) -> float | None:
    """The paired ratio alone."""
    found = paired(row, base, name)
    return None if found is None else found.ratio


def contradicts(row: dict, more: str, less: str) -> bool:
    """Whether `more`, which does all that `less` does and something besides, took less time by more than
    noise. False where the samples are not stored."""
    names = [name for name in (more, less) if "rounds" in row["ms"].get(name, ())]
    return bool(measure.contradictions(_as_times(row, *names), [(more, less)]))


def bad(row: dict) -> dict:
    """Our programs of a row whose results were wrong or not repeatable. Tables show PyTorch's, too."""
    if row.get("implementation") == "torch":
        return {}
    ours = {name: status for name, status in row["status"].items() if not name.startswith("torch")}
    return {name: status for name, status in ours.items() if status not in (OK, OUT_OF_MEMORY)}


# ---- cells


def show_ratio(row: dict, base: str, name: str) -> str:
    """`1.31x (1.30-1.33)`, the verdict on a program that is not valid, or `-` where there was none."""
    if row["status"].get(name, OK) != OK:
        return row["status"][name].upper()
    found = paired(row, base, name)
    if found is None:
        return "-"
    interval = "" if found.low is None else f" ({found.low:.2f}-{found.high:.2f})"
    return f"{found.ratio:.2f}x{interval}"


def against(row: dict, base: str) -> str:
    """Whose dense program was the fastest."""
    name = base_of(row, base)
    if name.startswith("torch"):
        return "PyTorch"
    return f"XLA, {name.rpartition(': ')[2]}" if ": " in name else "XLA"


def over_sessions(row: dict, base: str, name: str) -> str:
    """`1.29x to 1.33x (3)`: the ratio's extremes over all sessions of this row in the same scheme."""
    found = [ratio(session, base, name) for session in (row, *row.get("sessions", ()))]
    found = [value for value in found if value is not None]
    return f"{min(found):.2f}x to {max(found):.2f}x ({len(found)})" if len(found) > 1 else "1"


def show_ms(row: dict, name: str) -> str:
    """`12.3 (12.1-12.6)`: median and quartiles."""
    t = row["ms"].get(name)
    if t is None:
        return row["status"].get(name, "-").upper()
    return f"{t['median']:.3g} ({t['low']:.3g}-{t['high']:.3g})"


def show_flags(result: dict) -> str:
    """`XLA_FLAGS=--xla_...`, in front of a result's command; empty where no flag is known. NCCL_VERSION,
    which images of containers have, sets nothing."""
    return " ".join(
        f"{name}={shlex.quote(value)}"
        for name, value in result.get("flags", {}).items()
        if name != "NCCL_VERSION"
    )


def any_in_8_bits(found: list[dict]) -> bool:
    """Whether a row is of a method that has the dense rival in 8 bits."""
    return any(name.startswith(dense_e4m3.named("")) for row in found for name in row["ms"])


def in_8_bits(row: dict, part: str) -> list[str]:
    """The cells below `IN_8_BITS_HEADER`: the ratio to the dense rival in 8 bits, and its time; empty where
    both were simulated."""
    rival = dense_e4m3.named(part)
    if "simulated" in row:
        return ["-", "-"]
    return [show_ratio(row, rival, part) if rival in row["ms"] else "-", show_ms(row, rival)]


def energy(row: dict, base: str, name: str) -> list[str]:
    """The cells below `ENERGY_HEADER`: joules per call, power and clock of `base`'s fastest and of `name`."""
    both = [row["ms"].get(program, {}) for program in (base_of(row, base), name)]
    joules = [f"{t['joules']:.3g}" if "joules" in t else "-" for t in both]
    return joules + [f"{t['watts']:.0f}, {t['mhz']:.0f}" if {"watts", "mhz"} <= set(t) else "-" for t in both]


def show_mb(count: int | None) -> str:
    """Of 10^6 bytes each."""
    if count is None:
        return "-"
    megabytes = count / 1e6
    return f"{megabytes:.3g}" if megabytes < 100 else f"{megabytes:.0f}"


def table(header, lines) -> str:
    """A Markdown table of words, without the columns of energy where there is none, as without a GPU."""
    lines = [list(map(str, line)) for line in lines]
    there = [
        i
        for i, name in enumerate(header)
        if name not in ENERGY_HEADER or {line[i] for line in lines} != {"-"}
    ]
    return markdown([[line[i] for i in there] for line in (header, *lines)], numbers=False)
