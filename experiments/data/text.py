"""Text corpora as tensorflow-datasets builders in ArrayRecord: no TensorFlow, nothing downloaded.

A record is a piece of one file, cut at a line end, so that shuffling records mixes files. The
split is by file: the hash of a file's relative path decides, so it does not depend on the machine or on
other files.
"""

import dataclasses
import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import tensorflow_datasets as tfds

from experiments.data import base
from experiments.data.prepared import Builder, prepared, sources
from experiments.errors import UserError, require

VALIDATION_SHARE = 0.05
SAMPLE_BYTES = 2**16  # of each file, to see whether it is text
NO_TEXT = bytes(set(range(32)) - set(b"\a\b\t\n\v\f\r\x1a\x1b")) + b"\x7f"
# Installed packages are not the standard library, test folders are mostly tables of cases, and pydoc_data is
# one generated file of manual text, a sixteenth of all.
STDLIB_WITHOUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
    """Which files of text, and where they are kept prepared."""

    corpus: str = "stdlib"
    """`stdlib` (the Python standard library's own source files) or a folder of text files"""
    patterns: tuple[str, ...] = ("*.txt", "*.md", "*.rst", "*.py")
    """which files of a folder to take (not used for stdlib)"""
    piece: int = 4096
    """bytes of a record at most; give some sequences, such as 65536, where these are long"""

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.patterns), "data.patterns is empty: give at least one, such as '*.txt'.")
        wrong = [pattern for pattern in self.patterns if pattern in ("", ".") or Path(pattern).is_absolute()]
        require(
            not wrong,
            f"data.patterns are of files below data.corpus, such as '*.txt' or 'notes/*.md', got {wrong}.",
        )
        require(self.piece > 0, f"data.piece must be positive, got {self.piece}.")

    def records(self) -> base.Records:
        """The prepared corpus. Raises UserError where there is no text."""
        builder = prepare(self)
        return base.Records(
            builder.name,
            **sources(builder),
            fingerprint=builder.builder_config.name,
            folder=Path(builder.data_dir),
        )


@dataclasses.dataclass(eq=False)
class TextConfig(tfds.core.BuilderConfig):
    """Which files a corpus holds; its name has their fingerprint, so changed files are prepared anew."""

    folder: str = ""
    files: tuple[str, ...] = ()
    piece: int = 4096


class TextFiles(Builder, skip_registration=True):
    """Files of text under one folder: records {"text": bytes, "path": bytes}, splits train and validation."""

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "path": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, description=self.__doc__, features=features)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in ("train", "validation")}

    def _generate_examples(self, split):
        config = self.builder_config
        for file in split_by_file(config.files)[split == "validation"]:
            text = (Path(config.folder) / file).read_bytes()
            for start, piece in pieces(text, config.piece):
                yield f"{file}:{start}", {"text": piece, "path": file}


class StdlibText(TextFiles):
    """The Python standard library's own source files, found on this machine."""


class LocalText(TextFiles):
    """Text files of a folder that the user names."""


def prepare(data: Config) -> tfds.core.DatasetBuilder:
    """The prepared corpus of these data settings; prepares it when it is not there yet.

    Raises UserError, before anything is written, when there are no files or too few to split.
    """
    stdlib = data.corpus == "stdlib"
    folder = Path(sysconfig.get_paths()["stdlib"] if stdlib else data.corpus).expanduser().resolve()
    files = stdlib_files(folder) if stdlib else local_files(folder, data)
    label = (
        f"{platform.python_implementation().lower()}-{platform.python_version()}" if stdlib else folder.name
    )
    kind = StdlibText if stdlib else LocalText
    check_names(folder, files)
    name = f"{label}-{fingerprint(folder, files)}"
    if data.piece != Config.piece:
        name += f"-{data.piece}"
    config = TextConfig(name=name, folder=str(folder), files=tuple(files), piece=data.piece)
    root = str(Path(data.root).resolve())
    does = f"{label}: reading the text"
    return prepared(lambda: kind(data_dir=root, config=config), does, lambda: check_text(folder, files))


