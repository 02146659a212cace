"""Predicates and the rule, with metrics made by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.config import UserError
from experiments.verdicts import (
    Comparison,
    Interval,
    all_of,
    between,
    combine,
    less,
    lowest,
    monotone,
    no_worse,
    ratio,
    within,
)


def metrics(**arms):
    """arm=[values per seed] of a metric named m."""
    return {arm: {seed: {"m": v} for seed, v in enumerate(values)} for arm, values in arms.items()}


def verdict(predicate, **arms):
    return combine(c.finding(metrics(**arms)).verdict for c in predicate.comparisons())


def test_interval_is_student_t():
    values = [1.0, 2.0, 4.0]
    found = Interval.of(values)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (found.n, found.mean, found.sd) == (3, pytest.approx(7 / 3), pytest.approx(np.std(values, ddof=1)))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    # With three seeds a difference needs to be 2.48 of its standard deviations: 4.303 / sqrt(3).
    assert (found.high - found.mean) / found.sd == pytest.approx(2.484, abs=1e-3)
    assert Interval.of([5.0]) == Interval(1, 5.0, None, None, None)
    assert Interval.of([]).mean is None


@pytest.mark.parametrize(
    ("predicate", "a", "b", "expected"),
    [
        (less("a", "b", "m"), [1.0, 2.0, 3.0], [1.5, 2.5, 3.6], "confirmed"),  # pairing: the arms overlap
        (less("a", "b", "m"), [1.5, 2.5, 3.6], [1.0, 2.0, 3.0], "refuted"),
        (less("a", "b", "m"), [1.0, 2.0, 3.0], [1.5, 1.9, 3.6], "inconclusive"),
        (less("a", "b", "m"), [1.0, 2.0], [1.0, 2.0], "refuted"),  # equal is not less
        (less("a", "b", "m", by=0.4), [1.0, 2.0, 3.0], [1.5, 2.5, 3.51], "confirmed"),
        (less("a", "b", "m", by=0.6), [1.0, 2.0, 3.0], [1.5, 2.5, 3.51], "refuted"),
        (less("a", "b", "m"), [1.0], [9.0], "inconclusive"),  # one seed confirms nothing
        (no_worse("a", "b", 0.1, "m"), [1.05, 2.051], [1.0, 2.0], "confirmed"),
        (no_worse("a", "b", 0.1, "m"), [1.3, 2.3], [1.0, 2.0], "refuted"),
        (within("a", "b", 0.1, "m"), [1.01, 1.99, 3.0], [1.0, 2.0, 3.0], "confirmed"),
        (within("a", "b", 0.1, "m"), [1.0, 2.0, 3.1], [1.0, 2.1, 3.0], "inconclusive"),
        (within("a", "b", 0.1, "m"), [0.5, 1.5], [1.0, 2.0], "refuted"),
        (ratio("a", "b", "m", above=0.6, below=0.95), [0.8, 1.6], [1.0, 2.01], "confirmed"),
        (ratio("a", "b", "m", above=0.6), [0.3, 0.6], [1.0, 2.0], "refuted"),
        (between("a", "m", below=2.0), [1.0, 1.1], [9.0, 9.0], "confirmed"),
        (between("a", "m", above=2.0), [1.0, 1.1], [9.0, 9.0], "refuted"),
    ],
)
def test_comparisons(predicate, a, b, expected):
    assert verdict(predicate, a=a, b=b) == expected


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_what_was_not_measured_is_never_decided(missing):
    """A run that diverged is not dropped: the seeds that survive would flatter its arm."""
    (comparison,) = less("a", "b", "m").comparisons()
    found = comparison.finding(metrics(a=[1.0, 1.0, 1.0, missing], b=[2.0, 2.1, 2.0, 2.0]))
    assert found.verdict == "inconclusive"
    assert found.note == "no m: a of seed 3"
    assert found.values == {0: -1.0, 1: pytest.approx(-1.1), 2: -1.0}


def test_a_seed_that_one_arm_lacks():
    found = less("a", "b", "m").finding({"a": {0: {"m": 1.0}, 1: {"m": 1.0}}, "b": {0: {"m": 2.0}}})
    assert (found.verdict, found.note) == ("inconclusive", "no m: b of seed 1")


def test_ratio_to_zero():
    found = ratio("a", "b", "m", below=1).finding(metrics(a=[1.0, 1.0], b=[0.0, 2.0]))
    assert found.verdict == "inconclusive" and "ratio to 0 (b of seed 0)" in found.note


def test_several_comparisons():
    falling = monotone(["a", "b", "c"], "m")
    assert [str(c) for c in falling.comparisons()] == ["m of b minus a < 0", "m of c minus b < 0"]
    assert verdict(falling, a=[3, 3.1], b=[2, 2.1], c=[1, 1.1]) == "confirmed"
    assert verdict(falling, a=[3, 3.1], b=[4, 4.2], c=[1, 1.1]) == "refuted"
    assert verdict(monotone(["c", "b", "a"], "m", rising=True), a=[3, 3], b=[2, 2], c=[1, 1]) == "confirmed"
    best = lowest("b", ["a", "c"], "m")
    assert verdict(best, a=[3, 3.1], b=[1, 1.1], c=[2, 2.1]) == "confirmed"
    both = all_of(best, falling, between("a", "m", above=0))
    assert len(both.comparisons()) == 5
    assert combine(["confirmed", "inconclusive"]) == "inconclusive"
    assert combine(["refuted", "inconclusive"]) == "refuted"
    assert combine([]) == "inconclusive"


def test_words():
    assert str(less("a", "b")) == "val_loss of a minus b < 0"
    assert str(ratio("a", "b", "m", above=0.6, below=0.95)) == "m of a / b in (0.6, 0.95)"
    assert str(between("a", "m", above=2)) == "m of a > 2"


def test_an_empty_range():
    with pytest.raises(UserError, match=r"no m is in \(2, 1\)"):
        Comparison("a", "m", above=2, below=1)
