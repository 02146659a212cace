"""Measured tables for tests: folders for them, entries, and what a product does with them."""

import json

import jax
import jax.numpy as jnp

import jax_sparse24 as s24
from jax_sparse24.dispatch import table as tables
from jax_sparse24.dispatch import table_file
from jax_sparse24.dispatch.hardware import hardware
from jax_sparse24.ops.matmul import contract

KINDS = {"fwd": (-1, -2), "dgrad": (-1, -1), "wgrad": (-2, -2)}


def entry(kind="fwd", side="right", shape=(64, 32, 48), masked=100.0, packed=50.0, status="ok", **more):
    return {
        "product": kind,
        "sparse": side,
        "pattern": "2:4",
        "dtype": "float32",
        "shape": list(shape),
        "implementation": "ffi",
        "status": status,
        "dense_us": 90.0,
        "masked_us": masked,
        "packed_us": packed,
        "producers_us": {"top-2 of 4": 5.0, "stored mask": 6.0, "MVUE, exact": 7.0},
        **more,
    }


def table(*entries, **more):
    here = hardware()
    head = {
        "format": table_file.FORMAT,
        "hardware": "a test",
        "isa": here.isa,
        "versions": tables.versions(),
    }
    return head | {"products": list(entries)} | more


def store(folder, content, name=None):
    (folder / f"{name or hardware().name}.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )


def runs_packed(kind="fwd", side="right", shape=(64, 32, 48), dtype=jnp.float32, implementation=None) -> bool:
    """Whether the traced product calls the packed kernel."""
    (i, j), (M, K, N) = KINDS[kind], shape
    a = jnp.ones((M, K) if i == -1 else (K, M), dtype)
    b = jnp.ones((K, N) if j == -2 else (N, K), dtype)

    def product(a, b):
        a, b = (s24.pack24(a, i), b) if side == "left" else (a, s24.pack24(b, j))
        return contract(a, b, i, j, implementation)

    return "s24_matmul" in str(jax.make_jaxpr(product)(a, b))
