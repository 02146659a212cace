"""V:2:M from its definition, block by block, in numpy and Python."""

import itertools

import numpy as np

from tests.ops import oracle
from tests.ops.data import words


def blocks(x, v, m, axis) -> np.ndarray:
    """(..., blocks, groups, V, M): rows of a block, then columns."""
    x = np.asarray(x) if axis == -1 else np.swapaxes(np.asarray(x), -1, -2)
    *lead, rows, depth = x.shape
    return np.swapaxes(x.reshape(*lead, rows // v, v, depth // m, m), -3, -2)


def unblock(b, axis) -> np.ndarray:
    *lead, n, groups, v, m = b.shape
    x = np.swapaxes(b, -3, -2).reshape(*lead, n * v, groups * m)
    return x if axis == -1 else np.swapaxes(x, -1, -2)


@np.errstate(invalid="ignore", over="ignore")
def column_sums(magnitudes) -> np.ndarray:
    """Row l, l + 16, ... one after the other; then halves of the 16. In float32 (float64 for float64)."""
    a = np.where(magnitudes < np.finfo(magnitudes.dtype).tiny, magnitudes.dtype.type(0), magnitudes)
    lanes = [a[..., lane, :] for lane in range(16)]
    for first in range(16, a.shape[-2], 16):
        lanes = [total + a[..., first + lane, :] for lane, total in enumerate(lanes)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


def columns(x, v, m, axis, mask=None) -> np.ndarray:
    """(..., blocks, groups, 4) of the fast rule."""
    b = blocks(x, v, m, axis)
    with np.errstate(invalid="ignore"):
        a = np.abs(b.astype(np.float64 if b.dtype == np.float64 else np.float32))
    allowed = np.ones(b.shape, bool) if mask is None else blocks(mask, v, m, axis)
    a = np.where(allowed, a, 0)
    sums = column_sums(a)
    largest = np.max(np.where(np.isnan(a), 0, a), axis=-2, initial=0).astype(np.float64)
    order = [
        np.where(sums == 0, -largest, 0),
        -np.where(np.isnan(sums), 0, sums),
        ~np.isnan(sums),
        ~allowed.any(-2),
    ]
    return np.sort(np.lexsort(order, axis=-1)[..., :4], axis=-1)


def best_score(block) -> float:
    """The most that two per row of any four columns keep of a finite (V, M) block, in float64."""
    a = np.abs(block.astype(np.float64))
    sets = itertools.combinations(range(a.shape[1]), 4)
    return max(np.sort(a[:, list(s)], axis=1)[:, 2:].sum() for s in sets)


def chosen(x, cols, v, m, axis) -> np.ndarray:
    """(..., R, 4 K / M) as integers: the chosen columns side by side, a 2:4 problem."""
    b = blocks(x if np.asarray(x).dtype == bool else words(x), v, m, axis)
    return unblock(np.take_along_axis(b, cols[..., None, :].repeat(v, -2), -1), -1)


def pack(x, v, m, axis, mask=None):
    """(values, metadata, columns) as stored."""
    x = np.asarray(x)
    cols = columns(x, v, m, axis, mask)
    four = chosen(x, cols, v, m, axis).view(x.dtype)
    four_mask = None if mask is None else chosen(mask, cols, v, m, axis)
    return *oracle.pack24(four, -1, four_mask), cols.astype(np.uint8)


def unpack(values, metadata, cols, v, m, axis) -> np.ndarray:
    four = oracle.unpack24(values, metadata, -1)
    b = blocks(words(four), v, 4, -1)
    out = np.zeros((*b.shape[:-1], m), b.dtype)
    np.put_along_axis(out, np.asarray(cols).astype(int)[..., None, :].repeat(v, -2), b, -1)
    return unblock(out, axis).view(four.dtype)


def mask(x, v, m, axis) -> np.ndarray:
    cols = columns(x, v, m, axis)
    four = chosen(np.asarray(x), cols, v, m, axis).view(np.asarray(x).dtype)
    keep = blocks(oracle.mask24(four, -1), v, 4, -1)
    out = np.zeros((*keep.shape[:-1], m), bool)
    np.put_along_axis(out, cols[..., None, :].repeat(v, -2), keep, -1)
    return unblock(out, axis)
