"""Weights that rest in pieces on several devices, and how the products get the whole of them."""

import dataclasses

import jax

from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.reference.packed24 import bytes_of, nibbles_of
from jax_sparse24.patterns import GROUP

Axes = tuple[str, ...]  # of a mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """A weight, or a mask of its shape, of which this device has a piece.

    piece: a matrix.
    cuts: the mesh axes along each axis (-2, -1) over which the other pieces are, and how many there are
        (static)."""

    piece: jax.Array
    cuts: tuple[tuple[int, Axes, int], ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        shape = list(self.piece.shape)
        for axis, _, n in self.cuts:
            shape[axis] *= n
        return tuple(shape)

    @property
    def dtype(self):
        return self.piece.dtype

    def whole(self) -> jax.Array:
        """The whole, gathered."""
        return self.joined(self.piece)

    def joined(self, sparse: Packed24 | jax.Array) -> Packed24 | jax.Array:
        """The whole of what is made of every piece, gathered.

        sparse: made of this piece, an array of its shape or packed."""
        if isinstance(sparse, Packed24):
            return self._joined_packed(sparse)
        for axis, over, _ in self.cuts:
            sparse = jax.lax.all_gather(sparse, over, axis=axis % sparse.ndim, tiled=True)
        return sparse

    def _joined_packed(self, packed: Packed24) -> Packed24:
        values, metadata = packed.values, packed.metadata
        for axis, over, _ in self.cuts:
            stored = 1 if axis == packed.axis else 0  # the packed axis stands last
            values = jax.lax.all_gather(values, over, axis=stored, tiled=True)
            if stored and packed.K % 8:  # the last byte of each piece is half full
                metadata = jax.lax.all_gather(metadata, over, axis=1)
                metadata = bytes_of(nibbles_of(metadata, packed.K // GROUP).reshape(len(values), -1))
            else:
                metadata = jax.lax.all_gather(metadata, over, axis=stored, tiled=True)
        return Packed24(values, metadata, packed.axis)


def whole(tree):
    """Arrays in place of the `Pieces` in a structure, each gathered.

    tree: arrays and `Pieces` in any structure."""
    return jax.tree.map(lambda x: x.whole() if _in_pieces(x) else x, tree, is_leaf=_in_pieces)


def own_pieces(tree):
    """The piece of this device in place of each of the `Pieces` in a structure.

    tree: arrays and `Pieces` in any structure."""
    return jax.tree.map(lambda x: x.piece if _in_pieces(x) else x, tree, is_leaf=_in_pieces)


def _in_pieces(x) -> bool:
    return isinstance(x, Pieces)
