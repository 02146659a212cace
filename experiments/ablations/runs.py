"""The runs of an ablation: where each stands, one after the other or several at a time."""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from experiments import config as configs
from experiments import files
from experiments.ablations import record as records
from experiments.ablations import together
from experiments.ablations.ablation import Named, folder_of
from experiments.analysis.runs import Run, read_run
from experiments.analysis.sampling import Sampler
from experiments.config import REPOSITORY, Config
from experiments.data.batches import Corpus
from experiments.errors import UserError, require
from experiments.training import rundir
from experiments.training.environment import git, tree
from experiments.training.loop import Diverged, train

SAMPLE_TOKENS = 48  # of each continuation: enough to see, few enough for a record
TABLE_EVERY = 2.0  # seconds: a table reads the metrics of every run


@dataclass(frozen=True)
class Job:
    """One run of an ablation."""

    arm: str
    seed: int
    config: Config
    out: Path
    needs: "Job | None" = None
    """the run that this one starts from"""
    same_as: "Job | None" = None
    """a run of another ablation with the same config, of which this one becomes a copy"""
    claim: str = ""
    """the ablation, where there are several"""
    turn: tuple[int, int, int] = (0, 0, 1)
    """which arm it is and which seed, counted from 0, and of how many arms"""
    beside: tuple[Path, ...] = ()
    """folders of records with which it will be shown, and must fit"""

    @property
    def label(self) -> str:
        return f"{self.arm}/{self.seed}"

    @property
    def name(self) -> str:
        return f"{self.claim} {self.label}".strip()

    @property
    def record(self) -> Path:
        """The file that stays of it, see record.py."""
        return self.out.with_suffix(".json")

    @property
    def ready(self) -> bool:
        """Whether the runs that it waits for are done."""
        return all(job.done for job in (self.needs, self.same_as) if job)

    @property
    def stored(self) -> dict | None:
        """What its record holds, where the run was made on another machine; else None. A start that it had
        in the folder of its ablation there is the one that it has here."""
        if not self.record.exists() or (self.out / "config.json").exists():
            return None
        content = records.read(self.record)
        train = content["config"].train
        if self.needs and Path(train.start_from).parts[-2:] == self.needs.out.parts[-2:]:
            train = dataclasses.replace(train, start_from=str(self.needs.out))
            content["config"] = dataclasses.replace(content["config"], train=train)
        return content

    @property
    def rows(self) -> list[dict]:
        """What the run has written; [] before its start."""
        if stored := self.stored:
            return [row for rows in stored["rows"].values() for row in rows]
        return rundir.read_metrics(self.out) if (self.out / "metrics.jsonl").exists() else []

    @property
    def begun(self) -> Config | None:
        """The config with which it was begun; None before its start."""
        if stored := self.stored:
            return stored["config"]
        path = self.out / "config.json"
        return configs.read(path) if path.exists() else None

    @property
    def finished(self) -> bool:
        """Whether the last checkpoint is complete (orbax renames it into place when it is), or was on the
        machine that the record comes from."""
        last = self.out / "checkpoints" / str(self.config.train.steps)
        return last.is_dir() or (self.stored is not None and not self.diverged)

    @property
    def diverged(self) -> bool:
        return any(row.get("event") == "diverged" for row in self.rows)

    @property
    def environment(self) -> dict:
        """What the run wrote of where it began; {} before that."""
        if stored := self.stored:
            return stored["environment"]
        return rundir.read_environment(self.out)

    @property
    def commit(self) -> str:
        """The commit that started the run, with `+ changes` if files differed from it; `` if unknown."""
        environment = self.environment
        return _code(environment.get("commit"), environment.get("tree"))

    @property
    def done(self) -> bool:
        return self.finished or self.diverged

    @property
    def kept(self) -> bool:
        """Whether it is done and has its record: a signal may come between the two."""
        return self.done and self.record.exists()

    def read(self) -> Run:
        """The run for reports."""
        if stored := self.stored:
            return Run(self.label, self.out, stored["config"], stored["rows"])
        return read_run(self.out, self.label)


