"""Claims as predicates over metrics of arms and seeds, and the rule that gives a verdict.

A comparison is a number per seed: a metric of one arm, or its difference from, or ratio to, the same seed of
another arm (or the mean of several); seeds share data order and initial parameters, so this pairs them. It
states an open range for the mean of that number. `judge` decides all comparisons of a claim together.

Noise. Training amplifies rounding, so that a repeat of the same run ends elsewhere. A replicate, the same
seed and data from parameters that differ by rounding, shows by how much: its n differences d from its base
have mean zero by construction, so that sqrt(mean(d**2)) is the standard deviation of a paired difference of
which nothing but rounding is the cause, with n degrees of freedom. The noise floor of a comparison is
t * that / sqrt(seeds), and no interval is narrower than twice its floor: three seeds that agree by luck prove
nothing.

Decision. Student's t test gives each comparison a two-sided p-value against the bound of its range, once with
the standard deviation over seeds (n - 1 degrees of freedom) and once with the replicate's; the larger one
counts. Holm's step-down procedure over all comparisons of the claim keeps the chance of any wrong decision
below 5 %. What it rejects is confirmed where the mean lies inside the range, else refuted. The others:

- no verdict: a run diverged, is not complete, or did not measure the metric;
- not exercised: the number is the same for every seed, or the metric lies at its floor or ceiling in every
  seed of an arm, so that nothing was tested;
- cannot be decided: the effect that the claim states is smaller than what these seeds resolve, the effect
  that would be found in 80 % of repetitions;
- inconclusive: all else, and whatever has one seed.

A claim is confirmed if all its comparisons are, and refuted if one is.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from scipy import optimize, stats

from experiments.errors import require

CONFIDENCE = 0.95
POWER = 0.8
MOST_SEEDS = 100
Verdict = Literal["confirmed", "refuted", "inconclusive", "cannot be decided", "not exercised", "no verdict"]
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
    def of(cls, values, floor: float = 0.0) -> "Interval":
        """The interval of finite values; floor: its half-width is at least this."""
        n = len(values)
        if n == 0:
            return cls(0, None, None, None, None)
        mean = float(np.mean(values))
        if n == 1:
            return cls(1, mean, None, None, None)
        sd = float(np.std(values, ddof=1))
        half = max(_critical(1 - CONFIDENCE, n - 1) * sd / math.sqrt(n), floor)
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
    """why nothing was tested"""
    p: float | None = None
    """against the bound of the range, corrected for the number of comparisons"""
    floor: float | None = None
    """noise floor at this number of seeds; None where no replicate was run"""
    resolves: float | None = None
    """smallest effect that these seeds would find in 80 % of repetitions"""
    states: float | None = None
    """distance from the bound at which the claim places the mean; None if it gives a direction only"""
    seeds_needed: int | None = None
    """seeds that would decide it if its true mean were as far from the bound as the effect says, or as it
    was measured; None where it is decided"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The mean over seeds of a metric of `arm` (minus or divided by that of `reference`) is in a range."""

    arm: str
    metric: str
    reference: str | tuple[str, ...] | None = None
    """of several arms their mean is the reference"""
    how: Literal["value", "difference", "ratio"] = "difference"
    above: float = -math.inf
    below: float = math.inf
    effect: float | None = None
    """how far inside the range the claim, or what was expected of it, places the mean"""

    def __post_init__(self):
        require(self.above < self.below, f"{self.arm}: no {self.metric} is {self._range()}.")
        require(
            self.effect is None or self.effect > 0,
            f"{self.arm}: the effect on {self.metric} must be positive, got {self.effect}.",
        )

    def __str__(self):
        several = isinstance(self.reference, tuple)
        reference = f"the mean of {' and '.join(self.reference)}" if several else self.reference
        left = {
            "value": f"{self.metric} of {self.arm}",
            "difference": f"{self.metric} of {self.arm} minus {reference}",
            "ratio": f"{self.metric} of {self.arm} / {reference}",
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
    def references(self) -> tuple[str, ...]:
        own = self.reference
        return () if own is None else own if isinstance(own, tuple) else (own,)

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.arm, *self.references)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The finite ends of the range."""
        return tuple(bound for bound in (self.above, self.below) if math.isfinite(bound))

    @property
    def states(self) -> float | None:
        """The effect; of a margin around or above no difference, the margin; None for a mere direction."""
        if self.effect is None and self.how == "difference" and self.above < 0 < self.below:
            return min(abs(bound) for bound in self.bounds) if self.bounds else None
        return self.effect

    def values(self, metrics: Metrics) -> tuple[dict, list[str]]:
        """(seed -> number, what is missing) over all seeds that any arm of the claim has."""
        values, missing = {}, [f"{arm} was not run" for arm in self.arms if arm not in metrics]
        for seed in sorted(set().union(*metrics.values())) if not missing else ():
            found = [metrics[arm].get(seed, {}).get(self.metric) for arm in self.arms]
            lacking = [a for a, v in zip(self.arms, found, strict=True) if v is None or not math.isfinite(v)]
            if lacking:
                missing.append(f"{' and '.join(lacking)} of seed {seed}")
                continue
            own, other = found[0], float(np.mean(found[1:])) if found[1:] else None
            if self.how == "ratio" and other == 0:
                missing.append(f"a ratio to 0 ({self.reference} of seed {seed})")
            else:
                values[seed] = {
                    "value": lambda own, other: own,
                    "difference": lambda own, other: own - other,
                    "ratio": lambda own, other: own / other,
                }[self.how](own, other)
        return values, missing

    def noise(self, metrics: Metrics, run: float) -> float:
        """Standard deviation of the number where rounding is its only cause; run: that of one run."""
        if self.how == "value":
            return run
        others = len(self.references)
        if self.how == "difference":
            return run * math.sqrt(1 + 1 / others)
        own, other = (
            float(np.mean([metrics[arm][seed][self.metric] for arm in arms for seed in metrics[arm]]))
            for arms in ((self.arm,), self.references)
        )
        return run / abs(other) * math.sqrt(1 + (own / other) ** 2 / others)


@dataclasses.dataclass(frozen=True)
class All:
    """Every part holds."""

    parts: tuple

    def comparisons(self) -> tuple[Comparison, ...]:
        return tuple(c for part in self.parts for c in part.comparisons())


Predicate = Comparison | All


def less(
    arm: str, than: str | tuple[str, ...], metric: str = "val_loss", by: float = 0.0, effect=None
) -> Comparison:
    """`arm` is below `than` (or the mean of several), by more than `by`; by about `effect` more, if given."""
    return Comparison(arm, metric, than, below=-by, effect=effect)


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


def monotone(arms, metric: str = "val_loss") -> All:
    """Falls from each arm to the next."""
    return All(tuple(less(b, a, metric) for a, b in itertools.pairwise(arms)))


def lowest(arm: str, others, metric: str = "val_loss", effect=None) -> All:
    """`arm` is below each of the others, by about `effect`, if given."""
    return All(tuple(less(arm, other, metric, effect=effect) for other in others))


def all_of(*parts: Predicate) -> All:
    """Every part holds."""
    return All(parts)


# ---- deciding


def judge(predicate: Predicate, metrics: Metrics, limits=None, replicate=None) -> list[Finding]:
    """The findings on all comparisons of a claim.

    metrics: of its arms, without the replicate; limits: metric -> (floor, ceiling), None for no such end;
    replicate: metric -> differences of the replicate from its base, one per seed; None if it was not run.
    """
    comparisons = predicate.comparisons()
    tests = [_Test.of(c, metrics, limits or {}, replicate, len(comparisons)) for c in comparisons]
    corrected = holm([test.p if test.p is not None else 1.0 for test in tests])
    return [test.finding(p) for test, p in zip(tests, corrected, strict=True)]


def holm(p) -> list[float]:
    """Holm's step-down p-values: those at most alpha are rejected with family-wise error alpha."""
    order, adjusted, highest = np.argsort(p, kind="stable"), [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min((len(p) - rank) * float(p[index]), 1.0))
        adjusted[index] = highest
    return adjusted


