"""What is prepared once and kept: tensorflow-datasets builders in ArrayRecord, without TensorFlow.

One process prepares while others wait. A folder appears under its name when everything is in it; what a
process that was killed left behind is deleted by the next one.
"""

import contextlib
import fcntl
import io
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import tensorflow_datasets as tfds
from array_record.python import array_record_module

from experiments.errors import REFUSALS, UserError, require

AGAIN = "Delete its folder, and prepare it anew."


class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A builder that writes ArrayRecord and downloads nothing."""

    VERSION = tfds.core.Version("1.0.0")
    # No URLs, hence no checksums; looking for their file would need the package importlib_resources.
    url_infos = None

    def __init__(self, *, file_format="array_record", **kwargs):
        # The default format, TFRecord, would need TensorFlow.
        super().__init__(file_format=file_format, **kwargs)


def prepared(make: Callable[[], Builder], does: str, check: Callable[[], None] = lambda: None) -> Builder:
    """The builder that `make` gives, prepared if it is not yet. does: `NAME: what is done then`, for stderr.
    check: raises before anything is written."""
    # Nothing is downloaded, but tensorflow-datasets wants a folder to download into.
    with quiet(), tempfile.TemporaryDirectory() as unused:
        builder = make()
        if not builder.is_prepared():
            check()
            say(f"{does}, once")
            folder = Path(builder.data_dir).parent
            with alone(folder / ".lock"):
                for left in folder.glob("incomplete.*"):
                    shutil.rmtree(left)
                with refused(folder):
                    make().download_and_prepare(download_dir=unused)  # nothing where another process has
        # A builder reads its splits where it is made: one that another process prepares just then has none.
        return make()


@contextlib.contextmanager
def refused(folder: Path):
    """Inside, what the system refuses to a writer of ArrayRecord is an OSError as of any file; it has the
    system's words in a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        for code in REFUSALS:
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code), str(folder)) from error
        raise


def sources(builder: tfds.core.DatasetBuilder, splits=("train", "validation")) -> dict:
    """The records of splits. Raises UserError where a file is missing or damaged, or lost records."""
    found = {split: builder.as_data_source(split) for split in splits}
    for split in splits:
        info = builder.info.splits[split]
        for path, expected in zip(info.filepaths, info.shard_lengths, strict=True):
            # The records of a source are counted by what was written, not by what is there.
            there = records_in(path)
            require(there == expected, f"{path} has {there} records, not {expected}. {AGAIN}")
    return found


def records_in(path: Path) -> int:
    """How many records an ArrayRecord has. Raises UserError for a file that cannot be read."""
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        count = reader.num_records()
        reader.close()
    except Exception as error:  # of ArrayRecord's own
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{path} cannot be read; it is missing or damaged: {reason}. {AGAIN}") from error
    return count


@contextlib.contextmanager
def alone(lock: Path):
    """Inside, no other process or thread holds this lock file; it waits for one that does. The system gives
    up the lock of a process that ends, however that happens."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def quiet():
    """Hide tensorflow-datasets' progress bars and its talk of downloading."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()
        logger.setLevel(level)
