"""The CUDA kernels give the bits of the CPU kernels, on any bit pattern, whatever the shape."""

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import mvue_pack24, mvue_pack24_strided
from jax_sparse24.ops.packed24 import gather24, pack24_strided
from tests.ops.cases import ALONG_AN_AXIS, CASES, KEY
from tests.ops.data import adversarial, assert_same_bits, device, from_words

SELECTIONS = [case for case in CASES if not case.sums]


def on(kind, f, *args):
    """`f` of arrays on the first device of a kind; each platform runs its own kernels."""
    where = jax.devices(kind)[0]
    with jax.default_device(where):
        return jax.device_get(jax.jit(f)(*jax.device_put(args, where)))


def assert_same_on_both(f, *args):
    assert_same_bits(on("cuda", f, *args), on("cpu", f, *args))


@pytest.mark.parametrize("case", SELECTIONS, ids=str)
def test_same_bits_on_adversarial_data(case, dtype):
    x = np.asarray(adversarial((300, 420), dtype)).reshape(3, 100, 420)
    assert_same_on_both(lambda x: case.call(x, None), x)


# Rows: whole and half metadata bytes, odd group counts. Columns: whole tiles of 128 rows, with the last tile
# of columns partly outside; a multiple of the vector only; neither.
PLACES = [
    *[((4,), 0), ((5, 12), 1), ((6, 64), 1), ((3, 7, 1032), -1), ((2, 20, 17), 1), ((3, 68, 70), -2)],
    *[((2, 12, 3, 43), 1), ((256, 192), 0), ((2, 128, 72), 1), ((2, 384, 8), 1), ((128, 3, 24), 0)],
]
OPERATIONS = ALONG_AN_AXIS | {
    "pack24 with mask": lambda x, axis: s24.pack24(x, axis, s24.mask24(x[::-1], axis)),
    "todense": lambda x, axis: s24.pack24(x, axis).todense(),
    "gather24": lambda x, axis: gather24(x[::-1], s24.pack24(x, axis).metadata, axis),
    "mvue24 approximate": lambda x, axis: s24.mvue24(KEY, x, axis, exact=False),
    "mvue_pack24": lambda x, axis: mvue_pack24(KEY, x, axis),
    "mvue_pack24 approximate": lambda x, axis: mvue_pack24(KEY, x, axis, exact=False),
}


@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_same_bits_along_any_axis(name, shape, axis, dtype):
    axis = axis - len(shape) if axis >= 0 else axis
    assert_same_on_both(lambda x: OPERATIONS[name](x, axis), np.asarray(adversarial(shape, dtype, seed=1)))


@pytest.mark.parametrize("shape", [(256, 192), (2, 128, 72), (3, 68, 72), (4096, 1024)], ids=str)
def test_same_bits_of_squared_relu_both_ways(shape, dtype):
    x = np.asarray(adversarial(shape, dtype, seed=2))
    assert_same_on_both(lambda x: s24.squared_relu24(x, (-1, -2)), x)


@pytest.mark.parametrize("shape", [(256, 192), (2, 128, 72), (3, 68, 72), (4096, 1024)], ids=str)
@pytest.mark.parametrize("data", ["adversarial", "normal"])
def test_same_bits_of_masks_both_ways(shape, dtype, data):
    """Normal numbers have tiles whose search is exact in integers, and a few others."""
    rng = np.random.default_rng(4)
    x = adversarial(shape, dtype, seed=4) if data == "adversarial" else device(rng.normal(size=shape), dtype)
    x = np.asarray(x)
    assert_same_on_both(s24.transposable_pack24, x)
    assert_same_on_both(lambda x, mask: s24.pack24(x, (-1, -2), mask), x, rng.random(shape) < 0.5)
    best = np.asarray(s24.transposable_mask24(x))
    assert_same_on_both(lambda x, mask: s24.pack24(x, (-1, -2), mask), x, best)


@pytest.mark.parametrize("shape", [(256, 192), (384, 8), (68, 70), (4, 3), (8, 1), (4096, 1024)], ids=str)
def test_same_bits_of_strided_rows(shape, dtype):
    x = np.asarray(adversarial(shape, dtype, seed=3))
    assert_same_on_both(pack24_strided, x)
    for exact in (True, False):
        assert_same_on_both(lambda x, exact=exact: mvue_pack24_strided(KEY, x, exact), x)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "name", ["pack24", "pack24 with mask", "todense", "gather24", *(n for n in OPERATIONS if "mvue" in n)]
)
def test_same_bits_where_blocks_repeat_their_work(name, axis):
    """Large arrays, whose last block repeats it less often than the others."""
    words = np.random.default_rng(3).integers(0, 2**16, (129 * 128, 65 * 64), np.uint16)
    assert_same_on_both(lambda x: OPERATIONS[name](x, axis), words.view(jax.numpy.bfloat16))


def test_same_bits_near_the_least_normal_number():
    """Entries that the estimator scales to just below it: hardware may round them up."""
    rng = np.random.default_rng(3)
    x = from_words(
        rng.choice([0x7E967699, 0x3F7FFFFF, 0x3F7FFFFE, 0x3F800000, 0x3EFFFFFF], (512, 64)), "float32"
    )
    for exact in (True, False):
        assert_same_on_both(lambda x, exact=exact: s24.mvue24(KEY, x, -1, exact), x)


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
