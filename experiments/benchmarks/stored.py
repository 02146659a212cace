"""Stored results: of each row the newest session, with the others beside it."""

import json
from pathlib import Path

from experiments.benchmarks.session import SCHEME
from experiments.errors import UserError

# Rows that agree in these measure the same.
IDENTITY = (
    *("T", "d", "f", "dtype", "layers", "product", "operand", "format", "producer", "axis", "method"),
    *("implementation", "mesh", "rung", "before"),
)
ROTATING = "rotating order"  # of format 1: each program followed the same other one in most of its samples


def load(folder: Path) -> dict:
    """Hardware name -> suite -> {"hardware", "rows", "sources"}: every row that was measured, the newest of
    each, and the results that they come from, each with its own rows that are left; "beside_torch": the same
    of sessions with PyTorch alone.

    A row of the present scheme has the older ones of its scheme as "sessions"; one of format 1 is there only
    until it is measured in that scheme. Raises UserError for a file that is no result."""
    found = {}
    for result in files(folder):
        suites = found.setdefault(result["hardware"]["name"], {})
        suites.setdefault(result["suite"], []).append(result)
    return {
        hardware: {
            suite: merged(results) | {"beside_torch": beside_torch(results)}
            for suite, results in sorted(found[hardware].items())
        }
        for hardware in sorted(found)
    }


def files(folder: Path) -> list[dict]:
    """All results, oldest first: "file" is their name, "began" their time or, in format 1, their day."""
    results = []
    for path in folder.glob("[!.]*.json"):  # not what a killed run was writing
        try:
            result = json.loads(path.read_text()) | {"file": path.name}
            result = {"scheme": ROTATING, "complete": True, "failed": [], **result}
            began = result.setdefault("began", result.get("date"))
            place = began, path.stem, result["hardware"]["name"], result["suite"]
            results.append((place, result))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a result of python -m experiments.bench ({error!r}).") from error
    return [result for _, result in sorted(results, key=lambda item: item[0])]


def merged(results: list[dict]) -> dict:
    """One suite's results on one hardware, oldest first, as one."""
    newest = {}
    for result in results:
        scheme = result["scheme"]
        for row in result["rows"]:
            before, _ = newest.get(identity(row), (None, None))
            older = []
            if before is not None and scheme == before["scheme"] == SCHEME:
                older = [{k: v for k, v in before.items() if k != "sessions"}, *before["sessions"]]
            elif before is not None and before["scheme"] == SCHEME:
                continue
            newest[identity(row)] = row | {"scheme": scheme, "sessions": older}, result
    left = [
        result | {"rows": [row for row, source in newest.values() if source is result]} for result in results
    ]
    return {
        "hardware": results[-1]["hardware"],
        "rows": [row for row, _ in newest.values()],
        "sources": [result for result in left if result["rows"]],
    }


def beside_torch(results: list[dict]) -> list[dict]:
    """The newest rows of the sessions in which PyTorch took part, of which a page may compare with it."""

    def took_part(result):
        return any(
            name.startswith("torch") for row in result["rows"] for name in (*row["ms"], row.get("method", ""))
        )

    there = [result for result in results if took_part(result)]
    return merged(there)["rows"] if there else []


def identity(row: dict) -> tuple:
    return tuple(row.get(name) for name in IDENTITY)


def is_old(row: dict) -> bool:
    """Whether the row was measured in an order that rotates."""
    return row.get("scheme", ROTATING) == ROTATING
