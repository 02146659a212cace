"""Products of operands that are rounded to 8-bit floats.

Forward products with a scale per tensor run in e4m3 where cuSPARSELt is chosen for them. All others are
simulated: operands are rounded as the casts round them and multiplied in their own dtype, which shows what
FP8 does to training and adds no speed."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_sparse24.engine.operand import Request, Sparsifier
from jax_sparse24.engine.plan import Row
from jax_sparse24.engine.sparsifiers import DenseValues
from jax_sparse24.ops.packed24 import Packed24

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
LEAST = 2.0**-100  # the scale of a smaller largest magnitude would overflow


@dataclasses.dataclass(frozen=True)
class All(Sparsifier):
    """Leaves the whole operand as it is."""

    forms: ClassVar = ("dense",)

    def check(self, op, shape, axis, what):
        """Does nothing, because every shape fits."""

    def __call__(self, x, axis, request: Request):
        return request.activate(x)

    def __str__(self):
        return "all"


@dataclasses.dataclass(frozen=True)
class Float8(DenseValues):
    """Values of another sparsifier, rounded to an 8-bit format after scaling.

    The scale takes the largest magnitude to the largest number of the format, of all shards of the operand.

    of, axis: see `DenseValues`.
    format: "e4m3" or "e5m2".
    scales: one scale per "tensor", or one per "row", the elements that one element of the result sums up."""

    format: Literal["e4m3", "e5m2"] = "e4m3"
    scales: Literal["tensor", "row"] = "tensor"
    multiplied: ClassVar = "simulated by XLA's dense product"

    def piecewise(self, shape, axis):
        return False  # a scale is of all pieces

    def _scaled(self, values, axis, cuts) -> tuple[jax.Array, jax.Array]:
        """The values times the scale, rounded to the format, and the scale, float32."""
        wide = values.astype(jnp.float32)
        over, shards = (axis, cuts[axis]) if self.scales == "row" else (None, cuts[0] + cuts[1])
        top = jnp.max(jnp.abs(wide), axis=over, keepdims=True, initial=0)
        top = jax.lax.pmax(top, shards) if shards else top
        to = FORMATS[self.format]
        scale = float(jnp.finfo(to).max) / jnp.where(top > 0, jnp.maximum(top, LEAST), 1)
        return (wide * scale).astype(to), scale

    def __call__(self, x, axis, request: Request):
        values = super().__call__(x, axis, request)
        rounded, scale = self._scaled(values, axis, request.cuts)
        # Without the barrier XLA may drop a cast to 8 bits and back (xla_allow_excess_precision).
        rounded = jax.lax.optimization_barrier(rounded)
        return (rounded.astype(jnp.float32) / scale).astype(values.dtype)

    def quantised(self, x, axis, request: Request) -> tuple[Packed24 | jax.Array, jax.Array]:
        """The operand in the 8-bit format, times a scale per tensor.

        x, axis, request: as a sparsifier takes them.

        Returns: the operand, packed if the sparsifier packs, and the scale, float32 (1, 1)."""
        operand = self.of(x, axis, request)
        if not isinstance(operand, Packed24):
            return self._scaled(operand, axis, request.cuts)
        values, scale = self._scaled(operand.values, axis, request.cuts)
        return dataclasses.replace(operand, values=values), scale

    def __str__(self):
        values = "" if self.of == All() else f"{super().__str__()}, "
        return f"{values}{self.format}, a scale per {self.scales}"


def in_float8(rows: dict[str, Row], scales: Literal["tensor", "row"]) -> dict[str, Row]:
    """The rows of a linear plan with both operands of every product in 8 bits: e4m3 forward and e5m2
    backward.

    rows: of the plan without rounding, by product.
    scales: see `Float8`.

    Returns: rows of all three products.
    Source: the code of 2409.09099."""
    defaults = {"fwd": Row("w", All()), "dgrad": Row("w", All()), "wgrad": Row("dy", All())}
    axes = {"fwd": -2, "dgrad": -1, "wgrad": -2}  # the contracted axis of the sparse operand
    found = {}
    for name, row in (defaults | rows).items():
        options = {"format": "e4m3" if name == "fwd" else "e5m2", "scales": scales}
        by, other = Float8(*row.by.chosen(axes[name]), **options), Float8(All(), -1, **options)
        eight_bits = name == "fwd" and scales == "tensor"
        found[name] = dataclasses.replace(row, by=by, other=other, eight_bits=eight_bits)
    return found
