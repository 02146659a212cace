"""Documents of files as others store them: parquet, JSON Lines (plain, .gz or .zst) and ArrayRecord.

They are copied once into records of the project's own, so that training reads any of them in random order
from every format. The split is by document: the hash of its text decides, so it does not depend on other
documents, and equal ones are in one split.
"""

import dataclasses
import glob
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2

from experiments.data import base
from experiments.data.prepared import prepared, sources
from experiments.data.text import TextConfig, TextFiles, fingerprint, pieces, share_of
from experiments.errors import UserError, require

ROWS = 1000  # of a parquet file in memory at once


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
    """Which files, and what of them."""

    files: str = "data/*.parquet"
    """a file, or a pattern of files such as '/data/**/*.jsonl.zst'; in quotes, so that no shell expands it"""
    column: str = "text"
    """the column (parquet), field (JSON) or feature (ArrayRecord) that holds the text; '' for an ArrayRecord
    whose records are text themselves"""
    piece: int = 65536
    """bytes of a record at most: longer documents are cut at line ends"""
    validation: float = 0.05
    """share of the documents for validation"""

    def __post_init__(self):
        super().__post_init__()
        require(self.piece > 0, f"data.piece must be positive, got {self.piece}.")
        require(0 < self.validation < 1, f"data.validation is a share in (0, 1), got {self.validation}.")

    def records(self) -> base.Records:
        """The documents, copied if they are not yet. Raises UserError where there are none."""
        found = matched(self.files)
        content = f"{fingerprint(Path('/'), found)}\0{self.column}\0{self.piece}\0{self.validation}"
        label = Path(found[0]).name.split(".")[0] if len(found) == 1 else Path(found[0]).parent.name
        name = f"{label}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        config = DocumentsConfig(
            name=name, files=tuple(found), piece=self.piece, column=self.column, validation=self.validation
        )

        def check():  # a file that cannot be read is found before anything is written
            for file in found:
                next(documents(file, self.column), None)

        root = str(Path(self.root).resolve())
        does = f"{label}: reading the documents"
        builder = prepared(lambda: Documents(data_dir=root, config=config), does, check)
        return base.Records(label, **sources(builder), fingerprint=name, folder=Path(builder.data_dir))


@dataclasses.dataclass(eq=False)
class DocumentsConfig(TextConfig):
    """Which files; the place of the text in them; the share that is held out."""

    column: str = "text"
    validation: float = 0.05


class Documents(TextFiles, skip_registration=True):
    """Documents of files: records {"text": bytes, "path": bytes}, splits train and validation."""

    def _generate_examples(self, split):
        config, count, taken = self.builder_config, 0, 0
        for file in config.files:
            for place, text in documents(file, config.column):
                count += 1
                if (share_of(text) < config.validation) == (split == "validation"):
                    taken += 1
                    for start, piece in pieces(text, config.piece):
                        yield f"{file}:{place}:{start}", {"text": piece, "path": f"{file}:{place}"}
        require(
            taken > 0,
            f"{config.files[0]}{' and the other files' * (len(config.files) > 1)}: none of {count} documents "
            f"fell to {split} with data.validation {config.validation}. Add documents or give another share.",
        )


def matched(pattern: str) -> list[str]:
    """The files of a pattern, sorted. Raises UserError if there are none, or one of no known format."""
    pattern = str(Path(pattern).expanduser().resolve())
    found = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    require(
        bool(found),
        f"data.files: no file matches {pattern!r}. Name a file or a pattern, in quotes, such as "
        "--data.files '/data/*.parquet'.",
    )
    for path in found:
        reader_of(path)
    return found


def documents(path: str, column: str) -> Iterator[tuple[int, bytes]]:
    """(place, text) of every document that is not empty. Raises UserError for a file that is damaged or has
    no such texts."""
    try:
        yield from ((place, text) for place, text in reader_of(path)(path, column) if text)
    except UserError:
        raise
    except Exception as error:  # of every format's library
        reason = str(error).strip().split("\n")[0][:200].rstrip(".")
        raise UserError(f"{path} cannot be read; it is damaged, or no such file: {reason}.") from error


def reader_of(path: str) -> Callable[[str, str], Iterator[tuple[int, bytes]]]:
    """What reads a file, by the end of its name."""
    found = next((read for end, read in READERS.items() if re.search(end, path)), None)
    require(
        found is not None,
        f"data.files: {path} is none of .parquet, .jsonl, .json (one object a line), these with .gz or .zst, "
        "and .array_record. For files of text write --data text --data.corpus FOLDER.",
    )
    return found


def parquet(path: str, column: str) -> Iterator[tuple[int, bytes]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
        texts = [name for name, kind in kinds.items() if kind in ("string", "large_string", "string_view")]
        require(
            column in texts,
            f"{path} has no column {column!r} of text. Its columns of text are {', '.join(texts) or 'none'}"
            f"{f'; {column!r} is {kinds[column]}' if column in kinds else ''}: write --data.column NAME.",
        )
        place = 0
        for batch in file.iter_batches(ROWS, columns=[column]):
            for value in batch.column(0):
                yield place, (value.as_py() or "").encode("utf-8", errors="surrogatepass")
                place += 1


def json_lines(path: str, column: str) -> Iterator[tuple[int, bytes]]:
    opener = {".gz": gzip.open, ".zst": open_zst}.get(Path(path).suffix, open)
    with opener(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, text_of(line, column, f"{path}, line {number}")


def open_zst(path: str, mode: str) -> io.BufferedReader:
    """A file of one compressed frame or several."""
    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))


def text_of(line: bytes, field: str, where: str) -> bytes:
    """The text of a JSON document, UTF-8, empty for null; UserError, which names where it is, for a line
    without one."""
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{where} is no JSON object with a field {field!r} ({error!r:.80}): write --data.column NAME."
        ) from error
    text = "" if text is None else text
    require(
        isinstance(text, str),
        f"{where}: the field {field!r} must be a text, got {text!r:.60}: write --data.column NAME.",
    )
    return text.encode("utf-8", errors="surrogatepass")


def array_record(path: str, column: str) -> Iterator[tuple[int, bytes]]:
    reader = array_record_module.ArrayRecordReader(path)
    try:
        for place in range(reader.num_records()):
            (record,) = reader.read([place])
            yield place, feature_of(record, column, f"{path}, record {place}") if column else record
    finally:
        reader.close()


def feature_of(record: bytes, column: str, where: str) -> bytes:
    """The text of a feature of a record that is a tf.train.Example."""
    try:
        features = tf_example_pb2.Example.FromString(record).features.feature
    except Exception as error:  # protobuf's own types differ between its implementations
        raise UserError(
            f"{where} is no tf.train.Example. If records are text themselves, write --data.column ''."
        ) from error
    values = features[column].bytes_list.value if column in features else ()
    names = ", ".join(sorted(features))
    require(
        len(values) == 1,
        f"{where} has no text in a feature {column!r}; its features are {names or 'none'}. Write "
        "--data.column NAME, or '' if records are text themselves.",
    )
    return values[0]


READERS = {
    r"\.parquet$": parquet,
    r"\.jsonl?(\.gz|\.zst)?$": json_lines,
    r"\.array_?record(-\d+-of-\d+)?$": array_record,
}
