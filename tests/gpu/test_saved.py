"""The backward pass from packed activations: the bits of the CPU for what is large, mapped over or fits no
tile; `tests/ops/test_identity.py` has whole tiles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.engine import fusions
from jax_sparse24.ops.features import top_features
from jax_sparse24.ops.packed_vnm import in_vnm_tiles, repack_vnm
from jax_sparse24.ops.reference.saved import SLOPES
from jax_sparse24.ops.saved import pack_counted, saved_backward
from tests.gpu.test_producers import assert_same_on_both
from tests.ops.cases import REPACKED, features_of
from tests.ops.data import adversarial, assert_same_bits, from_words, saved_operands, unit_roundoff
from tests.ops.test_identity import on


def test_same_bits_where_blocks_repeat_their_work():
    words = np.random.default_rng(3).integers(0, 2**16, (2, 129 * 128, 65 * 64), np.uint16)
    x, dy2 = words.view(jnp.bfloat16)
    packed = jax.device_get(s24.pack24(x, -1))
    args = packed, dy2, features_of(x.shape[1])
    assert_same_on_both(lambda *args: saved_backward(*args, "squared_relu"), *args)


TILED = [(shape, v, m, collected) for shape, v, m, collected in REPACKED if collected or v >= 4 * m]


@pytest.mark.parametrize("tokens", ["strided", "consecutive"])
@pytest.mark.parametrize(("shape", "v", "m", "collected"), [*TILED, ((4096, 3072), 64, 16, True)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_blocks_are_packed_again(shape, v, m, collected, tokens, dtype):
    packed = jax.device_get(s24.pack_vnm(jnp.asarray(adversarial(shape, dtype, 6)), v, m))
    assert in_vnm_tiles(packed, collected)
    if shape[0] > 2000:
        assert_same_on_both(lambda packed: repack_vnm(packed, tokens, collected), packed)
    batch = jax.tree.map(lambda part: np.stack([part, np.roll(part, 1, axis=0)]), packed)
    assert_same_on_both(lambda batch: jax.vmap(lambda p: repack_vnm(p, tokens, collected))(batch), batch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", SLOPES)
def test_every_value_of_16_bits(activation, dtype):
    """Roots are rounded correctly."""
    values = from_words(np.arange(2**16, dtype=np.uint16).reshape(256, 256), dtype)
    packed = s24.Packed24(values, np.full((256, 64), 0xE4, np.uint8), -1)
    dy2 = np.tile(np.asarray([1.0, 1.7, -3e-3, 0.0], values.dtype), (256, 128))
    none = np.zeros(0, np.int32)
    assert_same_on_both(lambda *args: saved_backward(*args, activation), packed, dy2, none)


@pytest.mark.parametrize("shape", [(132, 24), (8, 4)], ids=str)
def test_what_falls_into_no_tile(shape, dtype):
    """XLA's roots are within a unit in the last place, not correctly rounded."""
    y, dy2 = (np.random.default_rng(i).normal(size=shape) for i in range(2))
    packed = jax.device_get(s24.pack24(jnp.asarray(y * y, dtype), -1))
    args = packed, np.asarray(jnp.asarray(dy2, dtype)), features_of(shape[1])
    got, want = (
        on(kind, lambda *args: saved_backward(*args, "squared_relu"), *args) for kind in ("cuda", "cpu")
    )
    assert_same_bits(got[1], want[1])
    near = 4 * unit_roundoff(dtype)
    np.testing.assert_allclose(*(np.asarray(r[0].values, np.float64) for r in (got, want)), rtol=near)


def test_the_top_features_of_each():
    scores = np.random.default_rng(0).integers(0, 16385, (2, 14336), np.int32)
    for share in (0.05, 1.0):
        assert_same_on_both(jax.vmap(lambda s, share=share: top_features(s, share, 16384)), scores)


def test_vmap_broadcasts():
    packed, dy2 = jax.device_get(saved_operands("bfloat16", (128, 72)))
    several, features = np.stack([dy2, dy2[::-1]]), np.asarray([[1, 5, 30], [0, 2, 71]], np.int32)
    run = jax.vmap(lambda d, n: saved_backward(packed, d, n, "squared_relu"))
    assert_same_on_both(run, several, features)
    assert_same_on_both(jax.vmap(lambda x: pack_counted(x, True)), several)


def test_large():
    """More than 2^31 bytes: indices need 64 bits."""
    T, f = 65536, 16640
    words = jax.random.bits(jax.random.key(1), (T, f), np.uint16) & 0x3FFF
    dy2 = jax.lax.bitcast_convert_type(words, jnp.bfloat16)  # 0 to 2
    packed, features = s24.pack24(dy2, -1), jnp.asarray([5, f - 1], jnp.int32)
    run = partial(saved_backward, features_k=features, activation="squared_relu", tokens="consecutive")
    whole, end = run(packed, dy2), run(jax.tree.map(lambda x: x[-128:], packed), dy2[-128:])
    assert_same_bits(whole[0].values[-128:], end[0].values)
    for all_of, part in zip(whole[1:], end[1:], strict=True):
        assert_same_bits(all_of.packed.values[:, -64:], part.packed.values)
        assert_same_bits(all_of.packed.metadata[:, -16:], part.packed.metadata)
        assert_same_bits(all_of.dense[:, -128:], part.dense)
    counted, counts = pack_counted(dy2, False)
    assert_same_bits(counted, packed)
    few = s24.Packed24(packed.values[:, -4:], packed.metadata[:, -1:], -1).todense(implementation="reference")
    np.testing.assert_array_equal(counts[-8:], (few != 0).sum(0))


@pytest.mark.parametrize("options", [{}, {"tokens": "consecutive", "dense_share": 0.0}], ids=str)
def test_a_block_in_one_pass_and_in_several(options, monkeypatch):
    """Gradients of Activation24, bfloat16, against those without the kernel."""
    method = s24.methods.Activation24(**options)
    shapes = (512, 128), (128, 512), (512, 128), (512, 128)
    arrays = [np.random.default_rng(i).normal(size=n).astype(jnp.bfloat16) for i, n in enumerate(shapes)]

    def block(*args):
        return s24.sparse_ffn(*args, method, implementation="ffi")

    def gradients():
        def both(*args):
            y, vjp = jax.vjp(block, *args[:3])
            return y, *vjp(args[3])

        return jax.jit(both)(*arrays)

    one = gradients()
    monkeypatch.setattr(fusions.Counts, "matches", lambda *_: False)
    for got, want in zip(one, gradients(), strict=True):
        np.testing.assert_array_equal(got, want)
    monkeypatch.setattr(fusions.Saved24, "matches", lambda *_: None)
    for got, want in zip(one, gradients(), strict=True):
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)
