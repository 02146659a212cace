"""Checks of errors that say what to write."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from tests.engine.eight_devices.common import EXACT, KEY, T, d, draw, f, mesh, states


def refused(text, kind=ValueError):
    return pytest.raises(kind, match=re.escape(text))


def check_errors_of_partitions():
    columns = {"x": P("dp"), "w1": P(None, "tp"), "w2": P("tp")}

    def raises(
        text,
        specs=columns,
        method=EXACT["STE"],
        T=T,
        f=f,
        sizes=(4, 2),
        shape=None,
        gradient=False,
        kind=ValueError,
    ):
        def call(x, w1, w2):
            return s24.sparse_ffn(x, w1, w2, method, states(method, w1, w2), KEY, specs=specs).sum()

        arrays = draw(6, shape or (T, d), (d, f), (f, d))
        with jax.set_mesh(mesh(*sizes)), refused(text, kind):
            jax.eval_shape(jax.grad(call) if gradient else call, *arrays)

    raises("x along axis 0 of size 66 does not divide into 4 shards (dp = 4)", T=66)
    raises("w1 along axis -1 of size 65 does not divide into 2 shards", f=65)
    raises("no axis 'model'; it has 'dp', 'tp'", {"w1": P("model")})
    raises("they share a dimension", {"x": P("dp"), "w1": P(None, "tp")})
    raises("specs name w3", {"w3": P()})
    raises("w1 has 2 axes and cannot be cut by P(None, None, 'tp'). Name", {"w1": P(None, None, "tp")})
    raises("x is cut by 'dp', which is no jax.sharding.PartitionSpec", {"x": "dp"}, kind=TypeError)
    raises("specs must be a dict of PartitionSpecs by operand, got [", [P("dp")], kind=TypeError)
    raises("cuts two dimensions", {"w1": P("tp", "tp"), "w2": P("tp")})
    raises("only its first axis and its features may be cut", {"x": P(None, "dp")}, shape=(4, 8, d))
    raises("x of shape (32,) is one vector, without the axis of tokens that P('dp') cuts", shape=(d,))
    unknown = type("Own", (s24.methods.BiMask,), {"state_axes": {}})(trials=1)
    raises("Own keeps 'order' of shape (64,) for w1 of shape (32, 64), which mesh axis tp", method=unknown)
    order = s24.methods.BiMask(trials=1)
    raises("into 2 shards (tp), but with feature_blocks=1 its order", method=order, gradient=True)
    raises("token_blocks=6 is no multiple of the 4 shards", method=s24.methods.Activation24(token_blocks=6))
    raises("operand w2 of product F2, one shard of it, of shape (62, 32)", f=124)
    raises("of the 124 features along axis -2 it has one part in 2 (tp = 2)", f=124)
    x, w = draw(6, (T, d), (d, f))
    with refused("jax.set_mesh"):
        s24.sparse_dot(x, w, s24.methods.STE(), specs={"x": P("dp")})


def check_tokens_of_a_shard_are_told():
    """Of how many in all, and over which mesh axes and blocks they are cut."""
    for method, text in (
        (s24.methods.FST(), "of shape (3, 32) has size 3 along axis -2, which is not a multiple of 4"),
        (s24.methods.FST(), "of the 24 tokens along axis -2 it has one part in 8 (dp = 8)."),
        (s24.methods.Activation24(token_blocks=16), "it has one part in 16 (dp = 8 * token_blocks = 2)."),
    ):
        tokens = 24 * method.token_blocks // (8 if method.token_blocks > 1 else 1)
        block = s24.nn.FFN(d, f, method=method, axes=("embed", "mlp"), rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(block, nnx.Param, ...)

        def loss(params, x, graph=graph, rest=rest):
            return nnx.merge(graph, params, rest)(x).sum()

        with jax.set_mesh(mesh(8)), refused(text):
            jax.eval_shape(jax.grad(loss), params, jnp.ones((tokens, d)))


def check_what_lies_otherwise_than_is_declared_is_refused():
    """The input, along its rows and its features, weights and masks; under explicit axes also within jit."""
    (x, w), method = draw(6, (8, 8, d), (d, f)), s24.methods.FST(mvue=None)
    mask, declared = method.init(w)["mask"], {"x": P("dp"), "w": P(None, "tp"), "mask": P(None, "tp")}

    def call(x, w, mask):
        return s24.sparse_dot(x, w, method, {"mask": mask}, specs={n: declared[n] for n in ("x", "w")})

    def called(run, **others):
        specs = declared | others
        run(*(jax.device_put(a, specs[n]) for n, a in (("x", x), ("w", w), ("mask", mask))))

    for explicit in (True, False):
        move = "jax.sharding.reshard" if explicit else "jax.device_put"
        with jax.set_mesh(mesh(4, 2, explicit=explicit)):
            called(call)
            for run in (call, jax.jit(call)) if explicit else (call,):
                for spec in (P(), P("tp"), P("dp", None, "tp")):
                    with refused(f"Move it with {move}(x, P('dp')), or declare what it is"):
                        called(run, x=spec)
                with refused("only its first axis" if explicit else f"Move it with {move}(x"):
                    called(run, x=P("dp", "tp"))
                with refused("w is declared to be cut by P(None, 'tp'), but it is cut by P('tp'"):
                    called(run, w=P("tp"))
                for spec in (P(), P("tp")):
                    with refused(
                        "state 'mask' of w is declared to be cut by P(None, 'tp'), but it is cut by"
                    ):
                        called(run, mask=spec)
            # What the weight takes as it comes need not be declared, and moves nowhere.
            row = {"x": P("dp"), "w": P("tp")}
            placed = (jax.device_put(x, P("dp", None, "tp")), jax.device_put(w, P("tp")))
            s24.sparse_dot(*placed, s24.methods.STE(), specs=row)


def check_tokens_of_experts_lie_as_declared():
    x = draw(6, (8, 8, d))[0]
    options = {"experts": 8, "method": s24.methods.STE(), "expert_axis": "expert", "rngs": nnx.Rngs(0)}
    for explicit in (True, False):
        moe, cut = s24.nn.MoE(d, f, **options), mesh(4, 2, names=("fsdp", "tp"), explicit=explicit)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            state = nnx.state(moe)
            nnx.update(moe, jax.device_put(state, nnx.get_named_sharding(state, cut)))
            moe(jax.device_put(x, P("fsdp")))
            for spec in (P(), P(None, "fsdp"), P("fsdp", None, "tp"), P(("fsdp", "tp"))):
                with refused("MoE: x is declared to be cut by P('fsdp'), but it is cut by P("):
                    moe(jax.device_put(x, spec))
            with refused("MoE: x of shape (32,) is one vector, without the axis of tokens that fsdp cuts"):
                moe(x[0, 0])


def check_kernels_lie_as_the_axes_of_their_layers_say():
    """The error named the operand of an engine, such as w1, which no layer has."""
    for kind, name in (
        (s24.nn.Linear, "kernel"),
        (s24.nn.FFN, "up.kernel"),
        (s24.nn.GatedFFN, "gate.kernel"),
    ):
        for explicit in (True, False):
            with jax.set_mesh(mesh(4, 2, explicit=explicit)):
                layer = kind(d, f, method=s24.methods.STE(), axes=("embed", "mlp"), rngs=nnx.Rngs(0))
                graph, state = nnx.split(layer)
                cut = jax.tree.map(lambda x: jax.device_put(x, P("tp") if x.ndim == 2 else P()), state)
                told = (
                    f"{kind.__name__}: {name} is declared to be cut by P(None, 'tp'), but it is cut by P('tp'"
                )
                with refused(told):
                    nnx.merge(graph, cut)(jax.device_put(jnp.ones((8, d)), P("dp")))


def check_micro_batches_that_are_no_shards_are_refused():
    """Before anything is compiled, in words of the loop. A mesh axis that was not there was passed over."""
    layer = s24.nn.Linear(d, f, method=s24.methods.STE(), rngs=nnx.Rngs(0))

    def step(sum_over, examples=16, shards=lambda step: step):
        loop = s24.Loop(layer, lambda m, x: m(x).sum(), optax.sgd(0.1), 4, accumulate=2, sum_over=sum_over)
        state, batch = loop.init(), loop.micro_batches(jnp.ones((examples, d)))
        jax.eval_shape(shards(loop.pure_step(True)), state, batch)

    in_a_shard_map = functools.partial(jax.shard_map, in_specs=P(), out_specs=P(), axis_names={"dp"})
    with jax.set_mesh(mesh(4, 2)):
        step(("dp",))
        with refused("a micro-batch of 6 examples does not divide into the 4 shards of sum_over (dp = 4)"):
            step(("dp",), 12)
        with refused("sum_over names the mesh axis 'data', but the mesh in the context has 'dp', 'tp'"):
            step(("dp", "data"))
        with refused("sum_over names the mesh axis 'dp', over which this step runs in a jax.shard_map"):
            step(("dp",), shards=in_a_shard_map)
