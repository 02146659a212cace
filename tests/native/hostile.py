"""Calls that FFI targets must refuse, made without the Python layer that checks before.

`CASES` has a right call of every target as a function of sizes; what is wrong is derived from it. Run as a
program, it makes the calls of one platform and prints a line of JSON before and after each, so that the last
one names what ended the process. XLA would compile a program for each of the thousands of calls; instead it
makes one call, of the handler in relay.cc, within which the others are made with XLA's own context."""

import ctypes
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator

import jax
import ml_dtypes
import numpy as np

from jax_sparse24.dispatch import native

Array = tuple[tuple[int, ...], str]
DTYPES = ("float32", "int32", "uint8", "bool")
NUMBERS = (-(2**63), -1, 2, 2**32 + 1)
FLAG = range(2)


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes and dtypes of operands and results, by name, and attributes."""

    operands: dict[str, Array]
    results: dict[str, Array]
    attributes: dict[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """A right call of a target, as a function of sizes.

    build: sizes -> Call. sizes: of the right call. empty: the sizes that may be zero. bad: sizes that its
    rules forbid, which fit each other. bad_on_cuda: those that the CPU takes. values: the right values of
    attributes other than 0 and 1. legal: derived calls that are right after all: an operand of one row is
    one for all rows. wrong: further calls that must be refused, by what they are."""

    build: Callable[..., Call]
    sizes: dict[str, int]
    empty: tuple[str, ...] = ()
    bad: tuple[dict[str, int], ...] = ()
    bad_on_cuda: tuple[dict[str, int], ...] = ()
    values: dict[str, range] = dataclasses.field(default_factory=dict)
    legal: tuple[str, ...] = ()
    wrong: dict[str, Call] = dataclasses.field(default_factory=dict)


def up(n: int, multiple: int) -> int:
    return -(-n // multiple)


def packed(rows: int, depth: int, of: str = "") -> dict[str, Array]:
    values, metadata = (rows, depth // 2), (rows, up(depth, 8))
    return {f"{of}values": (values, "bfloat16"), f"{of}metadata": (metadata, "uint8")}


def blocks(R: int, K: int, v: int, m: int) -> dict[str, Array]:
    values, metadata, columns = (R, 2 * (K // m)), (R, up(K // m, 2)), (R // v, K // m, 4)
    types = ("bfloat16", "uint8", "uint8")
    return {
        name: (shape, dtype)
        for name, shape, dtype in zip(
            ("values", "metadata", "columns"), (values, metadata, columns), types, strict=True
        )
    }


def x(*shape: int, dtype: str = "bfloat16") -> Array:
    return shape, dtype


def mapped(result: str = "bfloat16"):
    return lambda R, K: Call({"x": x(R, K)}, {"out": x(R, K, dtype=result)}, {"trailing": 0})


def two_ways(R, K) -> dict[str, Array]:
    return packed(R, K, "row_") | packed(K, R)


def compressed(R, K) -> Array:
    return x(R + up(R, 64) * 8, K // 2)


def one_compressed(results: dict[str, Array], **operands: str) -> dict[str, Call]:
    """Two matrices of 64 x 128 packed both ways, one of the results in compressed matrices of cuSPARSELt: a
    batch of two, where the other is one batch of all rows."""
    two = lambda shape, dtype: ((2, *shape), dtype)  # noqa: E731
    plain = {name: two(*array) for name, array in (results | two_ways(64, 128)).items()}
    given = {name: x(2, 64, 128, dtype=dtype) for name, dtype in operands.items()}
    return {
        f"{name} alone in compressed matrices": Call(given, plain | {name: two(*compressed(*size))})
        for name, size in (("row_values", (64, 128)), ("values", (128, 64)))
    }


KEY = {"key": ((2,), "uint32")}
GROUPS = {
    "sizes": {"R": 12, "K": 24},
    "empty": ("R", "K"),
    "bad": ({"K": 22},),
    "values": {"trailing": range(1)},
}
TILES = {"sizes": {"R": 12, "K": 24}, "empty": ("R", "K"), "bad": ({"K": 22}, {"R": 14})}
UNFIT = tuple({"v": v, "R": 2 * v} for v in (0, 8, 48, 80, 96, 112, 192, 512))
UNFIT += tuple({"m": m, "K": 8 * m} for m in (1, 2, 3, 33, 64))
PLACES = {"trailing": range(1), "v": range(32, 33), "m": range(8, 9)}
VNM = {
    "sizes": {"R": 64, "K": 40, "v": 32, "m": 8},
    "empty": ("R", "K"),
    "bad": (*UNFIT, {"R": 48}),
    "values": PLACES,
}
WHOLE = VNM | {"sizes": {"R": 128, "K": 256, "v": 64, "m": 8}, "values": PLACES | {"v": range(64, 65)}}
ROWS = ("x dim 0 = 1",)
BOTH = (*ROWS, "mask dim 0 = 1")
ONE_KEY = ("key in a batch of 1",)
GATED = {"sizes": {"R": 24, "K": 32}, "empty": ("R", "K"), "values": {}}
GATES = {"gate": x(24, 32)}


def gated(backward: bool, R, K) -> Call:
    operands = {name: x(R, K) for name in ("gate", "up", *(("dz",) if backward else ()))}
    results = {name: x(R, K) for name in (("dgate", "dup") if backward else ("z",))}
    flags = {"gelu": 0, "transposed": 0} | ({"dz_transposed": 0} if backward else {})
    return Call(operands, results, flags)


def saved(T, f, n) -> Call:
    inside = packed(T, f) | {"dy2": x(T, f), "ranks": x(f, dtype="int32")}
    along = {
        f"{of}_{name}": array
        for of in ("y2", "dy1")
        for name, array in (packed(f, T) | {"dense": x(n, T)}).items()
    }
    return Call(inside, {"dy1": x(T, f // 2)} | along, {"relu": 0, "strided": 0})


def library(R, K, N) -> Call:
    operands = {"compressed": compressed(R, K), "dense": x(K, N), "bias": x(R)}
    flags = {"dense_k_last": 0, "out_packed_last": 0, "activation": 0, "algorithm": -1}
    return Call(operands, {"out": x(R, N), "workspace": x(16, dtype="uint8")}, flags)


def product(R, K, N) -> Call:
    flags = {"dense_k_last": 0, "out_packed_last": 0}
    return Call(packed(R, K) | {"dense": x(K, N)}, {"out": x(R, N)}, flags)


def vnm_product(R, K, v, m, N=20) -> Call:
    flags = {"v": v, "m": m, "dense_k_last": 0, "out_packed_last": 0}
    return Call(blocks(R, K, v, m) | {"dense": x(K, N)}, {"out": x(R, N)}, flags)


def sampled(R, K, v, m, D=20) -> Call:
    parts = blocks(R, K, v, m)
    values = {"values": parts.pop("values")}
    return Call({"a": x(R, D), "b": x(K, D)} | parts, values, {"v": v, "m": m})


def repacked(R, K, v, m) -> Call:
    """Of K features of R tokens."""
    along = {f"along_{name}": array for name, array in blocks(K, R, v, m).items()}
    return Call(blocks(R, K, v, m), along, {"v": v, "m": m, "strided": 0, "collected": 0})


def of_blocks(operands, results, **flags):
    """A call with x, mask and the parts of a packed array, as named."""

    def build(R, K, v, m) -> Call:
        parts = blocks(R, K, v, m) | {"x": x(R, K), "mask": x(R, K, dtype="bool")}
        chosen = [{name: parts[name] for name in names} for names in (operands, results)]
        return Call(*chosen, {"trailing": 0, "v": v, "m": m} | flags)

    return build


PARTS = ("values", "metadata", "columns")
CASES = {
    "s24_mask": Case(mapped("bool"), **GROUPS, legal=("x is float32",)),
    "s24_prune": Case(mapped(), **GROUPS),
    "s24_soft": Case(mapped(), **GROUPS),
    "s24_prune_check": Case(  # of each row, or of all
        lambda R, K: Call({"x": x(R, K)}, {"found": x(R, dtype="int32")}, {"trailing": 0}),
        **GROUPS,
        legal=("x is float32", "x is bool", "x dim 1 = 0", "found is a scalar"),
    ),
    "s24_mvue": Case(
        lambda R, K: Call(KEY | {"x": x(R, K)}, {"out": x(R, K)}, {"trailing": 0, "exact": 1}),
        **GROUPS,
        legal=ONE_KEY,
    ),
    "s24_transposable_mask": Case(
        lambda R, K: Call({"w": x(R, K)}, {"out": x(R, K, dtype="bool")}), **TILES, legal=("w is float32",)
    ),
    "s24_double_prune": Case(lambda R, K: Call({"w": x(R, K)}, {"out": x(R, K)}, {"first": 0}), **TILES),
    "s24_pack": Case(lambda R, K: Call({"x": x(R, K)}, packed(R, K), {"trailing": 0}), **GROUPS),
    "s24_pack_strided": Case(lambda R, K: Call({"x": x(K, R)}, packed(R, K)), **GROUPS),
    "s24_squared_relu_pack": Case(lambda R, K: Call({"x": x(R, K)}, packed(R, K), {"trailing": 0}), **GROUPS),
    "s24_squared_relu_pack_both": Case(
        lambda R, K: Call({"x": x(R, K)}, two_ways(R, K)), **TILES, wrong=one_compressed({}, x="bfloat16")
    ),
    "s24_pack_counted": Case(
        lambda T, f: Call(
            {"x": x(T, f)}, packed(T, f) | {"counts": x(T // 128, f, dtype="uint8")}, {"squared": 1}
        ),
        sizes={"T": 256, "f": 24},
        empty=("T", "f"),
        bad=({"T": 192}, {"f": 20}),
    ),
    "s24_pack_masked": Case(
        lambda R, K: Call({"x": x(R, K), "mask": x(R, K, dtype="bool")}, packed(R, K), {"trailing": 0}),
        **GROUPS,
        legal=BOTH,
    ),
    "s24_pack_masked_both": Case(
        lambda R, K: Call({"x": x(R, K), "mask": x(R, K, dtype="bool")}, two_ways(R, K)),
        **TILES,
        wrong=one_compressed({}, x="bfloat16", mask="bool"),
    ),
    "s24_transposable_pack": Case(
        lambda R, K: Call({"w": x(R, K)}, {"mask": x(R, K, dtype="bool")} | two_ways(R, K)),
        **TILES,
        wrong=one_compressed({"mask": x(64, 128, dtype="bool")}, w="bfloat16"),
    ),
    "s24_mvue_pack": Case(
        lambda R, K: Call(KEY | {"x": x(R, K)}, packed(R, K), {"trailing": 0, "exact": 1}),
        **GROUPS,
        legal=ONE_KEY,
    ),
    "s24_mvue_pack_strided": Case(
        lambda R, K: Call(KEY | {"x": x(K, R)}, packed(R, K), {"exact": 1}), **GROUPS
    ),
    "s24_gather": Case(
        lambda R, K: Call(
            {"x": x(R, K), "metadata": packed(R, K)["metadata"]}, {"values": x(R, K // 2)}, {"trailing": 0}
        ),
        **GROUPS,
        legal=(*ROWS, "metadata dim 0 = 1"),
    ),
    "s24_unpack": Case(
        lambda R, K: Call(packed(R, K), {"out": x(R, K)}, {"trailing": 0}),
        **GROUPS,
        legal=("values dim 0 = 1", "metadata dim 0 = 1"),
    ),
    "s24_matmul": Case(
        product,
        sizes={"R": 12, "K": 24, "N": 20},
        empty=("R", "K", "N"),
        bad=({"K": 22},),
        legal=("out is float32",),
    ),
    "s24_saved_backward": Case(
        saved,
        sizes={"T": 128, "f": 24, "n": 5},
        empty=("T", "f", "n"),
        bad=({"T": 66}, {"f": 22}),
        bad_on_cuda=({"T": 64}, {"f": 20}),
    ),
    "s24_features": Case(
        lambda count, n: Call(
            {"scores": x(count, dtype="int32")}, {"places": x(n, dtype="int32")}, {"bits": 4}
        ),
        sizes={"count": 40, "n": 12},
        empty=("n",),
        bad=({"count": 8},),
        values={"bits": range(32)},
        legal=("scores dim 0 + 1", *(f"places dim 0 {how}" for how in ("= 0", "= 1", "+ 1"))),
    ),
    "s24_gated": Case(
        lambda R, K: gated(False, R, K),
        **GATED,
        legal=("gate dim 0 = 1", "gate dim 1 = 1", "up dim 0 = 1", "up dim 1 = 1"),
    ),
    "s24_gated_backward": Case(
        lambda R, K: gated(True, R, K),
        **GATED,
        legal=tuple(f"{a} dim {d} = 1" for a in ("gate", "up", "dz") for d in (0, 1)),
    ),
    "s24_gated_backward_pack": Case(
        lambda R, K: dataclasses.replace(
            gated(True, R, K),
            operands={"gate_key": KEY["key"], "up_key": KEY["key"]} | gated(True, R, K).operands,
            results=gated(True, R, K).results | packed(K, R, "gate_") | packed(K, R, "up_"),
            attributes=gated(True, R, K).attributes | {"exact": 1},
        ),
        **GATED | {"bad": ({"R": 22},)},
    ),
    "s24_vnm_mask": Case(of_blocks(("x",), ("mask",), exact=0), **VNM, legal=("x is float32",)),
    "s24_vnm_pack": Case(of_blocks(("x",), PARTS, exact=0), **VNM),
    "s24_vnm_pack_masked": Case(of_blocks(("x", "mask"), PARTS), **VNM),
    "s24_vnm_gather": Case(of_blocks(("x", "metadata", "columns"), ("values",)), **VNM),
    "s24_vnm_unpack": Case(of_blocks(PARTS, ("x",)), **VNM),
    "s24_vnm_matmul": Case(vnm_product, **VNM, legal=("out is float32",)),
    "s24_vnm_sampled": Case(sampled, **VNM),
    "s24_vnm_squared_relu": Case(
        lambda R, K, v, m: Call({"x": x(R, K)}, blocks(R, K, v, m), {"v": v, "m": m}), **WHOLE
    ),
    "s24_vnm_repack": Case(repacked, **WHOLE | {"sizes": {"R": 128, "K": 512, "v": 64, "m": 8}}),
    "s24_cusparselt_compress": Case(
        lambda R, K: Call(packed(R, K), {"compressed": compressed(R, K)}),
        sizes={"R": 48, "K": 64},
        empty=("R", "K"),
        bad=({"K": 48},),
    ),
    "s24_cusparselt_matmul": Case(
        library,
        sizes={"R": 48, "K": 64, "N": 40},
        empty=("R", "K", "N"),
        bad=({"K": 48}, {"R": 20}),
        values={"activation": range(3), "algorithm": range(-1, 8)},
        legal=(
            "without bias",
            *(f"workspace {how}" for how in ("dim 0 + 1", "in a batch of 1", "in a batch of 2")),
        ),
    ),
}


def reshaped(shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "is a scalar", ()
    yield "in a batch of 1", (1, *shape)
    yield "in a batch of 2", (2, *shape)
    if len(shape) > 1:
        yield "without its first dimension", shape[1:]
    for i, n in enumerate(shape):
        for what, other in (("= 0", 0), ("= 1", 1), ("+ 1", n + 1)):
            if other != n:
                yield f"dim {i} {what}", (*shape[:i], other, *shape[i + 1 :])


def wrong_calls(case: Case) -> Iterator[tuple[str, Call]]:
    """What differs, and the call."""
    right = case.build(**case.sizes)
    for side in ("operands", "results"):
        arrays: dict[str, Array] = getattr(right, side)
        for name, (shape, dtype) in arrays.items():
            others = [(how, (other, dtype)) for how, other in reshaped(shape)]
            others += [(f"is {other}", (shape, other)) for other in DTYPES if other != dtype]
            for how, other in others:
                yield f"{name} {how}", dataclasses.replace(right, **{side: arrays | {name: other}})
        last = list(arrays)[-1]
        fewer = {name: array for name, array in arrays.items() if name != last}
        yield f"without {last}", dataclasses.replace(right, **{side: fewer})
        yield f"no {side}", dataclasses.replace(right, **{side: {}})
        yield f"more {side}", dataclasses.replace(right, **{side: arrays | {"another": arrays[last]}})
    given = right.attributes
    for name, value in given.items():
        fewer = {key: other for key, other in given.items() if key != name}
        yield f"without {name}", dataclasses.replace(right, attributes=fewer)
        for other in (float(value), "zero"):
            changed = dataclasses.replace(right, attributes=given | {name: other})
            yield f"{name} is a {type(other).__name__}", changed
        for number in NUMBERS:
            if number not in case.values.get(name, FLAG):
                yield f"{name}={number}", dataclasses.replace(right, attributes=given | {name: number})
    if given:  # where a target has none, XLA lets others pass
        yield "another attribute", dataclasses.replace(right, attributes=given | {"another": 0})
    yield from case.wrong.items()
    for sizes in case.bad:
        yield f"sizes {sizes}", with_sizes(case, sizes)


def with_sizes(case: Case, sizes: dict[str, int]) -> Call:
    sizes = case.sizes | sizes
    if sizes.get("v") == 0:  # one block of rows, whatever it is
        built = case.build(**sizes | {"v": sizes["R"] or 1})
        return dataclasses.replace(built, attributes=built.attributes | {"v": 0})
    return case.build(**sizes)


def right_calls(case: Case) -> Iterator[tuple[str, Call]]:
    yield "right", case.build(**case.sizes)
    for n in range(1, len(case.empty) + 1):
        for names in itertools.combinations(case.empty, n):
            yield f"empty {' and '.join(names)}", case.build(**case.sizes | dict.fromkeys(names, 0))


def calls(target: str, on_cuda: bool) -> list[tuple[str, bool, Call]]:
    """What the call is, whether it is right, and the call."""
    case = CASES[target]
    found = [(what, True, call) for what, call in right_calls(case)]
    found += [(f"sizes {sizes}", not on_cuda, with_sizes(case, sizes)) for sizes in case.bad_on_cuda]
    return found + [(what, what in case.legal, call) for what, call in wrong_calls(case)]


class ArrayOfC(ctypes.Structure):
    """As tests/native/relay.cc declares it."""

    _fields_ = [
        ("dtype", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class AttributeOfC(ctypes.Structure):
    """As tests/native/relay.cc declares it."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("whole", ctypes.c_int64),
        ("fraction", ctypes.POINTER(ctypes.c_double)),
        ("text", ctypes.c_char_p),
    ]


