"""Checks of the loop and the launcher on a mesh."""

import contextlib
import functools
import math
import re
from collections import Counter
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from tests.engine.eight_devices.common import KERNELS, assert_near, collectives, d, draw, f, mesh

in_two_parts = functools.partial(
    mock.patch.multiple, "experiments.training.step", VOCABULARY_AT_ONCE=256, LOGITS_AT_ONCE=2**15
)  # logits of these programs


def program_on(mesh, method, devices=None, dtype="float32", tied=True, **train):
    """A program of the launcher whose model has widths by which arrays are told apart."""
    from experiments.config import Config, Optim, Train
    from experiments.data import text
    from experiments.models import decoder
    from experiments.training import step as steps

    steps._made.cache_clear()  # what was compiled with logits in other parts
    sizes = {"layers": 1, "d": 48, "f": 64, "heads": 4, "kv_heads": 2}
    config = Config(
        model=decoder.Config(**sizes, dtype=dtype, implementation=KERNELS, tied=tied),
        data=text.Config(seq=124, batch=16),
        optim=Optim(warmup=1),
        train=Train(steps=4, **train),
        mesh=mesh,
        method=method,
    )
    return steps.Program(config, devices=devices)


def learned(program, begin):
    """A compiled step of it, and what it measures and its first moments after that step.

    begin: a state, in memory of the host."""
    step, tokens = program.step(sparse=True), np.random.default_rng(0).integers(0, 255, (16, 125), np.int32)
    state, metrics = step(jax.device_put(begin, program.shardings), program.batch(tokens))
    leaves = jax.tree_util.tree_leaves_with_path(state["opt"])
    moments = [x for path, x in leaves if ".mu" in jax.tree_util.keystr(path)]
    return step, jax.device_get((metrics, moments))


@in_two_parts()
def check_a_training_step_on_a_mesh():
    """Cut over all axes, of two micro-batches. Each piece of a gradient is summed over `dp` once, after both,
    and by default scattered over `fsdp` once; activations are summed four times in a block, twice of
    attention and twice of the feed-forward, and never gathered; the gradient of the embedding is summed after
    the loop over parts of the loss."""
    from experiments.config import Mesh

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


