"""Checks of layers with logical axes, of experts, of the refresh of masks, and of attention."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from tests.engine.eight_devices.common import KERNELS, T, assert_near, collectives, d, draw, f, mesh, traffic
from tests.engine.eight_devices.refusals import refused


def check_layers_with_logical_axes():
    """By default rules, every parameter and mask rests as declared, and the block equals one device."""
    x, names = draw(8, (8, 8, d))[0], ("dp", "fsdp", "tp")
    cut, explicit = mesh(2, 2, 2, names=names), mesh(2, 2, 2, names=names, explicit=True)
    options = {"method": s24.methods.FST(mvue=None), "implementation": KERNELS}
    rests = {"embed": P("fsdp", "tp"), "mlp": P("tp", "fsdp")}
    for kind, layers in ((s24.nn.FFN, ("up", "down")), (s24.nn.GatedFFN, ("gate", "up", "down"))):
        plain = kind(d, f, use_bias=True, rngs=nnx.Rngs(0), **options)
        named = kind(d, f, use_bias=True, axes=("embed", "mlp"), rngs=nnx.Rngs(0), **options)
        assert all("out_sharding" not in v.get_metadata() for _, v in nnx.to_flat_state(nnx.state(plain)))
        graph, params, rest = nnx.split(named, nnx.Param, ...)

        def loss(params, rest, x, graph=graph):
            return (nnx.merge(graph, params, rest)(x) ** 2).mean()

        want = jax.jit(jax.value_and_grad(loss))(params, rest, x)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = nnx.get_named_sharding((params, rest), cut)
            for name in layers:
                spec = rests["mlp" if name == "down" else "embed"]
                assert places[0][name]["kernel"].get_value().spec == spec, (name, places[0][name]["kernel"])
                assert places[1][name]["state"]["mask"].get_value().spec == spec
                assert places[1][name]["step"].get_value().spec == P()
            arguments = *jax.device_put((params, rest), places), jax.device_put(x, P(("dp", "fsdp")))
            run = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
        assert_near(run(*arguments), want)
        gathered = {n for found, n in collectives(run) if found == "all-gather"}
        # Values and metadata of packed kernels, or without kernels all; and a bias of the model width.
        assert gathered == {*((d * f // 4, d * f // 16) if KERNELS else (d * f // 2,)), d}, gathered
        with jax.set_mesh(explicit), nnx.logical_axis_rules(s24.sharding.rules_for(explicit)):
            places = nnx.get_named_sharding((params, rest), explicit)
            arguments = *jax.device_put((params, rest), places), jax.device_put(x, P(("dp", "fsdp")))
            assert_near(jax.jit(jax.value_and_grad(loss))(*arguments), want)


def check_explicit_axes_of_one_device():
    """They cut nothing, but are part of types: masks refused weights that are cut over these alone, and an
    output had another type than the input that it is added to."""
    (x,), names = draw(8, (8, 8, d)), ("dp", "fsdp", "tp")
    options = {"method": s24.methods.FST(mvue=None), "rngs": nnx.Rngs(0)}
    ffn, gated = (kind(d, f, axes=("embed", "mlp"), **options) for kind in (s24.nn.FFN, s24.nn.GatedFFN))
    moe = s24.nn.MoE(d, f, experts=8, expert_axis="expert", capacity_factor=None, **options)
    model = nnx.Dict(ffn=ffn, gated=gated, moe=moe)
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, x):
        model = s24.refresh(nnx.merge(graph, state), 0)
        x = x + model.ffn(x)
        x = x + model.gated(x)
        return x + model.moe(x)[0]

    want = run(state, x)
    for sizes in ((1, 1, 1), (8, 1, 1), (1, 4, 1), (1, 1, 2)):
        cut = mesh(*sizes, names=names, explicit=True)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.RULES):
            found = run(
                jax.device_put(state, nnx.get_named_sharding(state, cut)),
                jax.device_put(x, P(("dp", "fsdp"))),
            )
        assert found.sharding.spec == P(("dp", "fsdp"), None, None), found.sharding
        assert_near(found, want, 1e-5)


def check_layers_outside_of_jit():
    """A call and a refresh, over a mesh of which other axes are left to XLA, with the bits of one device."""
    (x,), cut = draw(13, (T, d)), mesh(4, 2)
    options = {"method": s24.methods.FST(mvue=None), "axes": (None, "mlp"), "implementation": KERNELS}
    layer = s24.nn.Linear(d, f, **options, tokens=None, rngs=nnx.Rngs(0))
    nnx.update(layer.kernel, draw(14, (d, f))[0])
    s24.refresh(layer, step=0)
    want, mask = layer(x), layer.state["mask"][...]
    with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
        state = nnx.state(layer)
        nnx.update(layer, jax.device_put(state, nnx.get_named_sharding(state, cut)))
        s24.refresh(layer, step=0)
        y = layer(x)
    assert y.sharding.spec == layer.state["mask"][...].sharding.spec == P(None, "tp")
    jax.tree.map(np.testing.assert_array_equal, (y, layer.state["mask"][...]), (want, mask))


def check_masks_are_chosen_on_the_shards_of_weights():
    """By a refresh, and for the optimiser and monitors, to the bit of one device; a scale but for the order
    of its sums. Over the mesh go sums of scalars and of what the checksum of a kernel reads. The order of all
    columns that `BiMask` keeps needs the mask of a kernel whose columns are cut, of a byte per weight."""

    def compiled(make, *sizes, explicit=False):
        graph, state = nnx.split(nnx.eval_shape(make))

        @jax.jit
        def run(state):
            model = nnx.merge(graph, state)
            s24.refresh(model, step=jnp.int32(0), due=True)
            return nnx.state(model, s24.nn.SparseState), s24.nn.masks(model)

        cut = mesh(*sizes, names=("dp", "fsdp", "tp"), explicit=explicit)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = nnx.get_named_sharding(state, cut)
            like = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, places
            )
            on_the_mesh = run.lower(like).compile()
        found = {found for found in collectives(on_the_mesh) if found[1] > 4}  # one for each expert
        if gathered := traffic(on_the_mesh).get("all-gather"):
            assert gathered <= f * f, "a byte per weight"
        return found, lambda state: (on_the_mesh(jax.device_put(state, places)), run(state))

    def linear(method, axes=("embed", "mlp")):
        return lambda: s24.nn.Linear(f, f, method=method, axes=axes, use_bias=False, rngs=nnx.Rngs(0))

    dynamic = s24.methods.SSTE(scale="dynamic")
    for method in (s24.methods.FST(mask="double-pruned"), dynamic):
        make = linear(method)
        found, both = compiled(make, 1, 4, 2, explicit=method is not dynamic)
        assert found == {("all-reduce", f)}, found
        assert_near(*both(nnx.state(jax.jit(make)())), 1e-6 * (method is dynamic))
    blind = s24.methods.Activation24(tokens="consecutive", dense_share=0.0)  # masks no weight
    options = {"method": blind, "axes": ("embed", "mlp")}
    make = lambda: s24.nn.FFN(d, f, **options, rngs=nnx.Rngs(0))  # noqa: E731
    assert_near(*compiled(make, 1, 4, 2, explicit=True)[1](nnx.state(jax.jit(make)())), 0)
    orders = s24.methods.BiMask(trials=2)
    assert compiled(linear(orders), 1, 8, 1)[0] == {("all-reduce", f)}
    make = linear(orders, ("mlp", "embed"))
    found, both = compiled(make, 1, 4, 2)
    assert found == {("all-reduce", f), ("all-gather", f * f // 2)}, found  # of the rows on a device
    assert_near(*both(nnx.state(jax.jit(make)())), 0)
    options = {"experts": 4, "method": s24.methods.FST(), "expert_axis": "expert"}
    found, _ = compiled(lambda: s24.nn.MoE(d, f, **options, rngs=nnx.Rngs(0)), 2, 4, 1)
    assert all(kind == "all-reduce" and size <= 4 * f for kind, size in found), found


def check_routers_learn_from_the_tokens_of_each_shard():
    """What they learn is that of one device. Over the mesh go pieces of a weight, the sums of what is learnt,
    and for every sixteenth token a sum of a number for each cluster; no token is gathered."""
    options = {"routing": "learned", "columns": "statistic", "token_blocks": 4}
    method = s24.methods.Venom(v=16, m=8, clusters=4, **options)
    options = {"method": method, "axes": ("embed", "mlp"), "use_bias": True, "implementation": KERNELS}
    block = s24.nn.FFN(d, f, **options, rngs=nnx.Rngs(0))
    x, block.router[...], block.up.state["norms"][...] = draw(11, (16, 16, d), (d, 4), (4, f))
    (block.up.bias[...],) = draw(12, (f,))
    graph, parameters, seen, rest = nnx.split(block, nnx.PathContains("router"), s24.nn.Statistic, ...)

    def gradient(learners, rest, x):
        return jax.grad(lambda learners: nnx.merge(graph, *learners, rest)(x).sum())(learners)

    want = jax.jit(gradient)((parameters, seen), rest, x)
    for explicit in (False, True):
        cut = mesh(2, 2, 2, names=("dp", "fsdp", "tp"), explicit=explicit)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = nnx.get_named_sharding(((parameters, seen), rest), cut)
            arguments = (
                *jax.device_put(((parameters, seen), rest), places),
                jax.device_put(x, P(("dp", "fsdp"))),
            )
            run = jax.jit(gradient).lower(*arguments).compile()
        assert_near(run(*arguments), want)
        some = 16 * 16 // 4 // 16
        allowed = {
            ("all-gather", d * f // 2),
            ("all-reduce", some * 4),
            ("all-reduce", d * 4),
            ("all-reduce", 4 * f // 2),
        }
        assert {found for found in collectives(run) if found != ("all-gather", 4 * f)} <= allowed, (
            collectives(run)
        )


def check_projections_of_attention_are_cut_by_heads():
    """Sparse ones with adapters, and low-rank ones. Of activations there are two sums over shards, forward
    and backward, as of dense projections, and those of the rank's width; nothing of them is gathered. An
    order of columns moves with them."""
    from experiments.models import decoder
    from experiments.models.parts import with_columns

    rng, (x,) = np.random.default_rng(0), draw(3, (8, 31, d))

    def filled(like):
        """Masks that differ from head to head, 2:4 along both axes."""
        if like.dtype != bool:
            return rng.integers(-2, 3, like.shape).astype(like.dtype)
        row, column = np.indices(like.shape)
        return ((row + column // 8) % 4 < 2) & ((row // 2 + column) % 4 < 2)

    cut = mesh(2, 2, 2, names=("dp", "fsdp", "tp"))

    def compiled(method, **options):
        sizes = {"layers": 1, "d": d, "f": f, "heads": 4, "implementation": KERNELS}
        model = decoder.Config(**sizes, **options)
        attention = nnx.eval_shape(lambda: model.create(method, 64, rngs=nnx.Rngs(0))).blocks[0].attention
        graph, params, rest = nnx.split(attention, nnx.Param, ...)

        @jax.jit
        def run(params, rest, x):
            def loss(params, x):
                return nnx.merge(graph, params, rest)(x)[0].sum()

            return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

        with jax.set_mesh(cut):
            with nnx.logical_axis_rules(s24.sharding.RULES):
                tokens = jax.NamedSharding(cut, P(("dp", "fsdp")))
                places = *nnx.get_named_sharding((params, rest), cut), tokens
            arguments = *jax.tree.map(filled, (params, rest)), x
            on_the_mesh = run.lower(*jax.device_put(arguments, places)).compile()
        of_tokens = [found for found in collectives(on_the_mesh) if found[1] % 31 == 0]
        return of_tokens, lambda: (on_the_mesh(*jax.device_put(arguments, places)), run(*arguments))

    sums, both = compiled(s24.methods.SLoPe(rank=8), kv_heads=2, attention_method="SLoPe")
    assert sums == [("all-reduce", 62 * size) for size in (8, 8, d, d)], sums
    assert_near(*both(), 1e-5)
    sums, _ = compiled(s24.methods.Dense(), rank=8)
    assert sums == [("all-reduce", 62 * 8)] * 4, sums

    options = {"axes": ("embed", None), "use_bias": False, "rngs": nnx.Rngs(0)}
    layer = s24.nn.Linear(d, d, method=s24.methods.BiMask(trials=1, feature_blocks=4), **options)
    order, places = (heads + np.arange(8) for heads in (np.arange(0, d, 8)[:, None], [[16], [0], [24], [8]]))
    order, places, scale = rng.permuted(order, axis=1).ravel(), places.ravel(), draw(5, (d,))[0]
    layer.state["order"][...] = jnp.asarray(order)

    def moved(x, head=8):
        return (with_columns(layer, x, lambda w: w[:, places], head) * scale[places]).sum()

    want = jax.jit(jax.grad(lambda x: (layer(x) * scale).sum()))(x[:, :4])
    with jax.set_mesh(cut):
        assert_near(jax.jit(jax.grad(moved))(x[:, :4]), want)
        with refused("choose feature_blocks=8, or --mesh.tp 1"):
            moved(x, head=4)


def check_experts_over_an_axis_by_all_to_all():
    """Dropless, values and gradients of one device; with a capacity, those of a call for each shard."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(16, 8, d)), jnp.float32)

    options = {"experts": 8, "capacity_factor": None, "expert_axis": "expert", "implementation": KERNELS}
    options |= {"method": s24.methods.STE(), "rngs": nnx.Rngs(0)}
    moe = s24.nn.MoE(d, f, axes=(None, "mlp"), **options)

    def call(params, rest, x, graph):
        return nnx.merge(graph, params, rest)(x)

    def loss(params, rest, x, graph):
        y, routing = call(params, rest, x, graph)
        return (y**2).mean() + routing.load_balancing_loss

    def on_the_mesh(function, params, rest, explicit):
        cut = mesh(2, 2, 2, names=("dp", "fsdp", "tp"), explicit=explicit)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = nnx.get_named_sharding((params, rest), cut)
            assert places[0]["experts"]["up"]["kernel"].get_value().spec == P("fsdp", None, "tp")
            arguments = *jax.device_put((params, rest), places), jax.device_put(x, P(("dp", "fsdp")))
            lowered = function.lower(*arguments, graph)
        return lowered.as_text().count("stablehlo.all_to_all"), lowered.compile(), arguments

    graph, *state = nnx.split(moe, nnx.Param, ...)
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 2)), static_argnums=3)
    want = gradient(*state, x, graph)
    for explicit in (False, True):
        exchanges, run, arguments = on_the_mesh(gradient, *state, explicit=explicit)
        assert_near(run(*arguments), want)
        assert exchanges == 4 and {kind for kind, _ in collectives(run)} == {"all-to-all", "all-reduce"}

    moe.capacity_factor = 0.5
    graph, *state = nnx.split(moe, nnx.Param, ...)
    forward = jax.jit(call, static_argnums=3)
    calls = [forward(*state, part, graph) for part in np.split(np.asarray(x), 4)]
    exchanges, run, arguments = on_the_mesh(forward, *state, explicit=True)
    y, routing = run(*arguments)
    assert exchanges == 2
    assert_near(y, np.concatenate([y for y, _ in calls]))
    np.testing.assert_allclose(routing.dropped, np.mean([found.dropped for _, found in calls]), rtol=1e-6)
    assert routing.dropped > 0
    for experts, text in (
        ("expert", "experts.up is declared to be cut by P('fsdp', None, 'tp'), but it is cut by P("),
        (None, "is cut by P(('dp', 'fsdp'), None, None) over explicit mesh axes"),
    ):
        with jax.set_mesh(mesh(2, 2, 2, names=("dp", "fsdp", "tp"), explicit=True)), refused(text):
            moe.expert_axis = experts
            call(*state, jax.device_put(x, P(("dp", "fsdp"))), nnx.graphdef(moe))
    for text, rules in (
        ("mesh axis 'tp' cuts experts, but not tokens", {"batch": "dp", "expert": "tp", "mlp": None}),
        (
            "12 rows of x of shape (12, 8, 32) do not divide into 8 shards",
            {"batch": ("dp", "tp"), "expert": "tp", "mlp": None},
        ),
        (
            "mesh axis 'tp' cuts the kernels of experts",
            {"batch": "tp", "expert": "tp", "mlp": "tp", "dp": None},
        ),
    ):
        with jax.set_mesh(mesh(4, 2)), nnx.logical_axis_rules(tuple(rules.items())), refused(text):
            jax.eval_shape(functools.partial(call, graph=graph), *state, x[:12])


