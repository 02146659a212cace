"""One run of one suite as a file: rows as they come, never over another session's."""

import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path

from experiments import files
from experiments.benchmarks import rows
from experiments.benchmarks.settings import Settings
from experiments.training import environment
from jax_sparse24.measure import Interrupted

FORMAT = 2
SCHEME = "random order in each round"
STAMP = "%Y%m%dT%H%M%SZ"


class Partly(Exception):
    """Raised for a part of a suite of which something could not be measured.

    rows: of what could be. errors: the others', by name."""

    def __init__(self, rows: list[dict], errors: dict[str, Exception]):
        super().__init__(", ".join(errors))
        self.rows, self.errors = rows, errors


class Stopped(KeyboardInterrupt):
    """Raised for a part of a suite whose measurement was interrupted after its first rounds.

    rows: of what was measured until then."""

    def __init__(self, rows: list[dict]):
        super().__init__()
        self.rows = rows


def rows_of_times(measure: Callable, rows_of: Callable[[dict], list[dict]]) -> list[dict]:
    """`rows_of(times)` of the `Times` that `measure` gives, as `rows.times` has them. Raises `Stopped`, with
    the rows of the times until then, where it was interrupted."""
    try:
        times = measure()
    except Interrupted as interrupt:
        raise Stopped(rows_of(rows.times(interrupt.times))) from interrupt
    return rows_of(rows.times(times))


class Session:
    """The file HARDWARE_SUITE_DATETIME.json (UTC). It is there from the first rows on and written anew by
    rename with each `add`, so that a run that is killed leaves what was measured, with "complete": false; one
    that is interrupted also the rounds of what it was measuring, from the least number of rounds on."""

    def __init__(self, suite: str, settings: Settings):
        self.settings, self.begin, self.path = settings, time.perf_counter(), None
        about = environment.describe()
        self.name = f"{about['hardware']['name']}_{suite}"
        self.began = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        self.result = {
            "format": FORMAT,
            "suite": suite,
            "began": None,
            **about,
            "gpu": environment.gpu(),
            "flags": environment.flags(),
            "scheme": SCHEME,
            "seed": settings.first_seed,
            "settings": {
                "cases": [list(case) for case in settings.cases(suite)],
                "dtypes": list(settings.dtypes),
                "methods": list(settings.arms),
                "rungs": list(settings.rungs),
                "implementation": settings.implementation,
                "layers": settings.blocks(suite),
                "repeats": settings.repeats,
                "seconds": settings.seconds,
            },
            "complete": False,
            "failed": [],
            "rows": [],
        }

    def _own_file(self) -> Path:
        """A file that no other session has: its name tells the second in which this one began, or the next
        one that is free."""
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = self.settings.folder / f"{self.name}_{self.began.strftime(STAMP)}.json"
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                self.began += datetime.timedelta(seconds=1)
            else:
                self.result["began"] = self.began.isoformat()
                return path

    @property
    def rows(self) -> list[dict]:
        return self.result["rows"]

    def add(self, found: list[dict]) -> None:
        self.rows.extend(found)
        self._write()

    def failed(self, what: str, error: Exception) -> None:
        """A part of the suite that could not be measured."""
        first = str(error).strip().partition("\n")[0]
        self.result["failed"].append(f"{what} could not be measured: {type(error).__name__}: {first}")
        self._write()

    def finish(self) -> None:
        """All that was asked for has been tried."""
        self.result["complete"] = True
        if self.path is not None:
            self._write()

    def _write(self) -> None:
        self.path = self.path or self._own_file()
        self.result["settings"]["took_s"] = round(time.perf_counter() - self.begin)
        files.write(self.path, dump(self.result))


def dump(result: dict) -> str:
    """JSON with one line per row, so that two runs can be compared."""
    lines = ",\n  ".join(json.dumps(row) for row in result["rows"])
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n'
