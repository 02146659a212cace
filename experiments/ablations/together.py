"""Which runs belong into one study: they have one text and one statement, an arm has one config, and each run
is made once. Devices may be of several kinds, since those change a loss by rounding alone; times are
compared within one kind (built.py).

The same question is asked of records as they are read (evidence.py), and of runs before they begin, as far as
it can be answered then (study.py, runs.py).
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments import config as configs
from experiments.ablations import record
from experiments.analysis.runs import Run
from experiments.config import Config
from experiments.errors import UserError, require

STATEMENT = "statement.json"  # in the folder of an ablation: what was stated before its first run


@dataclass(frozen=True)
class Member:
    """A run of a study, with what is known of it.

    path: of its record, ARM/seedN.json.
    config: which it has.
    devices: what they are called; none of a run that is to be trained.
    text: digests of its text and its tokenizer; None likewise.
    second: digest of its second text, "none" without one; None likewise.
    run: what its record says; None for one that is to be trained.
    environment: of its record."""

    path: Path
    config: Config
    devices: tuple[str, ...] = ()
    text: str | None = None
    second: str | None = None
    run: Run | None = None
    environment: Mapping = dataclasses.field(default_factory=dict)

    @property
    def arm(self) -> str:
        return self.path.parent.name

    @property
    def words(self) -> str:
        return f"{self.path}{'' if self.run else ', to be trained'}"


def check_records(folder: Path) -> None:
    """UserError for a folder without any."""
    found = any(folder.glob("*/seed*.json"))
    require(found, f"{folder} holds no ARM/seedN.json, the records of an ablation's runs.")


def records(folders: Iterable[Path], whole: bool = True) -> list[Member]:
    """Those in folders, of which none has to exist.

    whole: whether a record that does not cover its run, such as one that diverged, is an error.

    Raises: UserError for one that does not cover its run, lacks losses or times, is named by another seed, or
        is of a run on several machines."""
    found, folders = [], {folder.resolve(): folder for folder in folders}.values()
    for path in sorted(path for folder in folders for path in folder.glob("*/seed*.json")):
        content = record.read(path)
        run = Run(f"{path.parent.name}/{path.stem}", path, content["config"], content["rows"])
        require(
            not (gap := _gap(run) if whole else ""),
            f"{path} cannot be shown: {gap}. Take it out, or put the record of a complete run there.",
        )
        require(
            path.stem == f"seed{run.config.seed}",
            f"{path} is of a run with the seed {run.config.seed}: name it seed{run.config.seed}.json.",
        )
        machines = {row["place"]["machine"] for row in run.rows.get("event", []) if "place" in row}
        require(len(machines) < 2, f"{path} is of a run on several machines: {', '.join(sorted(machines))}.")
        environment = content["environment"]
        devices = tuple(environment.get("devices") or ())
        second = next((str(row.get("digest")) for row in run.rows.get("second", [])), "none")
        found.append(Member(path, run.config, devices, text_of(run.corpus), second, run, environment))
    return found


def _gap(run: Run) -> str:
    """Why a run cannot be shown; "" if it can."""
    if run.gap:
        return run.gap
    if None in (run.rows["eval"][-1].get(name) for name in ("dense", "sparse")):
        return "its last loss is no number"
    return "" if len(run.column("train", "steps_per_s")[0]) else "it has no times of its steps"


def text_of(corpus: Mapping) -> str:
    """What must be equal where losses are compared, of the statistics of a text: its digest, and that of the
    tokenizer where tokens are not bytes."""
    words = str(corpus.get("digest"))
    return f"{words} in tokens of {corpus['tokenizer']}" if "tokenizer" in corpus else words


def registered(folder: Path) -> dict | None:
    """What was stated before the first run in a folder; None where nothing is written. Raises UserError for a
    file that is no statement."""
    path = folder / STATEMENT
    if not path.exists():
        return None
    try:
        stated = json.loads(path.read_text())
        _ = stated["hash"], stated["written"], stated["runs before"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not say what was stated before the runs ({error!r}).") from error
    return stated


def statements(folders: Iterable[Path]) -> dict[str, str]:
    """The hashes of what was stated before the runs in folders, by file; of folders that have it."""
    known = {str(folder / STATEMENT): registered(folder) for folder in folders}
    return {file: stated["hash"] for file, stated in known.items() if stated}


def check(
    name: Path,
    members: Iterable[Member],
    stated: Mapping[str, str],
    arms: Mapping[str, Config] | None = None,
) -> list[Member]:
    """The runs of a study, each once.

    name: of the study, for messages.
    members: its runs; of two at one path the later one counts, as does one that is made anew.
    stated: hashes of what was stated before them, by where that is written.
    arms: the config that each arm must have, by the name of its folder; by default that of its first run.

    Raises: UserError if two of them do not fit together."""
    known = list({member.path.resolve(): member for member in members}.values())
    tables: dict[str, dict] = {"texts": {}, "second texts": {}, "statements": {}}
    for member in known:
        for what, value in (("texts", member.text), ("second texts", member.second)):
            if value is not None:
                tables[what].setdefault(value, member.words)
    for where, value in stated.items():
        tables["statements"].setdefault(value, where)
    for what, found in tables.items():
        said = ", ".join(f"{value} ({where})" for value, where in found.items())
        require(
            len(found) < 2,
            f"The runs of {name} have different {what}: {said}. One study has one: give the records of "
            "others in a folder of another name.",
        )
    first, seeds = {arm: ("the ablation", config) for arm, config in (arms or {}).items()}, {}
    data = next(iter(first.values()), (known[0].words, known[0].config) if known else None)
    for member in known:
        twice = seeds.setdefault((member.arm, member.config.seed), member)
        require(
            twice is member,
            f"{member.words} and {twice.words} are one run made twice: take one of them out"
            f"{'' if member.run and twice.run else '; --only and --seeds say what is trained'}.",
        )
        where, config = first.setdefault(member.arm, (member.words, member.config))
        _check_equal(f"{where} and {member.words} are of one arm", config, member.config)
        here = dataclasses.replace(data[1], data=member.config.data)
        _check_equal(f"{data[0]} and {member.words} are of one study", data[1], here)
    return known


def _check_equal(what: str, a: Config, b: Config) -> None:
    changed = configs.differences(in_common(a), in_common(b))
    require(
        not changed,
        f"{what}, but have different configs:\n  " + "\n  ".join(changed) + "\nTake one of them out.",
    )


def in_common(config: Config) -> Config:
    """What runs of an arm have in common: all but name, seed, where files are, and the least speed."""
    start, words = config.train.start_from and "another run", config.data.tokenizer
    train = dataclasses.replace(config.train, least_speed=0, start_from=start)
    words = words if words == "bytes" or words.startswith("train:") else "a file"  # compared by its digest
    data = dataclasses.replace(config.data, root="", tokenizer=words)
    return dataclasses.replace(config, name="run", seed=0, train=train, data=data)


def check_dense(name: Path, arms: Iterable[str]) -> None:
    """UserError without the arm with which the others are compared."""
    require("dense" in arms, f"{name} has no arm 'dense', with which the others are compared.")


def named(devices: Iterable[str]) -> str:
    """Equal devices once, with their number."""
    return " and ".join(f"{n} x {name}" if n > 1 else name for name, n in Counter(devices).items())
