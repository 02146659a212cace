"""Predicates and the rule, with metrics made by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.ablations.verdicts import (
    MOST_SEEDS,
    Comparison,
    Interval,
    all_of,
    between,
    combine,
    holm,
    judge,
    less,
    lowest,
    monotone,
    no_worse,
    ratio,
    resolvable,
    seeds_for,
    within,
)
from experiments.errors import UserError


def metrics(**arms):
    """arm=[values per seed] of a metric named m."""
    return {arm: {seed: {"m": v} for seed, v in enumerate(values)} for arm, values in arms.items()}


def one(predicate, found, **kwargs):
    """The finding of a claim with a single comparison."""
    (finding,) = judge(predicate, found, **kwargs)
    return finding


def verdict(predicate, **arms):
    return combine(finding.verdict for finding in judge(predicate, metrics(**arms)))


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
        (less("a", "b", "m"), [1.0, 2.0], [1.0, 2.0], "not exercised"),  # nothing differed
        (less("a", "b", "m"), [1.0, 2.0], [1.5, 2.5], "not exercised"),  # nor did the seeds
        (less("a", "b", "m", by=0.4), [1.0, 2.0, 3.0], [1.5, 2.5, 3.51], "confirmed"),
        (less("a", "b", "m", by=0.6), [1.0, 2.0, 3.0], [1.5, 2.5, 3.51], "refuted"),
        (less("a", "b", "m"), [1.0], [9.0], "inconclusive"),  # one seed confirms nothing
        (no_worse("a", "b", 0.1, "m"), [1.05, 2.051], [1.0, 2.0], "confirmed"),
        (no_worse("a", "b", 0.1, "m"), [1.3, 2.301], [1.0, 2.0], "refuted"),
        (within("a", "b", 0.1, "m"), [1.01, 1.99, 3.0], [1.0, 2.0, 3.0], "confirmed"),
        (within("a", "b", 0.1, "m"), [1.0, 2.0, 3.1], [1.0, 2.1, 3.0], "cannot be decided"),
        (within("a", "b", 0.1, "m"), [0.5, 1.501], [1.0, 2.0], "refuted"),
        (ratio("a", "b", "m", above=0.6, below=0.95), [0.8, 1.6], [1.0, 2.01], "confirmed"),
        (ratio("a", "b", "m", above=0.6), [0.3, 0.601], [1.0, 2.0], "refuted"),
        (between("a", "m", below=2.0), [1.0, 1.1], [9.0, 9.0], "confirmed"),
        (between("a", "m", above=2.0), [1.0, 1.1], [9.0, 9.0], "refuted"),
    ],
)
def test_comparisons(predicate, a, b, expected):
    assert verdict(predicate, a=a, b=b) == expected


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_what_was_not_measured_is_never_decided(missing):
    """A run that diverged is not dropped: the seeds that survive would flatter its arm."""
    found = one(less("a", "b", "m"), metrics(a=[1.0, 1.0, 1.0, missing], b=[2.0, 2.1, 2.0, 2.0]))
    assert found.verdict == "no verdict" and found.p is None
    assert found.note == "no m: a of seed 3"
    assert found.values == {0: -1.0, 1: pytest.approx(-1.1), 2: -1.0}


def test_a_seed_that_one_arm_lacks():
    found = one(less("a", "b", "m"), {"a": {0: {"m": 1.0}, 1: {"m": 1.0}}, "b": {0: {"m": 2.0}}})
    assert (found.verdict, found.note) == ("no verdict", "no m: b of seed 1")
    assert one(less("a", "c", "m"), {"a": {0: {"m": 1.0}}}).note == "no m: c was not run"


def test_ratio_to_zero():
    found = one(ratio("a", "b", "m", below=1), metrics(a=[1.0, 1.0], b=[0.0, 2.0]))
    assert found.verdict == "no verdict" and "ratio to 0 (b of seed 0)" in found.note


def test_several_comparisons():
    falling = monotone(["a", "b", "c"], "m")
    assert [str(c) for c in falling.comparisons()] == ["m of b minus a < 0", "m of c minus b < 0"]
    assert verdict(falling, a=[3, 3.1], b=[2, 2.101], c=[1, 1.1]) == "confirmed"
    assert verdict(falling, a=[3, 3.1], b=[4, 4.101], c=[1, 1.1]) == "refuted"
    best = lowest("b", ["a", "c"], "m")
    assert verdict(best, a=[3, 3.101], b=[1, 1.1], c=[2, 2.102]) == "confirmed"
    both = all_of(best, falling, between("a", "m", above=0))
    assert len(both.comparisons()) == 5


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["confirmed", "confirmed"], "confirmed"),
        (["confirmed", "not exercised"], "not exercised"),
        (["not exercised", "inconclusive"], "inconclusive"),
        (["inconclusive", "cannot be decided"], "cannot be decided"),
        (["cannot be decided", "no verdict"], "no verdict"),
        (["no verdict", "refuted", "confirmed"], "refuted"),
        ([], "inconclusive"),
    ],
)
def test_combine(verdicts, expected):
    assert combine(verdicts) == expected


LIMITS = {"m": (0.0, 1.0)}


@pytest.mark.parametrize(
    ("predicate", "a", "b"),
    [
        (less("a", "b", "m"), [0.0, 0.0, 0.0], [0.1, 0.2, 0.3]),  # an arm at the floor
        (less("a", "b", "m"), [0.5, 0.6, 0.55], [1.0, 1.0, 1.0]),  # or at the ceiling
        (less("a", "b", "m"), [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),  # both: today's "refuted"
        (ratio("a", "b", "m", below=0.9), [0.0, 0.0, 0.0], [0.1, 0.2, 0.3]),
        (between("a", "m", below=0.1), [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]),
    ],
)
def test_a_share_at_its_floor_or_ceiling_is_not_exercised(predicate, a, b):
    found = one(predicate, metrics(a=a, b=b), limits=LIMITS)
    assert found.verdict == "not exercised" and found.p is None and found.note


def test_a_share_at_its_floor_for_some_seeds_is_compared():
    found = one(less("a", "b", "m"), metrics(a=[0.0, 0.0, 0.01], b=[0.5, 0.52, 0.51]), limits=LIMITS)
    assert found.verdict == "confirmed"


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_the_number_of_comparisons_counts():
    """The same numbers, alone and beside comparisons that show nothing."""
    arms = {"a": [1.0, 2.0, 3.0], "b": [1.03, 2.06, 3.04], "c": [1.0, 2.1, 2.9], "d": [1.1, 1.9, 3.0]}
    alone = one(less("b", "a", "m"), metrics(**arms))
    assert alone.verdict == "refuted" and 0.02 < alone.p < 0.05
    first, *_ = judge(all_of(less("b", "a", "m"), less("c", "a", "m"), less("d", "a", "m")), metrics(**arms))
    assert first.verdict == "inconclusive" and first.p == pytest.approx(3 * alone.p)


@pytest.mark.slow
def test_no_difference_is_seldom_decided():
    """Five comparisons without any effect, many times: a wrong decision in at most 5 % of the claims."""
    draw = np.random.default_rng(0)
    others = [f"x{i}" for i in range(5)]
    wrong = 0
    for _ in range(400):
        arms = {arm: list(draw.normal(size=4)) for arm in ["a", *others]}
        found = judge(lowest("a", others, "m"), metrics(**arms))
        wrong += any(f.verdict in ("confirmed", "refuted") for f in found)
    assert wrong <= 0.05 * 400 + 3 * math.sqrt(400 * 0.05 * 0.95)


def test_noise_floor_widens_what_agrees_by_luck():
    """Three seeds 0.001 apart, a replicate that differs by 0.02 from its base."""
    arms = metrics(a=[1.011, 2.012, 3.010], b=[1.0, 2.0, 3.0])
    assert one(less("a", "b", "m"), arms).verdict == "refuted"
    found = one(less("a", "b", "m", effect=0.01), arms, replicate={"m": [0.02, -0.02, 0.02]})
    assert found.verdict == "cannot be decided"
    assert found.floor == pytest.approx(stats.t.ppf(0.975, 3) * 0.02 / math.sqrt(3))
    assert found.interval.high - found.interval.mean == pytest.approx(found.floor)


@pytest.mark.parametrize(
    ("predicate", "factor"),
    [
        (less("a", "b", "m"), 1.0),
        (between("a", "m", above=0), 1 / math.sqrt(2)),
        (less("a", ("b", "c"), "m"), math.sqrt(3) / 2),
        (ratio("a", "b", "m", below=3), math.sqrt((1 + 2**2) / 2) / 2),
    ],
)
def test_noise_of_each_kind_of_comparison(predicate, factor):
    """Against a simulation: runs of one mean each, with independent noise of standard deviation s."""
    arms = metrics(a=[4.0, 4.2, 3.8], b=[2.0, 2.1, 1.9], c=[2.0, 2.1, 1.9])
    found = one(predicate, arms, replicate={"m": [0.01, -0.01]})
    assert found.floor == pytest.approx(stats.t.ppf(0.975, 2) * 0.01 * factor / math.sqrt(3))
    draw = np.random.default_rng(1).normal(scale=0.01 / math.sqrt(2), size=(20_000, 3))
    a, b, c = 4 + draw[:, 0], 2 + draw[:, 1], 2 + draw[:, 2]
    how = predicate.how if predicate.reference != ("b", "c") else "mean"
    number = {"difference": a - b, "value": a, "mean": a - (b + c) / 2, "ratio": a / b}[how]
    assert np.std(number) == pytest.approx(0.01 * factor, rel=0.02)


def test_a_margin_below_the_noise_floor_cannot_be_decided():
    arms = metrics(a=[1.001, 2.0, 3.0], b=[1.0, 2.001, 3.0])
    assert one(no_worse("a", "b", 0.01, "m"), arms).verdict == "confirmed"
    found = one(no_worse("a", "b", 0.01, "m"), arms, replicate={"m": [0.02, -0.015, 0.01]})
    assert found.floor > 0.01 and found.verdict == "cannot be decided"
    # An arm that is better by more than the floor is no worse, and a much worse one is refuted.
    arms = metrics(a=[0.9, 1.9, 2.91], b=[1.0, 2.0, 3.0])
    assert (
        one(no_worse("a", "b", 0.01, "m"), arms, replicate={"m": [0.02, -0.015, 0.01]}).verdict == "confirmed"
    )
    arms = metrics(a=[1.1, 2.1, 3.11], b=[1.0, 2.0, 3.0])
    assert (
        one(no_worse("a", "b", 0.01, "m"), arms, replicate={"m": [0.02, -0.015, 0.01]}).verdict == "refuted"
    )


def test_what_a_claim_states():
    assert less("a", "b", "m").states is None
    assert less("a", "b", "m", effect=0.02).states == 0.02
    assert no_worse("a", "b", 0.01, "m").states == within("a", "b", 0.01, "m").states == 0.01
    assert less("a", "b", "m", by=0.03).states is None
    with pytest.raises(UserError, match="must be positive"):
        less("a", "b", "m", effect=0.0)


def test_an_effect_that_these_seeds_cannot_see():
    arms = metrics(a=[1.0, 2.01, 2.99], b=[1.0, 2.0, 3.0])
    small, large, none = (one(less("a", "b", "m", effect=e), arms) for e in (0.01, 0.2, None))
    assert (small.verdict, large.verdict, none.verdict) == (
        "cannot be decided",
        "inconclusive",
        "inconclusive",
    )
    assert small.resolves == large.resolves > small.states
    assert small.seeds_needed > 3 >= large.seeds_needed


@pytest.mark.slow
@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (3, 0.01), (8, 0.05), (40, 0.05)])
def test_resolvable_effects_are_found_in_80_percent(n, alpha):
    draw = np.random.default_rng(2).normal(size=(20_000, n)) - resolvable(1.0, n, alpha)
    t = draw.mean(1) / (draw.std(1, ddof=1) / math.sqrt(n))
    assert np.mean(t < stats.t.ppf(alpha / 2, n - 1)) == pytest.approx(0.8, abs=0.012)


def test_seeds_for():
    needed = seeds_for(0.02, 0.012, 0.05)
    assert resolvable(0.012, needed, 0.05) <= 0.02 < resolvable(0.012, needed - 1, 0.05)
    assert seeds_for(1e-6, 1.0, 0.05) == MOST_SEEDS + 1


@pytest.mark.parametrize("gap", [-0.006, 0.002, 0.008, 0.013])
def test_the_seeds_that_a_margin_needs_are_those_of_the_measured_gap(gap):
    """Not those of a gap of 0; beyond a margin those that refute."""
    apart = 0.008
    arms = metrics(a=[1 + gap - apart, 2 + gap, 3 + gap + apart], b=[1.0, 2.0, 3.0])
    margin, stated = (
        one(claim, arms) for claim in (no_worse("a", "b", 0.01, "m"), less("a", "b", "m", effect=0.01))
    )
    assert margin.verdict == "cannot be decided" and stated.seeds_needed == seeds_for(0.01, apart, 0.05)
    assert margin.seeds_needed == seeds_for(abs(0.01 - gap), apart, 0.05)


def test_words():
    assert str(less("a", "b")) == "val_loss of a minus b < 0"
    assert str(ratio("a", "b", "m", above=0.6, below=0.95)) == "m of a / b in (0.6, 0.95)"
    assert str(between("a", "m", above=2)) == "m of a > 2"
    assert str(less("a", ("b", "c"), "m")) == "m of a minus the mean of b and c < 0"


def test_an_empty_range():
    with pytest.raises(UserError, match=r"no m is in \(2, 1\)"):
        Comparison("a", "m", above=2, below=1)
