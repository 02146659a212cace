"""Suite gemm: one product at a time, dense against a packed operand on either side."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp
from jax import lax

from experiments.benchmarks import rows, xla_programs
from experiments.benchmarks.rows import show_mb, show_ms, show_ratio
from experiments.benchmarks.settings import Case, Settings, kernels
from experiments.benchmarks.torch import programs as torch_programs
from experiments.errors import require
from jax_sparse24.dispatch.decision import decide, eight_bits_obstacle
from jax_sparse24.measure import (
    FLOAT8_PRODUCTS,
    FORMAT_24,
    Program,
    ffn_products,
    formats_of,
    measure_product,
)
from jax_sparse24.ops.matmul import contract
from jax_sparse24.patterns import FLOAT8

OWN_KERNEL = "2:4 own kernel"
WHAT = """One product of an FFN, `Y1 = X W1` (F1), `Y3 = Y2 W2` (F2) and the four of the backward pass (B1
to B4), with the operand named in the second column packed: 2:4, and for activations also V:N:M, where V rows
share four of every M columns and each row keeps two. *packed* multiplies an operand that is packed already;
where cuSPARSELt multiplies, the operand is in the library's own layout, because layers pack it so. *with
packing* packs the operand first. *by default* is what `implementation=None` runs for a packed operand.
*against* names the fastest dense program of the row."""


def formats(product, dtype: str, settings: Settings) -> list:
    """Compressed forms to measure, each against the same dense product. On CUDA: 2:4 by cuSPARSELt, blocks by
    our kernels, and 2:4 by these where the library has none or the settings ask for it."""
    try:
        decide("bench", jnp.dtype(dtype), "cusparselt")
    except RuntimeError:
        forms = formats_of(product, settings.patterns)
        return [dataclasses.replace(form, implementation=kernels()) for form in forms]
    by_library = dataclasses.replace(FORMAT_24, implementation="cusparselt")
    if dtype == FLOAT8.name:
        return [by_library]
    own, *blocks = formats_of(product, settings.patterns)
    own = dataclasses.replace(own, name=OWN_KERNEL)
    if dtype == "float32":
        return [own, *blocks]
    return [by_library, *([own] if settings.own_kernel else []), *blocks]


class Rivals:
    """What `measure_product` compares with: XLA's other dense programs, and PyTorch's."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def dense(self, a, b, axes) -> dict:
        found = {}
        if a.dtype == FLOAT8:
            found["dense: short sums"] = Program(partial(short_sums, axes=axes), a, b)
        for name, variant in xla_programs.variants(a.dtype, self.settings.exhaustive).items():
            operands = xla_programs.cast(variant, (a, b))
            found |= torch_programs.or_warn(
                f"XLA's dense product, {name},",
                lambda name=name, variant=variant, operands=operands: {
                    f"dense: {name}": Program(partial(dense, axes=axes), *operands, options=variant.options)
                },
            )
        return found | (torch_programs.dense(a, b, axes) if self.settings.torch else {})

    def sparse(self, *args) -> dict:
        return torch_programs.sparse(*args) if self.settings.torch else {}


def dense(a, b, axes):
    """XLA's product, contracted along `axes`."""
    return contract(a, b, *axes, None)


def short_sums(a, b, axes):
    """XLA's product of e4m3 as it is by default: cuBLASLt may sum in fewer bits than float32, as cuSPARSELt
    does, and be faster."""
    contracted = ((a.ndim + axes[0],), (b.ndim + axes[1],))
    options = {"precision": lax.Precision.DEFAULT, "preferred_element_type": jnp.bfloat16}
    return lax.dot_general(a, b, (contracted, ((), ())), **options)


def dtypes_of(settings: Settings) -> tuple[str, ...]:
    """Those asked for; by default also e4m3 where the device can. UserError where it cannot."""
    obstacle = eight_bits_obstacle()
    if FLOAT8.name in settings.dtype:
        require(not obstacle, f"--dtype {FLOAT8.name}: {obstacle}")
    return settings.dtypes if settings.dtype or obstacle else (*settings.dtypes, FLOAT8.name)


