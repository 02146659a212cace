"""Models of three other libraries become sparse, train with FST, and are dense again."""

import equinox as eqx
import jax
from flax import nnx
from gemma.gm.nn import _config, _modules, _transformer
from maxtext.configs import pyconfig
from maxtext.models import llama2

import jax_sparse24 as s24

fst = s24.methods.FST(refresh_every=8)
tokens, places = (jax.numpy.arange(32).reshape(4, 8) % n for n in (16, 8))
vectors, y = jax.random.normal(key := jax.random.key(0), (2, 4, 8, 16))  # batch, tokens, width
config = _config.TransformerConfig(16, 16, 32, 2, 8, 1, None, False, False, [_modules.AttentionType.GLOBAL])
gemma = _transformer.Transformer(config=config)  # a whole model, of Linen
options = "base_emb_dim=16 base_mlp_dim=32 base_num_query_heads=2 base_num_kv_heads=1 head_dim=8"
options += " dtype=float32 attention=dot_product skip_jax_distributed_system=true log_config=false"
config = pyconfig.initialize(["", pyconfig.__file__.replace("pyconfig.py", "base.yml"), *options.split()])
layer = llama2.LlamaDecoderLayer(config, "train", jax.make_mesh((1,), ("data",)), nnx.Rngs(0))
llama, params, rest = nnx.split(layer, nnx.Param, ...)
both = eqx.nn.MultiheadAttention(2, 16, key=key), eqx.nn.MLP(16, 16, 32, 1, key=key)
block = eqx.Partial(lambda a, mlp, x: x + jax.vmap(jax.vmap(mlp))(x + jax.vmap(a)(x, x, x)), *both)
for name, apply, dense, x in (
    ("gemma", lambda params, x: gemma.apply(params, x).logits, gemma.init(key, tokens), tokens),
    ("maxtext", lambda p, x: nnx.merge(llama, p, rest)(x, None, places, True, "train")[0], params, vectors),
    ("equinox", None, block, vectors),
):
    s24.explain(dense if apply is None else s24.Function(apply, dense, s24.methods.Dense(), (x,)))
    sparse = s24.sparsify(dense, fst) if apply is None else s24.Function(apply, dense, fst, (x,))
    s24.explain(sparse)
    loop = s24.Loop(sparse, lambda m, x: ((m(x) - y) ** 2).mean(), s24.optim.for_method(fst, 1e-2, 24), 24)
    state, losses = loop.init(), []
    for step in range(24):
        state, metrics = loop.advance(state, x, step)
        losses.append(float(metrics["loss"]))
    trained = loop.model(state)
    back = s24.densify(trained) if apply is None else jax.tree_util.Partial(apply, trained.params)
    same = (back(x) == trained(x)).all()
    print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}; dense again with the same outputs: {same}")
