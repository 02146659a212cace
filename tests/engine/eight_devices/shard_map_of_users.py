"""Checks in a `jax.shard_map` of the user, and of operations outside of one."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from jax_sparse24.engine.vectors import vector_dot
from tests.engine.eight_devices.common import (
    KERNELS,
    KEY,
    METHODS,
    T,
    assert_near,
    d,
    draw,
    f,
    mesh,
    states,
)


def in_shards(function, axes, *specs, check_vma=True, **sizes):
    """The mean over the shards of `dp` of a function of local arrays."""

    def local(*arrays):
        return jax.lax.pmean(function(*arrays), axes)

    options = {"mesh": mesh(*(sizes or {"dp": 4}).values(), names=tuple(sizes or {"dp": 4}))}
    return jax.shard_map(local, in_specs=specs, out_specs=P(), check_vma=check_vma, **options)


def check_every_method_is_differentiated_in_a_users_shard_map():
    """Types agree with the check that JAX makes by default: of weights that are equal in all shards, of ones
    that are cut over `tp`, and of their state."""
    x, w1, w2 = draw(0, (T, d), (d, f), (f, d))
    for name, method in METHODS.items():
        state, linear = states(method, w1, w2), method.init(w1)
        for implementation in (None, "reference"):
            options = {"implementation": implementation}

            def ffn(x, w1, w2, state, method=method, options=options):
                return (s24.sparse_ffn(x, w1, w2, method, state, KEY, **options) ** 2).mean()

            def dot(x, w, state, method=method, options=options):
                return (s24.sparse_dot(x, w, method, state, KEY, **options) ** 2).mean()

            gradients = jax.grad(in_shards(ffn, "dp", P("dp"), P(), P(), P()), argnums=(0, 1, 2))
            found = jax.eval_shape(gradients, x, w1, w2, state)
            assert [g.shape for g in found] == [x.shape, w1.shape, w2.shape], name
            if method.needs_block:
                continue
            columns = jax.tree.map(lambda s: P(None, "tp") if s.shape == w1.shape else P(), linear)
            if implementation is None and name != "BiMask":  # whose state is an order of all columns
                total = in_shards(dot, ("dp", "tp"), P("dp"), P(None, "tp"), columns, dp=4, tp=2)
                jax.eval_shape(jax.grad(total, argnums=(0, 1)), x, w1, linear)


def check_gated_blocks_and_layers_in_a_users_shard_map():
    x, learned = draw(0, (T, d))[0], s24.methods.Venom(v=16, m=8, clusters=4, routing="learned")
    for block in (
        s24.nn.GatedFFN(d, f, method=s24.methods.FST(), implementation=KERNELS, rngs=nnx.Rngs(0)),
        s24.nn.FFN(d, f, method=learned, rngs=nnx.Rngs(0)),
    ):
        graph, parameters, rest = nnx.split(block, nnx.Param, ...)

        def loss(x, parameters, rest, graph=graph):
            return (nnx.merge(graph, parameters, rest)(x) ** 2).mean()

        gradients = jax.grad(in_shards(loss, "dp", P("dp"), P(), P()), argnums=1)
        jax.eval_shape(gradients, x, parameters, rest)


def check_values_in_a_users_shard_map():
    """Equal to the mean over shards on one device, where each has the key of its shard."""
    x, w1, w2 = draw(1, (T, d), (d, f), (f, d))
    method = s24.methods.FST()
    state, words = states(method, w1, w2), jax.random.key_data(KEY)

    def loss(x, w1, w2, key):
        options = {"activation": "relu", "implementation": KERNELS}
        return s24.sparse_ffn(x, w1, w2, method, state, key, **options).sum()

    whole = in_shards(loss, "dp", P("dp"), P(), P(), P())
    got = jax.jit(jax.grad(whole, argnums=(0, 1, 2)))(x, w1, w2, words)
    keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(KEY, i)))(jnp.arange(4))

    def on_one_device(x, w1, w2):
        shards = x.reshape(4, T // 4, d)
        return jax.lax.map(lambda part: loss(part[0], w1, w2, part[1]), (shards, keys)).mean()

    want = jax.jit(jax.grad(on_one_device, argnums=(0, 1, 2)))(x, w1, w2)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def check_vectors_that_vmap_joins():
    """In a layer of Equinox: in shards of the user, and over explicit axes. Their result had a type without
    axes of the mesh, so that no gradient could be taken and no bias added."""
    (x, w), method = draw(3, (T, d), (d, f)), s24.methods.FST(mvue=None)
    state = method.init(w)

    def loss(x, w):
        return ((jax.vmap(lambda x: vector_dot(x, w, method, state))(x) + jnp.ones(f)) ** 2).mean()

    want = jax.grad(loss, argnums=(0, 1))(x, w)
    assert_near(jax.jit(jax.grad(in_shards(loss, "dp", P("dp"), P()), argnums=(0, 1)))(x, w), want)
    with jax.set_mesh(mesh(4, 2, explicit=True)):
        cut = jax.device_put((x, w), (P("dp"), P()))
        assert_near(jax.jit(jax.grad(loss, argnums=(0, 1)))(*cut), want)


def check_shards_draw_different_numbers():
    """Equal data in all shards, with and without the check of `shard_map`."""
    x, w, dy = draw(2, (16, d), (d, f), (16, f))
    method = s24.methods.FST()
    state = method.init(w)

    def weight_gradient(x, w, dy):
        return jax.vjp(lambda w: s24.sparse_dot(x, w, method, state, KEY), w)[1](dy)[0][None]

    for check_vma in (True, False):
        specs = {"in_specs": (P(), P(), P()), "out_specs": P("dp"), "check_vma": check_vma}
        if check_vma:  # data that may differ

            def run(x, w, dy):
                return weight_gradient(*jax.lax.pcast((x, w, dy), "dp", to="varying"))
        else:
            run = weight_gradient
        found = jax.jit(jax.shard_map(run, mesh=mesh(4), **specs))(x, w, dy)
        assert len({np.asarray(g).tobytes() for g in found}) == 4, check_vma


def check_operations_under_explicit_axes_name_shard_map():
    """Whatever would run: what a table says about a size does not decide whether a call is allowed."""
    explicit = mesh(4, 2, explicit=True)
    with jax.set_mesh(explicit):
        x = jax.device_put(draw(3, (T, d))[0], P("dp", None))
        for name, call in {
            "mask24": lambda x: s24.mask24(x, -1),
            "pack24": lambda x: s24.pack24(x, -1),
            "mvue24": lambda x: s24.mvue24(KEY, x, -1),
            "matmul": lambda x: s24.matmul(x, s24.pack24(jnp.ones((d, f)), -2)),  # dense at this size, too
        }.items():
            for run in (call, jax.jit(call)):
                try:
                    run(x)
                except ValueError as error:
                    text = str(error)
                    assert name in text and "P('dp', None)" in text and "jax.shard_map(" in text, text
                else:
                    raise AssertionError(f"{name} took an operand that is cut over an explicit axis")
        local = jax.shard_map(lambda x: s24.mask24(x, -1), in_specs=P("dp"), out_specs=P("dp"))
        np.testing.assert_array_equal(local(x), s24.mask24(np.asarray(x), -1))
        whole = jax.device_put(draw(3, (T, d))[0], P())
        np.testing.assert_array_equal(s24.mask24(whole, -1), s24.mask24(np.asarray(x), -1))
