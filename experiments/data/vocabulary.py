"""From text to tokens and back."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Every byte is a token, and one more marks the end of a record."""

    size: int = 257
    """how many tokens there are"""
    separator: int = 256
    """the token after the last one of a record"""
    unit: str = "byte"
    """what a token is, in the singular"""

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text, int32 (L,)."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens) -> bytes:
        """The text of tokens (L,); the end of a record is a form feed."""
        tokens = np.asarray(tokens)
        return bytes(np.where(tokens == self.separator, 0x0C, tokens).astype(np.uint8))

    def bits(self, nats: float) -> float:
        """Bits per `unit` of a loss in nats per token."""
        return nats / math.log(2)
