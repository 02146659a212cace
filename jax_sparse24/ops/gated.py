"""Gated activations, `act(gate) * up`, and their gradients."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch import hardware
from jax_sparse24.dispatch.operation import Kernel, Operation, Reverse
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.mvue import key_words, mvue_pack24
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.reference import gated as reference


def gated(
    gate: jax.typing.ArrayLike,
    up: jax.typing.ArrayLike,
    activation: Literal["silu", "gelu"] = "silu",
    *,
    transposed: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """`act(gate) * up`: the elementwise part of SwiGLU and GEGLU, in float32, rounded once.

    Differentiable in both operands.

    gate, up: two arrays of one shape, (..., T, f); float32, bfloat16 or float16.
    activation: "silu", or "gelu", its approximation by tanh.
    transposed: whether gate and up are (..., f, T), as a product that writes column-major leaves them; they
        are read so, without a pass that transposes.
    implementation: as in `mask24`. Kernels are CUDA's; None takes XLA's fusion unless they were measured to
        be faster.

    Returns: (..., T, f) in the promoted dtype.
    Raises: TypeError (dtype), ValueError (shapes, activation, implementation), RuntimeError (a named
        implementation that cannot run).
    Source: 2002.05202; 2404.01847, section 5.2, for the transposed operands."""
    gate, up = patterns.as_array("gated", "gate", gate), patterns.as_array("gated", "up", up)
    if gate.shape != up.shape:
        raise ValueError(f"gated: gate has shape {gate.shape}, up has shape {up.shape}; they must be equal.")
    if activation not in reference.GATES:
        raise ValueError(
            f"gated: activation {activation!r} is unknown; use one of {', '.join(reference.GATES)}."
        )
    if transposed and gate.ndim < 2:
        raise ValueError(f"gated: transposed operands are (..., f, T), got shape {gate.shape}.")
    dtype = jnp.promote_types(gate.dtype, up.dtype)
    options = {"activation": activation, "transposed": bool(transposed)}
    return GATED(gate.astype(dtype), up.astype(dtype), **options, implementation=implementation)


def _rows(x, transposed: bool):
    return jnp.swapaxes(x, -1, -2) if transposed else x


def _shape(x, transposed: bool) -> jax.ShapeDtypeStruct:
    """The type of a result (..., T, f), from that of gate or up."""
    return jax.eval_shape(lambda x: _rows(x, transposed), x)


def _faster(dtype, *, operation: str, transposed=False, dz_transposed=False, **_) -> bool:
    """Whether a kernel was measured to be faster than XLA; `operation` is its name in `hardware`."""
    return hardware.faster(operation, dtype, transposed or dz_transposed)


def _packing_faster(dtype, *, exact: bool, **options) -> bool:
    estimates = "exact" if exact else "approximate"
    return _faster(dtype, operation=f"gated_backward_pack {estimates}", **options)


def _flags(activation: str, **others) -> dict[str, bool]:
    return {"gelu": activation == "gelu", **others}


CUDA_ONLY = {"cpu": "no CPU kernel, XLA fuses it there"}


def _backward(saved, dz, *, activation, transposed, implementation):
    flags = {"transposed": transposed, "implementation": implementation}
    gradients = gated_backward(*saved, dz, activation, **flags)
    return tuple(_rows(d, transposed) for d in gradients)


GATED = Operation(
    "gated",
    lambda gate, up, activation, transposed: _rows(reference.gated(gate, up, activation), transposed),
    kernel=Kernel("s24_gated", lambda gate, up, transposed, **_: _shape(gate, transposed), _flags),
    measured=partial(_faster, operation="gated"),
    missing=CUDA_ONLY,
    vjp=Reverse(lambda operands, results, **_: operands, _backward),
)


def gated_backward(
    gate,
    up,
    dz,
    activation: str,
    *,
    transposed: bool = False,
    dz_transposed: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the operands of `gated`.

    gate, up: as in `gated`, in one dtype.
    dz: (..., T, f), the gradient of its result, in that dtype.
    activation, transposed, implementation: as in `gated`.
    dz_transposed: whether `dz` is (..., f, T).

    Returns: dgate and dup, (..., T, f) each, in that dtype.
    Raises: as `gated` for an implementation."""
    options = {"activation": activation, "transposed": transposed, "dz_transposed": dz_transposed}
    return GATED_BACKWARD(gate, up, dz, **options, implementation=implementation)


def _backward_reference(gate, up, dz, activation, transposed, dz_transposed):
    operands = _rows(gate, transposed), _rows(up, transposed), _rows(dz, dz_transposed)
    return reference.gated_backward(*operands, activation)


GATED_BACKWARD = Operation(
    "gated",
    _backward_reference,
    kernel=Kernel(
        "s24_gated_backward", lambda gate, *_, transposed, **__: (_shape(gate, transposed),) * 2, _flags
    ),
    measured=partial(_faster, operation="gated_backward"),
    missing=CUDA_ONLY,
)


def gated_backward_pack(
    gate,
    up,
    dz,
    keys,
    activation: str,
    exact: bool = True,
    *,
    transposed: bool = False,
    dz_transposed: bool = False,
    compressed: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, Packed24 | Compressed24, Packed24 | Compressed24]:
    """`gated_backward` of matrices, and `mvue_pack24(key, d, -2, exact)` of both results, in one pass.

    gate, up: as in `gated_backward`, (T, f), or (f, T) if `transposed`; T is a multiple of 4.
    dz: (T, f), or (f, T) if `dz_transposed`.
    keys: two PRNG keys, of the estimate of dgate and of that of dup.
    activation, transposed, dz_transposed, implementation: as in `gated_backward`.
    exact: as in `mvue24`.
    compressed: whether the estimates are `Compressed24`, as cuSPARSELt reads them; by "ffi" only.

    Returns: dgate and dup, (T, f) each, and the estimate of each, packed along axis -2.
    Raises: as `mvue24`, T being the grouped axis."""
    words = [key_words("mvue24", key) for key in keys]
    patterns.check_grouped("mvue24", gate, -1 if transposed else -2)
    options = {
        "activation": activation,
        "exact": bool(exact),
        "transposed": transposed,
        "dz_transposed": dz_transposed,
        "compressed": compressed,
    }
    return GATED_BACKWARD_PACK(*words, gate, up, dz, **options, implementation=implementation)


def _types_in_one_pass(gate_words, up_words, gate, up, dz, *, transposed, compressed, **_):
    dense = _shape(gate, transposed)
    packed = (Compressed24 if compressed else Packed24).types(dense, -2)
    return dense, dense, *packed, *packed


def _in_one_pass(*operands, compressed, **options):
    dgate_Tf, dup_Tf, *parts = BACKWARD_PACK_KERNEL(*operands, compressed=compressed, **options)
    form = Compressed24 if compressed else Packed24
    return dgate_Tf, dup_Tf, form(*parts[:2], -2), form(*parts[2:], -2)


def _in_steps(gate_words, up_words, *operands, activation, exact, compressed, implementation, **order):
    dense = gated_backward(*operands, activation, **order, implementation=implementation)
    packed = (
        mvue_pack24(words, d_Tf, -2, exact, implementation=implementation)
        for words, d_Tf in zip((gate_words, up_words), dense, strict=True)
    )
    return *dense, *packed


BACKWARD_PACK_KERNEL = Kernel(
    "s24_gated_backward_pack", _types_in_one_pass, lambda compressed, **options: _flags(**options)
)
GATED_BACKWARD_PACK = Operation(
    "gated",
    composed=_in_steps,
    kernel=_in_one_pass,
    measured=_packing_faster,
    missing=CUDA_ONLY,
)
