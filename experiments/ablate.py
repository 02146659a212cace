"""Run an ablation, and say what became of its claim: `python -m experiments.ablate CONFIG[:size]`."""

import argparse
import dataclasses
import datetime
import math
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments import files
from experiments.ablations import ablation as ablations
from experiments.ablations import pretrained, runs, text, together
from experiments.ablations import result as results
from experiments.ablations.ablation import Named
from experiments.cli import STOPPED, command
from experiments.errors import UserError, installed, require
from experiments.training.step import graphdefs_of

ROOT = Path("runs/ablate")
ROUND = 3  # seeds of every ablation that are trained before more of any
DESCRIPTION = """Trains every arm with every seed, and the replicate that gives the noise floor, then writes
report.md, curves.png, metrics.csv and result.json, with the verdict on the claim
(experiments/ablations/verdicts.py). Sizes: smoke, cpu, mid, gpu, pilot, 124m, widepilot, wide, wide4096.
--resume continues what was interrupted; finished runs are kept. A finished run leaves ARM/seedN.json: such
files of several machines, put into one folder with statement.json, are reported by --resume."""
STATUS = """Exit status: 0 when all is done, or the time of --minutes or --until is over; 75 when a signal
(SIGTERM, Ctrl-C) stopped it: what was trained is kept, and --resume continues it; 1 when a run with --jobs
failed: its log says why; 2 for a mistake or a full disk: one sentence says which."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m experiments.ablate", description=DESCRIPTION, epilog=STATUS)
    p.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG[:size]",
        help="such as configs/fst/decay_grid.py:cpu, or a folder for all in it: configs/fst:cpu",
    )
    p.add_argument("--seeds", help="comma-separated (default: those of the ablation, mostly 0,1,2)")
    p.add_argument(
        "--more-seeds",
        type=int,
        metavar="COUNT",
        help="extend the result in that folder to seeds 0 to COUNT - 1; what it has is not run again",
    )
    p.add_argument(
        "--out",
        type=Path,
        help="folder (default: runs/ablate/PAPER/CLAIM_SIZE; of several: that below this folder)",
    )
    p.add_argument(
        "--start",
        type=Path,
        metavar="RUN",
        help="a finished run (of the launcher, of another ablation, or made by experiments.import_model) or "
        "its RUN/checkpoints/STEP, which takes the place of the first arm, where the others start from that",
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
        help="runs at a time, each in its own process; 0 for one on each GPU, arms rotating over them from "
        "seed to seed; several may share a GPU (default: 1, over all GPUs)",
    )
    p.add_argument("--minutes", type=float, help="stop after this time; complete seeds are reported")
    p.add_argument("--until", metavar="HH:MM", help="the same, at this time of the local day")
    p.add_argument("--compiled", type=Path, metavar="DIR", help="where runs share their compiled programs")
    p.add_argument(
        "--cores",
        type=int,
        default=0,
        help="with --jobs: cores that each run has for itself; small runs need one (default: all share all)",
    )
    p.add_argument(
        "--only", metavar="ARM/SEED,...", help="train these runs, one after the other, and write no report"
    )
    p.add_argument(
        "--any-speed",
        action="store_true",
        help="train however slow this device is: runs of large sizes stop at their start below a speed",
    )
    p.add_argument(
        "--array",
        action="store_true",
        help="print one command a line for each run, for the job arrays of a cluster; with --resume the "
        "runs are then reported",
    )
    p.add_argument(
        "--beside",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="records, ARM/seedN.json, with which the runs will be shown: one that does not fit them "
        "(text, config) is stopped before it is compiled; may be given several times",
    )
    p.add_argument("--record", action="store_true", help="also put the result into docs/reproduction")
    p.add_argument("--list", action="store_true", help="all claims with their last verdict")
    p.add_argument("--write-docs", action="store_true", help="write docs/reproduction.md from the results")
    p.add_argument(
        "--rejudge",
        action="store_true",
        help="decide all recorded results anew from their metrics, by the claims and rules of today",
    )
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


def deadline(args) -> float:
    """When to stop, as time.time() counts; infinite without a limit."""
    require(not (args.until and args.minutes), "Give --until or --minutes, not both.")
    if args.minutes is not None:
        require(args.minutes > 0, f"--minutes must be positive, got {args.minutes}.")
        return time.time() + 60 * args.minutes
    if not args.until:
        return math.inf
    try:
        at = datetime.datetime.combine(datetime.date.today(), datetime.time.fromisoformat(args.until))
    except ValueError as error:
        raise UserError(f"--until takes a time such as 22:30, got {args.until!r}.") from error
    return (at if at > datetime.datetime.now() else at + datetime.timedelta(days=1)).timestamp()


def report(named: Named, jobs, out: Path, record: bool) -> str:
    """Write the files of a complete ablation; returns the verdict and where they are.

    Raises UserError after all else is written, and recorded, when matplotlib is missing.
    """
    result = results.result_of(named, jobs, out)
    results.write(result, out / "result.json")
    files.write(out / "metrics.csv", results.table(result))
    title = f"# {named.paper}: {named.claim}, {named.size}\n\n"
    image = None
    if installed("matplotlib"):
        from experiments.ablations import plots

        image = "curves.png"
        arms = {arm: [job.read() for job in jobs if job.arm == arm] for arm in named.ablation.all_arms}
        plots.write(named, arms, out / image)
    page = f"{title}{text.body(result, image, named.found)}\n\n{text.RULE}\n"
    files.write(out / "report.md", page)
    summary = f"{named.ablation.claim}\n{text.verdict(result)}\n\n{text.findings(result)}\n"
    written = [str(out / "report.md")]
    if record:
        from experiments.ablations import reproduction

        written += reproduction.record(named, result, out)
    require(
        image is not None,
        f"{summary}\n{', '.join(written)} hold more. The curves need matplotlib: pip install -e '.[plots]', "
        "then --resume.",
    )
    return "\n".join([summary, *written])


@dataclass(frozen=True)
class Claim:
    """An ablation that was asked for, its runs and their folder."""

    named: Named
    seeds: tuple[int, ...]
    out: Path
    jobs: list[runs.Job]
    start: Path | None = None
    """see --start"""
    any_speed: bool = False
    beside: tuple[Path, ...] = ()
    """see --beside"""

    @property
    def done(self) -> bool:
        return all(job.done for job in self.jobs)

    @property
    def complete(self) -> list[runs.Job]:
        """The runs of those seeds that all arms have."""
        open_seeds = {job.seed for job in self.jobs if not job.done}
        return [job for job in self.jobs if job.seed not in open_seeds]

    def command(self, compiled: Path) -> list[str]:
        """What trains one of its runs, but for --only."""
        seeds = ",".join(map(str, self.seeds))
        spec = f"{self.named.file}:{self.named.size}"
        own = ["--out", str(self.out), "--seeds", seeds, "--compiled", str(compiled)]
        own += ["--any-speed"] if self.any_speed else []
        own += ["--start", str(self.start.resolve())] if self.start else []
        own += [word for folder in self.beside for word in ("--beside", str(folder))]
        return [sys.executable, "-m", "experiments.ablate", spec, *own]


def claims_of(args) -> list[Claim]:
    """The ablations on the command line; UserError for what cannot be run."""
    found = [named for spec in args.config for named in ablations.load_all(spec)]
    found = [at_any_speed(named) for named in found] if args.any_speed else found
    found = [pretrained.started(named, args.start) for named in found] if args.start else found
    several, claims = len(found) > 1, {}
    require(not (several and args.beside), "--beside is for one ablation.")
    beside = tuple(args.beside)
    for named in found:
        require(
            not args.record or named.size != "smoke",
            "The smoke size shows only that an ablation runs: its verdict is not recorded.",
        )
        for config in named.ablation.arms.values():
            graphdefs_of(config)
        out = (args.out or ROOT) / named.slug if several or not args.out else args.out
        for folder in beside:
            if folder.resolve() != out.resolve():  # which may have none yet
                together.check_records(folder)
        seeds = seeds_of(args.seeds, named)
        if args.more_seeds:
            require((out / "result.json").exists(), f"There is no result in {out} that could be extended.")
            seeds = sorted({*results.read(out / "result.json")["seeds"], *range(args.more_seeds)})
        jobs = [dataclasses.replace(job, beside=beside) for job in runs.jobs_of(named.ablation, seeds, out)]
        if several:
            jobs = [dataclasses.replace(job, claim=named.claim) for job in jobs]
        claims[out] = Claim(named, seeds, out, jobs, args.start, args.any_speed, beside)
    return list(claims.values())


def at_any_speed(named: Named) -> Named:
    """The ablation without the least speed of its runs."""
    arms = {
        name: dataclasses.replace(arm, train=dataclasses.replace(arm.train, least_speed=0))
        for name, arm in named.ablation.arms.items()
    }
    return dataclasses.replace(named, ablation=dataclasses.replace(named.ablation, arms=arms))


def chosen(only: str | None, claims: list[Claim]) -> list[runs.Job]:
    """The runs that --only names, in its order; all without it. Raises UserError for one that is none."""
    if not only:
        return [job for claim in claims for job in claim.jobs]
    require(len(claims) == 1, "--only is for one ablation.")
    labels = {job.label: job for job in claims[0].jobs}
    wanted = re.split(r"(?<=/\d),|(?<=/\d\d),", only)  # names of arms may have commas
    for label in wanted:
        require(label in labels, f"There is no run {label!r}; there are: {', '.join(labels)}.")
    return [labels[label] for label in wanted]


def array(claims: list[Claim], compiled: Path, again: str, only: str | None = None) -> None:
    """Print a command for each run that is not done; what else there is to know goes to stderr."""
    named = {job.out for job in chosen(only, claims)}
    for claim in claims:
        for job in claim.jobs:
            if not job.done and job.out in named:
                words = ["python", *claim.command(compiled)[1:], "--only", job.label]
                print(shlex.join(words))
        waiting = sorted({job.arm for job in claim.jobs if job.needs})
        if waiting:
            print(
                f"{claim.named.slug}: {', '.join(waiting)} start from the runs of "
                f"{claim.named.ablation.start}, which must have ended before.",
                file=sys.stderr,
            )
    print(f"When all have ended, this reports: {again}", file=sys.stderr)


class Reports:
    """Writes the report of each ablation as soon as its runs are done."""

    def __init__(self, claims, record: bool):
        self.waiting, self.record, self.problems = list(claims), record, []

    def __call__(self):
        for claim in [claim for claim in self.waiting if claim.done]:
            self.waiting.remove(claim)
            self._write(claim)

    def rest(self):
        """At the end of the time: reports of the seeds that are complete, if there are as many as usual."""
        for claim in self.waiting:
            seeds = {job.seed for job in claim.complete}
            enough = len(seeds) >= min(ROUND, len(claim.seeds))
            of_all = f"{claim.named.slug}: {len(seeds)} of {len(claim.seeds)} seeds"
            print(f"{of_all} are complete" if enough else f"{of_all}, no report", flush=True)
            if enough:
                self._write(claim)

    def _write(self, claim: Claim):
        try:
            print(report(claim.named, claim.complete, claim.out, self.record), flush=True)
        except UserError as error:  # the others go on
            self.problems.append(str(error))


def check_begun(claim: Claim, again: bool) -> None:
    """UserError unless runs of this code can be trained into the folder of an ablation.

    again: whether it may hold runs, of these configs."""
    runs.check_folder(claim.jobs, claim.out, again)
    if not claim.done:
        runs.one_commit(claim.jobs, runs.code_now())


def train_only(jobs: list[runs.Job], claim: Claim, compiled: Path) -> None:
    """Train some runs of an ablation, one after the other."""
    runs.register(claim.named, claim.out)
    runs.share_compilations(compiled)
    for job in jobs:
        runs.run_one(job, claim.jobs)


def in_rounds(claims: list[Claim]) -> list[runs.Job]:
    """The runs of all ablations: those of more seeds of any after those of the first seeds of all."""
    jobs = [job for claim in claims for job in claim.jobs]
    first = {claim.out: set(claim.seeds[:ROUND]) for claim in claims}
    return sorted(jobs, key=lambda job: job.seed not in first[job.out.parents[1]])


def say_failed(jobs: list[runs.Job], again: str) -> None:
    names = ", ".join(job.name for job in jobs)
    logs = ", ".join(str(job.out.with_suffix(".log")) for job in jobs)
    print(f"These runs failed or were stopped: {names}. See {logs}.", file=sys.stderr)
    print(f"Continue with: {again}")


def start(args, again: str) -> int:
    """Train what the arguments name, and report it; the exit status.

    again: the command that continues it."""
    require(args.jobs >= 0, f"--jobs must be positive, or 0 for one on each GPU, got {args.jobs}.")
    require(args.cores >= 0, f"--cores must not be negative, got {args.cores}.")
    require(args.jobs != 1 or not args.cores, "--cores is for several runs at a time: give --jobs too.")
    until = deadline(args)
    require(not (args.seeds and args.more_seeds), "Give --seeds or --more-seeds, not both.")
    claims = claims_of(args)
    compiled = args.compiled or (claims[0].out if len(claims) == 1 else args.out or ROOT)
    if args.array:
        array(claims, compiled, again, args.only)
        return 0
    if args.only:
        train_only(chosen(args.only, claims), claims[0], compiled)
        return 0
    for claim in claims:
        check_begun(claim, again=args.resume or bool(args.more_seeds))
    jobs = runs.in_common(in_rounds(claims))
    slots = runs.slots(args.jobs, args.cores) if args.jobs != 1 else []
    copied = runs.reuse(jobs, args.reuse) if args.reuse else []
    runs.check_starts(jobs)
    for claim in claims:
        runs.register(claim.named, claim.out)
    if copied:
        print(f"Reused, with the same config, from {args.reuse}: {', '.join(copied)}", flush=True)
    reports = Reports(claims, args.record)
    reports()
    if slots:
        commands = {job.out: claim.command(compiled) for claim in claims for job in claim.jobs}
        failed = runs.run_in_parallel(jobs, lambda job: commands[job.out], slots, ended=reports, until=until)
        finished = not failed
        if failed and time.time() < until:
            say_failed(failed, again)
            return 1
    else:
        runs.share_compilations(compiled)
        finished = runs.run_in_turn(jobs, ended=reports, until=until)
    if not finished:
        reports.rest()
        print(f"The time is over; what was trained is kept. Continue with: {again}")
        return 1 if reports.problems else 0
    require(not reports.problems, "\n".join(reports.problems))
    return 0


@command
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_intermixed_args(argv)
    if args.list or args.write_docs or args.rejudge:
        given = " ".join(map(str, args.config))
        require(not given, f"--list, --write-docs and --rejudge are for all ablations: leave {given!r} out.")
        from experiments.ablations import reproduction

        if args.rejudge:
            print("\n".join(reproduction.rejudge()))
        print(reproduction.overview() if args.list else "\n".join(reproduction.write_docs()))
        return 0
    require(bool(args.config), f"Give a CONFIG, or --list.\n\n{parser().format_help()}")
    known = args.resume or args.more_seeds or args.only
    words = [word for word in argv if word != "--array"]
    again = shlex.join(["python", "-m", "experiments.ablate", *words, *([] if known else ["--resume"])])
    try:
        with runs.interruptible():
            return start(args, again)
    except KeyboardInterrupt:
        print(f"Stopped by a signal; what was trained is kept. Continue with: {again}")
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
