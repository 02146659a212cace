"""What the operations mean, written from their definitions in numpy, without a line of the package.

Magnitudes are compared as float64, which holds every 16- and 32-bit float, subnormals included.
"""

import itertools

import numpy as np

from tests.ops.data import words

PAIRS = list(itertools.combinations(range(4), 2))
# All ways to give four rows a pair of columns each, every column used twice, in lexicographic order.
TILES = [
    rows
    for rows in itertools.product(range(6), repeat=4)
    if all(sum(column in PAIRS[p] for p in rows) == 2 for column in range(4))
]
TILE_MASKS = np.array([[[c in PAIRS[p] for c in range(4)] for p in rows] for rows in TILES])


def wide(x) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.asarray(x).astype(np.float64)


def groups(x, axis) -> np.ndarray:
    """(..., L / 4, 4) with the group axis last."""
    moved = np.moveaxis(np.asarray(x), axis, -1)
    return moved.reshape(*moved.shape[:-1], moved.shape[-1] // 4, 4)


def ungroup(g, axis) -> np.ndarray:
    return np.moveaxis(g.reshape(*g.shape[:-2], -1 if g.size else g.shape[-2] * g.shape[-1]), -1, axis)


# ---- selection


def top_two(x, mask=None) -> np.ndarray:
    """Ascending positions (..., 2) of the two kept of each group (..., 4).

    What counts, in this order: the mask, NaN, |x|, the lower index.
    """
    a = np.abs(wide(x))
    nan = np.isnan(a)
    order = [-np.where(nan, 0, a), ~nan]
    if mask is not None:
        order.append(~mask)
    return np.sort(np.lexsort(order, axis=-1)[..., :2], axis=-1)


def mask24(x, axis) -> np.ndarray:
    g = groups(x, axis)
    keep = np.zeros(g.shape, bool)
    np.put_along_axis(keep, top_two(g), True, axis=-1)
    return ungroup(keep, axis)


def prune24(x, axis) -> np.ndarray:
    return np.where(mask24(x, axis), words(x), 0).astype(words(x).dtype).view(np.asarray(x).dtype)


def double_prune24(w, axis) -> np.ndarray:
    other = {-1: -2, -2: -1}[axis]
    return prune24(prune24(w, axis), other)


def tiles(w) -> np.ndarray:
    """(..., R / 4, C / 4, 4, 4)"""
    w = np.asarray(w)
    *lead, rows, cols = w.shape
    return np.swapaxes(w.reshape(*lead, rows // 4, 4, cols // 4, 4), -3, -2)


def untile(t) -> np.ndarray:
    *lead, rows, cols, _, _ = t.shape
    return np.swapaxes(t, -3, -2).reshape(*lead, rows * 4, cols * 4)


def tile_scores(score) -> np.ndarray:
    """Sums over the kept entries of each of the 90 patterns, for tiles (..., 4, 4) of float64."""
    return np.einsum("...ij,pij->...p", score, TILE_MASKS.astype(np.float64))


def transposable_mask24(score) -> np.ndarray:
    """First best pattern; `score` (..., R, C) must add up exactly in float64."""
    return untile(TILE_MASKS[np.argmax(tile_scores(tiles(score)), axis=-1)])


# ---- arithmetic on what is kept


def _compute(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def _flushed(v) -> np.ndarray:
    return np.where(np.abs(v) < np.finfo(v.dtype).tiny, v.dtype.type(0), v)


def _rounded(v, dtype) -> np.ndarray:
    """To dtype; a zero is +0."""
    out = v.astype(dtype)
    return np.where(out == 0, np.zeros_like(out), out)


@np.errstate(invalid="ignore", under="ignore", over="ignore")
def soft24(x, axis) -> np.ndarray:
    g = groups(x, axis)
    v = g.astype(_compute(g.dtype))
    a = _flushed(np.abs(v))
    threshold = np.sort(a, axis=-1)[..., 1:2]
    shrunk = _rounded(np.copysign(_flushed(np.maximum(a - threshold, 0)), v), g.dtype)
    nan, inf = np.isnan(a), np.isinf(a)
    broken = nan.any(-1, keepdims=True) | np.isinf(threshold)
    passes = np.where(nan.any(-1, keepdims=True), nan, inf)
    passes &= np.where(broken, np.cumsum(passes, axis=-1) <= 2, True)
    usual = np.where(inf, words(g), words(shrunk))
    out = np.where(broken, np.where(passes, words(g), 0), usual)
    return ungroup(out.astype(words(g).dtype).view(g.dtype), axis)


@np.errstate(invalid="ignore", under="ignore", over="ignore")
def squared_relu(x) -> np.ndarray:
    x = np.asarray(x)
    v = x.astype(_compute(x.dtype))
    y = _rounded(_flushed(np.square(_flushed(np.maximum(v, 0)))), x.dtype)
    return np.where(np.isnan(v), words(x), words(y)).astype(words(x).dtype).view(x.dtype)


# ---- packing


def pack24(x, axis, mask=None) -> tuple[np.ndarray, np.ndarray]:
    """(values, metadata) as stored: the packed axis last; a byte holds two groups, the even one low."""
    g = groups(x, axis)
    m = None if mask is None else groups(mask, axis)
    kept = top_two(g, m)
    stored = words(g) if m is None else np.where(m, words(g), 0).astype(words(g).dtype)
    values = np.take_along_axis(stored, kept, axis=-1).view(g.dtype)
    nibbles = kept[..., 0] + 4 * kept[..., 1]
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.full((*nibbles.shape[:-1], 1), 4)], axis=-1)
    metadata = nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    lead = values.shape[:-2]
    return values.reshape(*lead, 2 * values.shape[-2]), metadata.astype(np.uint8)


def positions(metadata, n_groups) -> np.ndarray:
    """(..., groups, 2) from bytes."""
    metadata = np.asarray(metadata).astype(int)
    nibbles = np.stack([metadata % 16, metadata // 16], axis=-1)
    nibbles = nibbles.reshape(*metadata.shape[:-1], 2 * metadata.shape[-1])[..., :n_groups]
    return np.stack([nibbles % 4, nibbles // 4], axis=-1)


def unpack24(values, metadata, axis) -> np.ndarray:
    values = np.asarray(values)
    n = values.shape[-1] // 2
    dense = np.zeros((*values.shape[:-1], n, 4), words(values).dtype)
    pairs = words(values).reshape(*values.shape[:-1], n, 2)
    np.put_along_axis(dense, positions(metadata, n), pairs, axis=-1)
    return ungroup(dense.view(values.dtype), axis)


def gather24(x, metadata, axis) -> np.ndarray:
    g = groups(x, axis)
    picked = np.take_along_axis(words(g), positions(metadata, g.shape[-2]), axis=-1).view(g.dtype)
    return picked.reshape(*picked.shape[:-2], 2 * g.shape[-2])


# ---- minimum-variance unbiased estimators


def philox4x32(key, counter) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 (Salmon et al. 2011) on Python integers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    low = 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & low, (first >> 32) ^ c3 ^ k1, first & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def uniforms(key, count) -> np.ndarray:
    """(count, 2): the two uniforms of groups 0 .. count - 1, of 23 bits each; group g has word g % 4 of the
    calls for (g // 4, 0, draw, 0)."""
    key = [int(k) for k in np.asarray(key)]
    drawn = [[philox4x32(key, (g // 4, 0, draw, 0))[g % 4] for draw in (0, 1)] for g in range(count)]
    return (np.array(drawn).reshape(count, 2) >> 9) * 2.0**-23


def optimal_inclusion(a) -> np.ndarray:
    """Inclusion probabilities (..., 4) of least variance for two of four, for magnitudes a in float64."""
    a = np.asarray(a, np.float64)
    total = a.sum(-1, keepdims=True)
    largest = np.arange(4) == np.argmax(a, -1)[..., None]
    rest = total - a.max(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        free = 2 * a / total
        capped = np.where(largest, 1.0, a / rest)
    pi = np.where(a.max(-1, keepdims=True) > rest, capped, free)
    return np.where(a > 0, pi, 0)


def sequential_inclusion(a) -> np.ndarray:
    """Of drawing two one after the other, in proportion to size, by enumeration of the ordered pairs."""
    a = np.asarray(a, np.float64)
    top = a.max(-1, keepdims=True)
    # The estimator scales the largest into [1, 2) and adds 2^-23 to all, so that none has probability zero.
    a = a / 2.0 ** np.floor(np.log2(np.where(top > 0, top, 1))) + 2.0**-23
    total = a.sum(-1)
    pi = np.zeros_like(a)
    for i, j in itertools.permutations(range(4), 2):
        p = a[..., i] / total * a[..., j] / (total - a[..., i])
        pi[..., i] += p
        pi[..., j] += p
    return pi


def systematic_draw(pi, u) -> np.ndarray:
    """Which two intervals of the running sums of pi (2 in all) contain u and u + 1; keep mask (..., 4)."""
    ends = np.cumsum(pi, axis=-1)
    points = (u[..., None] + np.arange(2))[..., None]
    return (((ends - pi)[..., None, :] <= points) & (points < ends[..., None, :])).any(-2)
