"""Run folders to a table and curves: `python -m experiments.report RUN [RUN ...] --out DIR`.

report.md needs nothing beyond the training packages; loss.png and flip_rate.png need matplotlib.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import files, rundir
from experiments.cli import command
from experiments.config import Config, UserError, require
from experiments.evaluate import bits

LEAKS = " *"  # beside a loss that is no language model's
EARLY = 0.25  # the flip rate's "early" is its mean over the first quarter of the steps, "late" over the last


@dataclass(frozen=True)
class Run:
    """What a run folder says: rows of metrics by kind, as arrays by column."""

    label: str
    out: Path
    config: Config
    rows: dict

    def column(self, kind: str, name: str):
        """(steps, values) of one quantity, without rows that lack it."""
        pairs = [(row["step"], row[name]) for row in self.rows.get(kind, []) if row.get(name) is not None]
        return tuple(np.array(values) for values in (zip(*pairs, strict=True) if pairs else ((), ())))

    def last(self, kind: str, name: str):
        values = self.column(kind, name)[1]
        return float(values[-1]) if len(values) else None

    @property
    def phases(self):
        """(first step, step after the last, phase) of each phase; of one that ended early, as rows say."""
        found = list(self.config.schedule.boundaries())
        for n, (start, end, phase) in enumerate(found):
            if phase.until_settled:
                after = found[n + 1]
                named = [row["step"] for row in self.rows.get("train", []) if row["phase"] == after[2].name]
                switch = min([end, *named])
                found[n : n + 2] = [(start, switch, phase), (switch, *after[1:])]
        return tuple(found)

    @property
    def gap(self) -> str:
        """Why the rows do not cover the run from its start to its end; "" if they do. See `rundir.gap`."""
        return rundir.gap(self.config, [*self.rows.get("train", []), *self.rows.get("eval", [])])

    @property
    def corpus(self) -> dict:
        """Statistics of the training text, as the run wrote them; {} before its start."""
        events = [row["corpus"] for row in self.rows.get("event", []) if "corpus" in row]
        return events[-1] if events else {}

    @property
    def order1(self):
        """Order-1 byte entropy of the training text, in nats."""
        return self.corpus.get("order1_nats")


def read_run(out: Path, label: str) -> Run:
    """Read one run folder; UserError when it is none or has no metrics."""
    config, rows = rundir.open_run(out), {}
    for row in rundir.read_metrics(out, note=lambda text: print(text, file=sys.stderr)):
        rows.setdefault(row["kind"], []).append(row)
    return Run(label, out, config, rows)


def read_runs(folders) -> list[Run]:
    """Read run folders, labelled by the shortest ending of their paths that tells them apart."""
    folders = [Path(folder) for folder in folders]
    require(len(set(map(Path.resolve, folders))) == len(folders), "A run folder is given twice.")
    if len(folders) == 1:
        return [read_run(folders[0], folders[0].resolve().name)]
    common = os.path.commonpath([folder.resolve() for folder in folders])
    return [read_run(folder, str(folder.resolve().relative_to(common))) for folder in folders]


def percent(shares):
    """The mean of some shares, in percent."""
    return 100 * float(np.mean(shares)) if len(shares) else None


def _mean(values):
    return float(np.mean(values)) if len(values) else None


def descent(run: Run):
    """Actual over predicted loss change, both summed over the measured steps, or None."""
    predicted, actual = (_mean(run.column("monitor", f"{name}_change")[1]) for name in ("predicted", "loss"))
    return actual / predicted if predicted and actual is not None else None


def monitor_cost(run: Run):
    """Time of monitors and probe as a share of the training steps' time, at their intervals, or None.

    From medians, so that compilation and the first calls do not count.
    """
    _, speed = run.column("train", "steps_per_s")
    cost = 0.0
    for kind in ("monitor", "probe"):
        _, seconds = run.column(kind, "seconds")
        every = getattr(run.config.train, f"{kind}_every")
        cost += float(np.median(seconds)) / every if len(seconds) else 0.0
    return cost * float(np.median(speed)) if cost and len(speed) else None


def summary(run: Run) -> dict:
    """The numbers of one run for the table; None where they were not measured."""
    steps, flips = run.column("monitor", "flip_rate")
    total = run.config.train.steps
    _, speed = run.column("train", "steps_per_s")
    dense, sparse = run.last("eval", "dense"), run.last("eval", "sparse")
    leaks = "" if run.config.method.causal else LEAKS
    return {
        "method": type(run.config.method).__name__,
        "steps": f"{max((row['step'] for row in run.rows.get('train', [])), default=-1) + 1}/{total}",
        "val. loss, dense (nats)": dense,
        "val. loss, sparse (nats)": sparse and show(sparse) + leaks,
        "leak of later tokens (nats)": run.last("eval", "leak"),
        "bits per byte, dense": dense and bits(dense),
        "bits per byte, sparse": sparse and show(bits(sparse)) + leaks,
        "flip rate early (%)": percent(flips[steps < EARLY * total]) if len(flips) else None,
        "flip rate peak (%)": percent([flips.max()]) if len(flips) else None,
        "flip rate late (%)": percent(flips[steps >= (1 - EARLY) * total]) if len(flips) else None,
        "flipped since start (%)": percent(run.column("monitor", "flipped_since_start")[1][-1:]),
        "kept share of abs(w)": run.last("monitor", "kept_share"),
        "steps with rising loss (%)": percent(run.column("monitor", "rising")[1]),
        "actual / predicted loss change": descent(run),
        "gradient cosine, sparse and dense": _mean(run.column("probe", "cosine")[1]),
        "monitors (% of step time)": percent([cost]) if (cost := monitor_cost(run)) else None,
        "steps/s": float(np.median(speed)) if len(speed) else None,
    }


def show(value) -> str:
    """One cell of the table."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.3f}"


