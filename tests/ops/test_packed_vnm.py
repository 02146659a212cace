"""V:2:M: which columns and elements stay, PackedVNM, its transformations and derivatives."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import native
from jax_sparse24.ops.packed_vnm import gather_vnm
from tests.ops import oracle, vnm_oracle
from tests.ops.data import NUMPY, adversarial, assert_same_bits, device, from_words, words

# (shape, v, m, axis): the least blocks; odd numbers of groups, more than a unit of them; blocks narrower and
# wider than a vector of rows; leading dimensions.
PLACES = [
    ((16, 4), 16, 4, -1),
    ((21, 48), 16, 7, -2),
    ((2, 64, 240), 32, 12, -1),
    ((176, 192), 64, 8, -2),
    ((128, 304), 64, 16, -1),
    ((3, 96, 256), 128, 32, -2),
    ((256, 50), 256, 10, -1),
]


def packed_by_oracle(x, v, m, axis, mask=None):
    return s24.PackedVNM(*vnm_oracle.pack(x, v, m, axis, mask), v, m, axis)


def block(columns, v=16, m=8, dtype="float32"):
    """(v, m), zero except for `columns`: {index: elements of the first rows}."""
    x = np.zeros((v, m))
    for c, values in columns.items():
        x[: len(values), c] = values
    return device(x, dtype)


def chosen(x, implementation, m=8, **kw):
    return np.asarray(s24.pack_vnm(x, 16, m, implementation=implementation, **kw).columns)[0, 0].tolist()


# ---- selection


@pytest.mark.parametrize(("shape", "v", "m", "axis"), PLACES, ids=str)
def test_packing_of_any_bits_is_the_definition(implementation, shape, v, m, axis):
    for dtype in ("float32", "bfloat16", "float16"):
        x = adversarial(shape, dtype, seed=70)
        packed = s24.pack_vnm(device(x), v, m, axis=axis, implementation=implementation)
        expected = packed_by_oracle(x, v, m, axis)
        assert_same_bits(packed, expected)
        assert packed.shape == shape
        assert (np.diff(np.asarray(packed.columns).astype(int), axis=-1) > 0).all()
        mask = s24.vnm_mask(device(x), v, m, axis=axis, implementation=implementation)
        assert_same_bits(mask, vnm_oracle.mask(x, v, m, axis))
        per_block = vnm_oracle.blocks(mask, v, m, axis)
        assert (per_block.sum(-1) == 2).all()
        assert (per_block.any(-2).sum(-1) <= 4).all()
        dense = packed.todense(implementation=implementation)
        assert_same_bits(words(dense), np.where(mask, words(x), 0))


def test_columns_by_hand(implementation, dtype):
    for columns, want in (
        ({}, [0, 1, 2, 3]),
        ({7: [1], 5: [1], 6: [1], 4: [1]}, [4, 5, 6, 7]),
        ({6: [1]}, [0, 1, 2, 6]),
        ({i: [1, -1] for i in range(8)}, [0, 1, 2, 3]),
        ({0: [1], 1: [-2], 2: [1, 1, 1], 3: [0.5], 4: [1, 1], 5: [1.5], 6: [0.25]}, [1, 2, 4, 5]),
        ({i: [9, 9] for i in range(4)} | {7: [np.inf], 6: [np.nan]}, [0, 1, 6, 7]),
        ({i: [np.inf] for i in range(6)} | {7: [0, 0, np.nan]}, [0, 1, 2, 7]),
        ({i: [np.nan] for i in range(2, 8)}, [2, 3, 4, 5]),
    ):
        assert chosen(block(columns, dtype=dtype), implementation) == want


def test_a_block_of_subnormals_keeps_the_largest(implementation, dtype):
    """They add nothing to a sum, yet no selection is empty where something is not zero."""
    bits = np.zeros((16, 8), int)
    bits[3, [1, 4, 5, 6, 7]] = [9, 2, 7, 3, 5]
    x = device(from_words(bits, dtype))
    assert chosen(x, implementation) == [1, 5, 6, 7]
    assert chosen(x, implementation, exact=True) in ([0, 1, 2, 5], [1, 5, 6, 7])
    kept = s24.vnm_mask(x, 16, 8, exact=True, implementation=implementation)
    assert np.asarray(kept)[3, [1, 5]].all()


def test_sums_that_overflow_are_infinite(implementation):
    big = float(jnp.finfo(jnp.float32).max)
    assert chosen(block({i: [big, big] for i in range(2, 8)}), implementation) == [2, 3, 4, 5]
    exact = {i: [0] * i + [big, big] for i in range(7)} | {2: [0, 0, big, big, big]}
    assert 2 in chosen(block(exact), implementation, exact=True)


def test_a_row_outside_the_columns_keeps_zeros(implementation):
    x = block({0: [5] * 8, 1: [5] * 8, 2: [5] * 8, 3: [5] * 8, 7: [0] * 15 + [1]})
    packed = s24.pack_vnm(x, 16, 8, implementation=implementation)
    assert not np.asarray(packed.values)[15].any()


# ---- exhaustive search


@pytest.mark.parametrize(("v", "m", "axis"), [(16, 6, -1), (64, 9, -2), (16, 16, -1)])
def test_the_search_finds_the_best_set(implementation, rng, v, m, axis):
    x = np.exp(rng.normal(size=(v, 2 * m))).astype(np.float32) * rng.choice([-1, 1], (v, 2 * m))
    x = (x * (rng.random(x.shape) < 0.3)).astype(np.float32)
    x = x if axis == -1 else x.T
    mask = s24.vnm_mask(device(x), v, m, axis=axis, exact=True, implementation=implementation)
    kept = vnm_oracle.blocks(np.where(mask, np.abs(x), 0), v, m, axis).astype(np.float64).sum((-1, -2))
    found = vnm_oracle.blocks(x, v, m, axis).reshape(-1, v, m)
    np.testing.assert_allclose(kept.ravel(), [vnm_oracle.best_score(b) for b in found], rtol=1e-6)
    fast = s24.vnm_mask(device(x), v, m, axis=axis, implementation=implementation)
    assert kept.sum() >= np.abs(np.where(fast, x, 0)).sum(dtype=np.float64) * (1 - 1e-6)


def test_of_equal_sets_the_first_stays(implementation):
    assert chosen(block({}), implementation, exact=True) == [0, 1, 2, 3]
    assert chosen(block({6: [2], 7: [1, 1]}), implementation, exact=True) == [0, 1, 6, 7]
    # The fast rule takes the fullest columns, though only two of them count in a row.
    x = block({0: [9], 1: [8], 2: [7], 3: [6], 4: [0, 5], 5: [0, 5]})
    assert chosen(x, implementation) == [0, 1, 2, 3]
    assert chosen(x, implementation, exact=True) == [0, 1, 4, 5]


def test_the_search_keeps_nan_and_infinity(implementation):
    x = block({0: [1e9] * 9, 3: [np.inf], 5: [0, np.nan]} | {i: [np.inf, 3] for i in (6, 7)})
    assert set(chosen(x, implementation, exact=True)) >= {3, 5} - {3}
    mask = np.asarray(s24.vnm_mask(x, 16, 8, exact=True, implementation=implementation))
    assert mask[1, 5]
    assert np.isinf(np.asarray(x)[0][mask[0]]).all()


# ---- masks and supports


@pytest.mark.parametrize(("shape", "v", "m", "axis"), [PLACES[1], PLACES[2], PLACES[3]], ids=str)
def test_masks_of_any_kind(implementation, shape, v, m, axis, rng):
    for dtype, share in (("float32", 0.15), ("bfloat16", 0.8)):
        x, mask = adversarial(shape, dtype, seed=72), rng.random(shape) < share
        packed = s24.pack_vnm(device(x), v, m, axis=axis, mask=mask, implementation=implementation)
        assert_same_bits(packed, packed_by_oracle(x, v, m, axis, mask))
        assert not words(packed.todense(implementation=implementation))[~mask].any()


def test_a_mask_of_the_pattern_is_followed(implementation, rng):
    """Zeros that it keeps stay kept: their gradient passes."""
    x, other = (rng.normal(size=(32, 48)).astype(np.float32) for _ in range(2))
    mask = vnm_oracle.mask(other, 16, 12, -1)
    x = np.where(rng.random(x.shape) < 0.5, x, 0).astype(np.float32)
    pack = partial(s24.pack_vnm, v=16, m=12, mask=mask, implementation=implementation)
    assert_same_bits(pack(device(x)).todense(), np.where(mask, x, 0).astype(np.float32))
    got = jax.grad(lambda x: jnp.sum(pack(x).todense()))(device(x))
    assert_same_bits(got, mask.astype(np.float32))


def test_a_selection_within_another_support(implementation, rng):
    """The operand of a weight gradient: the transpose, selected anew within the forward support."""
    x = np.maximum(rng.normal(size=(128, 96)) - 1, 0).astype(np.float32)
    support = np.asarray(s24.vnm_mask(device(x), 64, 16))
    packed = s24.pack_vnm(jnp.where(support, x, 0), 16, 16, axis=0, implementation=implementation)
    dense = np.asarray(packed.todense())
    assert not dense[~support].any()
    assert_same_bits(dense, np.where(dense != 0, x, 0).astype(np.float32))
    assert 0.5 * np.where(support, x, 0).sum() < dense.sum() <= np.where(support, x, 0).sum()


# ---- the format


def test_layout_by_hand(implementation):
    x = block({1: [1, 5], 3: [2, 6, 7], 4: [0, 9, 8], 6: [4]}, m=8)
    packed = s24.pack_vnm(x, 16, 8, implementation=implementation)
    assert np.asarray(packed.columns).tolist() == [[[1, 3, 4, 6]]]
    assert np.asarray(packed.values)[:4].tolist() == [[2, 4], [6, 9], [7, 8], [0, 0]]
    nibbles = [1 | 3 << 2, 1 | 2 << 2, 1 | 2 << 2, 0 | 1 << 2]
    assert np.asarray(packed.metadata)[:4, 0].tolist() == [n | 4 << 4 for n in nibbles]
    assert (packed.K, packed.shape, packed.ndim, packed.dtype) == (8, (16, 8), 2, jnp.float32)
    assert packed.nbytes == 16 * 2 * 4 + 16 + 4
    assert (packed.T.shape, packed.T.axis, packed.T.values) == ((8, 16), -2, packed.values)
    assert_same_bits(packed.T.todense(implementation=implementation), np.asarray(packed.todense()).T)


@pytest.mark.parametrize(("shape", "v", "m", "axis"), PLACES, ids=str)
def test_gather_reads_at_given_positions(implementation, shape, v, m, axis):
    for dtype in ("float32", "bfloat16"):
        x, other = adversarial(shape, dtype, seed=73), adversarial(shape, dtype, seed=74)
        like = packed_by_oracle(other, v, m, axis)
        values = gather_vnm(device(x), like, implementation=implementation)
        dense = dataclasses.replace(like, values=values).todense(implementation=implementation)
        kept = vnm_oracle.mask(other, v, m, axis)
        assert_same_bits(words(dense), np.where(kept, words(x), 0))
        assert_same_bits(dense, vnm_oracle.unpack(values, like.metadata, like.columns, v, m, axis))


def test_columns_out_of_range_read_within(implementation):
    """As a gather of JAX, which clamps."""
    like = s24.pack_vnm(jnp.ones((16, 8)), 16, 8, implementation=implementation)
    broken = dataclasses.replace(like, columns=jnp.full_like(like.columns, 200))
    values = gather_vnm(jnp.arange(128.0).reshape(16, 8), broken, implementation=implementation)
    assert_same_bits(values[:, 0], np.arange(7, 128, 8, dtype=np.float32))
    assert np.isfinite(s24.matmul(broken, jnp.ones((8, 3)), implementation=implementation)).all()


@pytest.mark.parametrize("isa", native.module("cpu").isas() if native.module("cpu") else [])
def test_same_bits_on_every_instruction_set(isa):
    _cpu = native.module("cpu")

    _cpu.use_isa(isa)
    try:
        for shape, v, m, axis in PLACES:
            x = adversarial(shape, "bfloat16" if m % 8 else "float32", seed=75)
            packed = s24.pack_vnm(device(x), v, m, axis=axis, implementation="ffi")
            assert_same_bits(packed, packed_by_oracle(x, v, m, axis))
            dense = packed.todense(implementation="ffi")
            assert_same_bits(words(dense), np.where(vnm_oracle.mask(x, v, m, axis), words(x), 0))
            assert_same_bits(gather_vnm(device(x), packed, implementation="ffi"), packed.values)
    finally:
        _cpu.use_isa(_cpu.isas()[0])


def test_empty_arrays(implementation):
    for shape in ((0, 8), (32, 0), (0, 32, 8)):
        packed = s24.pack_vnm(jnp.zeros(shape), 16, 8, implementation=implementation)
        assert packed.shape == shape
        assert packed.todense(implementation=implementation).shape == shape
        assert s24.vnm_mask(jnp.zeros(shape), 16, 8, implementation=implementation).shape == shape


# ---- transformations and derivatives


def test_vmap_is_a_loop(implementation, rng):
    x = device(adversarial((3, 32, 24), "float32", seed=76))
    masks = jnp.asarray(rng.random((3, 32, 24)) < 0.3)
    pack = partial(s24.pack_vnm, v=16, m=8, implementation=implementation)

    def stacked(results):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *results)

    packs = [pack(xi) for xi in x]
    assert_same_bits(jax.jit(jax.vmap(pack))(x), stacked(packs))
    masked = jax.vmap(lambda x, mask: pack(x, mask=mask), (None, 0))
    assert_same_bits(masked(x[0], masks), stacked([pack(x[0], mask=mask) for mask in masks]))
    gather = jax.vmap(lambda x, p: gather_vnm(x, p, implementation=implementation), (0, None))
    assert_same_bits(gather(x, packs[0]), stacked([gather_vnm(xi, packs[0]) for xi in x]))

    def dense(v, p):
        return dataclasses.replace(p, values=v).todense(implementation=implementation)

    values = stacked([p.values for p in packs])
    want = stacked([dense(v, packs[1]) for v in values])
    assert_same_bits(jax.vmap(dense, (0, None))(values, packs[1]), want)


def test_derivatives_are_selections(implementation, rng):
    x, other, c = (rng.normal(size=(32, 24)).astype(np.float32) for _ in range(3))
    for axis in (-1, -2):
        v, m = (16, 6) if axis == -1 else (8 * 2, 8)
        x_, other_, c_ = (a if axis == -1 else a.T.copy() for a in (x, other, c))
        x_, other_, c_ = (a[: 16 * (a.shape[0] // 16)] if axis == -1 else a for a in (x_, other_, c_))
        mask = vnm_oracle.mask(x_, v, m, axis)
        pack = partial(s24.pack_vnm, v=v, m=m, axis=axis, implementation=implementation)

        def loss(x, pack=pack, c_=c_):
            return jnp.sum(pack(x).todense(implementation=implementation) ** 2 * c_)

        got = jax.jit(jax.grad(loss))(device(x_))
        np.testing.assert_allclose(got, np.where(mask, 2 * x_ * c_, 0), rtol=1e-6)
        twice = jax.grad(lambda x, loss=loss: jnp.sum(jax.grad(loss)(x)))(device(x_))
        np.testing.assert_allclose(twice, np.where(mask, 2 * c_, 0), rtol=1e-6)
        _, pull = jax.vjp(lambda x, pack=pack: pack(x).todense(), device(x_))
        (dx,) = pull(device(np.where(mask, 2, np.nan), "float32"))
        assert_same_bits(dx, np.where(mask, 2, 0).astype(np.float32))
        like = s24.pack_vnm(device(other_), v, m, axis=axis)
        got = jax.grad(lambda x, like=like: jnp.sum(gather_vnm(x, like, implementation=implementation) ** 2))(
            x_
        )
        np.testing.assert_allclose(got, np.where(vnm_oracle.mask(other_, v, m, axis), 2 * x_, 0), rtol=1e-6)


def test_float64_runs_by_the_reference():
    with jax.enable_x64(True):
        x = adversarial((48, 40), "float64", seed=77)
        packed = s24.pack_vnm(jnp.asarray(x), 16, 8)
        assert_same_bits(packed, packed_by_oracle(x, 16, 8, -1))
        tiny = np.zeros((16, 8))
        tiny[0, 4:] = 1 + np.arange(4) * 1e-12
        tiny[0, 3] = 1 - 1e-12
        assert np.asarray(s24.pack_vnm(jnp.asarray(tiny), 16, 8).columns).ravel().tolist() == [4, 5, 6, 7]
        with pytest.raises(RuntimeError, match="float64"):
            s24.pack_vnm(jnp.asarray(x), 16, 8, implementation="ffi")


# ---- known numbers


@pytest.mark.parametrize(
    ("density", "kept"), [(0.10, (0.76, 0.50, 0.31)), (0.05, (0.85, 0.62, 0.41)), (0.02, (0.96, 0.80, 0.59))]
)
def test_share_of_l1_kept_of_independent_activations(rng, density, kept):
    """relu(x)^2 with a threshold that leaves `density` of Gaussian x; V = 64, M = 8, 16, 32."""
    x = rng.normal(size=(1024, 1024))
    x = np.square(np.maximum(x - np.quantile(x, 1 - density), 0)).astype(np.float32)
    for m, want in zip((8, 16, 32), kept, strict=True):
        mask = np.asarray(s24.vnm_mask(device(x), 64, m))
        assert x[mask].sum(dtype=np.float64) / x.sum(dtype=np.float64) == pytest.approx(want, abs=0.012)
    assert mask.mean() == pytest.approx(2 / 32)


def test_supported_dtypes(implementation, dtype):
    packed = s24.pack_vnm(jnp.ones((16, 8), dtype), 16, 8, implementation=implementation)
    assert packed.dtype == packed.todense().dtype == NUMPY[dtype]
    assert oracle.wide(packed.todense()).sum() == 32
