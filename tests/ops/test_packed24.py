"""Packed24: layout, pack24 with and without a mask, todense, gather24, squared_relu24."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import native
from jax_sparse24.ops.packed24 import gather24
from tests.ops import oracle
from tests.ops.data import NUMPY, adversarial, assert_same_bits, device, words

# (shape, axis): odd and even numbers of groups, a single one; the packed axis first, in the middle, last.
PLACES = [((4,), 0), ((3, 44), 1), ((40, 5), 0), ((2, 12, 19), 1), ((2, 8, 2, 3), -3)]


def packed_by_oracle(x, axis, mask=None):
    values, metadata = oracle.pack24(x, axis, mask)
    return s24.Packed24(values, metadata, axis if axis < 0 else axis - x.ndim)


# ---- layout


def test_layout_by_hand(implementation):
    """Nibble i0 | i1 << 2; even groups in the low half of a byte; a missing last group is 4."""
    x = device([[1, 2, 0, 0, 0, 0, 3, 4, 0, 5, 0, -6]], "float32")
    packed = s24.pack24(x, 1, implementation=implementation)
    assert np.asarray(packed.values).tolist() == [[1, 2, 3, 4, 5, -6]]
    assert np.asarray(packed.metadata).tolist() == [[(0 | 1 << 2) | (2 | 3 << 2) << 4, (1 | 3 << 2) | 4 << 4]]
    assert packed.metadata.dtype == jnp.uint8


def test_all_nibbles_in_both_halves(implementation, dtype):
    for place, (i, j) in enumerate(oracle.PAIRS):
        x = np.zeros((1, 8))
        x[0, [i, j, 4 + i, 4 + j]] = place + 1
        packed = s24.pack24(device(x, dtype), 1, implementation=implementation)
        assert np.asarray(packed.metadata).tolist() == [[(i | j << 2) * 17]]


@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_pack_and_unpack_are_their_definitions(implementation, shape, axis):
    for dtype in ("float32", "bfloat16"):
        x = adversarial(shape, dtype, seed=40)
        packed = s24.pack24(device(x), axis, implementation=implementation)
        assert_same_bits(packed, packed_by_oracle(x, axis))
        assert packed.shape == shape
        assert packed.dtype == x.dtype
        assert_same_bits(packed.todense(implementation=implementation), oracle.prune24(x, axis))


def test_any_bits_in_any_dtype(implementation, dtype):
    x = adversarial((150, 132), dtype, seed=41)
    assert_same_bits(s24.pack24(device(x), 1, implementation=implementation), packed_by_oracle(x, 1))
    assert_same_bits(
        s24.pack24(device(x[:148]), 0, implementation=implementation), packed_by_oracle(x[:148], 0)
    )


def test_properties():
    x = device(np.zeros((3, 8, 12)), "bfloat16")
    packed = s24.pack24(x, 1)
    assert packed.axis == -2
    assert packed.K == 8
    assert packed.ndim == 3
    assert packed.values.shape == (3, 12, 4)
    assert packed.metadata.shape == (3, 12, 1)
    assert packed.nbytes == 3 * 12 * (4 * 2 + 1)


def test_transposing_moves_no_data(implementation):
    x = adversarial((20, 12), "float32", seed=42)
    packed = s24.pack24(device(x), 1, implementation=implementation)
    assert packed.T.shape == (12, 20)
    assert packed.T.values is packed.values
    assert_same_bits(packed.T.todense(implementation=implementation), oracle.prune24(x, 1).T)
    assert_same_bits(packed.T.T, packed)


def test_it_is_a_pytree_with_a_static_axis():
    packed = s24.pack24(device(np.eye(8), "float32"), 0)
    leaves, structure = jax.tree.flatten(packed)
    assert len(leaves) == 2
    assert_same_bits(jax.tree.unflatten(structure, leaves), packed)
    assert jax.tree.structure(packed) != jax.tree.structure(packed.T)
    doubled = jax.jit(lambda p: s24.Packed24(p.values * 2, p.metadata, p.axis))(packed)
    assert_same_bits(doubled.todense(), 2 * packed.todense())


# ---- masks


@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_masks_of_any_count(implementation, shape, axis, rng):
    """Of more than two masked entries the largest stay; fewer are filled up with stored zeros."""
    x, mask = adversarial(shape, "float32", seed=43), rng.random(shape) < 0.5
    packed = s24.pack24(device(x), axis, jnp.asarray(mask), implementation=implementation)
    assert_same_bits(packed, packed_by_oracle(x, axis, mask))
    dense = words(packed.todense(implementation=implementation))
    stays = mask & (words(dense) == words(x))
    assert not dense[~mask].any()
    assert (np.minimum(oracle.groups(mask, axis).sum(-1), 2) <= oracle.groups(stays, axis).sum(-1)).all()


def test_every_mask_of_a_group(implementation, dtype):
    masks = np.array([[m >> i & 1 for i in range(4)] for m in range(16)], bool)
    for x in ([4, 3, 2, 1], [1, -2, 2, np.nan], [0, -0.0, 0, np.inf]):
        x = np.broadcast_to(np.array(x, NUMPY[dtype]), (16, 4))
        packed = s24.pack24(device(x), 1, jnp.asarray(masks), implementation=implementation)
        assert_same_bits(packed, packed_by_oracle(x, 1, masks))


def test_a_checked_mask_holds_two_of_every_group():
    """Another count raises, naming the first such group of an axis, and only where it is checked."""
    x = device(adversarial((3, 8, 12), "float32", seed=46))
    mask = s24.transposable_mask24(x)
    for axis in (-1, -2, (-1, -2)):
        assert_same_bits(s24.pack24(x, axis, mask, checked=True), s24.pack24(x, axis, mask))
    assert_same_bits(s24.pack24(x, 0 - 1, checked=True), s24.pack24(x, -1))  # its own choice is 2:4
    column, row = 4 + int(np.argmin(mask[1, 2, 4:8])), 2
    broken = mask.at[1, row, column].set(True).at[2, 0, 0].set(~mask[2, 0, 0])
    message = r"\(3, 8, 12\) is not 2:4 along axis {}: mask\[{}\] holds 3 of four; of all groups 2 do not"
    for axis, place in ((-1, "1, 2, 4:8"), (-2, f"1, 0:4, {column}"), ((-1, -2), "1, 2, 4:8")):
        with pytest.raises(ValueError, match=message.format(-1 if isinstance(axis, tuple) else axis, place)):
            s24.pack24(x, axis, broken, checked=True)
        s24.pack24(x, axis, broken)
    with pytest.raises(TypeError, match=r"checked=True reads the mask.*before jit"):
        jax.jit(lambda m: s24.pack24(x, -1, m, checked=True))(mask)


def test_both_ways_is_one_way_after_the_other(implementation):
    """With a mask of any count, by the best transposable one, and without."""
    x = device(adversarial((2, 36, 44), "bfloat16", seed=45))
    mask = jnp.signbit(x)
    for given in (mask, None):
        both = s24.pack24(x, (-1, 1), given, implementation=implementation)
        each = [s24.pack24(x, axis, given, implementation=implementation) for axis in (-1, 1)]
        assert_same_bits(both, tuple(each))
    best, *packed = s24.transposable_pack24(x, implementation=implementation)
    assert_same_bits(best, s24.transposable_mask24(x, implementation=implementation))
    assert_same_bits(tuple(packed), s24.pack24(x, (-1, -2), best, implementation=implementation))


def test_gradient_of_packing_by_the_best_mask(implementation, rng):
    """Both packed arrays hold the kept entries, each once."""
    w = device(rng.normal(size=(8, 12)), "float32")

    def loss(w):
        mask, *packed = s24.transposable_pack24(w, implementation=implementation)
        return sum(jnp.sum(p.values**2) for p in packed), mask

    gradient, mask = jax.grad(loss, has_aux=True)(w)
    assert_same_bits(gradient, jnp.where(mask, 4 * w, 0))


def test_a_mask_with_two_per_group_is_where(implementation, dtype):
    w = adversarial((80, 48), dtype, seed=44)
    mask = oracle.transposable_mask24(np.arange(w.size).reshape(w.shape) * 7.0 % 31)
    for axis in (0, 1):
        packed = s24.pack24(device(w), axis, jnp.asarray(mask), implementation=implementation)
        expected = np.where(mask, words(w), 0).astype(words(w).dtype)
        assert_same_bits(words(packed.todense(implementation=implementation)), expected)


# ---- gather


@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_gather_reads_at_given_positions(implementation, shape, axis):
    axis = axis if axis < 0 else axis - len(shape)
    for dtype in ("float32", "bfloat16"):
        x, other = adversarial(shape, dtype, seed=45), adversarial(shape, dtype, seed=46)
        metadata = oracle.pack24(other, axis)[1]
        got = gather24(device(x), jnp.asarray(metadata), axis, implementation)
        assert_same_bits(got, oracle.gather24(x, metadata, axis))


# ---- squared ReLU


def test_squared_relu_by_hand(implementation, dtype):
    x = device([[-3, 2, 1, -1], [-1, -2, -3, -4], [0.5, -9, 3, 1], [-np.inf, np.inf, 2, np.nan]], dtype)
    dense = s24.squared_relu24(x, implementation=implementation).todense()
    want = [[0, 4, 1, 0], [0, 0, 0, 0], [0, 0, 9, 1], [0, np.inf, 0, np.nan]]
    assert_same_bits(dense, device(want, dtype))


@pytest.mark.parametrize("axis", [-1, -2])
def test_squared_relu_is_its_definition(implementation, dtype, axis):
    x = adversarial((160, 132), dtype, seed=47)
    packed = s24.squared_relu24(device(x), axis, implementation=implementation)
    assert_same_bits(packed, packed_by_oracle(oracle.squared_relu(x), axis))


def test_squared_relu_both_ways_is_that_of_each(implementation, dtype):
    x = adversarial((2, 128, 24), dtype, seed=9)
    rows, columns = s24.squared_relu24(device(x), (-1, -2), implementation=implementation)
    for packed, axis in ((rows, -1), (columns, -2)):
        assert_same_bits(packed, packed_by_oracle(oracle.squared_relu(x), axis))
    with pytest.raises(ValueError, match=r"must be one axis or \(-1, -2\), got \(0, 1\) of shape \(4, 8\)"):
        s24.squared_relu24(jnp.ones((4, 8)), (0, 1), implementation=implementation)


def test_squared_relu_selects_after_rounding(implementation):
    """Two inputs whose squares round to the same bfloat16 tie, and the lower index stays."""
    x = device([[1, 1 + 2**-7, 0, 0]], "bfloat16") * 2.0**-60
    tied = device(np.array([[2**-61, 1.0, 1.0, 1.0]]), "bfloat16")
    x = jnp.concatenate([x, tied])
    packed = s24.squared_relu24(x, implementation=implementation)
    assert_same_bits(packed, packed_by_oracle(oracle.squared_relu(np.asarray(x)), -1))
    tiny = device([[3 * 2.0**-14, 2.0**-12.5, 2.0**-13, 2.0**-13]], "float16")  # squares below the least half
    assert np.asarray(s24.squared_relu24(tiny, implementation=implementation).metadata).tolist() == [[0x44]]


# Of the last, values are large enough to be streamed past the caches.
@pytest.mark.parametrize("shape", [(12, 264), (1024, 2112)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_on_every_instruction_set(shape, dtype):
    module = native.module("cpu")

    def run(x, implementation):
        packed = s24.pack24(x, -2, implementation=implementation)
        if x.shape[0] > 100:
            return packed
        squares = [s24.squared_relu24(x, axis, implementation=implementation) for axis in (-1, -2)]
        return packed, squares, [s24.soft24(x, axis, implementation=implementation) for axis in (-1, -2)]

    x, run = device(adversarial(shape, dtype, seed=76)), jax.jit(run, static_argnums=1)
    expected = run(x, "reference")
    try:
        for isa in module.isas():
            module.use_isa(isa)
            assert_same_bits(run(x, "ffi"), expected)
    finally:
        module.use_isa(module.isas()[0])
