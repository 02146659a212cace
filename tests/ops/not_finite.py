"""Products of what is not finite: operands, and which results are right by the definition."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops import oracle
from tests.ops.data import NUMPY

SHAPE = T, d, f = 300, 256, 192
SHOWN = 8  # elements of a message
# Of the sum of the magnitudes of the terms: sums in float32 in any order, of terms that tensor cores cut off.
ERROR = 2.0**-16


def normal() -> tuple[jax.Array, jax.Array]:
    """One Inf, one NaN, a row whose squares overflow, and a row of which some do."""
    x, w = (
        jax.random.normal(jax.random.key(seed), size, jnp.bfloat16)
        for seed, size in ((3, (T, d)), (4, (d, f)))
    )
    return x.at[5, 7].set(jnp.inf).at[9, 8].set(jnp.nan).at[11].multiply(1e19).at[290].multiply(1e18), w


def whole() -> tuple[jax.Array, jax.Array]:
    """Weights of which many are zeros, some of them kept, and Inf of both signs in one row."""
    rng = np.random.default_rng(5)
    x = rng.integers(-4, 5, (T, d)).astype(np.float32)
    w = rng.choice([-2, -1, 0, 0, 0, 0, 1, 2], (d, f)).astype(np.float32)
    x[3, [20, 200]] = np.inf
    x[4, [20, 200]] = np.inf, -np.inf
    x[260, d - 1] = -np.inf
    x[T - 1, [0, d - 1]] = np.nan
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)


OPERANDS = {"normal": normal, "whole": whole}


def _rounded(x) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(NUMPY["bfloat16"]).astype(np.float64)


def _squared(y) -> np.ndarray:
    return _rounded(np.maximum(y, 0) ** 2)


def sums(x, w) -> tuple[np.ndarray, np.ndarray]:
    """Of the products with kept weights only, each element's terms; and how far those of a kernel may be off.
    NaN is where a kept weight meets NaN, where a kept zero meets Inf, and where Inf of both signs meet."""
    x, w, kept = oracle.wide(x), oracle.wide(w), oracle.mask24(w, 0)
    out, error = np.empty((2, len(x), w.shape[1]))
    with np.errstate(invalid="ignore"):
        for t, row in enumerate(x):
            terms = np.where(kept, row[:, None] * w, 0)
            out[t], error[t] = terms.sum(0), ERROR * np.abs(terms).sum(0)
    return out, np.where(np.isfinite(out), error, 0)


def misfits(x, w, got, squared: bool = True) -> str:
    """What is wrong with the product of x and w, rounded and squared if `squared`; nothing if it is right."""
    exact, error = sums(x, w)
    finish = _squared if squared else lambda y: y
    low, high, got = finish(_rounded(exact - error)), finish(_rounded(exact + error)), oracle.wide(got)
    right = np.where(np.isnan(exact), np.isnan(got), (low <= got) & (got <= high))
    places = np.argwhere(~right)
    if not len(places):
        return ""
    rows = ", ".join(f"{n} in row {t}" for t, n in Counter(places[:, 0].tolist()).most_common(SHOWN))
    shown = [tuple(place) for place in places[:SHOWN].tolist()]
    first = [f"{list(at)} is {got[at]}, not {low[at]} to {high[at]}" for at in shown]
    missing, made = (np.isnan(exact) & ~np.isnan(got)).sum(), (np.isnan(got) & ~np.isnan(exact)).sum()
    return (
        f"{len(places)} of {got.size} elements are wrong ({rows}): {missing} NaN are missing, and {made} are "
        f"where none belongs. {'; '.join(first)}"
    )
