"""Checks on eight devices of the CPU, in a process of their own: `python -m tests.engine.eight_devices`.

The number of devices is fixed when JAX starts. Every function `check_*` runs and may raise; the last line
that is printed is a JSON object of their tracebacks, "" where all is well. tests/engine/test_eight_devices.py
runs it once and has a test for each check. Arguments name the checks to run; without any all of them run.
`--all-meshes` compares every method on every mesh with one device, which takes minutes and is no test."""

import dataclasses
import json
import math
import os
import re
import sys
import time
import traceback
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import functools

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from jax_sparse24.dispatch import decision, native, shards

T, d, f = 64, 32, 64
KEY = jax.random.key(5)
METHODS = {
    name: kind()
    for name, kind in vars(s24.methods).items()
    if isinstance(kind, type) and issubclass(kind, s24.methods.Dense.__base__) and name != "Venom"
}
METHODS["Venom"] = s24.methods.Venom(v=16, m=8, clusters=4)
KERNELS = "ffi" if native.available("cpu")[0] else None


@functools.cache
def mesh(*sizes: int, names=("dp", "tp"), explicit: bool = False):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(kind,) * len(sizes))


def draw(seed, *shapes):
    """Small whole numbers: sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in shapes]


def states(method, w1, w2):
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}
    if method.router:
        centroids = jnp.asarray(np.random.default_rng(0).standard_normal((w1.shape[0], method.clusters)))
        state["w1"] |= {"centroids": centroids.astype(jnp.float32), "arranged": jnp.asarray(True)}
        state["w1"] |= {name: draw(12, state["w1"][name].shape)[0] for name in method.router.observed}
    return state


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
            columns = jax.tree.map(lambda s: P(None, "tp") if s.shape == w1.shape else P(), linear)
            if implementation is None and name != "BiMask":  # whose state is an order of all columns
                total = in_shards(dot, ("dp", "tp"), P("dp"), P(None, "tp"), columns, dp=4, tp=2)
                jax.eval_shape(jax.grad(total, argnums=(0, 1)), x, w1, linear)


def check_gated_blocks_and_layers_in_a_users_shard_map():
    from flax import nnx

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
    explicit = mesh(4, 2, explicit=True)
    with jax.set_mesh(explicit):
        x = jax.device_put(draw(3, (T, d))[0], P("dp", None))
        for name, call in {
            "mask24": lambda x: s24.mask24(x, -1),
            "pack24": lambda x: s24.pack24(x, -1),
            "mvue24": lambda x: s24.mvue24(KEY, x, -1),
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


def partitioned(method, sizes, explicit=False, activation="relu", key=KEY, seed=0, specs=None):
    """A lowered function of value and gradients of a block that is cut over a mesh, and its arguments."""
    x, w1, w2 = draw(seed, (T, d), (d, f), (f, d))
    state, names = states(method, w1, w2), tuple(sizes)
    cut = mesh(*sizes.values(), names=names, explicit=explicit)
    tokens = tuple(n for n in ("dp", "fsdp") if n in sizes) or None
    fsdp, tp = (name if name in sizes else None for name in ("fsdp", "tp"))
    specs = {"x": P(tokens), "w1": P(fsdp, tp), "w2": P(tp, fsdp)} if specs is None else specs

    def loss(x, w1, w2, state):
        options = {"specs": None if explicit else specs, "activation": activation, "implementation": KERNELS}
        return s24.sparse_ffn(x, w1, w2, method, state, key, **options).sum()

    place = {name: jax.NamedSharding(cut, spec) for name, spec in specs.items()}
    arguments = [jax.device_put(a, place[name]) for name, a in {"x": x, "w1": w1, "w2": w2}.items()]
    arguments.append(
        {
            w: {
                name: jax.device_put(
                    entry, place[w] if entry.shape == like.shape else jax.NamedSharding(cut, P())
                )
                for name, entry in state[w].items()
            }
            for w, like in {"w1": w1, "w2": w2}.items()
        }
    )
    with jax.set_mesh(cut):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*arguments), arguments


def on_one_device(method, activation="relu", key=KEY, seed=0):
    x, w1, w2 = draw(seed, (T, d), (d, f), (f, d))

    def loss(x, w1, w2):
        options = {"activation": activation, "implementation": KERNELS}
        return s24.sparse_ffn(x, w1, w2, method, states(method, w1, w2), key, **options).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, w1, w2)


def assert_near(got, want, tolerance=1e-6):
    def compare(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), np.abs(a - b).max()

    jax.tree.map(compare, got, want)


def collectives(
    compiled, kinds="all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
) -> list[tuple[str, int]]:
    """Every collective of a compiled program, or its text, and the number of elements that each device gets
    from it; what XLA has combined counts as several. Scalars are left out."""
    found = []
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    for types, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        for size in re.findall(r"\w+\[([\d,]+)\]", types):
            found.append((kind, math.prod(map(int, size.split(",")))))
    return sorted(found)


def group_size(line: str) -> int:
    """The number of devices that take part in each group of a collective, as XLA prints it."""
    if axes := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line):
        sizes = dict(re.findall(r"('\w+')=(\d+)", axes[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'\w+'", axes[2]))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    return len(re.search(r"replica_groups=\{\{(.*?)\}", line)[1].split(","))


WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1, "u8": 1, "s8": 1}


def traffic(compiled) -> dict[str, float]:
    """Bytes that each device sends, by kind of collective, along a ring: of an array of n bytes over g
    devices (g - 1) / g * n to gather or scatter it, twice that to sum it. Scalars are left out."""
    sent = {}
    for line in compiled.as_text().splitlines():
        if not (found := re.search(r"= (.*?) (all-reduce|all-gather|reduce-scatter)(?:-start)?\(", line)):
            continue
        n = group_size(line)
        for kind, size in re.findall(r"(\w+)\[([\d,]+)\]", found[1]):
            whole = math.prod(map(int, size.split(","))) * WIDTHS[kind]
            share = {"all-reduce": 2 / n, "all-gather": 1 / n, "reduce-scatter": 1}[found[2]]
            sent[found[2]] = sent.get(found[2], 0) + whole * share * (n - 1)
    return sent


TABLE_MESHES = {"dp 4, tp 2": {"dp": 4, "tp": 2}, "dp 2, fsdp 2, tp 2": {"dp": 2, "fsdp": 2, "tp": 2}}
TABLED = ("FST", "SLoPe", "Activation24", "Venom")


def by_xla(sizes):
    """The dense block, cut in the same way, whose collectives XLA chooses."""
    x, w1, w2 = draw(0, (T, d), (d, f), (f, d))
    tokens = tuple(name for name in ("dp", "fsdp") if name in sizes)
    fsdp = "fsdp" if "fsdp" in sizes else None
    specs = P(tokens), P(fsdp, "tp"), P("tp", fsdp)

    def loss(x, w1, w2):
        y = jnp.square(jax.nn.relu(x @ w1)) @ w2
        return jax.lax.with_sharding_constraint(y, P(tokens)).sum()

    cut = mesh(*sizes.values(), names=tuple(sizes))
    with jax.set_mesh(cut):
        arguments = [jax.device_put(a, spec) for a, spec in zip((x, w1, w2), specs, strict=True)]
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), out_shardings=(P(), specs))
        return run.lower(*arguments).compile()


@functools.cache
def compiled_block(name, mesh_name):
    """A method's block over a mesh of the table."""
    run, arguments = partitioned(EXACT[name], TABLE_MESHES[mesh_name], activation="squared_relu")
    return run.compile(), arguments


