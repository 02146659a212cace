"""What surrounds the kernels on CUDA: graphs, threads with streams of their own, memory, gradients."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import mvue_pack24
from tests.ops.data import adversarial, assert_same_bits

ROOT = Path(__file__).parent.parent.parent
# A loop that packs, multiplies and draws in every step: nothing in it may depend on when it is recorded.
PROGRAM = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import jax_sparse24 as s24
from jax_sparse24.ops.mvue import mvue_pack24

def step(x, key):
    y = s24.matmul(s24.squared_relu24(x), x, implementation="ffi")
    z = s24.matmul(mvue_pack24(key, x, 0).T, x, implementation="ffi")
    v = s24.matmul(s24.pack_vnm(x, 64, 8), y, implementation="ffi")
    x = y + z + v
    # No sum: XLA orders its terms as it fuses it.
    return x / jnp.maximum(jnp.max(jnp.abs(x)), 1), (jnp.min(x), jnp.max(x))

x = jnp.asarray(np.random.default_rng(1).normal(size=(256, 256)), jnp.bfloat16)
keys = jax.random.split(jax.random.key(2), 6)
run = jax.jit(lambda x: jax.lax.scan(step, x, keys))
results = [hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for _ in range(3) for leaf in run(x)]
print(*results)
"""
# The same with cuSPARSELt and a bias that is another one in every step.
WITH_BIASES = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import jax_sparse24 as s24

rng = np.random.default_rng(1)
x, w = (jnp.asarray(rng.normal(size=(256, 256)) / 16, jnp.bfloat16) for _ in range(2))
biases = jnp.asarray(rng.normal(size=(6, 2, 256)), jnp.bfloat16)
w = s24.pack24(w, 0)

def step(x, bias):
    y = s24.matmul(x, w, bias=bias[0], activation="relu", implementation="cusparselt")
    return s24.matmul(y, w, bias=bias[1], implementation="cusparselt"), y.astype(jnp.float32).sum()

run = jax.jit(lambda x: jax.lax.scan(step, x, biases))
results = [hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for _ in range(3) for leaf in run(x)]
print(*results)
"""
GRAPHS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "default": "",
    "all": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL,WHILE --xla_gpu_graph_min_graph_size=1",
}
PRODUCERS = {
    "pack24": lambda x: s24.pack24(x, 0),
    "mvue_pack24": lambda x: mvue_pack24(jax.random.key(3), x, 0),
    "pack_vnm": lambda x: s24.pack_vnm(x, 64, 8),
    "vnm product": lambda x: s24.matmul(s24.pack_vnm(x, 64, 8), x, implementation="ffi"),
}


def test_the_same_bits_with_graphs_and_without():
    assert_same_with_graphs(PROGRAM)


def test_the_same_bits_of_biases_with_graphs_and_without(cusparselt):
    assert_same_with_graphs(WITH_BIASES)


def assert_same_with_graphs(program):
    printed = {}
    for name, flags in GRAPHS.items():
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed[name] = done.stdout.split()
        first = printed[name][: len(printed[name]) // 3]
        assert first * 3 == printed[name], "repeated runs differ"
    assert printed["off"] == printed["default"] == printed["all"]


def assert_same_for_ten_thousand_calls(run, given):
    """That `run(*args)` always gives the same bits: for each of `given` in turn, beside another kernel that
    changes when blocks start."""
    want = [jax.jit(run)(*args) for args in given]

    @jax.jit
    def differ(n, *given):
        def again(i, state):
            wrong, noise = state
            for (x, *rest), expected in zip(given, want, strict=True):
                x, noise = jax.lax.optimization_barrier((x, noise))
                wrong += jnp.sum(run(x, *rest) != expected)
                noise = jnp.sin(noise[: 1 << 16] + i)
            return wrong, noise

        return jax.lax.fori_loop(0, n, again, (jnp.int32(0), jnp.zeros(1 << 16)))[0]

    assert int(differ(10_000 // len(given), *given)) == 0


@pytest.mark.parametrize("name", PRODUCERS)
def test_threads(name):
    """Programs that run at once, each compiled for its shape."""
    run = jax.jit(PRODUCERS[name])
    arrays = [jnp.asarray(adversarial((128 * (1 + i % 2), 128), "bfloat16", seed=i)) for i in range(6)]
    arrays = [jnp.nan_to_num(x) if name == "vnm product" else x for x in arrays]
    arrays = [x[:128] if name == "vnm product" else x for x in arrays]
    want = [jax.device_get(run(x)) for x in arrays]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: jax.device_get(run(arrays[i % 6])), range(240)))
    for i, result in enumerate(got):
        assert_same_bits(result, want[i % 6])


@pytest.mark.parametrize("name", PRODUCERS)
def test_ten_thousand_calls_keep_no_memory(name):
    run = jax.jit(PRODUCERS[name])
    x = jnp.asarray(np.random.default_rng(4).normal(size=(128, 128)), jnp.bfloat16)
    jax.block_until_ready(run(x))
    before = jax.devices()[0].memory_stats()["bytes_in_use"]
    for _ in range(10_000):
        out = run(x)
    jax.block_until_ready(out)
    del out
    assert jax.devices()[0].memory_stats()["bytes_in_use"] <= before + (1 << 20)


@pytest.mark.parametrize("method", [s24.methods.FST(), s24.methods.Activation24(), s24.methods.Venom(v=16)])
def test_gradients_are_those_of_the_reference(method):
    """An FFN, forward and backward, by the kernels and by jnp: bfloat16 sums differ in rounding only."""
    rng = np.random.default_rng(5)
    x, w1, w2 = (
        jnp.asarray(rng.normal(size=s) / 16, jnp.bfloat16) for s in ((256, 64), (64, 128), (128, 64))
    )
    state = {role: method.init(w, role) for role, w in (("w1", w1), ("w2", w2))}

    def gradients(implementation):
        def loss(x, w1, w2):
            y = s24.sparse_ffn(
                x, w1, w2, method, state=state, key=jax.random.key(6), implementation=implementation
            )
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, w1, w2)

    for own, reference in zip(gradients("ffi"), gradients("reference"), strict=True):
        own, reference = own.astype(jnp.float32), reference.astype(jnp.float32)
        assert jnp.linalg.norm(own - reference) <= 2**-5 * jnp.linalg.norm(reference)
