"""The truth, in jnp: every operation as its definition says, on any backend, for float16, bfloat16, float32
and float64.

All functions take validated arguments and an axis counted from the end. The CPU and CUDA kernels must agree
with them bit for bit, except for the sums of `matmul`."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24.formats import Packed24
from jax_sparse24.ops._groups import (
    FORMATS,
    GROUP,
    any_of,
    bits,
    compute_format,
    flush,
    is_nan,
    join,
    key,
    magnitude_bits,
    rank_below_two,
    running_sums,
    scaled_scores,
    select,
    split,
    tree_sum,
    with_sign,
)
from jax_sparse24.ops._philox import philox4x32
from jax_sparse24.patterns import KEPT, PAIRS, TILES

# XLA:CPU slices, joins and selects bfloat16 through float32, which rewrites NaN: elements move as integers.


def _split(x, axis):
    return [lax.bitcast_convert_type(m, x.dtype) for m in split(bits(x), axis)]


def _join(members, axis):
    return lax.bitcast_convert_type(join([bits(m) for m in members], axis), members[0].dtype)


def mask24(x, axis):
    return join(rank_below_two([key(m) for m in _split(x, axis)]), axis)


def mask_nm(x, n, m, axis):
    place = x.ndim + axis
    groups = key(x).reshape(*x.shape[:place], x.shape[place] // m, m, *x.shape[place + 1 :])
    rank = jnp.argsort(jnp.argsort(~groups, axis=place + 1), axis=place + 1)  # stable: the lower index first
    return (rank < n).reshape(x.shape)


def prune24(x, axis):
    return select(mask24(x, axis), x)


def double_prune24(w, axis):
    return prune24(prune24(w, axis), -3 - axis)


def soft24(x, axis):
    fmt = compute_format(x.dtype)
    inputs = _split(x, axis)
    members = [m.astype(fmt.dtype) for m in inputs]
    a = [flush(jnp.abs(m)) for m in members]
    # Integer minima and maxima order NaN and Inf too and never flush.
    k = [key(m) for m in a]
    low = jnp.minimum(jnp.maximum(k[0], k[1]), jnp.maximum(k[2], k[3]))
    threshold_key = jnp.minimum(jnp.maximum(jnp.minimum(k[0], k[1]), jnp.minimum(k[2], k[3])), low)
    infinite = threshold_key >= fmt.uint(fmt.infinity << 1)
    threshold = jnp.where(infinite, 0, lax.bitcast_convert_type(threshold_key >> 1, fmt.dtype))
    kept = rank_below_two(k)
    has_nan = any_of([is_nan(m) for m in members])
    out = []
    for i in range(GROUP):
        finite = magnitude_bits(a[i]) < fmt.uint(fmt.infinity)
        r = flush(jnp.where(finite & ~infinite, a[i] - threshold, 0))
        r = jnp.where(k[i] > threshold_key, r, 0)
        y = with_sign(r, members[i]).astype(x.dtype)
        passes = jnp.where(has_nan, is_nan(members[i]), ~finite) & kept[i]
        y = jnp.where(has_nan, jnp.zeros_like(y), y)
        out.append(select(passes, inputs[i], y))
    return _join(out, axis)


def squared_relu(x):
    fmt = compute_format(x.dtype)
    y = x.astype(fmt.dtype)
    a = jnp.where(bits(y) < fmt.uint(fmt.sign), flush(y), 0)
    return select(is_nan(x), x, flush(a * a).astype(x.dtype))


def transposable_mask24(w):
    """Score of a tile: `(row 0 + row 1) + (row 2 + row 3)` of the kept |w|, after an exact scaling by a power
    of two."""
    fmt = compute_format(w.dtype)
    *lead, rows, cols = w.shape
    tiles = w.astype(fmt.dtype).reshape(*lead, rows // GROUP, GROUP, cols // GROUP, GROUP)
    tiles = jnp.swapaxes(tiles, -3, -2)  # (..., R/4, C/4, row, column)
    score = scaled_scores(magnitude_bits(tiles), (-2, -1), fmt, nan=256.0, infinity=16.0)
    first, second = (jnp.asarray([pair[k] for pair in PAIRS]) for k in (0, 1))
    pairs = score[..., first] + score[..., second]  # (..., R/4, C/4, row, pair)
    upper = pairs[..., 0, :, None] + pairs[..., 1, None, :]
    lower = pairs[..., 2, :, None] + pairs[..., 3, None, :]
    codes = jnp.asarray(TILES).T
    best = jnp.argmax(upper[..., codes[0], codes[1]] + lower[..., codes[2], codes[3]], axis=-1)
    masks = jnp.asarray([[[c in PAIRS[p] for c in range(GROUP)] for p in tile] for tile in TILES], bool)
    return jnp.swapaxes(masks[best], -3, -2).reshape(w.shape)


def greedy_transposable_mask24(w):
    *lead, rows, cols = w.shape
    tiles = jnp.swapaxes(key(w).reshape(*lead, rows // GROUP, GROUP, cols // GROUP, GROUP), -3, -2)
    order = jnp.argsort(~tiles.reshape(*tiles.shape[:-2], GROUP * GROUP), axis=-1)
    places = jnp.arange(GROUP * GROUP).reshape(GROUP, GROUP)

    def take(i, mask):
        full = (mask.sum(-1, keepdims=True) >= KEPT) | (mask.sum(-2, keepdims=True) >= KEPT)
        return mask | ((order[..., i, None, None] == places) & ~full)

    mask = lax.fori_loop(0, GROUP * GROUP, take, jnp.zeros(tiles.shape, bool))
    return jnp.swapaxes(mask, -3, -2).reshape(w.shape)


# ---- packing


def _positions(keep):
    """First and second kept index of each group, from four masks of which exactly two hold."""
    first = jnp.where(keep[0], 0, jnp.where(keep[1], 1, 2)).astype(jnp.uint8)
    second = jnp.where(keep[3], 3, jnp.where(keep[2], 2, 1)).astype(jnp.uint8)
    return first, second


def _pick(members, index):
    return select(
        index == 0,
        members[0],
        select(index == 1, members[1], select(index == 2, members[2], members[3])),
    )


def _pack(members, keep, axis):
    first, second = _positions(keep)
    nibbles = jnp.moveaxis(first | second << 2, axis, -1)
    if nibbles.shape[-1] % 2:
        nibbles = jnp.pad(nibbles, [(0, 0)] * (nibbles.ndim - 1) + [(0, 1)], constant_values=4)
    metadata = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    values = jnp.moveaxis(_join([_pick(members, first), _pick(members, second)], axis), axis, -1)
    return Packed24(values, metadata, axis)


def pack24(x, axis):
    members = _split(x, axis)
    return _pack(members, rank_below_two([key(m) for m in members]), axis)


def pack24_masked(x, mask, axis):
    members, allowed = _split(x, axis), split(mask, axis)
    keys = [key(m) for m in members]
    keep = []
    for i in range(GROUP):
        ahead = []
        for j in range(GROUP):
            if j == i:
                continue
            beats = keys[j] >= keys[i] if j < i else keys[j] > keys[i]
            ahead.append(jnp.where(allowed[i] == allowed[j], beats, allowed[j]).astype(jnp.uint8))
        keep.append(sum(ahead) < 2)
    kept = [select(a, m) for m, a in zip(members, allowed, strict=True)]
    return _pack(kept, keep, axis)


def _unpack_positions(metadata, groups):
    halves = jnp.stack([metadata & 15, metadata >> 4], axis=-1)
    nibbles = halves.reshape(*metadata.shape[:-1], 2 * metadata.shape[-1])[..., :groups]
    return nibbles & 3, nibbles >> 2


def unpack24(packed):
    values = packed.values
    first, second = _unpack_positions(packed.metadata, values.shape[-1] // 2)
    v0, v1 = (lax.bitcast_convert_type(bits(values)[..., i::2], values.dtype) for i in range(2))
    members = [select(first == i, v0, select(second == i, v1)) for i in range(GROUP)]
    return jnp.moveaxis(_join(members, -1), -1, packed.axis)


def gather24(x, metadata, axis):
    """The values of `x` at the positions that `metadata` names."""
    members = [jnp.moveaxis(m, axis, -1) for m in _split(x, axis)]
    first, second = _unpack_positions(metadata, members[0].shape[-1])
    return _join([_pick(members, first), _pick(members, second)], -1)


# Activations whose derivative follows from their value, so that their input need not be saved.
SLOPES = "squared_relu", "relu"


def sloped(y, dy, activation):
    """The gradient at the input of an activation of SLOPES from its values y, not negative, and the gradient
    dy at them: slope times dy, in float32, rounded once.

    Results below twice the least normal float32 are zeros with the sign of dy, as it depends on the hardware
    what it takes for subnormal just above the least; so are those of squared ReLU where y < 2^-100. What is
    not a number has all bits but the sign."""
    fmt, own = compute_format(y.dtype), FORMATS[y.dtype]
    value, given = y.astype(fmt.dtype), flush(dy.astype(fmt.dtype))
    if activation == "relu":
        slope = jnp.where(value >= fmt.tiny(), fmt.dtype.type(1), 0)
    else:
        slope = jnp.where(value < 2.0**-100, 0, 2 * jnp.sqrt(value))
    product = slope * given
    small = magnitude_bits(product) < fmt.uint(2 << fmt.mantissa)
    words = jnp.where(small, bits(dy) & own.uint(own.sign), bits(product.astype(y.dtype)))
    return lax.bitcast_convert_type(jnp.where(is_nan(product), own.uint(own.sign - 1), words), y.dtype)


def squared_relu24(x, axis):
    return pack24(squared_relu(x), axis)


def matmul(p, dense, dense_k_last, out_packed_last, out_dtype):
    """`P D` with P (..., R, K) unpacked, D (..., K, N) or (..., N, K); the result is (..., R, N) or
    (..., N, R)."""
    # Widened first: XLA:CPU cannot run a bfloat16 product whose float32 result is then transposed.
    accumulator = compute_format(dense.dtype).dtype
    d = (jnp.swapaxes(dense, -1, -2) if dense_k_last else dense).astype(accumulator)
    out = jnp.matmul(p.astype(accumulator), d, precision=lax.Precision.HIGHEST)
    return (jnp.swapaxes(out, -1, -2) if out_packed_last else out).astype(out_dtype)


# ---- minimum-variance unbiased estimators


def _uniform(key_words, draw, shape, fmt):
    """The number in [0, 1) that each group draws first (0) or second (1), keyed by (key, index of the group
    in row-major order): the four words of one call of Philox serve four neighbours."""
    count, zero = math.prod(shape), jnp.uint32(0)
    quartet = jnp.arange(-(-count // 4), dtype=jnp.uint32)
    words = philox4x32((key_words[0], key_words[1]), (quartet, zero, jnp.uint32(draw), zero))
    mine = jnp.stack(words, axis=-1).reshape(-1)[:count].reshape(shape)
    return (mine >> 9).astype(fmt.dtype) * fmt.dtype.type(2.0**-23)


def _first_above(sums, point):
    """Index of the first running sum above `point`."""
    return jnp.minimum(sum((s <= point).astype(jnp.int32) for s in sums), GROUP - 1)


def _exact_magnitudes(b, u, unscale, underflow):
    """Magnitudes after systematic sampling with the optimal inclusion probabilities, and whether an entry
    stays as it is."""
    top = b[0]
    for m in b[1:]:
        top = jnp.maximum(top, m)
    largest = jnp.where(b[0] == top, 0, jnp.where(b[1] == top, 1, jnp.where(b[2] == top, 2, 3)))
    others = [jnp.where(largest == i, 0, b[i]) for i in range(GROUP)]
    rest = tree_sum(others)
    capped = top > rest

    sums = running_sums(others)
    partner = _first_above(sums, u * sums[3])
    lone = jnp.where(rest < underflow, 0, rest * unscale)

    sums = running_sums(b)
    half = sums[3] * 0.5
    point = u * half
    first = _first_above(sums, point)
    second = _first_above([s - half for s in sums], point)
    second = jnp.where(second == first, jnp.where(first < 3, first + 1, 2), second)
    both = half * unscale

    magnitudes, untouched = [], []
    for i in range(GROUP):
        in_pair = ((first == i) | (second == i)) & (b[i] > 0)
        alone = (partner == i) & (others[i] > 0)
        magnitudes.append(jnp.where(capped, jnp.where(alone, lone, 0), jnp.where(in_pair, both, 0)))
        untouched.append(capped & (largest == i))
    return magnitudes, untouched


def _sequential_magnitudes(b, u, v, unscale, underflow):
    """Magnitudes after drawing two entries one after the other, each in proportion to its size."""
    weights = [m + m.dtype.type(2.0**-23) for m in b]
    sums = running_sums(weights)
    first = _first_above(sums, u * sums[3])
    others = running_sums([jnp.where(first == i, 0, weights[i]) for i in range(GROUP)])
    second = _first_above(others, v * others[3])
    second = jnp.where(second == first, jnp.where(first < 3, first + 1, 2), second)

    def without(members, i):
        return tree_sum([jnp.zeros_like(m) if j == i else m for j, m in enumerate(members)])

    odds = [weights[i] / (sums[3] * without(weights, i)) for i in range(GROUP)]
    inverse = 1 / sums[3]
    magnitudes = []
    for i in range(GROUP):
        probability = weights[i] * (inverse + without(odds, i))
        ratio = b[i] / probability
        drawn = ((first == i) | (second == i)) & (b[i] > 0) & (ratio >= underflow)
        magnitudes.append(jnp.where(drawn, ratio * unscale, 0))
    return magnitudes


def mvue24(key_words, x, axis, exact):
    """`key_words`: uint32 (2,). Groups are scaled by a power of two first, so that no sum overflows or
    underflows."""
    fmt = compute_format(x.dtype)
    inputs = _split(x, axis)
    members = [m.astype(fmt.dtype) for m in inputs]
    a = [flush(jnp.abs(m)) for m in members]
    exponents = [magnitude_bits(m) >> fmt.mantissa for m in a]
    top = jnp.maximum(jnp.maximum(exponents[0], exponents[1]), jnp.maximum(exponents[2], exponents[3]))
    last, bias = fmt.max_exponent - 1, fmt.max_exponent >> 1
    finite = top <= last
    top = jnp.clip(top, 1, last)  # an all-zero group has nothing to scale
    scale = fmt.power_of_two(jnp.maximum(last - top, 1))
    unscale = fmt.power_of_two(jnp.minimum(top, last - 1))
    # Scaled magnitudes below this would come out subnormal.
    underflow = jnp.where(top <= bias, fmt.power_of_two(jnp.maximum(bias + 1 - jnp.minimum(top, bias), 1)), 0)
    # Zero where the product would be subnormal, by exponents: hardware that keeps subnormals may round it up
    # to the least normal number.
    normal = [finite & (e + (bias - 1) >= jnp.minimum(top, last - 1)) for e in exponents]
    b = [jnp.where(n, m, 0) * scale for n, m in zip(normal, a, strict=True)]
    u = _uniform(key_words, 0, b[0].shape, fmt)
    if exact:
        magnitudes, untouched = _exact_magnitudes(b, u, unscale, underflow)
    else:
        v = _uniform(key_words, 1, b[0].shape, fmt)
        magnitudes, untouched = (
            _sequential_magnitudes(b, u, v, unscale, underflow),
            [jnp.zeros_like(finite)] * GROUP,
        )
    kept = rank_below_two([key(m) for m in inputs])
    out = []
    for i in range(GROUP):
        y = with_sign(magnitudes[i], members[i]).astype(x.dtype)
        y = select(untouched[i] & (a[i] > 0), inputs[i], y)
        out.append(select(finite, y, select(kept[i], inputs[i])))
    return _join(out, axis)


# ---- other random cuts


def random24(key_words, x, axis, law):
    """`law`: "uniform" or "paired". A group with NaN or Inf is cut by magnitude, unscaled."""
    fmt = compute_format(x.dtype)
    inputs = _split(x, axis)
    members = [m.astype(fmt.dtype) for m in inputs]
    a = [flush(jnp.abs(m)) for m in members]
    finite = ~any_of([magnitude_bits(m) >= fmt.uint(fmt.infinity) for m in members])
    u = _uniform(key_words, 0, a[0].shape, fmt)
    if law == "uniform":
        drawn = jnp.minimum((u * len(PAIRS)).astype(jnp.int32), len(PAIRS) - 1)
        holds = jnp.asarray([[i in pair for pair in PAIRS] for i in range(GROUP)])
        magnitudes = [jnp.where(holds[i][drawn], 2 * a[i], 0) for i in range(GROUP)]
    else:
        magnitudes = []
        for one, other, draw in ((a[0], a[1], u), (a[2], a[3], _uniform(key_words, 1, a[0].shape, fmt))):
            both = one + other
            first = draw * both < one
            magnitudes += [jnp.where(first, both, 0), jnp.where(first, 0, both)]
    kept = rank_below_two([key(m) for m in inputs])
    out = []
    for i in range(GROUP):
        y = with_sign(magnitudes[i], members[i]).astype(x.dtype)
        out.append(select(finite, y, select(kept[i], inputs[i])))
    return _join(out, axis)


GATES = {"gelu": jax.nn.gelu, "silu": jax.nn.silu}


def gated(gate, up, activation):
    wide = compute_format(gate.dtype).dtype
    return (GATES[activation](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def gated_backward(gate, up, dz, activation):
    wide = compute_format(gate.dtype).dtype
    _, vjp = jax.vjp(lambda gate, up: GATES[activation](gate) * up, gate.astype(wide), up.astype(wide))
    return tuple(d.astype(gate.dtype) for d in vjp(dz.astype(wide)))
