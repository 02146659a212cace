"""From records to batches of tokens, through grain; the position in the data can be saved.

Shapes: B sequences in the batch of all devices, L tokens per sequence.
"""

import hashlib
import json
import lzma
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grain
import jax
import numpy as np

from experiments import files
from experiments.data import text as texts
from experiments.data import tokens
from experiments.data.base import Config, Mixture
from experiments.data.vocabulary import Untrained
from experiments.errors import require

SHUFFLE_WINDOW = 2048  # sequences: neighbours in a file are spread over many batches
# The thread that packs also reads records, each in less than 0.1 ms. Threads for that would contend for the
# interpreter with the one that dispatches steps, which then waits for tens of milliseconds.
READING = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
COMPRESSED_BYTES = 8 * 10**6  # more than this, a compressor of xz's kind does not look back
# Packed while the device computes: more than a window of batches of 64 sequences, since a window comes all at
# once, after a pause in which it is read.
BATCHES_AHEAD = 40


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: record sources of both splits, their vocabulary, statistics of the text."""

    name: str
    train: object
    validation: object
    vocabulary: object
    statistics: dict


def open_corpus(data: Config, vocabulary=None) -> Corpus:
    """Open the records of a dataset, and read or compute what is known of their text. Raises UserError when
    there is no text.

    vocabulary: the one to use; by default what `data.tokenizer` says, a tokenizer that is trained where there
    is none yet."""
    records = data.records()
    splits = {"train": records.train, "validation": records.validation}

    def compute():
        return statistics(records.train) | contents(splits)

    known = _kept(records.folder, "digest", compute)
    vocabulary = data.vocabulary if vocabulary is None else vocabulary
    if isinstance(vocabulary, Untrained):
        vocabulary = tokens.trained(records, vocabulary, data.root)
    if isinstance(vocabulary, tokens.Subwords):
        splits, folder = tokens.tokenised(records, vocabulary, data.root)
        known = known | _kept(folder, "tokenizer", lambda: counts(splits, vocabulary))
    return Corpus(records.name, **splits, vocabulary=vocabulary, statistics=known)


def _kept(folder: Path | None, name: str, compute) -> dict:
    """The statistics in a folder; computed, and written there, if they are not there with this name."""
    path = folder and folder / "statistics.json"
    known = _read(path) if path else {}
    if name not in known:
        known = compute()
        if path and jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            files.write(path, json.dumps(known))
    return known


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


def counts(splits: dict, vocabulary) -> dict:
    """How many tokens the splits have, and whose they are."""
    sizes = {
        split: sum(len(source[index]["tokens"]) for index in range(len(source)))
        for split, source in splits.items()
    }
    return {
        "tokenizer": vocabulary.fingerprint,
        "tokens": sizes["train"],
        "validation_tokens": sizes["validation"],
    }


def tokens_of(vocabulary, record) -> dict:
    """A record as tokens: those of its text, then the separator."""
    if "tokens" in record:
        return record
    return {"tokens": np.append(vocabulary.encode(record["text"]), vocabulary.separator).astype(np.int32)}


def sequences(source, vocabulary, data: Config, seed: int, *, repeat: bool) -> grain.IterDataset:
    """Packed sequences of L + 1 tokens, ordered by the seed. Of a mixture, each source's share of them is its
    weight; without `repeat` they end where one source does."""
    if isinstance(source, Mixture):
        parts = [packed(part, vocabulary, data, seed, repeat=repeat) for part in source.sources]
        mixed = grain.IterDataset.mix(parts, source.weights)
    else:
        mixed = packed(source, vocabulary, data, seed, repeat=repeat)
    return grain.experimental.WindowShuffleIterDataset(mixed, window_size=SHUFFLE_WINDOW, seed=seed)


def packed(source, vocabulary, data: Config, seed: int, *, repeat: bool) -> grain.IterDataset:
    """Sequences of L + 1 tokens of one source, in the order of its records."""
    records = grain.MapDataset.source(source).seed(seed).shuffle()
    records = (records.repeat() if repeat else records).map(partial(tokens_of, vocabulary))
    records = records.to_iter_dataset(READING)
    return grain.experimental.ConcatThenSplitIterDataset(records, length_struct={"tokens": data.seq + 1})


def train_batches(corpus: Corpus, data: Config, seed: int):
    """The endless Batches {"tokens": int32 (B, L + 1)}, the same in every process, on every mesh.

    Every process reads all records and keeps the rows of its devices, so that a run may go on with other
    processes: their position in the data is one. That is 4 bytes per token from prepared tokens."""
    require(len(corpus.train) > 0, f"The training split of {corpus.name} has no records. Add text.")
    stream = sequences(corpus.train, corpus.vocabulary, data, seed, repeat=True).batch(data.batch)
    return Batches(grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=BATCHES_AHEAD))


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

    def close(self):
        """Ends the threads that read ahead: a process that ends before them is aborted."""
        self._iterator.close()


def validation_batches(corpus: Corpus, data: Config, count: int) -> list[np.ndarray]:
    """At most `count` batches int32 (B, L + 1), the same for every seed and every process."""
    batches, stream = [], sequences(corpus.validation, corpus.vocabulary, data, 0, repeat=False)
    for batch in stream.batch(data.batch, drop_remainder=True):
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


def second_batches(text: str, data: Config, vocabulary, count: int) -> list[np.ndarray]:
    """At most `count` batches int32 (B, L + 1) of the held-out part of another text than a run's own, in the
    tokens of the run.

    text: `stdlib`, or a folder of text files. Raises UserError where there is none, or too little."""
    records = texts.Config(corpus=text, root=data.root, piece=65536).records()
    corpus = Corpus(records.name, records.train, records.validation, vocabulary, {})
    return validation_batches(corpus, data, count)


def bytes_per_token(vocabulary, batches) -> float:
    """Bytes of text per token that is predicted in batches (B, L + 1): all but the first of each sequence."""
    return float(np.mean([vocabulary.lengths[batch[:, 1:]].mean() for batch in batches]))


def statistics(source) -> dict:
    """Bytes, the entropies in nats of a byte alone (order 0) and given the byte before (order 1), and what a
    compressor needs; of a mixture the means of its sources by their weights."""
    if isinstance(source, Mixture):
        parts = [statistics(part) for part in source.sources]
        known = {name: sum(part[name] for part in parts) for name in ("bytes", "records")}
        return known | {
            name: float(np.average([part[name] for part in parts], weights=source.weights))
            for name in parts[0]
            if name not in known
        }
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
        "xz_bits": xz_bits(source),
    }


def xz_bits(source) -> float:
    """Bits per byte to which `xz -6` compresses the first `COMPRESSED_BYTES` of the text."""
    texts, size = [], 0
    for index in range(len(source)):
        texts.append(source[index]["text"])
        size += len(texts[-1])
        if size >= COMPRESSED_BYTES:
            break
    return 8 * len(lzma.compress(b"".join(texts), preset=6)) / size
