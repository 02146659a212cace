"""The gradient of the input of an activation, and its estimate along tokens, in one pass."""

from typing import Literal

import jax

from jax_sparse24 import patterns
from jax_sparse24.dispatch import hardware
from jax_sparse24.dispatch.operation import Kernel, Operation
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.mvue import key_words, mvue_pack24
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.packed_vnm import MOST_TILES
from jax_sparse24.ops.reference.slope import activation_gradient
from jax_sparse24.ops.saved import TILE, in_tiles


def slope_mvue_pack24(
    key,
    saved_Tf: jax.Array,
    dy2_Tf: jax.Array,
    activation: Literal["relu", "squared_relu"],
    exact: bool = True,
    *,
    compressed: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, Packed24 | Compressed24]:
    """dY1 of what an activation saved and of dY2, see `reference.slope.activation_gradient`, and
    `mvue_pack24(key, dY1, -2, exact)`.

    On CUDA it takes one pass for whole tiles of 16-bit floats. It is not differentiable.

    key: as in `mvue24`.
    saved_Tf: (T, f), T a multiple of 4: the result of the activation where `gives_input`, else its input.
    dy2_Tf: the gradient of the result, in the shape and dtype of `saved_Tf`.
    activation: its name.
    exact: as in `mvue24`.
    compressed: whether the estimate is to be a `Compressed24`, on CUDA only.
    implementation: as in `mask24`. None takes XLA's fusion and `mvue_pack24` unless the one pass was measured
        to be faster.

    Returns: dY1 (T, f), and its estimate, packed along axis -2.
    Raises: as `mvue24`."""
    words = key_words("mvue24", key)
    patterns.check_grouped("mvue24", dy2_Tf, -2)
    options = {"activation": activation, "exact": bool(exact), "compressed": compressed}
    return SLOPE_MVUE_PACK(words, saved_Tf, dy2_Tf, **options, implementation=implementation)


def _types(words, saved_Tf, dy2_Tf, *, compressed, **_):
    form = Compressed24 if compressed else Packed24
    return jax.ShapeDtypeStruct(dy2_Tf.shape, dy2_Tf.dtype), *form.types(dy2_Tf, -2)


def _in_one_pass(words, saved_Tf, dy2_Tf, *, compressed, **options):
    dy1_Tf, *parts = KERNEL(words, saved_Tf, dy2_Tf, compressed=compressed, **options)
    return dy1_Tf, (Compressed24 if compressed else Packed24)(*parts, -2)


def _in_steps(words, saved_Tf, dy2_Tf, *, activation, exact, compressed, implementation):
    dy1_Tf = activation_gradient(saved_Tf, dy2_Tf, activation)
    if compressed:
        return dy1_Tf, compressed24.mvue_pack(words, dy1_Tf, -2, exact)
    return dy1_Tf, mvue_pack24(words, dy1_Tf, -2, exact, implementation=implementation)


def _fits(_, words, saved_Tf, *__, **___) -> bool:
    return in_tiles(saved_Tf) and saved_Tf.shape[0] <= MOST_TILES * TILE


def _faster(dtype, *, exact: bool, **_) -> bool:
    """Whether the pass was measured to be faster than XLA's fusion and the packing after it."""
    return hardware.faster(f"slope_mvue {'exact' if exact else 'approximate'}", dtype)


KERNEL = Kernel(
    "s24_slope_mvue", _types, lambda activation, exact, **_: {"relu": activation == "relu", "exact": exact}
)
SLOPE_MVUE_PACK = Operation("slope_mvue", composed=_in_steps, cuda=_in_one_pass, fits=_fits, measured=_faster)
