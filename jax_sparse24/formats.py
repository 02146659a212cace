"""Compressed arrays: pytrees of values and metadata that stand for a sparse array."""

import dataclasses

import jax


class Compressed:
    """Base of what stands for an array and is none: NumPy would wrap it as an object, or unpack it where
    nobody asked to spend the memory that it saves, so it refuses."""

    def __array__(self, *_, **__):
        name = type(self).__name__
        raise TypeError(f"{name}: it stands for an array and is none; call todense() to unpack it.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed24(Compressed):
    """A 2:4-sparse array, compressed along one axis.

    The compressed axis is stored last, whatever its place in the array it stands for: matrix products read it
    as the contraction axis, and `.T` moves no data. With `lead` the array's dimensions without that axis, and
    `K` its size:

    values:    `lead + (K / 2,)`, the kept elements, in order; float32, bfloat16, float16, float8_e4m3fn
               (float64 by the reference).
    metadata:  `lead + (ceil(K / 8),)` uint8; byte `b` holds the nibbles of groups `2b` (low) and `2b + 1`
               (high). A nibble is `i0 | i1 << 2`, the two kept positions `i0 < i1` of a group of four, as in
               `mma.sp`; a missing last group is 4.
    axis:      the compressed axis, counted from the end (static), so leading batch dimensions may come and
               go under `vmap`.
    """

    values: jax.Array
    metadata: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def K(self) -> int:
        """Uncompressed size of the compressed axis."""
        return 2 * self.values.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        lead = self.values.shape[:-1]
        place = len(lead) + 1 + self.axis
        return (*lead[:place], self.K, *lead[place:])

    @property
    def pattern(self) -> str:
        return "2:4"

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and metadata: 9/16 of a 16-bit array, 17/32 of a float32 one."""
        return self.values.nbytes + self.metadata.nbytes

    @property
    def T(self) -> "Packed24":
        """The transpose of the last two axes; no data moves."""
        if self.ndim < 2 or self.axis not in (-1, -2):
            raise ValueError(
                f"Packed24.T: the compressed axis must be one of the last two, got axis {self.axis} "
                f"of shape {self.shape}."
            )
        return Packed24(self.values, self.metadata, -3 - self.axis)

    def todense(self, *, implementation: str | None = None) -> jax.Array:
        """The array it stands for, with +0 where nothing is kept. Differentiable in `values`."""
        # The one import that points up: a method must know its operation.
        from jax_sparse24.ops.pack import unpack24

        return unpack24(self, implementation=implementation)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressed24(Compressed):
    """A 2:4-sparse matrix of 16-bit floats as cuSPARSELt reads it on sm_90. Internal: what a kernel packs for
    one of its products is written here at once.

    compressed: (R + 8 ceil(R / 64), K / 2), R rows of values as in Packed24 and then their metadata in the
                library's order, K a multiple of 32. No two bytes of that look like an Inf or a NaN.
    metadata:   (R, K / 8) uint8 and
    axis:       (static), as in Packed24. Together 10/16 of the array, where Packed24 has 9/16."""

    compressed: jax.Array
    metadata: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def values(self) -> jax.Array:
        return self.compressed[: self.metadata.shape[0]]

    @property
    def plain(self) -> Packed24:
        """The same for other products; the values may be copied."""
        return Packed24(self.values, self.metadata, self.axis)

    @property
    def K(self) -> int:
        return 2 * self.compressed.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.metadata.shape[0]
        return (rows, self.K) if self.axis == -1 else (self.K, rows)

    @property
    def pattern(self) -> str:
        return "2:4"

    @property
    def dtype(self):
        return self.compressed.dtype

    def with_values(self, values: jax.Array) -> "Compressed24":
        """Others at the same positions."""
        behind = self.compressed[self.metadata.shape[0] :]
        return dataclasses.replace(self, compressed=jax.numpy.concatenate([values, behind]))

    def todense(self, *, implementation: str | None = None) -> jax.Array:
        """The array it stands for, with +0 where nothing is kept; by the kernel, as nothing else reads it."""
        from jax_sparse24.ops.compressed import unpack  # as in Packed24

        return unpack(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedVNM(Compressed):
    """A V:2:M-sparse array (2310.02065), compressed along one of its last two axes.

    As in Packed24 the compressed axis, of size K, is stored last. With `lead` the dimensions before the last
    two, and `R` the size of the other one of these, which is cut into blocks of V:

    values:    `lead + (R, 2 K / M)`, the kept elements, in order; float32, bfloat16, float16 (float64 by the
               reference).
    metadata:  `lead + (R, ceil(K / 2M))` uint8, two nibbles a byte as in Packed24; the positions are those
               among the four columns of the block.
    columns:   `lead + (R / V, K / M, 4)` uint8, the columns of each block that stay: ascending, from 0 to
               M - 1.
    v, m:      the size of a block (static).
    axis:      the compressed axis, -1 or -2 (static)."""

    values: jax.Array
    metadata: jax.Array
    columns: jax.Array
    v: int = dataclasses.field(metadata={"static": True})
    m: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def K(self) -> int:
        """Uncompressed size of the compressed axis."""
        return self.values.shape[-1] // 2 * self.m

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        *lead, rows, _ = self.values.shape
        return (*lead, rows, self.K) if self.axis == -1 else (*lead, self.K, rows)

    @property
    def pattern(self) -> str:
        """Such as 64:2:16, for V:N:M."""
        return f"{self.v}:2:{self.m}"

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values, metadata and columns."""
        return self.values.nbytes + self.metadata.nbytes + self.columns.nbytes

    @property
    def T(self) -> "PackedVNM":
        """The transpose of the last two axes; no data moves."""
        return dataclasses.replace(self, axis=-3 - self.axis)

    def todense(self, *, implementation: str | None = None) -> jax.Array:
        """The array it stands for, with +0 where nothing is kept. Differentiable in `values`."""
        from jax_sparse24.ops.vnm import unpack_vnm  # as in Packed24

        return unpack_vnm(self, implementation=implementation)