def table() -> str:
    """What blocks communicate, forward and backward, as docs/scaling.md shows it."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    lines = [
        f"Of one block, forward and backward, {T} tokens, d = {d}, f = {f}, float32, in programs that XLA",
        f"compiles for eight devices of a CPU ({VERSION}): kB that each device sends.",
        "",
        "| mesh | block | " + " | ".join(kinds) + " | together |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mesh_name, sizes in TABLE_MESHES.items():
        blocks = {"dense, by XLA": by_xla(sizes)}
        blocks |= {f"`{name}`": compiled_block(name, mesh_name)[0] for name in TABLED}
        for name, compiled in blocks.items():
            sent = traffic(compiled)
            cells = [f"{sent.get(kind, 0) / 1e3:.2f}" for kind in kinds] + [f"{sum(sent.values()) / 1e3:.2f}"]
            lines.append(f"| {mesh_name} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


VERSION = f"jaxlib {jaxlib.__version__}"
PAGE = Path(__file__).parents[2] / "docs/scaling.md"
BEGIN, END = "<!-- collectives: python -m tests.engine.eight_devices --write -->\n", "\n<!-- end -->"


def written(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


# Groups are those of one device. Features that stay dense are chosen in each shard of them, so none do here.
EXACT = {
    "STE": s24.methods.STE(),
    "SRSTE": s24.methods.SRSTE(n=1, m=4),
    "FST": s24.methods.FST(),
    "FST double-pruned": s24.methods.FST(mvue="biased", mask="double-pruned"),
    "SSTE": s24.methods.SSTE(),
    "SLoPe": s24.methods.SLoPe(),
    "AST": s24.methods.AST(),
    "Activation24": s24.methods.Activation24(tokens="consecutive", dense_share=0.0),
    "Activation24 causal": s24.methods.Activation24(forward="causal", soft_weights=True),
    "Venom": s24.methods.Venom(v=16, m=8, routing="none", layout="none", transposed="plain", clusters=4),
}


def check_a_block_over_dp_fsdp_and_tp_equals_one_device():
    """Values and gradients of every method, with explicit axes or declared ones."""
    for name, method in EXACT.items():
        activation = "squared_relu" if type(method).__name__ in ("Activation24", "Venom") else "relu"
        want = on_one_device(method, activation)
        for explicit in (False, True):
            run, arguments = partitioned(method, {"dp": 2, "fsdp": 2, "tp": 2}, explicit, activation)
            try:
                assert_near(run.compile()(*arguments), want)
            except AssertionError as error:
                raise AssertionError(f"{name}, explicit={explicit}: {error}") from error


def check_what_concerns_more_than_a_shard():
    """An order of all columns, for which the weight is gathered over `tp` in one product; scales of 8-bit
    numbers, of which the largest magnitudes go over the mesh; a statistic of neurons, cut as they are."""
    x, w1, w2, y = draw(10, (T, d), (d, f), (f, d), (T, f))
    three, tokens = mesh(2, 2, 2, names=("dp", "fsdp", "tp")), ("dp", "fsdp")

    method = s24.methods.BiMask()
    order = jnp.asarray(np.random.default_rng(0).permutation(f), jnp.int32)
    state = {"order": order, "searches": jnp.int32(0)}

    def ordered(x, w, specs=None):
        return s24.sparse_dot(x, w, method, state, implementation=KERNELS, specs=specs).sum()

    gradient = jax.grad(ordered, argnums=(0, 1))
    with jax.set_mesh(three):
        specs = {"x": P(tokens), "w": P("fsdp", "tp")}
        run = jax.jit(functools.partial(gradient, specs=specs)).lower(x, w1).compile()
    assert_near(run(x, w1), jax.jit(gradient)(x, w1))
    assert collectives(run).count(("all-gather", d * f)) == 1, collectives(run)

    def in_eight_bits(y, w, specs=None):
        methods = (s24.methods.SSTE(fp8=scales, scale="unit") for scales in ("tensor", "row"))
        state, options = {"scale": jnp.float32(1)}, {"implementation": KERNELS, "specs": specs}
        return [s24.sparse_dot(y, w, method, state, KEY, **options) for method in methods]

    with jax.set_mesh(three):
        specs = {"x": P(tokens), "w": P("tp", "fsdp")}
        found = jax.jit(functools.partial(in_eight_bits, specs=specs))(y.at[0, 0].set(100), w2)
    assert_near(found, jax.jit(in_eight_bits)(y.at[0, 0].set(100), w2))

    options = {"columns": "statistic", "weights": "dense", "token_blocks": 4}
    statistic = s24.methods.Venom(v=16, m=8, clusters=4, **options)
    state = states(statistic, w1, w2)

    def forward(x, w1, w2, specs=None):
        return s24.sparse_ffn(x, w1, w2, statistic, state, implementation=KERNELS, specs=specs)

    with jax.set_mesh(mesh(4, 2)):
        specs = {"x": P("dp"), "w1": P(None, "tp"), "w2": P("tp")}
        found = jax.jit(functools.partial(forward, specs=specs))(x, w1, w2)
    assert_near(found, jax.jit(forward)(x, w1, w2))


def check_the_table_of_collectives():
    """The page has it, and sparse blocks send no more than the dense one. Another version of XLA may join the
    gathers of forward and backward pass in other blocks."""
    page = PAGE.read_text()
    if f"({VERSION})" in page:
        assert page == written(page), "python -m tests.engine.eight_devices --write"
    sent = {}
    for line in table().splitlines()[5:]:
        mesh_name, name, *_, together = line.strip("| ").split(" | ")
        sent.setdefault(mesh_name, {})[name] = float(together)
    for found in sent.values():
        assert max(found.values()) == found["dense, by XLA"], found


def check_collectives_of_a_block():
    """Two sums of activations over `tp`, one of each weight's gradient over `dp`, and nothing else; with
    `fsdp` each weight and mask is gathered forward and backward, and its gradient scattered."""
    for name in EXACT:
        run, _ = compiled_block(name, "dp 4, tp 2")
        weight, tokens = d * f // 2, T // 4 * d
        want = [("all-reduce", n) for n in (weight, weight, tokens, tokens)]
        found = collectives(run)
        assert found == sorted(want), (name, found, sorted(want))


def check_weights_are_gathered_packed_where_products_multiply_them_packed():
    """Forward and again backward. In 16-bit floats they are 0.5625 of dense ones. Gradients are scattered."""
    if KERNELS is None:
        return  # without kernels every product runs dense
    n = d * f
    dense, _ = partitioned(s24.methods.Dense(), {"fsdp": 4})
    assert dense.as_text().count("stablehlo.all_gather") == 4  # of n elements; XLA on CPUs keeps two of them
    for name in ("FST", "SLoPe"):
        run, arguments = partitioned(EXACT[name], {"fsdp": 4}, seed=3)
        compiled = run.compile()
        assert_near(compiled(*arguments), on_one_device(EXACT[name], seed=3))
        found = collectives(compiled)
        assert [size for kind, size in found if kind == "reduce-scatter"] == [n // 4] * 2, found
        gathered = [size for kind, size in found if kind == "all-gather"]
        assert gathered == [n // 8] * 4 + [n // 2] * 4 and len(gathered) + 2 == len(found), found
        packed = sum(
            size if size == n // 8 else 2 * size for size in gathered
        )  # bytes of metadata, and values
        assert packed <= 0.57 * 4 * 2 * n
    lowered, _ = partitioned(EXACT["FST"], {"fsdp": 8})  # four rows in a piece are half a byte of metadata
    assert lowered.as_text().count("stablehlo.all_gather") == 8


def check_pieces_are_gathered_packed_and_then_compressed():
    """A program for CUDA, lowered as if cuSPARSELt could run: its layout is made of what was gathered."""
    if KERNELS is None:
        return
    method, n = s24.methods.FST(), 128
    like = {"x": (4 * n, n), "w1": (n, 2 * n), "w2": (2 * n, n)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in like.items()}
    state = {name: method.state_shapes(like[name], name) for name in ("w1", "w2")}
    specs = {"x": P("fsdp"), "w1": P("fsdp"), "w2": P(None, "fsdp")}

    def loss(arrays, state):
        options = {"implementation": "cusparselt", "specs": specs, "activation": "relu"}
        return s24.sparse_ffn(*map(arrays.get, like), method, state, KEY, **options).sum()

    obstacle, decision.library_obstacle = decision.library_obstacle, lambda: None
    try:
        with jax.set_mesh(mesh(4, names=("fsdp",))):
            step = jax.jit(jax.value_and_grad(loss)).trace(arrays, state)
            text = step.lower(lowering_platforms=("cuda",)).as_text()
    finally:
        decision.library_obstacle = obstacle
    assert text.count("custom_call @s24_cusparselt_compress") == 4
    gathered = re.findall(r"stablehlo.all_gather.*-> tensor<(\d+)x(\d+)x(\w+)>", text)
    sizes = sorted((int(a) * int(b), kind) for a, b, kind in gathered)
    assert sizes == [(n * n // 4, "ui8")] * 4 + [(n * n, "bf16")] * 4, sizes


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


def check_routers_learn_from_the_tokens_of_each_shard():
    """What they learn is that of one device. Over the mesh go pieces of a weight, the sums of what is learnt,
    and for every sixteenth token a sum of a number for each cluster; no token is gathered."""
    from flax import nnx

    options = {"routing": "learned", "columns": "statistic", "token_blocks": 4}
    method = s24.methods.Venom(v=16, m=8, clusters=4, **options)
    block = s24.nn.FFN(d, f, method=method, axes=("embed", "mlp"), implementation=KERNELS, rngs=nnx.Rngs(0))
    x, block.router[...], block.up.state["norms"][...] = draw(11, (16, 16, d), (d, 4), (4, f))
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


def check_linear_and_gated_layers_over_dp_and_tp():
    """Columns of the first, rows of the second over `tp`; a bias is added once; the batch has three axes."""
    from jax_sparse24.engine.gated import Weight, gated_ffn

    x, w1, w2, b1, b2 = draw(4, (8, 8, d), (d, f), (f, d), (f,), (d,))
    method = s24.methods.FST(mvue=None)
    masks = [method.init(w) for w in (w1, w1 * 2, w2)]

    def linear(x, w1, w2, b1, b2, first=None, second=None):
        y = s24.sparse_dot(x, w1, method, masks[0], bias=b1, implementation=KERNELS, specs=first)
        return s24.sparse_dot(y, w2, method, masks[2], bias=b2, implementation=KERNELS, specs=second).sum()

    def gated(x, w1, w2, specs=None):
        weights = [Weight(w, m, None) for w, m in zip((w1, w1 * 2, w2), masks, strict=True)]
        return gated_ffn([x, x], *weights, method, "silu", KERNELS, specs).sum()

    columns = {"x": P("dp"), "w": P(None, "tp")}, {"x": P("dp", None, "tp"), "w": P("tp", None)}
    specs = {"x": P("dp"), "gate": P(None, "tp"), "up": P(None, "tp"), "down": P("tp")}
    for function, arguments, cuts in (
        (linear, (x, w1, w2, b1, b2), columns),
        (gated, (x, w1, w2), (specs,)),
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
    """A scan over layers with remat, a vmap over experts, and a shard_map of the user around it."""
    x, w1, w2 = draw(5, (T, d), (3, d, f), (3, f, d))
    w1, w2, method = w1 / 8, w2 / 8, s24.methods.STE()
    specs = {"x": P("dp"), "w1": P(None, "tp"), "w2": P("tp")}

    def ffn(x, w1, w2, specs):
        return s24.sparse_ffn(x, w1, w2, method, implementation=KERNELS, activation="relu", specs=specs)

    def scanned(x, w1, w2, specs=None):
        def layer(x, weights):
            return x + ffn(x, *weights, specs), None

        return (jax.lax.scan(jax.checkpoint(layer), x, (w1, w2))[0] ** 2).mean()

    def experts(x, w1, w2, specs=None):
        return (jax.vmap(lambda w1, w2: ffn(x, w1, w2, specs))(w1, w2) ** 2).mean()

    def within(x, w1, w2, specs=None):
        """Manual over `dp`, so that of the specs only `tp` is left."""

        def local(x, w1, w2):
            return jax.lax.pmean((ffn(x, w1[0], w2[0], specs) ** 2).mean(), "dp")

        if specs is None:
            return (ffn(x, w1[0], w2[0], None) ** 2).mean()
        manual = {"in_specs": (P("dp"), P(), P()), "out_specs": P(), "axis_names": {"dp"}}
        return jax.shard_map(local, **manual)(x, w1, w2)

    for function in (scanned, experts, within):
        gradient = jax.grad(function, argnums=(0, 1, 2))
        want = jax.jit(gradient)(x, w1, w2)
        with jax.set_mesh(mesh(4, 2)):
            run = jax.jit(jax.grad(lambda *a, f=function: f(*a, specs), argnums=(0, 1, 2)))
            compiled = run.lower(x, w1, w2).compile()
        assert_near(compiled(x, w1, w2), want, 1e-5)
        gathers = [found for found in collectives(compiled) if found[0] != "all-reduce"]
        assert not gathers, (function.__name__, gathers)


def check_errors_of_partitions():
    def raises(text, specs, method=EXACT["STE"], T=T, f=f, sizes=(4, 2)):
        x, w1, w2 = draw(6, (T, d), (d, f), (f, d))
        with jax.set_mesh(mesh(*sizes)):
            try:
                jax.eval_shape(
                    lambda *a: s24.sparse_ffn(*a, method, states(method, *a[1:]), KEY, specs=specs), x, w1, w2
                )
            except ValueError as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"nothing raised {text!r}")

    columns = {"x": P("dp"), "w1": P(None, "tp"), "w2": P("tp")}
    raises("x along axis 0 of size 66 does not divide into 4 shards (dp = 4)", columns, T=66)
    raises("w1 along axis -1 of size 65 does not divide into 2 shards", columns, f=65)
    raises("no axis 'model'; it has 'dp', 'tp'", {"w1": P("model")})
    raises("they share a dimension", {"x": P("dp"), "w1": P(None, "tp")})
    raises("specs name w3", {"w3": P()})
    raises("cuts two dimensions", {"w1": P("tp", "tp"), "w2": P("tp")})
    unknown = type("Own", (s24.methods.BiMask,), {"state_axes": {}})(trials=1)
    raises("Own keeps 'order' of shape (64,) for w1 of shape (32, 64), which mesh axis tp", columns, unknown)
    blocks = s24.methods.Activation24(token_blocks=6)
    raises("token_blocks=6 is no multiple of the 4 shards", columns, blocks)
    raises("operand w2 of product F2, one shard of it, of shape (62, 32)", columns, f=124)
    x, w = draw(6, (T, d), (d, f))
    with jax.set_mesh(mesh(4, 2, explicit=True)):
        for name, declared in (("w", P(None, "tp")), ("x", P("dp"))):
            actual = {"x": x, "w": w, name: jax.device_put({"x": x, "w": w}[name], P("tp"))}
            try:
                s24.sparse_dot(actual["x"], actual["w"], s24.methods.STE(), specs={name: declared})
            except ValueError as error:
                there = (
                    f"{name} is declared to be cut by {shards.spec_text(declared)}, but it is cut by P('tp'"
                )
                assert there in str(error) and "jax.sharding.reshard" in str(error), error
            else:
                raise AssertionError("a declared sharding that is not the actual one")
    try:
        s24.sparse_dot(x, w, s24.methods.STE(), specs={"x": P("dp")})
    except ValueError as error:
        assert "jax.set_mesh" in str(error)
    else:
        raise AssertionError("a cut without a mesh")


def check_layers_with_logical_axes():
    """By default rules, every parameter and mask rests as declared, and the block equals one device."""
    from flax import nnx

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
    try:
        with jax.set_mesh(cut):
            s24.nn.Linear(d, f, axes=("embed", "width"), **options, rngs=nnx.Rngs(0))(x)
    except ValueError as error:
        assert "no rule says over which mesh axes the logical axis 'width' is cut" in str(error), error
    else:
        raise AssertionError("a name without a rule")


def check_layers_outside_of_jit():
    """A call and a refresh, over a mesh of which other axes are left to XLA, with the bits of one device."""
    from flax import nnx

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
    columns that `BiMask` keeps needs a kernel whose columns are cut."""
    from flax import nnx

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
    moved, _ = compiled(linear(orders, ("mlp", "embed")), 1, 8, 1)
    assert f * f in {size for _, size in moved}, moved
    options = {"experts": 4, "method": s24.methods.FST(), "expert_axis": "expert"}
    found, _ = compiled(lambda: s24.nn.MoE(d, f, **options, rngs=nnx.Rngs(0)), 2, 4, 1)
    assert all(kind == "all-reduce" and size <= 4 * f for kind, size in found), found


