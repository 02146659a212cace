"""Flax's table of a model: it runs every method of a module by itself, and marks what the module holds."""

import jax
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24

METHODS = s24.methods
X = jax.random.normal(jax.random.key(0), (8, 16))


def layer(kind, method, **options):
    return getattr(s24.nn, kind)(16, 32, **options, method=method, rngs=nnx.Rngs(0))


def sparsified():
    rngs = nnx.Rngs(0)
    plain = nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), jax.nn.relu, nnx.Linear(32, 16, rngs=rngs))
    return s24.sparsify(plain, METHODS.STE())


def routed():
    model = layer("FFN", METHODS.Venom(v=16, m=8, clusters=2))
    s24.nn.arrange(model)
    return model


MODELS = {
    "Linear": lambda: layer("Linear", METHODS.SSTE()),
    "Linear with adapters": lambda: layer("Linear", METHODS.SLoPe(rank=4)),
    "FFN": lambda: layer("FFN", METHODS.FST()),
    "FFN with routing": routed,
    "GatedFFN": lambda: layer("GatedFFN", METHODS.FST()),
    "sparsified": sparsified,
}


def below(kind):
    return {kind}.union(*map(below, kind.__subclasses__()))


@pytest.fixture(autouse=True)
def classes_as_they_were():
    """Flax leaves what a class has inherited on it, where other tests would take it for the class's own."""
    before = {kind: set(vars(kind)) for kind in below(nnx.Module)}
    yield
    for kind, own in before.items():
        for name in set(vars(kind)) - own:
            delattr(kind, name)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_shown_and_can_be_used_afterwards(name, capsys):
    model, other = MODELS[name](), MODELS[name]()
    table = nnx.tabulate(model, X)
    assert type(model).__name__ in table and "float32" in table
    for each in (model, other):
        s24.nn.refresh(each, 1)
    for here, there in zip(*(jax.tree.leaves(nnx.state(each)) for each in (model, other)), strict=True):
        np.testing.assert_array_equal(here, there)
    np.testing.assert_array_equal(model(X), other(X))
    said = []
    for each in (model, other):
        s24.explain(each)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "w" in said[0]
