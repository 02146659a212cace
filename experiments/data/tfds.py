"""A dataset of tensorflow-datasets that was prepared as ArrayRecord, read where it is, without TensorFlow.

Preparing most of them needs TensorFlow: `tfds build --file_format=array_record NAME` does it once, on any
machine.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import tensorflow_datasets as tfds

from experiments.data import base
from experiments.data.prepared import quiet, sources
from experiments.data.text import fingerprint
from experiments.errors import UserError, require


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
    """Which dataset, and what of it."""

    name: str = "lm1b"
    """name of a dataset, such as lm1b or wiki40b/en, or the folder of a prepared one"""
    folder: str = "~/tensorflow_datasets"
    """where datasets are prepared that are called by their names"""
    column: str = "text"
    """the feature that holds the text"""
    split: str = "validation"
    """the split that is validation, such as test"""

    def __post_init__(self):
        super().__post_init__()
        require(self.split != "train", "data.split is trained on: give another, such as validation or test.")

    def records(self) -> base.Records:
        """The prepared texts. Raises UserError where there are none."""
        with quiet():
            builder = opened(self.name, Path(self.folder).expanduser())
        features, splits = builder.info.features, sorted(builder.info.splits)
        for split in ("train", self.split):
            require(
                split in splits,
                f"{self.name} has no split {split!r}, but {', '.join(splits)}. Write --data.split NAME.",
            )
        texts = sorted(name for name, kind in features.items() if isinstance(kind, tfds.features.Text))
        require(
            self.column in texts,
            f"{self.name} has no text in a feature {self.column!r}; those with text are "
            f"{', '.join(texts) or 'none'}. Write --data.column NAME.",
        )
        found = sources(builder, ("train", self.split))
        shards = [str(path) for split in found for path in builder.info.splits[split].filepaths]
        content = f"{builder.info.full_name}\0{fingerprint(Path('/'), shards)}\0{self.column}\0{self.split}"
        name = f"{builder.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        train, validation = (Texts(split, source, self.column) for split, source in found.items())
        return base.Records(
            builder.name,
            train,
            validation,
            fingerprint=name,
            folder=Path(self.root).resolve() / "tfds" / name,
        )


def opened(name: str, folder: Path) -> tfds.core.DatasetBuilder:
    """The builder of a prepared dataset. Raises UserError for another."""
    place, prepare = Path(name).expanduser(), "tfds build NAME --file_format=array_record --data_dir FOLDER"
    try:
        if place.is_dir():
            builder = tfds.builder_from_directory(str(place))
        else:
            builder = tfds.builder(name, data_dir=str(folder), file_format="array_record")
    except Exception as error:  # of many types, also for packages that a dataset would need
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(
            f"data.name {name!r} is neither the folder of a prepared dataset, with its dataset_info.json, "
            f"nor the name of one that is prepared as ArrayRecord in {folder} ({reason}). Where TensorFlow "
            f"is, `{prepare}` prepares one of the catalogue, once."
        ) from error
    kind = builder.info.file_format
    require(
        kind is tfds.core.FileFormat.ARRAY_RECORD,
        f"{name} is prepared as {kind and kind.value}, which is not read in random order. Where TensorFlow "
        f"is, write once: `{prepare}`.",
    )
    require(
        place.is_dir() or builder.is_prepared(),
        f"{name} is not prepared in {folder}. Where TensorFlow is, write once: tfds build {name} "
        f"--file_format=array_record --data_dir {folder}",
    )
    return builder


class Texts(Sequence):
    """{"text": bytes, "path": bytes} of the records of one split."""

    def __init__(self, split: str, source, column: str):
        self.split, self.source, self.column = split, source, column

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return {"text": self.source[index][self.column], "path": f"{self.split}:{index}".encode()}
