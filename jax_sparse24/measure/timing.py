"""Times competing programs in random order in one process, and checks every timed result."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_sparse24.measure import nvml

LEAST_SAMPLES = 3
# Seconds of a sample at least: a shorter program is called several times, and the sample is the mean.
SHORTEST, SHORTEST_QUEUED = 1e-2, 5e-2
SETTLED = 0.2  # seconds after which clock and power of a GPU are those of the program that runs
HELD = 16 << 30  # bytes of results, at most, that wait on an accelerator to be compared
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Times:
    """The times of one program that took random turns with others.

    samples: seconds per call, one sample per round.
    seed: of the order of the programs, the same for all programs of a measurement.
    joules, watts, mhz: energy per call, power and SM clock of the GPU: medians over the rounds, over the time
        that the program runs before its sample and during it. None where there is no NVML or its counter
        jumped too seldom (see `nvml.Watch` for its resolution)."""

    samples: tuple[float, ...]
    seed: int = 0
    joules: float | None = None
    watts: float | None = None
    mhz: float | None = None

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        """The lower quartile, seconds per call."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """The upper quartile, seconds per call."""
        return self._quartiles()[2]

    def _quartiles(self) -> list[float]:
        return statistics.quantiles(self.samples, n=4, method="inclusive")


class Interrupted(KeyboardInterrupt):
    """A measurement was interrupted, as by Ctrl-C, after the least number of rounds.

    times: the `Times` of each function until then, by name."""

    def __init__(self, times: Mapping[Hashable, Times]):
        super().__init__()
        self.times = times


@dataclasses.dataclass(frozen=True)
class Paired:
    """How many times as long one program takes as another.

    ratio: the median of the ratios within each round.
    low, high: an interval that holds the median ratio with a probability of at least 95 %, whatever the
        distribution of the noise; None for fewer than six rounds, which allow no such interval.
    rounds: number of rounds in which both programs were timed."""

    ratio: float
    low: float | None
    high: float | None
    rounds: int


def paired(times: Mapping[Hashable, Times], base: Hashable, name: Hashable) -> Paired:
    """Compares two programs round by round: time of `base` over time of `name`; above 1, `name` is faster.

    The interval is that of the sign test: of n ratios, the k-th smallest and the k-th largest, with the
    largest k for which both together miss the true median with a probability of at most 5 %.

    times: of both, measured together.
    base, name: keys of `times`.

    Returns: a `Paired` with the median of the ratios and its interval."""
    both = zip(times[base].samples, times[name].samples, strict=False)  # a slow one may have stopped early
    ratios = sorted(a / b for a, b in both)
    n, missed, k = len(ratios), 0.0, 0
    while 2 * (missed := missed + math.comb(n, k) / 2**n) <= 1 - CONFIDENCE:
        k += 1
    low, high = (ratios[k - 1], ratios[n - k]) if k else (None, None)
    return Paired(statistics.median(ratios), low, high, n)


def contradictions(times: Mapping[Hashable, Times], pairs: Iterable[tuple[Hashable, Hashable]]) -> list[str]:
    """Finds pairs of programs whose order cannot be right: one does more and was faster by more than noise.

    times: measured together.
    pairs: (more, less), two programs of which `more` does all that `less` does and something besides, such as
        "2:4 with packing" and "2:4". Pairs that were not both measured are left out.

    Returns: a sentence for every pair for which the interval of `paired(times, more, less)` lies wholly below
        1."""
    out = []
    for more, less in pairs:
        if more in times and less in times:
            found = paired(times, more, less)
            if found.high is not None and found.high < 1:
                out.append(
                    f"{more!r} does more than {less!r} and took {found.ratio:.3f} of its time "
                    f"({found.low:.3f} to {found.high:.3f}, {found.rounds} rounds)"
                )
    return out


def _seconds(function: Callable[[], Any], calls: int = 1) -> float:
    """Seconds per call. A function with a method `wait` is waited for by that."""
    return _run(function, calls)[0]


def _run(function: Callable[[], Any], calls: int, hold: bool = False) -> tuple[float, list]:
    """Seconds per call, and the results: all of them if `hold`, else the last one."""
    wait, results = getattr(function, "wait", jax.block_until_ready), []
    # On a CPU, queued programs may run at the same time; an accelerator runs them one after the other, and
    # waiting for each would measure how long it takes to start one.
    every = jax.default_backend() == "cpu"
    start = time.perf_counter()
    for _ in range(calls):
        out = function()
        if every:
            wait(out)
        if hold:
            results.append(out)
    wait(out)
    return (time.perf_counter() - start) / calls, results or [out]


def _calls(function: Callable[[], Any], shortest: float) -> int:
    """How many calls take `shortest` seconds."""
    _seconds(function)
    calls, took = 1, _seconds(function)
    # The first calls mostly measure how long it takes to start a program on an accelerator.
    while jax.default_backend() != "cpu" and took * calls < shortest / 8 and calls < 4096:
        calls *= 4
        took = _seconds(function, calls)
    return max(1, math.ceil(shortest / max(took, 1e-9)))


def _sample(function: Callable[[], Any], calls: int) -> float:
    """Seconds per call; results are compared by the function's `check`, if it has one, between timed calls.

    On a CPU every timed call follows an untimed one, because whatever ran last, even the comparison, has
    emptied the caches, and threads sleep or share a core. An accelerator runs as many calls in a row as the
    memory has room for their results."""
    check = getattr(function, "check", None)
    if jax.default_backend() == "cpu":
        total = 0.0
        for _ in range(calls):
            _seconds(function)
            took, results = _run(function, 1)
            total += took
            if check is not None:
                check(results)
        return total / calls
    if check is None:
        return _seconds(function, calls)
    total, left = 0.0, calls
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(function.result))
    while left:
        now = max(1, min(left, _room() // max(size, 1)))
        took, results = _run(function, now, hold=True)
        total, left = total + took * now, left - now
        check(results)
    return total / calls


def _room() -> int:
    """Bytes of an accelerator's memory that results may take."""
    found = jax.devices()[0].memory_stats() or {}
    return min(HELD, max(0, found.get("bytes_limit", 4 << 30) - found.get("bytes_in_use", 0)) // 2)


def interleaved(
    functions: Mapping[Hashable, Callable[[], Any]],
    repeats: int = 15,
    seconds: float = 2.0,
    queued: int = 1,
    seed: int | None = None,
) -> dict[Hashable, Times]:
    """Times functions in rounds, each round in a random order of its own.

    Whatever slows the machine for a while slows all of them alike, and none follows the same other one more
    often than by chance. On an accelerator a function runs for 200 ms before each of its samples, so that
    clock and power are its own, and a sample is 50 ms of queued calls. On a CPU a sample is 10 ms of calls,
    with an untimed one before each. Every result of a timed call of a `Program` is compared with its first
    one.

    functions: without arguments, by name.
    repeats: rounds, hence samples per function; fewer, but at least 3, for a function whose samples took
        `seconds` together.
    seconds: see `repeats`.
    queued: least number of calls of a sample on an accelerator.
    seed: of the orders; None for a new one each time, which `Times` holds.

    Returns: the `Times` of each function, by name.
    Raises: `Interrupted`, with the times until then, where all functions have 3 samples."""
    on_cpu = jax.default_backend() == "cpu"
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    shortest = min(SHORTEST if on_cpu else SHORTEST_QUEUED, seconds)
    calls = {name: _calls(function, shortest) for name, function in functions.items()}
    if not on_cpu:
        calls = {name: max(queued, count) for name, count in calls.items()}
        for function in functions.values():  # compiles the comparison, which else delays a sample
            if hasattr(function, "check"):
                function.check(_run(function, 1)[1])
    gauge = None if on_cpu else nvml.gauge()[0]
    names, order = list(functions), np.random.default_rng(seed)
    taken = {name: [] for name in names}  # (seconds, watch) of each sample
    try:
        for _ in range(max(repeats, LEAST_SAMPLES)):
            for name in (names[i] for i in order.permutation(len(names))):
                own, function = taken[name], functions[name]
                if len(own) >= LEAST_SAMPLES and sum(s for s, _ in own) * calls[name] >= seconds:
                    continue
                with nvml.Watch(gauge) as watch:
                    begin = time.perf_counter()
                    while not on_cpu and time.perf_counter() - begin < min(SETTLED, seconds):
                        _seconds(function, calls[name])
                    sample = _sample(function, calls[name])
                own.append((sample, watch))
    except KeyboardInterrupt as interrupt:
        if min(map(len, taken.values())) < LEAST_SAMPLES:
            raise
        raise Interrupted(_all_times(taken, seed)) from interrupt
    return _all_times(taken, seed)


def _all_times(taken: Mapping[Hashable, Sequence[tuple]], seed: int) -> dict[Hashable, Times]:
    return {name: _times(*zip(*own, strict=True), seed) for name, own in taken.items()}


def _times(samples: Sequence[float], watches: Sequence[nvml.Watch], seed: int) -> Times:
    def median(values):
        found = [value for value in values if value is not None]
        return statistics.median(found) if found else None

    watts = [watch.watts for watch in watches]
    joules = [None if w is None else w * s for w, s in zip(watts, samples, strict=True)]
    return Times(tuple(samples), seed, median(joules), median(watts), median(w.mhz for w in watches))
