"""`python -m experiments.bench [SUITE ...]`: see --help."""

import importlib
import sys
import time
import traceback

import tyro

from experiments.benchmarks import rows
from experiments.benchmarks.session import Partly, Session, Stopped
from experiments.benchmarks.settings import SUITES, Settings
from experiments.benchmarks.suites import gemm
from experiments.benchmarks.torch import programs as torch_programs
from experiments.cli import command
from experiments.errors import UserError


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
    """Measure, print, store one suite; returns a line for everything that makes the exit status 1."""
    module = importlib.import_module(f"experiments.benchmarks.suites.{suite.replace('-', '_')}")
    session, progress = Session(suite, settings), Progress(suite)
    for what, measure in module.run(settings, progress):
        progress(what)
        try:
            session.add(measure())
        except Partly as partly:
            session.add(partly.rows)
            for name, error in partly.errors.items():
                traceback.print_exception(error)
                session.failed(f"{what}: {name}", error)
        except Stopped as stopped:
            session.add(stopped.rows)
            raise
        except UserError:
            raise
        except Exception as error:  # what else there is to measure may still be measured
            traceback.print_exc()
            session.failed(what, error)
    session.finish()
    progress.done()
    hardware = session.result["hardware"]["description"]
    print(f"\n# {suite}: {hardware}\n\n{module.WHAT}\n\n{module.table(session.rows)}")
    if not settings.torch:
        print("\nPyTorch: not measured (--no-torch).")
    elif torch_programs.device() is None:
        print("\nPyTorch: not measured (not installed, or not for this device).")
    print(f"\nStored in {session.path}")
    return [f"{suite}: {line}" for line in (*session.result["failed"], *wrong(suite, session.rows))]


def wrong(suite: str, found: list[dict]) -> list[str]:
    """A line for each result that was not valid, and for each row that contradicts itself."""
    lines = [f"{name} was {bad}: {row_name(row)}" for row in found for name, bad in rows.bad(row).items()]
    if suite == "gemm":
        faster = "with packing took less time than packed already"
        lines += [f"CONTRADICTORY, {faster}: {row_name(row)}" for row in found if gemm.contradictory(row)]
    return lines


def row_name(row: dict) -> str:
    names = ("T", "d", "f", "dtype", "product", "operand", "format", "producer", "axis", "method")
    return ", ".join(f"{name}={row[name]}" for name in names if name in row)


@command
def main(argv=None) -> int:
    """Returns the exit status."""
    try:
        settings = tyro.cli(Settings, args=argv, prog="python -m experiments.bench")
    except ValueError as error:
        raise UserError(str(error)) from error
    if settings.suites == ("report",):
        from experiments.benchmarks import pages

        print(pages.write(settings.folder))
        return 0
    errors = []
    for suite in dict.fromkeys(settings.suites or SUITES):
        errors += run_suite(suite, settings)
    for line in errors:
        print(f"error: {line}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