def allocated(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros at a multiple of 64, as XLA allocates arrays."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    n = math.prod(shape) * kind.itemsize
    memory = np.zeros(n + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + n].view(kind).reshape(shape)


def array_of_c(array: np.ndarray) -> ArrayOfC:
    dims = (ctypes.c_int64 * array.ndim)(*array.shape)
    return ArrayOfC(array.dtype.name.encode(), array.ctypes.data, array.ndim, dims)


def attribute_of_c(name: str, value: object) -> AttributeOfC:
    match value:
        case str():
            return AttributeOfC(name.encode(), text=value.encode())
        case float():
            return AttributeOfC(name.encode(), fraction=ctypes.pointer(ctypes.c_double(value)))
    return AttributeOfC(name.encode(), whole=value)


def make(relay: ctypes.CDLL, handler: int, call: Call) -> str:
    """Makes a call while XLA is in the relay: what it raises, or an empty string."""
    rng = np.random.default_rng(0)
    arrays = [allocated(*array) for array in (*call.operands.values(), *call.results.values())]
    for operand in arrays[: len(call.operands)]:
        operand[...] = rng.integers(0, 2, operand.shape)
    attributes = [attribute_of_c(*item) for item in sorted(call.attributes.items())]
    message = relay.call_handler(
        ctypes.c_void_p(handler),
        (ArrayOfC * len(arrays))(*map(array_of_c, arrays)),
        ctypes.c_int64(len(call.operands)),
        ctypes.c_int64(len(call.results)),
        (AttributeOfC * len(attributes))(*attributes),
        ctypes.c_int64(len(attributes)),
    )
    return message.decode()


def inside(relay: ctypes.CDLL, work: Callable[[], None]) -> None:
    """Runs `work` while XLA calls the relay."""
    called = ctypes.CFUNCTYPE(None)(work)
    relay.set_inside(called)
    jax.ffi.register_ffi_target("relay", jax.ffi.pycapsule(relay.relay), platform="cpu")
    jax.block_until_ready(jax.ffi.ffi_call("relay", (), has_side_effect=True)())


def targets_of_the_cpu() -> dict[str, int]:
    """The address of the handler of each target."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    targets = native.module("cpu").registrations()
    return {name: address(capsule, b"xla._CUSTOM_CALL_TARGET") for name, capsule in targets.items()}


def targets_of(library: str, fake_cusparselt: str) -> dict[str, int]:
    """The same of a library of CUDA's handlers."""
    loaded, targets = ctypes.CDLL(library), {}
    loaded.open_cusparselt.restype = ctypes.c_bool
    assert loaded.open_cusparselt(fake_cusparselt.encode())

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
    def add(name, handler):
        targets[name.decode()] = handler

    loaded.each_target(add)
    return targets


def main(first: int, relay: str, *libraries: str) -> None:
    """The calls from number `first` on: of the CPU's targets, or of a library's."""
    loaded = ctypes.CDLL(relay)
    loaded.call_handler.restype = ctypes.c_char_p
    targets = targets_of(*libraries) if libraries else targets_of_the_cpu()
    missing = [name for name in targets if name not in CASES]
    print(json.dumps({"targets": sorted(targets), "missing": missing}), flush=True)
    known = sorted(set(targets) & set(CASES))
    every = [(target, *one) for target in known for one in calls(target, bool(libraries))]

    def all_calls():
        for number, (target, what, right, call) in enumerate(every[first:], first + 1):
            print(json.dumps({"begun": number, "target": target, "call": what, "right": right}), flush=True)
            print(json.dumps({"raised": make(loaded, targets[target], call)}), flush=True)
        print(json.dumps({"all": len(every)}), flush=True)

    inside(loaded, all_calls)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
