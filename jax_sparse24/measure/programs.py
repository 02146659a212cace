"""Times of programs that compete, in random order in one process, each result checked in the same run."""

import dataclasses
import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24 import _nvml
from jax_sparse24.patterns import FLOAT8

LEAST_SAMPLES = 3
MOST_TURNS = 64  # smaller arrays stay in the caches
# Seconds: a sample of a shorter program is the mean of several calls.
SHORTEST, SHORTEST_QUEUED = 1e-2, 5e-2
SETTLED = 0.2  # seconds: clock and power of a GPU follow what ran in the last tenths of a second
HELD = 16 << 30  # bytes of results, at most, that wait on an accelerator to be compared
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Times:
    """What one program took, in random turn with others.

    samples: seconds per call, one sample per round. seed: of the order, the same for all programs of a
    measurement. joules: energy per call of the GPU; watts: its power; mhz: its SM clock. These are medians
    over the rounds, of the program's run before its sample and of the sample; None where there is no NVML
    or its counter moved too seldom (see `_nvml.Watch` for its resolution)."""

    samples: tuple[float, ...]
    seed: int = 0
    joules: float | None = None
    watts: float | None = None
    mhz: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        """The lower quartile."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """The upper quartile."""
        return self._quartiles()[2]

    def _quartiles(self) -> list[float]:
        return statistics.quantiles(self.samples, n=4, method="inclusive")


@dataclasses.dataclass(frozen=True)
class Paired:
    """How many times as long one program takes as another: the median of the ratios within each round.

    low, high: an interval that holds the median ratio with a probability of 95 % at least, whatever the
    distribution of the noise; None for fewer than six rounds, which allow no such interval."""

    ratio: float
    low: float | None
    high: float | None
    rounds: int


def paired(times: Mapping[Hashable, Times], base: Hashable, name: Hashable) -> Paired:
    """Time of `base` over time of `name`, round by round: above 1, `name` is faster.

    The interval is that of the sign test: of n ratios, the k-th smallest and the k-th largest, with the
    largest k for which both together miss the true median with a probability of 5 % at most."""
    both = zip(times[base].samples, times[name].samples, strict=False)  # a slow one may have stopped early
    ratios = sorted(a / b for a, b in both)
    n, missed, k = len(ratios), 0.0, 0
    while 2 * (missed := missed + math.comb(n, k) / 2**n) <= 1 - CONFIDENCE:
        k += 1
    low, high = (ratios[k - 1], ratios[n - k]) if k else (None, None)
    return Paired(statistics.median(ratios), low, high, n)


def contradictions(times: Mapping[Hashable, Times], pairs: Iterable[tuple[Hashable, Hashable]]) -> list[str]:
    """A sentence for every pair whose order cannot be.

    pairs: (more, less), two programs of `times` of which `more` does all that `less` does and something
    besides, such as "2:4 with packing" and "2:4". The sentence says that `more` was faster by more than
    noise: the interval of `paired(times, more, less)` is wholly below 1. Pairs that were not both measured
    are left out."""
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


def untuned() -> dict:
    """Options for programs whose time does not matter: on a GPU XLA otherwise tries dozens of kernels per
    product, a second each."""
    return {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}


class Program:
    """A function compiled for its arguments, with its first result.

    timed: whether its speed matters. options: XLA's, for compiling it where it is timed. from_memory: as
    where a larger program uses it on a CPU. Copies of the arguments take turns, each with a result of its
    own, which is written over: no call finds in a cache what others have left there, and none takes memory
    from the system, which zeroes every page that malloc gave back."""

    def __init__(
        self,
        function: Callable,
        *args,
        timed: bool = True,
        from_memory: bool = False,
        options: Mapping[str, Any] | None = None,
    ):
        self._turns = deque()
        self._steady = np.True_
        if not from_memory:
            options = (options or {}) if timed else untuned()
            self._args = args
            self._compiled = jax.jit(function).lower(*args).compile(compiler_options=options)
            self.result = jax.block_until_ready(self())
            return
        over = jax.jit(lambda last, *args: function(*args), donate_argnums=0, keep_unused=True)
        last = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))
        self._compiled = over.lower(last, *args).compile()
        size = sum(x.nbytes for x in jax.tree.leaves((last, args)))
        for _ in range(min(MOST_TURNS, 1 + math.ceil(2 * largest_cache() / max(size, 1)))):
            self._turns.append([*jax.block_until_ready(jax.tree.map(jnp.copy, (last, *args)))])
        self.result = jax.block_until_ready(jax.tree.map(jnp.copy, self()))

    def __call__(self):
        if not self._turns:
            return self._compiled(*self._args)
        turn = self._turns[0]
        self._turns.rotate(-1)
        turn[0] = self._compiled(*turn)
        return turn[0]

    @property
    def bytes(self) -> dict[str, int]:
        """Arguments, results and temporaries as XLA plans them (the kernels' own scratch is not in it)."""
        plan = self._compiled.memory_analysis()
        if plan is None:
            return {}
        names = ("argument", "output", "temp")
        found = {name: int(getattr(plan, f"{name}_size_in_bytes")) for name in names}
        found["argument"] -= int(plan.alias_size_in_bytes)  # the last result, counted as output
        return found

    def check(self, results: Iterable) -> None:
        """Compares results of this program with its first one, bit for bit; `repeats_itself` tells."""
        for result in results:
            if jax.default_backend() == "cpu":
                self._steady = self._steady and _same_bytes(result, self.result)
            else:  # where they are: fetching what a GPU made takes longer than making it
                self._steady = _still(self._steady, result, self.result)
        jax.block_until_ready(self._steady)

    def repeats_itself(self) -> bool:
        """Whether another call, and all that were timed, gave the first result, bit for bit."""
        self.check([self()])
        return bool(self._steady)


@functools.cache
def largest_cache() -> int:
    """Bytes of the processor's largest cache, as Linux tells; elsewhere what servers have for a few cores."""
    sizes = [
        path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(size[:-1]) << 10 for size in sizes if size[-1:] == "K"), default=32 << 20)


