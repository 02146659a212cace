"""The decision what runs an operation or a product, and why; `decide` makes it, once per call."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import cusparselt, hopper, native, table
from jax_sparse24.dispatch.generations import CAPABILITIES
from jax_sparse24.dispatch.hardware import capability, generation, platform
from jax_sparse24.dispatch.product import Product
from jax_sparse24.patterns import FLOAT8

IMPLEMENTATIONS = ("reference", "ffi", "cusparselt")
Runs = Literal["reference", "ffi", "cusparselt", "auto", "dense"]
Form = Literal["dense", "packed", "compressed"]
FORMS: tuple[Form, ...] = ("dense", "packed", "compressed")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Decision:
    """What runs an operation or a product.

    runs: "reference", "ffi" (the kernels of this package), "cusparselt", "auto" (the kernels of this package
        where there are some, the reference on other platforms), or, for products alone, "dense": XLA's
        product of the same values.
    reason: why, in words.
    form: for products, the form of the sparse operand: an array with zeros ("dense"), `Packed24` or
        `PackedVNM` ("packed"), or `Compressed24` ("compressed").
    algorithm: of cuSPARSELt; None for the best that is known.
    eight_bits: for products, whether both operands are float8_e4m3fn, each times a scale.
    entry: the measurement behind the decision, an entry of a table; None if there is none. Where our kernel
        stands in for cuSPARSELt, it has the longest time that this may take."""

    runs: Runs
    reason: str
    form: Form = "dense"
    _: dataclasses.KW_ONLY
    algorithm: int | None = None
    eight_bits: bool = False
    entry: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)

    @property
    def sparse(self) -> bool:
        """Whether a product reads a packed operand."""
        return self.form != "dense"

    @property
    def reads_strided(self) -> bool:
        """Whether the kernel of a 2:4 product reads strided rows of a dense (K, N) from where they lie."""
        return self.runs == "ffi" and self.form == "compressed"


def named(implementation: str, algorithm: int | None = None) -> Decision:
    """The decision for a product whose operand is packed already and whose implementation the caller names.

    implementation: "reference", "ffi" or "cusparselt".
    algorithm: of cuSPARSELt; None for the best that is known."""
    return Decision(implementation, "asked for", "packed", algorithm=algorithm)


def decide(
    what: str | Product,
    dtype=None,
    implementation: str | None = None,
    *,
    alternative: Literal["dense", "masked"] = "dense",
    forms: tuple[Form, ...] = FORMS,
    eight_bits: tuple[Form, ...] = (),
    missing: Mapping[str, str] = MappingProxyType({}),
) -> Decision:
    """What runs an operation, or a product whose operand is to become sparse.

    what: the name of an operation, or a product.
    dtype: of an operation; a product has its own.
    implementation: None, or the name that the caller was given.
    alternative: of products, the dense product that must not be faster: "dense" while the operand is yet to
        be made, "masked" if it is packed already and would be unpacked.
    forms: of products, those in which the operand can be made.
    eight_bits: of products, the forms in which the operand can be made of float8_e4m3fn, whatever `forms`
        says; () if it cannot. cuSPARSELt multiplies it packed where the library is asked for and can, or
        where a measured table says so; else XLA multiplies dense e4m3 where it was measured to be faster
        than 16 bits, and otherwise its dense product simulates 8 bits. The product's dtype is that of the
        operands before rounding.
    missing: of operations, the platforms that have no kernel for it, and why (see `operation.Operation`).

    Raises: ValueError for an unknown name, RuntimeError for a named implementation that cannot run here."""
    if isinstance(what, Product):
        if eight_bits:
            return _in_eight_bits(what, implementation, eight_bits)
        return _product(what, implementation, alternative, forms)
    return _operation(what, dtype, implementation, missing)


def unless_slower(found: Decision, other: Decision | None) -> Decision:
    """A part of a product by itself, unless the whole product, and the part taken of it, was measured to be
    faster.

    Their measurements may be those of unequal shapes, so that times per multiply-add are compared.

    found: the decision for the part, whose entry says what taking it costs: "masked" without "dense".
    other: the decision for the whole product; None if there is none.

    Returns: `found`, or a decision that is not sparse, with the reason."""
    if not (found.sparse and other is not None and other.sparse and found.entry and other.entry):
        return found
    part, whole = found.entry, other.entry
    without_taking = part["packed_us"] - max(0.0, part["masked_us"] - part["dense_us"])
    if without_taking / math.prod(part["shape"]) <= whole["packed_us"] / math.prod(whole["shape"]):
        return found
    return Decision("dense", f"slower than packed weights; {other.reason}", entry=found.entry)


def check_implementation(op: str, implementation: Any) -> None:
    """Raises ValueError unless an option is None or the name of an implementation.

    op: the operation, for the message.
    implementation: of the option."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"{op}: implementation {implementation!r} is unknown; use None or one of {IMPLEMENTATIONS}."
        )


