"""The products of an FFN with one sparse operand, or few entries of the result wanted, and their times."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import hopper
from jax_sparse24.dispatch.decision import decide, named
from jax_sparse24.dispatch.product import KINDS, Product
from jax_sparse24.engine import fusions
from jax_sparse24.engine.plan import FFN
from jax_sparse24.measure.programs import Oracle, Program, random, roundoff, same_bits
from jax_sparse24.measure.timing import Times, interleaved
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.matmul import contract, gather, with_values
from jax_sparse24.ops.packed24 import pack24
from jax_sparse24.ops.packed_vnm import pack_vnm
from jax_sparse24.patterns import FLOAT8, VNM

# The operands that methods make sparse, with their product of an FFN.
SPARSE_OPERANDS = (
    ("F1", "w1"), ("F2", "w2"), ("F2", "y2"),
    ("B1", "w2"), ("B2", "dy3"), ("B2", "y2"), ("B3", "w1"), ("B3", "dy1"), ("B4", "dy1"),
)  # fmt: skip
VNM_OPERANDS = ("y2", "dy1")  # the operands that methods make V:N:M
PATTERNS = (VNM(64, 8), VNM(64, 16))


@dataclasses.dataclass(frozen=True)
class FFNProduct:
    """One product of an FFN, and which of its operands is sparse.

    name: "F1" to "B4".
    operand: name of the sparse operand.
    a_shape, b_shape: of the left and right operand.
    axes: the contracted axis of each.
    side: which operand is sparse, "left" or "right"."""

    name: str
    operand: str
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    axes: tuple[int, int]
    side: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, K, N), of a product of (M, K) and (K, N)."""
        (i, j), (a, b) = self.axes, (self.a_shape, self.b_shape)
        return a[-3 - i], a[i], b[-3 - j]

    @property
    def kind(self) -> str:
        """The product's name in a linear layer: "fwd", "dgrad" or "wgrad"."""
        return KINDS[self.axes]

    def key(self, dtype: jax.typing.DTypeLike, pattern: str = "2:4") -> Product:
        """The product as decisions and tables describe it.

        dtype: of both operands.
        pattern: of the sparse operand, such as "2:4" or "64:2:16".

        Returns: a `jax_sparse24.dispatch.product.Product`."""
        return Product(self.axes, self.side, jnp.dtype(dtype), self.shape, pattern)

    @property
    def axis(self) -> int:
        """The axis along which the sparse operand is packed."""
        return self.axes[self.side == "right"]


def product_of(name: str, operand: str, T: int, d: int, f: int) -> FFNProduct:
    """A product of an FFN with one sparse operand.

    name: "F1" to "B4".
    operand: name of the sparse operand.
    T, d, f: tokens, model width and FFN width.

    Returns: an `FFNProduct` with its shape, axes and side."""
    shapes = {"x": (T, d), "w1": (d, f), "y2": (T, f), "w2": (f, d), "dy3": (T, d), "dy1": (T, f)}
    (a, i), (b, j) = FFN[name]
    return FFNProduct(name, operand, shapes[a], shapes[b], (i, j), "left" if operand == a else "right")


def ffn_products(T: int, d: int, f: int) -> list[FFNProduct]:
    """The products of an FFN, once for each operand that methods make sparse.

    T, d, f: tokens, model width and FFN width.

    Returns: an `FFNProduct` for each."""
    return [product_of(name, operand, T, d, f) for name, operand in SPARSE_OPERANDS]


@dataclasses.dataclass(frozen=True)
class Format:
    """A packed form of an operand, and how its product is computed.

    name: its pattern.
    pack: `pack(x, axis, implementation=)`, the function that packs.
    multiple: what the size along the packed axis must be a multiple of.
    implementation: what multiplies it, "ffi" or "cusparselt".
    rows: what the size along the other axis must be a multiple of.
    algorithm: of cuSPARSELt; None for the best that is known.
    also: what `measure_product` times besides the packed product."""

    name: str
    pack: Callable
    multiple: int
    implementation: str
    rows: int = 1
    algorithm: int | None = None
    also: tuple[str, ...] = ("masked", "with packing")

    def fits(self, shape: tuple[int, int], axis: int) -> bool:
        """Whether a matrix can be packed in this form.

        shape: of the matrix.
        axis: along which it is packed, -1 or -2."""
        return shape[axis] % self.multiple == shape[-3 - axis] % self.rows == 0


