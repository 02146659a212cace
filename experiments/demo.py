"""What `make demo` runs: one small language model trained dense, with FST and with Venom, side by side.

All arms share initialisation and data order. Each call makes a new folder (runs/demo, runs/demo-2, ...).
"""

import argparse
import time
from pathlib import Path

from experiments import config as configs
from experiments import generate, report
from experiments.bench import rows, train_step
from experiments.cli import command
from experiments.config import UserError
from experiments.train import train

PROMPT = "def "
ARMS = ("dense", "fst", "venom")


def new_folder(base: Path) -> Path:
    """`base`, or the first of `base`-2, `base`-3, ... that does not exist."""
    number, folder = 2, base
    while folder.exists():
        folder = base.with_name(f"{base.name}-{number}")
        number += 1
    return folder


def samples(out: Path, tokens: int) -> str:
    """A short sample of every arm, as Markdown."""
    parts = []
    for arm in ARMS:
        text = generate.sample_run(out / arm, PROMPT, tokens=tokens, temperature=0.6, seed=1)
        parts.append(f"\n## A sample of the {arm} arm (prompt {PROMPT!r})\n\n```text\n{text.rstrip()}\n```\n")
    return "".join(parts)


def speed() -> str:
    """How fast a step of each arm is, measured in turn, and what to expect of it, as Markdown.

    The steps/s of the training runs were taken minutes apart, in which a shared machine changes by more."""
    found = train_step.compare({arm: configs.load(f"configs/demo.py:{arm}") for arm in ARMS})
    header = ["arm, sparse phase", "steps/s", "step", "its FFNs alone", "expected of the step"]
    lines = [
        [
            row["method"],
            f"{1e3 / row['ms']['step']['median']:.1f}" if "step" in row["ms"] else "-",
            rows.show_ratio(row, "dense step", "step"),
            rows.show_ratio(row, "dense ffn", "ffn"),
            "-" if (gain := train_step.expected(row)) is None else f"{gain:.2f}x",
        ]
        for row in found
    ]
    dense, part, why = found[0], train_step.share(found[0]), ""
    if part is not None:
        why = (
            f"At this width, d = {dense['d']}, the FFNs are {part:.0%} of a dense step, and only they become "
            f"sparse: infinitely fast ones would give {1 / (1 - part):.2f}x. Their share and their gain grow "
            "with the width; docs/benchmarks.md has wider models."
        )
    return f"""
## Speed of the arms

Whole optimiser steps in one process, in turn, medians; dense time / time, above 1 is faster than dense.

{rows.table(header, lines)}

{why}
"""


@command
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="run folder (default: %(default)s, then -2, -3, ...)",
    )
    args = parser.parse_args(argv)
    begin, out = time.perf_counter(), new_folder(args.out)
    print(f"{len(ARMS)} arms, {', '.join(ARMS)}, into {out}/", flush=True)
    for arm in ARMS:
        result = train(configs.load(f"configs/demo.py:{arm}"), out / arm, label=arm)
        if not result.finished:
            print(
                f"Stopped and saved. `python -m experiments.launch configs/demo.py:{arm} --out "
                f"{result.out} --resume` continues this arm."
            )
            return
    print("Timing a step of each arm in turn ...", flush=True)
    text = speed() + samples(out, tokens=240)
    try:
        table = report.write_report(
            [out / arm for arm in ARMS], out, title="Dense, FST and Venom, the same start", extra=text
        )
    except UserError as error:  # the table without plots
        table = str(error)
    print(f"\n{table}\n{text}\nReport and curves: {out / 'report.md'}  ({time.perf_counter() - begin:.0f} s)")


if __name__ == "__main__":
    main()
