"""Products of operands that are rounded to 8-bit floats.

Products of e4m3 operands that contract no tokens run in 8 bits on Hopper: by cuSPARSELt where it is chosen
for a packed operand, else by XLA. All others are simulated: operands are rounded as the casts round them and
multiplied in their own dtype, which shows what FP8 does to training and adds no speed."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_sparse24.engine.operand import Request, Sparsifier
from jax_sparse24.engine.pieces import Axes
from jax_sparse24.engine.plan import LINEAR, WEIGHT_GRADIENTS, Row
from jax_sparse24.engine.sparsifiers import DenseValues
from jax_sparse24.ops.packed24 import Packed24

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
Format = Literal["e4m3", "e5m2"]
Scales = Literal["tensor", "row", "delayed"]
LEAST = 2.0**-100  # the scale of a smaller largest magnitude would overflow
# Entries of a weight's state: what was observed of the operands by which its products multiply it.
HISTORIES = {"fwd": "tops_x", "dgrad": "tops_dy"}
HISTORY_AXES = MappingProxyType(dict.fromkeys(HISTORIES.values(), (None,)))  # see `Method.state_axes`
EXPONENTS = 256  # of float32
REMEMBERED = 16  # steps
# By how many powers of two an operand may fall below what is remembered and still scale by that. From scaled
# magnitudes to what rounds to zero e4m3 has 17; up to 8 an FFN of normal operands loses nothing that shows in
# its error, which at 12 is 1.7 times as large.
FALL = 8


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
    scales: one scale per "tensor", or one per "row", the elements that one element of the result sums up; or
        "delayed", one power of two per tensor, by what `history` has seen, as `delayed_scale` says.
    history: for delayed scales, the entry of the weight's state."""

    format: Format = "e4m3"
    scales: Scales = "tensor"
    history: str = ""
    multiplied: ClassVar = "simulated by XLA's dense product"

    def piecewise(self, shape, axis):
        return False  # a scale is of all pieces

    def _scaled(self, values, axis, shards, state) -> tuple[jax.Array, jax.Array]:
        """The values times the scale, rounded to the format, and the scale, float32.

        axis: that along which one result sums up.
        shards: the mesh axes that cut what has one scale.
        state: of the weight."""
        top = _largest(values, axis if self.scales == "row" else None)
        top = jax.lax.pmax(top, shards) if shards else top
        if self.history:
            scale = delayed_scale(state[self.history], top, self.format)
        else:
            scale = self._most / jnp.where(top > 0, jnp.maximum(top, LEAST), 1)
        return self._rounded(values, scale), scale

    @property
    def _most(self) -> float:
        return float(jnp.finfo(FORMATS[self.format]).max)

    def _rounded(self, values, scale) -> jax.Array:
        scaled = values.astype(jnp.float32) * scale
        if self.history:  # what is larger than all that was seen saturates; Inf becomes NaN, as everywhere
            scaled = jnp.where(jnp.isinf(scaled), scaled, jnp.clip(scaled, -self._most, self._most))
        return scaled.astype(FORMATS[self.format])

    def _shards(self, axis, request: Request) -> Axes:
        """The mesh axes that cut what has one scale."""
        return request.cuts[axis] if self.scales == "row" else request.cuts[0] + request.cuts[1]

    def __call__(self, x, axis, request: Request):
        values = super().__call__(x, axis, request)
        rounded, scale = self._scaled(values, axis, self._shards(axis, request), request.state)
        # Without the barrier XLA may drop a cast to 8 bits and back (xla_allow_excess_precision).
        rounded = jax.lax.optimization_barrier(rounded)
        return (rounded.astype(jnp.float32) / scale).astype(values.dtype)

    def quantised(self, x, axis, request: Request) -> tuple[Packed24 | jax.Array, jax.Array]:
        """The operand in the 8-bit format, times its scales.

        x, axis, request: as a sparsifier takes them.

        Returns: the operand, packed if the request says so, and its scales, float32: (1, 1), or (n, 1) for n
            rows along the axis that is not contracted."""
        shards = self._shards(axis, request)
        if request.packed:
            operand = self.of(x, axis, request)
            values, scale = self._scaled(operand.values, -1, shards, request.state)
            return dataclasses.replace(operand, values=values), scale
        operand = super().__call__(x, axis, request)
        rounded, scale = self._scaled(operand, axis, shards, request.state)
        if axis == -1:
            return rounded, scale
        # Without the barrier XLA would round a weight once for two products, in the layout of one of them.
        operand, scale = jax.lax.optimization_barrier((operand, scale))
        return self._rounded(operand, scale), scale.T

    def __str__(self):
        values = "" if self.of == All() else f"{super().__str__()}, "
        scale = "a scale by earlier steps" if self.history else f"a scale per {self.scales}"
        return f"{values}{self.format}, {scale}"


