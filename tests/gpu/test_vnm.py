"""V:N:M on CUDA: products against float64, and packing mapped over and repeated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.measure import Oracle
from jax_sparse24.ops.matmul import contract
from tests.ops.data import adversarial, assert_same_bits


@pytest.mark.parametrize("v", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("axes", [(-1, -1), (-1, -2), (-2, -1), (-2, -2)], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("m", "groups", "cols"), [(8, 32, 136), (16, 16, 128), (10, 7, 33)])
def test_products(v, axes, side, m, groups, cols, dtype):
    """Whole and partial tiles; either axis of the dense operand contracted; the packed one on either side."""
    rng = np.random.default_rng(6)
    packed_axis, dense_axis = axes if side == "left" else axes[::-1]
    k = m * groups

    def array(free, axis, k_axis):
        return jnp.asarray(rng.normal(size=(free, k) if axis == k_axis else (k, free)), dtype)

    packed = s24.pack_vnm(array(2 * v, packed_axis, -1), v, m, axis=packed_axis)
    dense = array(cols, dense_axis, -1)
    plain = packed.todense()
    plain = plain if packed_axis == -1 else plain.T
    right = dense if dense_axis == -2 else dense.T
    operands = (packed, dense) if side == "left" else (dense, packed)
    got = jax.jit(lambda a, b: contract(a, b, *axes, "ffi"))(*operands)
    assert Oracle(plain, right, unit=2.0**-24).excess(got if side == "left" else got.T) <= 1


@pytest.mark.parametrize("out_dtype", [None, "float32"], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("v", "rows", "groups", "cols"), [(128, 2048, 208, 2568), (64, 2560, 112, 2000), (64, 2560, 112, 2232)]
)
def test_products_of_many_tiles(v, rows, groups, cols, transposed, out_dtype, dtype):
    """More tiles than a GPU computes at a time, odd numbers of steps and a last tile that is partial; the
    same bits in every call."""
    rng, m = np.random.default_rng(7), 8
    packed = s24.pack_vnm(jnp.asarray(rng.normal(size=(rows, m * groups)), dtype), v, m)
    dense = jnp.asarray(rng.normal(size=(m * groups, cols)), dtype)
    operands, axes = ((dense, packed), (-2, -1)) if transposed else ((packed, dense), (-1, -2))
    product = jax.jit(lambda a, b: contract(a, b, *axes, "ffi", out_dtype=out_dtype))
    got = product(*operands)
    assert Oracle(packed.todense(), dense, unit=2.0**-24).excess(got.T if transposed else got) <= 1
    for _ in range(20):
        assert_same_bits(product(*operands), got)


def test_vmap_and_repetition():
    x = jnp.asarray(adversarial((3, 128, 64), "bfloat16", seed=7))
    pack = jax.jit(jax.vmap(lambda x: s24.pack_vnm(x, 64, 8)))
    first = pack(x)
    for _ in range(20):
        assert_same_bits(pack(x), first)
    for i in range(3):
        assert_same_bits(jax.tree.map(lambda leaf, i=i: leaf[i], first), s24.pack_vnm(x[i], 64, 8))