def check_projections_of_attention_are_cut_by_heads():
    """Sparse ones with adapters, and low-rank ones. Of activations there are two sums over shards, forward
    and backward, as of dense projections, and those of the rank's width; nothing of them is gathered. An
    order of columns moves with them."""
    from flax import nnx

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
                return nnx.merge(graph, params, rest)(x).sum()

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
    layer = s24.nn.Linear(d, d, method=s24.methods.BiMask(trials=1), **options)
    order, places, scale = rng.permutation(d), rng.permutation(d), draw(5, (d,))[0]
    layer.state["order"][...] = jnp.asarray(order)

    def moved(x):
        return (with_columns(layer, x, lambda w: w[:, places], 4) * scale[places]).sum()

    want = jax.jit(jax.grad(lambda x: (layer(x) * scale).sum()))(x[:, :4])
    with jax.set_mesh(cut):
        assert_near(jax.jit(jax.grad(moved))(x[:, :4]), want)


def check_experts_over_an_axis_by_all_to_all():
    """Dropless, values and gradients of one device; with a capacity, those of a call for each shard."""
    from flax import nnx

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
        try:
            with jax.set_mesh(mesh(2, 2, 2, names=("dp", "fsdp", "tp"), explicit=True)):
                moe.expert_axis = experts
                call(*state, jax.device_put(x, P(("dp", "fsdp"))), nnx.graphdef(moe))
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"nothing raised {text!r}")

    for text, rules in (
        ("mesh axis 'tp' cuts experts, but not tokens", {"batch": "dp", "expert": "tp", "mlp": None}),
        (
            "the logical axis 'expert' is cut by P('model'), but the mesh in the context has no",
            {"batch": "dp", "expert": "model", "mlp": None},
        ),
        (
            "12 rows of x of shape (12, 8, 32) do not divide into 8 shards",
            {"batch": ("dp", "tp"), "expert": "tp", "mlp": None},
        ),
        ("mesh axis 'tp' cuts the kernels of experts", {"batch": "tp", "expert": "tp", "mlp": "tp"}),
    ):
        with jax.set_mesh(mesh(4, 2)), nnx.logical_axis_rules(tuple(rules.items())):
            try:
                jax.eval_shape(functools.partial(call, graph=graph), *state, x[:12])
            except ValueError as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"nothing raised {text!r}")


