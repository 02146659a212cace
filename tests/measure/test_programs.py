"""Programs and the bounds of their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.measure import Oracle, Program, programs, random, same_bits, untuned
from jax_sparse24.measure.programs import largest_cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("K", [4, 256, 4096])
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_bound_passes_honest_products_and_catches_one_misplaced_term(dtype, K, where, monkeypatch):
    """Also in float32 on the device, as large products on accelerators."""
    a, b = (random(shape, dtype, 1) for shape in ((24, K), (K, 20)))
    if where == "device":
        monkeypatch.setattr(Oracle, "LARGE", 0)
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        monkeypatch.setattr(programs, "roundoff", lambda dtype: 2.0**-24)
    good = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    oracle = Oracle(a, b)
    assert isinstance(oracle.exact, np.ndarray if where == "host" else jax.Array)
    assert oracle.excess(good.astype(dtype)) <= 1
    assert oracle.excess(good) <= 1
    shifted = good.at[5, 7].add(0.5 * (a[5, 0] * b[0, 7]).astype(jnp.float32))
    assert oracle.excess(shifted) > 1
    assert oracle.excess(good.at[0, 0].set(jnp.nan)) == np.inf


def test_programs_from_memory(monkeypatch):
    """Copies of arguments and results take turns; the first result stays as it was."""

    def pair(x):
        return x + 1, {"packed": s24.pack24(x, -1)}

    x = random((8, 512), "float32", 1)
    monkeypatch.setattr(programs, "largest_cache", lambda: x.nbytes)
    program, plain = Program(pair, x, from_memory=True), Program(pair, x)

    def places():
        return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(program())]

    first, second, again = places(), places(), places()
    assert first == again and not {*first} & {*second}
    assert program.repeats_itself() and same_bits(program.result, plain.result)
    assert program.bytes == plain.bytes


def test_the_largest_cache():
    assert largest_cache() >= 2**19


def test_products_of_untuned_programs_are_a_librarys(monkeypatch):
    """XLA's own kernels are slow with a tiling that was not tried. XLA knows the flags on a CPU, too."""
    assert untuned() == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = untuned()
    assert options == {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile(compiler_options=options)
