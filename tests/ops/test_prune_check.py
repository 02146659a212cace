"""prune_check24: how many groups of four are not 2:4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import native
from tests.ops import oracle
from tests.ops.data import adversarial, device, from_words, special_words
from tests.ops.test_errors import raises

# Elements are grouped along the given axis: wide rows, rows that are no whole vector, one group, leading and
# trailing dimensions, columns of 1 to 129 neighbours.
PLACES = [((4,), 0), ((6, 64), 1), ((5, 12), -1), ((3, 68, 70), -2), ((2, 20, 17), 1), ((2, 12, 3, 43), 1)]
PLACES += [((256, 129), 0), ((3, 400, 420), 2), ((16, 1), 0)]


def brute_force(x, axis) -> int:
    """One group after another."""
    groups = oracle.groups(oracle.wide(x), axis).reshape(-1, 4)
    return sum(sum(value != 0 for value in group) > 2 for group in groups.tolist())


def sparse(shape, dtype, seed):
    """Adversarial bits, of which two in five are zeros of either sign."""
    rng = np.random.default_rng(seed)
    zeros = from_words(special_words(dtype)[:2], dtype)
    return np.where(rng.random(shape) < 0.4, rng.choice(zeros, shape), adversarial(shape, dtype, seed))


def check(x, axis, implementation) -> int:
    found = s24.prune_check24(device(x), axis, implementation=implementation)
    assert found.shape == ()
    assert found.dtype == jnp.int32
    return int(found)


@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_groups_are_counted_one_by_one(implementation, dtype, shape, axis):
    x = sparse(shape, dtype, seed=20)
    want = brute_force(x, axis)
    assert check(x, axis, implementation) == want
    assert 0 < want < x.size // 4 or x.size < 100


@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_masks(implementation, shape, axis):
    mask = np.random.default_rng(21).random(shape) < 0.5
    assert check(mask, axis, implementation) == brute_force(mask, axis)
    assert check(np.ones(shape, bool), axis, implementation) == mask.size // 4
    assert check(np.zeros(shape, bool), axis, implementation) == 0


def test_every_choice_of_zeros(implementation, dtype):
    """Of the 16 groups of zeros and ones five have more than two ones, wherever these are."""
    groups = np.array(list(np.ndindex(2, 2, 2, 2)))
    for group in groups:
        assert check(group.astype(bool), 0, implementation) == (group.sum() > 2)
    assert check(device(groups, dtype), 1, implementation) == 5
    assert check(device(groups.T, dtype), 0, implementation) == 5


def test_what_counts_as_zero(implementation, dtype):
    """Each special value beside two ones: zeros of both signs leave the group 2:4, and nothing else does."""
    special = from_words(special_words(dtype), dtype)
    ones = np.ones_like(special)
    x = np.stack([ones, special, ones, np.zeros_like(special)], 1)
    assert check(x, 1, implementation) == len(special) - 2
    for value, group in zip(special, x, strict=True):
        assert check(group, 0, implementation) == (oracle.wide(value) != 0)


@pytest.mark.parametrize("axis", [-1, -2])
def test_what_is_pruned_passes(implementation, dtype, axis):
    x = adversarial((2, 200, 132), dtype, seed=22)
    mask = s24.mask24(device(x), axis)
    assert check(mask, axis, implementation) == 0
    assert check(s24.prune24(device(x), axis), axis, implementation) == 0
    assert check(s24.pack24(device(x), axis).todense(), axis, implementation) == 0
    assert check(mask, -3 - axis, implementation) > 0  # along the other axis it is not 2:4
    for both in (s24.transposable_mask24(device(x)), s24.double_prune24(device(x), axis)):
        assert check(both, -1, implementation) == check(both, -2, implementation) == 0


def test_one_wrong_group_among_many(implementation, dtype):
    """Wherever it is, for several threads and in the last group of all."""
    x = s24.prune24(jnp.ones((300, 420), dtype), 1)
    for place in [(0, 2), (150, 211), (299, 419)]:
        assert check(x.at[place].set(-1), 1, implementation) == 1
        assert check(x.T.at[place[::-1]].set(jnp.nan), 0, implementation) == 1


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5), (0,)], ids=str)
def test_an_empty_array_has_no_wrong_group(implementation, shape):
    axis = 1 if len(shape) > 1 else 0
    for dtype in ("float32", "bool"):
        assert check(np.ones(shape, dtype), axis, implementation) == 0


def test_vmap_counts_each_array(implementation):
    x = sparse((2, 3, 8, 12), "bfloat16", seed=23)

    def counts(axis):
        return lambda x: s24.prune_check24(x, axis, implementation=implementation)

    each = [[brute_force(x[i, j], 0) for j in range(3)] for i in range(2)]
    assert jax.vmap(jax.vmap(counts(0)))(x).tolist() == each
    assert jax.vmap(counts(-2))(x).tolist() == np.sum(each, 1).tolist()
    columns = [brute_force(x[0, 0][:, j], 0) for j in range(12)]
    assert jax.vmap(counts(0), in_axes=1)(x[0, 0]).tolist() == columns
    assert jax.vmap(counts(1))(np.ones((3, 0, 4), bool)).tolist() == [0, 0, 0]
    assert jax.vmap(counts(0))(np.ones((3, 4, 0), bool)).tolist() == [0, 0, 0]


def test_no_gradient_flows(implementation):
    def loss(x):
        return jnp.sum(x) * s24.prune_check24(x, 0, implementation=implementation)

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.ones((4, 3))), np.full((4, 3), 3.0))


def test_errors_name_bool_among_the_dtypes():
    with raises(TypeError, "prune_check24: x has dtype int8", "float32, bfloat16, float16, bool", "float64"):
        s24.prune_check24(jnp.ones(4, jnp.int8), 0)
    with raises(ValueError, "prune_check24", "size 6 along axis -1", "not a multiple of 4", "use 4 or 8"):
        s24.prune_check24(jnp.ones(6, bool), 0)
    with raises(TypeError, "prune_check24: x must be an array", "Packed24; call todense()"):
        s24.prune_check24(s24.pack24(jnp.ones(8), 0), 0)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "bool"])
def test_the_program_for_cuda_is_one_call(dtype, monkeypatch):
    monkeypatch.setitem(native._loaded, "cuda", (object(), None))
    jax.clear_caches()
    x = jax.ShapeDtypeStruct((2, 8, 16), dtype)
    program = jax.jit(jax.vmap(lambda x: s24.prune_check24(x, 0))).trace(x)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    kind = "bf16" if dtype == "bfloat16" else "i1"
    assert text.count("custom_call") == text.count("@s24_prune_check(") == 1
    assert "trailing = 1 : i64" in text
    assert f"(tensor<2x8x16x{kind}>) -> tensor<2xi32>" in text
