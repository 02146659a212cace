"""A finished run of an ablation as one small file beside its folder: config, environment, rows of metrics.

It is all that a report reads, so that runs of several machines are reported together when these files lie in
one folder; checkpoints stay where they were made.
"""

import json
from pathlib import Path

from experiments import config as configs
from experiments import files
from experiments.errors import UserError
from experiments.training import rundir

FORMAT = 1


def write(run: Path, path: Path) -> None:
    """Write down the run in a folder.

    run: the folder of a run that is finished or has diverged.
    path: of the file."""
    kinds = {}
    for row in rundir.read_metrics(run):
        kinds.setdefault(row.pop("kind"), []).append(row)
    content = {
        "format": FORMAT,
        "config": configs.to_dict(configs.read(run / "config.json")),
        "environment": rundir.read_environment(run),
        "rows": {kind: _columns(rows) for kind, rows in kinds.items()},
    }
    files.write(path, json.dumps(content, separators=(",", ":")) + "\n")


def read(path: Path) -> dict:
    """What `write` wrote, its config as a Config and its rows by kind.

    path: of the file.

    Raises: UserError if it is none, or of another format."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise UserError(
                f"{path} has the format {content['format']} and not {FORMAT}: it was written by another "
                "version of this code. Check that version out, or run again."
            )
        rows = {kind: _rows(kind, columns) for kind, columns in content["rows"].items()}
        config = configs.from_dict(content["config"])
        return {"config": config, "environment": content["environment"], "rows": rows}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the record of a run ({error!r}).") from error


def _columns(rows: list[dict]) -> dict[str, list]:
    """Rows as columns, with an empty list where a row lacks a value, since None is one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name, []) for row in rows] for name in names}


def _rows(kind: str, columns: dict[str, list]) -> list[dict]:
    count = len(columns["step"])
    rows = [{"kind": kind} | {name: values[i] for name, values in columns.items()} for i in range(count)]
    return [{name: value for name, value in row.items() if value != []} for row in rows]
