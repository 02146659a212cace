"""Measures on this machine which products are faster packed, for `implementation=None`."""

import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_sparse24._measure import Program, interleaved, random
from jax_sparse24._products import (
    FORMAT_24,
    PATTERNS,
    Format,
    Measured,
    Product,
    formats_of,
    measure,
    measure_sampled,
    products,
)
from jax_sparse24.methods.sparsifiers import MVUE, Blocks, Masked, Soft, Top2
from jax_sparse24.ops import _cusparselt, _measured
from jax_sparse24.ops._choose import choose, platform
from jax_sparse24.ops.mask import mask24
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.pack import pack24
from jax_sparse24.patterns import FLOAT8, VNM
from jax_sparse24.plan import Context, Sparsifier

# What the defaults of `tune` measure: (T, d, f), and dtypes. One measurement speaks for sizes within a factor
# of four.
SHAPES = {
    "cpu": ((2048, 128, 512), (256, 512, 2048), (2048, 512, 2048), (2048, 1024, 4096)),
    "cuda": ((4096, 1024, 4096), (16384, 2048, 8192), (16384, 4096, 14336)),
}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16")}
SPARSIFIERS = (Top2(), Masked(), Soft(), MVUE(exact=True), MVUE(exact=False))
FLOAT8_PRODUCTS = (("F1", "w1"), ("F2", "w2"))  # which methods multiply in 8 bits
# ---- the table


def producer_name(by: Sparsifier) -> str:
    """Name of a sparsifier in a table."""
    if isinstance(by, Blocks):
        return f"pack_vnm {by.pattern}"
    return "stored mask" if isinstance(by, Masked) else str(by)


def _producers(product: Product, dtype) -> dict[str, Callable]:
    """The sparsifiers, as functions of the sparse operand."""
    shape = product.a_shape if product.side == "left" else product.b_shape
    state = {"mask": mask24(random(shape, dtype, 3), product.axis), "scale": jnp.float32(1)}
    context = Context(state, jax.random.key_data(jax.random.key(0)), None, packed=True)

    def producer(by):
        return lambda x: by(x, product.axis, context)

    return {producer_name(by): producer(by) for by in SPARSIFIERS}


