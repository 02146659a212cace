"""Timing of programs, their memory, and the bound of errors. Never how long they take."""

import itertools
import subprocess
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24 import _measure, _nvml
from jax_sparse24._measure import (
    LEAST_SAMPLES,
    Oracle,
    Program,
    Times,
    contradictions,
    interleaved,
    largest_cache,
    paired,
    random,
    same_bits,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("K", [4, 256, 4096])
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_bound_passes_honest_products_and_catches_one_misplaced_term(dtype, K, where, monkeypatch):
    """Also in float32 on the device, as large products on accelerators."""
    a, b = (random(shape, dtype, 1) for shape in ((24, K), (K, 20)))
    if where == "device":
        monkeypatch.setattr(Oracle, "LARGE", 0)
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        monkeypatch.setattr(_measure, "roundoff", lambda dtype: 2.0**-24)
    good = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    oracle = Oracle(a, b)
    assert isinstance(oracle.exact, np.ndarray if where == "host" else jax.Array)
    assert oracle.excess(good.astype(dtype)) <= 1
    assert oracle.excess(good) <= 1
    shifted = good.at[5, 7].add(0.5 * (a[5, 0] * b[0, 7]).astype(jnp.float32))
    assert oracle.excess(shifted) > 1
    assert oracle.excess(good.at[0, 0].set(jnp.nan)) == np.inf


def recorder(order, name, delay=0.0):
    """A function that notes when it is called; it takes `delay` seconds of a mocked clock."""

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
    monkeypatch.setattr(_measure, "SHORTEST", 0)
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
    monkeypatch.setattr(_measure, "SHORTEST", 0)

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
    monkeypatch.setattr(_measure._nvml, "gauge", lambda: (None, "a test"))
    monkeypatch.setattr(_measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(_measure, "HELD", 4 * programs["a"].result.nbytes)
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


def test_programs_from_memory(monkeypatch):
    """Copies of arguments and results take turns; the first result stays as it was."""

    def pair(x):
        return x + 1, {"packed": s24.pack24(x, -1)}

    x = random((8, 512), "float32", 1)
    monkeypatch.setattr(_measure, "largest_cache", lambda: x.nbytes)
    program, plain = Program(pair, x, from_memory=True), Program(pair, x)

    def places():
        return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(program())]

    first, second, again = places(), places(), places()
    assert first == again and not {*first} & {*second}
    assert program.repeats_itself() and same_bits(program.result, plain.result)
    assert program.bytes == plain.bytes


def test_the_largest_cache():
    assert largest_cache() >= 2**19


FAKE_LIBRARIES = """
#include <string.h>
extern "C" {
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetPCIBusId(char* text, int size, int device) {
  strncpy(text, device == 41 ? "0000:0F:00.0" : "?", size);
  return 0;
}
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  *handle = (void*)0xfedcba9876543210;
  return strcmp(id, "0000:0F:00.0");
}
int nvmlDeviceGetClockInfo(void* handle, int type, unsigned* mhz) {
  *mhz = type == 1 ? 1365 : 0;
  return handle != (void*)0xfedcba9876543210;
}
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* mj) {
  static unsigned long long calls = 0;
  *mj = 5000000000000 + calls++ / 4 * 14000;
  return 0;
}
}
"""


def test_clock_and_energy_of_the_gpu_that_jax_computes_on(tmp_path, monkeypatch):
    """Libraries with the driver's names and signatures: device 1 of CUDA by its bus id, a counter that
    stands still between jumps."""
    source, library = tmp_path / "fake.cc", tmp_path / "fake.so"
    source.write_text(FAKE_LIBRARIES)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(_nvml, "NVML", library)
    monkeypatch.setattr(_nvml, "CUDA", library)
    assert _nvml.bus_id(1) == b"0000:0F:00.0"
    gauge = _nvml.Gauge(_nvml.bus_id(1))
    assert gauge.read()[1:] == (1365.0, 5e9)
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByPciBusId_v2"):
        _nvml.Gauge(_nvml.bus_id(0))
    with _nvml.Watch(gauge) as watch:
        time.sleep(0.2)
    readings = watch.readings
    assert len(readings) > 12 and watch.mhz == 1365
    jumps = [b for a, b in itertools.pairwise(readings) if a.joules != b.joules]
    expected = (jumps[-1].joules - jumps[0].joules) / (jumps[-1].at - jumps[0].at)
    assert watch.watts == pytest.approx(expected) and expected > 100
    watch.readings = readings[:3]
    assert watch.watts is None, "one jump at most tells no power"


def test_joules_are_the_power_of_a_round_times_its_seconds():
    def watch(mhz, *readings):
        found = _nvml.Watch(None)
        found.readings = [_nvml.Reading(at, mhz, joules) for at, joules in readings]
        return found

    busy = watch(1365.0, (0.0, 10.0), (0.1, 10.0), (0.2, 80.0), (0.3, 80.0), (0.4, 220.0))
    idle = watch(1980.0, (0.0, 10.0), (0.1, 10.0))
    found = _measure._times([2e-3, 3e-3], [busy, idle], seed=5)
    assert found.watts == pytest.approx(700) and found.joules == pytest.approx(1.4)
    assert found.mhz == (1365 + 1980) / 2 and found.seed == 5


def test_there_is_no_gauge_without_an_nvidia_gpu(monkeypatch):
    _nvml.gauge.cache_clear()
    found, why = _nvml.gauge()
    assert found is None and "cpu" in why
    _nvml.gauge.cache_clear()
    device = types.SimpleNamespace(platform="gpu", local_hardware_id=0)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(_nvml, "CUDA", "no-such-library.so")
    found, why = _nvml.gauge()
    assert found is None and "no-such-library.so" in why
    _nvml.gauge.cache_clear()