def program_on(mesh, method, **train):
    """A program of the launcher whose model has widths by which arrays are told apart."""
    from experiments.config import Config, Optim, Train
    from experiments.data import text
    from experiments.models import decoder
    from experiments.training.step import Program

    config = Config(
        model=decoder.Config(layers=1, d=48, f=64, heads=4, kv_heads=2, implementation=KERNELS),
        data=text.Config(seq=124, batch=16),
        optim=Optim(warmup=1),
        train=Train(steps=4, **train),
        mesh=mesh,
        method=method,
    )
    return Program(config)


def check_a_training_step_on_a_mesh():
    """Cut over all axes, of two micro-batches. Each piece of a gradient is summed over `dp` once, after both,
    and by default scattered over `fsdp` once; activations are summed four times in a block, twice of
    attention and twice of the feed-forward, and never gathered; the gradient of the embedding is summed after
    the loop over parts of the loss."""
    from experiments.config import Mesh
    from experiments.training import step as steps

    steps.VOCABULARY_AT_ONCE, steps.LOGITS_AT_ONCE = 256, 2**15  # two parts
    for gather in ("step", "product"):
        sizes = Mesh(dp=2, fsdp=2, tp=2, gather=gather)
        program = program_on(sizes, s24.methods.FST(dense_fraction=0.0), accumulate=2)
        step = program.step(sparse=True)
        (main,) = re.findall(r"\nENTRY .*", step.as_text(), re.DOTALL)
        state = jax.tree.leaves(program.abstract_state()["params"])
        pieces = sorted(math.prod(x.sharding.shard_shape(x.shape)) for x in state)
        assert "while(" in main
        sums = [size for _, size in collectives(main, "all-reduce") if size != 64]  # of a kernel's checksum
        assert sums == pieces, sums
        tokens = 16 // 4 // 2 * program.config.data.seq  # a multiple of 31, as no width is
        with_tokens = [found for found in collectives(step) if found[1] % 31 == 0]
        assert with_tokens == [("all-reduce", tokens * program.config.model.d)] * 4, with_tokens
        if gather == "step":
            cut = [
                math.prod(x.sharding.shard_shape(x.shape)) for x in state if "fsdp" in str(x.sharding.spec)
            ]
            scattered = collectives(step, "reduce-scatter")
            assert (
                scattered
                == collectives(main, "reduce-scatter")
                == [("reduce-scatter", n) for n in sorted(cut)]
            )
            continue
        functions = [text for text in step.as_text().split("\n\n") if "= f32[257," in text]
        summing = [
            text for text in functions if re.search(r"f32\[257,.* (all-reduce|reduce-scatter)\(", text)
        ]
        assert summing and all(" while(" in text for text in summing), "within the loop over parts"


