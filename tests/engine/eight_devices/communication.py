"""Checks of what compiled programs send, and the table of it in docs/scaling.md."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from jax_sparse24.dispatch import decision
from tests.engine.eight_devices.common import (
    EXACT,
    KERNELS,
    KEY,
    T,
    assert_near,
    by_xla,
    collectives,
    d,
    draw,
    f,
    mesh,
    on_one_device,
    operands,
    partitioned,
    traffic,
)
from tests.engine.eight_devices.every_method import METHODS

TABLE_MESHES = {"dp 4, tp 2": {"dp": 4, "tp": 2}, "dp 2, fsdp 2, tp 2": {"dp": 2, "fsdp": 2, "tp": 2}}
TABLED = ("FST", "SLoPe", "Activation24", "Venom", "BiMask")


@functools.cache
def compiled_block(name, mesh_name):
    """A method's block over a mesh of the table."""
    return partitioned(METHODS[name], TABLE_MESHES[mesh_name], activation="squared_relu")[0].compile()


VERSION = f"jaxlib {jaxlib.__version__}"
PAGE = Path(__file__).parents[3] / "docs/scaling.md"
BEGIN, END = "<!-- collectives: python -m tests.engine.eight_devices --write -->\n", "\n<!-- end -->"


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
        blocks |= {f"`{name}`": compiled_block(name, mesh_name) for name in TABLED}
        for name, compiled in blocks.items():
            sent = traffic(compiled)
            cells = [f"{sent.get(kind, 0) / 1e3:.2f}" for kind in kinds] + [f"{sum(sent.values()) / 1e3:.2f}"]
            lines.append(f"| {mesh_name} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def check_the_table_of_collectives():
    """The page has it. Another version of XLA may join the gathers of forward and backward pass in other
    blocks."""
    page = PAGE.read_text()
    if f"({VERSION})" in page:
        assert page == written(page), "python -m tests.engine.eight_devices --write"


def check_collectives_of_a_block():
    """Two sums of activations over `tp`, one of each weight's gradient over `dp`, and nothing else; with
    `fsdp` each weight and mask is gathered forward and backward, and its gradient scattered."""
    for name in EXACT:
        run = compiled_block(name, "dp 4, tp 2")
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


def check_the_page_on_several_devices_runs():
    page = PAGE.read_text()
    names = {}
    exec("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    assert names["y"].shape == names["x"].shape and names["y"].sharding.spec == P("dp")
    assert names["state"]["up"]["kernel"].get_value().sharding.spec == P("fsdp", "tp")


def check_a_flip_rate_sends_a_number():
    """Of masks that are cut over a mesh, with both kinds of axes: what one device says."""
    old, new = (w > 0 for w in draw(23, (d, f), (d, f)))
    for explicit in (False, True):
        with jax.set_mesh(mesh(4, 2, explicit=explicit)):
            masks = jax.device_put((old, new), P("dp", "tp"))
            run = jax.jit(s24.flip_rate).lower(*masks).compile()
        assert run(*masks) == s24.flip_rate(old, new)
        assert not collectives(run) and "all-reduce(" in run.as_text()


def check_what_is_kept_for_the_backward_pass_is_cut():
    """Over `fsdp`, of tokens and of weights: no device keeps a whole array that has an axis of the block."""
    specs = {"x": P("fsdp"), "w1": P("fsdp"), "w2": P(None, "fsdp")}
    for name in ("FST", "Activation24", "SRSTE"):
        method = EXACT[name]
        x, w1, w2, state = operands(method, 0, T)
        options = {"specs": specs, "activation": "squared_relu", "implementation": KERNELS}
        block = functools.partial(s24.sparse_ffn, method=method, key=KEY, **options)
        kept = lambda state, *arrays, block=block: jax.vjp(functools.partial(block, state=state), *arrays)[1]  # noqa: E731
        with jax.set_mesh(mesh(8, names=("fsdp",))):
            places = {w: jax.tree.map(lambda _, w=w: specs[w], state[w]) for w in state}
            arguments = jax.device_put([state, x, w1, w2], [places, *specs.values()])
            arrays = [leaf for leaf in jax.tree.leaves(jax.jit(kept)(*arguments)) if leaf.size >= d * f // 64]
        whole = [leaf.shape for leaf in arrays if leaf.sharding.is_fully_replicated]
        assert arrays and not whole, (name, whole)
