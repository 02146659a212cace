"""From text to tokens and back: bytes, or the tokens of a tokenizer.json.

A vocabulary has `tokens`, how many there are; `size`, this padded, the rows of an embedding; `unit`, what a
token is, in the singular; `separator`, the token after the last one of a record; `lengths`, the bytes of text
that each token stands for; `encode`, `decode` and `fingerprint`. That of a tokenizer that is still to be
trained has only the first three.
"""

import dataclasses
import functools
import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np

from experiments.errors import UserError, require

LARGE = ("vocab", "merges", "added_tokens")  # of a tokenizer.json: no parts in there
MULTIPLE = 128  # of rows of an embedding: tensor cores like it, and so do shards
# A record ends with the first of these that a tokenizer has, else with a token of its own.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
RECORD_END = b"\f"  # what a separator is shown as; it counts as one byte, so that losses compare


def bits_per_byte(nats: float, bytes_per_token: float = 1.0) -> float:
    """A loss in nats per token as bits per byte of the text that these tokens stand for."""
    return nats / bytes_per_token / math.log(2)


def padded(tokens: int) -> int:
    """The rows of an embedding of that many tokens."""
    return -(-tokens // MULTIPLE) * MULTIPLE


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Every byte is a token, and one more marks the end of a record."""

    size: int = 257
    tokens: int = 257
    separator: int = 256
    unit: str = "byte"
    fingerprint: str = "bytes"

    @property
    def lengths(self) -> np.ndarray:
        return np.ones(self.size, np.int32)

    @property
    def text(self) -> str:
        """The JSON of a tokenizer with these tokens."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        end = {"id": self.separator, "content": ENDS[0], "special": True, "normalized": False}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": [end],
                "pre_tokenizer": level,
                "decoder": level,
                "model": {"type": "BPE", "vocab": _byte_of_character(), "merges": []},
            },
            ensure_ascii=False,
        )

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text, int32 (L,)."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens) -> bytes:
        """The text of tokens (L,); the end of a record is a form feed."""
        tokens = np.asarray(tokens)
        return bytes(np.where(tokens == self.separator, RECORD_END[0], tokens).astype(np.uint8))


@dataclasses.dataclass(frozen=True)
class Untrained:
    """The vocabulary of a tokenizer that will be trained to at most so many tokens."""

    tokens: int
    unit: str = "token"

    @property
    def size(self) -> int:
        return padded(self.tokens)


class Subwords:
    """The tokens of a tokenizer in the JSON of the library `tokenizers`. Bytes that are no UTF-8 are encoded
    as replacement characters.

    rows: how many rows the embedding has; by default as many as there are tokens, padded to a multiple of
    128. Raises UserError for JSON of no tokenizer, and for one whose tokens are not bytes of text."""

    unit = "token"

    def __init__(self, text: str, origin: str, rows: int | None = None):
        tokenizers = library()
        self.text, self.origin = text, origin
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:12]
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            description = json.loads(text)
        except Exception as error:  # the library raises nothing more special
            raise UserError(
                f"{origin} is no tokenizer.json that the package tokenizers can read ({error}). Name another "
                "file, or write --data.tokenizer train:32768."
            ) from error
        self._tokenizer.encode_special_tokens = True  # such words in a text are text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        names = self._tokenizer.get_vocab(with_added_tokens=True)
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        bytes_of = _byte_level if _has_part(description, "ByteLevel") else _sentence_pieces
        require(
            _has_part(description, "ByteLevel") or bool(description["model"].get("byte_fallback")),
            f"The tokens of {origin} are not bytes of text: the tokenizer has neither a ByteLevel part (as "
            "those of GPT-2, Llama 3 and Qwen have) nor byte_fallback (as those of Llama 2 have), so text "
            "would be lost. Take another one, or --data.tokenizer train:32768.",
        )
        self.separator = next((names[end] for end in ENDS if end in names), max(names.values()) + 1)
        count = max(*names.values(), self.separator) + 1
        self.tokens, self.size = count, padded(count) if rows is None else rows
        own = f" (one of them for the end of a text, since none is called {' or '.join(ENDS)})"
        also = "" if self.separator in names.values() else own
        give = "a tokenizer that has one" if also else "the tokenizer.json that belongs to these weights"
        require(
            count <= self.size,
            f"{origin} has {count} tokens{also}, more than the {self.size} rows of the embedding. "
            f"Give {give}.",
        )
        self._pieces = [b""] * self.size
        for name, token in names.items():
            self._pieces[token] = name.encode() if name in added else bytes_of(name)
        self._pieces[self.separator] = RECORD_END
        self.lengths = np.array([len(piece) for piece in self._pieces], np.int32)

    @property
    def dtype(self):
        """The smallest type of stored tokens, whatever the rows of an embedding: these are no part of the
        fingerprint, by which what is stored is found again."""
        return np.dtype(np.uint16 if self.tokens <= 2**16 else np.uint32)

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text, int32 (L,)."""
        return self.encode_all([text])[0]

    def encode_all(self, texts) -> list[np.ndarray]:
        """The tokens of several texts, int32 (L,) each, by as many threads as there are cores."""
        texts = [text.decode("utf-8", errors="replace") for text in texts]
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in found]

    def decode(self, tokens) -> bytes:
        """The text of tokens (L,); the end of a record is a form feed, rows without a token are nothing."""
        return b"".join(self._pieces[token] for token in np.asarray(tokens).tolist())


def _has_part(description, kind: str) -> bool:
    """Whether something in a tokenizer's JSON is of this type."""
    if isinstance(description, dict):
        if description.get("type") == kind:
            return True
        return any(_has_part(part, kind) for key, part in description.items() if key not in LARGE)
    return isinstance(description, list) and any(_has_part(part, kind) for part in description)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The byte of every character in tokens of byte-level tokenizers: printable ones of Latin-1 stand for
    themselves, the others, in order, are the characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level(name: str) -> bytes:
    return bytes(_byte_of_character()[character] for character in name)


def _sentence_pieces(name: str) -> bytes:
    """`▁` is a space, and `<0x0A>` a byte that is no character of the vocabulary."""
    one = re.fullmatch(r"<0x([0-9A-F]{2})>", name)
    return bytes([int(one[1], 16)]) if one else name.replace("▁", " ").encode()


def library():
    """The package tokenizers; UserError when it is missing."""
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise UserError(
            "data.tokenizer needs the package tokenizers: pip install -e '.[tokenizers]', or set it to bytes."
        ) from error
    return tokenizers


def named(tokenizer: str):
    """The vocabulary that `data.tokenizer` names. Raises UserError if it names none."""
    if tokenizer == "bytes":
        return Bytes()
    kind, colon, tokens = tokenizer.partition(":")
    if colon and kind == "train":
        require(
            tokens.isascii() and tokens.isdigit() and int(tokens) > 256,
            f"data.tokenizer train:N trains a tokenizer of N tokens, more than 256, since every byte is one; "
            f"got {tokenizer!r}. Write train:32768.",
        )
        return Untrained(int(tokens))
    return read(Path(tokenizer))


def read(path: Path, rows: int | None = None) -> Subwords:
    """The vocabulary of a tokenizer.json. Raises UserError for a file that is none."""
    path = Path(path).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    require(
        path.is_file(),
        f"data.tokenizer is bytes, train:N or the path of a tokenizer.json; there is no file {str(path)!r}.",
    )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no tokenizer.json: it is no text.") from error
    return Subwords(text, str(path), rows)
