"""Models of three other libraries become sparse, train, and are dense again (tests/test_foreign.py)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from gemma.gm.nn import _modules as gemma
from maxtext.layers import linears as maxtext

import jax_sparse24 as s24

d, f = 16, 32
x, y = jax.random.normal(jax.random.key(0), (2, 4, 8, d))  # batch, tokens, width

block = gemma.FeedForward(features=d, hidden_dim=f, transpose_gating_einsum=True)  # Linen
mlp = eqx.nn.MLP(d, d, f, 1, key=jax.random.key(1))
mlp_params, mlp_static = eqx.partition(mlp, eqx.is_array)
graphdef, dense_params = nnx.split(maxtext.DenseGeneral(d, d, rngs=nnx.Rngs(0)))
models = {
    "gemma": (block.apply, block.init(jax.random.key(2), x)),
    "equinox": (lambda p, x: jax.vmap(jax.vmap(eqx.combine(p, mlp_static)))(x), mlp_params),
    "maxtext": (lambda p, x: nnx.merge(graphdef, p)(x), dense_params),
}
for name, (apply, params) in models.items():
    print(f"{name}\n{s24.intercept(apply, s24.methods.STE(), where='nothing').explain(params, x)}")
    sparse, tx = s24.intercept(apply, s24.methods.STE()), optax.adam(1e-2)
    print(sparse.explain(params, x))
    step = jax.jit(jax.value_and_grad(lambda p, sparse=sparse: jnp.mean((sparse(p, x) - y) ** 2)))
    opt, losses = tx.init(params), []
    for _ in range(20):
        loss, grads = step(params)
        updates, opt = tx.update(grads, opt)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; dense again: {jnp.shape(apply(params, x))}")