def check_attention_that_jax_partitions_with_micro_batches():
    """JAX cuts cuDNN's attention over devices by a rule of its own, as it does this one: over mesh axes that
    hold tokens, whose sums wait for all micro-batches, and over others. It learns what one device does."""
    from experiments.config import Mesh

    xla = jax.nn.dot_product_attention

    def causal(q, k, v):
        return xla(q, k, v, is_causal=True)

    def gradients(q, k, v, ct):
        return jax.vjp(causal, q, k, v)[1](ct)

    def cut(function, rule):
        def partition(mesh, operands, results):
            shardings = (jax.tree.map(lambda x: x.sharding, tree) for tree in (results, operands))
            return mesh, function, *shardings

        partitioned = custom_partitioning(function)
        partitioned.def_partition(partition=partition, sharding_rule=rule)
        return partitioned

    inputs = "b q h c, b k g c, b k g c"
    forward, backward = cut(causal, f"{inputs} -> b q h c"), cut(gradients, f"{inputs}, b q h c -> {inputs}")
    attend = jax.custom_vjp(forward)
    attend.defvjp(lambda *qkv: (forward(*qkv), qkv), lambda qkv, ct: backward(*qkv, ct))

    def attention(q, k, v, *, is_causal, implementation):
        return attend(q, k, v)

    begin = want = None
    with mock.patch.object(jax.nn, "dot_product_attention", attention):
        for sizes in ({"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}):
            devices = jax.devices()[: math.prod(sizes.values())]
            program = program_on(Mesh(**sizes), s24.methods.Dense(), devices, accumulate=2)
            begin = begin or jax.device_get(program.initial_state())
            _, found = learned(program, begin)
            want = want or found
            assert_near(found, want, 1e-5, sizes)


def check_the_two_gradients_of_a_tied_embedding_are_summed_once():
    """Of one micro-batch, with logits at once and in parts, those of looking up and of the head are added on
    each device. Over `fsdp` the embedding is gathered once, too, and a teacher's once more. What a step
    learns is that of one device."""
    for method in (s24.methods.FST(mvue=None, dense_fraction=0.0), s24.methods.AST()):
        _tables_are_summed_once(method, True, (contextlib.nullcontext, in_two_parts))


def check_the_gradient_of_an_untied_head_is_summed_once():
    """And not in each part of the logits, of which a teacher has its own, beside that of the embedding."""
    _tables_are_summed_once(s24.methods.AST(), False, (in_two_parts, in_two_parts))


def _tables_are_summed_once(method, tied: bool, parts):
    """The embedding, and the head where it is another table.

    parts: in which logits are made over `dp`, and with `fsdp`."""
    from experiments.config import Mesh

    rows, width = 257, 48
    tables, models = 1 if tied else 2, 2 if method.training(4).teacher else 1
    wanted = {
        Mesh(dp=8): [("all-reduce", rows * width)] * tables,
        Mesh(dp=2, fsdp=4): [
            *[("all-gather", rows * width)] * models * tables,
            *[("all-reduce", rows * width // 4)] * tables,
            *[("reduce-scatter", rows * width // 4)] * tables,
        ],
    }

    one = program_on(Mesh(dp=1), method, jax.devices()[:1], tied=tied)
    begin = jax.device_get(one.initial_state())
    _, want = learned(one, begin)
    shapes = [x.shape for x in want[1]]
    assert sum(rows in shape for shape in shapes) == tables and all(np.abs(x).max() > 0 for x in want[1])
    for logits, (sizes, sums) in zip(parts, wanted.items(), strict=True):
        with logits():
            step, found = learned(program_on(sizes, method, tied=tied), begin)
        (main,) = re.findall(r"\nENTRY .*", step.as_text(), re.DOTALL)
        for text in (main, step):  # none within the loop over parts
            sent = [one for one in collectives(text) if one[1] % rows == 0]
            assert sent == sums, (sizes, sent)
        assert_near(found, want, 1e-5, sizes)


def check_the_dtypes_of_what_a_training_step_sends():
    """Of one micro-batch gradients are summed as they leave the products, in 16 bits; of several in float32,
    after all. Nothing is sent over axes of one device, which all these meshes have."""
    from experiments.config import Mesh
    from experiments.training import mesh as meshes

    up, down, table = "48x64", "64x48", "257x48"
    wanted = {
        (Mesh(dp=8), 1): {("all_reduce", shape, "bf16"): 1 for shape in (up, down, table)},
        (Mesh(dp=8), 2): {("all_reduce", shape, "f32"): 1 for shape in (up, down, table)},
        (Mesh(dp=2, fsdp=4), 1): {("reduce_scatter", "12x64", "bf16"): 1, ("all_reduce", "12x64", "bf16"): 1},
        (Mesh(dp=2, fsdp=4), 2): {("reduce_scatter", "12x64", "f32"): 1, ("all_reduce", "12x64", "f32"): 1},
        (Mesh(dp=2, fsdp=4, gather="product"), 2): {
            ("reduce_scatter", "12x64", "bf16"): 1,  # within the loop over micro-batches
            ("all_reduce", "12x64", "f32"): 1,  # after it
        },
    }
    flags = {"XLA_FLAGS": meshes.ABORTING_PASS}  # lowered, and not compiled
    for (sizes, parts), sums in wanted.items():
        method = s24.methods.FST(dense_fraction=0.0)
        program = program_on(sizes, method, dtype="bfloat16", accumulate=parts)
        with mock.patch.dict("os.environ", flags):
            program.check(sparse=True)
        (lowered,) = program._lowered.values()
        found = Counter(sent(lowered.as_text()))
        kinds = {kind for kind, _, _ in sums}
        widths = {shape for _, shape, _ in sums}
        own = {one: n for one, n in found.items() if one[0] in kinds and one[1] in widths}
        assert own == sums, (sizes, parts, found)
        if sizes.fsdp == 1:
            assert {kind for kind, _, _ in found} == {"all_reduce"}, found


@in_two_parts()
def check_parts_of_the_logits_add_up_gradients_in_float32():
    """On each device, of the embedding or of a head of its own; a teacher has none. What is summed over
    devices then is in 16 bits, as without parts."""
    from experiments.config import Mesh
    from experiments.training import mesh as meshes

    for method in (s24.methods.FST(dense_fraction=0.0), s24.methods.AST()):
        for tied in (True, False):
            program = program_on(Mesh(dp=8), method, dtype="bfloat16", tied=tied)
            with mock.patch.dict("os.environ", {"XLA_FLAGS": meshes.ABORTING_PASS}):  # lowered, not compiled
                program.check(sparse=True)
            (lowered,) = (one.as_text() for one in program._lowered.values())
            shapes = ["257x48"] if tied else ["257x48", "48x257"]
            summed = Counter(one for one in sent(lowered) if one[1] in shapes)
            assert summed == {("all_reduce", shape, "bf16"): 1 for shape in shapes}, summed
            loops = [line for line in lowered.splitlines() if "stablehlo.while" in line]
            carried = [re.findall(rf"tensor<\d+x{shapes[-1]}x(\w+)>", line) for line in loops]
            assert any("f32" in dtypes for dtypes in carried), carried


def sent(text: str) -> list[tuple[str, str, str]]:
    """(collective, shape, dtype) of each result of a collective that a lowered program names itself."""
    found = []
    pattern = r"stablehlo\.(all_reduce|reduce_scatter|all_gather)\"?\(.*?-> tensor<(?:([\dx]+)x)?(\w+)>"
    for kind, shape, dtype in re.findall(pattern, text, re.DOTALL):
        found.append((kind, shape, dtype))
    return found


def check_gradients_are_summed_once_over_all_shards_of_tokens():
    """By a loop that sums over `fsdp`, too: weights and masks are gathered before all micro-batches, and
    gradients scattered after them. A step by Adam leaves the state that it leaves on one device, with its
    draws: gradients of activations are small whole numbers, the same in any order of sums."""
    import optax

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


def check_micro_batches_over_a_mesh_of_both_kinds_of_axes():
    """Gradients whose pieces lie over automatic and explicit axes: the loss is that of one device."""
    import optax

    options = {"method": s24.methods.STE(), "implementation": KERNELS, "rngs": nnx.Rngs(0)}
    model, x = s24.nn.FFN(d, f, axes=("embed", "mlp"), **options), draw(4, (16, 4, d))[0]

    def step(sum_over, batch):
        loop = s24.Loop(model, lambda m, x: m(x).mean(), optax.sgd(1e-2), 4, accumulate=2, sum_over=sum_over)
        return jax.jit(loop.pure_step(True))(loop.init(), loop.micro_batches(batch))[1]

    want, (auto, explicit) = step((), x), (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    for kinds in ((auto, explicit), (explicit, auto)):
        with jax.set_mesh(jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=kinds)):
            assert_near(step(("fsdp",), jax.device_put(x, P("fsdp"))), want, 1e-5)


def check_experts_are_balanced_over_all_shards_of_tokens():
    """With micro-batches, too, of which each device adds up its own: what a router learns of the load of its
    experts is not that of a shard. Weights are those of one device after a step."""
    import optax

    options = {"experts": 4, "capacity_factor": None, "expert_axis": "expert", "rngs": nnx.Rngs(0)}
    model = s24.nn.MoE(d, f, method=s24.methods.STE(), implementation=KERNELS, **options)
    x = jax.random.normal(jax.random.key(3), (16, 4, d))

    def loss(model, x):
        y, routing = model(x)
        return (y**2).mean() + routing.load_balancing_loss

    def stepped(sum_over, state=None, batch=x):
        loop = s24.Loop(model, loss, optax.sgd(1.0), 4, accumulate=2, sum_over=sum_over)
        state, metrics = loop.advance(state or loop.init(), batch, 0)
        return state["params"], metrics

    want, cut = stepped(()), mesh(2, 4, names=("dp", "fsdp"))
    with jax.set_mesh(cut):
        for sum_over in (("dp",), ("dp", "fsdp")):
            state = jax.device_put(s24.Loop(model, loss, optax.sgd(1.0), 4).init(), P())
            assert_near(stepped(sum_over, state, jax.device_put(x, P(("dp", "fsdp")))), want, 1e-5, sum_over)


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


def check_a_run_on_a_mesh_remembers_what_one_device_does():
    """The largest exponent in each history after three steps. With micro-batches over a mesh each shard has
    a loss of its own, whose gradients are larger; all shards hold the same histories then, too."""
    from experiments.config import Mesh

    method = s24.methods.FST(fp8="delayed", mvue=None, dense_fraction=0.0)
    tokens, found = np.random.default_rng(0).integers(0, 255, (16, 125), np.int32), {}
    one, several, begin = Mesh(dp=1), Mesh(dp=2, fsdp=2, tp=2), None
    for name, sizes, devices, parts in (
        ("one", one, 1, 1),
        ("several", several, 8, 1),
        ("parts", several, 8, 2),
    ):
        program = program_on(sizes, method, jax.devices()[:devices], accumulate=parts)
        begin = begin or jax.device_get(program.initial_state())
        step, state = program.step(sparse=True), jax.device_put(begin, program.shardings)
        for _ in range(3):
            state, _ = step(state, program.batch(tokens))
        for entry in method.histories:
            for layer, history in program.loop.view.entries(state["sparse"], entry).items():
                copies = [np.asarray(shard.data) for shard in history.addressable_shards]
                assert all((copy == copies[0]).all() for copy in copies)
                found.setdefault(f"{layer} {entry}", {})[name] = int(np.flatnonzero(copies[0]).max())
    assert len(found) == 4
    for tops in found.values():
        assert tops["one"] == tops["several"] <= tops["parts"] <= tops["one"] + 4, found


def check_four_pieces_take_a_third_of_the_memory():
    """Of parameters, moments and masks on each device, by XLA's own account of a program that takes them."""
    from experiments.config import Mesh

    held = {}
    for fsdp in (1, 4):
        state = program_on(Mesh(fsdp=fsdp), s24.methods.FST()).abstract_state()
        plan = jax.jit(lambda state: state).lower(state).compile().memory_analysis()
        held[fsdp] = plan.argument_size_in_bytes
    assert held[4] <= 0.35 * held[1], held
