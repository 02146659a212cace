"""Kernels of gated activations: float64's values in either order of memory, packed bits of the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.dispatch import hardware
from jax_sparse24.ops.gated import gated_backward, gated_backward_pack
from jax_sparse24.ops.mvue import mvue_pack24
from tests.ops.data import assert_same_bits
from tests.ops.test_gated import assert_close, exact, operands, swapped
from tests.ops.test_identity import on

KEYS = [np.array(words, np.uint32) for words in ([24, 4], [18, 47, 1, 2, 5])]  # the second is of a shard
# Whole tiles; the last tile of columns, or of rows, partly outside; vectors only; neither.
SHAPES = [(512, 256), (256, 72), (1000, 328), (24, 16), (12, 6), (2, 128, 72)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_values_and_gradients(shape, activation, dtype):
    gate, up, dz = operands(shape, dtype)
    wide = [1 + np.abs(np.asarray(x, np.float64)) for x in (gate, up, dz)]
    want, terms = exact(gate, up, dz, activation), wide[0] ** 2 * wide[1] * wide[2]
    for transposed in (False, True):
        own = [swapped(x) + 0 if transposed else x for x in (gate, up)]
        options = {"transposed": transposed, "implementation": "ffi"}
        assert_close(s24.gated(*own, activation, **options), want[0], terms)
        for dz_transposed in (False, True):
            d = swapped(dz) + 0 if dz_transposed else dz
            dense = gated_backward(*own, d, activation, dz_transposed=dz_transposed, **options)
            for got, truth in zip(dense, want[1:], strict=True):
                assert_close(got, truth, terms)


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_packed_bits_are_those_of_packing_on_a_cpu(shape, exact, dtype):
    arrays = operands(shape, dtype)
    for transposed, dz_transposed in ((False, False), (True, False), (False, True), (True, True)):
        turned = (transposed, transposed, dz_transposed)
        own = [swapped(x) + 0 if turn else x for x, turn in zip(arrays, turned, strict=True)]
        options = {"transposed": transposed, "dz_transposed": dz_transposed, "implementation": "ffi"}
        *dense, gate, up = gated_backward_pack(*own, KEYS, "gelu", exact, **options)
        assert_same_bits(tuple(dense), gated_backward(*own, "gelu", **options))
        for key, d, packed in zip(KEYS, dense, (gate, up), strict=True):
            want = on("cpu", lambda d, key=key: mvue_pack24(key, d, -2, exact), np.asarray(d))
            assert_same_bits(packed, want)


def test_vmap_broadcasts():
    gate, up, dz = operands((3, 128, 64), "bfloat16")
    options = {"implementation": "ffi"}
    keys = jnp.asarray(np.arange(12, dtype=np.uint32).reshape(3, 2, 2))

    def all_of(gate, up, dz, keys):
        return s24.gated(gate, up, **options), *gated_backward_pack(gate, up, dz, keys, "silu", **options)

    got = jax.vmap(all_of, (0, None, 0, 0))(gate, up[0], dz, keys)
    for i in range(3):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), all_of(gate[i], up[0], dz[i], keys[i]))


def test_infinities_and_nan():
    """As the reference: a NaN reaches the result, and nothing else becomes one."""
    x = jnp.array([np.inf, -np.inf, np.nan, 1e18, -1e18, 88.0, -88.0, -200.0, 0.0, -0.0], jnp.float32)
    for dtype in ("float32", "bfloat16"):
        for activation in ("silu", "gelu"):
            got, want = (
                s24.gated(x.astype(dtype), jnp.ones(10, dtype), activation, implementation=i)
                for i in ("ffi", "reference")
            )
            np.testing.assert_allclose(got.astype("float32"), want.astype("float32"), rtol=1e-2, atol=1e-30)


def test_large():
    """More than 2^31 bytes: indices need 64 bits."""
    words = jax.random.bits(jax.random.key(1), (65536, 16640), np.uint16) & 0x3FFF
    x = jax.lax.bitcast_convert_type(words, jnp.bfloat16)  # 0 to 2
    end = x[-128:, -128:]
    want = s24.gated(end, end, implementation="ffi")
    assert_same_bits(s24.gated(x, x, implementation="ffi")[-128:, -128:], want)
    turned = s24.gated(x, x, transposed=True, implementation="ffi")
    assert_same_bits(turned[-128:, -128:], want.T)
    del turned
    *dense, gate, up = gated_backward_pack(x, x, x, KEYS, "silu", implementation="ffi")
    for key, d, packed in zip(KEYS, dense, (gate, up), strict=True):
        assert_same_bits(packed, mvue_pack24(key, d, -2, implementation="ffi"))


def test_a_block_by_one_rule_is_one_of_three_layers(monkeypatch):
    """Result and gradients, bfloat16; no draws, whose cuts would not be those of other roundings."""
    method = s24.methods.FST(mvue=None)
    options = {"dtype": jnp.bfloat16, "implementation": "ffi", "rngs": nnx.Rngs(0)}
    model = s24.nn.GatedFFN(128, 256, method=method, **options)
    x = jax.random.normal(jax.random.key(1), (256, 128), jnp.bfloat16)

    def results():
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        f = jax.jit(lambda params, x: nnx.merge(graphdef, params, rest)(x))
        y, vjp = jax.vjp(f, params, x)
        return jax.tree.leaves((y, vjp(y)))

    want = results()
    monkeypatch.setattr(hardware, "faster", lambda *_: True)
    for got, three in zip(results(), want, strict=True):
        got, three = (np.asarray(a, np.float64) for a in (got, three))
        assert np.linalg.norm(got - three) <= 0.02 * np.linalg.norm(three)
