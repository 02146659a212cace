"""Where the time of a feed-forward block, or of a whole step, goes on a GPU: `python -m
experiments.bench.kernels --help`.

Forward and backward of blocks, or optimiser steps of a small decoder, each method after the dense one in one
process, and their kernels by JAX's profiler. A look inside, not a benchmark: results are not checked, and the
suites `ffn` and `train-step` give the numbers to quote.
"""

import argparse
import collections
import statistics
import tempfile
import time
from pathlib import Path

import jax

from experiments.bench import settings
from experiments.bench.ffn import block, data, forward_backward, state_of
from experiments.bench.settings import Case
from experiments.bench.train_step import Steps, config_of
from experiments.cli import command

REPEATS, CALLS, TRACED = 7, 5, 4


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


def kernels(step, args) -> list[tuple[str, float, float]]:
    """(name, calls, milliseconds) of each kernel in one step, the longest first; empty without a GPU."""
    found = collections.defaultdict(lambda: [0, 0.0])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                out = step(*args)
            jax.block_until_ready(out)
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                lines = plane.lines if plane.name.startswith("/device:GPU") else ()
                for event in (event for line in lines if "Stream" in line.name for event in line.events):
                    found[event.name][0] += 1
                    found[event.name][1] += event.duration_ns * 1e-6
    rows = [(name, calls / TRACED, ms / TRACED) for name, (calls, ms) in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def blocks(case: Case, dtype: str, methods: dict):
    """(name, program, arguments) of each method's forward and backward pass."""
    operands = data(case, dtype)
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    for name, method in methods.items():
        yield name, jax.jit(forward_backward(block(method, state_of(method, operands), None))), args


def steps(case: Case, dtype: str, methods: dict, layers: int):
    """The same of optimiser steps, in the sparse phase."""
    for name, method in methods.items():
        yield name, Steps(config_of(case, dtype, method, layers), None), ()


def show(programs, shape: str, shown: int) -> None:
    """Prints the time of each program, by name, its ratio to the first, which is dense, and its kernels."""
    dense = None
    for name, program, args in programs:
        ms = milliseconds(program, args)
        dense = dense or ms
        found = kernels(program, args)
        busy = sum(own for *_, own in found)
        print(f"\n{name}, {shape}: {ms:.3f} ms, {dense / ms:.2f}x dense; kernels {busy:.3f} ms", flush=True)
        for kernel, calls, own in found[:shown]:
            print(f"  {own:8.3f} ms  x{calls:<3.0f} {kernel[:90]}")


@command
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.kernels", description=__doc__)
    parser.add_argument("--shape", default="2048,8192", help="model and FFN width (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=settings.DTYPES)
    parser.add_argument(
        "--method", action="append", default=[], metavar="NAME", help="as in experiments.bench; default: FST"
    )
    parser.add_argument("--step", action="store_true", help="whole optimiser steps instead of blocks")
    parser.add_argument("--layers", type=int, default=2, help="blocks in a step (default: %(default)s)")
    parser.add_argument("--shown", type=int, default=20, help="kernels to list (default: %(default)s)")
    args = parser.parse_args(argv)
    case = Case(args.tokens, *settings.widths(args.shape))
    names = dict.fromkeys(("Dense", *(args.method or ["FST"])))
    given = (case, args.dtype, {name: settings.method(name) for name in names})
    programs = steps(*given, args.layers) if args.step else blocks(*given)
    show(programs, f"T={case.T} d={case.d} f={case.f} {args.dtype}", args.shown)


if __name__ == "__main__":
    main()