@dataclasses.dataclass(frozen=True)
class _Test:
    """A comparison with its numbers, before the correction."""

    comparison: Comparison
    values: dict
    interval: Interval
    p: float | None
    verdict: Verdict
    """what is known without a test, else "inconclusive" """
    note: str
    floor: float | None
    sd: float
    family: int

    @classmethod
    def of(cls, comparison, metrics, limits, replicate, family) -> "_Test":
        values, missing = comparison.values(metrics)
        numbers = list(values.values())
        n, own = len(numbers), Interval.of(numbers)
        verdict, note = "inconclusive", ""
        if missing:
            verdict, note = "no verdict", f"no {comparison.metric}: {', '.join(missing)}"
        elif n < 2:
            note = f"{n} seed{'' if n == 1 else 's'}: no interval"
        elif why := _untested(comparison, metrics, numbers, limits):
            verdict, note = "not exercised", why
        differences = (replicate or {}).get(comparison.metric) or []
        noise = floor = None
        if differences and n and not missing:
            run = math.sqrt(float(np.mean(np.square(differences))) / 2)
            noise = comparison.noise(metrics, run)
            floor = _critical(1 - CONFIDENCE, len(differences)) * noise / math.sqrt(n)
        p = None
        if not note:
            scales = [(own.sd, n - 1), *([(noise, len(differences))] if noise else [])]
            p = max(_p(comparison, own.mean, sd / math.sqrt(n), df) for sd, df in scales)
        interval = Interval.of(numbers, floor or 0.0)
        sd = max(own.sd or 0.0, noise or 0.0)
        return cls(comparison, values, interval, p, verdict, note, floor, sd, family)

    def finding(self, p: float) -> Finding:
        comparison, verdict = self.comparison, self.verdict
        states, resolves, seeds = comparison.states, None, None
        if self.p is not None:
            sides, alpha = len(comparison.bounds), (1 - CONFIDENCE) / self.family
            resolves = resolvable(self.sd, self.interval.n, alpha, sides)
            if p <= 1 - CONFIDENCE:
                inside = comparison.above < self.interval.mean < comparison.below
                verdict = "confirmed" if inside else "refuted"
            else:
                if states is not None and resolves > states:
                    verdict = "cannot be decided"
                seen = min(abs(self.interval.mean - bound) for bound in comparison.bounds)
                seeds = seeds_for(comparison.effect or seen, self.sd, alpha)
        return Finding(
            str(comparison),
            comparison.metric,
            self.values,
            self.interval,
            verdict,
            self.note,
            p if self.p is not None else None,
            self.floor,
            resolves,
            states,
            seeds,
        )


