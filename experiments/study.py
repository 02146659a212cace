"""Records of an ablation's runs, perhaps of several machines, to figures and a page:
`python -m experiments.study runs/124m --out runs/124m/page`.

A study is trained by `python -m experiments.ablate configs/evidence/methods.py:124m --jobs 0`, or by this
command with `--run`. Its records, ARM/seedN.json, are what this command reads; they are small enough to be
committed. Without a study it writes how to make one.
"""

import argparse
import math
import sys
import textwrap
from pathlib import Path

from experiments import ablate, files
from experiments.ablations import ablation, evidence, runs, together
from experiments.ablations.built import RULE
from experiments.analysis.tables import markdown
from experiments.cli import command
from experiments.config import REPOSITORY
from experiments.errors import installed, require

PAGE = "evidence.md"
FIGURES = "evidence"  # folder beside the page
PLAN = "configs/evidence/methods.py:124m"
STORED = REPOSITORY / "docs/evidence/124m"  # whose first pair says what a pair costs
PROBES = "../experiments/benchmarks/results/probe"
LOG = f"{PROBES}/nvidia-h200_pair_2026-11-25.md"
WHOLE, TEXT = (904, 939), 167  # seconds, from that log: each run of the pair, and preparing the text once
HEAD = """Loss and time of the methods beside dense training. A size, such as `124m`, is a model, its text and
its steps; a section tells which, the longest runs first. Written by `python -m experiments.study` from
records of runs, one per arm and seed; do not edit it by hand."""
RATES = f"{PROBES}/nvidia-h200_learning_rate_2026-11-24.md"
RECIPE = f"{PROBES}/nvidia-h100_venom_recipe_2026-11-26.md"
WIDE_RATES = f"{PROBES}/nvidia-h200_wide_rate_2026-11-27.md"
WIDEST_RATES = f"{PROBES}/nvidia-h200_wide4096_rate_2026-11-28.md"
WARMUP = f"{PROBES}/nvidia-h200_warmup_2026-11-28.md"
IN_PLACE_OF_A_CLAIM = {  # what is said of the runs of `evidence.DECIDE_NOTHING` in place of a claim
    "pilot": f"""The size `pilot` is an eighth of `124m`: it chooses recipes and decides no claim.
Its learning rate is the best of three for dense training, its decay the one that FST's rule allows
([log]({RATES})).
Its `Venom` has M = 16 and half of the steps after the warm-up sparse. At `124m` and `wide` the arm has M = 8
and a quarter of them, which ended nearer to dense training here ([log]({RECIPE})).
A quarter of the steps dense is enough for `Activation24`, which was tried after the runs at `124m` had it
([log]({WARMUP})).""",
    "widepilot": f"""The size `widepilot` is an eighth of `wide`: it chooses recipes and decides no claim.
Its learning rate is the best of three for dense training, its decay one that FST's rule allows. Its numbers
of steps follow from the speed of steps of two blocks with a small vocabulary, which these runs did not reach.
Those of `wide` follow from the speed of these runs ([log]({WIDE_RATES})).
The rate of `wide4096` is the best of three by runs of its own length ([log]({WIDEST_RATES})).""",
}
READING = f"""## How to read the tables

Losses are those of validation, in nats per token, and means over the seeds of an arm.

- *loss, dense*: with every product dense; *loss, sparse*: with the method's own products and new masks, of
  dense training with its weights cut to 2:4.
- *bits per byte*, *of the second text* (text of another kind, at the end), *behind dense*: of the trained
  model, by sparse products where its weights are sparse to the end, else by dense ones. *Behind dense* is
  over the seeds that both arms have, hence no difference of these means where one has more, with its 95 %
  interval where there are several.
- *sparse step*: time of a dense step / of a sparse one of the same run, or of dense training where an arm has
  no dense steps; the lowest and the highest of its runs.
- *as timed*: dense time / time of all steps; *whole run*: the same, where both runs have dense steps of one
  model after each time is divided by that of its own dense steps, since GPUs of one host are not equally
  fast.
- *MFU*: what the products of the arm's model come to at its speed, each counted once and as dense, as a share
  of the peak of the GPU's dense products.

{textwrap.fill(RULE, 106)}
The speed and the energy of a run that is *left out* compare with no others, and stand in the table only where
an arm has no other run.

What the verdicts of claims are, and what a comparison *states*, *resolves* and *needs*, is said in
[reproduction.md](reproduction.md). *What they write* are continuations of prompts by the trained model of the
lowest seed of each arm, the likeliest token each time."""
TRADE = """Below 0 and right of 1 sparsity wins. Runs at equal time have no place here. Papers state of
themselves, in their abstracts: similar convergence to dense training (`FST`, arXiv 2404.01847); no accuracy
loss, and FFNs up to 1.3 times as fast (`Activation24`, arXiv 2503.16672); the same performance on quality
benchmarks, and training end to end 1.4 to 1.7 times as fast (`Venom`, arXiv 2602.06183). No abstract has a
loss in nats, so that no paper has a mark."""
BAND = "The dashed band is the speed that the abstract of {arm} states."
HOW = """## How to repeat it

The text is the source of Linux 6.12.117 as Debian's package `linux-source-6.12` has it (`apt-get install
linux-source-6.12`, [data.md](data.md); 872 MB, digest 8d55b4a074269db9 in every record), with a tokenizer of
32768 tokens that is trained on it;
the second text is the source of Python's standard library. Another version, such as the 6.1 that
`linux-source` means on some systems, is another text: its runs are refused beside these. Losses of
source code compare with no other text's. The learning rate was chosen for dense training, the recipes of
`FST` and `Venom` for themselves, all by short runs with seed 0, which is one of the main runs' seeds, too.
The warm-up of `Activation24`, a quarter of the steps, was not searched.

One pair on one GPU, dense training and FST with one seed, and its page. With `--plan` besides, the command
says what it would train and what that took here, and trains nothing:

```sh title="needs a GPU, and an hour"
python -m experiments.study --run {plan} --only dense/0,FST/0 --out runs/pair
```

{cost_of_the_pair}

All of it, every arm and the replicate with three seeds, one run at a time on each GPU of the host:

```sh title="needs GPUs, and hours"
python -m experiments.study --run {plan} --jobs 0 --out runs/all
```

{cost_of_all} From seed to seed the arms move on to other GPUs, in the same way every time. A run ends on
the machine on which it began, or is refused. It is stopped before its first step where its first batch is
not that of the other arms of its seed, or where model and start are theirs and its dense loss on that batch
is not (by more than a thousandth of it in bfloat16, 1e-5 in float32). The same command again continues what
was interrupted.

Records of several hosts, `ARM/seedN.json`, are put into one folder, or their folders are given one name:
`python -m experiments.study host1/124m host2/124m --out page`. They must be of one text, one statement and
one config per arm; GPUs may be of several kinds. Those of this page were made run by run, with `--only`, each
arm mostly on the same GPU of a host.

This page and its figures are drawn anew from the records in `docs/evidence` by

```sh title="needs a minute"
python -m experiments.study docs/evidence/*/ --out docs
```"""


