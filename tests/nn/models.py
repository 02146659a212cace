"""Models and helpers of these tests."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_sparse24 as s24

T, d, f = 8, 16, 24
FST = s24.methods.FST(refresh_every=4)
METHODS = {"Dense": s24.methods.Dense(), "STE": s24.methods.STE(), "FST": FST}


class PlainFFN(nnx.Module):
    """What a user had before: the same block of `nnx.Linear`."""

    def __init__(self, d, f, *, rngs, **linear):
        self.up = nnx.Linear(d, f, rngs=rngs, **linear)
        self.down = nnx.Linear(f, d, rngs=rngs, **linear)

    def __call__(self, x):
        return self.down(jnp.square(jax.nn.relu(self.up(x))))


class PlainGatedFFN(nnx.Module):
    def __init__(self, d, f, *, rngs, **linear):
        self.gate = nnx.Linear(d, f, rngs=rngs, **linear)
        self.up = nnx.Linear(d, f, rngs=rngs, **linear)
        self.down = nnx.Linear(f, d, rngs=rngs, **linear)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


BLOCKS = {"FFN": (s24.nn.FFN, PlainFFN), "GatedFFN": (s24.nn.GatedFFN, PlainGatedFFN)}


class Net(nnx.Module):
    """Attention-like dense layer, a sparse FFN and a sparse head, so that sparse and plain parameters mix."""

    def __init__(self, method=FST, *, rngs):
        self.mix = nnx.Linear(d, d, rngs=rngs)
        self.norm = nnx.LayerNorm(d, rngs=rngs)
        self.block = s24.nn.FFN(d, f, method=method, use_bias=True, activation="gelu", rngs=rngs)
        self.head = s24.nn.Linear(d, d, method=method, rngs=rngs)

    def __call__(self, x):
        return self.head(x + self.block(self.norm(self.mix(x))))


def inputs(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape or (T, d))


def arrays(tree) -> dict:
    """Flat {path: numpy array} of a state, or of a module."""
    state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    words = {
        path: jax.random.key_data(v[...]) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v[...]
        for path, v in nnx.to_flat_state(state)
    }
    return {path: np.asarray(v) for path, v in words.items()}


def assert_same(got, want):
    got, want = arrays(got), arrays(want)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=str(path))


@nnx.jit
def _gradient(model, x):
    return nnx.grad(lambda m: (m(x) ** 2).mean())(model)


def noise(model):
    """The gradient of all parameters, which holds the noise of the weight-gradient products."""
    return arrays(_gradient(model, inputs()))
