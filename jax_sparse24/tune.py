"""Measures on this machine which products are faster packed, for `implementation=None`."""

import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_sparse24._measure import Oracle, Program, Times, interleaved, random, roundoff, same_bits
from jax_sparse24.formats import Compressed24
from jax_sparse24.methods.sparsifiers import MVUE, Blocks, Masked, Soft, Top2
from jax_sparse24.ops import _cusparselt, _measured, compressed
from jax_sparse24.ops._choose import choose, platform
from jax_sparse24.ops.compressed import reads
from jax_sparse24.ops.mask import mask24
from jax_sparse24.ops.matmul import contract
from jax_sparse24.ops.pack import pack24
from jax_sparse24.ops.vnm import pack_vnm
from jax_sparse24.patterns import FLOAT8, VNM
from jax_sparse24.plan import FFN, Context, Sparsifier

# What the defaults of `tune` measure: (T, d, f), and dtypes. One measurement speaks for sizes within a factor
# of four.
SHAPES = {
    "cpu": ((2048, 128, 512), (256, 512, 2048), (2048, 512, 2048), (2048, 1024, 4096)),
    "cuda": ((4096, 1024, 4096), (16384, 2048, 8192), (16384, 4096, 14336)),
}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16")}
# Operands that methods cut, per product of an FFN.
SPARSE_OPERANDS = (
    ("F1", "w1"), ("F2", "w2"), ("F2", "y2"),
    ("B1", "w2"), ("B2", "dy3"), ("B2", "y2"), ("B3", "w1"), ("B3", "dy1"), ("B4", "dy1"),
)  # fmt: skip
SPARSIFIERS = (Top2(), Masked(), Soft(), MVUE(exact=True), MVUE(exact=False))
FLOAT8_PRODUCTS = (("F1", "w1"), ("F2", "w2"))  # which methods multiply in 8 bits
ACTIVATIONS = ("y2", "dy1")  # operands that methods cut to V:N:M
PATTERNS = (VNM(64, 8), VNM(64, 16))


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of an FFN and which of its operands is sparse."""

    name: str
    operand: str
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    axes: tuple[int, int]  # contracted
    side: str  # "left" or "right": where the sparse operand stands

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, K, N)"""
        (i, j), (a, b) = self.axes, (self.a_shape, self.b_shape)
        return a[-3 - i], a[i], b[-3 - j]

    @property
    def kind(self) -> str:
        """What it is in a linear layer: "fwd", "dgrad" or "wgrad"."""
        return _measured.KINDS[self.axes]

    @property
    def axis(self) -> int:
        """The axis along which the sparse operand is packed."""
        return self.axes[self.side == "right"]


def product_of(name: str, operand: str, T: int, d: int, f: int) -> Product:
    """A product of an FFN with `operand` sparse."""
    shapes = {"x": (T, d), "w1": (d, f), "y2": (T, f), "w2": (f, d), "dy3": (T, d), "dy1": (T, f)}
    (a, i), (b, j) = FFN[name]
    return Product(name, operand, shapes[a], shapes[b], (i, j), "left" if operand == a else "right")


def products(T: int, d: int, f: int) -> list[Product]:
    """The products of an FFN, once for each operand that methods cut."""
    return [product_of(name, operand, T, d, f) for name, operand in SPARSE_OPERANDS]


@dataclasses.dataclass(frozen=True)
class Format:
    """A compressed form: its pattern, `pack(x, axis, implementation=)`, the multiple it needs along that
    axis, the implementation (of cuSPARSELt also the algorithm) that multiplies it, and the multiple it needs
    along the other axis."""

    name: str
    pack: Callable
    multiple: int
    implementation: str
    rows: int = 1
    algorithm: int | None = None

    def fits(self, shape: tuple[int, int], axis: int) -> bool:
        return shape[axis] % self.multiple == shape[-3 - axis] % self.rows == 0


FORMAT_24 = Format("2:4", pack24, 4, "ffi")