def how() -> str:
    """How a stranger repeats the study, with what the first pair of runs took."""
    named, stored = ablation.load(PLAN), evidence.read(STORED)
    train = ablation.SIZES[named.size].base.train
    pair = [stored.arms[arm][0] for arm in ("dense", "FST")]
    of_a_step = evidence.tokens_per_step(pair[0])
    tokens, runs = train.steps * of_a_step, len(named.ablation.runs(named.ablation.seeds))
    seconds = [evidence.pace(run) * train.steps for run in pair]
    memory = max(run.last("eval", "peak_bytes") for run in pair)
    joules = sum(evidence.joules_per_token(run) * tokens for run in pair)
    speeds = [f"{tokens / each / 1e3:.0f}" for each in seconds]
    gpu = together.named(stored.built[pair[0].out].devices)

    def on(gpus: int) -> str:
        return f"{seconds[0] * math.ceil(runs / gpus) / 3600:.1f} on {gpus}"

    minutes = [f"{part / 60:.0f}" for part in (*WHOLE, TEXT, sum(WHOLE) + TEXT)]
    of_the_pair = (
        f"A run is {train.steps} steps of {of_a_step} tokens, {tokens / 1e6:.0f}M tokens. In the pair of "
        f"seed 0 above, each on an {gpu}, dense training made {speeds[0]} thousand tokens per "
        f"second and FST {speeds[1]} thousand. The steps of both took {sum(seconds) / 60:.0f} minutes and "
        f"{joules / 1e6:.1f} MJ ({joules / 3.6e6:.2f} kWh). With compiling and all evaluations they took "
        f"{minutes[0]} and {minutes[1]} minutes, and preparing the text {minutes[2]} more, once "
        f"([log]({LOG})): {minutes[3]} minutes of one GPU for the pair, with {memory / 1e9:.0f} GB of its "
        f"memory. A run below {train.least_speed} tokens per second stops at its start, unless `--any-speed` "
        "is given: then losses compare with those above, and times do not."
    )
    of_all = (
        f"That is {runs} runs: at dense training's speed {seconds[0] * runs / 3600:.1f} hours of steps on "
        f"one GPU, {', '.join(map(on, (2, 4, 8)))}."
    )
    text = HOW.format(plan=PLAN, cost_of_the_pair=of_the_pair, cost_of_all=of_all)
    return "\n\n".join(part if "```" in part else textwrap.fill(part, 106) for part in text.split("\n\n"))