def _operation(op: str, dtype, implementation: str | None, missing: Mapping[str, str]) -> Decision:
    check_implementation(op, implementation)
    if implementation == "reference":
        return Decision("reference", "asked for")
    obstacle = _obstacle(op, dtype, platform(), missing)
    if implementation == "cusparselt":
        obstacle = obstacle or library_obstacle()
    if implementation is not None:
        if obstacle is not None:
            raise RuntimeError(
                f"{op}: implementation {implementation!r} cannot run: {obstacle}. "
                "Use implementation=None or 'reference'."
            )
        return Decision(implementation, "asked for")
    obstacle = obstacle or _never_ran()
    if obstacle is not None and platform() in native.PLATFORMS:
        return Decision("reference", obstacle)
    kind = {"cpu": "CPU", "cuda": "CUDA"}
    found = " and ".join(kind[p] for p in platforms(op, dtype, missing))
    if not found:
        return Decision("reference", obstacle)
    return Decision("auto", f"{found} kernel; reference on other platforms")


def _in_eight_bits(product: Product, implementation: str | None, forms: tuple[Form, ...]) -> Decision:
    if implementation not in (None, "cusparselt"):
        return Decision("dense", f"implementation={implementation!r} has no 8-bit products")
    if "packed" not in forms:
        found = Decision("dense", "as the method says")
    else:
        rounded = dataclasses.replace(product, dtype=FLOAT8, out_dtype=float8_sums(product.dtype))
        obstacle = library_obstacle() or cusparselt.Descriptor.of(rounded).misfit()
        found = Decision("dense", obstacle) if obstacle else _product(rounded, implementation, "dense", FORMS)
        if found.runs == "cusparselt":
            return dataclasses.replace(found, eight_bits=True)
    obstacle = dense_float8_obstacle()
    reason = f"{found.reason}; {obstacle}" if obstacle and "packed" not in forms else found.reason
    return Decision("dense", reason, eight_bits=not obstacle, entry=found.entry)


def _product(
    product: Product, implementation: str | None, alternative: str, forms: tuple[Form, ...]
) -> Decision:
    if forms == ("dense",):
        return Decision("dense", "as the method says")
    misfit = cusparselt.Descriptor.of(product).misfit() if product.pattern == "2:4" else "it is not 2:4"
    # An 8-bit operand is made by its own scale first, and compressed as it is multiplied.
    plain = misfit or product.dtype == FLOAT8 or 0 in product.shape or "compressed" not in forms
    form = "packed" if plain else "compressed"
    if implementation == "cusparselt":
        return Decision("cusparselt", "asked for", form, algorithm=_measured_algorithm(product))
    if implementation is not None:
        return Decision(implementation, "asked for", "packed")
    obstacle = _obstacle("matmul", product.dtype, platform()) or _never_ran()
    if obstacle is not None:
        return Decision("dense", obstacle)
    found = table.look_up(product, alternative)
    entry, dense = found.entry, Decision("dense", found.reason, entry=found.entry)
    if entry is None:
        return dense
    if entry["implementation"] == "cusparselt":
        obstacle = library_obstacle() or misfit
        if found.packed and not obstacle:
            algorithm = cusparselt.Descriptor.of(product).accepted(entry.get("algorithm"))
            return Decision("cusparselt", found.reason, form, algorithm=algorithm, entry=entry)
        reason = obstacle if found.packed else found.reason
        if _unfit_for_ours(product, forms) or found.gain < hopper.gain_to_stand_in(product):
            return dataclasses.replace(dense, reason=reason)
        reason = f"{reason}; our kernel for Hopper takes {hopper.OF_LIBRARY} times as long at most"
        slowest = {**entry, "packed_us": entry["packed_us"] * hopper.OF_LIBRARY}
        return Decision("ffi", reason, "compressed", entry=slowest)
    if not found.packed:
        return dense
    # Entries of Hopper were measured with our kernel for it, where that fits.
    here = generation()
    measured = dataclasses.replace(product, shape=tuple(entry["shape"]), out_dtype=None)
    if here is None or here.code != "sm_90a" or hopper.unfit(measured):
        return Decision("auto", found.reason, "packed", entry=entry)
    unfit = _unfit_for_ours(product, forms)
    if not unfit:
        return Decision("ffi", found.reason, "compressed", entry=entry)
    reason = f"{found.reason} by our kernel for Hopper, but here {unfit}"
    obstacle = library_obstacle() or misfit
    if obstacle or found.gain < hopper.LIBRARY:
        return dataclasses.replace(dense, reason=f"{reason}; {obstacle or 'cuSPARSELt may be slower'}")
    return Decision("cusparselt", reason, form, entry=entry)


