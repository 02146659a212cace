"""A readable error where forward-mode differentiation meets a `custom_vjp`, under jit too.

`reverse_only(op, x)` is the identity. Its tangent passes through a linear primitive that transposes, so
reverse mode goes through, and that refuses to be evaluated, which only forward mode would do."""

from functools import partial

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _refuse(*_, op):
    raise TypeError(
        f"{op} is differentiable in reverse mode only, because its backward products are not the "
        f"transpose of its forward one. Use jax.grad or jax.vjp; for jvp, use the dense product x @ w."
    )


_tangent = Primitive("s24_reverse_only_tangent")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x, *, op: x)
mlir.register_lowering(_tangent, lambda context, x, *, op: _refuse(op=op))
ad.deflinear2(_tangent, lambda cotangent, x, *, op: [cotangent])
batching.defvectorized(_tangent)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def reverse_only(op: str, x: jax.Array) -> jax.Array:
    return x


@reverse_only.defjvp
def _reverse_only_jvp(op, primals, tangents):
    return primals[0], _tangent.bind(tangents[0], op=op)
