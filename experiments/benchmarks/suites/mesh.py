"""Suite mesh: whole optimiser steps over several devices of this host, beside the same on one."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial

import jax

import jax_sparse24 as s24
from experiments.benchmarks import check, rows
from experiments.benchmarks.rows import show_mb, show_ms, show_ratio
from experiments.benchmarks.settings import Case, Settings
from experiments.benchmarks.suites.train_step import QUEUED, REFRESHING, Steps, config_of
from experiments.config import Mesh
from experiments.training.memory import size_of
from jax_sparse24.measure import interleaved

ONE = "one device"
# The share of its fall by which the loss may fall differently with other draws and other groups of tokens: on
# a CPU at widths 128 and 256 by 0.009 at most, of FST, Activation24 and Venom.
OTHER_DRAWS = 0.05
WHAT = """Whole optimiser steps of a small decoder, as in train-step, over meshes of the first devices of this
host, all in turn in one process. T tokens are those of each device that cuts the batch. *against dense*
divides the dense step's time on the same mesh by the step's; *on one device* is that ratio there. *of one
device* divides the time of a step of the same method on one device by the step's: with dp and fsdp 1 is
linear scaling, with tp the number of its devices is. A step is wrong unless the losses of the first two are
those of the same batch on one device. *state* are parameters, moments and masks on each
device, *XLA temporaries* what a step needs besides."""


def run(settings: Settings, progress) -> Iterator[tuple[str, Callable[[], list[dict]]]]:
    """Names of cases and what gives their rows, one per mesh and method."""
    for case in settings.cases("train-step"):
        for dtype in settings.dtypes:
            what = f"T={case.T} d={case.d} f={case.f} {dtype}"
            yield what, partial(measure_case, case, dtype, settings, progress)


def steps_on(
    mesh: Mesh | None, case: Case, dtype: str, method, layers: int, implementation: str | None = None, **model
) -> Steps:
    """Steps over a mesh of the first devices, each of which that cuts the batch has the tokens of the case.
    mesh: None for one device. implementation: None for what is decided. model: as in `config_of`."""
    along = {"dp": 1, "fsdp": 1, "tp": 1} if mesh is None else mesh.sizes
    tokens = case.T * along["dp"] * along["fsdp"]
    config = config_of(case._replace(T=tokens), dtype, method, layers, seq=min(256, case.T), **model)
    devices = jax.devices()[: math.prod(along.values())]
    return Steps(dataclasses.replace(config, mesh=Mesh(**along)), implementation, devices=devices)


def expected(mesh: Mesh | None, alone: Steps) -> list[float]:
    """The losses of the first two steps with the same batch on one device, where the sequences of each shard
    are a micro-batch. alone: the method's steps on one device, for a batch that is not cut."""
    shards = 1 if mesh is None else mesh.sizes["dp"] * mesh.sizes["fsdp"]
    if shards == 1:
        return losses(alone)
    config = alone.program.config
    data = dataclasses.replace(config.data, batch=config.data.batch * shards)
    train = dataclasses.replace(config.train, accumulate=shards)
    return losses(Steps(dataclasses.replace(config, data=data, train=train), None, devices=jax.devices()[:1]))


def losses(steps: Steps) -> list[float]:
    """Of the first two steps."""
    return [float(metrics["loss"]) for metrics in steps.metrics]


def verdict(found: list, wanted: list, method, dtype: str, case: Case) -> str:
    """By the losses of two steps, of which the second sees the gradients of the first. The first ones, and
    those of dense products, differ by rounding; gradients have other draws and other groups of tokens in each
    shard, with which the loss falls by about as much."""
    near = check.tolerance(dtype, max(case)) * abs(wanted[0])
    other = OTHER_DRAWS * abs(wanted[0] - wanted[1]) if method.ffn_plan().rows else 0
    first, second = (abs(a - b) for a, b in zip(found, wanted, strict=True))
    return rows.OK if first <= near and second <= near + other else "wrong"


def measure_case(case: Case, dtype: str, settings: Settings, progress=lambda text: None) -> list[dict]:
    """All meshes and methods of one case. progress: called with what is worked on."""
    where = f"T={case.T} d={case.d} f={case.f} {dtype}"
    steps, programs, wanted = {}, {}, {}
    named = None if settings.implementation == "auto" else settings.implementation
    for mesh_name, mesh in {ONE: None, **settings.meshes}.items():
        for name, (method, model) in settings.arms.items():
            progress(f"{where}: {name} on {mesh_name}")
            own = steps[mesh_name, name] = steps_on(
                mesh, case, dtype, method, settings.blocks("mesh"), named, **model
            )
            own.metrics  # noqa: B018 - its losses, before anything is timed
            alone = steps[ONE, name]
            wanted[mesh_name, name] = expected(mesh, alone)
            programs[mesh_name, name, "step"] = own
            if s24.due(method, 0):
                programs[mesh_name, name, REFRESHING] = own.refreshing
    progress(f"{where}: all in turn")
    seed = settings.seed_of("mesh", *case, dtype)
    times = rows.times(interleaved(programs, settings.repeats, settings.seconds, QUEUED, seed))
    for (mesh_name, name, part), rare in list(times.items()):
        if part == REFRESHING:
            every, place = settings.arms[name].method.refresh_every, (mesh_name, name, "step")
            times[place] = rows.amortised(times[place], rare, every)
    found = []
    for (mesh_name, name), own in steps.items():
        beside = {
            "step": (mesh_name, name),
            "dense step": (mesh_name, "Dense"),
            f"{ONE} step": (ONE, name),
            f"{ONE} dense step": (ONE, "Dense"),
        }
        found.append(
            {
                **case._asdict(),
                **{"dtype": dtype, "method": name, "mesh": mesh_name, "layers": settings.blocks("mesh")},
                "implementation": settings.implementation,
                "status": {
                    "step": verdict(
                        losses(own), wanted[mesh_name, name], settings.arms[name].method, dtype, case
                    )
                },
                "ms": {part: times[*place, "step"] for part, place in beside.items()},
                "loss": losses(own),
                "loss on one device": wanted[mesh_name, name],
                "state_bytes": size_of(own.program.abstract_state()),
                "temp_bytes": own.temp_bytes,
            }
        )
    return found


def table(found: list[dict]) -> str:
    """Ratios first, then times and memory."""
    header = [
        *("mesh", "method", "T", "d", "f", "blocks", "dtype", "against dense", "on one device"),
        *("of one device", "step ms", "dense step ms", "state MB", "XLA temporaries MB"),
    ]
    lines = [
        [
            *(row[k] for k in ("mesh", "method", "T", "d", "f", "layers", "dtype")),
            show_ratio(row, "dense step", "step"),
            show_ratio(row, f"{ONE} dense step", f"{ONE} step"),
            show_ratio(row, f"{ONE} step", "step"),
            *(show_ms(row, name) for name in ("step", "dense step")),
            *(show_mb(row[name]) for name in ("state_bytes", "temp_bytes")),
        ]
        for row in found
    ]
    return rows.table(header, lines)
