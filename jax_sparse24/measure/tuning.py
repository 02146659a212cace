"""Measures on this machine which products are faster with a packed operand, for `implementation=None`."""

import datetime
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp

from jax_sparse24.dispatch import table, table_file
from jax_sparse24.dispatch.cusparselt import Descriptor
from jax_sparse24.dispatch.decision import decide, eight_bits_obstacle
from jax_sparse24.dispatch.hardware import hardware, platform
from jax_sparse24.dispatch.product import KINDS, Product
from jax_sparse24.engine import fusions
from jax_sparse24.engine.call import plan_of
from jax_sparse24.engine.plan import FFN, LINEAR_IN_FFN, ffn_plan
from jax_sparse24.measure.entries import Entries, Job, jobs_of, possible
from jax_sparse24.measure.products import PATTERNS, SPARSE_OPERANDS, VNM_OPERANDS
from jax_sparse24.measure.timing import SETTLED, SHORTEST, SHORTEST_QUEUED
from jax_sparse24.methods.base import Method
from jax_sparse24.patterns import (
    FLOAT8,
    VNM,
    as_dtype,
    as_list,
    check_block,
    check_flag,
    check_number,
    check_size,
)

# What the defaults of `tune` measure: (T, d, f) by dtype, the most important first. One measurement speaks
# for sizes from half to four times its own. For layers of equal widths, such as the output projection of
# attention, no wide block speaks.
CPU_SHAPES = ((2048, 512, 2048), (2048, 128, 512), (512, 1024, 4096), (256, 512, 2048))
SHAPES = {
    "cpu": {"float32": CPU_SHAPES, "bfloat16": CPU_SHAPES},
    "cuda": {
        "bfloat16": ((16384, 4096, 14336), (16384, 2048, 8192), (16384, 2048, 2048), (4096, 1024, 4096)),
        "float16": ((16384, 2048, 8192),),
    },
}
QUICK = VNM(64, 16)  # the pattern of activations that the quick form measures
BUDGET = 200.0  # seconds that the default shapes may take
ROUNDS = {"cpu": 5, "cuda": 3}


def tune(
    shapes: Sequence[tuple[int, int, int]] | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    quick: bool = False,
    patterns: Sequence[VNM] = PATTERNS,
    folder: str | os.PathLike | None = None,
    repeats: int | None = None,
    seconds: float = 0.4,
    budget: float | None = None,
    show: Callable[[str], None] | None = print,
) -> Path:
    """Measures the products of FFNs on this machine and stores the table that decides `implementation=None`.

    Programs are timed in a random order in every round, on a GPU each after 200 ms of itself. On CUDA the
    implementations and cuSPARSELt's algorithms are searched first. Every result of a timed call is compared
    with the first one: a product whose packed result is wrong, or differs from call to call, is recorded as
    such and never chosen.

    The table of this machine is read at the beginning, if it was measured with these versions, and replaced
    as a whole after every product, by itself and what is measured by then. So an interruption costs one
    product, and a reader never finds half a table; of two tunings at once the last to end leaves its own
    table, not a mixture. Functions that are compiled already keep their decisions.

    shapes: (T, d, f): tokens, model width and FFN width, multiples of 4. A measurement speaks for sizes
        from half to four times its own. By default `SHAPES`: four on a CPU, and on a GPU.
    dtypes: names, by default those of `SHAPES`. float8_e4m3fn is measured for products of sparse weights, F1,
        F2, B1 and B3. Producers of packed operands, which `explain` shows, are timed for the first dtype.
    quick: whether to measure only the first shape and dtype, one pattern of activations and no producers, in
        less than a minute.
    patterns: V:N:M of activations, measured besides 2:4 where their blocks fit and there are kernels.
    folder: where `<hardware>.json` is written, by default ~/.cache/jax_sparse24/tuning/jaxlib-<version>,
        which later processes with this jaxlib read; a table elsewhere serves this process alone.
    repeats: rounds, by default 5 on a CPU and 3 on a GPU.
    seconds: time after which a program is sampled no more than 3 times.
    budget: seconds after which no further product is begun; a line says which are left, and another call
        begins with them. By default 200 where `shapes` is None, else no limit.
    show: called with a line per product, with the time taken and an estimate of the time left; None for
        silence.

    Returns: the path of the file.
    Raises: RuntimeError if no kernels can be measured here; TypeError and ValueError for an argument of
        another kind, such as one name for a list, a shape that does not fit, or a number below 0;
        OSError, before anything is measured, if the folder cannot be written."""
    decide("tune", jnp.bfloat16, "ffi")
    defaults = SHAPES[platform()]
    if shapes is None and budget is None:
        budget = BUDGET
    dtypes = list(defaults) if dtypes is None else _dtypes("tune", dtypes)
    shapes = None if shapes is None else _shapes("tune", shapes)
    if not dtypes or (shapes is not None and not shapes):
        raise ValueError(f"tune: needs a shape and a dtype at least, got {shapes!r} and {dtypes!r}.")
    patterns = as_list("tune", "patterns", patterns, "VNM(v, m)")
    if strange := [pattern for pattern in patterns if not isinstance(pattern, VNM)]:
        raise TypeError(f"tune: patterns must be VNM(v, m) of s24.patterns, got {strange[0]!r}.")
    check_flag("tune", "quick", quick)
    if repeats is not None:
        check_size("tune", "repeats", repeats)
    check_number("tune", "seconds", seconds)
    if budget is not None:
        check_number("tune", "budget", budget)
    if quick:
        dtypes, patterns = dtypes[:1], [QUICK]
    operands = (*SPARSE_OPERANDS, *((rule.name, rule.side) for rule in fusions.MEASURED))
    jobs = []
    for dtype in dtypes:
        of_dtype = defaults.get(str(jnp.dtype(dtype)), next(iter(defaults.values())))
        chosen = of_dtype if shapes is None else shapes
        whole = not quick and dtype == dtypes[0]
        jobs += jobs_of(chosen[:1] if quick else chosen, dtype, patterns, operands, whole)
    path = _path(folder)
    refused = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refused = error
    if refused or not os.access(path.parent, os.W_OK):
        raise PermissionError(f"tune: {path.parent} cannot be written; give a folder= that can.") from refused
    content = _run(jobs, path, repeats, seconds, budget, show)
    if show is not None:
        show(f"tune: {_summary(content['products'])} Stored in {path}")
    return path