def check_gradients_are_summed_once_over_all_shards_of_tokens():
    """By a loop that sums over `fsdp`, too: weights and masks are gathered before all micro-batches, and
    gradients scattered after them. A step by Adam leaves the state that it leaves on one device, with its
    draws: gradients of activations are small whole numbers, the same in any order of sums."""
    import optax
    from flax import nnx

    from experiments.training.mesh import shardings

    options = {"method": s24.methods.FST(), "activation": "relu", "implementation": KERNELS}
    model = s24.nn.FFN(d, f, **options, axes=("embed", "mlp"), rngs=nnx.Rngs(0))
    weights = dict(zip(("up", "down"), draw(3, (d, f), (f, d)), strict=True))
    nnx.update(model, {name: {"kernel": w} for name, w in weights.items()})
    s24.nn.reset(model)
    (batch,) = draw(4, (16, 28, d))

    def step_of(sum_over):
        tx = optax.adam(0.01, eps=1e-2)
        loop = s24.Loop(model, lambda m, x: m(x).mean(), tx, 4, accumulate=2, sum_over=sum_over)
        step = loop.pure_step(True)
        return (lambda state, parts: step(state, parts)[0]), loop.init(), loop.micro_batches(batch)

    step, whole, parts = step_of(())
    want = jax.jit(step)(whole, parts)
    for sizes, explicit in (({"dp": 8}, False), ({"fsdp": 4, "tp": 2}, True), ({"fsdp": 4, "tp": 2}, False)):
        step, whole, _ = step_of(tuple(name for name in sizes if name != "tp"))
        cut = mesh(*sizes.values(), names=tuple(sizes), explicit=explicit)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = shardings(whole, cut)
            state, parts = (
                jax.device_put(whole, places),
                jax.device_put(parts, P(None, ("dp",) if "dp" in sizes else "fsdp")),
            )
            compiled = jax.jit(step, out_shardings=places).lower(state, parts).compile()
        assert_near(compiled(state, parts), want, 1e-5)
    (main,) = re.findall(r"\nENTRY .*", compiled.as_text(), re.DOTALL)
    n = d * f // 2  # of a weight on the devices of one `tp`
    large = [found for found in collectives(main) if found[1] >= n // 4]
    assert large == [("all-gather", n)] * 4 + [("reduce-scatter", n // 4)] * 2, large
    within = [found for found in collectives(compiled) if found not in collectives(main)]
    assert not [found for found in within if found[0] != "all-reduce" or found[1] % 7], within


def check_a_checkpoint_goes_on_over_another_mesh():
    """To the bit, moments and masks too, and every array lies as its own mesh has it."""
    import tempfile

    from experiments.config import Mesh
    from experiments.training.checkpoint import Checkpoints

    method = s24.methods.FST()
    one, other = (program_on(mesh, method) for mesh in (Mesh(dp=2, fsdp=2, tp=2), Mesh(fsdp=-1, dp=1)))
    rng = np.random.default_rng(0)

    def filled(x):
        return jax.device_put(rng.integers(0, 2, x.shape).astype(x.dtype), x.sharding)

    state = jax.tree.map(filled, one.abstract_state())
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.manager.wait_until_finished()
        found = checkpoints.restore(1, other.abstract_state())
    jax.tree.map(np.testing.assert_array_equal, found, state)
    kernel = found["opt"], found["sparse"]["blocks"][0]["ffn"]["up"]["state"]["mask"].get_value()
    assert kernel[1].sharding.spec == P("fsdp", "tp") and dict(kernel[1].sharding.mesh.shape)["fsdp"] == 8
    places = jax.tree.map(lambda x, like: x.sharding == like.sharding, found, other.abstract_state())
    assert all(jax.tree.leaves(places))


def check_four_pieces_take_a_third_of_the_memory():
    """Of parameters, moments and masks on each device, by XLA's own account of a program that takes them."""
    from experiments.config import Mesh

    held = {}
    for fsdp in (1, 4):
        state = program_on(Mesh(fsdp=fsdp), s24.methods.FST()).abstract_state()
        plan = jax.jit(lambda state: state).lower(state).compile().memory_analysis()
        held[fsdp] = plan.argument_size_in_bytes
    assert held[4] <= 0.35 * held[1], held


def check_the_page_on_several_devices_runs():
    page = PAGE.read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(block, names)
    assert names["y"].shape == names["x"].shape and names["y"].sharding.spec == P("dp")
    assert names["state"]["up"]["kernel"].get_value().sharding.spec == P("fsdp", "tp")


ALL_MESHES = (
    {"dp": 8},
    {"fsdp": 8},
    {"tp": 2},
    {"dp": 4, "tp": 2},
    {"dp": 2, "fsdp": 2, "tp": 2},
)


def layers_on(method, kind: str):
    """A function that compares two linear layers, or a gated block, by value and gradients with one device.
    Weights are small whole numbers, of which sums are exact in any order."""
    from flax import nnx

    class Two(nnx.Module):
        def __init__(self, **options):
            self.up = s24.nn.Linear(d, f, axes=("embed", "mlp"), **options)
            self.down = s24.nn.Linear(f, d, axes=("mlp", "embed"), **options)

        def __call__(self, x):
            return self.down(jax.nn.relu(self.up(x)))

    options = {"method": method, "use_bias": False, "implementation": KERNELS, "rngs": nnx.Rngs(0)}
    gated = {"axes": ("embed", "mlp"), "activation": "relu"}
    block = Two(**options) if kind == "linear" else s24.nn.GatedFFN(d, f, **gated, **options)
    nnx.update(block, jax.tree.map(lambda w: draw(w.size, w.shape)[0], nnx.state(block, nnx.Param)))
    s24.nn.reset(block)
    s24.refresh(block, step=0)
    (x,), (graph, params, rest) = draw(1, (T, d)), nnx.split(block, nnx.Param, ...)

    @jax.jit
    def gradient(params, rest, x):
        return jax.value_and_grad(lambda p, x: nnx.merge(graph, p, rest)(x).sum(), (0, 1))(params, x)

    want = gradient(params, rest, x)

    def compare(sizes, explicit):
        cut = mesh(*sizes.values(), names=tuple(sizes), explicit=explicit)
        tokens = tuple(n for n in ("dp", "fsdp") if n in sizes) or None
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = nnx.get_named_sharding((params, rest), cut)
            arguments = *jax.device_put((params, rest), places), jax.device_put(x, P(tokens))
            assert_near(gradient(*arguments), want)

    return compare


def all_meshes() -> list[str]:
    """Every method as a feed-forward block, as linear layers and as a gated block, on every mesh, with both
    kinds of axes, against one device; what differs, or is refused, is a line."""
    global T
    T, told = 128, []  # sixteen tokens for each of eight shards
    methods = EXACT | {"STEP": s24.methods.STEP(), "BiMask": s24.methods.BiMask(trials=2)}

    def block_on(method):
        activation = "squared_relu" if type(method).__name__ in ("Activation24", "Venom") else "relu"
        want = on_one_device(method, activation)

        def compare(sizes, explicit):
            run, arguments = partitioned(method, sizes, explicit, activation)
            assert_near(run.compile()(*arguments), want)

        return compare

    for name, method in methods.items():
        kinds = {"FFN": block_on(method)}
        if type(method).__name__ not in ("Activation24", "Venom"):  # which cut activations
            kinds |= {kind: layers_on(method, kind) for kind in ("linear", "gated")}
        for kind, compare in kinds.items():
            for sizes in ALL_MESHES:
                for explicit in (False, True):
                    try:
                        compare(sizes, explicit)
                        outcome = "equal"
                    except (AssertionError, ValueError) as error:
                        outcome = str(error).splitlines()[0]
                    told.append(f"{name}, {kind}, {sizes}, explicit={explicit}: {outcome}")
    return told


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


def main(names) -> None:
    if names == ["--write"]:
        PAGE.write_text(written(PAGE.read_text()))
        return
    if names == ["--all-meshes"]:
        print("\n".join(all_meshes()))
        return
    outcomes = {}
    for name in names or CHECKS:
        begun = time.process_time()
        try:
            CHECKS[name]()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        print(f"{time.process_time() - begun:5.1f} s  {name}", file=sys.stderr)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
