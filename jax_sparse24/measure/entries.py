"""Measures products of an FFN and makes the entries of a table from them."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import cusparselt
from jax_sparse24.dispatch.decision import decide, named
from jax_sparse24.dispatch.hardware import platform
from jax_sparse24.engine import fusions
from jax_sparse24.engine.operand import Request
from jax_sparse24.engine.sparsifiers import MVUE, Masked, Soft, Top2
from jax_sparse24.measure.products import (
    FORMAT_24,
    FFNProduct,
    Format,
    Measurement,
    compiled,
    formats_of,
    measure_part,
    measure_product,
    product_of,
)
from jax_sparse24.measure.programs import Program, random
from jax_sparse24.measure.timing import interleaved
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.packed24 import pack24
from jax_sparse24.ops.select import mask24
from jax_sparse24.patterns import FLOAT8, VNM

SPARSIFIERS = (Top2(), Masked(), Soft(), MVUE(exact=True), MVUE(exact=False))
# The products that methods multiply in 8 bits.
FLOAT8_PRODUCTS = (("F1", "w1"), ("F2", "w2"), ("B1", "w2"), ("B3", "w1"))
SEARCHED = 8  # algorithms of cuSPARSELt that are tried again at further shapes
CLOSE = 1.03  # a second algorithm is measured with the first if the search cannot tell them apart
BRIEF = 5e-3  # seconds of a sample where an algorithm is searched, or a producer timed


@dataclasses.dataclass(frozen=True)
class Job:
    """One product to be measured.

    name: "F1" to "B4".
    sparse: its sparse operand, measured as 2:4 and, if it is an activation, in each of `patterns`; or the
        side of a rule of `fusions.MEASURED`: a part of the product, in each of `patterns`.
    shape: (T, d, f): tokens, model width and FFN width.
    dtype: name of the operands' dtype.
    patterns: V:N:M of activations.
    whole: whether the producers of the operand, which `explain` shows, are timed, too."""

    name: str
    sparse: str
    shape: tuple[int, int, int]
    dtype: str
    patterns: tuple[VNM, ...]
    whole: bool

    def __str__(self):
        sparse = self.rule.part.lower() if self.rule else f"with {self.sparse} sparse"
        return f"{self.name} {sparse}, {self.place}"

    @property
    def place(self) -> str:
        """Shape and dtype, in words."""
        T, d, f = self.shape
        return f"T={T} d={d} f={f} {self.dtype}"

    @property
    def rule(self):
        """The rule that computes a part of the product; None if an operand is sparse."""
        return rule_of(self.name, self.sparse)

    @property
    def product(self) -> FFNProduct:
        """The product with its sparse operand."""
        return product_of(self.name, self.sparse, *self.shape)

    @property
    def key(self) -> tuple[str, str, str, tuple[int, int, int]]:
        """What names its entries in a table, whatever their pattern: kind, sparse side, dtype and shape."""
        rule = self.rule
        product = rule.product(self.shape, self.dtype, "") if rule else self.product
        return product.kind, product.side, self.dtype, product.shape


def rule_of(name: str, sparse: str):
    """The rule of `fusions.MEASURED` that computes a part of a product, or None.

    name: of the product.
    sparse: as in `Job`."""
    return next((rule for rule in fusions.MEASURED if (rule.name, rule.side) == (name, sparse)), None)


def jobs_of(
    shapes: Iterable[tuple[int, int, int]],
    dtype: str,
    patterns: Sequence[VNM],
    operands: Sequence[tuple[str, str]],
    whole: bool,
) -> Iterator[Job]:
    """The products of FFNs that can be measured.

    shapes: (T, d, f) of each FFN.
    dtype: name of the operands' dtype.
    patterns: V:N:M of activations.
    operands: pairs of a product and its sparse operand.
    whole: see `Job`."""
    float8 = jnp.dtype(dtype) == FLOAT8
    for shape in shapes:
        for name, operand in operands:
            if float8 and (name, operand) not in FLOAT8_PRODUCTS:
                continue
            rule = rule_of(name, operand)
            if rule and float8:
                continue
            job = Job(name, operand, tuple(shape), str(jnp.dtype(dtype)), tuple(patterns), whole)
            if possible(job):
                yield job


def possible(job: Job) -> set[str]:
    """The patterns for which a job gives entries."""
    if job.rule:
        return {str(p) for p in job.patterns if job.rule.fits(job.shape, job.dtype, p)}
    product = job.product
    shape = product.a_shape if product.side == "left" else product.b_shape
    return {form.name for form in formats_of(product, job.patterns) if form.fits(shape, product.axis)}


class Entries:
    """Makes the entries of a table, job by job.

    It remembers what serves further jobs: times of producers, and which algorithms of cuSPARSELt were fastest
    in products of the same layout.

    repeats, seconds: see `interleaved`."""

    def __init__(self, repeats: int, seconds: float):
        self.repeats, self.seconds = repeats, seconds
        self._producers: dict[tuple, Mapping[str, float]] = {}
        self._searched: dict[tuple, list[int]] = {}

    def of(self, job: Job) -> list[dict]:
        """The entries of a job: one per form of the sparse operand, or per pattern of a part."""
        if job.rule:
            return list(self._of_part(job))
        product, dtype = job.product, jnp.dtype(job.dtype)
        blocks = formats_of(product, () if dtype == FLOAT8 else job.patterns)[1:]
        blocks = [dataclasses.replace(form, also=("masked",)) for form in blocks]
        candidates = self._candidates(product, dtype)
        found = measure_product(
            product, dtype, formats=[*candidates, *blocks], repeats=self.repeats, seconds=self.seconds
        )
        producers = self._timed_producers(product, dtype, blocks) if job.whole and dtype != FLOAT8 else {}

        def entry(form, packed, names):
            place = (product.kind, product.side, form.name, dtype, product.shape)
            us = {name: producers[name] for name in names if name in producers}
            choice = {"implementation": packed.implementation}
            choice |= {} if packed.algorithm is None else {"algorithm": packed.algorithm}
            return _entry(found, f"{form.name} masked", packed.name, place, choice, us)

        best = min(candidates, key=lambda c: found.times[c.name].median if c.name in found.times else 1e9)
        out = [entry(FORMAT_24, best, [by.producer for by in SPARSIFIERS])]
        for form in blocks:
            if form.name in found.operand_bytes:
                out.append(entry(form, form, [f"pack_vnm {form.name}"]))
        return out

    def _of_part(self, job: Job) -> Iterator[dict]:
        kind, side, dtype, shape = job.key
        for pattern in job.patterns:
            if str(pattern) in possible(job):
                options = {"repeats": self.repeats, "seconds": self.seconds}
                found = measure_part(job.rule, *job.shape, pattern, job.dtype, **options)
                place = (kind, side, str(pattern), dtype, shape)
                yield _entry(found, "masked", "part", place, {"implementation": "ffi"})

    def _timed_producers(self, product: FFNProduct, dtype, blocks: Sequence[Format]) -> Mapping[str, float]:
        """Microseconds of the sparsifiers of an operand, which two products may share."""
        shape = product.a_shape if product.side == "left" else product.b_shape
        key = (shape, product.axis, dtype, tuple(form.name for form in blocks))
        if key not in self._producers:
            x = random(shape, dtype, 1)
            state = {"mask": mask24(random(shape, dtype, 3), product.axis), "scale": jnp.float32(1)}
            request = Request(state, jnp.zeros(2, jnp.uint32), None, "packed")
            make = {
                by.producer: lambda by=by: Program(lambda x: by(x, product.axis, request), x)
                for by in SPARSIFIERS
            }
            make |= {
                f"pack_vnm {form.name}": lambda form=form: Program(lambda x: form.pack(x, product.axis), x)
                for form in blocks
                if form.fits(shape, product.axis)
            }
            times = interleaved(compiled(make), 3, BRIEF)
            self._producers[key] = {name: _us(t.median) for name, t in times.items()}
        return self._producers[key]

    def _candidates(self, product: FFNProduct, dtype) -> list[Format]:
        """The 2:4 forms, one or two, with the fastest implementation and algorithm by a brief search.

        Algorithms whose results are wrong or change from call to call are left out. At the first product of a
        layout all algorithms are tried, at further ones those that were fastest there."""
        first = dataclasses.replace(FORMAT_24, also=("masked",))
        if platform() != "cuda":
            return [first]
        layout = (product.axes, product.side, dtype)
        known = self._searched.get(layout)
        algorithms = _algorithms(product, dtype)
        times = _search(product, dtype, [a for a in algorithms if known is None or a in known])
        ranked = sorted(times, key=times.get)
        if known is None and algorithms:
            self._searched[layout] = [algorithm for by, algorithm in ranked if by == "cusparselt"][:SEARCHED]
        close = [choice for choice in ranked[:2] if times[choice] <= CLOSE * times[ranked[0]]]
        forms = []
        for implementation, algorithm in close or [("ffi", None)]:
            form = dataclasses.replace(first, implementation=implementation, algorithm=algorithm)
            other = dataclasses.replace(form, name=f"2:4 by {algorithm}", also=())
            forms.append(other if forms else form)
        return forms


def _search(product: FFNProduct, dtype, algorithms: Sequence[int]) -> dict[tuple[str, int | None], float]:
    """Seconds per call, for the implementations and algorithms whose results are right and repeat."""
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
                lambda a, b: contract(a, b, i, j, decision=named(implementation, algorithm)), *operands
            )
        except (RuntimeError, ValueError):  # an algorithm that the library refuses for this product
            return None
        right = error(program.result) <= jnp.finfo(program.result.dtype).eps and program.repeats_itself()
        program.result = None  # dozens of results would fill the memory
        return program.__call__ if right else None

    choices = [("ffi", None), *(("cusparselt", algorithm) for algorithm in algorithms)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # compiling takes longer than running
        checked = zip(choices, pool.map(valid, choices), strict=True)
        calls = {choice: call for choice, call in checked if call is not None}
    return {choice: t.median for choice, t in interleaved(calls, 3, BRIEF).items()}


def _algorithms(product: FFNProduct, dtype) -> list[int]:
    """The algorithms of cuSPARSELt that may be tried for a product."""
    try:
        decide("tune", dtype, "cusparselt")
    except RuntimeError:
        return []
    asked = cusparselt.Descriptor.of(product.key(dtype))
    return [] if asked.misfit() else asked.algorithms()


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def _entry(found: Measurement, masked: str, packed: str, place, choice: dict, producers=None) -> dict:
    """An entry of a table.

    found: the measurement.
    masked, packed: names of the programs whose times are "masked" and "packed".
    place: kind of product, what is sparse, its pattern, dtype and shape.
    choice: implementation and algorithm.
    producers: times of producers by name, in microseconds."""
    programs = {"dense": "dense", "masked": masked, "packed": packed}
    times = {name: found.times[program] for name, program in programs.items() if program in found.times}
    kind, sparse, pattern, dtype, shape = place
    status = found.status[packed]
    if status == "ok" and not {"dense", "masked"} <= times.keys():
        status = "without a valid dense product"  # XLA's own product failed the check
    entry = {
        "product": kind,
        "sparse": sparse,
        "pattern": pattern,
        "dtype": str(jnp.dtype(dtype)),
        "shape": list(shape),
        **choice,
        "status": status,
        **{f"{name}_us": _us(times[name].median) if name in times else None for name in programs},
        "producers_us": dict(producers or {}),
    }
    for field in ("joules", "mhz"):
        values = {name: getattr(t, field) for name, t in times.items()}
        if any(value is not None for value in values.values()):
            entry[field] = {name: value and float(f"{value:.4g}") for name, value in values.items()}
    return entry | ({"seed": times["dense"].seed} if "dense" in times else {})
