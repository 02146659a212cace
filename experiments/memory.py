"""What a config needs in the memory of each device: `python -m experiments.memory CONFIG [overrides]`.

Nothing is computed, so that also models of many accelerators can be asked for on a laptop; `--xla` compiles
the step on this machine and adds XLA's own figures.
"""

import argparse
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
    parser.add_argument("--devices", type=int, default=1, help="that share a batch (default: %(default)s)")
    parser.add_argument("--xla", action="store_true", help="compile the step here, and add XLA's figures")
    args, overrides = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    require(args.devices > 0, f"--devices must be positive, got {args.devices}.")
    config = launch.parse([args.config, *overrides]).config
    program = Program(config)
    found = memory.estimate(config, program, args.devices)
    lines = [["on each device", "GB"]]
    lines += [[name, f"{size / 1e9:.3f}"] for name, size in found.terms.items()]
    lines.append(["together", f"{found.total / 1e9:.3f}"])
    lines += xla_rows(program) if args.xla else []
    sequences = config.data.batch // config.train.accumulate
    print(
        f"{config.name}: {parameters(config) / 1e6:,.0f}M parameters, micro-batches of {sequences} x "
        f"{config.data.seq} tokens on {args.devices} device{'s' * (args.devices > 1)}\n"
    )
    print(markdown(lines))
    print(f"\nThe largest part is {found.largest}; for less, give {memory.REMEDIES[found.largest]}.")
    if args.xla:
        print(
            f"XLA's figures are those of {jax.devices()[0].device_kind}, whose programs differ from others'."
        )


if __name__ == "__main__":
    main()