def same_bits(a, b) -> bool:
    """Whether two trees of arrays have the same structure, dtypes, shapes and bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    if any((jnp.result_type(x), jnp.shape(x)) != (jnp.result_type(y), jnp.shape(y)) for x, y in pairs):
        return False
    return bool(_still(True, a, b))


@jax.jit
def _still(steady, a, b):
    """`steady`, and whether two trees of the same structure have the same bits."""

    def equal(x, y):
        if x.dtype != jnp.bool_:
            integers = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
            x, y = (jax.lax.bitcast_convert_type(a, integers) for a in (x, y))
        return jnp.array_equal(x, y)

    return jnp.stack([jnp.asarray(steady), *jax.tree.leaves(jax.tree.map(equal, a, b))]).all()


def _same_bytes(a, b) -> bool:
    """The same on a host, without what it takes to start a program of XLA."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    flat = [[np.asarray(x).reshape(-1).view(np.uint8) for x in pair] for pair in pairs]
    words = [[x.view(np.uint64) if x.size % 8 == 0 else x for x in pair] for pair in flat]
    return all(np.array_equal(x, y) for x, y in words)


def _seconds(function: Callable[[], Any], calls: int = 1) -> float:
    """Seconds per call. A function with a method `wait` is waited for by it."""
    return _run(function, calls)[0]


def _run(function: Callable[[], Any], calls: int, hold: bool = False) -> tuple[float, list]:
    """Seconds per call, and the results if they are to be held, else the last one."""
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
    """Seconds per call. Results are compared by the function's `check`, if it has one, out of the time.

    On a CPU every timed call follows an untimed one: what ran last, be it the comparison, has emptied the
    caches, and threads sleep or share a core. An accelerator runs as many calls in a row as the memory has
    room for their results."""
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
    """Times of functions without arguments, sampled in rounds, each round in a random order of its own.

    Whatever slows the machine for a while meets all of them alike, and none follows the same other one more
    often than chance has it. On an accelerator a function runs for 200 ms before each of its samples, so that
    clock and power are its own, and a sample is 50 ms of queued calls; on a CPU a sample is 10 ms of calls,
    an untimed one before each. Every result of a timed call of a `Program` is compared with its first one.

    repeats: rounds, hence samples per function; fewer, but not fewer than 3, for a function whose samples
    took `seconds` together. queued: calls of a sample, at least, on an accelerator. seed: of the orders; by
    default another one each time, which `Times` holds."""
    on_cpu = jax.default_backend() == "cpu"
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    shortest = min(SHORTEST if on_cpu else SHORTEST_QUEUED, seconds)
    calls = {name: _calls(function, shortest) for name, function in functions.items()}
    if not on_cpu:
        calls = {name: max(queued, count) for name, count in calls.items()}
        for function in functions.values():  # compiles the comparison, which else delays a sample
            if hasattr(function, "check"):
                function.check(_run(function, 1)[1])
    gauge = None if on_cpu else _nvml.gauge()[0]
    names, order = list(functions), np.random.default_rng(seed)
    samples, watches = ({name: [] for name in names} for _ in range(2))
    for _ in range(max(repeats, LEAST_SAMPLES)):
        for name in (names[i] for i in order.permutation(len(names))):
            taken = samples[name]
            if len(taken) >= LEAST_SAMPLES and sum(taken) * calls[name] >= seconds:
                continue
            with _nvml.Watch(gauge) as watch:
                begin = time.perf_counter()
                while not on_cpu and time.perf_counter() - begin < min(SETTLED, seconds):
                    _seconds(functions[name], calls[name])
                taken.append(_sample(functions[name], calls[name]))
            watches[name].append(watch)
    return {name: _times(samples[name], watches[name], seed) for name in names}


