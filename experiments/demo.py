"""What `make demo` runs: one small language model trained dense, with FST and with Venom, side by side.

All arms share initialisation and data order. Each call makes a new folder (runs/demo, runs/demo-2, ...).
"""

import argparse
import datetime
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from experiments import config as configs
from experiments import files
from experiments.ablations.runs import share_compilations
from experiments.analysis import comparison, runs, sampling
from experiments.benchmarks import demo_page
from experiments.benchmarks.suites import train_step
from experiments.cli import STOPPED, command
from experiments.config import REPOSITORY
from experiments.errors import UserError
from experiments.training import environment, opening
from experiments.training.loop import train

PROMPT = "def "
ARMS = ("dense", "fst", "venom")
PICTURES = {"loss.png": "docs/images/demo-loss.png", "flip_rate.png": "docs/images/demo-flip-rate.png"}


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
        text = sampling.sample_run(out / arm, PROMPT, tokens=tokens, temperature=0.6, seed=1)
        parts.append(f"\n## A sample of the {arm} arm (prompt {PROMPT!r})\n\n```text\n{text.rstrip()}\n```\n")
    return "".join(parts)


def result_of(out: Path, arms: dict, seconds: float) -> dict:
    """What came out, as JSON data: losses of each arm, and how fast their steps are, measured in turn, since
    those of the runs were taken minutes apart, in which a shared machine changes by more."""
    losses = {}
    for arm, config in arms.items():
        run = runs.read_run(out / arm, arm)
        speeds = run.column("train", "steps_per_s")[1]
        losses[arm] = {
            "config": configs.to_dict(config),
            "products": opening.products(config),
            "dense": run.last("eval", "dense"),
            "sparse": run.last("eval", "sparse"),
            "steps_per_s": float(np.median(speeds)) if len(speeds) else None,
            "gap": run.gap,
        }
    return {
        "format": 1,
        "date": datetime.date.today().isoformat(),
        **environment.describe(),
        "parameters": opening.parameters(arms["dense"]),
        "corpus": run.corpus,
        "arms": losses,
        "speed": train_step.compare(arms, repeats=9, seconds=1.0),
        "seconds": round(seconds),
    }


def record(result: dict, out: Path) -> list[Path]:
    """Put a result into docs/demo and what it says into the README; the files."""
    path = REPOSITORY / demo_page.FOLDER / f"{result['hardware']['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(result, indent=1) + "\n")
    readme = REPOSITORY / "README.md"
    files.write(readme, demo_page.replaced(readme.read_text(), path.name, result))
    pictures = [REPOSITORY / place for name, place in PICTURES.items() if (out / name).exists()]
    for name, place in PICTURES.items():
        if (out / name).exists():
            with files.replacing(REPOSITORY / place) as partial:
                shutil.copyfile(out / name, partial)
    return [path, readme, *pictures]


@command
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="run folder (default: %(default)s, then -2, -3, ...)",
    )
    parser.add_argument(
        "--no-tune",
        dest="tune",
        action="store_false",
        help="do not measure the demo's products first where no table of this machine knows them; they then "
        "run dense",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="also put the result into docs/demo and its table into README.md",
    )
    args = parser.parse_args(argv)
    begin, out = time.perf_counter(), new_folder(args.out)
    arms = {arm: configs.load(f"configs/demo.py:{arm}") for arm in ARMS}
    print(f"{len(ARMS)} arms, {', '.join(ARMS)}, into {out}/", flush=True)
    if args.tune:
        for config in arms.values():
            opening.ensure_measured(config, show=lambda line: print(line, flush=True))
    share_compilations(out)
    for arm, config in arms.items():
        result = train(
            config,
            out / arm,
            label=arm,
            begins=lambda config, corpus: opening.opening(config, corpus, measure=False),
        )
        if not result.finished:
            print(
                f"Stopped and saved. `python -m experiments.launch --resume {out / arm}` continues this arm."
            )
            sys.exit(STOPPED)
    print("Timing a step of each arm in turn ...", flush=True)
    found = result_of(out, arms, time.perf_counter() - begin)
    files.write(out / "demo.json", json.dumps(found, indent=1) + "\n")
    text = demo_page.speed(found) + samples(out, tokens=240)
    try:
        table = comparison.write_report(
            [out / arm for arm in ARMS], out, title="Dense, FST and Venom, the same start", extra=text
        )
        report = out / "report.html"
    except UserError as error:  # the table without plots
        table, report = str(error), out / "report.md"
    print(f"\n{table}\n{text}\nReport and curves: {report}  ({time.perf_counter() - begin:.0f} s)")
    if args.record:
        print("\n".join(map(str, record(found, out))))


if __name__ == "__main__":
    main()
