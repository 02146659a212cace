"""The result of an ablation as JSON data: metrics of every run, findings, verdict, where and when."""

import csv
import dataclasses
import datetime
import io
import json
import math
from pathlib import Path

from experiments import config as configs
from experiments.ablation import Named
from experiments.bench import environment
from experiments.config import UserError
from experiments.outcome import LOSSES, METRICS, outcome
from experiments.verdicts import CONFIDENCE, Comparison, Interval, combine

FORMAT = 1


def result_of(named: Named, jobs) -> dict:
    """What the runs say about the claim; needs every run to be done."""
    ablation = named.ablation
    metrics = {arm: {} for arm in ablation.arms}
    for job in jobs:
        metrics[job.arm][job.seed] = outcome(job.read())
    found = [comparison.finding(metrics) for comparison in ablation.verdict.comparisons()]
    here, (first, *others) = environment.describe(), ablation.arms.values()
    return {
        "format": FORMAT,
        "paper": named.paper,
        "name": named.claim,
        "size": named.size,
        **{key: getattr(ablation, key) for key in ("claim", "source", "expects", "differs")},
        "seeds": sorted({job.seed for job in jobs}),
        "date": datetime.date.today().isoformat(),
        **here,
        "config": configs.to_dict(first),
        "arms": {
            arm: configs.differences(first, config)
            for arm, config in zip(ablation.arms, [first, *others], strict=True)
        },
        "commits": sorted({job.commit or (here["commit"] or "")[:12] for job in jobs} - {""}),
        "diverged": [job.label for job in jobs if job.diverged],
        "metrics": metrics,
        "confidence": CONFIDENCE,
        "findings": [finding(f) for f in found],
        "verdict": combine(f.verdict for f in found),
        "on the mechanism": _part(f.verdict for f in found if f.metric not in LOSSES),
        "on loss": _part(f.verdict for f in found if f.metric in LOSSES),
    }


def _part(verdicts):
    verdicts = list(verdicts)
    return combine(verdicts) if verdicts else None


def finding(found) -> dict:
    """A finding as JSON data."""
    data = dataclasses.asdict(found)
    return {**data, **data.pop("interval")}


def spread(result: dict, arm: str, metric: str) -> Interval:
    """Mean and interval of a metric over the seeds of an arm that have it."""
    values = [seed[metric] for seed in result["metrics"][arm].values()]
    return Interval.of([v for v in values if v is not None])


def difference(result: dict, arm: str, metric: str) -> Interval:
    """The paired difference of an arm from the first one."""
    metrics, first = result["metrics"], next(iter(result["metrics"]))
    values = Comparison(arm, metric, first, below=math.inf, above=-math.inf).finding(metrics).values
    return Interval.of(list(values.values()))


def table(result: dict) -> str:
    """CSV: one line per arm and metric, with mean, spread and paired difference from the first arm."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    own = ("n", "mean", "sd")
    writer.writerow(["arm", "metric", *own, "difference", "difference_low", "difference_high"])
    for arm in result["metrics"]:
        for metric in METRICS:
            values, paired = spread(result, arm, metric), difference(result, arm, metric)
            if values.n:
                cells = [getattr(values, key) for key in own] + [paired.mean, paired.low, paired.high]
                writer.writerow([arm, metric, *("" if c is None else f"{c:.6g}" for c in cells)])
    return out.getvalue()


def write(result: dict, path: Path):
    """Write the result as JSON, without whatever is not finite."""
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> dict:
    """Read what `write` wrote; UserError if it is no result."""
    try:
        result = json.loads(path.read_text())
        _ = result["verdict"], result["metrics"], result["hardware"]["name"], result["date"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a result of python -m experiments.ablate ({error!r}).") from error
    return result
