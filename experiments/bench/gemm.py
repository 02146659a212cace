"""Suite gemm: one product at a time, dense against a packed operand on either side."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from experiments.bench import rows, torch_programs
from experiments.bench.rows import show_mb, show_ms, show_ratio
from experiments.bench.settings import Case, Settings, kernels
from experiments.config import require
from jax_sparse24._products import FORMAT_24, formats_of, measure, products
from jax_sparse24.ops import _cusparselt
from jax_sparse24.ops._choose import choose, decide, library_obstacle
from jax_sparse24.patterns import FLOAT8
from jax_sparse24.tune import FLOAT8_PRODUCTS

OWN_KERNEL = "2:4 own kernel"
WHAT = """One product of an FFN, `Y1 = X W1` (F1), `Y3 = Y2 W2` (F2) and the four of the backward pass (B1
to B4), with the operand named in the second column packed: 2:4, and for activations also V:N:M, where V rows
share four of every M columns and each row keeps two. *packed* multiplies an operand that is packed already
(for cuSPARSELt in the library's own format, as layers pack it), *with packing* packs it first; *by default*
is what `implementation=None` runs for a packed operand. Ratios are dense time / time: above 1 is faster than
XLA's dense product of the same dtype."""


def formats(product, dtype: str, settings: Settings) -> list:
    """Compressed forms to measure, each against the same dense product. On CUDA: 2:4 by cuSPARSELt, and all
    by our kernels."""
    try:
        choose("bench", jnp.dtype(dtype), "cusparselt")
    except RuntimeError:
        forms = formats_of(product, settings.patterns)
        return [dataclasses.replace(form, implementation=kernels()) for form in forms]
    by_library = dataclasses.replace(FORMAT_24, implementation="cusparselt")
    if dtype == FLOAT8.name:
        return [by_library]
    own, *blocks = formats_of(product, settings.patterns)
    own = dataclasses.replace(own, name=OWN_KERNEL)
    return [own, *blocks] if dtype == "float32" else [by_library, own, *blocks]


def dtypes_of(settings: Settings) -> tuple[str, ...]:
    """Those asked for; by default also e4m3 where the device can. UserError where it cannot."""
    obstacle = library_obstacle() or _cusparselt.float8_problem()
    if FLOAT8.name in settings.dtype:
        require(not obstacle, f"--dtype {FLOAT8.name}: {obstacle}")
    return settings.dtypes if settings.dtype or obstacle else (*settings.dtypes, FLOAT8.name)


def run(settings: Settings, progress) -> Iterator[list[dict]]:
    """Rows for every case, dtype, product, sparse operand and format."""
    for case in settings.cases("gemm"):
        for dtype in dtypes_of(settings):
            for product in products(*case):
                if dtype == FLOAT8.name and (product.name, product.operand) not in FLOAT8_PRODUCTS:
                    continue
                progress(
                    f"T={case.T} d={case.d} f={case.f} {dtype} {product.name} with {product.operand} sparse"
                )
                yield measure_product(case, dtype, product, settings)


def measure_product(case: Case, dtype: str, product, settings: Settings) -> list[dict]:
    """One row per form of the operand whose blocks fit."""
    forms = formats(product, dtype, settings)
    done = measure(
        product,
        dtype,
        formats=forms,
        rivals=torch_programs,
        repeats=settings.repeats,
        seconds=settings.seconds,
    )
    shared = ("dense", *(name for name in done.status if name.startswith("torch")))
    out = []
    for form in forms:
        if form.name not in done.operand_bytes:
            continue
        place = (product.axes, product.side, jnp.dtype(dtype), product.shape)
        pattern = "2:4" if form.name == OWN_KERNEL else form.name
        decision = decide(*place, pattern, "masked")
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
                "default": "packed" if decision.packed else "masked dense",
                "default_reason": decision.reason,
            }
        )
    return out


def table(found: list[dict]) -> str:
    """Ratios first, then times and memory."""
    torch = [name for name in torch_programs.NAMES if any(name in row["status"] for row in found)]
    header = [
        *("product", "sparse", "T", "d", "f", "dtype", "format", "packed", "with packing", "by default"),
        *torch,
        *("dense ms", "packed ms", "operand MB: dense", "packed"),
    ]
    lines = []
    for row in found:
        name = row["format"]
        lines.append(
            [
                *(row[k] for k in ("product", "operand", "T", "d", "f", "dtype")),
                name if row["implementation"] != "reference" else f"{name} (no kernels: jnp)",
                show_ratio(row, "dense", name),
                show_ratio(row, "dense", f"{name} with packing"),
                default_ratio(row),
                *(show_ratio(row, "dense", t) if t in row["status"] else "not measured" for t in torch),
                show_ms(row, "dense"),
                show_ms(row, name),
                show_mb(row["bytes"]["dense"]),
                show_mb(row["bytes"]["packed"]),
            ]
        )
    return rows.table(header, lines)


def default_ratio(row: dict) -> str:
    """What a packed operand gets without naming an implementation."""
    name = row["format"] if row["default"] == "packed" else f"{row['format']} masked"
    return f"{row['default']} {show_ratio(row, 'dense', name)}"