def check_layers_take_the_axes_of_their_kernels():
    """Those of metadata, by name or by mesh axis, and of layers of flax that are replaced, as well as how a
    kernel lies on a mesh. Masks lie as kernels do, and nothing is gathered."""
    method, (x,) = s24.methods.FST(mvue=None), draw(15, (8, 8, d))

    def plain(**options):
        return nnx.Linear(d, f, rngs=nnx.Rngs(0), **options)

    def sparse(**options):
        return s24.nn.Linear(d, f, method=method, rngs=nnx.Rngs(0), **options)

    def placed():
        layer = plain()
        layer.kernel.set_value(jax.device_put(layer.kernel[...], P(None, "tp")))
        return layer

    names = {"kernel_metadata": {"out_sharding": ("embed", "mlp")}}
    axes = {"kernel_metadata": {"out_sharding": P(None, "tp")}}
    made = {"kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))}
    for make in (
        *(functools.partial(sparse, **o) for o in (names, axes, made)),
        *(lambda o=o: s24.sparsify(plain(**o), method) for o in (names, axes)),
        lambda: s24.sparsify(placed(), method),
    ):
        for explicit in (False, True):
            cut = mesh(4, 2, explicit=explicit)
            with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
                layer = make()
                assert (
                    layer.kernel[...].sharding.spec == layer.state["mask"][...].sharding.spec == P(None, "tp")
                )
                graph, state = nnx.split(layer)
                call = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x))
                run = call.lower(state, jax.device_put(x, P("dp"))).compile()
            assert not collectives(run), collectives(run)
    for names_of_heads in (("embed", "heads", None), (None, None, "tp")):
        metadata = {"out_sharding": names_of_heads, "eager_sharding": False}
        general = nnx.LinearGeneral(d, (4, f // 4), kernel_metadata=metadata, rngs=nnx.Rngs(0))
        layer = s24.sparsify(general, method)
        assert layer.axes == names_of_heads[:2]
    with jax.set_mesh(mesh(4, 2)), refused("cut along 'tp' by mesh axis 'tp'"):
        layer(x)
    with refused("axes=('embed', 'mlp'), but the kernel has out_sharding=('mlp', None)"):
        sparse(axes=("embed", "mlp"), kernel_metadata={"out_sharding": ("mlp",), "eager_sharding": False})
    for block in (s24.nn.FFN, s24.nn.GatedFFN, functools.partial(s24.nn.LowRank, rank=4)):
        with refused("for all kernels of the block, but each has other axes. Name those of the block"):
            block(d, f, rngs=nnx.Rngs(0), **names)


def check_state_is_made_anew_where_it_lies():
    """By `reset` and `arrange`, and statistics are counted on the shards, to the values of one device with as
    many blocks of tokens."""
    (x,) = draw(16, (8, 8, d))
    venom = s24.methods.Venom(v=16, m=8, clusters=4, token_blocks=4, routing="learned", columns="statistic")
    for method, explicit in (
        (s24.methods.FST(), True),
        (s24.methods.Activation24(token_blocks=4, dense_share=0.0), True),
        (venom, True),
        (venom, False),
    ):
        options = {"method": method, "axes": ("embed", "mlp"), "use_bias": True}
        one, block = (s24.nn.FFN(d, f, **options, rngs=nnx.Rngs(0)) for _ in range(2))
        cut = mesh(2, 2, 2, names=("dp", "fsdp", "tp"), explicit=explicit)

        def done(block, x):
            s24.nn.reset(block)
            s24.nn.arrange(block)
            return nnx.state(block), nnx.jit(lambda block, x: block.activation_stats(x))(block, x)

        want = done(one, x)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = nnx.get_named_sharding(nnx.state(block), cut)
            nnx.update(block, jax.device_put(nnx.state(block), places))
            found = done(block, jax.device_put(x, P(("dp", "fsdp"))))
        assert_near(found, want, what=f"{type(method).__name__}, explicit={explicit}")
        same = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), found[0], places)
        assert all(jax.tree.leaves(same)), (type(method).__name__, explicit, same)


def check_adapters_gather_no_activations():
    """What they contract is cut with the tokens' features and added up, with both kinds of axes."""
    (x,) = draw(17, (8, 31, d))
    products, own = (d, d), {s24.methods.SLoPe(rank=4): (4, 4), s24.methods.AST(slorb=4): (d, d // 4)}
    own[s24.methods.AST(slorb=4, train_projection=True)] = f // 4, d // 4
    for (method, adapters), explicit in itertools.product(own.items(), (False, True)):
        layer = s24.nn.FFN(d, f, method=method, axes=("embed", "mlp"), rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params, rest, x, graph=graph):
            return nnx.merge(graph, params, rest)(x).sum()

        cut = mesh(4, 2, explicit=explicit)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = nnx.get_named_sharding((params, rest), cut)
            arguments = *jax.device_put((params, rest), places), jax.device_put(x, P("dp"))
            run = jax.jit(jax.value_and_grad(loss, (0, 2))).lower(*arguments).compile()
        tokens = [found for found in collectives(run) if found[1] % 31 == 0]
        assert sorted(tokens) == sorted(("all-reduce", 62 * size) for size in (*adapters, *products)), tokens