def _times(samples: Sequence[float], watches: Sequence[_nvml.Watch], seed: int) -> Times:
    def median(values):
        found = [value for value in values if value is not None]
        return statistics.median(found) if found else None

    watts = [watch.watts for watch in watches]
    joules = [None if w is None else w * s for w, s in zip(watts, samples, strict=True)]
    return Times(tuple(samples), seed, median(joules), median(watts), median(w.mhz for w in watches))


class Oracle:
    """What a product of two given matrices must be: computed in float64, with a bound for every element.

    The bound of element (i, j) is `8 u ‖a_i‖ ‖b_j‖`, u the roundoff of the products and sums, plus one
    rounding to the result's dtype. On random data a sum of K products of rms size s is about `sqrt(K) s`, so
    its rounding errors add up to at most about `u K s = u ‖a_i‖ ‖b_j‖`; a single misplaced term, of size s,
    exceeds the bound for every K below a million.

    Of a product of more than LARGE multiplications only rows are computed that lie evenly all over the
    result, so that no tile of a kernel is left out; on an accelerator these in float32, in which a sum of K
    terms errs by an eighth of the bound at most (a host takes minutes)."""

    LARGE, ROWS = 2**36, 512

    def __init__(self, a, b, unit: float | None = None):
        """unit: roundoff of the sums, where it is not what `roundoff` says."""
        self.unit = unit
        self.rows = slice(None)
        large = a.size * b.shape[1] > self.LARGE
        if large:
            step = max(1, a.shape[0] // self.ROWS)
            self.rows = np.arange(0, a.shape[0], step) + np.random.default_rng(0).integers(0, step)
            self.rows = self.rows[self.rows < a.shape[0]]
        if large and jax.default_backend() != "cpu":
            wide = [jnp.asarray(x).astype(jnp.float32) for x in (a[self.rows], b)]
            self.exact, self.scale = _in_float32()(*wide)
        else:
            a, b = (np.asarray(x).astype(np.float64) for x in (a[self.rows], b))
            self.exact = a @ b
            self.scale = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)[None, :]

    def excess(self, result) -> float:
        """Largest error over its bound: a result is wrong above 1."""
        rounding = float(jnp.finfo(result.dtype).eps) / 2
        unit = roundoff(result.dtype) if self.unit is None else self.unit
        if isinstance(self.exact, np.ndarray):
            xp, found = np, np.asarray(result[self.rows]).astype(np.float64)
        else:  # a host would take seconds
            xp, found = jnp, result[self.rows].astype(jnp.float32)
        bound = 8 * unit * self.scale + 1.01 * rounding * xp.abs(self.exact)
        with np.errstate(invalid="ignore"):
            error = xp.abs(found - self.exact)
        worst = xp.max(error / xp.maximum(bound, xp.finfo(bound.dtype).tiny), initial=0.0)
        return float(worst) if xp.isfinite(worst) else math.inf


@functools.cache
def _in_float32() -> Callable:
    """Compiled once per shape: a product and the scale of its elements' bounds."""

    def product(a, b):
        scale = jnp.linalg.norm(a, axis=1)[:, None] * jnp.linalg.norm(b, axis=0)[None, :]
        return jnp.matmul(a, b, precision="highest"), scale

    return jax.jit(product, compiler_options=untuned())


def roundoff(dtype) -> float:
    """Unit roundoff of products and sums of operands of a dtype: XLA multiplies float32 as TF32 on a GPU, as
    bfloat16 on a TPU; Hopper's FP8 tensor cores keep about 14 bits of a sum (2412.19437, section 3.3.2)."""
    if jnp.dtype(dtype) == FLOAT8:
        return 2.0**-13 if jax.default_backend() == "gpu" else 2.0**-24
    if jnp.dtype(dtype) == jnp.float32:
        return {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(jax.default_backend(), 2.0**-24)
    return 2.0**-24


def random(shape, dtype, seed: int) -> jax.Array:
    """Standard normal numbers, other ones on accelerators, which draw them faster than a host."""
    if jax.default_backend() != "cpu":
        return jax.random.normal(jax.random.key(seed), shape).astype(dtype)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def random_words(count: int, seed: int) -> jax.Array:
    """Random uint32 (count,), drawn where `random` draws."""
    if jax.default_backend() != "cpu":
        return jax.random.bits(jax.random.key(seed), (count,), jnp.uint32)
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, count, np.uint32))
