"""Run an ablation, and say what became of its claim: `python -m experiments.ablate CONFIG[:size]`."""

import argparse
import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments import ablation as ablations
from experiments.ablate import result as results
from experiments.ablate import runs, text
from experiments.ablation import Named
from experiments.cli import command
from experiments.config import UserError, require
from experiments.step import graphdefs_of

ROOT = Path("runs/ablate")
DESCRIPTION = """Trains every arm with every seed, then writes report.md, curves.png, metrics.csv and
result.json, with the verdict on the claim: confirmed, refuted or inconclusive. Sizes are smoke, cpu and gpu.
--resume continues what was interrupted; finished runs are kept."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m experiments.ablate", description=DESCRIPTION)
    p.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG[:size]",
        help="such as configs/fst/decay_grid.py:cpu, or a folder for all in it: configs/fst:cpu",
    )
    p.add_argument("--seeds", help="comma-separated (default: those of the ablation, 0,1,2)")
    p.add_argument(
        "--out",
        type=Path,
        help="folder (default: runs/ablate/PAPER/CLAIM_SIZE; of several: that below this folder)",
    )
    p.add_argument("--resume", action="store_true", help="continue in that folder")
    p.add_argument(
        "--reuse",
        type=Path,
        metavar="DIR",
        help="copy finished runs with the same config from below this folder, made by the same code",
    )
    p.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at a time, each in its own process; several may share a GPU (default: 1)",
    )
    p.add_argument("--only", metavar="ARM/SEED", help="train this run and write no report")
    p.add_argument("--record", action="store_true", help="also put the result into docs/reproduction")
    p.add_argument("--list", action="store_true", help="all claims with their last verdict")
    p.add_argument("--write-docs", action="store_true", help="write docs/reproduction.md from the results")
    return p


def seeds_of(argument: str | None, named: Named) -> tuple[int, ...]:
    """The seeds on the command line, or the ablation's own."""
    if argument is None:
        return named.ablation.seeds
    try:
        return ablations.check_seeds(int(part) for part in argument.split(",") if part.strip())
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--seeds takes whole numbers with commas between, got {argument!r}.") from error


def report(named: Named, jobs, out: Path, record: bool) -> str:
    """Write the files of a complete ablation; returns the verdict and where they are.

    Raises UserError after writing the tables when matplotlib is missing.
    """
    result = results.result_of(named, jobs)
    results.write(result, out / "result.json")
    (out / "metrics.csv").write_text(results.table(result))
    title = f"# {named.paper}: {named.claim}, {named.size}\n\n"
    image, problem = "curves.png", ""
    try:
        from experiments.ablate import plots
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        image, problem = None, "The curves need matplotlib: pip install '.[plots]', then --resume."
    else:
        arms = {arm: [job.read() for job in jobs if job.arm == arm] for arm in named.ablation.arms}
        plots.write(named, arms, out / image)
    page = f"{title}{text.body(result, image, named.found)}\n\n{text.RULE}\n"
    (out / "report.md").write_text(page)
    summary = f"{named.ablation.claim}\n{text.verdict(result)}\n\n{text.findings(result)}\n"
    require(not problem, f"{summary}\n{out / 'report.md'} holds more. {problem}")
    files = [str(out / "report.md")]
    if record:
        from experiments.ablate import reproduction

        files += reproduction.record(named, result, out)
    return "\n".join([summary, *files])


@dataclass(frozen=True)
class Claim:
    """An ablation that was asked for, its runs and their folder."""

    named: Named
    seeds: tuple[int, ...]
    out: Path
    jobs: list[runs.Job]

    @property
    def done(self) -> bool:
        return all(job.done for job in self.jobs)

    @property
    def command(self) -> list[str]:
        """What trains one of its runs, but for --only."""
        seeds = ",".join(map(str, self.seeds))
        spec = f"{self.named.file}:{self.named.size}"
        return [sys.executable, "-m", "experiments.ablate", spec, "--out", str(self.out), "--seeds", seeds]


def claims_of(args) -> list[Claim]:
    """The ablations on the command line; UserError for what cannot be run."""
    found = [named for spec in args.config for named in ablations.load_all(spec)]
    several, claims = len(found) > 1, {}
    for named in found:
        require(
            not args.record or named.size != "smoke",
            "The smoke size shows only that an ablation runs: its verdict is not recorded.",
        )
        for config in named.ablation.arms.values():
            graphdefs_of(config)
        seeds = seeds_of(args.seeds, named)
        out = (args.out or ROOT) / named.slug if several or not args.out else args.out
        jobs = runs.jobs_of(named.ablation, seeds, out)
        if several:
            jobs = [dataclasses.replace(job, claim=named.claim) for job in jobs]
        claims[out] = Claim(named, seeds, out, jobs)
    return list(claims.values())


class Reports:
    """Writes the report of each ablation as soon as its runs are done."""

    def __init__(self, claims, record: bool):
        self.waiting, self.record, self.problems = list(claims), record, []

    def __call__(self):
        for claim in [claim for claim in self.waiting if claim.done]:
            self.waiting.remove(claim)
            try:
                print(report(claim.named, claim.jobs, claim.out, self.record), flush=True)
            except UserError as error:  # the others go on
                self.problems.append(str(error))


def start(args, argv) -> int:
    require(args.jobs > 0, f"--jobs must be positive, got {args.jobs}.")
    claims = claims_of(args)
    if args.only:
        require(len(claims) == 1, "--only is for one ablation.")
        labels = {job.label: job for job in claims[0].jobs}
        require(args.only in labels, f"There is no run {args.only!r}; there are: {', '.join(labels)}.")
        runs.share_compilations(claims[0].out)
        return 0 if runs.run_one(labels[args.only]) != "stopped" else 1
    for claim in claims:
        runs.check_folder(claim.jobs, claim.out, args.resume)
    jobs = runs.in_common([job for claim in claims for job in claim.jobs])
    if args.reuse and (copied := runs.reuse(jobs, args.reuse)):
        print(f"Reused, with the same config, from {args.reuse}: {', '.join(copied)}", flush=True)
    again = shlex.join([*argv, *([] if args.resume else ["--resume"])])
    reports = Reports(claims, args.record)
    reports()
    if args.jobs > 1:
        commands = {job.out: claim.command for claim in claims for job in claim.jobs}
        slots = runs.slots(args.jobs)
        failed = runs.run_in_parallel(jobs, lambda job: commands[job.out], slots, ended=reports)
        if failed:
            names = ", ".join(job.name for job in failed)
            logs = ", ".join(str(job.out.with_suffix(".log")) for job in failed)
            print(f"These runs failed or were stopped: {names}. See {logs}.", file=sys.stderr)
            print(f"Continue with: python -m experiments.ablate {again}")
            return 1
    else:
        runs.share_compilations(claims[0].out if len(claims) == 1 else args.out or ROOT)
        if not runs.run_in_turn(jobs, ended=reports):
            print(f"Stopped and saved. Continue with: python -m experiments.ablate {again}")
            return 1
    require(not reports.problems, "\n".join(reports.problems))
    return 0


@command
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_intermixed_args(argv)
    if args.list or args.write_docs:
        from experiments.ablate import reproduction

        print(reproduction.write_docs() if args.write_docs else reproduction.overview())
        return 0
    require(bool(args.config), f"Give a CONFIG, or --list.\n\n{parser().format_help()}")
    return start(args, argv)


if __name__ == "__main__":
    sys.exit(main())
