"""The folder of a run: config.json, environment.json, metrics.jsonl, checkpoints/, and tokenizer.json where
tokens are not bytes."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import sys
from pathlib import Path

import jax

from experiments import config as configs
from experiments import files
from experiments.config import Config
from experiments.data import vocabulary as vocabularies
from experiments.errors import UserError, require
from experiments.training.environment import flags, git, tree, version
from experiments.training.mesh import sizes


def check_new(out: Path, config: Config, resume: bool):
    """Raise UserError unless `out` can be started, or with `resume` continued, with this config, which may
    have more steps and another mesh."""
    if resume:
        require(started(out), f"There is no run to resume in {out}. Leave out --resume to start one.")
        old = open_run(out)
        config = with_own_tokenizer(out, config)
        before, after = old.train.steps, config.train.steps
        require(
            before <= after, f"The run in {out} has {before} steps and can only be lengthened, not {after}."
        )
        longer = dataclasses.replace(old, train=dataclasses.replace(old.train, steps=after), mesh=config.mesh)
        changed = configs.differences(longer, config)
        require(
            not changed,
            f"The run in {out} has another config, so resuming it would mix two runs. Different:\n  "
            + "\n  ".join(changed)
            + "\nGive the same config, or start another run with --out OTHER_FOLDER.",
        )
        return
    require(
        not started(out),
        f"{out} already holds a run. Continue it with python -m experiments.launch --resume {out}, or start "
        "another one with --out OTHER_FOLDER.",
    )
    # Of a process that was killed while it made the folder.
    begun = {own_tokenizer(out), out / "environment.json", *files.unfinished(out)}
    occupied = out.exists() and (not out.is_dir() or bool(set(out.iterdir()) - begun))
    require(not occupied, f"{out} exists and is not an empty folder. Choose another folder with --out.")


def started(out: Path) -> bool:
    """Whether there is a run in a folder."""
    return (out / "config.json").exists()


def goes_on_here(out: Path, config: Config) -> bool:
    """Whether a run in a folder would go on from a checkpoint on the machine and over the mesh that it had
    last, with devices of the kind that it began on."""
    rows = read_metrics(out) if (out / "metrics.jsonl").exists() else []
    last = next((row for row in reversed(rows) if "place" in row), None)
    if last is None or not any((out / "checkpoints").glob("[0-9]*")):
        return False
    there = last["place"]["machine"], last.get("mesh"), read_environment(out).get("devices")
    return there == (place()["machine"], sizes(config.mesh, jax.device_count()), devices())


def read_environment(out: Path) -> dict:
    """What a run wrote of where it began; {} before that. Raises UserError for a damaged file."""
    path = out / "environment.json"
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Put it back, or delete it: the run then goes on, and nothing says "
            "with which versions it began."
        ) from error


@contextlib.contextmanager
def alone(out: Path):
    """Holds the run folder, which need not exist yet, against every other process (process 0 only).

    The lock is that of a file beside the folder. The system gives it up when this process ends, however that
    happens, so that a file left behind locks nothing. Raises UserError at once if another process holds it.
    """
    if jax.process_index() != 0:
        yield
        return
    out = out.resolve()
    path = out.with_name(f".{out.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = None
        while file is None or not _is(path, file):  # else its holder has deleted it before it was locked here
            file = stack.enter_context(path.open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise UserError(
                    f"{file.read() or 'Another process'} is training into {out}. Wait for its end, or choose "
                    "another folder with --out."
                ) from error
        stack.callback(path.unlink, missing_ok=True)  # while it is locked
        file.truncate(0)
        file.write(f"Process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _is(path: Path, file) -> bool:
    """Whether an open file is the one that the path names now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def check_resumable(out: Path, statistics: dict):
    """UserError unless the text is that which the run read (`statistics` of its Corpus), which metrics.jsonl
    says, and its checkpoints are there, where it has written some."""
    rows = read_metrics(out) if (out / "metrics.jsonl").exists() else []
    changed = changed_text(rows, statistics)
    require(
        not changed,
        f"The text is not that which the run in {out} has read ({changed}), so resuming it "
        "would mix two texts. Give it its files again (those of the standard library change with every "
        "version of Python), or start another run with --out OTHER_FOLDER.",
    )
    folder, every = out / "checkpoints", configs.read(out / "config.json").train.checkpoint_every
    # Those of an imported run have no position in a text.
    names = [path.parent.name for path in folder.glob("[0-9]*/data")]
    saved = max((int(name) for name in names if name.isdigit()), default=None)  # others are not complete
    require(
        saved is None or any("corpus" in row for row in rows),
        f"{out / 'metrics.jsonl'} is gone, or has lost the row that says which text the run has read, so "
        "that nothing tells whether this text is the same. Put it back, or start another run from the "
        f"parameters: --train.start-from {folder / str(saved)} --out OTHER_FOLDER.",
    )
    steps = [row["step"] + 1 for row in rows if row["kind"] == "train"]
    due = bool(every and steps and steps[-1] > every) or not folder.is_dir()
    require(
        not steps or not due or any(folder.glob("[0-9]*")),  # also one that was not completed
        f"The run in {out} has made {steps[-1] if steps else 0} steps, but its checkpoints are gone from "
        f"{folder}. Put them back, or start another run with --out OTHER_FOLDER.",
    )