def run(settings: Settings, progress) -> Iterator[tuple[str, Callable[[], list[dict]]]]:
    """Names of products and what gives their rows, one per format."""
    for case in settings.cases("gemm"):
        for dtype in dtypes_of(settings):
            for product in ffn_products(*case):
                if dtype == FLOAT8.name and (product.name, product.operand) not in FLOAT8_PRODUCTS:
                    continue
                what = (
                    f"T={case.T} d={case.d} f={case.f} {dtype} {product.name} with {product.operand} sparse"
                )
                yield what, partial(rows_of_product, case, dtype, product, settings)


def decision_of(product, dtype: str, form):
    """What `implementation=None` does with an operand packed in that form."""
    pattern = "2:4" if form.name == OWN_KERNEL else form.name
    return decide(product.key(dtype, pattern), alternative="masked")


def rows_of_product(case: Case, dtype: str, product, settings: Settings) -> list[dict]:
    """One row per form of the operand whose blocks fit."""
    forms = formats(product, dtype, settings)
    decisions = {form.name: decision_of(product, dtype, form) for form in forms}
    also = {
        name: ("with packing",) if decision.sparse else ("masked", "with packing")
        for name, decision in decisions.items()
    }
    forms = [dataclasses.replace(form, also=also[form.name]) for form in forms]
    done = measure_product(
        product,
        dtype,
        formats=forms,
        rivals=Rivals(settings),
        repeats=settings.repeats,
        seconds=settings.seconds,
        seed=settings.seed_of(*case, dtype, product.name, product.operand),
    )
    shared = [name for name in done.status if name.startswith(("dense", "torch"))]
    out = []
    for form in forms:
        if form.name not in done.operand_bytes:
            continue
        decision = decisions[form.name]
        own = (form.name, f"{form.name} with packing", f"{form.name} masked")
        take = lambda source, own=own: {name: source[name] for name in (*shared, *own) if name in source}  # noqa: E731
        out.append(
            {
                **case._asdict(),
                "dtype": dtype,
                "product": product.name,
                "operand": product.operand,
                "side": product.side,
                "kind": product.kind,
                "shape": list(product.shape),
                "format": form.name,
                "implementation": form.implementation,
                "status": take(done.status),
                "ms": rows.times(take(done.times)),
                "bytes": {"dense": done.operand_bytes["dense"], "packed": done.operand_bytes[form.name]},
                "xla_bytes": take(done.memory),
                "default": "packed" if decision.sparse else "masked dense",
                "default_reason": decision.reason,
            }
        )
    return out


def contradictory(row: dict) -> bool:
    """Whether packing and multiplying took less time than multiplying alone, by more than noise."""
    return rows.contradicts(row, f"{row['format']} with packing", row["format"])


def table(found: list[dict]) -> str:
    """Ratios first, then times, energy and memory."""
    torch = [name for name in torch_programs.NAMES if any(name in row["status"] for row in found)]
    header = [
        *("product", "sparse", "T", "d", "f", "dtype", "format", "packed", "with packing", "by default"),
        *(*torch, "against", "sessions: packed", "dense ms", "packed ms", *rows.ENERGY_HEADER),
        *("operand MB: dense", "packed"),
    ]
    lines = []
    for row in found:
        name = row["format"]
        lines.append(
            [
                *(row[k] for k in ("product", "operand", "T", "d", "f", "dtype")),
                name if row["implementation"] != "reference" else f"{name} (no kernels: jnp)",
                *packed_ratios(row),
                default_ratio(row),
                *(show_ratio(row, "dense", t) if t in row["status"] else "not measured" for t in torch),
                rows.against(row, "dense"),
                rows.over_sessions(row, "dense", name),
                show_ms(row, rows.base_of(row, "dense")),
                show_ms(row, name),
                *rows.energy(row, "dense", name),
                show_mb(row["bytes"]["dense"]),
                show_mb(row["bytes"]["packed"]),
            ]
        )
    return rows.table(header, lines)


def packed_ratios(row: dict) -> tuple[str, str]:
    """Of the packed operand and of packing included, or that they contradict each other."""
    if contradictory(row):
        return (rows.CONTRADICTORY,) * 2
    name = row["format"]
    return show_ratio(row, "dense", name), show_ratio(row, "dense", f"{name} with packing")


def default_ratio(row: dict) -> str:
    """What a packed operand gets without naming an implementation."""
    name = row["format"] if row["default"] == "packed" else f"{row['format']} masked"
    return f"{row['default']} {show_ratio(row, 'dense', name)}"
