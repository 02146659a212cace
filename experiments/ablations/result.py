"""The result of an ablation as JSON data: metrics of every run, findings, verdict, where and when."""

import csv
import dataclasses
import datetime
import io
import json
import math
from pathlib import Path

import jax

from experiments import config as configs
from experiments import files
from experiments.ablations import runs, together
from experiments.ablations.ablation import REPLICATE, Ablation, Named
from experiments.ablations.leaks import leaking
from experiments.ablations.verdicts import CONFIDENCE, Comparison, Interval, combine, judge
from experiments.analysis.outcome import LIMITS, LOSSES, METRICS, outcome
from experiments.errors import UserError, require
from experiments.training import environment
from jax_sparse24.dispatch.hardware import name_of

FORMAT = 2


def result_of(named: Named, jobs, out: Path) -> dict:
    """What the runs say about the claim; needs every run to be done. out: their folder.

    Raises UserError for runs of several commits, kinds of devices or texts: they are no seeds of one
    experiment.
    """
    ablation = named.ablation
    arms, read = ablation.all_arms, {job.label: job.read() for job in jobs}
    metrics = {arm: {} for arm in arms}
    for job in jobs:
        metrics[job.arm][job.seed] = outcome(read[job.label])
    here, (first, *others) = where(jobs), arms.values()
    commit = runs.one_commit(jobs)
    texts = {json.dumps(run.corpus, sort_keys=True) for run in read.values()}
    require(len(texts) == 1, f"The runs of {named.slug} saw different texts: {', '.join(sorted(texts))}.")
    result = {
        "format": FORMAT,
        "paper": named.paper,
        "name": named.claim,
        "size": named.size,
        **{key: getattr(ablation, key) for key in ("claim", "source", "expects", "differs")},
        **({"pretrained": ablation.pretrained} if ablation.pretrained else {}),
        "seeds": sorted({job.seed for job in jobs}),
        "date": datetime.date.today().isoformat(),
        **here,
        "corpus": json.loads(texts.pop()),
        "config": configs.to_dict(first),
        "arms": {
            arm: configs.differences(first, config)
            for arm, config in zip(arms, [first, *others], strict=True)
        },
        "commits": [commit or (here["commit"] or "")[:12]],
        "diverged": [job.label for job in jobs if job.diverged],
        "incomplete": {
            job.label: read[job.label].gap for job in jobs if not job.diverged and read[job.label].gap
        },
        "cores per run": sorted({job.environment.get("cores") or here["hardware"]["cores"] for job in jobs}),
        "replicates": ablation.replicated,
        "metrics": metrics,
        "registered": together.registered(out),
    }
    return judged(result, ablation)


def where(jobs) -> dict:
    """On what the runs were made: this machine as it is described, or the GPUs that their records name.

    Raises UserError for runs of several kinds of devices."""
    here = environment.describe()
    found = {tuple(sorted(set(kinds))): job for job in jobs if (kinds := job.environment.get("devices"))}
    known = ", ".join(f"{' and '.join(kinds)} ({job.out})" for kinds, job in found.items())
    require(
        len(found) < 2,
        f"These runs were made on different devices: {known}. One result is of one kind: put their records "
        "into folders of their own.",
    )
    own = {device.device_kind for device in jax.devices()}
    if not found or set(next(iter(found))) == own:
        return here
    ((kinds, job),) = found.items()
    kind = " and ".join(kinds)
    cores = job.environment.get("cores") or here["hardware"]["cores"]
    gpu = {"name": name_of(kind), "description": kind, "platform": "gpu", "isa": "", "cores": cores}
    known = {key: job.environment[key] for key in ("python", "packages", "commit", "tree")}
    return here | known | {"hardware": gpu, "system": job.environment.get("platform"), "load_before": None}


def judged(result: dict, ablation: Ablation) -> dict:
    """The result with findings and verdicts of its metrics under the claim's predicate and rules of today."""
    metrics = {
        arm: {int(seed): values for seed, values in seeds.items()} for arm, seeds in result["metrics"].items()
    }
    replicate = metrics.pop(REPLICATE, None)
    noise = (replicate and replicate_noise(replicate, metrics.get(result["replicates"], {}))) or None
    found = judge(ablation.verdict, metrics, LIMITS, noise)
    return result | {
        "confidence": CONFIDENCE,
        "statement": ablation.statement,
        "noise": noise and {metric: rms(values) for metric, values in noise.items()},
        "findings": [finding(f) for f in found],
        "verdict": combine(f.verdict for f in found),
        "on the mechanism": _part(f.verdict for f in found if f.metric not in LOSSES),
        "on loss": _part(f.verdict for f in found if f.metric in LOSSES),
    }


def replicate_noise(replicate, base) -> dict:
    """metric -> differences of the replicate from its base over the seeds that both have."""
    both = [seed for seed in replicate if seed in base]
    pairs = {
        metric: [(replicate[seed].get(metric), base[seed].get(metric)) for seed in both] for metric in METRICS
    }
    known = {metric: [p for p in own if None not in p] for metric, own in pairs.items()}
    return {metric: [one - other for one, other in own] for metric, own in known.items() if own}


def rms(values) -> float:
    """Standard deviation of values whose mean is known to be zero."""
    return math.sqrt(sum(value * value for value in values) / len(values))


def _part(verdicts):
    verdicts = list(verdicts)
    return combine(verdicts) if verdicts else None


def finding(found) -> dict:
    """A finding as JSON data."""
    data = dataclasses.asdict(found)
    interval = data.pop("interval")
    return data | interval


def spread(result: dict, arm: str, metric: str) -> Interval:
    """Mean and interval of a metric over the seeds of an arm that have it."""
    values = [seed.get(metric) for seed in result["metrics"][arm].values()]
    return Interval.of([v for v in values if v is not None])


def difference(result: dict, arm: str, metric: str) -> Interval:
    """The paired difference of an arm from the first one."""
    first = next(iter(result["metrics"]))
    metrics = {name: result["metrics"][name] for name in {arm, first}}
    values, _ = Comparison(arm, metric, first).values(metrics)
    return Interval.of(list(values.values()))


def table(result: dict) -> str:
    """CSV: one line per arm and metric, with mean, spread and paired difference from the first arm; where a
    loss is no language model's, the last column says so."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    own = ("n", "mean", "sd")
    leaks = leaking(result)
    differences = ["difference", "difference_low", "difference_high"]
    writer.writerow(["arm", "metric", *own, *differences, *(["note"] if any(leaks.values()) else [])])
    for arm in result["metrics"]:
        for metric in METRICS:
            values, paired = spread(result, arm, metric), difference(result, arm, metric)
            if values.n:
                cells = [getattr(values, key) for key in own] + [paired.mean, paired.low, paired.high]
                note = ["no language-model loss" if metric in leaks[arm] else ""]
                shown = ["" if c is None else f"{c:.6g}" for c in cells]
                writer.writerow([arm, metric, *shown, *(note if any(leaks.values()) else [])])
    return out.getvalue()


def write(result: dict, path: Path):
    """Write the result as JSON, without whatever is not finite."""
    files.write(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> dict:
    """Read what `write` wrote; UserError if it is no result."""
    try:
        result = json.loads(path.read_text())
        _ = result["verdict"], result["metrics"], result["hardware"]["name"], result["date"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a result of python -m experiments.ablate ({error!r}).") from error
    return result
