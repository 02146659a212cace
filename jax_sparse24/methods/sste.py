"""S-STE: continuous pruning by a soft threshold (2409.09099)."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jax_sparse24.engine.float8 import HISTORY_AXES, Format, Scales, histories, in_float8
from jax_sparse24.engine.plan import LINEAR, Plan, Row
from jax_sparse24.engine.sparsifiers import DenseValues, Estimator, Soft, weight_gradient
from jax_sparse24.engine.tiles import total
from jax_sparse24.methods.base import Method, begun, check_choice, check_field, scale_like, where_finite
from jax_sparse24.ops.select import mask24
from jax_sparse24.ops.soft import soft24


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSTE(Method):
    """Soft-thresholded 2:4 weights along `in`, times a scale; trained sparse to the end and evaluated sparse.

    The dense master weight gets the gradient of the scaled sparse one, without the scale. The input gradient
    is a dense product of the same values. Products of e4m3 run in 8 bits on Hopper: forward 2:4 where
    cuSPARSELt is chosen for them (`implementation="cusparselt"`, or a measured table), else dense, as the
    input gradient. No library multiplies e5m2 with itself: such products are simulated, which adds no speed.

    scale: "frozen", `<W, S(W)> / |S(W)|^2` of the initial weight (the paper's); "dynamic", the same of the
        current weight in every step; "unit", 1.
    mvue: estimator of the output gradient along tokens, in the product of the weight gradient: "exact", which
        is less noisy and faster; "approximate", that of the paper's code; or None for a dense product.
    fp8: None, or both operands of products are rounded to 8-bit floats, forward to e4m3: with a scale per
        "tensor", as in the paper's code, or per "row" (of what one result sums up: of a token's features, or
        of a column of the weight). With a scale per tensor a token's rounding depends on later tokens, so
        that the loss of the sparse model is no language model's loss. "delayed", which needs
        fp8_backward="e4m3": by earlier steps, as in `FST`; `causal` is False for both.
    fp8_backward: with `fp8`, "e5m2" for the operands of both backward products, after the estimate, as in the
        paper's code; or "e4m3" for those of the input gradient alone, as in `FST`.

    Raises: ValueError for an option outside these.
    Source: 2409.09099."""

    when = "Pre-training a model that stays 2:4 for inference, without a decay to tune."
    tiles = (4, 1)
    state_axes = HISTORY_AXES
    positive = ("scale",)

    scale: Literal["frozen", "dynamic", "unit"] = "frozen"
    mvue: Estimator | None = "exact"
    fp8: Scales | None = None
    fp8_backward: Format = "e5m2"

    def __post_init__(self):
        check_choice(self, "scale", "frozen", "dynamic", "unit")
        check_choice(self, "mvue", "exact", "approximate", None)
        check_choice(self, "fp8", "tensor", "row", "delayed", None)
        check_choice(self, "fp8_backward", "e5m2", "e4m3")
        asked = self.fp8 is not None or self.fp8_backward == "e5m2"
        check_field(self, "fp8_backward", asked, 'needs fp8="tensor" or "row"')
        alike = self.fp8 != "delayed" or self.fp8_backward == "e4m3"
        check_field(self, "fp8", alike, 'needs fp8_backward="e4m3"')

    @property
    def causal(self):
        # A scale per tensor depends on all tokens, and rounds each of them; a delayed one does so in a first
        # step and after outliers, of which an evaluation may be one, too.
        return self.fp8 in (None, "row")

    @property
    def refresh_every(self) -> int:
        return 1 if self.scale == "dynamic" else 0

    def linear_plan(self):
        soft = Soft()
        rows = {"fwd": Row("w", soft), "dgrad": Row("w", DenseValues(soft, axis=-2))}
        rows |= weight_gradient(self.mvue)
        if self.fp8:
            rounded = ("dgrad", "wgrad") if self.fp8_backward == "e5m2" else ("dgrad",)
            formats = {"fwd": "e4m3", **dict.fromkeys(rounded, self.fp8_backward)}
            rows = in_float8(rows, self.fp8, formats)
        return Plan.of(LINEAR, **rows)

    def init(self, w, role="w"):
        return self._scale(w) | begun(self._histories(w.shape))

    def _scale(self, w):
        return {"scale": soft_scale(w, -2) if self.scale != "unit" else jnp.ones(w.shape[:-2], jnp.float32)}

    def state_shapes(self, shape, role="w"):
        return {"scale": scale_like(shape)} | self._histories(shape)

    @property
    def histories(self):
        return tuple(self._histories(()))

    def _histories(self, shape):
        return histories(self.fp8, shape[:-2]) if self.fp8 else {}

    def refresh(self, state, w, role="w"):
        return state | where_finite(w, self._scale(w), state)

    def fresh_mask(self, w):
        return mask24(w, -2)


def soft_scale(w, axis: int):
    """The factor by which soft-thresholded weights come nearest to the weights; 1 where all are zero.

    w: (..., in, out).
    axis: along which the soft threshold forms groups, -1 or -2.

    Returns: float32 (...).
    Source: 2409.09099, section 5."""
    soft = soft24(w, axis).astype(jnp.float32)
    energy = total(jnp.sum(soft * soft, axis=(-2, -1)))
    along = total(jnp.sum(w.astype(jnp.float32) * soft, axis=(-2, -1)))
    return jnp.where(energy > 0, along / jnp.where(energy > 0, energy, 1), 1.0)
