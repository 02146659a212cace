"""Writing files whole: a reader, and a disk that is full, finds the old content or the new, never a part."""

import contextlib
import os
import re
import threading
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path):
    """Yields the path of a file beside `path`, to be written; it takes the place of `path` when the block
    ends, and vanishes when the block raises."""
    path = Path(path)
    own = f"{os.getpid()}-{threading.get_ident()}"  # several may write the same file
    partial = path.with_name(f".{path.stem}-{own}{path.suffix}")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def unfinished(folder: Path) -> list[Path]:
    """What processes that were killed while they wrote into a folder left there."""
    return [path for path in folder.glob(".*-*-*") if re.fullmatch(r"\..+-\d+-\d+(\.\w+)?", path.name)]


def write(path: Path, text: str) -> None:
    """Write a text file whole."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
