"""Documents of a JSON Lines file: one JSON object per line, whose text is in one of its fields.

Nothing is prepared or copied: records are read from the file where they are asked for. The split is by
document: the hash of its text decides, so it does not depend on other lines, and equal documents are in one
split.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.data import base
from experiments.errors import UserError, require


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
    """Which file, and what of it."""

    file: str = "text.jsonl"
    """the file of documents"""
    field: str = "text"
    """the field of every document that holds its text"""
    validation: float = 0.05
    """share of the documents for validation; at least one"""

    def __post_init__(self):
        super().__post_init__()
        require(0 < self.validation < 1, f"data.validation is a share in (0, 1), got {self.validation}.")

    def records(self) -> base.Records:
        """The documents. Raises UserError for a file that is absent or whose lines are no such documents."""
        path = Path(self.file).expanduser().resolve()
        require(path.is_file(), f"data.file must be a file of JSON lines; {str(path)!r} is none.")
        starts, places, begin = [], [], 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    text = text_of(line, self.field, f"{path}, line {number}")
                    starts.append(begin)
                    places.append(int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64)
                begin += len(line)
        order = np.argsort(places, kind="stable")
        require(
            len(set(places)) > 1,
            f"{path} has {len(set(places))} different documents, but training and validation need one each.",
        )
        # Equal documents have equal places: they stay together, also at the bounds.
        ranked = np.asarray(places)[order]
        held_out = int(np.searchsorted(ranked, self.validation, "left"))
        held_out = max(held_out, int(np.searchsorted(ranked, ranked[0], "right")))
        held_out = min(held_out, int(np.searchsorted(ranked, ranked[-1], "left")))
        parts = [np.asarray(starts)[np.sort(part)] for part in (order[held_out:], order[:held_out])]
        stat = path.stat()
        content = f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{self.field}\0{self.validation}"
        return base.Records(
            path.name,
            *(Documents(path, self.field, part) for part in parts),
            fingerprint=f"{path.stem}-{hashlib.sha256(content.encode()).hexdigest()[:12]}",
        )


def text_of(line: bytes, field: str, where: str) -> bytes:
    """The text of a document, UTF-8; UserError, which names where it is, for a line without one."""
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{where} is no JSON object with a field {field!r} ({error!r}).") from error
    require(
        isinstance(text, str) and bool(text),
        f"{where}: the field {field!r} must be a text that is not empty, got {text!r:.60}.",
    )
    return text.encode("utf-8", errors="surrogatepass")


class Documents(Sequence):
    """{"text": bytes, "path": bytes} of the documents that start at these places of a file."""

    def __init__(self, path: Path, field: str, starts: np.ndarray):
        self.path, self.field, self.starts = path, field, starts

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        start = int(self.starts[index])
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        where = f"{self.path.name}:{start}"
        return {"text": text_of(line, self.field, where), "path": where.encode()}
