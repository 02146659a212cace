"""A program of a user, for a type checker alone: `make lint` runs mypy over it. It is never executed."""

import dataclasses
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import jax_sparse24 as s24

x, w = jnp.ones((8, 16)), np.ones((16, 32), np.float32)
key = jax.random.key(0)

# Operations take what jax.numpy takes, and return arrays and packed arrays.
assert_type(s24.mask24(w, 0), jax.Array)
assert_type(s24.mvue24(key, x, axis=-1, exact=False), jax.Array)
packed = s24.pack24(x, -1)
assert_type(packed, s24.Packed24)
assert_type(packed.T.todense(), jax.Array)
assert_type(s24.pack24(x, (-1, -2)), tuple[s24.Packed24, s24.Packed24])
assert_type(s24.matmul(packed, w, activation="relu", preferred_element_type=jnp.float32), jax.Array)
assert_type(s24.matmul(x, s24.pack_vnm(w, 16, 16, axis=-2)), jax.Array)
mask, along_in, along_out = s24.transposable_pack24(w)
assert_type(along_out, s24.Packed24)

# The engine, methods and phases.
method = s24.methods.FST(decay=6e-5)
assert_type(s24.sparse_dot(x, w, method, method.init(jnp.asarray(w)), key), jax.Array)
phase = s24.Schedule((s24.Phase("sparse", 10, sparse=True),)).phase_at(3)
assert_type(phase, s24.Phase)

# Layers, and models that become sparse.
ffn = s24.nn.FFN(16, 64, method=method, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
assert_type(ffn(x), jax.Array)
model = s24.sparsify(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), s24.methods.STE(), where=".*")
assert_type(s24.verify(model).ok, bool)
s24.refresh(model, 3)
s24.explain(model, shape=(8, 16, 64), dtype="bfloat16")
dense: linen.Module = s24.linen.Dense(32, method=method)
variables = s24.linen.refresh(dense.init(key, x), method)
assert_type(s24.linen.masks(variables, method), dict[str, Any])


# A method of the user's own.
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept(s24.methods.Method):
    refresh_every: int = 10
    token_blocks: int = 2
    tiles = (4, 1)

    def init(self, w: jax.Array, role: str = "w") -> dict[str, jax.Array]:
        return {"mask": s24.mask24(w, -2)}


own: s24.methods.Method = Kept(refresh_every=5)
assert_type(own.refresh_every, int)

# Training.
optimiser: optax.GradientTransformation = s24.optim.for_method(method, 1e-3, 100)
loop = s24.Loop(ffn, lambda model, batch: jnp.mean(model(batch) ** 2), optimiser, 100)
state, metrics = loop.advance(loop.init(), x, 0)
assert_type(metrics, dict[str, jax.Array])
assert_type(s24.density(x), jax.Array)

function = s24.Function(lambda params, x: x @ params["w"], {"w": jnp.asarray(w)}, method, (x,))
assert_type(function, s24.Function)

# What a checker must refuse. Each of these lines is an error of its own kind, or mypy says that it is none.
s24.mask25(w, 0)  # type: ignore[attr-defined]
s24.mask24(w, "0")  # type: ignore[arg-type]
s24.nn.FFN(16, 64, method="FST", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
s24.Phase("sparse", 10)  # type: ignore[call-arg]
s24.methods.FST(decays=1.0)  # type: ignore[call-arg]
packed.todens()  # type: ignore[attr-defined]