def _unfit_for_ours(product: Product, forms: tuple[Form, ...]) -> str:
    """Why our kernel for Hopper cannot multiply a product whose operand is made in one of these forms, or an
    empty string."""
    return hopper.misfit(product) or ("" if "compressed" in forms else "its operand is not compressed")


def _measured_algorithm(product: Product) -> int | None:
    """The fastest algorithm of cuSPARSELt for the nearest measured product, if cuSPARSELt won there and does
    not refuse it for this one."""
    near = table.find(product)
    if near is None or not table.same_library(near[0]):
        return None
    return cusparselt.Descriptor.of(product).accepted(near[1].get("algorithm"))


def platforms(op: str, dtype, missing: Mapping[str, str]) -> list[str]:
    """The platforms whose kernels can run an operation, among all for which a program may be lowered.

    op: name of the operation.
    dtype: of its operands.
    missing: see `decide`."""
    return [p for p in native.PLATFORMS if _obstacle(op, dtype, p, missing) is None]


def _obstacle(op: str, dtype, where: str, missing: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """Why the kernels of a platform cannot run an operation, or None."""
    if lacks := missing.get(where) or missing.get("every platform"):
        return f"{op} has {lacks}"
    if where not in native.PLATFORMS:
        return f"the kernels run on CPU and CUDA and the default backend is {where}"
    built, reason = native.available(where)
    if not built:
        if where == "cuda" and platform() == "cuda":  # Python shows it once
            warnings.warn(f"jax uses a GPU, on which jax_sparse24 has no kernels: {reason}.", stacklevel=2)
        return reason
    if dtype == jnp.float64:
        return "the kernels have no float64"
    if where == "cuda" and platform() == "cuda" and generation() is None:
        known = ", ".join(CAPABILITIES)
        return f"this GPU has compute capability {capability()}; the kernels are for {known}"
    return None


def _never_ran() -> str | None:
    """Why kernels that can run here do not unless they are named, or None."""
    if platform() != "cuda" or generation() is None or generation().by_default:
        return None
    return (
        f"this GPU has compute capability {capability()}, for which the kernels are compiled and on which "
        "they never ran; implementation='ffi' runs them"
    )


def library_obstacle() -> str | None:
    """Why cuSPARSELt cannot run, or None."""
    if platform() != "cuda":
        return f"cuSPARSELt runs on CUDA and the default backend is {platform()}"
    if generation() is None or not generation().layout:
        known = ", ".join(c for c, row in CAPABILITIES.items() if row.layout)
        return (
            f"this GPU has compute capability {capability()}; the order of its metadata is known for {known}"
        )
    return cusparselt.problem() or None


def eight_bits_obstacle() -> str | None:
    """Why cuSPARSELt cannot multiply 8-bit operands of any size, or None."""
    return library_obstacle() or cusparselt.float8_problem() or None


def dense_float8_obstacle() -> str | None:
    """Why XLA's dense products of e4m3 operands are not faster here than those of 16 bits, or None."""
    if platform() != "cuda":
        return f"XLA multiplies e4m3 faster than 16 bits on CUDA, and the default backend is {platform()}"
    if generation() is None or not generation().float8:
        known = ", ".join(c for c, row in CAPABILITIES.items() if row.float8)
        return (
            f"this GPU has compute capability {capability()}; XLA's products of e4m3 were measured on {known}"
        )
    return None


def float8_sums(dtype) -> jnp.dtype:
    """The dtype in which cuSPARSELt is asked for a product of scaled e4m3 operands.

    It is float32 where the result is to be float16, because scaled sums overflow float16.

    dtype: of the result after scaling back."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)