def changed_text(rows: list[dict], statistics: dict) -> str:
    """How the text of a Corpus (its `statistics`) differs from that which the run of these rows has read; ""
    where it does not, or one of both does not tell."""
    known = next((row["corpus"] for row in rows if "corpus" in row), {})
    names = ("digest",) if "digest" in known else ("bytes", "records", "order0_nats", "order1_nats")
    names += ("tokenizer", "second_digest")
    both = [name for name in names if name in known and name in statistics]
    return ", ".join(f"{n}: {known[n]} -> {statistics[n]}" for n in both if known[n] != statistics[n])


def create(out: Path, config: Config, vocabulary):
    """Make the folder and write tokenizer.json, where there is one, environment.json and config.json, which
    makes it a run (process 0 only)."""
    if jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        for left in files.unfinished(out):
            left.unlink()
        if isinstance(vocabulary, vocabularies.Subwords):
            files.write(own_tokenizer(out), vocabulary.text)
        files.write(out / "environment.json", json.dumps(environment(), indent=2) + "\n")
        configs.write(config, out / "config.json")


def open_run(out: Path) -> Config:
    """The config of an existing run, which names the run's own copy of its tokenizer; UserError when the
    folder is missing or is no run."""
    require(out.is_dir(), f"There is no folder {out}. Give the folder of a run, such as runs/demo/fst.")
    require((out / "config.json").exists(), f"{out} is not the folder of a run: it has no config.json.")
    config = configs.read(out / "config.json")
    named = config.data.tokenizer
    return config if named == "bytes" or named.startswith("train:") else _with_tokenizer(config, out)


def own_tokenizer(out: Path) -> Path:
    """Where a run keeps its tokenizer."""
    return out / "tokenizer.json"


def _with_tokenizer(config: Config, out: Path) -> Config:
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, tokenizer=str(own_tokenizer(out)))
    )


def with_own_tokenizer(out: Path, config: Config) -> Config:
    """The config, which names the run's copy of its tokenizer where it named a file of the same content."""
    named, own = Path(config.data.tokenizer), own_tokenizer(out)
    same = named.is_file() and own.is_file() and named.read_bytes() == own.read_bytes()
    return _with_tokenizer(config, out) if same else config


