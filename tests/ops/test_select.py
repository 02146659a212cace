"""mask24, prune24, double_prune24: which elements stay, and that they stay as they are."""

import numpy as np
import pytest

import jax_sparse24 as s24
from tests.ops import oracle
from tests.ops.data import NUMPY, adversarial, assert_same_bits, device, from_words, special_words, words

INF, NAN = np.inf, np.nan
# (group, kept): ties to the lower index; NaN over Inf over finite; zeros count; -0 and +0 are equal.
GROUPS = [
    ([1, 2, 3, 4], [0, 0, 1, 1]),
    ([-4, 1, -3, 2], [1, 0, 1, 0]),
    ([1, 1, 1, 1], [1, 1, 0, 0]),
    ([0, 0, 0, 0], [1, 1, 0, 0]),
    ([0.0, -0.0, 0.0, -0.0], [1, 1, 0, 0]),
    ([0, 0, 5, 0], [1, 0, 1, 0]),
    ([1, 2, 2, 2], [0, 1, 1, 0]),
    ([2, 1, -2, 2], [1, 0, 1, 0]),
    ([1, -1, 2, 1], [1, 0, 1, 0]),
    ([0, 1, INF, -INF], [0, 0, 1, 1]),
    ([INF, INF, -INF, 3], [1, 1, 0, 0]),
    ([NAN, 1, 2, 3], [1, 0, 0, 1]),
    ([INF, 1, INF, NAN], [1, 0, 0, 1]),
    ([1, NAN, NAN, NAN], [0, 1, 1, 0]),
    ([NAN, NAN, NAN, NAN], [1, 1, 0, 0]),
]


def test_hand_written_groups(implementation, dtype):
    x = device([group for group, _ in GROUPS], dtype)
    want = np.array([kept for _, kept in GROUPS], bool)
    assert_same_bits(s24.mask24(x, 1, implementation=implementation), want)
    assert_same_bits(s24.mask24(x.T, 0, implementation=implementation), want.T)


def test_subnormals_outrank_zeros_and_each_other(implementation, dtype):
    x = device(from_words([[0, 1, 0, 2], [3, 2, 1, 4], [0, 0, 1, 0]], dtype))
    want = np.array([[0, 1, 0, 1], [1, 0, 0, 1], [1, 0, 1, 0]], bool)
    assert_same_bits(s24.mask24(x, 1, implementation=implementation), want)
    assert_same_bits(words(s24.prune24(x, 1, implementation=implementation)), np.where(want, words(x), 0))


@pytest.mark.parametrize("axis", [-1, -2])
def test_selection_of_any_bits_is_the_definition(implementation, dtype, axis):
    x = adversarial((200, 132), dtype, seed=10)
    mask = s24.mask24(device(x), axis, implementation=implementation)
    assert_same_bits(mask, oracle.mask24(x, axis))
    assert (oracle.groups(mask, axis).sum(-1) == 2).all()
    assert_same_bits(s24.prune24(device(x), axis, implementation=implementation), oracle.prune24(x, axis))


def test_all_groups_of_special_values(implementation, dtype):
    """Every pair of special values in every pair of places, among small numbers."""
    special = special_words(dtype)
    a, b = (v.ravel() for v in np.meshgrid(special, special))
    small = words(np.array([1, 2], NUMPY[dtype]))
    places = ([0, 0], [1, 1], [2, 2], [0, 2])
    x = np.concatenate([np.insert(np.stack([a, b], 1), at, small, 1) for at in places]).view(NUMPY[dtype])
    assert_same_bits(s24.prune24(device(x), 1, implementation=implementation), oracle.prune24(x, 1))


def test_kept_elements_keep_their_bits(implementation, dtype):
    negative_zero = words(np.array(-0.0, NUMPY[dtype])).item()
    payload = special_words(dtype)[-3].item()  # a NaN
    x = device(from_words([[negative_zero, 0, 0, 0], [0, payload, 0, 0]], dtype))
    pruned = words(s24.prune24(x, 1, implementation=implementation))
    assert pruned.tolist() == [[negative_zero, 0, 0, 0], [0, payload, 0, 0]]


def test_pruned_non_finite_values_leave_no_trace(implementation, dtype):
    x = device([[INF, NAN, NAN, -5.0], [INF, -INF, INF, -1.0]], dtype)
    pruned = words(s24.prune24(x, 1, implementation=implementation))
    assert pruned[0, [0, 3]].tolist() == [0, 0]
    assert pruned[1, [2, 3]].tolist() == [0, 0]


@pytest.mark.parametrize("axis", [-1, -2])
def test_double_pruning_is_pruning_twice(implementation, dtype, axis):
    w = adversarial((3 * 40, 36), dtype, seed=11).reshape(3, 40, 36)
    pruned = s24.double_prune24(device(w), axis, implementation=implementation)
    assert_same_bits(pruned, oracle.double_prune24(w, axis))


def test_double_pruning_by_hand(implementation):
    """Along the rows first, a column may lose an entry that it would have kept."""
    w = device([[4, 3, 1, 0], [4, 3, 2, 0], [4, 0, 3, 1], [0, 0, 1, 9]], "float32")
    rows = [[4, 3, 0, 0], [4, 3, 0, 0], [0, 0, 3, 0], [0, 0, 1, 9]]
    columns = [[4, 3, 0, 0], [4, 3, 0, 0], [0, 0, 3, 1], [0, 0, 0, 9]]
    for axis, want in ((1, rows), (0, columns)):
        assert_same_bits(s24.double_prune24(w, axis, implementation=implementation), np.float32(want))
