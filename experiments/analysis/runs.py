"""What run folders say: the rows of their metrics as arrays, and numbers made of them."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.config import Config
from experiments.errors import require
from experiments.training import rundir


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
    def bytes_per_token(self) -> float:
        """Bytes of text per token that was predicted in evaluations; 1 where tokens are bytes."""
        return self.last("eval", "bytes_per_token") or 1.0

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


def descent(run: Run):
    """Actual over predicted loss change, both summed over the measured steps, or None."""
    predicted, actual = (run.column("monitor", f"{name}_change")[1] for name in ("predicted", "loss"))
    if not len(predicted) or not len(actual) or not np.mean(predicted):
        return None
    return float(np.mean(actual)) / float(np.mean(predicted))


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
