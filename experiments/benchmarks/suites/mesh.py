"""Suite mesh: whole optimiser steps over several devices of this host, beside the same on one."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial

import jax

import jax_sparse24 as s24
from experiments.benchmarks import check, rows
from experiments.benchmarks.rows import show_mb, show_ms, show_ratio
from experiments.benchmarks.session import Partly, rows_of_times
from experiments.benchmarks.settings import Case, Settings
from experiments.benchmarks.suites.train_step import HEAD, QUEUED, REFRESHING, Steps, config_of, heads_of
from experiments.config import Mesh
from experiments.errors import require
from experiments.training.memory import size_of
from jax_sparse24.measure import interleaved

SEQUENCE = 256
ONE = "one device"
SLOWEST = "slowest device"
TOGETHER = "devices together"  # each its own steps, without sums
ORACLE = "one device, what it must give"  # the batch of a mesh
# The share of its fall by which the loss may fall differently with other draws and other groups of tokens: on
# a CPU at widths 128 and 256 by 0.009 at most, of FST, Activation24 and Venom.
OTHER_DRAWS = 0.05
WHAT = """Whole optimiser steps of a small decoder, as in train-step, over meshes of the first devices of this
host, all in turn in one process. T tokens are those of each device that cuts the batch. *against dense*
divides the dense step's time on the same mesh by the step's; *on one device* is that ratio there. *of one
device* divides the time of a step of the same method on the first device alone by the step's: with dp and
fsdp 1 is linear scaling, with tp the number of its devices is. *of the slowest* divides that of the device of
the mesh that takes longest alone, and *of all at once* the time in which all of them do such a step at the
same time, each its own and without a sum: what *of the slowest* lacks to it is heat and power of the host.
A step is wrong unless the losses of the first two are those of the same batch on one device. *state* are
parameters, moments and masks on each device, in MB of 10^6 bytes, and *of one device's* their share of those
of one device, which dp has on each; *XLA temporaries* is what a step needs besides."""


def run(settings: Settings, progress) -> Iterator[tuple[str, Callable[[], list[dict]]]]:
    """Names of cases and what gives their rows: one mesh at a time beside one device, so that what was
    measured is stored before the next one is compiled."""
    for case in settings.cases("train-step"):
        for mesh in settings.meshes.values():
            check_divides(case, mesh)
        require(
            case.T <= SEQUENCE or case.T % SEQUENCE == 0,
            f"--tokens {case.T} are no whole number of sequences of {SEQUENCE} tokens: give a multiple of "
            f"{SEQUENCE}, or fewer tokens, for one sequence.",
        )
    for case in settings.cases("train-step"):
        for dtype in settings.dtypes:
            alone = OneDevice()
            for name, mesh in settings.meshes.items():
                what = f"T={case.T} d={case.d} f={case.f} {dtype}, {name}"
                yield what, partial(measure_case, case, dtype, name, mesh, settings, alone, progress)


def check_divides(case: Case, mesh: Mesh) -> None:
    """UserError for a case whose heads or widths a mesh does not divide, before anything is compiled."""
    along = {axis: n for axis, n in mesh.sizes.items() if n > 1}
    named = ",".join(f"{axis}={n}" for axis, n in along.items())
    heads, shape = heads_of(case.d), f"--shape {case.d},{case.f}"
    tp, fsdp = along.get("tp", 1), along.get("fsdp", 1)
    for fits, axis, what, advice in (
        (
            heads % tp == 0,
            f"tp {tp}",
            f"the heads of {shape}, one for each {HEAD} of d: {heads}",
            f"{HEAD * tp} for d",
        ),
        (case.f % (4 * tp) == 0, f"tp {tp}", f"the f of {shape} into fours", f"{4 * tp} for f"),
        (case.d % fsdp == 0, f"fsdp {fsdp}", f"the d of {shape}", f"{fsdp} for d"),
    ):
        require(
            fits,
            f"--mesh {named}: {axis} does not divide {what}. Give --shape with a multiple of {advice}, or "
            "another --mesh.",
        )


@dataclasses.dataclass
class OneDevice:
    """What meshes of one case are compared with, made for the first that needs it.

    steps: of a batch that is not cut, by `place_of` a device and method.
    losses: of the first two steps, by method and the number of shards whose batch they have."""

    steps: dict = dataclasses.field(default_factory=dict)
    losses: dict = dataclasses.field(default_factory=dict)


def place_of(device: int) -> str:
    """What a device alone is called."""
    return f"device {device}" if device else ONE


def steps_on(
    mesh: Mesh | int, case: Case, dtype: str, method, layers: int, implementation: str | None = None, **model
) -> Steps:
    """Steps over a mesh of the first devices, each of which that cuts the batch has the tokens of the case.
    mesh: or the index of one device. implementation: None for what is decided. model: as in `config_of`."""
    first, mesh = (mesh, Mesh(dp=1)) if isinstance(mesh, int) else (0, mesh)
    along = mesh.sizes
    tokens = case.T * shards(mesh)
    config = config_of(case._replace(T=tokens), dtype, method, layers, seq=min(SEQUENCE, case.T), **model)
    devices = jax.devices()[first : first + math.prod(along.values())]
    return Steps(dataclasses.replace(config, mesh=Mesh(**along)), implementation, devices=devices)


@dataclasses.dataclass(frozen=True)
class Together:
    """A step on each of several devices alone, all at the same time."""

    steps: list[Steps]

    def __call__(self):
        return [own() for own in self.steps]


def shards(mesh: Mesh) -> int:
    """Into how many the batch is cut."""
    return mesh.sizes["dp"] * mesh.sizes["fsdp"]


def oracle(
    mesh: Mesh, case: Case, dtype: str, method, layers: int, implementation: str | None = None, **model
) -> Steps:
    """Steps with the batch of a mesh on one device, where the sequences of each shard are a micro-batch. One
    block is compiled for all layers, whose parameters are the same bit for bit. Arguments: of `steps_on`."""
    tokens = case.T * shards(mesh)
    config = config_of(
        case._replace(T=tokens), dtype, method, layers, seq=min(SEQUENCE, case.T), scan=True, **model
    )
    train = dataclasses.replace(config.train, accumulate=shards(mesh))
    config = dataclasses.replace(config, train=train, mesh=Mesh(dp=1))
    return Steps(config, implementation, devices=jax.devices()[:1])


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


def compiled(make: Mapping[Hashable, Callable], errors: dict) -> dict:
    """`check.compiled`; what a function raises goes into `errors`, by its name, in place of its result."""
    made = check.compiled({name: partial(check.or_error, function) for name, function in make.items()})
    errors |= {name: found for name, found in made.items() if isinstance(found, Exception)}
    return {name: found for name, found in made.items() if name not in errors}


def measure_case(
    case: Case,
    dtype: str,
    mesh_name: str,
    mesh: Mesh,
    settings: Settings,
    alone: OneDevice,
    progress=lambda text: None,
) -> list[dict]:
    """All methods of one case over one mesh, and on each of its devices alone those that were not yet.

    alone: what the meshes before were compared with; what this one needs is added.
    progress: called with what is worked on.

    Raises `Partly` if something could be measured, but not all, the first error if nothing could, and
    `Stopped` where it is interrupted as all are measured."""
    where = f"T={case.T} d={case.d} f={case.f} {dtype} {mesh_name}"
    named = None if settings.implementation == "auto" else settings.implementation
    arms, errors, cut = settings.arms, {}, shards(mesh)
    places = [place_of(device) for device in range(math.prod(mesh.sizes.values()))]
    new = [name for name in arms if (ONE, name) not in alone.steps]
    make = {}
    for name, arm in arms.items():

        def build(steps, over, arm=arm):
            return partial(steps, over, case, dtype, arm.method, settings.blocks("mesh"), named, **arm.model)

        for device, place in enumerate(places):
            if (place, name) not in alone.steps:
                make[place, name] = build(steps_on, device)
        make[mesh_name, name] = build(steps_on, mesh)
        if cut > 1 and (name, cut) not in alone.losses:
            make[ORACLE, name] = build(oracle, mesh)
    progress(f"{where}: {len(make)} programs are compiled")
    steps = compiled(make, errors)
    progress(f"{where}: the losses of two steps")
    for place, name in list(steps):  # before anything is timed, and one after the other
        try:
            found = losses(steps[place, name])
        except Exception as error:
            errors[place, name] = error
            del steps[place, name]
            continue
        if place == ORACLE:
            alone.losses[name, cut] = found
            del steps[place, name]  # its state need not be in memory beside the others
        elif place != mesh_name:
            alone.steps[place, name] = steps[place, name]
        if place == ONE:
            alone.losses[name, 1] = found
    steps |= {(place, name): own for (place, name), own in alone.steps.items() if place in places}
    programs = {}
    for (place, name), own in steps.items():
        programs[place, name, "step"] = own
        if s24.due(arms[name].method, 0) and place in (ONE, mesh_name):
            programs[place, name, REFRESHING] = own.refreshing
    for name in arms:
        if cut == len(places) > 1 and all((place, name) in steps for place in places):
            programs[TOGETHER, name, "step"] = Together([steps[place, name] for place in places])
    progress(f"{where}: all in turn")
    seed = settings.seed_of("mesh", *case, dtype, mesh_name)

    def rows_of(times):
        for place, name, part in list(times):
            own = place if place == mesh_name else ONE  # devices of one kind search equally long
            if part == "step" and (rare := times.get((own, name, REFRESHING))):
                every = arms[name].method.refresh_every
                times[place, name, part] = rows.amortised(times[place, name, part], rare, every)
        return [
            row_of(case, dtype, place, name, devices, steps, times, alone.losses[name, parts], settings)
            for place, parts, devices, names in ((ONE, 1, [ONE], new), (mesh_name, cut, places, arms))
            for name in names
            if (place, name) in steps and (name, parts) in alone.losses
        ]

    found = []
    if programs:
        measure = partial(interleaved, programs, settings.repeats, settings.seconds, QUEUED, seed)
        found = rows_of_times(measure, rows_of)
    if errors and not found:
        raise next(iter(errors.values()))
    if errors:
        raise Partly(found, {f"{name} on {place}": error for (place, name), error in errors.items()})
    return found


def row_of(case, dtype: str, place: str, name: str, devices, steps, times, truth, settings: Settings) -> dict:
    """Of a method on one device or over a mesh, without times of what could not be measured beside it.
    devices: by `place_of`, those of the mesh."""
    own, method = steps[place, name], settings.arms[name].method
    beside = {
        "step": (place, name),
        "dense step": (place, "Dense"),
        f"{ONE} step": (ONE, name),
        f"{ONE} dense step": (ONE, "Dense"),
        **({} if place == ONE else {f"{TOGETHER} step": (TOGETHER, name)}),
    }
    ms = {part: times[*there, "step"] for part, there in beside.items() if (*there, "step") in times}
    alone = [times[device, name, "step"] for device in devices if (device, name, "step") in times]
    if len(alone) == len(devices):  # energy is that of the first device
        slowest = max(alone, key=lambda of_device: of_device["median"])
        ms[f"{SLOWEST} step"] = {key: value for key, value in slowest.items() if key not in rows.DETAILS}
    found = losses(own)
    return {
        **case._asdict(),
        **{"dtype": dtype, "method": name, "mesh": place, "layers": settings.blocks("mesh")},
        "implementation": settings.implementation,
        "status": {"step": verdict(found, truth, method, dtype, case)},
        "ms": ms,
        "loss": found,
        "loss on one device": truth,
        "state_bytes": size_of(own.program.abstract_state()),
        "temp_bytes": own.temp_bytes,
        "compiler options": own.program.compiler_options,
    }


def share_of_state(row: dict, found: list[dict]) -> float | None:
    """The bytes of the state on each device over those on one device, which with dp each has; None where no
    row of that is found. found: rows, those on one device among them."""
    same = ("T", "d", "f", "dtype", "method", "layers", "implementation")
    for other in found:
        if other["mesh"] == ONE and all(row[name] == other[name] for name in same):
            return row["state_bytes"] / other["state_bytes"]
    return None


def show_share(row: dict, found: list[dict]) -> str:
    share = share_of_state(row, found)
    return "-" if share is None else f"{share:.2f}"


def table(found: list[dict]) -> str:
    """Ratios first, then times and memory."""
    header = [
        *("mesh", "method", "T", "d", "f", "blocks", "dtype", "against dense", "on one device"),
        *("of one device", "of the slowest", "of all at once", "step ms", "dense step ms", "state MB"),
        *("of one device's", "XLA temporaries MB"),
    ]
    lines = [
        [
            *(row[k] for k in ("mesh", "method", "T", "d", "f", "layers", "dtype")),
            show_ratio(row, "dense step", "step"),
            show_ratio(row, f"{ONE} dense step", f"{ONE} step"),
            show_ratio(row, f"{ONE} step", "step"),
            *(show_ratio(row, f"{devices} step", "step") for devices in (SLOWEST, TOGETHER)),
            *(show_ms(row, name) for name in ("step", "dense step")),
            *(show_mb(row["state_bytes"]), show_share(row, found), show_mb(row["temp_bytes"])),
        ]
        for row in found
    ]
    return rows.table(header, lines)
