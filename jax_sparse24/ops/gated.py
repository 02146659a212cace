"""Gated activations, `act(gate) * up`, and their gradients."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jax_sparse24 import patterns
from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.decision import decide, run
from jax_sparse24.ops.compressed24 import Compressed24, compressed_types
from jax_sparse24.ops.mvue import key_words, mvue_pack24
from jax_sparse24.ops.packed24 import Packed24, packed_types
from jax_sparse24.ops.reference import gated as reference

PACKING = {True: "gated_backward_pack exact", False: "gated_backward_pack approximate"}  # by `exact`
OPERATIONS = ("gated", "gated_backward", *PACKING.values())


def gated(
    gate,
    up,
    activation: Literal["silu", "gelu"] = "silu",
    *,
    transposed: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """`act(gate) * up`: the elementwise part of SwiGLU and GEGLU (2002.05202), in float32, rounded once.

    gate, up: arrays of one shape, (..., T, f); float32, bfloat16, float16. activation: "silu", or "gelu", its
    approximation by tanh. transposed: gate and up are (..., f, T), as a product that writes column-major
    leaves them (2404.01847, section 5.2), and are read so, without a pass that transposes. Returns
    (..., T, f) in the promoted dtype. Differentiable in both. The kernels are CUDA's; `implementation=None`
    takes XLA's fusion unless they were measured to be faster. Raises TypeError (dtype), ValueError (shapes,
    activation, implementation), RuntimeError (a named implementation that cannot run)."""
    gate, up = patterns.as_array("gated", "gate", gate), patterns.as_array("gated", "up", up)
    if gate.shape != up.shape:
        raise ValueError(f"gated: gate has shape {gate.shape}, up has shape {up.shape}; they must be equal.")
    if activation not in reference.GATES:
        raise ValueError(
            f"gated: activation {activation!r} is unknown; use one of {', '.join(reference.GATES)}."
        )
    if transposed and gate.ndim < 2:
        raise ValueError(f"gated: transposed operands are (..., f, T), got shape {gate.shape}.")
    decide("gated", jnp.promote_types(gate.dtype, up.dtype), implementation)
    dtype = jnp.promote_types(gate.dtype, up.dtype)
    return _gated(gate.astype(dtype), up.astype(dtype), activation, bool(transposed), implementation)


def _run(operation, transposed, implementation, kernel, fallback, *args):
    """As `run`; None takes the kernel only where it was measured to be faster than XLA."""
    dtype = args[-1].dtype
    decision = decide(operation, dtype, implementation, alternative="fused", transposed=transposed)
    if decision.runs == "reference":
        return fallback(*args)
    return run("gated", dtype, implementation, kernel, fallback, *args)


def _rows(x, transposed: bool):
    return jnp.swapaxes(x, -1, -2) if transposed else x


def _flags(activation: str, transposed: bool) -> dict[str, bool]:
    return {"gelu": activation == "gelu", "transposed": transposed}


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
@partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _gated(gate, up, activation, transposed, implementation):
    def kernel(gate, up):
        out = jax.eval_shape(lambda x: _rows(x, transposed), gate)
        return native.call("s24_gated", out, gate, up, **_flags(activation, transposed))

    def fallback(gate, up):
        return _rows(reference.gated(gate, up, activation), transposed)

    return _run("gated", transposed, implementation, kernel, fallback, gate, up)


def _fwd(gate, up, *static):
    return _gated(gate, up, *static), (gate, up)


def _bwd(activation, transposed, implementation, residuals, dz):
    flags = {"transposed": transposed, "implementation": implementation}
    gradients = gated_backward(*residuals, dz, activation, **flags)
    return tuple(_rows(d, transposed) for d in gradients)


_gated.defvjp(_fwd, _bwd)


@partial(
    jax.jit, static_argnames=("activation", "transposed", "dz_transposed", "implementation"), inline=True
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
    """(dgate, dup), (..., T, f), of `gated`. dz: (..., T, f), or (..., f, T) if dz_transposed; in the dtype
    of gate and up."""

    def kernel(gate, up, dz):
        out = jax.eval_shape(lambda x: _rows(x, transposed), gate)
        flags = _flags(activation, transposed) | {"dz_transposed": dz_transposed}
        return tuple(native.call("s24_gated_backward", (out, out), gate, up, dz, **flags))

    def fallback(gate, up, dz):
        operands = _rows(gate, transposed), _rows(up, transposed), _rows(dz, dz_transposed)
        return reference.gated_backward(*operands, activation)

    either = transposed or dz_transposed
    return _run("gated_backward", either, implementation, kernel, fallback, gate, up, dz)


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

    keys: of the estimates of dgate and of dup. compressed: these as cuSPARSELt reads them; by "ffi" only.
    Raises like `mvue24`, T being the grouped axis."""
    words = [key_words("mvue24", key) for key in keys]
    patterns.check_grouped("mvue24", gate, -1 if transposed else -2)
    flags = (transposed, dz_transposed, compressed)
    return _backward_pack(*words, gate, up, dz, activation, bool(exact), *flags, implementation)


@partial(jax.jit, static_argnums=(5, 6, 7, 8, 9, 10), inline=True)
def _backward_pack(
    gate_words,
    up_words,
    gate,
    up,
    dz,
    activation,
    exact,
    transposed,
    dz_transposed,
    compressed,
    implementation,
):
    def kernel(*operands):
        dense = jax.eval_shape(lambda x: _rows(x, transposed), gate)
        form, types = (Compressed24, compressed_types) if compressed else (Packed24, packed_types)
        packed = types(dense, -2)
        flags = _flags(activation, transposed) | {"dz_transposed": dz_transposed, "exact": exact}
        dgate, dup, *parts = native.call(
            "s24_gated_backward_pack", (dense, dense, *packed, *packed), *operands, **flags
        )
        return dgate, dup, form(*parts[:2], -2), form(*parts[2:], -2)

    def fallback(gate_words, up_words, *operands):
        flags = {"transposed": transposed, "dz_transposed": dz_transposed, "implementation": implementation}
        dense = gated_backward(*operands, activation, **flags)
        packed = (
            mvue_pack24(words, d, -2, exact, implementation=implementation)
            for words, d in zip((gate_words, up_words), dense, strict=True)
        )
        return *dense, *packed

    either = transposed or dz_transposed
    args = gate_words, up_words, gate, up, dz
    return _run(PACKING[exact], either, implementation, kernel, fallback, *args)
