"""The choice of a rate of masked decay by flip rates (2404.01847, section 4)."""

import dataclasses
from collections.abc import Callable, Sequence

FEASIBLE = (0.60, 0.95)
CANDIDATES = (6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3)


@dataclasses.dataclass(frozen=True)
class DecaySearch:
    """The result of `search_decay`.

    decay: the rate that was chosen; None if no candidate is feasible.
    reason: why, in words.
    mu: flip rate of every candidate over that of the dense training; None for one that diverged.
    dense, sparse: the flip rates of the dense training and of every candidate, in [0, 1]."""

    decay: float | None
    reason: str
    mu: dict[float, float | None]
    dense: Sequence[float]
    sparse: dict[float, Sequence[float] | None]


def search_decay(
    flip_rates: Callable[[float | None], Sequence[float] | None],
    candidates: Sequence[float] = CANDIDATES,
    feasible: tuple[float, float] = FEASIBLE,
) -> DecaySearch:
    """Finds the rate of masked decay at which masks change a little less than those of a dense training.

    mu is the flip rate of a sparse training over that of the dense one, as the ratio of sums over the second
    half of the steps, where the learning rate is no longer tiny. A rate is feasible if its mu lies in
    `feasible`: at 1 and above masks flip too much, far below they freeze too early. Of several feasible rates
    the one whose mu is nearest the middle is taken; the paper leaves this open.

    flip_rates: a function of the rate (None: dense) that trains through the learning-rate warm-up, always
        from the same parameters on the same batches, and returns the flip rates (see `s24.flip_rate`) at the
        same steps; None if the loss diverged.
    candidates: rates to try, none negative.
    feasible: lowest and highest mu.

    Returns: a `DecaySearch`.
    Raises: ValueError without candidates, for a negative one, or if the dense training diverged.
    Source: 2404.01847, section 4."""
    if not candidates or min(candidates) < 0:
        raise ValueError(
            f"search_decay: candidates={tuple(candidates)!r} must be one or more rates, none negative."
        )
    dense = flip_rates(None)
    if dense is None:
        raise ValueError("search_decay: the dense run diverged; lower its learning rate.")
    sparse = {decay: flip_rates(decay) for decay in sorted(set(candidates))}
    late = slice(len(dense) // 2, None)
    total = float(sum(dense[late]))
    if not total > 0:
        reason = "the masks of the dense run did not move: train for more steps"
        return DecaySearch(None, reason, {}, dense, sparse)
    mu = {d: None if rates is None else float(sum(rates[late])) / total for d, rates in sparse.items()}
    best = _nearest_the_middle(mu, feasible)
    low, high = feasible
    if best is None:
        reason = f"no candidate has mu in {low} to {high}; {_advice(mu, feasible)}"
    else:
        reason = f"mu = {mu[best]:.3f} lies in {low} to {high}"
    return DecaySearch(best, reason, mu, dense, sparse)


def _nearest_the_middle(mu, feasible):
    low, high = feasible
    inside = [d for d, m in mu.items() if m is not None and low <= m <= high]
    return min(inside, key=lambda d: abs(mu[d] - (low + high) / 2), default=None)


def _advice(mu, feasible) -> str:
    low, high = feasible
    loose = [d for d, m in mu.items() if m is not None and m > high]
    frozen = [d for d, m in mu.items() if m is not None and m < low]
    if loose and frozen:
        return f"give candidates between {max(loose):g} and {min(frozen):g}"
    if loose:
        return f"masks flip too much with all: give candidates above {max(loose):g}"
    if frozen:
        return f"masks freeze with all: give candidates below {min(frozen):g}"
    return "all candidates diverged: lower the learning rate"
