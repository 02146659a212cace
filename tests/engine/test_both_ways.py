"""Weights that the forward pass packs for the gradient of its input, too: how often those under one mask are
packed, with which bits of results, and what is kept for the backward pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.ffn import ffn_fwd
from jax_sparse24.engine.fusions import BothWays, Unpacked
from jax_sparse24.engine.gated import Weight, gated_ffn
from tests.native.derived import native_calls
from tests.ops.data import assert_same_bits

T, D, F = 64, 32, 48
KEY = jax.random.key(7)


@pytest.fixture(autouse=True)
def mesh():
    """Of one device, over which nothing is cut."""
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,))):
        yield


def arrays(dtype="float32"):
    shapes = (T, D), (D, F), (F, D), (D, F)
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def states(method, *weights):
    return [method.init(w) for w in weights]


def linear(method, dtype, implementation):
    x, w, *_ = arrays(dtype)
    (state,) = states(method, w)
    return lambda x, w: s24.sparse_dot(x, w, method, state, KEY, implementation=implementation), (x, w)


def ffn(method, dtype, implementation):
    x, w1, w2, _ = arrays(dtype)
    state = dict(zip(("w1", "w2"), states(method, w1, w2), strict=True))
    options = {"implementation": implementation}
    return lambda *args: s24.sparse_ffn(*args, method, state, KEY, **options), (x, w1, w2)


def gated(method, dtype, implementation):
    """Under one rule, because a mesh is in the context."""
    x, up, down, gate = arrays(dtype)
    of = states(method, gate, up, down)

    def run(x, *weights):
        layers = (Weight(w, state, KEY) for w, state in zip(weights, of, strict=True))
        return gated_ffn((x, x), *layers, method, "silu", implementation)

    return run, (x, gate, up, down)


def gradients(run, *args):
    y, vjp = jax.vjp(run, *args)
    return y, *vjp(y)


def packs(run, *args) -> tuple[int, int]:
    """How many calls of kernels in a program pack one way, and both ways, by a mask."""
    targets = [call.params["target_name"] for call in native_calls(jax.make_jaxpr(run)(*args))]
    return targets.count("s24_pack_masked"), targets.count("s24_pack_masked_both")


@pytest.mark.parametrize(("block", "weights"), [(linear, 1), (ffn, 2), (gated, 3)])
def test_a_step_reads_each_weight_once(block, weights):
    """The forward pass alone has no use for the other form."""
    run, args = block(s24.methods.FST(), "float32", "ffi")
    assert packs(partial(gradients, run), *args) == (0, weights)
    assert packs(run, *args) == (weights, 0)


@pytest.mark.parametrize("mask", ["double-pruned", "top-2"])
def test_two_masks_take_two_passes(mask):
    run, args = ffn(s24.methods.FST(mask=mask), "float32", "ffi")
    assert packs(partial(gradients, run), *args) == (4 if mask == "double-pruned" else 2, 0)


@pytest.mark.parametrize(
    ("block", "dtype"), [(linear, "float32"), (ffn, "float32"), (ffn, "bfloat16"), (gated, "bfloat16")]
)
def test_bits_are_those_of_two_passes(block, dtype, implementation, monkeypatch):
    """Of results and all gradients, also where a block is computed again in the backward pass."""

    def found():
        run, args = block(s24.methods.FST(), dtype, implementation)
        assert implementation == "reference" or packs(partial(gradients, run), *args)[0] == expected
        once, again = (partial(gradients, function) for function in (run, jax.checkpoint(run)))
        return jax.jit(once)(*args), jax.jit(again)(*args)

    expected = 0
    at_once = found()
    monkeypatch.setattr(BothWays, "matches", lambda *_: False)
    expected = {linear: 2, ffn: 4, gated: 6}[block]
    assert_same_bits(at_once, found())


@pytest.mark.parametrize("block", [linear, gated])
def test_bits_are_those_of_values_that_are_made_again(block, implementation, monkeypatch):
    """Of a method whose gradient of the input multiplies the values of the forward pass; test_unpacked.py has
    those of an FFN."""

    def found():
        run, args = block(s24.methods.SSTE(), "bfloat16", implementation)
        return [jax.jit(partial(gradients, function))(*args) for function in (run, jax.checkpoint(run))]

    unpacked = found()
    monkeypatch.setattr(Unpacked, "matches", lambda *_: False)
    assert_same_bits(unpacked, found())


def test_packed_weights_are_kept_in_place_of_weights():
    x, w1, w2, _ = arrays("bfloat16")
    method = s24.methods.FST()
    state = dict(zip(("w1", "w2"), states(method, w1, w2), strict=True))
    words = jax.random.key_data(KEY)

    def kept(implementation):
        execution = Execution("test", "ffn", method.ffn_plan(), implementation, "relu")
        _, (_, _, ahead, *weights, _, _, _) = jax.eval_shape(
            partial(ffn_fwd, execution), x, w1, w2, None, None, state, words
        )
        return ahead.weights, weights

    packed, weights = kept("reference")
    assert weights == [None, None]
    sizes = {name: sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(p)) for name, p in packed.items()}
    assert sizes == dict.fromkeys(("w1", "w2"), 2 * D * F * 9 // 16)
    packed, weights = kept(None)  # without measurements products run masked dense
    assert packed == {} and [w.shape for w in weights] == [(D, F), (F, D)]
