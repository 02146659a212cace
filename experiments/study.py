"""Records of an ablation's runs, perhaps of several machines, to figures and a page:
`python -m experiments.study runs/124m --out runs/124m/page`.

A study is trained by `python -m experiments.ablate configs/evidence/methods.py:124m --jobs 0`. Its records,
ARM/seedN.json, are what this command reads; they are small enough to be committed. Without a study it
writes how to make one.
"""

import argparse
import json
import math
import textwrap
from pathlib import Path

from experiments import files
from experiments.ablations import ablation, evidence
from experiments.cli import command
from experiments.config import REPOSITORY
from experiments.errors import UserError

PAGE = "evidence.md"
FIGURES = "evidence"  # folder beside the page
PLAN = "configs/evidence/methods.py:124m"
PROBE = REPOSITORY / "experiments/benchmarks/results/probe/nvidia-h200_124m_2026-11-23.json"
HEAD = """# Evidence

Loss and time of the methods beside dense training, in models of 124M and more parameters. Written by
`python -m experiments.study` from records of runs, one per arm and seed; do not edit it by hand."""
LOG = f"../{PROBE.with_suffix('.md').relative_to(REPOSITORY)}"
NONE = f"""**No run of the sizes `124m` and `wide` exists yet.** What is known of the claims comes
from smaller models, in [reproduction.md](reproduction.md), and what is known of the speed at 124M from
short runs, in [a log]({LOG}).
There FST's steps were not faster than dense ones: at this width the question is the loss, and the size
`wide` is for speed."""
RATES = f"../{(PROBE.parent / 'nvidia-h200_learning_rate_2026-11-24.md').relative_to(REPOSITORY)}"
PILOT = f"""The size `pilot` is an eighth of `124m`: it chooses recipes and decides no claim.
Its learning rate is the best of three for dense training, its decay the one that FST's rule allows
([log]({RATES}))."""
COLUMNS = """*Loss, dense*: validation loss with every product dense, nats per token; *sparse*: with the
method's own products and new masks, of dense training with its weights cut to 2:4. *Behind dense*:
paired by seed, with the 95 % interval where there are seeds for one. *Of the second text*: bits per
byte of text of another kind, at the end. *Sparse step* and *whole run*: dense time / time. In the last
figure hollow marks are what papers say, at the left edge where they give no speed of a whole run."""
HOW = """## How to repeat it

The text is the source of Linux, from Debian's package `linux-source` or a tarball of kernel.org
([data.md](data.md)), with a tokenizer of 32768 tokens that is trained on it; the second text is the
source of Python's standard library. Losses of source code compare with no other text's.

One pair on one GPU, dense training and FST with one seed, and its page:

```sh title="needs a GPU, and an hour"
python -m experiments.ablate {plan} --only dense/0,FST/0 --out runs/pair
python -m experiments.study runs/pair --out runs/pair/page
```

{cost_of_the_pair}

All of it, every arm and the replicate with three seeds, one run at a time on each GPU of the host:

```sh title="needs GPUs, and hours"
python -m experiments.ablate {plan} --jobs 0 --out runs/124m
python -m experiments.study runs/124m --out runs/124m/page
```

{cost_of_all} From seed to seed the arms move on to other GPUs, in the same way every time. A run ends on
the machine on which it began, or is refused. Before its first step it writes down a fingerprint of its
first batch and its dense loss there: with another batch than the other arms of its seed, or where model
and start are the same with another loss (by more than a thousandth of it in bfloat16, 1e-5 in float32),
it is stopped. `--resume` continues what was interrupted. Records of several hosts, `ARM/seedN.json`, are
put into one folder; they must be of one kind of GPU and one text. This page is made of records in
`docs/evidence/SIZE`."""
SAMPLES = (
    "Continuations of fixed prompts by the dense weights of the lowest seed, the likeliest token each time."
)


