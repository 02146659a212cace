"""What is prepared once and kept: tensorflow-datasets builders in ArrayRecord, without TensorFlow.

One process prepares while others wait. A folder appears under its name when everything is in it; what a
process that was killed left behind is deleted by the next one.
"""

import contextlib
import fcntl
import io
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import tensorflow_datasets as tfds

from experiments.errors import require


class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A builder that writes ArrayRecord and downloads nothing."""

    VERSION = tfds.core.Version("1.0.0")
    # No URLs, hence no checksums; looking for their file would need the package importlib_resources.
    url_infos = None

    def __init__(self, *, file_format="array_record", **kwargs):
        # The default format, TFRecord, would need TensorFlow.
        super().__init__(file_format=file_format, **kwargs)


def prepared(make: Callable[[], Builder], check: Callable[[], None] = lambda: None) -> Builder:
    """The builder that `make` gives, prepared if it is not yet. check: raises before anything is written."""
    # Nothing is downloaded, but tensorflow-datasets wants a folder to download into.
    with quiet(), tempfile.TemporaryDirectory() as unused:
        builder = make()
        if builder.is_prepared():
            return builder
        check()
        folder = Path(builder.data_dir).parent
        with alone(folder / ".lock"):
            for left in folder.glob("incomplete.*"):
                shutil.rmtree(left)
            make().download_and_prepare(download_dir=unused)  # does nothing where another process has
        # A builder reads its splits where it is made: one made before it was prepared has none.
        return make()


def sources(builder: tfds.core.DatasetBuilder, splits=("train", "validation")) -> dict:
    """The records of splits. Raises UserError where some were lost."""
    found = {split: builder.as_data_source(split) for split in splits}
    for split, source in found.items():
        # A format that loses records on the way must not go unnoticed.
        expected = builder.info.splits[split].num_examples
        require(
            expected == len(source),
            f"The {split} split of {builder.data_dir} has {len(source)} records, not {expected}.",
        )
    return found


@contextlib.contextmanager
def alone(lock: Path):
    """Inside, no other process or thread holds this lock file; it waits for one that does. The system gives
    up the lock of a process that ends, however that happens."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
