"""cuSPARSELt 0.10.0 in jnp: its compressed matrix as it was decoded, for each generation of GPUs, its
products as documented, and what our CUDA kernels write there, by those of the CPU."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse24.dispatch import cusparselt
from jax_sparse24.ops.order import regroup
from jax_sparse24.ops.packed24 import Packed24


@dataclasses.dataclass(frozen=True)
class Order:
    """How the library has metadata.

    rows: to a multiple of how many rows they are padded.
    padding: the nibble of rows that there are not.
    place: (m, q, groups, bytes of a value) -> where the nibble of row m and group q stands."""

    rows: int
    padding: int
    place: Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]

    def rows_behind(self, rows: int) -> int:
        """How many rows of 16-bit values the metadata take behind those of a matrix."""
        return -(-rows // self.rows) * self.rows // 8

    def places(self, rows: int, groups: int, value_bytes: int) -> np.ndarray:
        """Of all nibbles of a matrix, (padded rows, groups)."""
        m, q = np.indices((-(-rows // self.rows) * self.rows, groups))
        return self.place(m, q, groups, value_bytes)


def _sm90(m, q, groups, value_bytes):
    if value_bytes == 2:
        place = m % 64 // 16 * 128 + m % 8 * 16 + m // 8 % 2 + q // 8 * 512 + q % 4 * 4 + q // 4 % 2 * 2
    else:
        place = m % 64 // 16 * 256 + m % 8 * 32 + m // 8 % 2 * 2 + q // 16 * 1024
        place += q // 2 % 4 * 8 + q // 8 % 2 * 4 + q % 2
    return place + m // 64 * 64 * groups


# By the names of layouts in jax_sparse24/dispatch/generations.py.
ORDERS = {"Sm90": Order(64, 0xE, _sm90)}
# Compute capability -> whether the kernels run there, and the layout of cuSPARSELt that they write.
DEVICES: dict[str, tuple[bool, str | None]] = {
    **dict.fromkeys(("7.0", "7.5"), (False, None)),
    **dict.fromkeys(("8.0", "8.6", "8.7", "8.9"), (True, None)),
    "9.0": (True, "Sm90"),
    **dict.fromkeys(("10.0", "10.3", "11.0", "12.0", "12.1"), (True, None)),
    "13.0": (False, None),
}


def order() -> Order:
    """That of the layout in which operations compress here."""
    return ORDERS[cusparselt.layout().name]


def _nibbles(data):
    return jnp.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)


def _bytes(nibbles):
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def compress(packed: Packed24) -> jax.Array:
    """The compressed matrix."""
    values, size = packed.values, packed.dtype.itemsize
    nibbles = _nibbles(packed.metadata)
    padding = ((0, -len(nibbles) % order().rows), (0, 0))
    padded = jnp.pad(nibbles, padding, constant_values=order().padding)
    ordered = padded.ravel()[np.argsort(order().places(*nibbles.shape, size), axis=None)]
    tail = _bytes(ordered)
    tail = lax.bitcast_convert_type(tail if size == 1 else tail.reshape(-1, size), values.dtype)
    return jnp.concatenate([values, tail.reshape(-1, values.shape[1])])


def decompress(compressed: jax.Array, rows: int) -> Packed24:
    """Values and metadata of a compressed matrix."""
    depth, size = 2 * compressed.shape[1], compressed.dtype.itemsize
    tail = lax.bitcast_convert_type(compressed[rows:].ravel(), jnp.uint8).ravel()
    places = order().places(rows, depth // 4, size)
    assert tail.size * 2 == places.size
    return Packed24(compressed[:rows], _bytes(_nibbles(tail)[places])[:rows], -1)


def multiply(packed: Packed24, dense, *bias, dense_k_last, out_packed_last, activation, **_):
    """Sums in float32."""
    a = packed.todense(implementation="reference").astype(jnp.float32)
    b = (dense.T if dense_k_last else dense).astype(jnp.float32)
    out = jnp.matmul(a, b, precision="highest")
    out = out + bias[0].astype(jnp.float32)[:, None] if bias else out
    out = jax.nn.relu(out) if activation else out
    return out.T if out_packed_last else out


def kernel_call(kernels, name, out_types, *args, **flags):
    """A custom call whose operands or results may be compressed matrices. kernels: what makes the others."""
    if name == "s24_cusparselt_compress":
        return compress(Packed24(*args, -1))
    if name == "s24_unpack":
        values, metadata = args
        return kernels(name, out_types, values[: metadata.shape[0]], metadata, **flags)
    if isinstance(out_types, tuple) and len(out_types) in (2, 4) and len(out_types[0].shape) == 2:
        pairs = list(zip(out_types[::2], out_types[1::2], strict=True))
        if pairs[0][0].shape[0] != pairs[0][1].shape[0]:
            if name.endswith("_strided"):
                name, flags = name.removesuffix("_strided"), flags | {"trailing": 1}
                *others, x = args
                args = (*others, regroup(x, "strided"))
            plain = []
            for made, metadata in pairs:
                plain += [jax.ShapeDtypeStruct((metadata.shape[0], made.shape[1]), made.dtype), metadata]
            values, metadata = (kernels(name, tuple(plain), *args, **flags)[n::2] for n in range(2))
            packed = [Packed24(*pair, -1) for pair in zip(values, metadata, strict=True)]
            return tuple(part for p in packed for part in (compress(p), p.metadata))
    return kernels(name, out_types, *args, **flags)
