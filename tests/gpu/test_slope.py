"""The pass that makes dY1 and packs its estimate: the bits of both steps on a CPU, and blocks with and
without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.engine import fusions
from jax_sparse24.ops.mvue import key_of_shard, mvue_pack24
from jax_sparse24.ops.reference.saved import SLOPES
from jax_sparse24.ops.reference.slope import activation_gradient
from jax_sparse24.ops.slope import SLOPE_MVUE_PACK, slope_mvue_pack24
from tests.ops.data import adversarial, assert_same_bits, from_words
from tests.ops.test_identity import on

KEYS = [np.array(words, np.uint32) for words in ([24, 4], [18, 47, 1, 2, 5])]  # the second is of a shard
# Whole tiles; an odd number of them, the last tile of columns partly outside; columns of one access; steps.
SHAPES = [(512, 256), (384, 200), (1152, 8), (1024, 1032), (132, 24), (256, 20)]


def both(key, saved, dy2, activation, exact):
    return slope_mvue_pack24(key, saved, dy2, activation, exact, implementation="ffi")


def assert_right(key, saved, dy2, activation, exact):
    """The bits of both steps on a CPU."""
    got = on("cuda", lambda s, d: both(key, s, d, activation, exact), saved, dy2)
    dy1 = on("cpu", lambda s, d: activation_gradient(s, d, activation), saved, dy2)
    assert_same_bits(got[0], dy1)
    assert_same_bits(got[1], on("cpu", lambda d: mvue_pack24(key, d, -2, exact), dy1))


def takes_one_pass(shape, dtype):
    x = jax.ShapeDtypeStruct(shape, dtype)
    options = {"activation": "relu", "exact": True, "compressed": False, "implementation": "ffi"}
    return SLOPE_MVUE_PACK.in_one_pass(None, x, x, **options)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_bits(shape, activation, exact, dtype):
    assert takes_one_pass(shape, dtype) == (dtype != "float32" and shape[0] % 128 == shape[1] % 8 == 0)
    for key in KEYS:
        assert_right(key, adversarial(shape, dtype, 1), adversarial(shape, dtype, 2), activation, exact)


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value_of_16_bits(activation, dtype):
    """Roots are rounded correctly."""
    saved = from_words(np.arange(2**16, dtype=np.uint16).reshape(256, 256), dtype)
    for factors in ([1.0, 1.7, -3e-3, 0.0], [-0.0, np.inf, np.nan, 6e-8]):
        dy2 = np.tile(np.asarray(factors, saved.dtype), (256, 64))
        assert_right(KEYS[0], saved, dy2, activation, True)


def test_vmap_broadcasts():
    saved, dy2 = (np.stack([adversarial((128, 72), "bfloat16", 3 * n + m) for m in range(3)]) for n in (0, 1))
    keys = jnp.stack([key_of_shard(jax.random.key(1), n, 2, 5) for n in range(3)])
    for axes in ((0, 0, 0), (0, None, 0), (None, 0, 0), (0, 0, None)):
        operands = [x if a == 0 else x[0] for x, a in zip((keys, saved, dy2), axes, strict=True)]
        got = jax.vmap(lambda *a: both(*a, "squared_relu", True), axes)(*operands)
        for n in range(3):
            own = [x[n] if a == 0 else x for x, a in zip(operands, axes, strict=True)]
            assert_same_bits(jax.tree.map(lambda x, n=n: x[n], got), both(*own, "squared_relu", True))


def test_large():
    """More than 2^31 bytes: indices need 64 bits."""
    words = jax.random.bits(jax.random.key(1), (65536, 16640), np.uint16)
    dy2 = jax.lax.bitcast_convert_type(words & 0xBFFF, jnp.bfloat16)  # -2 to 2
    saved = jax.lax.bitcast_convert_type(words >> 2, jnp.bfloat16)  # 0 to 2
    dy1, packed = jax.jit(lambda *a: both(KEYS[0], *a, "squared_relu", True))(saved, dy2)
    want = jax.jit(lambda *a: activation_gradient(*a, "squared_relu"))(saved[-128:], dy2[-128:])
    assert_same_bits(dy1[-128:], want)
    del saved, dy2
    again = mvue_pack24(KEYS[0], dy1, -2, implementation="ffi")
    assert bool(jnp.all(packed.values == again.values)) and bool(jnp.all(packed.metadata == again.metadata))


@pytest.mark.parametrize(
    "method", [s24.methods.FST(), s24.methods.FST(mvue="approximate"), s24.methods.SSTE()]
)
@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["ffi", "cusparselt"])
def test_a_block_in_one_pass_and_in_several(method, activation, dtype, implementation, request, monkeypatch):
    """Gradients, bit for bit."""
    if implementation == "cusparselt":
        request.getfixturevalue("cusparselt")
    shapes = (512, 128), (128, 512), (512, 128), (512, 128)
    arrays = [np.random.default_rng(i).normal(size=n) / 2 for i, n in enumerate(shapes)]
    arrays = [x.astype(jnp.dtype(dtype)) for x in arrays]
    state = {
        name: method.init(jnp.asarray(w), name) for name, w in zip(("w1", "w2"), arrays[1:3], strict=True)
    }
    runs, one_pass = [], fusions.SlopeMVUE.run
    # The product of Hopper with the slope would go first.
    monkeypatch.setattr(fusions.Sloped, "matches", lambda *_, **__: False)
    monkeypatch.setattr(fusions.SlopeMVUE, "run", lambda *a: runs.append(a) or one_pass(*a))

    def gradients():
        def block(*args):
            options = {"activation": activation, "implementation": implementation}
            return s24.sparse_ffn(*args, method, state, jax.random.key(2), **options)

        def both(*args):
            y, vjp = jax.vjp(block, *args[:3])
            return y, *vjp(args[3])

        return jax.jit(both)(*arrays)

    one = gradients()
    assert len(runs) == 1
    monkeypatch.setattr(fusions.SlopeMVUE, "matches", lambda *_: False)
    assert_same_bits(one, gradients())
    assert len(runs) == 1
