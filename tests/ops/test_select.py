"""mask24, mask_nm, prune24, double_prune24: which elements stay, and that they stay as they are."""

import jax.numpy as jnp
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


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize(("n", "m"), [(1, 2), (3, 4), (2, 8), (4, 16), (8, 8)])
def test_n_of_m(n, m, axis, dtype):
    x = adversarial((32, 48), dtype)
    moved = np.moveaxis(x, axis, -1).reshape(-1, m)
    a = np.abs(oracle.wide(moved))
    order = np.lexsort([-np.where(np.isnan(a), 0, a), ~np.isnan(a)], axis=-1)  # stable: the lower index
    keep = np.zeros(a.shape, bool)
    np.put_along_axis(keep, order[:, :n], True, axis=-1)
    shape = np.moveaxis(x, axis, -1).shape
    want = np.moveaxis(keep.reshape(shape), -1, axis)
    np.testing.assert_array_equal(s24.mask_nm(x, n, m, axis), want)


def test_two_of_four_is_mask24(implementation, dtype):
    x = adversarial((16, 32), dtype)
    got = s24.mask_nm(x, 2, 4, 0, implementation=implementation)
    np.testing.assert_array_equal(got, s24.mask24(x, 0))


@pytest.mark.parametrize(
    ("n", "m", "error", "message"),
    [
        (3, 2, ValueError, "n=3 of every m=2 cannot be kept; use 1 <= n <= m"),
        (0, 4, ValueError, "n=0 of every m=4 cannot be kept"),
        (1.0, 4, TypeError, "n must be an int, got 1.0"),
        (True, 4, TypeError, "n must be an int, got True"),
        (2, 6, ValueError, r"shape \(8, 8\) has size 8 along axis -1, which is not a multiple of 6"),
    ],
)
def test_what_cannot_be_selected(n, m, error, message):
    with pytest.raises(error, match="mask_nm: .*" + message):
        s24.mask_nm(jnp.ones((8, 8)), n, m, 1)


def test_ties_of_n_of_m_go_to_the_lower_index():
    np.testing.assert_array_equal(s24.mask_nm(jnp.ones(8), 3, 8, 0), np.arange(8) < 3)


def test_n_of_m_has_no_kernel():
    assert s24.mask_nm(jnp.ones(8), 1, 4, 0, implementation="reference").dtype == bool
    with pytest.raises(RuntimeError, match=r"implementation 'ffi' cannot run: .* has no kernel"):
        s24.mask_nm(jnp.ones(8), 1, 4, 0, implementation="ffi")
