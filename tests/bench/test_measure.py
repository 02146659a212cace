"""Timing of programs, their memory, and the bound of errors. Never how long they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24 import _measure
from jax_sparse24._measure import (
    LEAST_SAMPLES,
    Oracle,
    Program,
    Times,
    interleaved,
    largest_cache,
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


def test_samples_take_turns_and_slow_ones_stop_early():
    order = []

    def function(name, delay):
        def run():
            order.append(name)
            return np.zeros(1) if not delay else jax.block_until_ready(jnp.ones(1) * delay)

        return run

    times = interleaved({"a": function("a", 0), "b": function("b", 1)}, repeats=5, seconds=1e9)
    assert all(isinstance(t, Times) and t.samples == 5 for t in times.values())
    tail = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert len(tail) >= 5, "they alternate"
    times = interleaved({"a": function("a", 0)}, repeats=50, seconds=0)
    assert times["a"].samples == LEAST_SAMPLES


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
