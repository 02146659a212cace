"""Minimum-variance unbiased estimators, and other random cuts."""

import math

import jax.numpy as jnp
import numpy as np

from jax_sparse24.ops.reference.bits import (
    GROUP,
    any_of,
    compute_format,
    flush,
    join_floats,
    key,
    magnitude_bits,
    rank_below_two,
    running_sums,
    select,
    split_floats,
    tree_sum,
    with_sign,
)
from jax_sparse24.ops.reference.philox import multiply, philox4x32
from jax_sparse24.patterns import PAIRS


def _uniform(key_words, draw, shape, axis, fmt):
    """The number in [0, 1) that each group draws first (0) or second (1), keyed by (key, index of the group
    in row-major order): the four words of one call of Philox serve four neighbours.

    shape: of the groups, which lie along `axis`."""
    count, zero = math.prod(shape), jnp.uint32(0)
    if key_words.shape == (2,):
        quartet = jnp.arange(-(-count // 4), dtype=jnp.uint32)
        words = philox4x32((key_words[0], key_words[1]), (quartet, zero, jnp.uint32(draw), zero))
        mine = jnp.stack(words, axis=-1).reshape(-1)[:count]
    else:
        width = math.prod(shape[axis + 1 :]) if axis < -1 else shape[-1]
        low, high = _numbers_in_whole(key_words[2:], count, width)
        quartet = low >> 2 | high << 30, high >> 2
        words = philox4x32((key_words[0], key_words[1]), (*quartet, jnp.uint32(draw), zero))
        mine = jnp.select([low % 4 == i for i in range(3)], words[:3], words[3])
    return (mine.reshape(shape) >> 9).astype(fmt.dtype) * fmt.dtype.type(2.0**-23)


def _numbers_in_whole(shard, count, width):
    """Low and high 32 bits of the indices that the groups of a shard have in the whole array.

    shard: uint32 (3,), see `ops.mvue.key_of_shard`.
    count, width: how many groups the shard has, and how many of them in a row."""
    above, left, across = shard
    at = np.arange(count, dtype=np.uint32)
    row, column = at // np.uint32(max(width, 1)), at % np.uint32(max(width, 1))
    row = above * np.uint32(count // max(width, 1)) + row
    high, low = multiply(across * np.uint32(width), row)
    column = left * np.uint32(width) + column
    return low + column, high + (low + column < low)


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
    """`key_words`: uint32 (2,), or (5,) of a shard. Groups are scaled by a power of two first, so that no sum
    overflows or underflows."""
    fmt = compute_format(x.dtype)
    inputs = split_floats(x, axis)
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
    u = _uniform(key_words, 0, b[0].shape, axis, fmt)
    if exact:
        magnitudes, untouched = _exact_magnitudes(b, u, unscale, underflow)
    else:
        v = _uniform(key_words, 1, b[0].shape, axis, fmt)
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
    return join_floats(out, axis)


def random24(key_words, x, axis, law):
    """`law`: "uniform" or "paired". A group with NaN or Inf is cut by magnitude, unscaled."""
    fmt = compute_format(x.dtype)
    inputs = split_floats(x, axis)
    members = [m.astype(fmt.dtype) for m in inputs]
    a = [flush(jnp.abs(m)) for m in members]
    finite = ~any_of([magnitude_bits(m) >= fmt.uint(fmt.infinity) for m in members])
    u = _uniform(key_words, 0, a[0].shape, axis, fmt)
    if law == "uniform":
        drawn = jnp.minimum((u * len(PAIRS)).astype(jnp.int32), len(PAIRS) - 1)
        holds = jnp.asarray([[i in pair for pair in PAIRS] for i in range(GROUP)])
        magnitudes = [jnp.where(holds[i][drawn], 2 * a[i], 0) for i in range(GROUP)]
    else:
        magnitudes = []
        v = _uniform(key_words, 1, a[0].shape, axis, fmt)
        for one, other, draw in ((a[0], a[1], u), (a[2], a[3], v)):
            both = one + other
            first = draw * both < one
            magnitudes += [jnp.where(first, both, 0), jnp.where(first, 0, both)]
    kept = rank_below_two([key(m) for m in inputs])
    out = []
    for i in range(GROUP):
        y = with_sign(magnitudes[i], members[i]).astype(x.dtype)
        out.append(select(finite, y, select(kept[i], inputs[i])))
    return join_floats(out, axis)
