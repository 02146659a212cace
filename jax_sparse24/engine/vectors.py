"""Sparse products of vectors that `jax.vmap` joins: what it maps over are the tokens of one product.

Under `jax.vmap`, `sparse_dot` of a vector would be a product of each token by itself, in which nothing can be
put into groups of tokens. `vector_dot` is a primitive, whose batch is one product of all tokens, as that of a
dense product is. Its derivatives are those of `sparse_dot`, as linear functions of the tangents that only
`jax.grad`'s transposition evaluates, so that a gradient for each token is one for each token."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_sparse24.engine.linear import sparse_dot
from jax_sparse24.patterns import key_of

_PRODUCT, _TANGENT = Primitive("s24_vectors"), Primitive("s24_vectors_tangent")


def vector_dot(
    x: jax.Array,
    w: jax.Array,
    method: Any,
    state: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """`x @ w` as `sparse_dot` computes it, of all tokens that `jax.vmap` maps over at once.

    Where `jax.vmap` maps over weights, too, every weight has a product of its own.

    x: (..., d), such as one token.
    w: (d, f), of the dtype of x.
    method, implementation: as in `sparse_dot`.
    state, key: as in `sparse_dot`; no gradient goes through them.

    Returns: (..., f).
    Raises: as `sparse_dot`; TypeError in forward mode."""
    words = None if key is None else jax.random.key_data(key)
    rest, structure = jax.tree.flatten(jax.lax.stop_gradient((dict(state), words)))
    options = {"structure": structure, "method": method, "implementation": implementation, "stacked": 0}
    # Arguments that do not fit are refused where the product is called, not where it is lowered.
    jax.eval_shape(partial(_compute, **options), x, w, *rest)
    return _PRODUCT.bind(x, w, *rest, **options)


def _compute(x, w, *rest, structure, method, implementation, stacked):
    """The product.

    stacked: number of leading axes that every argument has, of products beside each other."""

    def dot(x, w, *rest):
        state, words = jax.tree.unflatten(structure, rest)
        key = None if words is None else key_of(words)
        return sparse_dot(x, w, method, state, key, implementation=implementation)

    for _ in range(stacked):
        dot = jax.vmap(dot)
    return dot(x, w, *rest)


def _no_tangent(*_, **__):
    raise TypeError(
        "vector_dot: a sparse product has no derivative in forward mode; use jax.grad or jax.vjp."
    )


def _differentiate(primals, tangents, **options):
    dx, dw = (ad.instantiate_zeros(tangent) for tangent in tangents[:2])
    return _PRODUCT.bind(*primals, **options), _TANGENT.bind(dx, dw, *primals, **options)


def _transpose(dy, dx, dw, x, w, *rest, **options):
    wanted = [ad.is_undefined_primal(tangent) for tangent in (dx, dw)]
    if isinstance(dy, ad.Zero):
        found = [None, None]
    else:
        found = jax.vjp(lambda x, w: _compute(x, w, *rest, **options), x, w)[1](dy)
    cotangents = [one if want else None for one, want in zip(found, wanted, strict=True)]
    return [*cotangents, *[None] * (2 + len(rest))]


def _join(primitive, inputs, arrays, axes, *, stacked, **options):
    """The rule of `jax.vmap`.

    inputs: the places of arguments that have tokens; all others are weights, or of the method."""
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    own = any(axis is not None for place, axis in enumerate(axes) if place not in inputs)
    front = 0 if own else stacked

    def moved(place, array, axis):
        if not own and place not in inputs:
            return array
        if axis is None:
            shape = (*array.shape[:front], size, *array.shape[front:])
            return jnp.broadcast_to(jnp.expand_dims(array, front), shape)
        return jnp.moveaxis(array, axis, front)

    arrays = [moved(place, *one) for place, one in enumerate(zip(arrays, axes, strict=True))]
    return primitive.bind(*arrays, stacked=stacked + own, **options), front


def _type(x, w, *rest, **options):
    """Of the result: over a mesh it says more than shape and dtype."""
    return jax.make_jaxpr(partial(_compute, **options))(x, w, *rest).out_avals[0]


_PRODUCT.def_abstract_eval(_type)
_PRODUCT.def_impl(jax.jit(_compute, static_argnames=("structure", "method", "implementation", "stacked")))
mlir.register_lowering(_PRODUCT, mlir.lower_fun(_compute, multiple_results=False))
batching.primitive_batchers[_PRODUCT] = partial(_join, _PRODUCT, (0,))
ad.primitive_jvps[_PRODUCT] = _differentiate

_TANGENT.def_abstract_eval(lambda dx, dw, *arrays, **options: _type(*arrays, **options))
_TANGENT.def_impl(_no_tangent)
mlir.register_lowering(_TANGENT, mlir.lower_fun(_no_tangent, multiple_results=False))
batching.primitive_batchers[_TANGENT] = partial(_join, _TANGENT, (0, 2))
ad.primitive_transposes[_TANGENT] = _transpose
