"""`python -m experiments.bench [SUITE ...]`: see --help."""

import datetime
import importlib
import json
import sys
import time

import tyro

from experiments.bench import environment, rows, torch_programs
from experiments.bench.settings import SUITES, Settings
from experiments.cli import command
from experiments.config import UserError

FORMAT = 1


class Progress:
    """The line that is being worked on, on stderr; overwritten on a terminal."""

    def __init__(self, suite: str):
        self.suite, self.begin, self.width = suite, time.perf_counter(), 0

    def __call__(self, text: str):
        line = f"{self.suite} {time.perf_counter() - self.begin:5.0f} s  {text}"
        if sys.stderr.isatty():
            print(f"\r{line.ljust(self.width)}", end="", file=sys.stderr, flush=True)
            self.width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def done(self):
        if sys.stderr.isatty():
            print(f"\r{' ' * self.width}\r", end="", file=sys.stderr, flush=True)


def run_suite(suite: str, settings: Settings) -> list[str]:
    """Measure, print, store one suite; returns a line for every result that was not valid."""
    module = importlib.import_module(f"experiments.bench.{suite.replace('-', '_')}")
    about, progress, begin = environment.describe(), Progress(suite), time.perf_counter()
    found = []
    result = {
        "format": FORMAT,
        "suite": suite,
        "date": datetime.date.today().isoformat(),
        **about,
        "settings": {
            "cases": [list(case) for case in settings.cases(suite)],
            "dtypes": list(settings.dtypes),
            "methods": list(settings.methods),
            "implementation": settings.implementation,
            "layers": settings.layers,
            "repeats": settings.repeats,
            "seconds": settings.seconds,
        },
        "rows": found,
    }
    path = settings.folder / f"{about['hardware']['name']}_{suite}_{result['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".json.partial")
    for rows_of_case in module.run(settings, progress):
        found += rows_of_case
        result["settings"]["took_s"] = round(time.perf_counter() - begin)
        partial.write_text(dump(result))
    partial.replace(path)
    progress.done()
    print(f"\n# {suite}: {about['hardware']['description']}\n\n{module.WHAT}\n")
    print(module.table(found))
    if torch_programs.device() is None:
        print("\nPyTorch: not measured (not installed, or not for this device).")
    print(f"\nStored in {path}")
    return [
        f"{suite}: {name} was {status}: {row_name(row)}"
        for row in found
        for name, status in rows.bad(row).items()
    ]


def dump(result: dict) -> str:
    """JSON with one line per row, so that two runs can be compared."""
    lines = ",\n  ".join(json.dumps(row) for row in result["rows"])
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n'


def row_name(row: dict) -> str:
    names = ("T", "d", "f", "dtype", "product", "operand", "producer", "axis", "method")
    return ", ".join(f"{name}={row[name]}" for name in names if name in row)


@command
def main(argv=None) -> int:
    """Returns the exit status."""
    try:
        settings = tyro.cli(Settings, args=argv, prog="python -m experiments.bench")
    except ValueError as error:
        raise UserError(str(error)) from error
    if settings.suites == ("report",):
        from experiments.bench import report

        print(report.write(settings.folder))
        return 0
    wrong = []
    for suite in dict.fromkeys(settings.suites or SUITES):
        wrong += run_suite(suite, settings)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
