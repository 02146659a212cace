"""Records of an ablation's runs, perhaps of several machines, to figures and a page:
`python -m experiments.study docs/evidence/124m --out docs/evidence`.

A study is trained by `python -m experiments.ablate configs/evidence/methods.py:124m --jobs GPUS`. Its
records, ARM/seedN.json, are what this command reads; they are small enough to be committed.
"""

import argparse
from pathlib import Path

from experiments import files
from experiments.ablations import evidence
from experiments.cli import command
from experiments.errors import UserError

PAGE = "evidence.md"
HEAD = """# Evidence

Loss and time of the methods beside dense training. Written by `python -m experiments.study` from records of
runs, one per arm and seed; do not edit it by hand. *Loss, dense*: validation loss with every product dense,
nats per token; *sparse*: with the method's own products. *Behind dense*: paired by seed, with the 95 %
interval where there are seeds for one. *Sparse step* and *whole run*: dense time / time."""


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "studies", type=Path, nargs="+", metavar="FOLDER", help="with records, ARM/seedN.json"
    )
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {PAGE} and the figures")
    args = parser.parse_args(argv)
    studies = [evidence.read(folder) for folder in args.studies]
    try:
        from experiments.ablations import evidence_plots
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UserError("The figures need matplotlib: pip install '.[plots]'.") from error
    args.out.mkdir(parents=True, exist_ok=True)
    parts = [HEAD]
    for study in studies:
        parts += [f"## {study.name}", evidence.summary(study), evidence.table(study)]
        parts += [f"![{name}]({name})" for name in evidence_plots.write(study, args.out)]
    files.write(args.out / PAGE, "\n\n".join(parts) + "\n")
    print(args.out / PAGE)


if __name__ == "__main__":
    main()
