"""A matrix product, described as tuning tables and libraries need it."""

import dataclasses
from typing import Any, Literal

KINDS = {(-1, -2): "fwd", (-1, -1): "dgrad", (-2, -2): "wgrad"}  # by the contracted axes of both operands


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of two matrices, one of whose operands is sparse.

    axes: the contracted axis of the left and of the right operand, each -1 or -2.
    side: which operand is sparse, "left" or "right"; "result" if both are dense and only some entries of the
        result are wanted.
    dtype: of the operands.
    shape: (M, K, N), of a product of (M, K) and (K, N).
    pattern: of what is sparse, "2:4" or such as "64:2:16".
    out_dtype: of the result; None for that of the operands, or bfloat16 for 8-bit operands."""

    axes: tuple[int, int]
    side: Literal["left", "right", "result"]
    dtype: Any
    shape: tuple[int, int, int]
    pattern: str = "2:4"
    out_dtype: Any = None

    @property
    def kind(self) -> str:
        """Its name in a linear layer: "fwd", "dgrad" or "wgrad"; "other" if a layer has no such product."""
        return KINDS.get(self.axes, "other")
