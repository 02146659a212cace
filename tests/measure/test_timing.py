"""Timing of programs: order, samples, ratios. Never how long they take."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse24.measure import Program, Times, contradictions, interleaved, nvml, paired, same_bits, timing
from jax_sparse24.measure.timing import LEAST_SAMPLES, Interrupted


def recorder(order, name):
    """A function that notes when it is called."""

    def run():
        order.append(name)
        return np.zeros(1)

    return run


def rounds_of(order, count):
    """The names in the order of their samples, by round."""
    tail = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    return [tail[i : i + count] for i in range(0, len(tail), count)]


def test_no_program_follows_the_same_other_one(monkeypatch):
    """With a rotating order each followed the same other one in nearly all of its samples."""
    monkeypatch.setattr(timing, "SHORTEST", 0)
    order, names, repeats = [], "abcdefgh", 60
    interleaved({name: recorder(order, name) for name in names}, repeats, 1e9, seed=1)
    samples = "".join(order[2 * len(names) :])[::2]  # each follows an untimed call of its own
    rounds = [samples[i : i + len(names)] for i in range(0, len(samples), len(names))]
    assert len(rounds) == repeats and all(set(one) == set(names) for one in rounds)
    for name in names:
        before = [one[i - 1] for one in rounds if (i := one.index(name)) > 0]
        most = max(before.count(other) for other in names)
        assert most < 0.4 * len(before), f"{name} follows the same other one {most} of {len(before)} times"


def test_the_order_follows_from_its_seed_which_is_kept(monkeypatch):
    monkeypatch.setattr(timing, "SHORTEST", 0)

    def orders(**options):
        order = []
        times = interleaved({name: recorder(order, name) for name in "abcde"}, 5, 1e9, **options)
        return order, {t.seed for t in times.values()}

    first, (seed,) = orders()
    assert orders(seed=seed) == (first, {seed})
    assert orders()[1] != {seed}, "another order every time"


def test_samples_of_all_rounds_are_kept_and_slow_programs_stop_early():
    functions = {name: lambda: jax.block_until_ready(jnp.ones(1)) for name in "ab"}
    times = interleaved(functions, repeats=5, seconds=1e9)
    for t in times.values():
        assert len(t.samples) == 5 and min(t.samples) <= t.low <= t.median <= t.high <= max(t.samples)
        assert t.joules is t.watts is t.mhz is None, "a CPU tells nothing of it"
    assert len(interleaved(functions, repeats=50, seconds=0)["a"].samples) == LEAST_SAMPLES


@pytest.mark.parametrize("rounds", [LEAST_SAMPLES - 1, LEAST_SAMPLES, LEAST_SAMPLES + 1])
def test_an_interrupted_measurement_gives_what_it_has(rounds, monkeypatch):
    """From the least number of rounds on, of which the quartiles are made."""
    monkeypatch.setattr(timing, "SHORTEST", 0)
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) > 2 + 2 * rounds:  # two untimed ones, and one before each sample
            raise KeyboardInterrupt
        return np.zeros(1)

    functions = {"a": interrupted, "b": lambda: np.zeros(1)}
    with pytest.raises(KeyboardInterrupt) as stop:
        interleaved(functions, 9, 1e9, seed=1)
    assert isinstance(stop.value, Interrupted) == (rounds >= LEAST_SAMPLES)
    if rounds >= LEAST_SAMPLES:
        a, b = (stop.value.times[name] for name in "ab")
        assert len(a.samples) == rounds <= len(b.samples) <= rounds + 1
        assert paired(stop.value.times, "a", "b").rounds == rounds and a.seed == 1


def test_every_timed_result_is_compared_with_the_first():
    """One of many differs in one bit, and the last one does not."""
    counter = iter(range(10**6))

    def unsteady(x):
        odd = jax.pure_callback(lambda: np.int32(next(counter) == 8), jax.ShapeDtypeStruct((), jnp.int32))
        return x.at[2].set(jnp.where(odd == 1, -x[2], x[2]))  # the sign of a zero

    steady, program = Program(lambda x: x + 1, jnp.zeros(4)), Program(unsteady, jnp.zeros(4))
    interleaved({"steady": steady, "unsteady": program}, repeats=6, seconds=1e-6)
    assert same_bits(program(), program.result), "the last call alone shows nothing"
    assert steady.repeats_itself() and not program.repeats_itself()


def test_on_an_accelerator_a_program_runs_by_itself_before_its_sample(monkeypatch):
    """For 200 ms at least by the clock, which here tells 10 ms per call; and results wait in memory until
    they are compared, as many as there is room for."""
    clock, calls, held = [0.0], [], []

    class Counted(Program):
        def __call__(self):
            clock[0] += 0.01
            calls.append(self.name)
            return super().__call__()

        def check(self, results):
            results = list(results)
            held.append(len(results))
            clock[0] += 0.5  # is in no time
            super().check(results)

    programs = {}
    for name in "ab":
        Counted.name = name
        programs[name] = Counted(lambda x: x * 2, jnp.ones(256))
        programs[name].name = name
    del calls[:]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing.nvml, "gauge", lambda: (None, "a test"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "HELD", 4 * programs["a"].result.nbytes)
    times = interleaved(programs, repeats=4, seconds=1e9)
    runs = [
        len(list(run)) for _, run in itertools.groupby(calls[3 * 2 :])
    ]  # first, three untimed ones of each
    assert min(runs) >= 20 + 5, "200 ms and a sample of 50"
    assert set(held) == {4, 1} and sum(held) == 4 * 2 * 5 + 2, "four of five, then the last"
    assert all(s == pytest.approx(0.01) for t in times.values() for s in t.samples)


def test_paired_ratios_have_an_interval_that_follows_from_the_rounds_alone():
    """Both programs slow down together by far more than they differ."""
    drift = np.exp(np.random.default_rng(1).normal(0, 0.3, 21))
    noise = np.exp(np.random.default_rng(2).normal(0, 0.01, (2, 21)))
    times = {"dense": Times(tuple(1.5 * drift * noise[0])), "2:4": Times(tuple(drift * noise[1]))}
    found = paired(times, "dense", "2:4")
    assert found.low < found.ratio < found.high and found.low > 1.48 and found.high < 1.52
    assert found == paired(times, "dense", "2:4")
    ratios = sorted(a / b for a, b in zip(times["dense"].samples, times["2:4"].samples, strict=True))
    assert (found.low, found.high) == (ratios[5], ratios[15]), "of 21, the 6th and the 16th: 97.3 %"
    few = {name: Times(t.samples[:5]) for name, t in times.items()}
    assert paired(few, "dense", "2:4").low is None, "five rounds allow no interval of 95 %"
    six = {name: Times(t.samples[:6]) for name, t in times.items()}
    smallest, *_, largest = sorted(a / b for a, b in zip(*(t.samples for t in six.values()), strict=True))
    found = paired(six, "dense", "2:4")
    assert (found.low, found.high) == (smallest, largest)


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    draw, hits, trials = np.random.default_rng(3), 0, 400
    for _ in range(trials):
        a, b = np.exp(draw.standard_cauchy((2, 15)) * 0.01)
        found = paired({"a": Times(tuple(2 * a)), "b": Times(tuple(b))}, "a", "b")
        hits += found.low <= 2 <= found.high
    assert hits / trials > 0.95 - 3 * (0.05 * 0.95 / trials) ** 0.5


def test_more_work_in_less_time_is_a_contradiction():
    draw = np.random.default_rng(4)

    def near(value):
        return Times(tuple(value * np.exp(draw.normal(0, 0.01, 15))))

    times = {"2:4": near(1.0), "2:4 with packing": near(0.9), "same": near(1.0), "slower": near(1.1)}
    (line,) = contradictions(
        times, [(more, "2:4") for more in ("2:4 with packing", "same", "slower", "none")]
    )
    assert "'2:4 with packing' does more than '2:4'" in line and "15 rounds" in line


def test_joules_are_the_power_of_a_round_times_its_seconds():
    def watch(mhz, *readings):
        found = nvml.Watch(None)
        found.readings = [nvml.Reading(at, mhz, joules) for at, joules in readings]
        return found

    busy = watch(1365.0, (0.0, 10.0), (0.1, 10.0), (0.2, 80.0), (0.3, 80.0), (0.4, 220.0))
    idle = watch(1980.0, (0.0, 10.0), (0.1, 10.0))
    found = timing._times([2e-3, 3e-3], [busy, idle], seed=5)
    assert found.watts == pytest.approx(700) and found.joules == pytest.approx(1.4)
    assert found.mhz == (1365 + 1980) / 2 and found.seed == 5
