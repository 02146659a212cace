"""Weights that rest in pieces on several devices, and how the products get the whole of them."""

import dataclasses

import jax

from jax_sparse24.ops.packed24 import Packed24

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

    def packs(self, axis: int) -> bool:
        """Whether pieces that are packed along an axis make the packed whole, of whole bytes of metadata.

        axis: -1 or -2."""
        return self.piece.shape[axis] % 8 == 0 or all(cut != axis for cut, _, _ in self.cuts)

    def whole(self) -> jax.Array:
        """The whole, gathered."""
        x = self.piece
        for axis, over, _ in self.cuts:
            x = jax.lax.all_gather(x, over, axis=axis % x.ndim, tiled=True)
        return x

    def joined(self, packed: Packed24) -> Packed24:
        """The packed whole, gathered from packed pieces.

        packed: this piece."""
        parts = packed.values, packed.metadata
        for axis, over, _ in self.cuts:
            stored = 1 if axis == packed.axis else 0  # the packed axis stands last
            parts = tuple(jax.lax.all_gather(part, over, axis=stored, tiled=True) for part in parts)
        return Packed24(*parts, packed.axis)


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
