"""Run folders to a table and curves: `python -m experiments.report RUN [RUN ...] --out DIR`.

report.md needs nothing beyond the training packages. loss.png, flip_rate.png, and report.html, which holds
them, need the extra plots.
"""

import argparse
from pathlib import Path

from experiments.analysis.comparison import write_report
from experiments.cli import command


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description=__doc__.split(":")[0] + "."
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run folders, such as runs/demo/dense"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for report.html, report.md and the PNG plots"
    )
    parser.add_argument("--title", default="Report")
    args = parser.parse_args(argv)
    print(write_report(args.runs, args.out, title=args.title))
    print(f"\n{args.out / 'report.html'}")


if __name__ == "__main__":
    main()
