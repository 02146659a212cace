"""Rows of the suite producers: gated activations against XLA's fusion of the same."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse24 as s24
from experiments.benchmarks.settings import Case, kernels
from jax_sparse24.measure import Program, random, same_bits
from jax_sparse24.ops.gated import GATED, gated_backward, gated_backward_pack
from jax_sparse24.ops.mvue import mvue_pack24
from jax_sparse24.ops.reference import gated as reference

KEYS = np.array([[2404, 1847], [2002, 5202]], np.uint32)


class Operation(NamedTuple):
    """`run(gate, up, dz, transposed, implementation)`; operands: how many it reads."""

    name: str
    run: Callable
    operands: int
    axis: int | str = "-"  # of the groups


def _pack(gate, up, dz, transposed, implementation):
    if implementation != "reference":
        options = {"transposed": transposed, "implementation": implementation}
        return gated_backward_pack(gate, up, dz, KEYS, "silu", **options)
    dense = gated_backward(gate, up, dz, "silu", transposed=transposed, implementation="reference")
    return *dense, *_packed(dense)


def _packed(dense):
    return [mvue_pack24(key, d, -2, implementation=kernels()) for key, d in zip(KEYS, dense, strict=True)]


OPERATIONS = (
    Operation("gated", lambda g, u, dz, t, i: s24.gated(g, u, transposed=t, implementation=i), 2),
    Operation(
        "gated backward",
        lambda g, u, dz, t, i: gated_backward(g, u, dz, "silu", transposed=t, implementation=i),
        3,
    ),
    Operation("gated backward + packing", _pack, 3, -2),
)


def there(dtype) -> bool:
    """Whether a kernel for gated activations can run here."""
    try:
        GATED.decide(jnp.dtype(dtype), "ffi")
    except RuntimeError:
        return False
    return True


def programs(case: Case, dtype: str, operation: Operation, transposed: bool, implementation: str):
    """The kernel and what XLA fuses by name, bytes of arguments and results, whether the kernel is right."""
    gate, up, dz = (random((case.T, case.f), dtype, seed) for seed in (1, 2, 3))
    given = [x.T + 0 if transposed else x for x in (gate, up)]
    args = (*given, dz)[: operation.operands]

    def variant(implementation):
        return Program(lambda g, u, dz=None: operation.run(g, u, dz, transposed, implementation), *args)

    found = {"kernel": variant(implementation), "reference": variant("reference")}
    result = jax.tree.leaves(found["kernel"].result)
    count = sum(x.nbytes for x in (*args, *result))
    wide = [x.astype(jnp.float32) for x in (gate, up, dz)]
    if operation.operands == 2:
        right = near(found["kernel"].result, reference.gated(*wide[:2], "silu"))
    else:
        dense, packed = found["kernel"].result[:2], found["kernel"].result[2:]
        right = all(map(near, dense, reference.gated_backward(*wide, "silu")))
        right = right and same_bits(list(packed), _packed(dense)[: len(packed)])
    return found, count, right


def near(result, truth) -> bool:
    """Whether every element is the float32 `truth`, but for one rounding and a few units of float32."""
    allowed = jnp.finfo(result.dtype).eps * jnp.abs(truth) + 2.0**-20 * jnp.max(jnp.abs(truth))
    return bool(jnp.all(jnp.abs(result.astype(jnp.float32) - truth) <= allowed))
