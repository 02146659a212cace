"""A product as tables and libraries know it."""

import dataclasses
from typing import Any, Literal

KINDS = {(-1, -2): "fwd", (-1, -1): "dgrad", (-2, -2): "wgrad"}  # by the contracted axes of both operands


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of two matrices, one of whose operands is sparse.

    axes: the contracted axis of the left and of the right operand, -1 or -2. side: where the sparse operand
    stands, "left" or "right"; "result" if both operands are dense and only some entries of the result are
    wanted. dtype: of the operands. shape: (M, K, N). pattern: of what is sparse, "2:4" or such as "64:2:16".
    out_dtype: of the result; None for that of the operands, bfloat16 for 8-bit ones."""

    axes: tuple[int, int]
    side: Literal["left", "right", "result"]
    dtype: Any
    shape: tuple[int, int, int]
    pattern: str = "2:4"
    out_dtype: Any = None

    @property
    def kind(self) -> str:
        """What it is in a linear layer: "fwd", "dgrad" or "wgrad"; "other" for what none has."""
        return KINDS.get(self.axes, "other")