def _untested(comparison, metrics, numbers, limits) -> str:
    """Why these numbers test nothing, or ""."""
    ends = dict(zip(("floor", "ceiling"), limits.get(comparison.metric, (None, None)), strict=True))
    for arm in comparison.arms:
        for name, end in ends.items():
            if end is not None and all(run[comparison.metric] == end for run in metrics[arm].values()):
                return f"{comparison.metric} of {arm} is at its {name}, {end:g}, in every seed"
    same = np.ptp(numbers) <= 1e-12 * max(1.0, *map(abs, numbers))
    return f"the same for every seed: {numbers[0]:.4g}" if same else ""


def _p(comparison, mean, error, df) -> float:
    """Two-sided p-value of the decision that this mean suggests, given its standard error."""
    scores = {"above": (mean - comparison.above) / error, "below": (comparison.below - mean) / error}
    inside = [2 * float(stats.t.sf(score, df)) for score in scores.values()]
    outside = [2 * float(stats.t.cdf(score, df)) for score in scores.values()]
    return min(max(inside), min(outside), 1.0)


@functools.cache
def _critical(alpha: float, df: int) -> float:
    return float(stats.t.ppf(1 - alpha / 2, df))


@functools.cache
def _noncentrality(n: int, alpha: float, missed: float) -> float:
    """Distance of the true mean from the bound, in standard errors, at which n seeds miss it that often."""
    critical = _critical(alpha, n - 1)
    if n > 30 or critical > 40:  # the noncentral distribution is near its limits, or its tails overflow
        chi = math.sqrt(float(stats.chi2.ppf(1 - missed, n - 1)) / (n - 1)) if n <= 30 else 1.0
        return critical * chi + (float(stats.norm.ppf(1 - missed)) if n > 30 else 0.0)
    lost = lambda distance: float(stats.nct.cdf(critical, n - 1, distance)) - missed  # noqa: E731
    return float(optimize.brentq(lost, 0.0, 3 * critical + 10, xtol=1e-6))


def resolvable(sd: float, n: int, alpha: float, sides: int = 1) -> float:
    """The distance from the bound that n seeds with this standard deviation find with probability POWER.

    sides: finite bounds of the range; a mean between two must be told from both.
    """
    return _noncentrality(n, alpha, (1 - POWER) / sides) * sd / math.sqrt(n)


def seeds_for(distance: float, sd: float, alpha: float) -> int:
    """The fewest seeds that resolve this distance from the bound; above MOST_SEEDS, one more than that."""
    few = (n for n in range(2, MOST_SEEDS + 1) if resolvable(sd, n, alpha) <= distance)
    return next(few, MOST_SEEDS + 1)


def combine(verdicts) -> Verdict:
    """Of several comparisons: refuted if one is, confirmed if all are, else what stands most in the way."""
    verdicts = set(verdicts)
    for one in ("refuted", "no verdict", "cannot be decided", "inconclusive", "not exercised"):
        if one in verdicts:
            return one
    return "confirmed" if verdicts else "inconclusive"