def vocabulary(out: Path):
    """What makes tokens of text for a run, and text of its tokens. Raises UserError where its tokenizer is
    gone or is another one than it was trained with."""
    config = open_run(out)
    if config.data.tokenizer == "bytes":
        return config.data.vocabulary
    path, known = own_tokenizer(out), _tokenizer_of(out)
    require(
        path.is_file(),
        f"{path} is gone, without which nobody knows what the tokens of this run are. Put it back; its "
        f"fingerprint is {known}.",
    )
    found = vocabularies.read(path)
    require(
        known in (None, found.fingerprint),
        f"{path} is not the tokenizer that this run was trained with: its fingerprint is "
        f"{found.fingerprint}, not {known}. Put that one back, or start another run with "
        f"--data.tokenizer {path}.",
    )
    return vocabularies.read(path, rows=vocabularies.named(config.data.tokenizer).size)


def _tokenizer_of(out: Path) -> str | None:
    """The fingerprint of the tokenizer that a run began with, None where no row has one."""
    rows = read_metrics(out) if (out / "metrics.jsonl").exists() else []
    return next((row["corpus"].get("tokenizer") for row in rows if "corpus" in row), None)


def environment() -> dict:
    """What a reader needs to repeat or compare the run."""
    names = (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "tensorflow-datasets",
        "numpy",
        "jax_sparse24",
        "nvidia-cusparselt-cu12",
        "nvidia-cusparselt-cu13",
    )
    return {
        "command": sys.argv,
        "commit": git("rev-parse", "HEAD"),
        "tree": tree(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": devices(),
        "processes": jax.process_count(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: version(name) or "not installed as a package" for name in names},
        "flags": flags(),
    }


def devices() -> list[str]:
    """What the devices of all processes are called, one after the other."""
    return [device.device_kind for device in jax.devices()]


def place() -> dict:
    """Where this process runs: "machine", eight digits that differ between machines and are no name, and
    "gpu", which of its GPUs it may see, None for all."""
    identity = Path("/etc/machine-id")
    words = platform.node() + (identity.read_text() if identity.is_file() else "")
    return {
        "machine": hashlib.sha256(words.encode()).hexdigest()[:8],
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def read_metrics(out: Path, note=lambda text: None) -> list[dict]:
    """The rows of metrics.jsonl. A last line cut short by a crash, or still being written, is dropped; `note`
    is called with a sentence that says so. UserError for any other line that is no row."""
    path = out / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{out} has no metrics.jsonl, so there is nothing to report yet.")
    *lines, last = path.read_text(errors="replace").split("\n")
    if last:
        note(f"The last line of {path} is cut short and was left out.")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            _ = rows[-1]["kind"], rows[-1]["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}, line {number}, is damaged ({error!r}): {line[:60]!r}") from error
    return rows


def gap(config: Config, rows: list[dict]) -> str:
    """Why the rows do not cover the steps of the config's run from its start to its end, as a sentence; ""
    if they do. Only a run that they cover says anything about a claim."""
    train, steps = config.train, [row["step"] for row in rows if row["kind"] == "train"]
    due = range(0, train.steps, train.log_every)
    missing, more = sorted(set(due) - set(steps)), len(steps) - len(set(steps))
    if missing:
        return f"rows of {len(missing)} of {len(due)} steps are missing, the first is step {missing[0]}"
    if more or steps != sorted(steps):
        return f"{more} steps have several rows" if more else "the rows are not in the order of their steps"
    ends = [row["step"] for row in rows if row["kind"] == "eval"][-1:]
    return "" if ends == [train.steps] else "the evaluation at its end is missing"


def truncate_metrics(out: Path, step: int):
    """Forget rows of steps that will be written again (process 0 only)."""
    if jax.process_index() == 0 and (out / "metrics.jsonl").exists():
        # Rows of eval and event name the number of steps done; the others, the step they belong to.
        rows = read_metrics(out, note=lambda text: print(text, file=sys.stderr))
        rows = [row for row in rows if row["step"] < step + (row["kind"] in ("eval", "event"))]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        files.write(out / "metrics.jsonl", text)
