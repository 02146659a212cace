"""Known numbers of the literature's operators on random data: ratios of sums over many groups, sampled.

Gaussian, Laplace and log-normal values were computed independently, to three digits; tolerances are a few
times the sampling error of the sizes used here.
"""

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import random24
from tests.ops.data import device

pytestmark = pytest.mark.optimised

SIDE = 1024  # 65 536 tiles, 262 144 groups
KEY = jax.random.key(20)


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(2102)
    shape = (SIDE, SIDE)
    laws = {"normal": rng.normal, "laplace": rng.laplace, "lognormal": rng.lognormal}
    return {name: law(size=shape).astype(np.float32) for name, law in laws.items()}


def kept(x, y) -> float:
    """Share of the L1 norm."""
    return float(np.abs(np.asarray(y, np.float64)).sum() / np.abs(x.astype(np.float64)).sum())


def energy(x, y) -> float:
    """Squared error over energy."""
    x, y = x.astype(np.float64), np.asarray(y, np.float64)
    return float(np.square(y - x).sum() / np.square(x).sum())


@pytest.mark.parametrize(
    ("law", "plain", "transposable", "double"),
    [("normal", 0.745, 0.702, 0.6545), ("lognormal", 0.797, 0.761, 0.727)],
)
def test_share_of_l1_kept(implementation, draws, law, plain, transposable, double):
    x = draws[law]
    w = device(x)
    assert kept(x, s24.prune24(w, 1, implementation=implementation)) == pytest.approx(plain, abs=0.002)
    mask = np.asarray(s24.transposable_mask24(w, implementation=implementation))
    assert kept(x, np.where(mask, x, 0)) == pytest.approx(transposable, abs=0.002)
    pruned = s24.double_prune24(w, 1, implementation=implementation)
    assert kept(x, pruned) == pytest.approx(double, abs=0.002)


def test_double_pruning_leaves_13_of_32(implementation, draws):
    """0.5 minus 0.09375 (SLoPe's lemma for 2:4)."""
    for axis in (0, 1):
        pruned = s24.double_prune24(device(draws["normal"]), axis, implementation=implementation)
        assert np.mean(np.asarray(pruned) != 0) == pytest.approx(0.40625, abs=0.001)


def test_scale_and_error_of_the_soft_threshold(implementation, draws):
    """The least-squares scale of S-STE at a Gaussian initialisation, whatever its deviation."""
    for deviation in (1.0, 0.02):
        x = np.float32(deviation) * draws["normal"]
        soft = np.asarray(s24.soft24(device(x), 1, implementation=implementation), np.float64)
        beta = np.sum(x * soft) / np.sum(soft * soft)
        assert beta == pytest.approx(1.484, abs=0.004)
        assert energy(x, beta * soft) == pytest.approx(0.258, abs=0.002)
        assert (soft != 0).mean() == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("law", "exact", "approximate", "biased", "capped"),
    [("normal", 0.473, 0.502, 0.1325, 0.335), ("laplace", 0.312, 0.346, 0.080, 0.5)],
)
def test_variance_of_the_estimators(implementation, draws, law, exact, approximate, biased, capped):
    x = draws[law]
    g = device(x)
    drawn = np.asarray(s24.mvue24(KEY, g, 1, implementation=implementation))
    assert energy(x, drawn) == pytest.approx(exact, abs=0.006)
    sequential = s24.mvue24(KEY, g, 1, exact=False, implementation=implementation)
    assert energy(x, sequential) == pytest.approx(approximate, abs=0.006)
    assert energy(x, s24.prune24(g, 1, implementation=implementation)) == pytest.approx(biased, abs=0.002)
    # A capped group is told by its largest entry, which only there passes unchanged.
    groups, out = x.reshape(-1, 4), drawn.reshape(-1, 4)
    largest = np.abs(groups).argmax(1)[:, None]
    same = np.take_along_axis(groups, largest, 1) == np.take_along_axis(out, largest, 1)
    assert same.mean() == pytest.approx(capped, abs=0.004)


@pytest.mark.parametrize(("law", "share"), [("normal", 0.692), ("lognormal", 0.756)])
def test_greedy_tiles_keep_less(draws, law, share):
    """On Gaussian data 7.84 weights per tile: 16 % of the tiles lack one of eight, none lacks more."""
    x = draws[law]
    mask = np.asarray(s24.transposable_mask24(device(x), exact=False))
    assert kept(x, np.where(mask, x, 0)) == pytest.approx(share, abs=0.002)
    count = mask.reshape(SIDE // 4, 4, SIDE // 4, 4).sum((1, 3))
    assert set(np.unique(count)) == {7, 8}
    if law == "normal":
        assert count.mean() == pytest.approx(7.84, abs=0.01)
        assert (count < 8).mean() == pytest.approx(0.16, abs=0.005)


@pytest.mark.parametrize(("law", "paired"), [("normal", 0.636), ("laplace", 0.499)])
def test_variance_of_the_other_random_cuts(draws, law, paired):
    x = draws[law]
    for name, ratio in (("paired", paired), ("uniform", 1.0)):
        assert energy(x, random24(KEY, device(x), 1, name)) == pytest.approx(ratio, abs=0.006)
