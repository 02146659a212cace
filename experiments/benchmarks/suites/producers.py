"""Suite producers: what makes sparse operands, against a copy of the same bytes and against jnp."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse24 as s24
from experiments.benchmarks import rows
from experiments.benchmarks.rows import show_ms, show_ratio
from experiments.benchmarks.settings import Case, Settings, kernels
from experiments.benchmarks.suites import gated
from experiments.benchmarks.torch import programs as torch_programs
from experiments.config import nearest
from experiments.errors import require
from jax_sparse24.measure import Program, interleaved, random, random_words, same_bits
from jax_sparse24.ops.mvue import mvue_pack24
from jax_sparse24.ops.reference.slope import activation_gradient, gives_input
from jax_sparse24.ops.saved import saved_backward
from jax_sparse24.ops.slope import SLOPE_MVUE_PACK, slope_mvue_pack24

WHAT = """What makes a sparse operand, on a matrix (T, f). *of a copy* is the time of an XLA program that
copies as many bytes, over the producer's: 100 % is the speed of a copy. The bytes are those of its
arguments and results, each counted once: for N elements of s bytes, `mask24` reads Ns and writes N;
`prune24`, `soft24` and `mvue24` read and write Ns; the packing ones read Ns (and a mask's N) and write
Ns/2 of values and N/8 of metadata, `pack_vnm` 2Ns/M, N/2M and 4N/VM of columns. On a CPU kernel, copy and
jnp alike read and write memory that is there and in no cache. *vs jnp* is the time of
the jnp reference over the producer's. Results equal the reference's bit for bit, or they are marked
WRONG. *gated* rows, where there is a kernel, are `silu(gate) * up`, its gradients, and the gradients with
their MVUE packed along tokens; *transposed*: gate and up are column-major. There jnp is XLA's own fusion,
followed by `mvue_pack24`; the gated values may differ from float32's by their rounding. *slope +
mvue_pack24*, where there is one pass for it, makes dY1 of dY2 and of what squared ReLU saves, and packs its
MVUE along tokens; there jnp is XLA's fusion of dY1, followed by `mvue_pack24`. *saved_backward* makes dY1 of
dY2 and of the packed Y2 that a sparse squared ReLU saves, and packs both along tokens in strided groups: it
reads Ns, Ns/2 and N/8 and writes 3Ns/2 and N/4; no feature stays dense. It also fills f ranks, whose bytes do
not count. *torch* rows are
what PyTorch has on a GPU: packing a matrix that is pruned already, and the pruning along both axes that
its 2:4 training packs twice, by fixed sorting and not by the best mask; they must hold what they pack."""
KEY = np.array([2404, 1847], np.uint32)
AXES = {None: "4x4 tiles", -1: "rows", -2: "columns", "both": "both", "-": "-"}


class Producer(NamedTuple):
    """`run(x, other, axis, implementation)`.

    axes: along which it is measured.
    other: (shape, dtype, axis) -> the other operand; None if there is none."""

    name: str
    run: Callable
    axes: tuple[int | str | None, ...] = (-1, -2)
    other: Callable | None = None


def _mask(shape, dtype, axis):
    other = random(shape, dtype, 2)
    return s24.transposable_mask24(other) if axis == "both" else s24.mask24(other, axis)


def _saved(shape, dtype, axis):
    """What squared ReLU saves."""
    y1 = random(shape, dtype, 2)
    return jnp.square(jax.nn.relu(y1)) if gives_input("squared_relu", y1.dtype) else y1


def _sloped(dy2, saved, axis, implementation):
    if implementation != "reference":
        return slope_mvue_pack24(KEY, saved, dy2, "squared_relu", implementation=implementation)
    dy1 = activation_gradient(saved, dy2, "squared_relu")
    return dy1, mvue_pack24(KEY, dy1, axis, implementation=kernels())


def _packed(shape, dtype, axis):
    """What a sparse squared ReLU saves."""
    return s24.squared_relu24(random(shape, dtype, 2), -1)


def _saved_backward(dy2, saved, axis, implementation):
    none = jnp.zeros(0, jnp.int32)
    dy1, *along_tokens = saved_backward(saved, dy2, none, "squared_relu", implementation=implementation)
    return dy1.values, along_tokens  # its metadata are those of Y2


PRODUCERS = (
    Producer("mask24", lambda x, m, axis, i: s24.mask24(x, axis, implementation=i)),
    Producer("prune24", lambda x, m, axis, i: s24.prune24(x, axis, implementation=i)),
    Producer("soft24", lambda x, m, axis, i: s24.soft24(x, axis, implementation=i)),
    Producer("pack24", lambda x, m, axis, i: s24.pack24(x, axis, implementation=i)),
    Producer(
        "pack24 with mask",
        lambda x, m, axis, i: s24.pack24(x, axis if axis != "both" else (-1, -2), m, implementation=i),
        (-1, -2, "both"),
        _mask,
    ),
    Producer(
        "squared_relu24",
        lambda x, m, axis, i: s24.squared_relu24(x, axis if axis != "both" else (-1, -2), implementation=i),
        (-1, -2, "both"),
    ),
    Producer(
        "transposable_mask24", lambda x, m, axis, i: s24.transposable_mask24(x, implementation=i), (None,)
    ),
    Producer(
        "transposable_pack24", lambda x, m, axis, i: s24.transposable_pack24(x, implementation=i), (None,)
    ),
    Producer("mvue24 exact", lambda x, m, axis, i: s24.mvue24(KEY, x, axis, True, implementation=i)),
    Producer("mvue24 approximate", lambda x, m, axis, i: s24.mvue24(KEY, x, axis, False, implementation=i)),
    Producer("mvue_pack24 exact", lambda x, m, axis, i: mvue_pack24(KEY, x, axis, True, implementation=i)),
    Producer(
        "mvue_pack24 approximate", lambda x, m, axis, i: mvue_pack24(KEY, x, axis, False, implementation=i)
    ),
    Producer("saved_backward", _saved_backward, (-2,), _packed),
)


SLOPED = Producer("slope + mvue_pack24 exact", _sloped, (-2,), _saved)


def slope_producers(case: Case, dtype: str) -> list[Producer]:
    """The one that applies a slope, where one pass does it."""
    x = jax.ShapeDtypeStruct((case.T, case.f), dtype)
    options = {"activation": "squared_relu", "exact": True, "compressed": False}
    there = SLOPE_MVUE_PACK.in_one_pass(None, x, x, **options, implementation=kernels())
    return [SLOPED] * there


def block_producers(patterns, case: Case) -> list[Producer]:
    """Those of V:N:M, along the axes where the blocks fit."""

    def pack(p):
        return lambda x, m, axis, i: s24.pack_vnm(x, p.v, p.m, axis=axis, implementation=i)

    sizes = {-1: (case.f, case.T), -2: (case.T, case.f)}
    found = []
    for p in patterns:
        axes = tuple(axis for axis, (depth, rows) in sizes.items() if depth % p.m == rows % p.v == 0)
        found.append(Producer(f"pack_vnm {p}", pack(p), axes))
    return found


def run(settings: Settings, progress) -> Iterator[tuple[str, Callable[[], list[dict]]]]:
    """Names of producers and what gives their rows. Raises UserError for a name that no producer has."""
    found = [
        (f"{case.T} x {case.f} {dtype}", *measurement)
        for case in settings.cases("producers")
        for dtype in settings.dtypes
        for measurement in measurements(case, dtype, settings)
    ]
    names = {name for _, name, *_ in found}
    known = ", ".join(sorted(names))
    for asked in settings.producer:
        require(asked in names, f"--producer {asked!r} is unknown; there are {known}.{nearest(asked, names)}")
    for where, name, how, rows_of in found:
        if name in (settings.producer or names):
            yield f"{where} {name} {how}".rstrip(), rows_of


def measurements(case: Case, dtype: str, settings: Settings) -> Iterator[tuple[str, str, Callable]]:
    """Names of all producers that there are here, how each is measured, and what gives its rows."""
    sloped = slope_producers(case, dtype)
    for producer in (*PRODUCERS, *sloped, *block_producers(settings.patterns, case)):
        for axis in producer.axes:
            of = partial(measure_producer, case, dtype, producer, axis, settings)
            yield producer.name, f"axis {axis}", of
    if settings.torch:
        yield "PyTorch", "", partial(measure_torch, case, dtype, settings)
    for operation in gated.OPERATIONS if gated.there(dtype) else ():
        for transposed in (False, True):
            of = partial(measure_gated, case, dtype, operation, transposed, settings)
            yield operation.name, f"transposed {transposed}", of


def measure_producer(
    case: Case, dtype: str, producer: Producer, axis: int | str | None, settings: Settings
) -> list[dict]:
    x = random((case.T, case.f), dtype, 1)
    args = (x,) if producer.other is None else (x, producer.other(x.shape, dtype, axis))

    def variant(implementation):
        return Program(
            lambda x, other=None: producer.run(x, other, axis, implementation), *args, from_memory=on_host()
        )

    programs = {"kernel": variant(kernels()), "reference": variant("reference")}
    result = programs["kernel"].result
    count = sum(a.nbytes for a in jax.tree.leaves((args, result)))
    truth = programs["reference"].result
    if jax.default_backend() == "gpu" and "approximate" in producer.name:
        # XLA's division is not correctly rounded on a GPU.
        with jax.default_device(jax.devices("cpu")[0]):
            truth = producer.run(np.asarray(x), None, axis, None)
    row = {**case._asdict(), "dtype": dtype, "producer": producer.name, "axis": axis}
    return [row | measured(programs, count, same_bits(result, truth), settings, row)]


def measure_gated(
    case: Case,
    dtype: str,
    operation: gated.Operation,
    transposed: bool,
    settings: Settings,
    implementation: str = "ffi",
) -> list[dict]:
    programs, count, right = gated.programs(case, dtype, operation, transposed, implementation)
    name = f"{operation.name}{', transposed' if transposed else ''}"
    row = {**case._asdict(), "dtype": dtype, "producer": name, "axis": operation.axis}
    return [row | measured(programs, count, right, settings, row)]


def measure_torch(case: Case, dtype: str, settings: Settings) -> list[dict]:
    """Rows of what PyTorch has, none where it is not installed."""
    found = []
    packing = torch_programs.packing(random((case.T, case.f), dtype, 1))
    for (name, axis), made in packing.items():
        row = {**case._asdict(), "dtype": dtype, "producer": name, "axis": axis}
        row |= measured({"kernel": made.program}, made.bytes, made.right, settings, row)
        found.append(row | {"implementation": "torch"})
    return found


def measured(programs: dict[str, Program], count: int, right: bool, settings: Settings, place: dict) -> dict:
    """Times of "kernel" and "reference" and of a copy of as many bytes."""
    half = random_words(count // 8, 3)
    # XLA copies in two ways, of which now one and now the other is faster.
    copies = {"copy": jnp.copy, "copy by ALU": jnp.bitwise_not}
    copies = {name: Program(copy, half, from_memory=on_host()) for name, copy in copies.items()}
    seed = settings.seed_of(*place.values())
    times = interleaved(programs | copies, settings.repeats, settings.seconds, seed=seed)
    fastest = min(copies, key=lambda name: times[name].median)
    status = {"kernel": "ok" if right else "wrong"}
    for name, program in programs.items():
        if status.get(name, "ok") == "ok":
            status[name] = "ok" if program.repeats_itself() else "not repeatable"
    valid = {name: times[name] for name in programs if status[name] == "ok"} | {"copy": times[fastest]}
    return {
        "implementation": kernels(),
        "status": status,
        "ms": rows.times(valid),
        "bytes": count,
        "xla_bytes": {name: program.bytes for name, program in programs.items()},
    }


def on_host() -> bool:
    return jax.default_backend() == "cpu"


def table(found: list[dict]) -> str:
    """Ratios first, then times."""
    header = [
        *("producer", "groups along", "T", "f", "dtype", "of a copy", "vs jnp"),
        *("sessions: of a copy", "kernel ms", "copy ms", "jnp ms", "MB moved", "GB/s"),
    ]
    lines = []
    for row in found:
        speed = row["ms"].get("kernel")
        lines.append(
            [
                row["producer"],
                AXES[row["axis"]],
                *(row[k] for k in ("T", "f", "dtype")),
                share_of_copy(row),
                show_ratio(row, "reference", "kernel"),
                rows.over_sessions(row, "copy", "kernel"),
                *(show_ms(row, name) for name in ("kernel", "copy", "reference")),
                rows.show_mb(row["bytes"]),
                "-" if speed is None else f"{row['bytes'] / speed['median'] / 1e6:.3g}",
            ]
        )
    return rows.table(header, lines)


def share_of_copy(row: dict) -> str:
    """`98%`, or the verdict on a kernel that is not valid."""
    found = rows.ratio(row, "copy", "kernel")
    return show_ratio(row, "copy", "kernel") if found is None else f"{found:.0%}"
