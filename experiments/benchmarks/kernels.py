"""Where the time of a feed-forward block, or of a whole step, goes on a GPU: `python -m
experiments.benchmarks.kernels --help`.

Forward and backward of blocks, or optimiser steps of a small decoder, each method after the dense one in one
process, and their kernels by JAX's profiler. Of steps over several GPUs these are the kernels of the first,
and how much of their communication has nothing beside it. A look inside, not a benchmark: results are not
checked, and the suites `ffn`, `train-step` and `mesh` give the numbers to quote.
"""

import argparse
import collections
import math
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax

from experiments.benchmarks import settings
from experiments.benchmarks.settings import Arm, Case
from experiments.benchmarks.suites.ffn import block, data, forward_backward, state_of
from experiments.benchmarks.suites.mesh import check_divides, steps_on
from experiments.cli import command
from experiments.config import Mesh
from experiments.errors import require

REPEATS, CALLS, TRACED, IDLE = 7, 5, 4, 5
# Kernels that send to other GPUs: NCCL's, and XLA's own for small arrays.
COMMUNICATION = re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)


def milliseconds(step, args) -> float:
    """Of a call: the median of a few means of queued calls."""
    for _ in range(3):
        jax.block_until_ready(step(*args))
    means = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            out = step(*args)
        jax.block_until_ready(out)
        means.append((time.perf_counter() - begin) / CALLS * 1e3)
    return statistics.median(means)


class Event(NamedTuple):
    """What ran on a GPU: milliseconds."""

    name: str
    begin: float
    end: float


def traced(program, args) -> list[Event]:
    """On the first GPU in TRACED calls in a row, in the order of their begin; empty without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                out = program(*args)
            jax.block_until_ready(out)
        planes = [
            plane
            for path in Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            if plane.name.startswith("/device:GPU")
        ]
        events = [
            Event(event.name, event.start_ns * 1e-6, (event.start_ns + event.duration_ns) * 1e-6)
            for plane in planes
            if plane.name == min(plane.name for plane in planes)
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        ]
    return sorted(events, key=lambda event: event.begin)


def kernels(events: list[Event]) -> list[tuple[str, float, float]]:
    """(name, calls, milliseconds) of each kernel in one call, the longest first."""
    return _per_call((event.name, event.end - event.begin) for event in events)


def idle(events: list[Event]) -> list[tuple[str, float, float]]:
    """The same of the times when nothing ran, named by what ran before and after."""
    gaps, last = [], None
    for event in events:
        if last is not None and event.begin > last.end:
            gaps.append((f"{last.name[:40]} ... {event.name[:40]}", event.begin - last.end))
        last = event if last is None or event.end > last.end else last
    return _per_call(gaps)


def communication(events: list[Event]) -> tuple[float, float]:
    """(all, alone): milliseconds of one call in which a kernel of communication runs, and in which none but
    such run."""
    own = [event for event in events if COMMUNICATION.search(event.name)]
    others = [event for event in events if not COMMUNICATION.search(event.name)]
    together, beside = _covered(own), _covered(others)
    return together / TRACED, (_covered(events) - beside) / TRACED


def _covered(events: list[Event]) -> float:
    """Milliseconds in which at least one of the events runs; they are in the order of their begin."""
    total, until = 0.0, -math.inf
    for event in events:
        total += max(event.end - max(event.begin, until), 0.0)
        until = max(until, event.end)
    return total


def _per_call(named) -> list[tuple[str, float, float]]:
    found = collections.defaultdict(lambda: [0, 0.0])
    for name, ms in named:
        found[name][0] += 1
        found[name][1] += ms
    rows = [(name, calls / TRACED, ms / TRACED) for name, (calls, ms) in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def blocks(case: Case, dtype: str, arms: dict[str, Arm]):
    """(name, program, arguments) of each method's forward and backward pass."""
    operands = data(case, dtype)
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    for name, (method, _) in arms.items():
        yield name, jax.jit(forward_backward(block(method, None))), [*args, state_of(method, operands)]


def steps(case: Case, dtype: str, arms: dict[str, Arm], layers: int, mesh: Mesh | None = None):
    """The same of optimiser steps, in the sparse phase; over a mesh if there is one, each device of which has
    the tokens of the case."""
    place = mesh or 0  # else the first device
    for name, (method, model) in arms.items():
        yield name, steps_on(place, case, dtype, method, layers, **model), ()


def show(programs, shape: str, shown: int) -> None:
    """Prints the time of each program, by name, its ratio to the first, which is dense, its kernels, and when
    no kernel ran."""
    dense = None
    for name, program, args in programs:
        ms = milliseconds(program, args)
        dense = dense or ms
        print(f"\n{name}, {shape}: {ms:.3f} ms, {dense / ms:.2f}x dense", flush=True)
        events = traced(program, args)
        for what, rows, most in (
            ("kernels", kernels(events), shown),
            ("without a kernel", idle(events), IDLE),
        ):
            if rows:
                print(f"  {sum(own for *_, own in rows):8.3f} ms {what}")
            for kernel, calls, own in rows[:most]:
                print(f"  {own:8.3f} ms  x{calls:<3.0f} {kernel[:90]}")
        sent, alone = communication(events)
        if sent:
            print(f"  {sent:8.3f} ms of communication, {alone:.3f} ms of them with nothing beside it")


@command
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.kernels", description=__doc__)
    parser.add_argument("--shape", default="2048,8192", help="model and FFN width (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=settings.DTYPES)
    parser.add_argument(
        "--method", action="append", default=[], metavar="NAME", help="as in experiments.bench; default: FST"
    )
    parser.add_argument("--step", action="store_true", help="whole optimiser steps instead of blocks")
    parser.add_argument("--layers", type=int, default=2, help="blocks in a step (default: %(default)s)")
    parser.add_argument(
        "--mesh", metavar="AXIS=N,...", help="of --step: over devices, such as dp=2 or dp=2,tp=2"
    )
    parser.add_argument("--shown", type=int, default=20, help="kernels to list (default: %(default)s)")
    args = parser.parse_args(argv)
    case = Case(args.tokens, *settings.widths(args.shape))
    names = dict.fromkeys(("Dense", *(args.method or ["FST"])))
    arms = {name: settings.arm(name) for name in names}
    given = (case, args.dtype, arms)
    require(args.step or not args.mesh, "--mesh is for whole steps: add --step.")
    for name, arm in arms.items():
        require(args.step or not arm.model, f"--method {name} is for whole steps: add --step.")
    mesh = settings.mesh_of(args.mesh, jax.device_count())[1] if args.mesh else None
    if mesh:
        check_divides(case, mesh)
    programs = steps(*given, args.layers, mesh) if args.step else blocks(*given)
    show(programs, f"T={case.T} d={case.d} f={case.f} {args.dtype}", args.shown)


if __name__ == "__main__":
    main()