def seen(x: jax.Array) -> jax.Array:
    """What a history observes of an operand in a step: the exponent of its largest magnitude.

    It is a count, so that sums and means of it, over shards, micro-batches or calls, lose nothing.

    x: a matrix.

    Returns: float32 (256,), 1 at the exponent as float32 stores it, else 0: at 0 for an operand of zeros, at
        255 for one with NaN or Inf."""
    exponent = _exponent(_largest(x)[0, 0])  # the same maximum as in `delayed_scale`, for XLA to compute once
    return (jnp.arange(EXPONENTS) == exponent).astype(jnp.float32)


def remembered(history: jax.Array, observed: jax.Array) -> jax.Array:
    """A history after one more step.

    history: (..., 256), for how many steps each exponent is remembered yet.
    observed: (..., 256), sums or means of `seen`; zeros where no product ran, as in a dense phase, which
        leaves the history as it is.

    Returns: like `history`."""
    at = jnp.arange(EXPONENTS)
    numbers = (at > 0) & (at < EXPONENTS - 1)  # neither zeros nor NaN and Inf
    aged = jnp.where((observed > 0) & numbers, REMEMBERED, jnp.maximum(history - 1, 0))
    ran = jnp.any(observed > 0, axis=-1, keepdims=True)
    return jnp.where(ran, aged, history).astype(history.dtype)


def delayed_scale(history: jax.Array, top: jax.Array, format: Format) -> jax.Array:
    """The power of two that takes the largest exponent remembered to the largest that leaves a factor of 2.

    So the largest magnitude may grow by a factor of 1.75, at least, before it saturates. Where its exponent
    is smaller than those remembered by more than 8, as after a step of outliers, the history says nothing
    of this operand, which would round to zeros: then its own magnitude counts, as in a first step.

    history: float32 (256,), see `remembered`.
    top: float32, the largest magnitude of the operand.
    format: of the rounded operand.

    Returns: float32 of top's shape."""
    at = jnp.arange(EXPONENTS, dtype=jnp.int32)
    known, own = jnp.max(jnp.where(history > 0, at, 0)), _exponent(top)
    exponent = jnp.where((known > 0) & (known - own <= FALL), known, own)
    _, most = math.frexp(float(jnp.finfo(FORMATS[format]).max))
    return _power_of_two(jnp.minimum(most - 2 + 127 - exponent, 126))


def _largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The largest magnitude of a matrix, or of what lies along an axis, float32, with two axes."""
    return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, keepdims=True, initial=0)


def _exponent(x: jax.Array) -> jax.Array:
    """The exponent of numbers that are not negative, as float32 stores it, int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32) >> 23


def histories(scales: Scales | None, lead: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the histories in the state of a weight; they begin with zeros.

    scales: see `Float8`.
    lead: the leading axes of the weight, of stacked layers.

    Returns: a `jax.ShapeDtypeStruct` for every entry, by name; {} unless scales are delayed."""
    like = jax.ShapeDtypeStruct((*lead, EXPONENTS), jnp.float32)
    return dict.fromkeys(HISTORIES.values(), like) if scales == "delayed" else {}


def unscaled(out: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """A product over the scales of its operands, without an overflow on the way.

    Division by one scale and then by the other is no such way: XLA may divide by their product, which
    overflows for two small operands, and the first quotient overflows where one operand is large and the
    other one small. So the powers of two of both are added up, and each half of the sum is a number.

    out: (R, N), the product of the scaled operands.
    first, second: float32, their scales, of shapes that are broadcast against `out`.

    Returns: (R, N), float32."""
    (a, a_power), (b, b_power) = jnp.frexp(first), jnp.frexp(second)
    power = -(a_power + b_power)
    half = power >> 1
    return out.astype(jnp.float32) / (a * b) * _power_of_two(half) * _power_of_two(power - half)


def _power_of_two(n: jax.Array) -> jax.Array:
    """2^n, float32. n: int32, from -126 to 127."""
    return jax.lax.bitcast_convert_type((n + 127) << 23, jnp.float32)


def in_float8(rows: Mapping[str, Row], scales: Scales, formats: Mapping[str, Format]) -> dict[str, Row]:
    """The rows of a linear plan with both operands of some products in 8 bits.

    rows: of the plan without rounding, by product.
    scales: see `Float8`; delayed ones are those of activations and gradients, and weights have one by their
        current values.
    formats: of both operands, for every product that is in 8 bits.

    Returns: the rows, and those of all products of `formats`.
    Source: the code of 2409.09099."""
    found = dict(rows)
    for name, format in formats.items():
        operand = "dy" if name in WEIGHT_GRADIENTS else "w"
        row = rows.get(name, Row(operand, All()))
        axis = dict(LINEAR[name])[row.operand]  # the contracted one
        of, along = row.by.chosen(axis)
        options = {"format": format, "scales": "tensor" if scales == "delayed" else scales}
        behind = {"scales": scales, "history": HISTORIES[name]} if scales == "delayed" else {}
        forms = tuple(form for form in of.forms if form != "compressed" and along == axis) or ("dense",)
        hardware = format == "e4m3" and name not in WEIGHT_GRADIENTS
        found[name] = dataclasses.replace(
            row,
            by=Float8(of, along, **options),
            other=Float8(All(), -1, **(options | behind)),
            eight_bits=forms if hardware else (),
        )
    return found
