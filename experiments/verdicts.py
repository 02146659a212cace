"""Claims as predicates over metrics of arms and seeds, and the rule that gives a verdict.

The rule: every comparison is a number per seed (a metric of one arm, or its difference from, or ratio to,
the same seed of another arm; seeds share data order and initial parameters, so this pairs them). Its 95 %
confidence interval is mean ± t * sd / sqrt(n), with Student's t for n - 1 degrees of freedom. The comparison
is confirmed if the interval lies inside the open range that the claim states, refuted if it has no point in
common with that range, and inconclusive otherwise. With one seed there is no interval, so it is inconclusive;
so it is when a run diverged or did not measure the metric. Several comparisons are not corrected for their
number. A claim is confirmed if all its comparisons are, and refuted if one is.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from scipy import stats

from experiments.config import require

CONFIDENCE = 0.95
Verdict = Literal["confirmed", "refuted", "inconclusive"]
Metrics = Mapping[str, Mapping[int, Mapping[str, float | None]]]
"""arm -> seed -> metric -> value, None where it was not measured"""


@dataclasses.dataclass(frozen=True)
class Interval:
    """Mean, sample standard deviation and confidence interval of n values; without the last two if n < 2."""

    n: int
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values) -> "Interval":
        """Raises nothing; values must be finite."""
        n = len(values)
        if n == 0:
            return cls(0, None, None, None, None)
        mean = float(np.mean(values))
        if n == 1:
            return cls(1, mean, None, None, None)
        sd = float(np.std(values, ddof=1))
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * sd / math.sqrt(n)
        return cls(n, mean, sd, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison, evaluated."""

    claim: str
    metric: str
    values: dict
    interval: Interval
    verdict: Verdict
    note: str = ""
    """why there is no interval"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The mean over seeds of a metric of `arm` (minus or divided by that of `reference`) is in a range."""

    arm: str
    metric: str
    reference: str | None = None
    how: Literal["value", "difference", "ratio"] = "difference"
    above: float = -math.inf
    below: float = math.inf

    def __post_init__(self):
        require(self.above < self.below, f"{self.arm}: no {self.metric} is {self._range()}.")

    def __str__(self):
        left = {
            "value": f"{self.metric} of {self.arm}",
            "difference": f"{self.metric} of {self.arm} minus {self.reference}",
            "ratio": f"{self.metric} of {self.arm} / {self.reference}",
        }[self.how]
        return f"{left} {self._range()}"

    def _range(self):
        low, high = (f"{bound + 0.0:g}" for bound in (self.above, self.below))
        if math.isinf(self.above):
            return f"< {high}"
        return f"> {low}" if math.isinf(self.below) else f"in ({low}, {high})"

    def comparisons(self) -> tuple["Comparison", ...]:
        return (self,)

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.arm,) if self.reference is None else (self.arm, self.reference)

    def finding(self, metrics: Metrics) -> Finding:
        """The verdict on these metrics, over all seeds that any arm has."""
        seeds = sorted(set().union(*metrics.values()))
        values, missing = {}, []
        for seed in seeds:
            own = [metrics[arm].get(seed, {}).get(self.metric) for arm in self.arms]
            lacking = [a for a, v in zip(self.arms, own, strict=True) if v is None or not math.isfinite(v)]
            if lacking:
                missing.append(f"{' and '.join(lacking)} of seed {seed}")
            elif self.how == "ratio" and own[1] == 0:
                missing.append(f"a ratio to 0 ({self.reference} of seed {seed})")
            else:
                values[seed] = self._combined(*own)
        interval = Interval.of(list(values.values()))
        note = f"no {self.metric}: {', '.join(missing)}" if missing else ""
        if not missing and interval.n < 2:
            note = f"{interval.n} seed{'' if interval.n == 1 else 's'}: no interval"
        verdict = "inconclusive" if note else self._verdict(interval)
        return Finding(str(self), self.metric, values, interval, verdict, note)

    def _combined(self, own, other=None):
        return {"value": lambda: own, "difference": lambda: own - other, "ratio": lambda: own / other}[
            self.how
        ]()

    def _verdict(self, interval) -> Verdict:
        if self.above < interval.low and interval.high < self.below:
            return "confirmed"
        if interval.high <= self.above or interval.low >= self.below:
            return "refuted"
        return "inconclusive"


@dataclasses.dataclass(frozen=True)
class All:
    """Every part holds."""

    parts: tuple

    def comparisons(self) -> tuple[Comparison, ...]:
        return tuple(c for part in self.parts for c in part.comparisons())


Predicate = Comparison | All


def less(arm: str, than: str, metric: str = "val_loss", by: float = 0.0) -> Comparison:
    """`arm` is below `than`, by more than `by`."""
    return Comparison(arm, metric, than, below=-by)


def no_worse(arm: str, than: str, margin: float, metric: str = "val_loss") -> Comparison:
    """`arm` is at most `margin` above `than`."""
    return Comparison(arm, metric, than, below=margin)


def within(arm: str, reference: str, margin: float, metric: str = "val_loss") -> Comparison:
    """`arm` is nearer to `reference` than `margin`."""
    return Comparison(arm, metric, reference, above=-margin, below=margin)


def ratio(arm: str, reference: str, metric: str, above=-math.inf, below=math.inf) -> Comparison:
    """`arm` / `reference` lies between two bounds."""
    return Comparison(arm, metric, reference, "ratio", above, below)


def between(arm: str, metric: str, above=-math.inf, below=math.inf) -> Comparison:
    """A metric of one arm lies between two bounds."""
    return Comparison(arm, metric, None, "value", above, below)


def monotone(arms, metric: str = "val_loss", rising: bool = False) -> All:
    """Falls (or rises) from each arm to the next."""
    arms = list(arms)[:: -1 if rising else 1]
    return All(tuple(less(b, a, metric) for a, b in itertools.pairwise(arms)))


def lowest(arm: str, others, metric: str = "val_loss") -> All:
    """`arm` is below each of the others."""
    return All(tuple(less(arm, other, metric) for other in others))


def all_of(*parts: Predicate) -> All:
    """Every part holds."""
    return All(parts)


def combine(verdicts) -> Verdict:
    """Of several comparisons: refuted if one is, confirmed if all are, else (or of none) inconclusive."""
    verdicts = list(verdicts)
    if "refuted" in verdicts:
        return "refuted"
    return "confirmed" if verdicts and set(verdicts) == {"confirmed"} else "inconclusive"
