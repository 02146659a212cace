"""`vector_dot`: what `jax.vmap` maps over are the tokens of one product, and a weight is one, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.engine.vectors import vector_dot

FST, KEY = s24.methods.FST(), jax.random.key(3)
d, f = 4, 8
W = jax.random.normal(jax.random.key(0), (2, d, f))
STATE = FST.init(W)
X, DY = (jax.random.normal(jax.random.key(n), (2, 4, width)) for n, width in ((1, d), (2, f)))


def one(x, w, state):
    return vector_dot(x, w, FST, state, KEY)


def whole(x, w, state):
    return s24.sparse_dot(x, w, FST, state, KEY)


def over(x, w, state):
    """Every token by itself, the sequences along another axis inside."""
    shared = None, None
    return jax.vmap(jax.vmap(one, (0, *shared)), (1, *shared), 1)(x.swapaxes(0, 1), w, state).swapaxes(0, 1)


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), a, b)


def test_a_batch_of_vectors_is_one_product():
    """Also in layers that a scan runs and that are computed twice: estimates have the bits of one product."""

    def outputs(product):
        def run(x, w):
            def layer(_, each):
                return None, jax.checkpoint(product)(x, *each)

            return jax.lax.scan(layer, None, (w, STATE))[1]

        y, pull = jax.vjp(run, X, W)
        return y, pull(jnp.stack([DY, DY]))

    close(*(jax.jit(outputs, static_argnums=0)(product) for product in (over, whole)))


def test_gradients_of_each_sequence_are_its_own():
    def gradient(product, x, dy):
        return jax.grad(lambda w: jnp.sum(product(x, w, jax.tree.map(lambda a: a[0], STATE)) * dy))(W[0])

    def tokens(x, w, state):
        return jax.vmap(one, (0, None, None))(x, w, state)

    got = jax.jit(jax.vmap(lambda x, dy: gradient(tokens, x, dy)))(X, DY)
    close(got, jnp.stack([gradient(whole, x, dy) for x, dy in zip(X, DY, strict=True)]))


def test_weights_beside_each_other_have_products_of_their_own():
    """Whether they are mapped over outside of the tokens or inside."""
    shared = None, None

    @jax.jit
    def both(x):
        outside = jax.vmap(lambda w, state: jax.vmap(one, (0, *shared))(x, w, state))(W, STATE)
        inside = jax.vmap(lambda x: jax.vmap(one, (None, 0, 0))(x, W, STATE), out_axes=1)(x)
        return outside, inside

    want = jnp.stack([whole(X[0], W[i], jax.tree.map(lambda a: a[i], STATE)) for i in range(2)])  # noqa: B023
    close(both(X[0]), (want, want))


def test_what_cannot_be_is_said():
    state = jax.tree.map(lambda a: a[0], STATE)
    for error, text, call in (
        (
            TypeError,
            "no derivative in forward mode",
            lambda x: jax.jvp(lambda x: one(x, W[0], state), (x,), (x,)),
        ),
        (
            ValueError,
            "size 1 along axis -2, .*not a multiple of 4",
            jax.grad(lambda x: one(x, W[0], state).sum()),
        ),
        (ValueError, "takes 4 features, but its input has 8", lambda x: one(jnp.ones(8), W[0], state)),
    ):
        with pytest.raises(error, match=text):
            call(X[0, 0])