def formats_of(product: Product, patterns: Sequence[VNM] = PATTERNS) -> list[Format]:
    """The forms that methods give the sparse operand of a product."""

    def pack(pattern):
        return lambda x, axis, implementation=None: pack_vnm(
            x, pattern.v, pattern.m, axis=axis, implementation=implementation
        )

    blocks = patterns if product.operand in ACTIVATIONS else ()
    return [FORMAT_24, *(Format(str(p), pack(p), p.m, "ffi", p.v) for p in blocks)]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One product: the verdict on each program ("ok", "wrong" or "not repeatable"), times of those that are
    ok and of producers, bytes planned by XLA, bytes of the sparse operand dense and packed."""

    status: Mapping[str, str]
    times: Mapping[str, Times]
    memory: Mapping[str, Mapping[str, int]]
    operand_bytes: Mapping[str, int]


def measure(
    product: Product,
    dtype,
    *,
    formats: Sequence[Format] = (FORMAT_24,),
    producers: Mapping[str, Callable] | None = None,
    rivals=None,
    repeats: int = 15,
    seconds: float = 2.0,
) -> Measured:
    """Times one product on random data, the programs in turn, each result checked against float64.

    Programs: "dense", and for each format NAME (packed before), "NAME with packing", and "NAME masked"
    (unpacked, then XLA's dense product: the alternative to NAME for a packed operand). producers: name ->
    function of the sparse operand, timed besides. rivals: `dense(a, b, axes)` and `sparse(format, pruned, y,
    axis, y_axis, left)` that return further programs by name."""
    (i, j), left, dtype = product.axes, product.side == "left", jnp.dtype(dtype)
    a, b = random(product.a_shape, dtype, 1), random(product.b_shape, dtype, 2)
    x, y = (a, b) if left else (b, a)

    def multiply(sparse, y, implementation, algorithm=None):
        return contract(*((sparse, y) if left else (y, sparse)), i, j, implementation, algorithm=algorithm)

    def oracle(x):
        a, b = (x, y) if left else (y, x)
        unit = roundoff(dtype) if dtype == FLOAT8 else None
        return Oracle(a if i == -1 else a.T, b if j == -2 else b.T, unit)

    status, programs, operand_bytes = {}, {"dense": Program(lambda x, y: multiply(x, y, None), x, y)}, {}
    if rivals is not None:
        programs |= rivals.dense(a, b, product.axes)
    expected = dict.fromkeys(programs, oracle(x))
    for form in formats:
        if not form.fits(x.shape, product.axis):
            continue
        name, kernel, algorithm = form.name, form.implementation, form.algorithm
        truth = form.pack(x, product.axis, implementation="reference")
        # For cuSPARSELt as layers pack for it.
        at_once = reads(product.axes, product.side, dtype, product.shape, kernel)
        pack = compressed.pack if at_once else partial(form.pack, implementation=kernel)
        packed = pack(x, product.axis)
        operand_bytes[name] = sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
        variants = {
            name: Program(lambda p, y, by=(kernel, algorithm): multiply(p, y, *by), packed, y),
            f"{name} masked": Program(lambda p, y: multiply(p.todense(), y, None), packed, y),
            f"{name} with packing": Program(
                lambda x, y, pack=pack, by=(kernel, algorithm): multiply(pack(x, product.axis), y, *by), x, y
            ),
        }
        plain = packed.plain if isinstance(packed, Compressed24) else packed
        if not same_bits(plain, truth):
            status |= dict.fromkeys(variants, "wrong")
        pruned = truth.todense(implementation="reference")
        if rivals is not None:
            y_axis = product.axes[left]
            variants |= rivals.sparse(name, pruned, y, product.axis, y_axis, left)
        programs |= variants
        expected |= dict.fromkeys(variants, oracle(pruned))
    for name, program in programs.items():
        if status.get(name) != "wrong":
            truth = getattr(program, "oracle", None) or expected[name]
            status[name] = "ok" if truth.excess(program.result) <= 1 else "wrong"
    timed = programs | {name: Program(produce, x) for name, produce in (producers or {}).items()}
    times = interleaved(timed, repeats, seconds)
    for name, program in timed.items():
        if status.get(name, "ok") == "ok":
            status[name] = "ok" if program.repeats_itself() else "not repeatable"
    return Measured(
        status,
        {name: t for name, t in times.items() if status[name] == "ok"},
        {name: program.bytes for name, program in programs.items()},
        {"dense": x.nbytes, **operand_bytes},
    )


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

    def us(name):
        return round(found.times[name].median * 1e6, 2) if name in found.times else None

    out = []
    for form in forms:
        if form.name not in found.operand_bytes:
            continue
        names = [f"pack_vnm {form.name}"] if form in blocks else list(producers)
        out.append(
            {
                "product": product.kind,
                "sparse": product.side,
                "pattern": form.name,
                "dtype": str(jnp.dtype(dtype)),
                "shape": list(product.shape),
                **_choice(form),
                "status": found.status[form.name],
                "dense_us": us("dense"),
                "masked_us": us(f"{form.name} masked"),
                "packed_us": us(form.name),
                "producers_us": {name: us(name) for name in names},
            }
        )
        if out[-1]["status"] == "ok" and None in (out[-1]["dense_us"], out[-1]["masked_us"]):
            # Nothing to compare with: XLA's own product failed the check.
            out[-1]["status"] = "without a valid dense product"
    return out


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
