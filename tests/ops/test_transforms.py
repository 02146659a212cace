"""vmap, scan, remat, donation: an operation does not notice that it is transformed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.packed24 import gather24
from tests.ops.cases import CASES
from tests.ops.data import adversarial, assert_same_bits, assert_within, device

pytestmark = pytest.mark.optimised

MOVING = {
    "prune24": lambda x: s24.prune24(x, 1, implementation="ffi"),
    "soft24": lambda x: s24.soft24(x, 1, implementation="ffi"),
    "double_prune24": lambda x: s24.double_prune24(x, 0, implementation="ffi"),
    "mvue24": lambda x: s24.mvue24(jax.random.key(0), x, 0, implementation="ffi"),
}


def stacked(results):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def assert_same(case, got, want):
    if case.sums:
        assert_within(got, want, 16 * 2.0**-24 * np.abs(np.asarray(want)).max() * 16)
    else:
        assert_same_bits(got, want)


@pytest.mark.parametrize("case", [c for c in CASES if "mvue" not in c.name], ids=str)
def test_nested_vmap_is_a_loop(case, implementation):
    """Along a leading and a trailing axis. (The estimators have tests of their own.)"""
    x = np.asarray(case.data((2, 8, 12 * 3), seed=60)).reshape(2, 8, 12, 3)

    def f(x):
        return case.call(x, implementation)

    got = jax.vmap(jax.vmap(f, in_axes=2))(x)
    want = stacked([stacked([f(x[i, :, :, j]) for j in range(3)]) for i in range(2)])
    assert_same(case, got, want)


def test_vmap_over_some_operands(implementation):
    """What is not mapped is shared, without a copy of it per element."""
    x = device(adversarial((3, 40), "float32", seed=61).reshape(3, 5, 8))
    masks = x > 0

    def pack(x, m):
        return s24.pack24(x, 1, m, implementation=implementation)

    packs = [pack(xi, masks[0]) for xi in x]
    assert_same_bits(jax.vmap(pack, (0, None))(x, masks[0]), stacked(packs))
    assert_same_bits(jax.vmap(pack, (None, 0))(x[0], masks), stacked([pack(x[0], m) for m in masks]))

    metadata = stacked([p.metadata for p in packs])

    def gather(x, m):
        return gather24(x, m, -1, implementation)

    assert_same_bits(
        jax.vmap(gather, (0, None))(x, metadata[0]), stacked([gather(xi, metadata[0]) for xi in x])
    )
    assert_same_bits(
        jax.vmap(gather, (None, 0))(x[0], metadata), stacked([gather(x[0], m) for m in metadata])
    )

    values = stacked([p.values for p in packs])

    def dense(v, m):
        return s24.Packed24(v, m, -1).todense(implementation=implementation)

    assert_same_bits(
        jax.vmap(dense, (0, None))(values, metadata[0]), stacked([dense(v, metadata[0]) for v in values])
    )
    assert_same_bits(
        jax.vmap(dense, (None, 0))(values[0], metadata), stacked([dense(values[0], m) for m in metadata])
    )


@pytest.mark.parametrize(
    "mapped", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, None, 0)]
)
def test_vmap_over_some_operands_of_a_product(implementation, mapped, rng):
    packs = [s24.pack24(device(rng.normal(size=(5, 12)), "float32"), 1) for _ in range(3)]
    operands = (
        stacked([p.values for p in packs]),
        stacked([p.metadata for p in packs]),
        device(rng.normal(size=(3, 12, 7)), "float32"),
    )

    def product(v, m, d):
        return s24.matmul(s24.Packed24(v, m, -1), d, implementation=implementation)

    given = [o if axis == 0 else o[0] for o, axis in zip(operands, mapped, strict=True)]
    got = jax.vmap(product, mapped)(*given)
    want = stacked(
        [product(*(g[i] if a == 0 else g for g, a in zip(given, mapped, strict=True))) for i in range(3)]
    )
    assert_within(got, want, 1e-5)


def test_packed_arrays_are_mapped_as_one(implementation):
    x = device(adversarial((3, 96), "bfloat16", seed=62).reshape(3, 8, 12))
    packed = jax.vmap(lambda x: s24.pack24(x, 0, implementation=implementation))(x)
    assert packed.shape == (3, 8, 12)
    assert_same_bits(packed, s24.pack24(x, 1, implementation=implementation))
    dense = jax.vmap(lambda p: p.todense(implementation=implementation))(packed)
    assert_same_bits(dense, s24.prune24(x, 1, implementation=implementation))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scan_is_a_loop(case):
    x = case.data((15, 12), seed=63).reshape(3, 5, 12)[:, :4]
    _, got = jax.lax.scan(lambda c, x: (c, case.call(x, "ffi")), 0, x)
    assert_same(case, got, stacked([case.call(xi, "ffi") for xi in x]))


def test_remat_recomputes_the_same(implementation, rng):
    x, w = (device(rng.normal(size=s), "float32") for s in ((6, 8), (8, 12)))

    def loss(w, x):
        packed = s24.pack24(s24.soft24(w, 0, implementation=implementation), 0, implementation=implementation)
        y = s24.matmul(x, packed, implementation=implementation)
        return jnp.sum(
            s24.squared_relu24(y, implementation=implementation).todense(implementation=implementation)
        )

    plain = jax.jit(jax.grad(loss, (0, 1)))(w, x)
    again = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(w, x)
    assert np.abs(plain[0]).max() > 0
    for got, want in zip(again, plain, strict=True):
        assert_within(got, want, 1e-5)


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.filterwarnings("error")  # JAX warns of a donation it cannot use
def test_a_donated_input_may_be_overwritten(name):
    x = adversarial((64, 256), "float32", seed=64)
    want = MOVING[name](device(x))
    given = jnp.array(x)
    got = jax.jit(MOVING[name], donate_argnums=0)(given)
    assert given.is_deleted()
    assert_same_bits(got, want)