def figures():
    """The module that draws. Raises UserError without matplotlib."""
    require(installed("matplotlib"), "The figures need matplotlib: pip install -e '.[plots]'.")
    from experiments.ablations import evidence_plots

    return evidence_plots


def trade(studies: list[evidence.Study], folder: Path) -> list[str]:
    """The figure of what whole runs lose and gain, with its words; nothing without such runs."""
    shown = evidence.of_whole_runs(studies)
    if not shown:
        return []
    name = figures().trade(shown, folder)
    drawn = [paper.arm for paper in evidence.PAPERS if any(paper.arm in study.others for study in shown)]
    return [
        f"![Loss of each arm against the speed of its run, both beside dense training]({folder.name}/{name})",
        " ".join([TRADE, *(BAND.format(arm=f"`{arm}`") for arm in drawn)]),
    ]


def section(study: evidence.Study, folder: Path) -> str:
    """The part of the page about a study, whose figures go into a folder."""
    parts = [f"## {study.name}", evidence.summary(study)]
    drawn = figures().write(study, folder)
    pictures = [f"![{shown}, size {study.name}]({folder.name}/{name})" for name, shown in drawn.items()]
    if study.decides_nothing:
        parts += [IN_PLACE_OF_A_CLAIM[study.name], evidence.found_of(study)]
        parts += [evidence.about(study), evidence.table(study), *pictures]
    else:
        parts += [evidence.about(study), evidence.table(study), evidence.claim(study), *pictures]
        if said := evidence.samples(study):
            parts += ["### What they write", said]
    return "\n\n".join(filter(None, parts))


def plan(argv: list[str]) -> str:
    """What `python -m experiments.ablate` with these arguments would train, and what runs of the same config
    took where they were recorded, as a table."""
    args = ablate.parser().parse_intermixed_args(argv)
    known = {
        together.in_common(run.config): run
        for runs in evidence.read(STORED).arms.values()
        for run in runs.values()
    }
    lines = [["run", "steps", "tokens, millions", "minutes of steps, as recorded", "MJ", "now"]]
    for job in ablate.chosen(args.only, ablate.claims_of(args)):
        run, data = known.get(together.in_common(job.config)), job.config.data
        tokens = job.config.train.steps * data.batch * data.seq
        joules = run and evidence.joules_per_token(run)
        lines.append(
            [
                job.label,
                str(job.config.train.steps),
                f"{tokens / 1e6:.0f}",
                f"{evidence.pace(run) * job.config.train.steps / 60:.0f}" if run else "not recorded",
                f"{joules * tokens / 1e6:.2f}" if joules else "-",
                "done" if job.done else "to be continued" if job.begun else "to be trained",
            ]
        )
    return markdown(lines)


def check(others: list[Path], folder: Path, argv: list[str]) -> None:
    """UserError where no page could be made of records and of the runs that `python -m experiments.ablate`
    with these arguments would train.

    Before any run: that figures can be drawn; that there are records in each folder, complete and each of one
    machine; that studies of other names can be read; and of records and runs together, which are one study,
    that the statements before the runs are one, configs those of the ablation, that no run is made twice,
    and that there is an arm "dense"; and without --only, that runs of this code go on with what is in the
    folder. Texts are compared among records here, and with that of a run once it is prepared, before the
    run's folder is made and anything is compiled (`runs.check_beside`); its first batch and its loss there
    before the first step (`runs.check_alike`).

    others: folders of records besides `folder`, into which is trained."""
    figures()
    args = ablate.parser().parse_intermixed_args(argv)
    (claim,) = ablate.claims_of(args)
    jobs = [job for job in ablate.chosen(args.only, [claim]) if not job.kept]
    for job in jobs:
        runs.check_place(job)
    members = [together.Member(job.record, job.begun or job.config) for job in jobs]
    for name, each in by_name(others).items():
        if name != folder.resolve().name:
            evidence.read(*each)
    arms = {ablation.folder_of(arm): config for arm, config in claim.named.ablation.all_arms.items()}
    stated = together.statements(args.beside)
    if not (folder / together.STATEMENT).exists():
        stated[args.config[0]] = claim.named.ablation.statement["hash"]
    members = together.check(folder, [*together.records(args.beside), *members], stated, arms)
    together.check_dense(folder, {member.arm for member in members})
    if not args.only:
        ablate.check_begun(claim, again=True)
        runs.check_starts(claim.jobs)


