"""The dense rival of methods whose products are in 8 bits."""

import dataclasses

from jax_sparse24.engine.float8 import in_float8
from jax_sparse24.engine.plan import LINEAR, Plan
from jax_sparse24.methods.base import Method

NAME = "Dense-e4m3"


@dataclasses.dataclass(frozen=True)
class DenseE4M3(Method):
    """Dense products of weights in e4m3, forward and for the input gradient, with a scale per tensor.

    Operands are rounded as those of `FST(fp8="tensor")`, by the same code, and the weight gradient keeps the
    model's dtype as there."""

    when = "What 2:4 products in 8 bits have to beat."

    @property
    def causal(self):
        return False  # the scale depends on all tokens, and rounds each of them

    def linear_plan(self):
        return Plan.of(LINEAR, **in_float8({}, "tensor", dict.fromkeys(("fwd", "dgrad"), "e4m3")))


def competes(method: Method) -> bool:
    """Whether a method multiplies sparse operands in 8 bits."""
    return any("packed" in row.eight_bits for _, row in method.ffn_plan().rows)


def named(part: str) -> str:
    """The name of a part of the rival in the "ms" of another row."""
    return f"e4m3 dense {part}"