def stdlib_files(folder: Path) -> list[str]:
    """Source files of the standard library, relative and sorted."""
    files = [path.relative_to(folder) for path in folder.rglob("*.py")]
    files = [str(path) for path in files if not STDLIB_WITHOUT & set(path.parts)]
    require(
        len(files) > 1,
        f"This Python keeps no source files under {folder}. Name a folder of your own text: "
        "--data.corpus FOLDER.",
    )
    return sorted(files)


def local_files(folder: Path, data: Config) -> list[str]:
    """Non-empty files of the folder that match the patterns, relative, sorted; without hidden folders, and
    without links to others of them, since the split is by file: both would be in training and validation."""
    if not folder.is_dir():
        raise UserError(
            f"data.corpus must be 'stdlib' or a folder of text files; {str(folder)!r} is not a folder."
        )
    found = {path for pattern in data.patterns for path in folder.rglob(pattern) if path.is_file()}
    files = [path.relative_to(folder) for path in found if path.stat().st_size]
    files = [path for path in files if not any(part.startswith(".") for part in path.parts)]
    files.sort(key=lambda path: ((folder / path).is_symlink(), path))
    once = {(folder / path).resolve(): path for path in reversed(files)}
    files = sorted(map(str, once.values()))
    patterns = ", ".join(data.patterns)
    require(
        bool(files),
        f"The corpus folder {folder} has no non-empty file that matches {patterns}. "
        "Put text there, or name other patterns: --data.patterns '*.tex' '*.c'.",
    )
    require(
        len(files) > 1,
        f"The corpus folder {folder} has one file that matches {patterns} ({files[0]}), but the "
        "split into training and validation is by file. Divide the text into two files or more.",
    )
    return files


def check_names(folder: Path, files) -> None:
    """UserError for a file whose name is no UTF-8, as Python marks it with surrogates."""
    for file in files:
        raw = os.fsencode(folder / file)
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"The corpus has a file whose name is no UTF-8: {raw!r}. Rename it.") from error


def check_text(folder: Path, files) -> None:
    """UserError where files are no text. In bytes of text, in any encoding of 8 bits, control characters are
    rare; of random bytes they are a tenth."""
    binary = []
    for file in files:
        with (folder / file).open("rb") as opened:
            start = opened.read(SAMPLE_BYTES)
        if len(start.translate(None, delete=NO_TEXT)) < 0.99 * len(start):
            binary.append(file)
    require(
        not binary,
        f"{len(binary)} of {len(files)} files in the corpus folder {folder} are no text: more than 1 % of "
        f"their bytes are control characters. The first is {(binary or [''])[0]}. Take them away, or name "
        "patterns that leave them out: --data.patterns '*.tex' '*.c'.",
    )


def split_by_file(files) -> tuple[list[str], list[str]]:
    """Files for training and for validation; neither is empty."""
    order = sorted(files, key=lambda file: share_of(file.encode()))
    held_out = sum(share_of(file.encode()) < VALIDATION_SHARE for file in order)
    held_out = min(max(held_out, 1), len(order) - 1)
    return sorted(order[held_out:]), sorted(order[:held_out])


def share_of(words: bytes) -> float:
    """In [0, 1): those below a share are held out; the same on every machine."""
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "big") / 2**64


def pieces(text: bytes, most: int):
    """Yield (start, piece) of consecutive pieces of at most so many bytes; each ends with a line unless that
    line is too long, and with a character of UTF-8 if there is one in a piece."""
    start = 0
    while start < len(text):
        end = start + most
        if end < len(text):
            end = text.rfind(b"\n", start, end) + 1 or whole_character(text, start, end)
        yield start, text[start:end]
        start = end


def whole_character(text: bytes, start: int, end: int) -> int:
    """The end, or, where it would divide a character of UTF-8, the place before that."""
    for place in range(end, max(end - 4, start), -1):
        if text[place] & 0xC0 != 0x80:  # of a character's bytes all but the first are so
            length = next((n for n, first in ((4, 0xF0), (3, 0xE0), (2, 0xC0)) if text[place] >= first), 1)
            return place if place + length > end else end
    return end


def fingerprint(folder: Path, files) -> str:
    """A short hash of names, sizes and times: notices new content without reading every byte."""
    digest = hashlib.sha256()
    for file in files:
        stat = (folder / file).stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:12]