def ensure(
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[str],
    methods: Sequence[Method],
    *,
    linear: bool = False,
    folder: str | os.PathLike | None = None,
    budget: float = 60.0,
    show: Callable[[str], None] | None = print,
) -> Path | None:
    """Measures those products of `methods` that no table of this machine knows, and nothing else.

    A program calls it before its first step is compiled. It takes a few seconds per shape on a CPU and less
    than a minute on a GPU, once: the measurements are added to this machine's table, which later processes
    read. Where no kernels run, or all products are known, it returns at once. All processes of one training
    must decide alike: where there are several, call it in none of them, and call `tune` on each machine
    before.

    shapes: (T, d, f): tokens of a local batch, model width and FFN width.
    dtypes: names of the dtypes in which the products are computed.
    methods: their plans say which operand of which product is sparse, and by which pattern.
    linear: whether shapes are those of single linear layers, (T, in, out), and not of FFNs.
    folder: as in `tune`. If it cannot be written, the measurements serve this process alone.
    budget: seconds after which no further product is begun. Those that are left run dense, and the last line
        names them.
    show: called with lines of progress; None for silence.

    Returns: the path of the file with the measurements, or None if there was nothing to measure.
    Raises: TypeError and ValueError as `tune`, and TypeError for a method that is none."""
    shapes, dtypes = _shapes("ensure", shapes), _dtypes("ensure", dtypes)
    methods = as_list("ensure", "methods", methods, "s24.methods, such as FST()")
    check_flag("ensure", "linear", linear)
    check_number("ensure", "budget", budget)
    jobs = [job for shape in shapes for dtype in dtypes for job in missing(shape, dtype, methods, linear)]
    if not jobs:
        return None
    if show is not None:
        show(f"tune: no measurements of {len(jobs)} products of this run yet; they are measured once.")
    path = _path(folder)
    _run(jobs, path, None, 0.2, budget, show, keep_going=True)
    return path


def missing(
    shape: tuple[int, int, int], dtype: str, methods: Sequence[Method], linear: bool = False
) -> list[Job]:
    """The products that kernels could run packed, and that this machine's tables do not know.

    shape: (T, d, f).
    dtype: its name.
    methods: from `s24.methods`.
    linear: as in `ensure`; the products of a linear layer have the names of those of W1 in an FFN."""
    dtype = jnp.dtype(dtype)
    if dtype == FLOAT8 or decide("matmul", dtype, None).runs != "auto" or platform() not in SHAPES:
        return []
    wanted: dict[tuple[str, str], set[str]] = {}
    in_8_bits: dict[tuple[str, str], None] = {}
    for method in methods:
        plan = plan_of("ensure", method, "linear_plan" if linear else "ffn_plan")
        plan = ffn_plan(plan) if linear else plan
        names = LINEAR_IN_FFN["w1"].values() if linear else FFN
        for name, row in plan.rows:
            if name in names and "packed" in row.by.forms:
                wanted.setdefault((name, row.operand), set()).add(row.by.pattern)
            if name in names and "packed" in row.eight_bits and not eight_bits_obstacle():
                in_8_bits[name, row.operand] = None
        for rule in fusions.MEASURED:
            if pattern := rule.pattern(plan):
                wanted.setdefault((rule.name, rule.side), set()).add(pattern)
    found = [
        job
        for (name, operand), patterns in wanted.items()
        for job in jobs_of([shape], str(dtype), _blocks(patterns), [(name, operand)], whole=False)
        if not all(_known(job, pattern) for pattern in patterns & possible(job))
    ]
    # Only cuSPARSELt multiplies 8-bit operands, and only of some sizes.
    eight = jobs_of([shape], FLOAT8.name, (), tuple(in_8_bits), whole=False)
    taken = (job for job in eight if not Descriptor.of(job.product.key(FLOAT8)).misfit())
    return found + [job for job in taken if not _known(job, "2:4")]