def how() -> str:
    """How a stranger repeats the study, with what short runs say that it takes."""
    named, probe = ablation.load(PLAN), json.loads(PROBE.read_text())
    base = ablation.SIZES[named.size].base
    tokens = base.train.steps * base.data.batch * base.data.seq
    runs = len(named.ablation.runs(named.ablation.seeds))

    def measured(method: str, what: str) -> tuple[float, float]:
        values = [value for run in probe["runs"] if run["method"] == method for value in run[what]]
        return min(values), max(values)

    speeds = {method: measured(method, "tokens_per_s") for method in ("Dense", "FST")}
    joules = {method: measured(method, "joules_per_step") for method in speeds}
    minutes = [sum(tokens / speed[end] for speed in speeds.values()) / 60 for end in (1, 0)]
    energy = [sum(each[end] for each in joules.values()) * base.train.steps / 1e6 for end in (0, 1)]
    hours = [tokens / speeds["Dense"][end] / 3600 for end in (1, 0)]  # of a run

    def on(gpus: int) -> str:
        return f"{_range(hours, '.1f', math.ceil(runs / gpus))} on {gpus}"

    of_the_pair = (
        f"A run is {base.train.steps} steps of {base.data.batch * base.data.seq} tokens, "
        f"{tokens / 1e6:.0f}M tokens. In short runs on an {probe['device']} dense training made "
        f"{_range(speeds['Dense'], '.0f', 1e-3)} thousand tokens per second and FST "
        f"{_range(speeds['FST'], '.0f', 1e-3)} thousand, at {_range(joules['Dense'], '.0f')} and "
        f"{_range(joules['FST'], '.0f')} joules per step ([log]({LOG})). So the steps of the pair are "
        f"expected to take {_range(minutes, '.0f')} minutes and {_range(energy, '.1f')} MJ "
        f"({_range(energy, '.2f', 1 / 3.6)} kWh). Preparing the text once, compiling (half a minute a run) "
        "and evaluations come on top; they were not measured at this length. A run below "
        f"{base.train.least_speed} tokens per second stops at its start."
    )
    of_all = (
        f"That is {runs} runs: at dense training's speed {_range(hours, '.1f', runs)} hours of steps on one "
        f"GPU, {', '.join(map(on, (2, 4, 8)))}."
    )
    text = HOW.format(plan=PLAN, cost_of_the_pair=of_the_pair, cost_of_all=of_all)
    return "\n\n".join(part if "```" in part else textwrap.fill(part, 106) for part in text.split("\n\n"))


def _range(ends, form: str, factor: float = 1) -> str:
    low, high = (format(value * factor, form) for value in ends)
    return f"{low} to {high}"


def section(study: evidence.Study, folder: Path) -> str:
    """The part of the page about a study, whose figures go into a folder. Raises UserError without
    matplotlib."""
    try:
        from experiments.ablations import evidence_plots
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UserError("The figures need matplotlib: pip install -e '.[plots]'.") from error
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"## {study.name}", evidence.summary(study), evidence.about(study), evidence.table(study)]
    drawn = evidence_plots.write(study, folder)
    parts += [f"![{shown}, size {study.name}]({folder.name}/{name})" for name, shown in drawn.items()]
    parts += [PILOT] if study.name == "pilot" else []
    if said := evidence.samples(study):
        parts += ["### What they write", SAMPLES, said]
    return "\n\n".join(parts)


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "studies", type=Path, nargs="*", metavar="FOLDER", help="with records, ARM/seedN.json"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help=f"folder for {PAGE}, and for the figures in {FIGURES}/"
    )
    args = parser.parse_args(argv)
    studies = [evidence.read(folder) for folder in args.studies]
    large = any(study.name in ("124m", "wide") for study in studies)
    parts = [HEAD, *([] if large else [NONE]), *(section(study, args.out / FIGURES) for study in studies)]
    parts += [*([COLUMNS] if studies else []), how()]
    args.out.mkdir(parents=True, exist_ok=True)
    files.write(args.out / PAGE, "\n\n".join(parts) + "\n")
    print(args.out / PAGE)


if __name__ == "__main__":
    main()
