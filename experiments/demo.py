"""What `make demo` runs: one small language model trained dense, with FST and with Venom, side by side.

All arms share initialisation and data order. Each call makes a new folder (runs/demo, runs/demo-2, ...).
"""

import argparse
import time
from pathlib import Path

from experiments import config as configs
from experiments import generate, report
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
    text = samples(out, tokens=240)
    try:
        table = report.write_report(
            [out / arm for arm in ARMS], out, title="Dense, FST and Venom, the same start", extra=text
        )
    except UserError as error:  # the table without plots
        table = str(error)
    print(f"\n{table}\n{text}\nReport and curves: {out / 'report.md'}  ({time.perf_counter() - begin:.0f} s)")


if __name__ == "__main__":
    main()
