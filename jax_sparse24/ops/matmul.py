"""Products of which one operand may be packed."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch import cusparselt, hopper, shards
from jax_sparse24.dispatch.decision import Decision, decide, dense_float8_obstacle
from jax_sparse24.dispatch.operation import Kernel, Operation, Reverse
from jax_sparse24.dispatch.product import Product
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.order import collect, regroup
from jax_sparse24.ops.packed24 import Packed24, check_packed, gather24
from jax_sparse24.ops.packed_vnm import PackedVNM, check_packed_vnm, gather_vnm
from jax_sparse24.ops.reference import matmul as reference
from jax_sparse24.ops.reference.packed24 import unpack24
from jax_sparse24.ops.reference.packed_vnm import unpack_vnm
from jax_sparse24.patterns import FLOAT8

PACKED = Packed24, PackedVNM, Compressed24
EPILOGUES = {"relu": jax.nn.relu, "gelu": jax.nn.gelu}


def gather(x, packed: Packed24 | PackedVNM | Compressed24, implementation: str | None = None) -> jax.Array:
    """The values of an array at the positions of a packed one: the transpose of `todense`.

    x: an array of the shape that `packed` stands for.
    packed: gives the positions; its values are not read.
    implementation: as in `mask24`.

    Returns: an array of x's dtype and of the shape of `packed.values`."""
    if isinstance(packed, PackedVNM):
        return gather_vnm(x, packed, implementation=implementation)
    return gather24(x, packed.metadata, packed.axis, implementation)


def with_values(packed: Packed24 | PackedVNM | Compressed24, values: jax.Array):
    """A packed array with other values at the same positions.

    packed: gives format and positions.
    values: an array of the shape of `packed.values`.

    Returns: an array packed as `packed` is."""
    if isinstance(packed, Compressed24):
        return packed.with_values(values)
    return dataclasses.replace(packed, values=values)


