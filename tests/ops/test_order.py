"""Orders of tokens and features: groups of tokens, columns put side by side, permutations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse24.ops.order import collect, counted_order, inverse_of, permute, regroup, stable_order

T = 48


@pytest.mark.parametrize("order", ["consecutive", "strided", "random"])
def test_regrouped_tokens_are_the_same_tokens(order):
    x = jnp.arange(T * 2.0).reshape(T, 2)
    got = np.asarray(regroup(x, order))
    np.testing.assert_array_equal(np.sort(got, axis=0), x)
    np.testing.assert_array_equal(got, regroup(x, order))  # fixed
    assert (order == "consecutive") == np.array_equal(got, x)
    if order == "strided":
        np.testing.assert_array_equal(got[:4, 0] // 2, [0, T // 4, T // 2, 3 * T // 4])


def test_columns_of_all_groups_are_put_side_by_side():
    """The first of every group, then the second; undone by as many groups as there were columns in each."""
    x = jnp.arange(24).reshape(2, 12)
    got = collect(x, 3, -1)
    np.testing.assert_array_equal(got[0], [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])
    np.testing.assert_array_equal(collect(got, 4, -1), x)
    np.testing.assert_array_equal(collect(x.T, 3, -2), got.T)


@pytest.mark.parametrize("padding", [0, 1, 16])
def test_a_permutation_is_undone_by_its_inverse(padding):
    """Tokens of zeros between the others; their gradients are dropped."""
    rng = np.random.default_rng(1)
    order = jnp.asarray(rng.permutation(np.append(np.arange(T), np.full(padding, T))), jnp.int32)
    x = jnp.asarray(rng.normal(size=(T, 3)), jnp.float32)
    inverse = inverse_of(order, T)
    there = permute(x, order, inverse)
    real = np.asarray(order) < T
    np.testing.assert_array_equal(there[real], x[order[real]])
    assert (there[~real] == 0).all()
    np.testing.assert_array_equal(permute(there, inverse, order), x)
    ct = jnp.asarray(rng.normal(size=there.shape), jnp.float32)
    np.testing.assert_array_equal(jax.vjp(lambda x: permute(x, order, inverse), x)[1](ct)[0], ct[inverse])


@pytest.mark.parametrize(
    ("T", "count"), [(0, 3), (1, 1), (255, 3), (256, 64), (1000, 32), (4096, 7), (2048, 300)]
)
@pytest.mark.parametrize("order", [counted_order, stable_order], ids=["counted", "as the platform has it"])
def test_small_numbers_are_sorted_stably(order, T, count):
    """Some numbers do not occur, and one occurs in most places."""
    rng = np.random.default_rng(T)
    numbers = np.where(rng.random(T) < 0.3, count // 2, rng.integers(0, max(1, count - 1), T)).astype(
        np.int32
    )
    got = jax.jit(order, static_argnums=1)(jnp.asarray(numbers), count)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, np.argsort(numbers, kind="stable"))


@pytest.mark.parametrize(
    ("T", "count", "sorts"), [(2**17, 64, False), (2**19, 64, True), (2**15, 1024, True)]
)
def test_what_would_take_much_memory_to_count_is_sorted(T, count, sorts):
    """Temporaries have eight bytes for each place and number, and float32 has no larger integers."""
    traced = jax.jit(stable_order, static_argnums=1).trace(jax.ShapeDtypeStruct((T,), jnp.int32), count)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.sort" in text, "stablehlo.dot_general" in text) == (sorts, not sorts)
