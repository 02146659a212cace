"""cuSPARSELt 0.10.0 on sm_90 in jnp: its compressed matrix as it was decoded, its products as documented, and
what our CUDA kernels write there, by those of the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse24.ops.order import regroup
from jax_sparse24.ops.packed24 import Packed24


def order(rows: int, groups: int, value_bytes: int) -> np.ndarray:
    """Where in the library's order the nibbles of a matrix stand: (rows padded to 64, groups)."""
    m, q = np.indices((-(-rows // 64) * 64, groups))
    if value_bytes == 2:
        place = m % 64 // 16 * 128 + m % 8 * 16 + m // 8 % 2 + q // 8 * 512 + q % 4 * 4 + q // 4 % 2 * 2
    else:
        place = m % 64 // 16 * 256 + m % 8 * 32 + m // 8 % 2 * 2 + q // 16 * 1024
        place += q // 2 % 4 * 8 + q // 8 % 2 * 4 + q % 2
    return place + m // 64 * 64 * groups


def _nibbles(data):
    return jnp.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)


def _bytes(nibbles):
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def compress(packed: Packed24) -> jax.Array:
    """The compressed matrix."""
    values, size = packed.values, packed.dtype.itemsize
    nibbles = _nibbles(packed.metadata)
    padded = jnp.pad(nibbles, ((0, -len(nibbles) % 64), (0, 0)), constant_values=0xE)
    ordered = padded.ravel()[np.argsort(order(*nibbles.shape, size), axis=None)]
    tail = _bytes(ordered)
    tail = lax.bitcast_convert_type(tail if size == 1 else tail.reshape(-1, size), values.dtype)
    return jnp.concatenate([values, tail.reshape(-1, values.shape[1])])


def decompress(compressed: jax.Array, rows: int) -> Packed24:
    """Values and metadata of a compressed matrix."""
    depth, size = 2 * compressed.shape[1], compressed.dtype.itemsize
    tail = lax.bitcast_convert_type(compressed[rows:].ravel(), jnp.uint8).ravel()
    places = order(rows, depth // 4, size)
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
    if isinstance(out_types, tuple) and len(out_types) == 2 and len(out_types[0].shape) == 2:
        made, metadata = out_types
        if made.shape[0] != metadata.shape[0]:
            if name.endswith("_strided"):
                name, flags = name.removesuffix("_strided"), flags | {"trailing": 1}
                *others, x = args
                args = (*others, regroup(x, "strided"))
            values = jax.ShapeDtypeStruct((metadata.shape[0], made.shape[1]), made.dtype)
            packed = Packed24(*kernels(name, (values, metadata), *args, **flags), -1)
            return compress(packed), packed.metadata
    return kernels(name, out_types, *args, **flags)
