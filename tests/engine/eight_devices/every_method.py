"""Every method on every mesh: its values and gradients are those of one device, and it sends no more than the
dense block that XLA cuts."""

import functools
import itertools
from functools import partial

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from tests.engine.eight_devices.common import (
    EXACT,
    KERNELS,
    assert_near,
    axes_of,
    by_xla,
    collectives,
    d,
    draw,
    f,
    mesh,
    on_one_device,
    partitioned,
    traffic,
)

T = 128  # sixteen tokens for each of eight shards
MESHES = ({"dp": 8}, {"fsdp": 8}, {"tp": 2}, {"dp": 4, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2})
METHODS = EXACT | {"STEP": s24.methods.STEP(), "BiMask": s24.methods.BiMask(trials=1, feature_blocks=2)}


def on_activations(method) -> bool:
    """Whether a method makes activations sparse, and has no table for a single layer."""
    return type(method).__name__ in ("Activation24", "Venom")


def block(method):
    """A function that compiles value and gradients of a feed-forward block over a mesh, and what they are on
    one device."""
    activation = "squared_relu" if on_activations(method) else "relu"

    def on(sizes, explicit):
        run, arguments = partitioned(method, sizes, explicit, activation, tokens=T)
        return run.compile(), arguments

    return on, on_one_device(method, activation, tokens=T)


def layers(method, kind: str):
    """As `block`, of two linear layers or of a gated block. Weights are small whole numbers, of which sums
    are exact in any order."""

    class Two(nnx.Module):
        def __init__(self, **options):
            self.up = s24.nn.Linear(d, f, axes=("embed", "mlp"), **options)
            self.down = s24.nn.Linear(f, d, axes=("mlp", "embed"), **options)

        def __call__(self, x):
            return self.down(jax.nn.relu(self.up(x)))

    options = {"method": method, "use_bias": False, "implementation": KERNELS, "rngs": nnx.Rngs(0)}
    gated = {"axes": ("embed", "mlp"), "activation": "relu"}
    model = Two(**options) if kind == "linear" else s24.nn.GatedFFN(d, f, **gated, **options)
    nnx.update(model, jax.tree.map(lambda w: draw(w.size, w.shape)[0], nnx.state(model, nnx.Param)))
    s24.nn.reset(model)
    (x,), (graph, params, rest) = draw(1, (T, d)), nnx.split(model, nnx.Param, ...)

    @jax.jit
    def gradient(params, rest, x):
        return jax.value_and_grad(lambda p, x: nnx.merge(graph, p, rest)(x).sum(), (0, 1))(params, x)

    def on(sizes, explicit):
        cut = mesh(*sizes.values(), names=tuple(sizes), explicit=explicit)
        with jax.set_mesh(cut), nnx.logical_axis_rules(s24.sharding.rules_for(cut)):
            places = nnx.get_named_sharding((params, rest), cut)
            arguments = *jax.device_put((params, rest), places), jax.device_put(x, P(axes_of(sizes)[0]))
            return gradient.lower(*arguments).compile(), arguments

    return on, gradient(params, rest, x)


def cases(method):
    """Of a method each kind of block, by name: what makes it."""
    made = {"FFN": block}
    if not on_activations(method):
        made |= {kind: partial(layers, kind=kind) for kind in ("linear", "gated")}
    return made


@functools.cache
def dense(gated: bool, *sizes) -> float:
    """Bytes that each device sends for a dense block that XLA cuts."""
    return sum(traffic(by_xla(dict(sizes), gated, T)).values())


def assert_bytes(name: str, kind: str, sizes, compiled) -> None:
    """At most those of the dense block, without what a layer's checksum of a kernel reads, f elements."""
    sent, most = sum(traffic(compiled, without=f).values()), dense(kind == "gated", *sizes.items())
    assert sent <= most, (name, kind, sizes, sent, most)


def check_every_method_on_every_mesh():
    """As a feed-forward block over declared axes: values and gradients, and bytes. On one mesh each, also
    over explicit axes, where the same is sent."""
    for number, (name, method) in enumerate(METHODS.items()):
        on, want = block(method)
        for place, sizes in enumerate(MESHES):
            run, arguments = on(sizes, False)
            assert_near(run(*arguments), want, what=f"{name}, {sizes}")
            assert_bytes(name, "FFN", sizes, run)
            if place == number % len(MESHES):
                explicit, arguments = on(sizes, True)
                assert_near(explicit(*arguments), want, what=f"{name}, {sizes}, explicit")
                assert collectives(explicit) == collectives(run), (name, sizes)


def check_layers_of_every_method():
    """Two linear layers, and a gated block, on a mesh each; meshes and kinds of axes take turns."""
    turn = 0
    for name, method in METHODS.items():
        for kind, make in list(cases(method).items())[1:]:
            on, want = make(method)
            sizes, explicit = MESHES[turn % len(MESHES)], bool(turn % 2)
            run, arguments = on(sizes, explicit)
            assert_near(run(*arguments), want, what=f"{name}, {kind}, {sizes}, explicit={explicit}")
            if not method.trains_adapters:
                assert_bytes(name, kind, sizes, run)
            turn += 1


def all_meshes() -> list[str]:
    """Every method as a feed-forward block, as linear layers and as a gated block, on every mesh, with both
    kinds of axes, against one device; what differs, or is refused, is a line."""
    told = []
    for name, method in METHODS.items():
        for kind, make in cases(method).items():
            on, want = make(method)
            for sizes, explicit in itertools.product(MESHES, (False, True)):
                try:
                    run, arguments = on(sizes, explicit)
                    assert_near(run(*arguments), want)
                    outcome = "equal"
                    if not (kind != "FFN" and method.trains_adapters):
                        assert_bytes(name, kind, sizes, run)
                except (AssertionError, ValueError) as error:
                    outcome = str(error).splitlines()[0]
                told.append(f"{name}, {kind}, {sizes}, explicit={explicit}: {outcome}")
    return told
