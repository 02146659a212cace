"""Compressed arrays: pytrees of values and metadata that stand for a sparse array."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed24:
    """A 2:4-sparse array, compressed along one axis.

    The compressed axis is stored last, whatever its place in the array it stands for: matrix products read it
    as the contraction axis, and `.T` moves no data. With `lead` the array's dimensions without that axis, and
    `K` its size:

    values:    `lead + (K / 2,)`, the kept elements, in order; float32, bfloat16, float16 (float64 by the
               reference).
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
