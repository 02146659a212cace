"""Text that is tokenised once and kept: a tokenizer trained on a corpus, and the corpus in its tokens.

A record of tokens is one of the text followed by the separator, as bytes of uint16 or uint32. Both are kept
under names that have the fingerprints of the text and of the tokenizer.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from experiments import files
from experiments.data.base import Mixture, Records
from experiments.data.prepared import AGAIN, Builder, alone, prepared, say, sources
from experiments.data.vocabulary import ENDS, Subwords, Untrained, library, read
from experiments.errors import require

SAMPLE_BYTES = 60_000_000  # of text that a tokenizer is trained on
TOGETHER = 1000  # records that are encoded by all cores at once
# How GPT-4 and Llama 3 divide text before pairs are merged: contractions, words with what precedes them, up
# to three digits, punctuation with line ends, spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(eq=False)
class TokensConfig(tfds.core.BuilderConfig):
    """The text and its tokenizer."""

    records: Records | None = None
    vocabulary: Subwords | None = None


class Tokens(Builder, skip_registration=True):
    """Records {"tokens": bytes} of a corpus in the order of its text, splits train and validation."""

    def _info(self):
        features = tfds.features.FeaturesDict({"tokens": tfds.features.Text()})
        return tfds.core.DatasetInfo(
            builder=self, description=self.__doc__, features=features, disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        records = self.builder_config.records
        return {split: self._generate_examples(getattr(records, split)) for split in ("train", "validation")}

    def _generate_examples(self, source):
        vocabulary = self.builder_config.vocabulary
        for start in range(0, len(source), TOGETHER):
            places = range(start, min(start + TOGETHER, len(source)))
            texts = [source[place]["text"] for place in places]
            for place, tokens in zip(places, vocabulary.encode_all(texts), strict=True):
                stored = np.append(tokens, vocabulary.separator).astype(vocabulary.dtype)
                yield place, {"tokens": stored.tobytes()}


class Stored:
    """{"tokens": int32 (L,)} of the records of a source."""

    def __init__(self, source, dtype):
        self.source, self.dtype = source, dtype

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return {"tokens": np.frombuffer(self.source[index]["tokens"], self.dtype).astype(np.int32)}


def tokenised(records: Records, vocabulary: Subwords, root: Path) -> tuple[dict, Path]:
    """The records of both splits in tokens, tokenised if they are not yet, and the folder that keeps what is
    known of them."""
    if records.parts:
        folder = Path(root).resolve() / "tokens" / f"{records.fingerprint}-{vocabulary.fingerprint}"
        parts = [tokenised(part, vocabulary, root)[0] for part in records.parts]
        weights = records.train.weights
        return {split: Mixture([part[split] for part in parts], weights) for split in parts[0]}, folder
    name = f"{records.fingerprint}-{vocabulary.fingerprint}"
    config = TokensConfig(name=name, records=records, vocabulary=vocabulary)
    builder = prepared(
        lambda: Tokens(data_dir=str(Path(root).resolve()), config=config),
        f"{records.name}: turning the text into tokens",
    )
    found = {split: Stored(source, vocabulary.dtype) for split, source in sources(builder).items()}
    for split, source in found.items():
        check_stored(source, getattr(records, split), vocabulary, builder.data_dir)
    return found, Path(builder.data_dir)


def check_stored(source, records, vocabulary: Subwords, folder) -> None:
    """UserError unless there are as many records of tokens as of text, and the first one is what the
    tokenizer makes of its text."""
    made = [
        [*vocabulary.encode(records[n]["text"]), vocabulary.separator] for n in range(min(1, len(records)))
    ]
    require(
        len(source) == len(records) and all(np.array_equal(source[0]["tokens"], first) for first in made),
        f"The tokens in {folder} are not those that this tokenizer makes of their text: another version of "
        f"this project, or of the package tokenizers, has written them. {AGAIN}",
    )


def trained(records: Records, wanted: Untrained, root: Path) -> Subwords:
    """A byte-level tokenizer with at most so many tokens, trained on the training text if it is not yet."""
    folder = Path(root).resolve() / "tokenizers" / records.fingerprint
    path = folder / f"bpe-{wanted.tokens}.json"
    if not path.exists():
        library()
        with alone(folder / ".lock"):
            if not path.exists():
                say(f"{records.name}: training a tokenizer of {wanted.tokens:,} tokens, once")
                files.write(path, train(_sample(records.train), wanted.tokens))
    return read(path, rows=wanted.size)


def _sample(source) -> Iterator[str]:
    """Texts of a source, evenly from all of it, of about `SAMPLE_BYTES` together."""
    count = len(source)
    some = [len(source[index]["text"]) for index in range(0, count, max(count // 100, 1))]
    step = max(round(np.mean(some) * count / SAMPLE_BYTES), 1)
    for index in range(0, count, step):
        yield source[index]["text"].decode("utf-8", errors="replace")


def train(texts: Iterator[str], tokens: int) -> str:
    """The JSON of a byte-level tokenizer of at most so many tokens, by byte-pair encoding."""
    tokenizers = library()
    model, parts = tokenizers.models.BPE(), tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(model)
    words = parts.Split(tokenizers.Regex(WORDS), behavior="isolated")
    level = parts.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = parts.Sequence([words, level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=[ENDS[0]],
        initial_alphabet=parts.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()