def by_name(folders: list[Path]) -> dict[str, list[Path]]:
    """Folders of one name, which are one study."""
    named = {}
    for folder in folders:
        named.setdefault(folder.resolve().name, []).append(folder)
    return named


def page(studies: list[evidence.Study], drawn: Path) -> str:
    """The page of some studies, whose figures go into a folder."""
    # Of equally long runs, what has more of them comes first: main runs before their controls.
    studies = sorted(
        studies,
        key=lambda study: (evidence.tokens_of_a_run(study), sum(map(len, study.arms.values()))),
        reverse=True,
    )
    parts = ["# Evidence", *evidence.losing(studies), *evidence.at_equal_time(studies), HEAD]
    if studies:
        drawn.mkdir(parents=True, exist_ok=True)
        parts += [*trade(studies, drawn), evidence.over_tokens(studies), READING]
        parts += [section(study, drawn) for study in studies]
    return "\n\n".join(filter(None, [*parts, how()])) + "\n"


def words_for_ablate(args, folder: Path, others: list[Path]) -> list[str]:
    """The arguments with which `python -m experiments.ablate` trains what --run names.

    folder: into which. others: folders of records beside it."""
    words = [args.run, "--out", str(folder), *(["--any-speed"] if args.any_speed else [])]
    for name in ("only", "seeds", "jobs"):
        words += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    for other in [*by_name(others).get(folder.resolve().name, []), folder]:
        words += ["--beside", str(other)]
    return words


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m experiments.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "studies",
        type=Path,
        nargs="*",
        metavar="FOLDER",
        help="with records, ARM/seedN.json; folders of one name, such as host1/124m and host2/124m, are one "
        "study. With --run these are other studies for the page, or, where they have the name SIZE, other "
        "runs of this one",
    )
    p.add_argument(
        "--out", type=Path, required=True, help=f"folder for {PAGE}, and for the figures in {FIGURES}/"
    )
    p.add_argument(
        "--run",
        metavar="CONFIG:SIZE",
        help="before, train runs of this ablation into OUT/SIZE, a study that the page then has; runs that "
        "are there are kept. Before any run it is asked whether a page can be made of records and runs: one "
        "statement, one config per arm, no run twice, an arm 'dense'. A run "
        "on another text than the records' is stopped when its text is prepared, before it is compiled. "
        "--only, --seeds, --jobs and --any-speed are those of experiments.ablate",
    )
    for option in ("--only", "--seeds", "--jobs"):
        p.add_argument(option, help="with --run")
    p.add_argument("--any-speed", action="store_true", help="with --run")
    p.add_argument(
        "--plan",
        action="store_true",
        help="with --run: ask the same, and say what would be trained and what is in OUT/SIZE already; train "
        "and write nothing",
    )
    return p


@command
def main(argv=None):
    args = parser().parse_args(argv)
    options = ("only", "seeds", "jobs", "any_speed", "plan")
    given = [f"--{name.replace('_', '-')}" for name in options if getattr(args, name)]
    require(bool(args.run) or not given, f"{', '.join(given)} needs --run CONFIG:SIZE.")
    folders = args.studies
    if args.run:
        folder = args.out / ablation.load(args.run).size
        folders = [other for other in args.studies if other.resolve() != folder.resolve()]
        words = words_for_ablate(args, folder, folders)
        check(folders, folder, words)
        if args.plan:
            print(plan(words))
            return 0
        again = not args.only and folder.exists() and any(folder.iterdir())
        if status := ablate.main([*words, *(["--resume"] if again else [])]):
            return status
        folders.append(folder)
    studies = [evidence.read(*named) for named in by_name(folders).values()]
    args.out.mkdir(parents=True, exist_ok=True)
    files.write(args.out / PAGE, page(studies, args.out / FIGURES))
    print(args.out / PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
