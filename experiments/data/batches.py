"""From records to batches of tokens, through grain; the position in the data can be saved.

Shapes: B sequences in the local batch, L tokens per sequence.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grain
import jax
import numpy as np

from experiments import files
from experiments.data.base import Config
from experiments.errors import require

SHUFFLE_WINDOW = 2048  # sequences: neighbours in a file are spread over many batches
AHEAD = grain.ReadOptions(num_threads=4, prefetch_buffer_size=32)  # records: some batches of long sequences


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: record sources of both splits and statistics of the training text."""

    name: str
    train: object
    validation: object
    statistics: dict


def open_corpus(data: Config) -> Corpus:
    """Open the records of a dataset, and read or compute what is known of their text. Raises UserError when
    there is no text."""
    records = data.records()
    sources = {"train": records.train, "validation": records.validation}
    path = records.folder and records.folder / "statistics.json"
    known = _read(path) if path else {}
    if "digest" not in known:
        known = statistics(records.train) | contents(sources)
        if path and jax.process_index() == 0:
            files.write(path, json.dumps(known))
    return Corpus(records.name, records.train, records.validation, known)


def _read(path: Path) -> dict:
    """The statistics in a file, {} if there are none that can be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def contents(sources: dict) -> dict:
    """Which text the splits hold: number of files, bytes of validation, and a digest of every record in
    order. A run goes on only with the digest that it began with."""
    digest, paths, size = hashlib.sha256(), set(), dict.fromkeys(sources, 0)
    for split, source in sources.items():
        for index in range(len(source)):
            text, path = source[index]["text"], source[index]["path"]
            digest.update(f"{split} {len(path)} {len(text)} ".encode() + path + text)
            paths.add(path)
            size[split] += len(text)
    return {"files": len(paths), "validation_bytes": size["validation"], "digest": digest.hexdigest()[:16]}


def tokens_of(vocabulary, record) -> dict:
    """A record as tokens: those of its text, then the separator."""
    return {"tokens": np.append(vocabulary.encode(record["text"]), vocabulary.separator).astype(np.int32)}


def sequences(source, data: Config, seed: int, *, repeat: bool, shard=(0, 1)) -> grain.IterDataset:
    """Packed sequences of L + 1 tokens, ordered by the seed; `shard` is (index, count) of processes."""
    index, count = shard
    records = grain.MapDataset.source(source).seed(seed).shuffle()[index::count]
    records = (records.repeat() if repeat else records).map(partial(tokens_of, data.vocabulary))
    records = records.to_iter_dataset(AHEAD)
    packed = grain.experimental.ConcatThenSplitIterDataset(records, length_struct={"tokens": data.seq + 1})
    return grain.experimental.WindowShuffleIterDataset(packed, window_size=SHUFFLE_WINDOW, seed=seed)


def train_batches(corpus: Corpus, data: Config, seed: int):
    """The endless Batches of this process, {"tokens": int32 (B, L + 1)}."""
    count = jax.process_count()
    require(
        data.batch % jax.device_count() == 0,
        f"data.batch must be a multiple of the number of devices, got {data.batch} and "
        f"{jax.device_count()} devices.",
    )
    require(
        len(corpus.train) >= count,
        f"The training split of {corpus.name} has {len(corpus.train)} records, too few for {count} "
        "processes.",
    )
    stream = sequences(corpus.train, data, seed, repeat=True, shard=(jax.process_index(), count))
    return Batches(stream.batch(data.batch // count))


class Batches:
    """An iterator whose position is JSON, as grain's checkpoint handler wants it.

    Inside, positions hold tuples; JSON returns lists, and grain 0.2.18 would then not recognise "nothing read
    yet", so that a run resumed early would see other data.
    """

    def __init__(self, dataset: grain.IterDataset):
        self._iterator = iter(dataset)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._iterator)

    def get_state(self) -> bytes:
        return json.dumps(self._iterator.get_state()).encode()

    def set_state(self, state: bytes):
        def as_tuples(item):
            return {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}

        self._iterator.set_state(json.loads(state, object_hook=as_tuples))

    def start_prefetch(self):
        self._iterator.start_prefetch()


def validation_batches(corpus: Corpus, data: Config, count: int) -> list[np.ndarray]:
    """At most `count` batches int32 (B, L + 1), the same for every seed and every process."""
    batches = []
    for batch in sequences(corpus.validation, data, 0, repeat=False).batch(data.batch, drop_remainder=True):
        if (batch["tokens_segment_ids"] > 0).all():  # the last sequence of the split may be padded
            batches.append(batch["tokens"].astype(np.int32))
        if len(batches) == count:
            break
    require(
        bool(batches),
        f"The validation split of {corpus.name} has less than one batch of {data.batch} x "
        f"{data.seq + 1} tokens. "
        "Add text, or lower data.batch or data.seq.",
    )
    return batches


def statistics(source) -> dict:
    """Bytes, and the entropies in nats of a byte alone (order 0) and given the byte before (order 1)."""
    pairs = np.zeros(256 * 256, np.int64)
    firsts = np.zeros(256, np.int64)
    for index in range(len(source)):
        text = np.frombuffer(source[index]["text"], np.uint8).astype(np.int64)
        pairs += np.bincount(text[:-1] * 256 + text[1:], minlength=pairs.size)
        firsts += np.bincount(text[:1], minlength=256)
    pairs = pairs.reshape(256, 256)
    singles = pairs.sum(0) + firsts

    def entropy(counts):
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    return {
        "bytes": int(singles.sum()),
        "records": len(source),
        "order0_nats": entropy(singles),
        "order1_nats": entropy(pairs) - entropy(pairs.sum(1)),
    }
