"""What checks share: methods, arrays, blocks that are cut over a mesh, and what compiled programs send."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from jax_sparse24.dispatch import native

T, d, f = 64, 32, 64
KEY = jax.random.key(5)
METHODS = {
    name: kind()
    for name, kind in vars(s24.methods).items()
    if isinstance(kind, type) and issubclass(kind, s24.methods.Dense.__base__) and name != "Venom"
}
METHODS["Venom"] = s24.methods.Venom(v=16, m=8, clusters=4)
KERNELS = "ffi" if native.available("cpu")[0] else None
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


@functools.cache
def operands(method, seed: int, tokens: int):
    """x, w1 and w2 of small whole numbers, and the state of the method."""
    x, w1, w2 = draw(seed, (tokens, d), (d, f), (f, d))
    return x, w1, w2, states(method, w1, w2)


def axes_of(sizes) -> tuple:
    """The mesh axes of these names that cut rows of x, and those of fsdp and tp; None for those that are not
    there."""
    fsdp, tp = (name if name in sizes else None for name in ("fsdp", "tp"))
    return tuple(name for name in ("dp", "fsdp") if name in sizes) or None, fsdp, tp


def partitioned(method, sizes, explicit=False, activation="relu", key=KEY, seed=0, tokens=T, dtype="float32"):
    """A lowered function of value and gradients of a block that is cut over a mesh, and its arguments."""
    cut, (rows, fsdp, tp) = mesh(*sizes.values(), names=tuple(sizes), explicit=explicit), axes_of(sizes)
    specs = {"x": P(rows), "w1": P(fsdp, tp), "w2": P(tp, fsdp)}

    def loss(x, w1, w2, state):
        options = {"specs": None if explicit else specs, "activation": activation, "implementation": KERNELS}
        return s24.sparse_ffn(x, w1, w2, method, state, key, **options).sum()

    *arrays, state = operands(method, seed, tokens)
    arrays = [x.astype(dtype) for x in arrays]
    like = dict(zip(("w1", "w2"), arrays[1:], strict=True))
    places = {
        w: {name: specs[w] if entry.shape == like[w].shape else P() for name, entry in state[w].items()}
        for w in like
    }
    with jax.set_mesh(cut):
        arguments = jax.device_put([*arrays, state], [*specs.values(), places])
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*arguments), arguments


def on_one_device(method, activation="relu", key=KEY, seed=0, tokens=T):
    def loss(x, w1, w2, state):
        options = {"activation": activation, "implementation": KERNELS}
        return s24.sparse_ffn(x, w1, w2, method, state, key, **options).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*operands(method, seed, tokens))


def assert_near(got, want, tolerance=1e-6, what=""):
    def compare(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, what
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), (what, np.abs(a - b).max())

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


def traffic(compiled, without: int = 0) -> dict[str, float]:
    """Bytes that each device sends, by kind of collective, along a ring: of an array of n bytes over g
    devices (g - 1) / g * n to gather or scatter it, twice that to sum it. Scalars are left out, and arrays of
    `without` elements."""
    sent = {}
    for line in compiled.as_text().splitlines():
        if not (found := re.search(r"= (.*?) (all-reduce|all-gather|reduce-scatter)(?:-start)?\(", line)):
            continue
        n = group_size(line)
        for kind, size in re.findall(r"(\w+)\[([\d,]+)\]", found[1]):
            elements = math.prod(map(int, size.split(",")))
            whole = elements * WIDTHS[kind] * (elements != without)
            share = {"all-reduce": 2 / n, "all-gather": 1 / n, "reduce-scatter": 1}[found[2]]
            sent[found[2]] = sent.get(found[2], 0) + whole * share * (n - 1)
    return sent


def by_xla(sizes, gated=False, tokens=T):
    """A dense block, cut in the same way, whose collectives XLA chooses."""
    x, *weights = draw(0, (tokens, d), *[(d, f)] * (1 + gated), (f, d))
    rows, fsdp, tp = axes_of(sizes)
    specs = P(rows), *[P(fsdp, tp)] * (1 + gated), P(tp, fsdp)

    def loss(x, *weights):
        *first, w2 = weights
        y = math.prod(jax.nn.relu(x @ w) for w in first) @ w2
        return jax.lax.with_sharding_constraint(y, P(rows)).sum()

    with jax.set_mesh(mesh(*sizes.values(), names=tuple(sizes))):
        arguments = jax.device_put((x, *weights), specs)
        gradients = jax.value_and_grad(loss, argnums=tuple(range(len(specs))))
        return jax.jit(gradients, out_shardings=(P(), specs)).lower(*arguments).compile()
