"""Neurons are put into an order where their weights are cut over the devices of two processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24

METHOD = s24.methods.Venom(v=16, m=8, clusters=4, routing="learned")


def block():
    return s24.nn.FFN(16, 32, method=METHOD, use_bias=True, axes=("embed", "mlp"), rngs=nnx.Rngs(0))


def arranged(model) -> list:
    """The order, and all variables after it."""
    move = next(iter(s24.nn.arrange(model).values()))
    return [move.order, *jax.tree.leaves(nnx.state(model))]


def one_of_two(address: str, index: int, out: str) -> None:
    """Weights are cut over `tp`, a device in each process."""
    from jax.experimental import multihost_utils

    jax.distributed.initialize(address, 2, index)
    mesh = jax.make_mesh((1, 1, 2), ("dp", "fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    graph, state = nnx.split(block())
    with jax.set_mesh(mesh), nnx.logical_axis_rules(s24.sharding.RULES):
        places = nnx.get_named_sharding(state, mesh)
        state = jax.tree.map(
            lambda x, place: jax.make_array_from_callback(x.shape, place, np.asarray(x).__getitem__),
            state,
            places,
        )
        model = nnx.merge(graph, state)
        assert not model.up.kernel[...].is_fully_addressable
        np.savez(out, *[multihost_utils.process_allgather(x, tiled=True) for x in arranged(model)])


@pytest.mark.slow
def test_two_processes_find_one_order(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "import sys; from tests.nn.test_arrange import one_of_two as run; run({!r}, {}, {!r})"
    options = {"cwd": Path(__file__).parents[2], "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
    outs = [str(tmp_path / f"{index}.npz") for index in range(2)]
    commands = [[sys.executable, "-c", code.format(address, n, out)] for n, out in enumerate(outs)]
    running = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True, **options) for c in commands]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    want = arranged(block())
    assert not np.array_equal(want[0], np.arange(32))
    for out in outs:
        found = np.load(out)
        for name, value in zip(found.files, want, strict=True):
            np.testing.assert_array_equal(found[name], value)