FORMAT_24 = Format("2:4", pack24, 4, "ffi")


def formats_of(product: FFNProduct, patterns: Sequence[VNM] = PATTERNS) -> list[Format]:
    """The forms in which methods pack the sparse operand of a product.

    product: 2:4 serves all operands.
    patterns: V:N:M, for operands that are activations.

    Returns: a `Format` for each, 2:4 first."""

    def pack(pattern):
        return lambda x, axis, implementation=None: pack_vnm(
            x, pattern.v, pattern.m, axis=axis, implementation=implementation
        )

    blocks = patterns if product.operand in VNM_OPERANDS else ()
    return [FORMAT_24, *(Format(str(p), pack(p), p.m, "ffi", p.v) for p in blocks)]


def compiled(make: Mapping[str, Callable[[], Program]]) -> dict[str, Program]:
    """Calls the functions that make programs, and returns the programs by name.

    Programs are compiled at the same time, in threads. XLA's own products on a GPU are compiled one by one,
    because XLA times some of their kernels to choose one."""
    alone = {n for n in make if jax.default_backend() == "gpu" and (n == "dense" or n.endswith(" masked"))}
    done = {name: make[name]() for name in make if name in alone}
    rest = [name for name in make if name not in alone]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        done |= zip(rest, pool.map(lambda name: make[name](), rest), strict=True)
    return {name: done[name] for name in make}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurement of one product.

    status: verdict on each program: "ok", "wrong" or "not repeatable".
    times: of the programs that are ok.
    memory: bytes that XLA plans for each program, by kind.
    operand_bytes: bytes of the sparse operand, as "dense" array and in each packed form."""

    status: Mapping[str, str]
    times: Mapping[str, Times]
    memory: Mapping[str, Mapping[str, int]]
    operand_bytes: Mapping[str, int]


def measure_product(
    product: FFNProduct,
    dtype: jax.typing.DTypeLike,
    *,
    formats: Sequence[Format] = (FORMAT_24,),
    rivals: Any = None,
    repeats: int = 15,
    seconds: float = 2.0,
    seed: int | None = None,
) -> Measurement:
    """Times one product on random data, in random order, and checks each result against float64.

    The programs are "dense", XLA's product, and for each format NAME, whose operand is packed before; as
    `Format.also` says, also "NAME with packing", and "NAME masked", which unpacks the operand and runs XLA's
    dense product: what else could be done with a packed operand.

    product: see `product_of`.
    dtype: of the operands.
    formats: those that do not fit the shape are left out.
    rivals: an object with `dense(a, b, axes)` and `sparse(format, pruned, y, axis, y_axis, left)`, which
        return further programs by name; or None.
    repeats, seconds, seed: see `interleaved`.

    Returns: a `Measurement` of all programs."""
    (i, j), left, dtype = product.axes, product.side == "left", jnp.dtype(dtype)
    a, b = random(product.a_shape, dtype, 1), random(product.b_shape, dtype, 2)
    x, y = (a, b) if left else (b, a)

    def multiply(sparse, y, by=None):
        return contract(*((sparse, y) if left else (y, sparse)), i, j, decision=by)

    def oracle(x):
        a, b = (x, y) if left else (y, x)
        unit = roundoff(dtype) if dtype == FLOAT8 else None
        return Oracle(a if i == -1 else a.T, b if j == -2 else b.T, unit)

    status, operand_bytes = {}, {}
    make = {"dense": partial(Program, lambda x, y: multiply(x, y), x, y)}
    others = {} if rivals is None else rivals.dense(a, b, product.axes)
    expected = dict.fromkeys([*make, *others], oracle(x))

    def prepared(form):
        """The operand as the reference packs it, as the product takes it, and what packs the latter."""
        # The operand is packed in cuSPARSELt's layout where a layer would do so.
        key = product.key(dtype)
        decision = decide(key, implementation=form.implementation)
        own = form.implementation == "ffi" and form.pack is pack24 and not hopper.misfit(key)
        compresses = decision.form == "compressed" or own
        pack = compressed24.pack if compresses else partial(form.pack, implementation=form.implementation)
        return form.pack(x, product.axis, implementation="reference"), pack(x, product.axis), pack

    formats = [form for form in formats if form.fits(x.shape, product.axis)]
    with ThreadPoolExecutor(
        2
    ) as pool:  # each compiles programs; more than two at once would take much memory
        done = list(pool.map(prepared, formats))
    for form, (truth, packed, pack) in zip(formats, done, strict=True):
        name = form.name
        operand_bytes[name] = sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
        multiplied = partial(multiply, by=named(form.implementation, form.algorithm))
        variants = {
            "": partial(Program, multiplied, packed, y),
            "masked": partial(Program, lambda p, y: multiply(p.todense(), y), packed, y),
            "with packing": partial(
                Program, lambda x, y, pack=pack, by=multiplied: by(pack(x, product.axis), y), x, y
            ),
        }
        own = {f"{name} {part}".strip(): variants[part] for part in ("", *form.also)}
        plain = packed.plain if isinstance(packed, Compressed24) else packed
        if not same_bits(plain, truth):
            status |= dict.fromkeys(own, "wrong")
        pruned = truth.todense(implementation="reference")
        rival = {}
        if rivals is not None:
            y_axis = product.axes[left]
            rival = rivals.sparse(name, pruned, y, product.axis, y_axis, left)
        make, others = make | own, others | rival
        expected |= dict.fromkeys([*own, *rival], oracle(pruned))
    programs = compiled(make) | others
    for name, program in programs.items():
        if status.get(name) != "wrong":
            truth = getattr(program, "oracle", None) or expected[name]
            status[name] = "ok" if truth.excess(program.result) <= 1 else "wrong"
    times = interleaved(programs, repeats, seconds, seed=seed)
    for name, program in programs.items():
        if status[name] == "ok" and not program.repeats_itself():
            status[name] = "not repeatable"
    return Measurement(
        status,
        {name: t for name, t in times.items() if status[name] == "ok"},
        {name: program.bytes for name, program in programs.items()},
        {"dense": x.nbytes, **operand_bytes},
    )


def measure_part(
    rule: fusions.SampledB1,
    T: int,
    d: int,
    f: int,
    pattern: VNM,
    dtype: jax.typing.DTypeLike,
    *,
    repeats: int = 15,
    seconds: float = 2.0,
) -> Measurement:
    """Times a product of which only the values at the entries of V:2:M activations are wanted.

    The programs are "dense", the whole product; "masked", the same with its values gathered; and "part",
    those values alone.

    rule: one of `fusions.MEASURED`.
    T, d, f: tokens, model width and FFN width.
    pattern: of the activations.
    dtype: of the operands.
    repeats, seconds: see `interleaved`.

    Returns: a `Measurement` of the three programs."""
    product = product_of(rule.name, rule.side, T, d, f)
    a, b = random(product.a_shape, dtype, 1), random(product.b_shape, dtype, 2)
    support = pack_vnm(random((T, f), dtype, 3), pattern.v, pattern.m)

    def whole(a, b):
        return contract(a, b, *product.axes)

    make = {
        "dense": partial(Program, whole, a, b),
        "masked": partial(Program, lambda a, b, support: gather(whole(a, b), support, None), a, b, support),
        "part": partial(Program, partial(rule.values, implementation="ffi"), a, b, support),
    }
    programs = compiled(make)
    i, j = product.axes
    truth, dense = Oracle(a if i == -1 else a.T, b if j == -2 else b.T), programs["dense"].result
    kept = with_values(support, jnp.ones_like(support.values)).todense() != 0

    def full(name):
        values = programs[name].result
        return values if name == "dense" else jnp.where(kept, with_values(support, values).todense(), dense)

    status = {name: "ok" if truth.excess(full(name)) <= 1 else "wrong" for name in programs}
    times = interleaved(programs, repeats, seconds)
    for name, program in programs.items():
        if status[name] == "ok" and not program.repeats_itself():
            status[name] = "not repeatable"
    memory = {name: program.bytes for name, program in programs.items()}
    times = {name: t for name, t in times.items() if status[name] == "ok"}
    return Measurement(status, times, memory, {"dense": T * f * a.itemsize, "part": support.nbytes})