def fastest(product: Product, dtype) -> Format:
    """The 2:4 format with the fastest implementation and algorithm. Wrong ones, and those that give another
    result when called again, are left out."""
    if platform() != "cuda":
        return FORMAT_24
    (i, j), left = product.axes, product.side == "left"
    a, b = random(product.a_shape, dtype, 1), random(product.b_shape, dtype, 2)
    packed = pack24(a if left else b, product.axis)
    operands = (packed, b) if left else (a, packed)
    truth = jax.jit(lambda a, b: contract(a, b, i, j, "ffi", jnp.float32))(*operands)

    def error(result):
        return jnp.linalg.norm(result.astype(jnp.float32) - truth) / jnp.linalg.norm(truth)

    def valid(choice):
        implementation, algorithm = choice
        try:
            program = Program(
                lambda a, b: contract(a, b, i, j, implementation, algorithm=algorithm), *operands
            )
        except (RuntimeError, ValueError):  # an algorithm that the library refuses for this product
            return None
        right = error(program.result) <= jnp.finfo(program.result.dtype).eps and program.repeats_itself()
        program.result = None  # dozens of them would fill the memory
        return program if right else None

    choices = [("ffi", None), *_algorithms(product, dtype)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # compiling takes longer than running
        checked = zip(choices, pool.map(valid, choices), strict=True)
        programs = {choice: program for choice, program in checked if program is not None}
    times = interleaved(programs, 3, 0.05)
    implementation, algorithm = min(times, key=lambda name: times[name].median)
    return dataclasses.replace(FORMAT_24, implementation=implementation, algorithm=algorithm)


def _algorithms(product: Product, dtype) -> list[tuple[str, int]]:
    """What of cuSPARSELt may be tried for a product."""
    try:
        choose("tune", dtype, "cusparselt")
    except RuntimeError:
        return []
    asked = _cusparselt.Product.of(product.axes, product.side, jnp.dtype(dtype), product.shape)
    return [] if asked.misfit() else [("cusparselt", n) for n in asked.algorithms()]


def _choice(form: Format) -> dict:
    if form.algorithm is None:
        return {"implementation": form.implementation}
    return {"implementation": form.implementation, "algorithm": form.algorithm}


def entries_of(product: Product, dtype, patterns: Sequence[VNM], repeats: int, seconds: float) -> list[dict]:
    """The entries of a table for one product, one per form of its sparse operand."""
    dtype = jnp.dtype(dtype)
    blocks = formats_of(product, () if dtype == FLOAT8 else patterns)[1:]
    forms = [fastest(product, dtype), *blocks]
    producers = {} if dtype == FLOAT8 else _producers(product, dtype)
    shape = product.a_shape if product.side == "left" else product.b_shape
    packs = {
        f"pack_vnm {form.name}": lambda x, form=form: form.pack(x, product.axis)
        for form in blocks
        if form.fits(shape, product.axis)
    }
    found = measure(
        product, dtype, formats=forms, producers=producers | packs, repeats=repeats, seconds=seconds
    )

    out = []
    for form in forms:
        if form.name not in found.operand_bytes:
            continue
        names = [f"pack_vnm {form.name}"] if form in blocks else list(producers)
        place = (product.kind, product.side, form.name, dtype, product.shape)
        out.append(_entry(found, f"{form.name} masked", form.name, place, _choice(form), names))
    return out


def sampled_entries(shape, dtype, patterns: Sequence[VNM], repeats: int, seconds: float) -> list[dict]:
    """The entries of a table for B1 at the kept entries of activations, one per pattern that fits (T, d, f);
    sparse is the "result" there."""
    T, d, f = shape
    out = []
    for pattern in patterns:
        if T % pattern.v or f % pattern.m or choose("sampled_matmul", dtype, None)[0] != "auto":
            continue
        found = measure_sampled(T, d, f, pattern, dtype, repeats=repeats, seconds=seconds)
        place = ("dgrad", "result", str(pattern), dtype, shape)
        out.append(_entry(found, "masked", "sampled", place, {"implementation": "ffi"}))
    return out


def _entry(found: Measured, masked: str, packed: str, place, choice: dict, producers=()) -> dict:
    """place: kind of product, what is sparse, its pattern, dtype and shape. masked, packed: programs."""

    def us(name):
        return round(found.times[name].median * 1e6, 2) if name in found.times else None

    kind, sparse, pattern, dtype, shape = place
    status = found.status[packed]
    if status == "ok" and None in (us("dense"), us(masked)):
        status = "without a valid dense product"  # XLA's own failed the check
    return {
        "product": kind,
        "sparse": sparse,
        "pattern": pattern,
        "dtype": str(jnp.dtype(dtype)),
        "shape": list(shape),
        **choice,
        "status": status,
        "dense_us": us("dense"),
        "masked_us": us(masked),
        "packed_us": us(packed),
        "producers_us": {name: us(name) for name in producers},
    }


def tune(
    shapes: Sequence[tuple[int, int, int]] | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    patterns: Sequence[VNM] = PATTERNS,
    folder: str | os.PathLike | None = None,
    repeats: int = 9,
    seconds: float = 0.4,
    show: Callable[[str], None] | None = print,
) -> Path:
    """Measures the products of FFNs on this machine and stores the table that decides `implementation=None`.

    shapes: (T, d, f), tokens, model width and FFN width, multiples of 4; a measurement speaks for sizes
    within a factor of four. dtypes: names; float8_e4m3fn is measured for F1 and F2 with sparse weights. Their
    defaults suit the device. patterns: V:N:M of activations, measured besides 2:4 where their blocks fit and
    there are kernels. folder: where `<hardware>.json` goes (default: ~/.cache/jax_sparse24/tuning, which
    later processes read; a table elsewhere serves this process). repeats, seconds: samples per program, and
    the time after which no more than 3 are taken. show: called with a line of progress per shape; None for
    silence. Five minutes on two cores by default.

    On CUDA the implementations and cuSPARSELt's algorithms are compared first. A product whose packed result
    is wrong, or differs from call to call, is recorded as such and never chosen. Functions that are compiled
    already keep their decisions. Returns the file; raises RuntimeError where no kernels can be measured,
    ValueError for shapes."""
    choose("tune", jnp.bfloat16, "ffi")
    shapes = SHAPES[platform()] if shapes is None else shapes
    dtypes = DTYPES[platform()] if dtypes is None else dtypes
    if not shapes or not dtypes:
        raise ValueError(f"tune: needs a shape and a dtype at least, got {shapes!r} and {dtypes!r}.")
    for shape in shapes:
        if len(shape) != 3 or any(size < 4 or size % 4 for size in shape):
            raise ValueError(f"tune: a shape is (T, d, f), all positive multiples of 4, got {tuple(shape)}.")
    here, begin, entries = _measured.hardware(), time.perf_counter(), {}
    path = (_measured.user_folder() if folder is None else Path(folder)) / f"{here.name}.json"
    for count, (T, d, f) in enumerate(shapes, 1):
        for dtype in dtypes:
            for product in products(T, d, f):
                if jnp.dtype(dtype) == FLOAT8 and (product.name, product.operand) not in FLOAT8_PRODUCTS:
                    continue
                identity = (product.kind, product.side, str(jnp.dtype(dtype)), product.shape)
                if identity not in entries:
                    entries[identity] = entries_of(product, dtype, patterns, repeats, seconds)
            if jnp.dtype(dtype) != FLOAT8:
                found = sampled_entries((T, d, f), dtype, patterns, repeats, seconds)
                entries["result", str(jnp.dtype(dtype)), (T, d, f)] = found
        found = [entry for of_product in entries.values() for entry in of_product]
        content = _store(found, here, path)  # now, so that an interruption costs one shape
        if show is not None:
            took = time.perf_counter() - begin
            show(f"tune: T={T} d={d} f={f} measured, {count} of {len(shapes)} shapes, {took:.0f} s")
    _measured.use(content)
    if show is not None:
        show(f"tune: {_summary(found)} Stored in {path}")
    return path


def _store(entries: list[dict], here: _measured.Hardware, path: Path) -> dict:
    """Writes a table and returns its content."""
    head = {
        "format": _measured.FORMAT,
        "hardware": here.description,
        "isa": here.isa,
        "versions": _measured.versions(),
        "date": datetime.date.today().isoformat(),
    }
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(head, indent=1)[:-2] + f',\n "products": [\n  {lines}\n ]\n}}\n')
    partial.replace(path)  # a reader never sees half a table
    return head | {"products": entries}


def _summary(entries) -> str:
    gains = [e["masked_us"] / e["packed_us"] for e in entries if e["status"] == "ok"]
    bad = len(entries) - len(gains)
    chosen = sum(gain >= _measured.TIE for gain in gains)
    text = f"{chosen} of {len(entries)} products run packed"
    if gains:
        text += f" ({min(gains):.2f}x to {max(gains):.2f}x masked dense)"
    return text + (f"; {bad} were wrong or not repeatable." if bad else ".")