def jobs_of(ablation, seeds, out: Path) -> list[Job]:
    """Every run of an ablation, below `out`."""
    jobs, starts, arms = [], {}, list(ablation.all_arms)
    for number, (arm, seed, config) in enumerate(ablation.runs(seeds)):
        place = out / folder_of(arm) / f"seed{seed}"
        turn = (arms.index(arm), number // len(arms), len(arms))
        job = Job(arm, seed, config, place, starts.get(seed), turn=turn)
        if arm == ablation.start:
            starts[seed] = job
        elif job.needs:
            train = dataclasses.replace(config.train, start_from=str(job.needs.out))
            job = dataclasses.replace(job, config=dataclasses.replace(config, train=train))
        jobs.append(job)
    return jobs


def _code(commit: str | None, state: str | None) -> str:
    return (commit or "")[:12] + (" + changes" if state not in (None, "clean") else "")


def one_commit(jobs, now: str | None = None) -> str:
    """The commit of all runs that were begun, and of the code as it is, if `now` says it.

    Raises UserError if there are two: runs of different code do not belong into one result.
    """
    found = {} if now is None else {now: "the code here"}
    for job in jobs:
        if job.begun is not None:
            found.setdefault(job.commit, str(job.out))
    known = ", ".join(f"{commit or 'an unknown commit'} ({where})" for commit, where in found.items())
    require(
        len(found) < 2,
        f"These runs are of different commits: {known}. One result is of one commit: give another --out, or "
        "check that commit out.",
    )
    return next(iter(found), "")


def code_now() -> str:
    """The commit of this repository, as `Job.commit` names it."""
    return _code(git("rev-parse", "HEAD"), tree())


def register(named: Named, out: Path):
    """Write down, once, what the ablation states, before its first run."""
    path = out / together.STATEMENT
    if path.exists():
        return
    begun = len(
        {path.with_suffix("") for path in out.glob("*/seed*") if path.is_dir() or path.suffix == ".json"}
    )
    words = named.ablation.statement | {
        "written": datetime.datetime.now().isoformat(timespec="seconds"),
        "commit": code_now(),
        "runs before": begun,
    }
    out.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(words, indent=1) + "\n")


def in_common(jobs) -> list[Job]:
    """The runs of several ablations, where all but the first with a config become copies."""
    first, found = {}, []
    for job in jobs:
        known = first.setdefault(dataclasses.replace(job.config, name="run"), job)
        found.append(job if known is job else dataclasses.replace(job, same_as=known))
    return found


def check_folder(jobs, out: Path, resume: bool):
    """UserError unless `out` is new, or with `resume` holds runs of these very configs."""
    if not resume:
        occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
        require(not occupied, f"{out} is not empty. Continue it with --resume, or choose another --out.")
    for job in jobs:
        if (before := job.begun) is not None:
            changed = configs.differences(before, job.config)
            require(
                not changed,
                f"The run in {job.out} has another config, and runs of an ablation cannot be lengthened, "
                "since their arms would see different schedules. Different:\n  "
                + "\n  ".join(changed)
                + "\nGive another --out.",
            )


def check_starts(jobs) -> None:
    """UserError for a run that is still to be trained, and starts from one that this machine lacks."""
    for job in jobs:
        start = job.needs
        if not job.done and start and start.done and not start.out.is_dir():
            raise UserError(
                f"{job.name} is still to be trained and starts from {start.label}, of which this machine has "
                f"the record alone. Train it where {start.label} was trained, and put its record here."
            )


def reuse(jobs, folder: Path) -> list[str]:
    """Copy finished runs with the very config of a job (but for its name) from below a folder; their labels.

    A run is determined by its config, on one machine and with the same code: runs of another commit are left
    where they are. Raises UserError if the folder does not exist.
    """
    require(folder.is_dir(), f"There is no folder {folder} to reuse runs from.")
    known = [(configs.read(path), path.parent) for path in sorted(folder.rglob("config.json"))]
    copied, here = [], code_now()
    for job in jobs:
        same = [out for c, out in known if dataclasses.replace(c, name=job.config.name) == job.config]
        ended = [out for out in same if (out / "checkpoints" / str(job.config.train.steps)).is_dir()]
        ended = [out for out in ended if dataclasses.replace(job, out=out).commit == here]
        if ended and _copy(job, ended[0]):
            copied.append(job.name)
    return copied


def adopt(job: Job) -> bool:
    """Make a run the copy of the same one in another ablation; False if it has to be trained."""
    return job.same_as is not None and job.same_as.finished and _copy(job, job.same_as.out)


def _copy(job: Job, run: Path) -> bool:
    """Copy a finished run; False if the job was begun."""
    if job.begun is not None:
        return False
    partial = job.out.with_suffix(".copying")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(run, partial)
    configs.write(job.config, partial / "config.json")
    partial.rename(job.out)  # all of it or nothing, should this process be killed
    records.write(job.out, job.record)
    return True


