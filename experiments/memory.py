"""What a config needs in the memory of each device: `python -m experiments.memory CONFIG [overrides]`.

Nothing is computed, so that also models of many accelerators can be asked for on a laptop; `--xla` compiles
the step on this machine and adds XLA's own figures.
"""

import argparse
import math
import sys

import jax

from experiments import launch
from experiments.analysis.tables import markdown
from experiments.cli import command
from experiments.errors import require
from experiments.training import memory
from experiments.training.opening import parameters
from experiments.training.step import Program


def xla_rows(program: Program) -> list[list[str]]:
    """What XLA says of the compiled step of each kind of phase."""
    rows = []
    for phase in program.config.schedule.phases:
        found = program.step(phase.sparse, phase.adapters).memory_analysis()
        for name in ("argument", "output", "temp"):
            size = getattr(found, f"{name}_size_in_bytes", None)
            if size is not None:
                rows.append([f"XLA, phase {phase.name}: {name}s", f"{size / 1e9:.3f}"])
    return rows


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.memory",
        description=__doc__.split(":")[0] + ".",
        epilog="Other options are those of experiments.launch, such as --method FST or --train.accumulate 4.",
    )
    parser.add_argument("config", metavar="CONFIG", help="as for experiments.launch")
    parser.add_argument(
        "--devices", type=int, help="of the mesh; they need not be here (default: those that --mesh names)"
    )
    parser.add_argument("--xla", action="store_true", help="compile the step here, and add XLA's figures")
    args, overrides = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    require(args.devices is None or args.devices > 0, f"--devices must be positive, got {args.devices}.")
    config = launch.parse([args.config, *overrides]).config
    named = math.prod(size for size in config.mesh.sizes.values() if size > 0)
    if args.xla and -1 in config.mesh.sizes.values():
        named = jax.device_count()
    devices = named if args.devices is None else args.devices
    require(
        not args.xla or devices == jax.device_count(),
        f"--xla compiles for the {jax.device_count()} devices of this machine, but --devices or --mesh asks "
        f"for {devices}. Give --devices {jax.device_count()}, or leave --xla out.",
    )
    program = Program(config, devices=None if args.xla else devices)
    found = memory.estimate(config, program)
    lines = [["on each device", "GB"]]
    lines += [[name, f"{size / 1e9:.3f}"] for name, size in found.terms.items()]
    lines.append(["together", f"{found.total / 1e9:.3f}"])
    lines += xla_rows(program) if args.xla else []
    sequences = config.data.batch // config.train.accumulate
    cut = ", ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items() if size > 1)
    along = f" ({cut})" * bool(cut)
    print(
        f"{config.name}: {parameters(config) / 1e6:,.0f}M parameters, micro-batches of {sequences} x "
        f"{config.data.seq} tokens on {devices} device{'s' * (devices > 1)}{along}\n"
    )
    print(markdown(lines))
    print(f"\nThe largest part is {found.largest}; for less, give {found.remedy}.")
    if args.xla:
        print(
            f"XLA's figures are those of {jax.devices()[0].device_kind}, whose programs differ from others'."
        )


if __name__ == "__main__":
    main()
