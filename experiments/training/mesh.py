"""How a run lies on its devices: the mesh, and where every array of the state and every row of a batch is."""

import contextlib
import math
import os
from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jax_sparse24 as s24
from experiments.config import Config, Mesh
from experiments.errors import UserError, require

# A pass of XLA for CPUs. It takes the last operation of a sum's computation for the addition, and ends the
# process where that is a copy, as in a `jax.shard_map` over some axes of a mesh (jaxlib 0.10.2 to 0.12.0.1).
ABORTING_PASS = "all-reduce-promotion"
# XLA's options for the steps over `dp`: without its scheduler, which moves what is sent away from what waits
# for it, and with up to so many bytes of gradients in one sum, which leaves the scheduler nothing to hide.
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
OVER_DP = {
    SCHEDULER: False,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 30,
}
TOKENS = ("dp", "fsdp")  # the mesh axes that cut a batch; an index along both is a data index


def sizes(mesh: Mesh, devices: int) -> dict[str, int]:
    """Devices along each axis. Raises UserError unless they multiply to the number of devices."""
    found = mesh.sizes
    known = math.prod(size for size in found.values() if size > 0)
    rest = [name for name, size in found.items() if size == -1]
    said = " * ".join(f"{name} {size}" for name, size in found.items() if size != -1)
    if rest:
        require(
            devices % known == 0,
            f"The mesh cannot be made: {said} = {known} does not divide the {devices} devices. Give --mesh."
            f"{' and --mesh.'.join(name for name in found if name not in rest)} whose product does.",
        )
        return found | {rest[0]: devices // known}
    require(
        known == devices,
        f"The mesh cannot be made: {said} = {known}, but there are {devices} devices. Write --mesh.dp -1 for "
        "as many as the others leave, or sizes whose product is the number of devices.",
    )
    return found


def make(mesh: Mesh, devices: int | Sequence[jax.Device] | None = None) -> jax.sharding.Mesh | AbstractMesh:
    """The mesh of some devices, or of all of all processes; neighbours along `tp` are neighbours on a host.
    For a number of devices it is one without any, which says what lies where and runs nothing."""
    devices = jax.devices() if devices is None else devices
    abstract = isinstance(devices, int)
    found = sizes(mesh, devices if abstract else len(devices))
    shape, kinds = (tuple(found.values()), tuple(found)), {"axis_types": (AxisType.Auto,) * len(found)}
    return AbstractMesh(*shape, **kinds) if abstract else jax.make_mesh(*shape, devices=devices, **kinds)


def inside(mesh: jax.sharding.Mesh):
    """The context in which functions of a run are traced, so that layers cut what they compute."""
    return jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext()


def check(config: Config, mesh: jax.sharding.Mesh) -> None:
    """UserError for a batch that the mesh does not divide, and for what XLA cannot compile."""
    parts = math.prod(mesh.shape[axis] for axis in TOKENS)
    micro = config.data.batch // config.train.accumulate
    along = " * ".join(f"{axis} {mesh.shape[axis]}" for axis in TOKENS)
    require(
        micro % parts == 0,
        f"A micro-batch (data.batch / train.accumulate = {micro} sequences) must be a multiple of the "
        f"{parts} devices that cut it ({along}). Change data.batch, train.accumulate or the mesh.",
    )
    on_cpus = isinstance(mesh, jax.sharding.Mesh) and mesh.devices.flat[0].platform == "cpu"
    without = ABORTING_PASS in os.environ.get("XLA_FLAGS", "")
    require(
        config.model.dtype != "bfloat16" or mesh.size == 1 or not on_cpus or without,
        "XLA's compiler for CPUs ends the process at sums of bfloat16 over some axes of a mesh. Train in "
        f"float32 (--model.dtype float32), or put XLA_FLAGS=--xla_disable_hlo_passes={ABORTING_PASS} before "
        "the command.",
    )


def compiler_options(mesh: jax.sharding.Mesh | AbstractMesh) -> dict:
    """XLA's for the steps over a mesh that differ from its defaults.

    Over `dp` alone, on GPUs of one process, the scheduler is off, so that products stand where they do on one
    device. It would leave all products of weight gradients to the end of a step, beside sums that take
    multiprocessors from them, and keep their operands until then. Gradients are then summed at once, behind
    all products, since at each sum every GPU waits for the slowest (docs/scaling.md). Over `fsdp` steps
    were as fast with the scheduler, which may bring gathers forward, and between hosts, where it may hide
    longer sums, nothing was measured: there XLA's defaults stay. What `XLA_FLAGS` says of an option stands,
    and if it names the scheduler, so do all of XLA's defaults."""
    if isinstance(mesh, AbstractMesh):
        return {}
    devices, flags = mesh.devices.flat, os.environ.get("XLA_FLAGS", "")
    on_gpus = devices[0].platform in ("gpu", "cuda")
    of_one_process = len({device.process_index for device in devices}) == 1
    alone = mesh.size > 1 and mesh.shape["dp"] == mesh.size
    found = OVER_DP if on_gpus and of_one_process and alone and SCHEDULER not in flags else {}
    return {name: value for name, value in found.items() if name not in flags}


def shardings(tree, mesh: jax.sharding.Mesh):
    """A sharding per leaf, by the logical axes that variables declare; leaves without any are whole on every
    device. Raises UserError for an axis that its mesh axes do not divide."""

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        specs = s24.sharding.rests(tree)

    def of(path, leaf, spec):
        if isinstance(leaf, nnx.Variable):
            return leaf.replace(of(path, leaf.get_value(), spec.get_value()))
        _check_divides(jax.tree_util.keystr(path, simple=True, separator="."), leaf.shape, spec, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, tree, specs, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _check_divides(name: str, shape, spec, mesh) -> None:
    for axis, (size, axes) in enumerate(zip(shape, spec, strict=False)):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts = math.prod(mesh.shape[a] for a in axes)
        if size % parts:
            along = " * ".join(f"{a} {mesh.shape[a]}" for a in axes)
            raise UserError(
                f"The mesh does not divide {name} of shape {shape}: axis {axis}, of size {size}, into "
                f"{parts} shards ({along}). Choose a width that is a multiple of {parts}, or a smaller "
                f"--mesh.{axes[0]}."
            )


def whole(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Of what is the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: jax.sharding.Mesh, leading: int = 0) -> NamedSharding:
    """Of batches, whose rows, after `leading` axes, are cut by data index, whoever has the device."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, TOKENS))


def place(array, sharding: NamedSharding):
    """A host array, the same in every process, as a global one: each process gives its devices their part."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
