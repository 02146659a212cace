"""Checks that what is cut over a mesh has the values, gradients and draws of one device."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from jax_sparse24.dispatch.operation import Operation
from jax_sparse24.engine import fusions
from jax_sparse24.engine.gated import Weight, gated_ffn
from tests.engine.eight_devices.common import (
    KERNELS,
    KEY,
    METHODS,
    T,
    assert_near,
    collectives,
    d,
    draw,
    f,
    mesh,
    on_one_device,
    partitioned,
    states,
)


def check_what_concerns_more_than_a_shard():
    """An order of the columns of each shard, for which nothing is gathered over `tp`; scales of 8-bit
    numbers, of which the largest magnitudes go over the mesh; a statistic of neurons, cut as they are."""
    x, w1, w2, y = draw(10, (T, d), (d, f), (f, d), (T, f))
    three, tokens = mesh(2, 2, 2, names=("dp", "fsdp", "tp")), ("dp", "fsdp")

    method = s24.methods.BiMask(feature_blocks=4)
    order = np.random.default_rng(0).permuted(np.arange(f).reshape(4, -1), axis=1).ravel()
    state = {"order": jnp.asarray(order, jnp.int32), "searches": jnp.int32(0)}

    def ordered(x, w, specs=None):
        return s24.sparse_dot(x, w, method, state, implementation=KERNELS, specs=specs).sum()

    gradient = jax.grad(ordered, argnums=(0, 1))
    with jax.set_mesh(three):
        specs = {"x": P(tokens), "w": P("fsdp", "tp")}
        run = jax.jit(functools.partial(gradient, specs=specs)).lower(x, w1).compile()
    assert_near(run(x, w1), jax.jit(gradient)(x, w1))
    assert ("all-gather", d * f) not in collectives(run), collectives(run)

    in_8_bits = [s24.methods.SSTE(fp8=scales, scale="unit") for scales in ("tensor", "row")]
    in_8_bits += [s24.methods.FST(fp8=scales, mvue="biased") for scales in ("tensor", "row", "delayed")]

    def gradients(y, w, specs=None):
        """Of products whose first token has the largest activation and the largest gradient."""

        def product(y, w, method):
            options = {"implementation": KERNELS, "specs": specs}
            out = s24.sparse_dot(y, w, method, method.init(w), KEY, **options)
            return (out * jnp.ones_like(out).at[0].set(64)).sum(), out

        return [jax.grad(product, (0, 1), has_aux=True)(y, w, method) for method in in_8_bits]

    with jax.set_mesh(three):
        specs = {"x": P(tokens), "w": P("tp", "fsdp")}
        found = jax.jit(functools.partial(gradients, specs=specs))(y.at[0, 0].set(100), w2)
    assert_near(found, jax.jit(gradients)(y.at[0, 0].set(100), w2))

    options = {"columns": "statistic", "weights": "dense", "token_blocks": 4}
    statistic = s24.methods.Venom(v=16, m=8, clusters=4, **options)
    state = states(statistic, w1, w2)

    def forward(x, w1, w2, specs=None):
        return s24.sparse_ffn(x, w1, w2, statistic, state, implementation=KERNELS, specs=specs)

    with jax.set_mesh(mesh(4, 2)):
        specs = {"x": P("dp"), "w1": P(None, "tp"), "w2": P("tp")}
        found = jax.jit(functools.partial(forward, specs=specs))(x, w1, w2)
    assert_near(found, jax.jit(forward)(x, w1, w2))


def check_histories_see_all_shards():
    """What the gradient of a history has at the largest exponent is what one device sees, wherever on the
    mesh the largest magnitude is, along tokens or features, and where axes are explicit;
    products scale by what all have seen."""
    method, sizes = s24.methods.FST(fp8="delayed", mvue="biased"), {"dp": 2, "fsdp": 2, "tp": 2}
    x, w1, w2 = draw(20, (T, d), (d, f), (f, d))
    # The largest weight is 7, so that its scale is a power of two, too, and sums are exact.
    x, weights = x.at[-1, -1].set(320), {"w1": w1.at[:, -1].set(7), "w2": w2.at[0].set(7)}
    dy = jnp.ones((T, d)).at[-1, -1].set(64)
    masks = {name: {"mask": s24.transposable_mask24(w)} for name, w in weights.items()}
    names = ("tops_x", "tops_dy")

    def run(tops, x, w1, w2, dy, masks, specs=None):
        state = {w: masks[w] | tops[w] for w in masks}
        out = s24.sparse_ffn(
            x, w1, w2, method, state, KEY, activation="relu", implementation=KERNELS, specs=specs
        )
        return (out * dy).sum()

    def gated(tops, x, w1, w2, dy, masks, specs=None):
        layers = [Weight(w, {**masks[n], **tops[n]}, KEY) for n, w in (("w1", w1), ("w1", w1), ("w2", w2))]
        if specs:
            specs = {"x": specs["x"], "gate": specs["w1"], "up": specs["w1"], "down": specs["w2"]}
        return (gated_ffn((x, x), *layers, method, "relu", KERNELS, specs) * dy).sum()

    def largest(tree):
        return jax.tree.map(lambda seen: int(np.flatnonzero(np.asarray(seen)).max()), tree)

    empty = {w: {name: jnp.zeros(256) for name in names} for w in weights}
    for function in (run, gated):
        gradient = jax.grad(function, argnums=(0, 1, 2, 3))
        for known in (empty, {w: {n: v.at[120].set(3) for n, v in own.items()} for w, own in empty.items()}):
            want = jax.jit(gradient)(known, x, *weights.values(), dy, masks)
            for explicit in (False, True):
                cut = mesh(*sizes.values(), names=tuple(sizes), explicit=explicit)
                specs = {"x": P(("dp", "fsdp")), "w1": P("fsdp", "tp"), "w2": P("tp", "fsdp")}
                with jax.set_mesh(cut):
                    operands = jax.device_put([x, *weights.values(), dy], [*specs.values(), specs["x"]])
                    own = jax.device_put(masks, {w: {"mask": specs[w]} for w in masks})
                    run_cut = jax.jit(functools.partial(gradient, specs=None if explicit else specs))
                    found = run_cut(known, *operands, own)
                assert largest(found[0]) == largest(want[0]), (function, explicit)
                assert_near(found[1:], want[1:])


def check_features_are_counted_over_all_shards_of_tokens():
    for rank in ("density", "lost"):
        method = s24.methods.Activation24(tokens="consecutive", dense_share=0.1, rank=rank)
        run, arguments = partitioned(method, {"dp": 8}, activation="squared_relu", seed=7)
        assert_near(run.compile()(*arguments), on_one_device(method, "squared_relu", seed=7))


def check_shards_of_tokens_equal_blocks_of_tokens_on_one_device():
    """Tokens are sorted, and groups of distant tokens made, within each shard; counts are those of all."""
    options = {"v": 16, "m": 8, "clusters": 4}
    for method, sizes, blocks in (
        (METHODS["Venom"], {"dp": 4}, 1),
        (s24.methods.Venom(**options, columns="cluster", weights="dense"), {"dp": 2, "fsdp": 2}, 1),
        (s24.methods.Activation24(token_cut="mvue"), {"dp": 2}, 4),
    ):
        options = {"activation": "squared_relu", "seed": 9}
        run, arguments = partitioned(dataclasses.replace(method, token_blocks=blocks), sizes, **options)
        compiled = run.compile()
        want = on_one_device(dataclasses.replace(method, token_blocks=4), **options)
        assert_near(compiled(*arguments), want)
        kinds = {"all-reduce", *(("all-gather", "reduce-scatter") if "fsdp" in sizes else ())}
        assert {kind for kind, _ in collectives(compiled)} == kinds


def check_draws_are_those_of_one_device():
    """A gradient of a weight by the identity is the estimate itself, whose bits do not depend on the mesh."""
    n, out = 32, 48
    dy, w = jnp.asarray(np.random.default_rng(1).normal(size=(n, out)), jnp.float32), jnp.zeros((n, out))
    method = s24.methods.FST()
    state = method.init(w)

    def gradient(x, w, state, dy, specs=None):
        options = {"specs": specs, "implementation": KERNELS}
        return jax.grad(lambda w: (s24.sparse_dot(x, w, method, state, KEY, **options) * dy).sum())(w)

    want = np.asarray(jax.jit(gradient)(jnp.eye(n), w, state, dy))
    assert (np.count_nonzero(want.reshape(n // 4, 4, out), axis=1) <= 2).all() and want.any()
    for explicit, sizes in (
        (False, {"dp": 8}),
        (True, {"fsdp": 8}),
        (False, {"tp": 2}),
        (True, {"dp": 4, "tp": 2}),
        (False, {"dp": 2, "fsdp": 2, "tp": 2}),
        (True, {"dp": 2, "fsdp": 2, "tp": 2}),
    ):
        fsdp, tp = (axis if axis in sizes else None for axis in ("fsdp", "tp"))
        tokens = tuple(axis for axis in ("dp", "fsdp") if axis in sizes) or None
        specs = {"x": P(tokens), "w": P(fsdp, tp)}
        with jax.set_mesh(mesh(*sizes.values(), names=tuple(sizes), explicit=explicit)):
            x, shard, mask = (
                jax.device_put(a, specs[name])
                for name, a in (("x", jnp.eye(n)), ("w", w), ("w", state["mask"]))
            )
            found = jax.jit(functools.partial(gradient, specs=None if explicit else specs))
            drawn = found(x, shard, {"mask": mask}, dy)
        np.testing.assert_array_equal(drawn, want, f"{sizes} {explicit}")


def _check_one_pass(name, *patches, **options):
    """The bits of several steps, which a CPU computes either way.

    name: of the operation in `fusions` that is called once then.
    patches: under which it is called."""
    for explicit, sizes in ((False, {"dp": 2, "fsdp": 2, "tp": 2}), (True, {"dp": 4, "tp": 2})):
        given = s24.methods.FST(), sizes, explicit, "squared_relu"
        run, arguments = partitioned(*given, seed=9, **options)
        want = run.compile()(*arguments)
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            made = stack.enter_context(mock.patch.object(fusions, name, wraps=getattr(fusions, name)))
            run, _ = partitioned(*given, seed=9, **options)
        made.assert_called_once()
        jax.tree.map(np.testing.assert_array_equal, run.compile()(*arguments), want)


def _never(rule):
    return mock.patch.object(rule, "matches", lambda *_: False)


def _one_pass_fits():
    return mock.patch.object(Operation, "in_one_pass", lambda *_, **__: True)


def check_one_pass_makes_the_shards_of_dy1_and_their_estimates():
    takes = mock.patch.object(fusions.SlopeMVUE, "matches", lambda *_: True)
    _check_one_pass("slope_mvue_pack24", takes)


def check_one_pass_multiplies_and_squares_the_shards_of_y2():
    others = _never(fusions.SlopeMVUE), _never(fusions.Sloped)
    _check_one_pass("matmul_squared_relu", *others, _one_pass_fits(), dtype="bfloat16")


def check_one_pass_multiplies_the_shards_of_dy3_by_the_slope():
    _check_one_pass("matmul_slope", _never(fusions.Squared), _one_pass_fits(), dtype="bfloat16")


def check_linear_and_gated_layers_over_dp_and_tp():
    """Columns of the first, rows of the second over `tp`; a bias is added once; the batch has three axes. The
    gradients of the input by both branches of a gated block are one sum, with biases and any activation."""
    from jax_sparse24.engine.gated import Weight, gated_ffn

    x, w1, w2, b1, b2 = draw(4, (8, 8, d), (d, f), (f, d), (f,), (d,))
    method = s24.methods.FST(mvue=None)
    masks = [method.init(w) for w in (w1, w1 * 2, w2)]

    def linear(x, w1, w2, b1, b2, first=None, second=None):
        y = s24.sparse_dot(x, w1, method, masks[0], bias=b1, implementation=KERNELS, specs=first)
        return s24.sparse_dot(y, w2, method, masks[2], bias=b2, implementation=KERNELS, specs=second).sum()

    def gated(x, w1, w2, specs=None, activation="silu", biases=(None, None, None)):
        weights = zip((w1, w1 * 2, w2), masks, (None,) * 3, biases, strict=True)
        return gated_ffn([x, x], *(Weight(*w) for w in weights), method, activation, KERNELS, specs).sum()

    def biased(x, w1, w2, b1, b2, specs=None):
        return gated(x, w1, w2, specs, "relu", (b1, b1 * 2, b2))

    columns = {"x": P("dp"), "w": P(None, "tp")}, {"x": P("dp", None, "tp"), "w": P("tp", None)}
    specs = {"x": P("dp"), "gate": P(None, "tp"), "up": P(None, "tp"), "down": P("tp")}
    for function, arguments, cuts in (
        (linear, (x, w1, w2, b1, b2), columns),
        (gated, (x, w1, w2), (specs,)),
        (biased, (x, w1, w2, b1, b2), (specs,)),
    ):
        numbers = tuple(range(len(arguments)))
        want = jax.jit(jax.grad(function, argnums=numbers))(*arguments)
        with jax.set_mesh(mesh(4, 2)):
            whole = jax.jit(jax.grad(lambda *a, c=cuts, f=function: f(*a, *c), argnums=numbers))
            run = whole.lower(*arguments).compile()
        assert_near(run(*arguments), want, 1e-6 * (function is gated))
        assert not [found for found in collectives(run) if found[0] != "all-reduce"], collectives(run)
        assert collectives(run).count(("all-reduce", 8 * 8 // 4 * d)) == 1, "of the gradient of x"


def check_transformations_of_a_partition():
    """A scan over layers with remat and a vmap over experts, with both kinds of axes, with masks in one of
    them; and a shard_map of the user around it."""
    x, w1, w2 = draw(5, (T, d), (3, d, f), (3, f, d))
    w1, w2 = w1 / 8, w2 / 8
    specs = {"x": P("dp"), "w1": P(None, "tp"), "w2": P("tp")}
    masked = s24.methods.FST(mvue=None)
    masks = jax.vmap(lambda w1, w2: {"w1": masked.init(w1, "w1"), "w2": masked.init(w2, "w2")})(w1, w2)

    def ffn(method, x, w1, w2, state, specs):
        options = {"implementation": KERNELS, "activation": "relu", "specs": specs}
        return s24.sparse_ffn(x, w1, w2, method, state, **options)

    def scanned(method, state, x, w1, w2, specs=None):
        def layer(x, layers):
            return x + ffn(method, x, *layers, specs), None

        return (jax.lax.scan(jax.checkpoint(layer), x, (w1, w2, state))[0] ** 2).mean()

    def experts(method, state, x, w1, w2, specs=None):
        return (jax.vmap(lambda *layers: ffn(method, x, *layers, specs))(w1, w2, state) ** 2).mean()

    def within(method, state, x, w1, w2, specs=None):
        """Manual over `dp`, so that of the specs only `tp` is left."""

        def local(x, w1, w2):
            return jax.lax.pmean((ffn(method, x, w1[0], w2[0], state, specs) ** 2).mean(), "dp")

        if specs is None:
            return (ffn(method, x, w1[0], w2[0], state, None) ** 2).mean()
        manual = {"in_specs": (P("dp"), P(), P()), "out_specs": P(), "axis_names": {"dp"}}
        return jax.shard_map(local, **manual)(x, w1, w2)

    plain = s24.methods.STE(), None
    for function, (method, state), explicit in (
        (scanned, plain, False),
        (scanned, (masked, masks), True),
        (experts, (masked, masks), False),
        (experts, plain, True),
        (within, plain, False),
    ):
        want = jax.jit(jax.grad(functools.partial(function, method, state), argnums=(0, 1, 2)))(x, w1, w2)
        cut, arguments = mesh(4, 2, explicit=explicit), (x, w1, w2)
        with jax.set_mesh(cut):
            if explicit:
                places = {weight: P(None, *specs[weight]) for weight in ("w1", "w2")}
                arguments = tuple(map(jax.device_put, arguments, (specs["x"], *places.values())))
                state = state and {w: jax.device_put(own, places[w]) for w, own in state.items()}
            own = functools.partial(function, method, state, specs=specs)
            compiled = jax.jit(jax.grad(own, argnums=(0, 1, 2))).lower(*arguments).compile()
        assert_near(compiled(*arguments), want, 1e-5)
        gathers = [found for found in collectives(compiled) if found[0] != "all-reduce"]
        assert not gathers, (function.__name__, explicit, gathers)