def table(runs) -> str:
    """A Markdown table, one column per run, aligned so that it also reads well as plain text."""
    columns = [summary(run) for run in runs]
    lines = [["", *(run.label for run in runs)]]
    lines += [[name, *(show(column[name]) for column in columns)] for name in columns[0]]
    return markdown(lines)


def markdown(lines) -> str:
    """Rows of cells, the first one the header, as a Markdown table with numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    cells = [
        [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in [lines[0], rule, *lines[1:]]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def text(runs) -> str:
    """The table and, below it, what to compare the losses with."""
    lines = [table(runs), ""]
    lines += [f"{run.label} is not a whole run: {run.gap}.\n" for run in runs if run.gap]
    if not all(run.config.method.causal for run in runs):
        lines.append(f"{LEAKS.strip()} No language-model loss: it depends on later tokens.\n")
    for corpus in {run.order1: run.corpus for run in runs if run.order1}.values():
        order0, order1 = (corpus[f"order{n}_nats"] for n in (0, 1))
        lines.append(
            f"Byte entropy of the training text ({corpus['bytes'] / 1e6:.1f} MB): order 0, knowing nothing, "
            f"{order0:.3f} nats = {bits(order0):.3f} bits; order 1, knowing the byte before, "
            f"{order1:.3f} nats = {bits(order1):.3f} bits."
        )
    return "\n".join(lines)


NOTES = f"""\
Losses are means over the same validation text, in nats per byte. *Dense* evaluates every product dense.
*Sparse* uses the method's sparse products with masks computed freshly from the weights; for a run without
sparsity, its dense weights cut once by FST's transposable mask. Where it is marked it depends on later
tokens; the leak is how much lower it is for that than where these are foreign text. The flip rate is the
share of mask entries of all FFN kernels that one optimiser step changes: early is its mean over the first
{EARLY:.0%} of the steps, late over the last {EARLY:.0%}. Flipped since start is the share that differs from
the initial masks at the end. The kept share of abs(w) is what the mask keeps of the summed magnitudes at the
last measurement. A step raises the loss if the loss of its own batch is higher after it, with the masks that
the next step uses; the predicted change is the inner product of gradient and update. The cosine is of the
sparse and the dense gradient of the FFN kernels on a fixed batch, in sparse phases. The monitors' share is
the median time of a measurement over its interval, against the median step.
steps/s is the median, without evaluation, measurement and checkpoints."""


def write_report(folders, out: Path, *, title: str = "Report", extra: str = "") -> str:
    """Write report.md (and the plots, if matplotlib is there) for these run folders; return the table.

    Raises UserError after writing the table when matplotlib is missing.
    """
    runs = read_runs(folders)
    out.mkdir(parents=True, exist_ok=True)
    try:
        from experiments import plots

        images = plots.write(runs, out)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        images = None
    pictures = "".join(f"\n![{name}]({name})\n" for name in images or ())
    files.write(out / "report.md", f"# {title}\n\n{text(runs)}\n{pictures}\n{NOTES}\n{extra}")
    if images is None:
        raise UserError(
            f"{text(runs)}\n\n{out / 'report.md'} holds this table. The plots need matplotlib: pip "
            "install '.[plots]' "
            "and run the report again."
        )
    return text(runs)


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description=__doc__.split(":")[0] + "."
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run folders, such as runs/demo/dense"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for report.md and the PNG plots")
    parser.add_argument("--title", default="Report")
    args = parser.parse_args(argv)
    print(write_report(args.runs, args.out, title=args.title))
    print(f"\n{args.out / 'report.md'}")


if __name__ == "__main__":
    main()
