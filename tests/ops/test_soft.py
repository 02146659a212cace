"""soft24: sign(x) max(|x| - t, 0), t the second-smallest magnitude of each group."""

from functools import partial

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.soft import scaled_soft24, soft_pack24
from tests.ops import oracle
from tests.ops.data import adversarial, assert_same_bits, device, from_words, special_words, words

INF, NAN = np.inf, np.nan
GROUPS = [
    ([4, -3, 2, 1], [2, -1, 0, 0]),
    ([1, 5, -1, 1], [0, 4, 0, 0]),
    ([-2, 2, 2, -2], [0, 0, 0, 0]),
    ([0, 7, 0, -3], [0, 7, 0, -3]),
    ([-0.0, 0, -0.0, 1], [0, 0, 0, 1]),
    ([1, 2, INF, 5], [0, 0, INF, 3]),
    ([-INF, 2, INF, 5], [-INF, 0, INF, 0]),
    ([3, INF, -INF, INF], [0, INF, -INF, 0]),
    ([NAN, INF, 5, 4], [NAN, 0, 0, 0]),
    ([1, NAN, 5, NAN], [0, NAN, 0, NAN]),
    ([NAN, 1, NAN, NAN], [NAN, 0, NAN, 0]),
]


def test_hand_written_groups(implementation, dtype):
    x, want = device([g for g, _ in GROUPS], dtype), device([w for _, w in GROUPS], dtype)
    assert_same_bits(s24.soft24(x, 1, implementation=implementation), want)
    assert_same_bits(s24.soft24(x.T, 0, implementation=implementation), want.T)


@pytest.mark.parametrize("axis", [-1, -2])
def test_any_bits_give_the_definition(implementation, dtype, axis):
    x = adversarial((200, 132), dtype, seed=20)
    soft = s24.soft24(device(x), axis, implementation=implementation)
    assert_same_bits(soft, oracle.soft24(x, axis))
    assert ((oracle.groups(words(soft), axis) != 0).sum(-1) <= 2).all()


def test_nan_payloads_pass(implementation, dtype):
    nan, other = special_words(dtype)[[-3, -1]].tolist()
    x = device(from_words([[0, nan, other, nan]], dtype))
    assert words(s24.soft24(x, 1, implementation=implementation)).tolist() == [[0, nan, other, 0]]


def test_float32_subnormals_count_as_zero(implementation):
    tiny = np.finfo(np.float32).tiny
    x = device([[tiny, tiny / 2, 0, tiny / 4], [1.5 * tiny, tiny, tiny, 3 * tiny]], "float32")
    # Thresholds are 0 and tiny; 1.5 tiny - tiny is subnormal.
    want = np.array([[tiny, 0, 0, 0], [0, 0, 0, 2 * tiny]], np.float32)
    assert_same_bits(s24.soft24(x, 1, implementation=implementation), want)


def test_half_precision_subnormals_are_numbers(implementation):
    x = device(from_words([[9, 3, 1, 0x8006]], "float16"))
    assert words(s24.soft24(x, 1, implementation=implementation)).tolist() == [[6, 0, 0, 0x8003]]


def test_continuous_where_the_selection_flips(implementation):
    """The survivor is already zero when second and third largest change places."""
    steps = np.linspace(1.9, 2.1, 401, dtype=np.float32)
    x = np.stack([np.full_like(steps, 3), steps, np.full_like(steps, 2), np.full_like(steps, 0.5)], axis=1)
    soft = np.asarray(s24.soft24(device(x), 1, implementation=implementation))
    assert np.abs(np.diff(soft, axis=0)).max() <= 1.01 * np.diff(steps).max()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("scale", [1.37, -2.5, 0, 1e-30, 1e-39, 3e4, INF, NAN])
def test_the_scale_is_multiplied_in_float32_and_the_product_rounded_once(implementation, dtype, scale, axis):
    """In both forms; what is kept is chosen before. Subnormals of float32 count as zero with their sign."""
    x, factor = device(adversarial((64, 132), dtype, seed=21)), device(scale, dtype)
    soft = s24.soft24(x, axis, implementation=implementation)
    got = scaled_soft24(x, factor, axis, implementation)
    values, times, tiny = np.asarray(soft, np.float32), np.float32(factor), np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        wide = values * (0 if abs(times) < tiny else times)
        want = words(device(np.where(abs(wide) < tiny, np.copysign(np.float32(0), wide), wide), dtype))
    nan = np.isnan(wide)
    want = np.where(nan, np.where(np.isnan(values), words(soft), np.iinfo(want.dtype).max >> 1), want)
    clear = abs(wide) != tiny  # what is rounded to the least normal number may count as subnormal
    assert (words(got)[clear] == want[clear]).all()
    packed = soft_pack24(x, factor, axis, implementation)
    assert_same_bits(packed.metadata, s24.pack24(soft, axis, implementation=implementation).metadata)
    if 0 < scale < INF:  # else what is not kept would not be +0
        assert_same_bits(packed.todense(implementation=implementation), got)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("op", [scaled_soft24, soft_pack24])
def test_each_array_of_a_batch_has_its_scale(implementation, dtype, op, axis, in_axes):
    xs, scales = device(adversarial((3, 24, 40), dtype, seed=22)), device([1.37, 0.3, 2.0], dtype)
    operands = [x if batched == 0 else x[1] for x, batched in zip((xs, scales), in_axes, strict=True)]
    call = partial(op, axis=axis, implementation=implementation)
    got = jax.jit(jax.vmap(call, in_axes))(*operands)
    for n in range(3):
        one = [x[n] if batched == 0 else x for x, batched in zip(operands, in_axes, strict=True)]
        assert_same_bits(jax.tree.map(lambda all: all[n], got), call(*one))  # noqa: B023