def _blocks(patterns: Iterable[str]) -> list[VNM]:
    """The V:2:M patterns among some patterns."""
    return [VNM(*(int(n) for n in text.split(":")[::2])) for text in sorted(patterns) if text != "2:4"]


def _known(job: Job, pattern: str) -> bool:
    kind, side, dtype, shape = job.key
    (axes,) = (axes for axes, name in KINDS.items() if name == kind)
    near = table.find(Product(axes, side, dtype, shape, pattern))
    return near is not None and not near[0].borrowed


def _shapes(op: str, shapes: Iterable) -> list:
    found = as_list(op, "shapes", shapes, "shapes (T, d, f)")
    for number, shape in enumerate(found):
        check_block(op, f"shapes[{number}]", shape, multiple=4)
    return found


def _dtypes(op: str, dtypes: Iterable) -> list[str]:
    return [as_dtype(op, dtype, (FLOAT8,)).name for dtype in as_list(op, "dtypes", dtypes, "names of dtypes")]


def _path(folder: str | os.PathLike | None) -> Path:
    return (table.user_folder() if folder is None else Path(folder)) / f"{hardware().name}.json"


def _run(
    jobs: Sequence[Job],
    path: Path,
    repeats: int | None,
    seconds: float,
    budget: float | None,
    show: Callable[[str], None] | None,
    keep_going: bool = False,
) -> dict:
    """Measures the jobs and stores the table; this process decides by it from now on.

    keep_going: whether to go on where the table cannot be written.

    Returns: the content of the table."""
    say = show or (lambda text: None)
    unique: dict[tuple, Job] = {}
    for job in jobs:
        if job.key not in unique or job.sparse in VNM_OPERANDS:  # which have more patterns
            unique[job.key] = job
    entries = Entries(ROUNDS[platform()] if repeats is None else repeats, seconds)
    before, _ = table_file.read(path)
    if before is not None and before["versions"] != table.versions():
        before = None
    content = _head() | {"products": list(before["products"]) if before else []}
    known = {table_file.identity(entry)[:4] for entry in content["products"]}
    jobs = sorted(unique.values(), key=lambda job: job.key in known)
    begin, refused = time.perf_counter(), None
    for count, job in enumerate(jobs):
        took = time.perf_counter() - begin
        if budget is not None and took > budget:
            left = ", ".join(dict.fromkeys(job.place for job in jobs[count:]))
            say(f"tune: after {took:.0f} s {len(jobs) - count} products are left for another call, of {left}")
            break
        found = entries.of(job)
        new = {table_file.identity(entry) for entry in found}
        others = [entry for entry in content["products"] if table_file.identity(entry) not in new]
        content = content | {"products": others + found}
        try:
            table_file.write(content, path)
        except OSError as error:
            if not keep_going:
                raise
            refused = error
        took = time.perf_counter() - begin
        left = took / (count + 1) * (len(jobs) - count - 1)
        say(f"tune: {count + 1} of {len(jobs)}, {_told(found)}: {job}; {took:.0f} s, about {left:.0f} s left")
    if refused is not None:
        say(f"tune: {path} cannot be written ({refused}); the measurements serve this process alone.")
    table.use(content)
    return content


def _head() -> dict:
    here = hardware()
    if here.platform == "cpu":
        order = f"random in every round; samples of {SHORTEST * 1e3:.0f} ms, an untimed call before each call"
    else:
        order = (
            f"random in every round; {SETTLED * 1e3:.0f} ms of a program before {SHORTEST_QUEUED * 1e3:.0f}"
        )
        order += " ms of it that are timed"
    return {
        "format": table_file.FORMAT,
        "hardware": here.description,
        "isa": here.isa,
        **({"capability": here.capability} if here.capability else {}),
        "versions": table.versions(),
        "date": datetime.date.today().isoformat(),
        "order": order,
    }


def _told(entries: Sequence[dict]) -> str:
    """The findings in words, by pattern."""
    words = []
    for entry in entries:
        gain = (
            f"{entry['dense_us'] / entry['packed_us']:.2f}x dense"
            if entry["status"] == "ok"
            else entry["status"]
        )
        words.append(f"{entry['pattern']} {gain}")
    return ", ".join(words)


def _summary(entries: Sequence[dict]) -> str:
    gains = [e["masked_us"] / e["packed_us"] for e in entries if e["status"] == "ok"]
    bad = len(entries) - len(gains)
    chosen = sum(gain >= table.AS_FAST for gain in gains)
    text = f"{chosen} of {len(entries)} products run packed"
    if gains:
        text += f" ({min(gains):.2f}x to {max(gains):.2f}x masked dense)"
    return text + (f"; {bad} were wrong or not repeatable." if bad else ".")
