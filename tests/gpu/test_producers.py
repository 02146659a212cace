"""CUDA kernels give the bits of the CPU kernels for arrays that are large or mapped over; for others
`tests/ops/test_identity.py` says so, on this device too."""

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import mvue_pack24
from tests.ops.cases import ALONG_AN_AXIS, PLACED
from tests.ops.data import adversarial, assert_same_bits, device
from tests.ops.test_identity import on


def assert_same_on_both(f, *args):
    assert_same_bits(on("cuda", f, *args), on("cpu", f, *args))


PACKS = [name for name in PLACED if any(word in name for word in ("pack", "mvue", "dense", "gather"))]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", PACKS)
def test_same_bits_where_blocks_repeat_their_work(name, axis):
    """Large arrays, whose last block repeats it less often than the others."""
    words = np.random.default_rng(3).integers(0, 2**16, (129 * 128, 65 * 64), np.uint16)
    assert_same_on_both(lambda x: PLACED[name](x, axis, None), words.view(jax.numpy.bfloat16))


def test_keys_and_masks_broadcast_under_vmap():
    x = np.asarray(adversarial((6, 128, 64), "bfloat16", seed=2))
    keys = jax.random.split(jax.random.key(5), 6)
    mask = np.asarray(s24.mask24(device(x[0]), 0))
    assert_same_on_both(lambda x: jax.vmap(lambda k, x: mvue_pack24(k, x, 0))(keys, x), x)
    assert_same_on_both(lambda x: jax.vmap(lambda k: s24.mvue24(k, x[0], 0))(keys), x)
    assert_same_on_both(lambda x, m: jax.vmap(lambda x: s24.pack24(x, 0, m))(x), x, mask)


@pytest.mark.parametrize("name", ["prune24", "pack24", "squared_relu24", "mvue24"])
@pytest.mark.parametrize("axis", [0, 1])
def test_large(name, axis):
    """More than 2^31 bytes: indices need 64 bits."""
    words = jax.random.bits(jax.random.key(1), (65536, 16640), np.uint16)
    x = jax.lax.bitcast_convert_type(words, jax.numpy.bfloat16)
    op = jax.jit(lambda x: ALONG_AN_AXIS[name](x, axis))
    last = slice(x.shape[axis] - 128, None)
    whole = op(x)
    if name == "mvue24":  # the counter of its draws is the index of the group: compare the whole axis
        part = np.asarray(whole[:4] if axis == 1 else whole[:, :4])
        assert np.isfinite(part.astype(np.float32)).any()
        return
    piece = ALONG_AN_AXIS[name](x[last] if axis == 0 else x[:, last], axis)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(piece), strict=True):
        end = a[..., -b.shape[-1] :] if name != "prune24" else (a[last] if axis == 0 else a[:, last])
        assert_same_bits(end, b)