def check_place(job: Job) -> None:
    """UserError for a run that was begun on another machine: what it tells of speed, and how it rounds, would
    be of two."""
    names = [row["place"]["machine"] for row in job.rows if "place" in row]
    here = rundir.place()["machine"]
    require(
        set(names) <= {here},
        f"The run in {job.out} was begun on another machine ({(names or [''])[0]}, this one is {here}), and "
        "one run of an ablation is of one machine. Continue it there, or delete its folder to begin it here.",
    )


def check_beside(job: Job, config: Config, corpus: Corpus) -> None:
    """UserError for a run that does not fit those with which it will be shown. Its text is known now, and
    nothing is compiled.

    config, corpus: as `train` found them."""
    if not job.beside:
        return
    known, folders = corpus.statistics, [*job.beside, job.out.parents[1]]
    second = known.get("second_digest", "none")
    own = together.Member(job.record, config, text=together.text_of(known), second=second)
    stated = together.statements(folders)
    together.check(job.out.parents[1], [*together.records(folders, whole=False), own], stated)


LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3}
"""by how much of itself the dense loss of equal parameters on equal tokens may differ between arms: programs
order their sums in other ways, and 16-bit activations are rounded at other places"""


def check_alike(job: Job, first: dict, others) -> None:
    """UserError unless a run begins as the other arms of its seed did: with the same tokens, and where model
    and start are the same, with the same dense loss.

    first: what `train` found before the first step, as it says.
    others: runs of the same ablation, in their order.
    """
    config = job.config
    for other in others:
        rows = [row["first"] for row in other.rows if "first" in row]
        if other is job or other.seed != job.seed or other.config.data != config.data or not rows:
            continue
        theirs = rows[-1]
        require(
            first["batch"] == theirs["batch"],
            f"{job.name} was stopped before its first step: its first batch of tokens ({first['batch']}) is "
            f"not that of {other.label} ({theirs['batch']}), so that the two could not be compared. Train "
            "both on the same text with the same code.",
        )
        models = [(c.model, c.train.start_from) for c in (config, other.config)]
        if models[0] != models[1] or first["parameters"] != theirs["parameters"]:
            continue  # adapters, which one of them may have, need not start from zero
        relative = LOSS_TOLERANCE.get(config.model.dtype, 1e-3)
        ours, expected = first["dense_loss"], theirs["dense_loss"]
        require(
            abs(ours - expected) <= relative * abs(expected),
            f"{job.name} was stopped before its first step: its dense loss on the first batch is {ours:.6f} "
            f"nats and that of {other.label} {expected:.6f}, which differ by more than {relative:g} of "
            "themselves, though both have the same model, seed and start. Look for what differs in their "
            "initial parameters, and delete the folder of the wrong one.",
        )