def matmul(
    a: jax.typing.ArrayLike | Packed24 | PackedVNM | Compressed24,
    b: jax.typing.ArrayLike | Packed24 | PackedVNM | Compressed24,
    *,
    bias: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
    implementation: str | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`activation(a @ b + bias)` for matrices, either of which may be `Packed24` or `PackedVNM` along the
    contraction axis.

    Differentiable in both operands, in packed values and in the bias, except for float8_e4m3fn; those
    gradients are dense products (training with sparse backward products is `sparse_dot`). An Inf or NaN of
    the dense operand that meets an element which is not kept is multiplied by zero where the product runs
    dense, so that the result is NaN, as in `x @ w`, and in bfloat16 on a CPU with AMX; other packed kernels
    skip it. cuSPARSELt 0.10.0 has NaN where a sum is -Inf.

    a: (..., R, K), an array or packed along axis -1; float32, bfloat16, float16 or float8_e4m3fn.
    b: (..., K, N), an array, or packed along axis -2 if `a` is not packed; with the leading dimensions of
        `a`, unless one of the two has none. Its dtype may be another one, but float8_e4m3fn is multiplied
        with itself only. cuSPARSELt wants 8-bit operands contiguous along K: another dense one is transposed
        first, which costs a copy.
    bias: one number for each element of the free axis of the packed operand, or of `b`; or None.
    activation: None, "relu" or "gelu" (by tanh). cuSPARSELt applies bias and activation to the float32 sum
        where it can, and our kernel for Hopper a bias; elsewhere they follow on the rounded product, so that
        results may differ by a rounding.
    implementation: as in `mask24`. On Hopper "ffi" multiplies 2:4 matrices of 16-bit floats by a kernel of
        its own where K is a multiple of 128, the free axis of the packed operand of 64 and the other one of
        8, from a copy of the packed operand.
    preferred_element_type: the dtype of the result; None for the promoted dtype of the operands, which of
        float8_e4m3fn is bfloat16. Sums are float32; those of float8_e4m3fn by cuSPARSELt have about 14 bits.

    Returns: (..., R, N) in that dtype.
    Raises: TypeError (dtype, both packed), ValueError (shapes, axis of the packing, activation,
        implementation; a packed operand and one that is cut over an explicit mesh axis), RuntimeError (a
        named implementation that cannot run)."""
    if activation is not None and activation not in EPILOGUES:
        raise ValueError(
            f"matmul: activation {activation!r} is unknown; use None or one of {', '.join(EPILOGUES)}."
        )
    for name, operand, side in (("a", a, -1), ("b", b, -2)):
        if isinstance(operand, PACKED) and operand.axis != side:
            pack = "pack24" if isinstance(operand, Packed24) else "pack_vnm"
            size = "" if pack == "pack24" else f"{operand.v}, {operand.m}, "
            raise ValueError(
                f"matmul: {name} of shape {operand.shape} is packed along axis {operand.axis}, but "
                f"the product contracts axis {side}. Pack it with {pack}({name}, {size}axis={side})."
            )
    if isinstance(a, PACKED) and isinstance(b, PACKED):
        raise TypeError(
            "matmul: both operands are packed; sparse hardware takes one. Call todense() on either."
        )
    a, b = _operand("a", a), _operand("b", b)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul: shapes {a.shape} and {b.shape} do not multiply; need (..., R, K) and (..., K, N)."
        )
    if a.ndim > 2 and b.ndim > 2 and a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"matmul: leading dimensions differ: {a.shape} and {b.shape}.")
    dtype = common_dtype(a, b)
    if bias is not None:
        bias = patterns.as_array("matmul", "bias", bias)
        free = a.shape[-2] if isinstance(a, PACKED) else b.shape[-1]
        if bias.shape != (free,):
            of = "a" if isinstance(a, PACKED) else "b"
            raise ValueError(
                f"matmul: bias has shape {bias.shape}; the free axis of {of} needs ({free},), a number each."
            )
    if isinstance(a, PACKED) or isinstance(b, PACKED):  # also where it will run dense, which XLA would cut
        a, b, bias = shards.whole("matmul", (a, b, bias))
    if implementation is not None:  # two dense operands are no reason to accept a name that cannot run
        decide("matmul", dtype, implementation)
    product = partial(
        contract,
        a_axis=-1,
        b_axis=-2,
        implementation=implementation,
        out_dtype=preferred_element_type,
        bias=bias,
        activation=activation,
    )
    for level in reversed(range(max(a.ndim, b.ndim) - 2)):
        product = jax.vmap(
            product, in_axes=(0 if a.ndim > 2 + level else None, 0 if b.ndim > 2 + level else None)
        )
    return product(a, b)


def _operand(name: str, x):
    if isinstance(x, PACKED):
        check = check_packed if isinstance(x, Packed24) else check_packed_vnm
        check("matmul", x)
        return x
    if getattr(x, "dtype", None) == jnp.float8_e5m2:
        raise TypeError(
            f"matmul: {name} is float8_e5m2; of 8-bit floats, {FLOAT8} is multiplied with itself only "
            f"(cuSPARSELt refuses e4m3 times e5m2, too). Cast it."
        )
    return patterns.as_array("matmul", name, x, also=(FLOAT8,))


def common_dtype(a, b) -> jnp.dtype:
    """The dtype in which two operands are multiplied.

    a, b: two arrays, packed or not.

    Returns: the promoted dtype; float8_e4m3fn if both are that.
    Raises: TypeError for a pair that is not multiplied."""
    if a.dtype == b.dtype == FLOAT8:
        return FLOAT8
    if FLOAT8 in (a.dtype, b.dtype):
        raise TypeError(
            f"matmul: a is {a.dtype}, b is {b.dtype}; {FLOAT8} is multiplied with itself only. Cast either."
        )
    dtype = jnp.promote_types(a.dtype, b.dtype)
    patterns.check_dtype("matmul", "operands", dtype)
    return dtype


def contract(
    a,
    b,
    a_axis: int,
    b_axis: int,
    implementation: str | None = None,
    out_dtype=None,
    *,
    decision: Decision | None = None,
    bias=None,
    activation: str | None = None,
    strided: bool = False,
    collected: bool = False,
) -> jax.Array:
    """The product of two matrices, summed over the named axis of each.

    If one is packed along that axis, no operand is transposed in memory, except where the kernel reads a
    dense one in the other layout only: cuSPARSELt one of 8 bits, CUDA's kernel of V:2:M one of 16 bits.

    a: (R, K), or (K, R) if a_axis is -2; an array, or packed along that axis.
    b: (K, N), or (N, K) if b_axis is -1; an array, or packed along that axis, if `a` is not.
    a_axis, b_axis: the contracted axes, -1 or -2.
    implementation: as in `matmul`.
    out_dtype: of the result; None as in `matmul`.
    decision: what multiplies, if that is decided already; else it is decided here, and an operand is unpacked
        for XLA's dense product unless measurements say that packed is as fast.
    bias: as in `matmul`.
    activation: as in `matmul`.
    strided: whether the groups of the packed operand are strided ones of the dense operand, see `regroup`:
        it is multiplied as if its rows along the contracted axis were regrouped. Kernels of V:2:M, and
        Hopper's of a `Compressed24` and (K, N), read them from where they lie; for others they are moved.
    collected: whether the rows of `a`, a PackedVNM, lie as `collect` moves them, the first ones of all groups
        of m together, then the second ones, and so on. The result has them in their first order, as `bias`
        does; kernels write them to where they belong.

    Returns: (R, N) in that dtype.
    Raises: TypeError (dtypes; strided groups of dense operands; collected rows of another `a`), ValueError
        (collected rows that m does not divide)."""
    dtype = common_dtype(a, b)
    _check_orders(a, b, a_axis, strided, collected)
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if dtype == FLOAT8 else dtype
    out_dtype = jnp.dtype(out_dtype)
    patterns.check_dtype("matmul", "the result", out_dtype)
    bias = None if bias is None else bias.astype(out_dtype)
    if isinstance(a, PACKED):
        packed, dense, dense_k_last, out_packed_last = a, b, b_axis == -1, False
    elif isinstance(b, PACKED):
        packed, dense, dense_k_last, out_packed_last = b, a, a_axis == -1, True
    else:
        axes = (((a.ndim + a_axis,), (b.ndim + b_axis,)), ((), ()))
        # XLA sums 16 bits in float32 at least, whatever the type of the result.
        multiply = partial(lax.dot_general, dimension_numbers=axes)
        if dtype == FLOAT8:
            shape = _shape(a, b, a_axis, b_axis)
            out = _whole_sums(multiply, forward_only(a), forward_only(b), shape, out_dtype)
        else:
            out = multiply(a.astype(dtype), b.astype(dtype), preferred_element_type=out_dtype)
        return _finish(out, bias, activation, -1)
    bias_axis = -1 if out_packed_last else -2
    side = "right" if out_packed_last else "left"
    shape = _shape(a, b, a_axis, b_axis)
    product = Product((a_axis, b_axis), side, dtype, shape, packed.pattern, out_dtype)
    if decision is None:
        decision = decide(product, implementation=implementation, alternative="masked")
    own = decision.runs == "ffi" and isinstance(packed, Compressed24) and not hopper.misfit(product)
    in_place = own and not dense_k_last
    if strided and not in_place and not (isinstance(packed, PackedVNM) and decision.runs != "dense"):
        dense = _in_groups(dense, packed.m if isinstance(packed, PackedVNM) else 4, dense_k_last)
    if decision.runs == "dense":
        a, b = (x.todense() if isinstance(x, PACKED) else dense for x in (a, b))
        out = contract(a, b, a_axis, b_axis, None, out_dtype)
        return _finish(collect(out, packed.m, -2) if collected else out, bias, activation, bias_axis)
    if own:
        operands = packed, dense.astype(dtype), dense_k_last, out_packed_last, bias
        out = compressed24.multiply_on_hopper(*operands, strided=strided and in_place)
        return _finish(out, None, activation, bias_axis)
    implementation, algorithm = None if decision.runs == "auto" else decision.runs, decision.algorithm
    if implementation != "cusparselt" and isinstance(packed, Compressed24):
        packed = packed.plain
    if dtype == FLOAT8:
        packed = dataclasses.replace(packed, values=forward_only(packed.values))
        dense = forward_only(dense)
        if implementation != "cusparselt":  # no kernels for it, but every number is one of bfloat16
            dtype = jnp.dtype(jnp.bfloat16)
    last = (None, None)  # what is applied to the sums
    if implementation == "cusparselt" and not isinstance(packed, PackedVNM):
        if cusparselt.Descriptor.of(product).applies(bias, activation):
            last = bias, activation
    elif implementation == "ffi" and not hopper.misfit(product):
        last = bias, None
    options = {
        "dense_k_last": dense_k_last,
        "out_packed_last": out_packed_last,
        "out_dtype": out_dtype,
        "algorithm": algorithm,
        "activation": last[1],
    }
    if isinstance(packed, Compressed24):
        out = compressed24.multiply(packed, dense, bias=last[0], **options)
    else:
        values, operands = packed.values.astype(dtype), (dense.astype(dtype), last[0])
        options["implementation"] = implementation
        if isinstance(packed, PackedVNM):
            positions = packed.metadata, packed.columns
            blocks = {"v": packed.v, "m": packed.m, "strided": strided, "collected": collected}
            out = MATMUL_VNM(values, *positions, *operands, **blocks, **options)
        else:
            out = MATMUL(values, packed.metadata, *operands, **options)
    bias = bias if last[0] is None else None
    return _finish(out, bias, None if last[1] else activation, bias_axis)


def _check_orders(a, b, a_axis: int, strided: bool, collected: bool) -> None:
    """Raises what `contract` says of strided groups and of collected rows."""
    if strided and not (isinstance(a, PACKED) or isinstance(b, PACKED)):
        raise TypeError(
            f"matmul: strided=True is for the groups of a packed operand, got {type(a).__name__} and "
            f"{type(b).__name__}. Call regroup on either operand."
        )
    if collected:
        if not isinstance(a, PackedVNM):
            raise TypeError(
                f"matmul: collected=True is for the rows of a, a PackedVNM, got {type(a).__name__} and "
                f"{type(b).__name__}. Call collect on the result."
            )
        patterns.check_divides("matmul", a.shape, -3 - a_axis, a.m, "a of collected rows")


def _in_groups(dense: jax.Array, m: int, k_last: bool) -> jax.Array:
    """A dense operand with the rows of a strided group of m side by side.

    k_last: whether the contracted axis is the last one, and rows are columns."""
    return regroup(dense.T, "strided", m).T if k_last else regroup(dense, "strided", m)


def _whole_sums(
    multiply, a: jax.Array, b: jax.Array, shape: tuple[int, int, int], out_dtype: jnp.dtype
) -> jax.Array:
    """XLA's product of two dense 8-bit operands, with sums in float32.

    By default XLA lets cuBLASLt leave sums in the registers of Hopper's tensor cores, which have about 14
    bits, and its Triton kernels do so whatever precision is asked for. The algorithm, which Triton does not
    have, forbids it: registers are added to float32 sums every few terms. Other platforms and older GPUs
    refuse it, so that it is asked for only where e4m3 was measured; so does XLA where an operand is a vector,
    whose product it multiplies in the type of the result, float32 here, and sums in float32 itself. So may
    be the few tokens of a matrix that XLA cuts over devices.

    multiply: `lax.dot_general`, but for the operands, the precision and the type of the result.
    shape: (R, K, N), the sizes of the product.
    out_dtype: of the result.

    Source: openxla/xla, `IsFastAccumEnabled` in xla/stream_executor/cuda/cuda_blas_lt.cc,
    `EmitDotAlgUnset` and `IsSupportedDotAlgorithm` in xla/backends/gpu/codegen/triton, `CreateF8CustomCall`
    of its rewriter of products for GPUs, and `RewriteBatchPlusContractingAsReduce` of its algebraic
    simplifier."""
    highest = partial(multiply, precision=lax.Precision.HIGHEST, preferred_element_type=out_dtype)
    rows, *others = shape
    if rows <= shards.left_to_xla() or 1 in others:
        sums = jnp.promote_types(out_dtype, jnp.float32)
        return highest(a, b, preferred_element_type=sums).astype(out_dtype)
    if dense_float8_obstacle() is not None:
        return highest(a, b)
    algorithm = partial(
        multiply, precision=lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32, preferred_element_type=out_dtype
    )
    return lax.platform_dependent(a, b, cuda=algorithm, default=highest)


def _finish(out, bias, activation: str | None, axis: int) -> jax.Array:
    """Adds a bias along an axis of a product and applies the activation, in the product's dtype."""
    if bias is not None:
        out = out + (bias if axis == -1 else bias[:, None])
    return out if activation is None else EPILOGUES[activation](out)


@jax.custom_vjp
def forward_only(x: jax.Array) -> jax.Array:
    """An operand of 8 bits that refuses to be differentiated: its gradient would have 8 bits, too.

    x: the operand, float8_e4m3fn.

    Returns: `x`."""
    return x


def _refuse(x):
    raise TypeError(
        f"matmul: products of {x.dtype} have no gradient. Differentiate those of bfloat16, or train with "
        f"methods.FST(fp8=...) or SSTE(fp8=...), which keep weights and their gradients in wider types."
    )


forward_only.defvjp(_refuse, lambda *_: None)


def _shape(a, b, a_axis: int, b_axis: int) -> tuple[int, int, int]:
    """The sizes (R, K, N) of a product."""
    return a.shape[-3 - a_axis], a.shape[a_axis], b.shape[-3 - b_axis]


def _sums(values, *others, dense_k_last, out_packed_last, out_dtype, **_):
    """The type of what a kernel writes: the result, or float32 sums for a dtype that it does not write."""
    rows, n = values.shape[-2], others[-1].shape[-2 if dense_k_last else -1]
    dtype = out_dtype if out_dtype in (jnp.float32, values.dtype) else jnp.float32
    return jax.ShapeDtypeStruct((n, rows) if out_packed_last else (rows, n), dtype)


def _layout(dense_k_last, out_packed_last, **_):
    return {"dense_k_last": dense_k_last, "out_packed_last": out_packed_last}


MATMUL_KERNEL = Kernel("s24_matmul", _sums, _layout)
MATMUL_VNM_KERNEL = Kernel(
    "s24_vnm_matmul",
    _sums,
    lambda v, m, strided, collected, **options: {
        **_layout(**options),
        "v": v,
        "m": m,
        "strided": strided,
        "collected": collected,
    },
)


def _kernel(values, metadata, dense, bias, *, out_dtype, out_packed_last, **options):
    options |= {"out_dtype": out_dtype, "out_packed_last": out_packed_last}
    out = MATMUL_KERNEL(values, metadata, dense, **options).astype(out_dtype)
    return _finish(out, bias, None, -1 if out_packed_last else -2)


def _fits_hopper(_, values, metadata, dense, bias, *, dense_k_last, out_dtype, **__) -> bool:
    """Whether our kernel for Hopper takes the operands."""
    if values.dtype != dense.dtype:
        return False
    axes, n = ((-1, -1), dense.shape[0]) if dense_k_last else ((-1, -2), dense.shape[1])
    shape = values.shape[0], 2 * values.shape[1], n
    return not hopper.misfit(Product(axes, "left", values.dtype, shape, out_dtype=out_dtype))


def _on_hopper(values, metadata, dense, bias, *, dense_k_last, out_packed_last, **_):
    packed = Packed24(values, metadata, -1)
    return compressed24.multiply_on_hopper(packed, dense, dense_k_last, out_packed_last, bias)


def _reference(values, metadata, dense, bias, *, dense_k_last, out_packed_last, out_dtype, **_):
    p_RK = unpack24(values, metadata, -1)
    return reference.matmul(p_RK, dense, dense_k_last, out_packed_last, out_dtype)


def _library(values, metadata, dense, bias, **options):
    return compressed24.multiply(Packed24(values, metadata, -1), dense, bias=bias, **options)


def _saves(operands, results, *, activation, **_):
    return operands, results if activation else None


def _backward(saved, ct, *, implementation, **options):
    (values, metadata, dense, bias), out = saved
    gradients = _gradients(Packed24(values, metadata, -1), dense, bias, out, ct, implementation, **options)
    return gradients[0], None, *gradients[1:]


def _gradients(
    packed, dense, bias, out, ct, implementation, *, dense_k_last, out_packed_last, activation, **_
):
    """The gradients of the packed values, of the dense operand and of the bias, by two dense products."""
    if activation == "relu":
        ct = jnp.where(out > 0, ct, jnp.zeros_like(ct))
    sums = None if bias is None else ct.sum(-2 if out_packed_last else -1, dtype=jnp.float32)
    d_bias = None if bias is None else sums.astype(bias.dtype)
    ct_RN = ct.T if out_packed_last else ct
    p_RK = packed.todense(implementation=implementation)
    d_dense_KN = contract(p_RK, ct_RN, -2, -2, out_dtype=dense.dtype)
    d_p_RK = contract(ct_RN, dense, -1, -2 if dense_k_last else -1, out_dtype=packed.dtype)
    d_values = gather(d_p_RK, packed, implementation)
    return d_values, d_dense_KN.T if dense_k_last else d_dense_KN, d_bias


# The operands are the parts of a matrix packed along its last axis, a dense one, and a bias or None. A bias
# is given where cuSPARSELt or our kernel for Hopper adds it to the sums, an activation where cuSPARSELt
# applies it.
MATMUL = Operation(
    "matmul",
    _reference,
    kernel=_kernel,
    cuda=_on_hopper,
    fits=_fits_hopper,
    library=_library,
    vjp=Reverse(_saves, _backward),
)


def _vnm_kernel(values, metadata, columns, dense, bias, *, out_dtype, dense_k_last, **options):
    def call(dense, dense_k_last=dense_k_last):
        options["dense_k_last"] = dense_k_last
        return MATMUL_VNM_KERNEL(values, metadata, columns, dense, out_dtype=out_dtype, **options)

    if not dense_k_last or values.dtype == jnp.float32:
        out = call(dense)
    else:
        # On CUDA rows of (K, N) are gathered whole: transposing them once costs less than to gather elements.
        out = lax.platform_dependent(dense, cuda=lambda dense: call(dense.T, False), default=call)
    return out.astype(out_dtype)


def _vnm_reference(*operands, v, m, strided, collected, dense_k_last, out_packed_last, out_dtype, **_):
    *parts, dense, _ = operands
    dense = _in_groups(dense, m, dense_k_last) if strided else dense
    out = reference.matmul(unpack_vnm(*parts, v, m, -1), dense, dense_k_last, out_packed_last, out_dtype)
    return collect(out, m, -2) if collected else out


def _vnm_backward(saved, ct, *, implementation, v, m, strided, collected, dense_k_last, **options):
    (*parts, dense, bias), out = saved
    packed, put_back = PackedVNM(*parts, v, m, -1), lambda d_dense: (d_dense,)
    if strided:
        dense, put_back = jax.vjp(lambda dense: _in_groups(dense, m, dense_k_last), dense)
    if collected:
        ct = collect(ct, ct.shape[0] // m, -2)
    options["dense_k_last"] = dense_k_last
    values, d_dense, d_bias = _gradients(packed, dense, bias, out, ct, implementation, **options)
    return values, None, None, *put_back(d_dense), d_bias


MATMUL_VNM = Operation("vnm_matmul", _vnm_reference, kernel=_vnm_kernel, vjp=Reverse(_saves, _vnm_backward))
