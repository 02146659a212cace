"""Sample text from a checkpoint: `python -m experiments.generate RUN --prompt "def " --tokens 300`."""

import argparse
from pathlib import Path

from experiments.analysis.sampling import sample_run
from experiments.cli import command
from experiments.errors import require


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.generate", description=__doc__.split(":")[0] + "."
    )
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/demo/fst")
    parser.add_argument("--prompt", default="def ", help="text to continue (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=300, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 always takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sparse", action="store_true", help="use the sparse products with the run's stored masks"
    )
    args = parser.parse_args(argv)
    require(args.tokens > 0, f"--tokens must be positive, got {args.tokens}.")
    require(args.temperature >= 0, f"--temperature must not be negative, got {args.temperature}.")
    print(
        sample_run(
            args.run,
            args.prompt,
            tokens=args.tokens,
            temperature=args.temperature,
            seed=args.seed,
            sparse=args.sparse,
        )
    )


if __name__ == "__main__":
    main()