def share_compilations(out: Path):
    """Seeds of an arm run the same programs: the first one's are kept below `out` and read by the others."""
    jax.config.update("jax_compilation_cache_dir", str((out / "compiled").resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@contextlib.contextmanager
def interruptible():
    """Inside, SIGTERM raises KeyboardInterrupt as Ctrl-C does (in the main thread); a step loop, which takes
    both signals for itself, saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_one(job: Job, others=(), show: bool | None = None, label: str = "") -> str:
    """Start or continue a run; returns finished or diverged. Raises KeyboardInterrupt when a signal asked to
    stop; the run is saved then, and UserError where it does not begin as others of its seed did.

    others: the runs of its ablation."""
    if not job.done:
        try:
            resume = (job.out / "config.json").exists()
            check_place(job)
            own = {"show": show, "label": label or job.name}
            own |= {"begins": functools.partial(check_beside, job)}
            own |= {"on_first_batch": functools.partial(check_alike, job, others=others)}
            result = train(job.config, job.out, resume=resume, **own)
        except Diverged as error:
            print(f"{job.name} diverged: {error}", file=sys.stderr, flush=True)
        else:
            if result.stopped or not result.finished:
                raise KeyboardInterrupt
    if not job.kept:
        if not job.diverged:
            write_samples(job)
        records.write(job.out, job.record)
    return "diverged" if job.diverged else "finished"


def write_samples(job: Job) -> None:
    """Add to the rows of a finished run what its trained model makes of `train.prompts`, and by which
    products."""
    rows = job.rows
    if not job.config.train.prompts or any(row["kind"] == "sample" for row in rows):
        return
    sampler = Sampler(job.out)
    made = {"kind": "sample", "step": job.config.train.steps}
    made["products"] = "sparse" if sampler.sparse else "dense"
    for prompt in job.config.train.prompts:
        text = "".join(sampler(prompt, tokens=SAMPLE_TOKENS, temperature=0.0, seed=0))
        rows.append({**made, "prompt": prompt, "text": text})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    files.write(job.out / "metrics.jsonl", lines)


def run_in_turn(jobs, ended=lambda: None, until: float = math.inf) -> bool:
    """All runs in this process, with a bar for each on a terminal; False if the end of the time stopped them.

    ended: called after each run. until: as time.time() counts; a run that would last longer, as the longest
    one so far did, is not begun."""
    begin, longest, todo = time.perf_counter(), 0.0, [job for job in jobs if not job.kept]
    for number, job in enumerate(todo):
        if time.time() + longest > until:
            return False
        started = time.perf_counter()
        others = [other for other in jobs if other.out.parents[1] == job.out.parents[1]]
        named = f"{number + 1}/{len(todo)} {job.name}"
        state = "copied" if adopt(job) else run_one(job, others, sys.stderr.isatty(), named)
        longest = max(longest, time.perf_counter() - started)
        spent = time.perf_counter() - begin
        left = spent / (number + 1) * (len(todo) - number - 1)
        text = f"{state}, {progress(job).cells()[3]}, about {left / 60:.1f} min left for all"
        print(f"{named}: {text}", file=sys.stderr, flush=True)
        ended()
    return True


# ---- several at a time


@dataclass(frozen=True)
class Progress:
    """A line of the table that is shown while runs go on."""

    label: str
    state: str
    step: int
    steps: int
    loss: float | None
    speed: float | None

    @property
    def left(self) -> float | None:
        """Seconds to the end at the last speed."""
        return (self.steps - self.step) / self.speed if self.speed and self.state == "running" else None

    def cells(self) -> tuple[str, ...]:
        show = lambda value, form: "-" if value is None else form.format(value)  # noqa: E731
        return (
            self.label,
            self.state,
            f"{self.step}/{self.steps}",
            f"loss {show(self.loss, '{:.3f}')}",
            f"{show(self.speed, '{:.1f}')} steps/s",
            f"{show(self.left, '{:.0f}')} s left",
        )


def progress(job: Job, otherwise: str = "waiting") -> Progress:
    """Where a run stands, from what it has written. otherwise: its state unless it is done."""
    rows = [row for row in job.rows if row["kind"] == "train"]
    last = rows[-1] if rows else {"step": -1}
    state = "diverged" if job.diverged else "finished" if job.finished else otherwise
    return Progress(
        job.name,
        state,
        last["step"] + 1,
        job.config.train.steps,
        last.get("loss"),
        last.get("steps_per_s"),
    )


def table(lines) -> str:
    """Progress lines in columns."""
    cells = [line.cells() for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


@dataclass(frozen=True)
class Slot:
    """What one of several runs at a time may use."""

    environment: dict
    cores: tuple[int, ...] = ()
    """() for any"""
    gpu: int = 0
    """which of the GPUs that are used, counted from 0"""
    gpus: int = 0
    """how many are used, over which arms rotate; 0 for none"""

    def takes(self, job: Job) -> bool:
        """Whether a run is trained here."""
        return not self.gpus or gpu_of(job, self.gpus) == self.gpu


def slots(count: int, each: int = 0) -> list[Slot]:
    """A slot for each of `count` runs at a time, with `each` cores of its own (0: all share all). GPUs are
    dealt round-robin, and runs that share one do not reserve its memory; `gpu_of` says which run gets which.
    With a `count` of 0 each GPU has one slot.

    Raises UserError if there are fewer cores than that.
    """
    pinned = hasattr(os, "sched_setaffinity")
    cores = sorted(os.sched_getaffinity(0)) if pinned else list(range(os.cpu_count() or 1))
    require(count <= len(cores), f"--jobs {count} is more than the {len(cores)} cores of this machine.")
    require(
        count * each <= len(cores),
        f"--jobs {count} with --cores {each} is more than the {len(cores)} cores of this machine.",
    )
    require(pinned or not each, "--cores needs Linux: this system gives processes no cores of their own.")
    question = "import json, jax; print(json.dumps([jax.default_backend(), jax.local_device_count()]))"
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, cwd=REPOSITORY)
    require(asked.returncode == 0, f"jax found no device: {asked.stderr.strip()[-300:]}")
    backend, devices = json.loads(asked.stdout)
    require(
        count or backend != "cpu", "--jobs 0 is one run per GPU, and jax finds no GPU here: give a number."
    )
    if backend != "cpu":
        count = count or devices
        used = min(count, devices)
        return [Slot(one, gpu=i % devices, gpus=used) for i, one in enumerate(shares(count, devices))]
    return [Slot({}, tuple(cores[i * each : (i + 1) * each])) for i in range(count)]


def shares(count: int, devices: int) -> list[dict]:
    """The environment of each of `count` runs on this many GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if count > devices else {}
    return [{"CUDA_VISIBLE_DEVICES": visible[i % devices], **shared} for i in range(count)]


def gpu_of(job: Job, gpus: int) -> int:
    """On which of some GPUs a run is trained. Runs are dealt to them in their order, and where an arm would
    have the same one for every seed, those of each seed begin one further.

    gpus: how many there are, 1 or more."""
    arm, seed, arms = job.turn
    return (arm + seed * (arms if arms % gpus else arms + 1)) % gpus


def run_in_parallel(jobs, command, slots, ended=lambda: None, until: float = math.inf) -> list[Job]:
    """Each run in its own process, as many at a time as there are slots; returns those that failed or were
    not run to their end. On GPUs each run has its own GPU (`gpu_of`), else the first slot that is free. Until
    one seed of an arm has ended, others wait if there is anything else to do, since they run its programs.

    `command(job)` is the command line that `--only LABEL` is added to. Output goes to a .log file next to
    each run folder. ended: called after each run. until: as time.time() counts; then what runs is asked to
    save and stop, as it is when this process is interrupted.
    """
    waiting = [job for job in jobs if not job.kept]
    free, running, failed, compiled = list(range(len(slots))), {}, [], set()
    terminal, shown, next_table = sys.stderr.isatty(), None, 0.0
    try:
        while waiting or running:
            ready = [job for job in waiting if job.ready]
            if time.time() > until or (not running and not ready):  # what they wait for has failed
                return failed + waiting + [job for job, _ in running.values()]
            while found := _next(
                ready, slots, free, {job.out.parent for job, _ in running.values()} - compiled
            ):
                job, slot = found
                ready.remove(job)
                waiting.remove(job)
                job.out.parent.mkdir(parents=True, exist_ok=True)
                if adopt(job):
                    ended()
                    continue
                free.remove(slot)
                running[_begin(job, command(job), slots[slot])] = job, slot
            time.sleep(0.5)
            for child in [child for child in running if child.poll() is not None]:
                job, slot = running.pop(child)
                free.append(slot)
                compiled.add(job.out.parent)
                if not job.done:
                    failed.append(job)
                ended()
            if time.monotonic() >= next_table or not running:
                states = {job.out: "running" for job, _ in running.values()}
                states |= {job.out: "failed" for job in failed}
                lines = [progress(job, states.get(job.out, "waiting")) for job in jobs]
                shown, next_table = _show(lines, shown, terminal), time.monotonic() + TABLE_EVERY
    finally:
        for child in running:
            child.terminate()
        for child in running:
            child.wait()
    return failed


def _next(ready, slots, free, compiling) -> tuple[Job, int] | None:
    """A run that may begin and its slot; None if there is none. compiling: arms whose programs are not made
    yet."""
    able = ((job, slot) for job in ready for slot in free if slots[slot].takes(job))
    return min(able, key=lambda found: found[0].out.parent in compiling, default=None)


def _begin(job: Job, command, slot: Slot) -> subprocess.Popen:
    with job.out.with_suffix(".log").open("a") as log:
        child = subprocess.Popen(
            [*command, "--only", job.label], env=os.environ | slot.environment, stdout=log, stderr=log
        )
    if slot.cores:  # before Python has started: all threads of the child inherit it
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(child.pid, slot.cores)
    return child


def _show(lines, shown, terminal: bool):
    """Draw the table over the last one on a terminal; elsewhere a line for every change of state."""
    if terminal:
        up = f"\x1b[{len(lines)}A" if shown else ""
        print(up + "\n".join(f"\x1b[2K{line}" for line in table(lines).split("\n")), file=sys.stderr)
    else:
        before = {line.label: line.state for line in shown or ()}
        for line in lines:
            if before.get(line.label, "waiting") != line.state:
                print("  ".join(line.cells()), file=sys.stderr, flush=True)
    return lines
