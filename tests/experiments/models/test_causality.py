"""What a token's logits may depend on: nothing that comes later, unless the method says that it leaks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments.models import decoder
from experiments.training import step
from experiments.training.monitor import Leak

V, M, L, B, CUT = 16, 8, 32, 4, 20
BLOCKS = {"v": V, "m": M, "clusters": 4}
methods = s24.methods
METHODS = {
    "dense": methods.Dense(),
    "STE": methods.STE(),
    "SR-STE": methods.SRSTE(),
    "SR-STE 1:8": methods.SRSTE(n=1, m=8),
    "STEP": methods.STEP(),
    "FST": methods.FST(),
    "S-STE": methods.SSTE(),
    "FST fp8 row": methods.FST(fp8="row"),
    "FST fp8 tensor": methods.FST(fp8="tensor"),
    "S-STE fp8 row": methods.SSTE(fp8="row"),
    "S-STE fp8 tensor": methods.SSTE(fp8="tensor"),
    "Bi-Mask": methods.BiMask(trials=2),
    "SLoPe": methods.SLoPe(rank=4),
    "AST": methods.AST(distill=0.0),
    "Activation24": methods.Activation24(),
    "Activation24 causal both ways": methods.Activation24(forward="causal"),
    "Activation24 soft weights": methods.Activation24(soft_weights=True, backward_mask="redraw"),
    "Venom": methods.Venom(**BLOCKS),
    "Venom learned": methods.Venom(**BLOCKS, routing="learned"),
    "Venom not sorted": methods.Venom(**BLOCKS, routing="none"),
    "Venom exact": methods.Venom(**BLOCKS, exact=True),
    "Venom dense weights": methods.Venom(**BLOCKS, weights="dense"),
    "Venom cluster": methods.Venom(**BLOCKS, columns="cluster"),
    "Venom cluster exact": methods.Venom(**BLOCKS, columns="cluster", exact=True),
    "Venom cluster learned": methods.Venom(**BLOCKS, columns="cluster", routing="learned"),
    "Venom cluster l2": methods.Venom(**BLOCKS, columns="cluster", metric="l2", layout="adjacent"),
    "Venom statistic": methods.Venom(**BLOCKS, columns="statistic"),
    "Venom statistic learned": methods.Venom(**BLOCKS, columns="statistic", routing="learned"),
}


def logits_of(method, **model):
    """The compiled sparse forward pass of a small decoder, int32 (B, L) to logits."""
    shape = {"layers": 2, "d": 16, "f": 64, "heads": 2, **model}
    made = decoder.Config(**shape).create(method, 256, rngs=nnx.Rngs(params=0, default=1))
    s24.nn.arrange(made)
    s24.refresh(made)
    graphdef, state = nnx.split(made)
    return jax.jit(lambda tokens_BL: nnx.merge(graphdef, state)(tokens_BL))


@functools.cache
def texts():
    """Two batches, int32 (B, L)."""
    return np.random.default_rng(0).integers(0, 256, (2, B, L), np.int32)


def changed(logits, sequence: int) -> np.ndarray:
    """bool (B, L): where logits change with the tokens from CUT on of one sequence."""
    first, other = texts()
    later = first.copy()
    later[sequence, CUT:] = other[sequence, CUT:]
    return np.asarray(jnp.any(logits(first) != logits(later), axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_earlier_logits_are_the_same_bits_unless_the_method_leaks(name):
    method = METHODS[name]
    logits = logits_of(method)
    leaks = False
    for sequence in (0, B - 1):
        moved = changed(logits, sequence)
        assert moved[sequence, CUT:].any()  # the change was seen
        leaks |= moved[sequence, :CUT].any()
        if method.causal:
            assert not moved[:sequence].any() and not moved[sequence + 1 :].any(), "another sequence changed"
    assert leaks == (not method.causal)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "ffi"])
@pytest.mark.parametrize("columns", ["cluster", "statistic"])
def test_no_implementation_leaks(columns, implementation):
    method = methods.Venom(**BLOCKS, columns=columns)
    moved = changed(logits_of(method, implementation=implementation), 1)
    assert moved[1, CUT:].any() and not moved[1, :CUT].any() and not moved[[0, 2, 3]].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FST", "Venom cluster", "Venom statistic", "Venom", "Venom not sorted"])
def test_the_size_of_a_leak(name, monkeypatch):
    """Loss at single positions, where what follows is foreign text, with logits of some positions at a time;
    against a loop over them."""
    monkeypatch.setattr(step, "LOGITS_AT_ONCE", B * 8 * 256)
    monkeypatch.setattr(step, "VOCABULARY_AT_ONCE", 255)
    method = METHODS[name]
    model = decoder.Config(layers=1, d=16, f=64, heads=2).create(
        method, 256, rngs=nnx.Rngs(params=0, default=1)
    )
    s24.nn.arrange(model)
    model.embedding.embedding[...] *= 10  # logits that differ
    graphdef, params, sparse = nnx.split(model, nnx.Param, s24.nn.SparseState)
    first, other = np.random.default_rng(1).integers(0, 256, (2, B, L + 1), np.int32)
    found = Leak({True: graphdef})(params, sparse, [first, other, first, other])
    assert found["leak_error"] == 0  # two pairs that are alike
    if method.causal:
        assert (found["leak"], found["leak_share"]) == (0, 0)
        return
    logits = jax.jit(lambda tokens_BL: model(tokens_BL))
    true, nats, moved = logits(first[:, :-1]), [], []
    for cut in (4, 12, 20, 28):
        blind = logits(np.concatenate([first[:, : cut + 1], other[:, cut + 1 : -1]], axis=1))
        at = lambda logits_BLV, cut=cut: optax.softmax_cross_entropy_with_integer_labels(  # noqa: E731
            logits_BLV[:, cut], first[:, cut + 1]
        )
        nats.append(np.mean(at(blind) - at(true)))
        moved.append(np.mean(np.any(np.asarray(blind != true)[:, : cut + 1], axis=-1)))
    np.testing.assert_allclose(found["leak"], np.mean(nats), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found["leak_share"], np.mean(moved), rtol=1e-5)
    assert found["leak_share"] > 0.5 and found["leak"] != 0
