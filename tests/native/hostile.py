"""Calls that FFI targets must refuse, made without the Python layer that checks before.

What is wrong is derived from right calls, those of `derived.py` and of cuSPARSELt's targets here. Run as a
program, it makes the calls of one platform and prints a line of JSON before and after each, so that the last
one names what ended the process."""

import ctypes
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_sparse24.dispatch import native
from jax_sparse24.dispatch.generations import CAPABILITIES
from tests.native.derived import CAPABILITY, Array, Call, Template, free, multiples, templates
from tests.ops.library import ORDERS
from tests.ops.sizes import Sized

DTYPES = ("float32", "int32", "uint8", "bool")
NUMBERS = (-(2**63), -1, 2, 2**32 + 1)


# ---- what follows from no operation: calls of cuSPARSELt, and what it multiplies beside what it does not


class Library(Template):
    """Calls of a target as `sized.make` gives them."""

    def at(self, **sizes) -> Call:
        return self.sized.make(**self.sized.sizes | sizes)

    @classmethod
    def of(cls, target: str, sized: Sized) -> "Library":
        return cls(target, sized, sized.make(**sized.sizes), {})


def compressed(R: int, K: int) -> Array:
    name = CAPABILITIES[CAPABILITY].layout.name
    return (R + ORDERS[name].rows_behind(R), K // 2), "bfloat16"


def compressing(R: int, K: int) -> Call:
    packed = {"values": ((R, K // 2), "bfloat16"), "metadata": ((R, -(-K // 8)), "uint8")}
    return Call(packed, {"compressed": compressed(R, K)})


def multiplying(R: int, K: int, N: int) -> Call:
    dense, bias = ((K, N), "bfloat16"), ((R,), "bfloat16")
    flags = {"dense_k_last": 0, "out_packed_last": 0, "activation": 0, "algorithm": -1}
    operands = {"compressed": compressed(R, K), "dense": dense, "bias": bias}
    return Call(operands, {"out": ((R, N), "bfloat16"), "workspace": ((16,), "uint8")}, flags)


LIBRARY = (
    Library.of("s24_cusparselt_compress", Sized((), compressing, {"R": 48, "K": 64}, {"K": 32})),
    Library.of(
        "s24_cusparselt_matmul",
        Sized(
            *((), multiplying, {"R": 48, "K": 64, "N": 40}, {"R": 8, "K": 32}),
            legal=(
                *("without bias", "activation=2", "algorithm=2"),
                *(f"workspace {how}" for how in ("dim 0 + 1", "in a batch of 1", "in a batch of 2")),
            ),
        ),
    ),
)


def of_both_forms(target: str, platform: str) -> dict[str, Call]:
    """Of a target that packs matrices both ways: one of the results in compressed matrices of cuSPARSELt,
    which are a batch of two, where the other is one batch of all rows."""
    plain = next(t for t in templates(platform) if t.target == target and _in_bfloat16(t.base))
    names = [name for name in plain.base.results if name != "result 0" or target != "s24_transposable_pack"]
    right = plain.at(R=64, K=128)
    two = {
        side: {name: ((2, *shape), dtype) for name, (shape, dtype) in getattr(right, side).items()}
        for side in ("operands", "results")
    }
    return {
        f"{name} alone in compressed matrices": dataclasses.replace(
            right, operands=two["operands"], results=two["results"] | {name: ((2, *shape), dtype)}
        )
        for name, (shape, dtype) in (
            (name, compressed(*size)) for name, size in zip(names[::2], ((64, 128), (128, 64)), strict=True)
        )
    }


BOTH_FORMS = ("s24_squared_relu_pack_both", "s24_pack_masked_both", "s24_transposable_pack")


# ---- what is derived


def _in_bfloat16(call: Call) -> bool:
    floats = {dtype for _, dtype in (*call.operands.values(), *call.results.values()) if "float" in dtype}
    return floats <= {"bfloat16"}


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


def changed(right: Call, legal: tuple[str, ...]) -> Iterator[tuple[str, bool, Call]]:
    """What differs from a right call, whether that is said to be right, too, and the call."""
    for side in ("operands", "results"):
        arrays: dict[str, Array] = getattr(right, side)
        for name, (shape, dtype) in arrays.items():
            others = [(how, (other, dtype)) for how, other in reshaped(shape)]
            others += [(f"is {other}", (shape, other)) for other in DTYPES if other != dtype]
            for how, other in others:
                what = f"{name} {how}"
                yield what, what in legal, dataclasses.replace(right, **{side: arrays | {name: other}})
        last = list(arrays)[-1]
        fewer = {name: array for name, array in arrays.items() if name != last}
        what = f"without {last}"
        yield what, what in legal, dataclasses.replace(right, **{side: fewer})
        yield f"no {side}", False, dataclasses.replace(right, **{side: {}})
        yield f"more {side}", False, dataclasses.replace(right, **{side: arrays | {"another": arrays[last]}})
    given = right.attributes
    for name, value in given.items():
        fewer = {key: other for key, other in given.items() if key != name}
        yield f"without {name}", False, dataclasses.replace(right, attributes=fewer)
        for other in (float(value), "zero"):
            call = dataclasses.replace(right, attributes=given | {name: other})
            yield f"{name} is a {type(other).__name__}", False, call
        for number in NUMBERS:
            if number != value:
                what = f"{name}={number}"
                yield what, what in legal, dataclasses.replace(right, attributes=given | {name: number})
    if given:  # where a target has none, XLA lets others pass
        yield "another attribute", False, dataclasses.replace(right, attributes=given | {"another": 0})


def misplaced(right: Call, platform: str) -> Iterator[tuple[str, bool, Call]]:
    """One of the arrays that have elements begins at its second one, which CUDA's targets refuse; as in
    `changed`."""
    arrays = [*right.operands.items(), *right.results.items()]
    for number, (name, (shape, _)) in enumerate(arrays):
        if 0 not in shape:
            what = f"{name} begins at its second element"
            yield what, platform == "cpu", dataclasses.replace(right, misplaced=number)


def turned(right: Call) -> Iterator[tuple[str, bool, Call]]:
    """The transpose of a result whose rows are collected, which no product writes; as in `changed`."""
    given = right.attributes
    if given.get("collected") and "out_packed_last" in given:
        results = {name: (shape[::-1], dtype) for name, (shape, dtype) in right.results.items()}
        call = dataclasses.replace(right, results=results, attributes=given | {"out_packed_last": 1})
        yield "collected and transposed", False, call


def right_calls(template: Template, platform: str) -> Iterator[tuple[str, Call]]:
    """At the sizes, at those that a changed array would belong to, and empty ones."""
    sized, multiple = template.sized, multiples(template.sized, platform)
    others = {
        name: [0, *(n for n in (1, base + 1) if multiple[name] == 1)] if name in free(sized) else []
        for name, base in sized.sizes.items()
    }
    others |= {name: [sized.sizes[name] + multiple[name]] for name in sized.least}
    places = [[(name, n) for n in (base, *others[name])] for name, base in sized.sizes.items()]
    for chosen in itertools.product(*places):
        sizes = {name: n for name, n in chosen if n != sized.sizes[name]}
        yield f"sizes {sizes}" if sizes else "right", template.at(**sizes)


def misfits(template: Template, platform: str) -> Iterator[tuple[str, Call]]:
    """At sizes that are no multiples of what they should be, that are too small, or forbidden."""
    sized, multiple = template.sized, multiples(template.sized, platform)
    found = [(name, n) for name, all_of in sized.forbidden.items() for n in all_of]
    found += [(name, least - multiple[name]) for name, least in sized.least.items()]
    for name, base in sized.sizes.items():
        part = multiple[name] // 2
        found += [(name, n) for n in (base - part, base + 1) if n % multiple[name]]
        if sized.forbidden and name in ("blocks", "groups"):
            found.append((name, base + Fraction(1, 2)))
    for name, n in found:
        yield f"{name}={n}", template.at(**{name: n})


def calls(target: str, platform: str) -> list[tuple[str, bool, Call]]:
    """What the call is, whether it is right, and the call; no call twice."""
    of_all = [t for t in (*templates(platform), *LIBRARY) if t.target == target]
    found: dict[tuple, tuple[str, bool, Call]] = {}
    for template in of_all:
        for what, call in right_calls(template, platform):
            found.setdefault(call.signature, (what, True, call))
    for template in templates(platform, more=True):
        if template.target == target:
            found.setdefault(template.base.signature, ("right", True, template.base))
    wrong = []
    for n, template in enumerate(t for t in of_all if _in_bfloat16(t.base)):
        legal = template.sized.legal
        wrong += [(f"{n}: {what}", right, call) for what, right, call in changed(template.base, legal)]
        wrong += [(f"{n}: {what}", False, call) for what, call in misfits(template, platform)]
        wrong += [(f"{n}: {what}", right, call) for what, right, call in misplaced(template.base, platform)]
        wrong += [(f"{n}: {what}", right, call) for what, right, call in turned(template.base)]
    if target in BOTH_FORMS:
        wrong += [(what, False, call) for what, call in of_both_forms(target, platform).items()]
    for what, right, call in wrong:
        found.setdefault(call.signature, (what, right, call))
    return list(found.values())


class ArrayOfC(ctypes.Structure):
    """As tests/native/calls.h declares it."""

    _fields_ = [
        ("dtype", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class AttributeOfC(ctypes.Structure):
    """As tests/native/calls.h declares it."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("whole", ctypes.c_int64),
        ("fraction", ctypes.POINTER(ctypes.c_double)),
        ("text", ctypes.c_char_p),
    ]


def allocated(shape: tuple[int, ...], dtype: str, behind: int = 0) -> np.ndarray:
    """Zeros at a multiple of 128, as XLA allocates arrays, or so many bytes behind one."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    n = math.prod(shape) * kind.itemsize
    memory = np.zeros(128 + behind + n, np.uint8)
    start = -memory.ctypes.data % 128 + behind
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


def make(caller: ctypes.CDLL, handler: int, arrays: list[np.ndarray], operands: int, attributes: dict) -> str:
    """Calls a handler: what it raises, or an empty string. The results are the last of the arrays."""
    given = [attribute_of_c(*item) for item in sorted(attributes.items())]
    message = caller.call_handler(
        ctypes.c_void_p(handler),
        (ArrayOfC * len(arrays))(*map(array_of_c, arrays)),
        ctypes.c_int64(operands),
        ctypes.c_int64(len(arrays) - operands),
        (AttributeOfC * len(given))(*given),
        ctypes.c_int64(len(given)),
        ctypes.c_int64(4),
    )
    return message.decode()


def make_alone(caller: ctypes.CDLL, handler: int, call: Call) -> str:
    """Makes a call on arrays of zeros and ones."""
    rng = np.random.default_rng(0)
    arrays = [allocated(*array) for array in (*call.operands.values(), *call.results.values())]
    if call.misplaced is not None:
        one = arrays[call.misplaced]
        arrays[call.misplaced] = allocated(one.shape, one.dtype.name, one.itemsize)
    for operand in arrays[: len(call.operands)]:
        operand[...] = rng.integers(0, 2, operand.shape)
    return make(caller, handler, arrays, len(call.operands), call.attributes)


def opened(caller: str) -> ctypes.CDLL:
    """The library of calls.cc. It keeps the lock of Python, since emulated kernels run one at a time."""
    loaded = ctypes.PyDLL(caller)
    loaded.call_handler.restype = ctypes.c_char_p
    return loaded


def targets_of_the_cpu() -> dict[str, int]:
    """The address of the handler of each target."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    targets = native.module("cpu").registrations()
    return {name: address(capsule, b"xla._CUSTOM_CALL_TARGET") for name, capsule in targets.items()}


def targets_of(
    library: Path, fake_cusparselt: Path, capability: str = CAPABILITY, ptx: str = ""
) -> dict[str, int]:
    """The same of a library of CUDA's handlers, for a device of a compute capability. ptx: the architecture
    of the code of its kernels, if it is another one."""
    loaded, targets = ctypes.CDLL(str(library)), {}
    loaded.emulate(*(int(version.replace(".", "")) for version in (capability, ptx or capability)))
    loaded.open_cusparselt.restype = ctypes.c_bool
    assert loaded.open_cusparselt(str(fake_cusparselt).encode())

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
    def add(name, handler):
        targets[name.decode()] = handler

    loaded.each_target(add)
    return targets


def launched(library: Path) -> set[str]:
    """The types of the parameters of kernels that were launched since the last call of this."""
    loaded, found = ctypes.CDLL(str(library)), set()
    loaded.each_launched(ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda types: found.add(types.decode())))
    return found


def main(first: int, caller: str, *libraries: str) -> None:
    """The calls from number `first` on: of the CPU's targets, or of a library's."""
    loaded, platform = opened(caller), "cuda" if libraries else "cpu"
    targets = targets_of(*map(Path, libraries)) if libraries else targets_of_the_cpu()
    every = [(target, *one) for target in sorted(targets) for one in calls(target, platform)]
    missing = sorted(set(targets) - {target for target, *_ in every})
    print(json.dumps({"targets": sorted(targets), "missing": missing}), flush=True)
    for number, (target, what, right, call) in enumerate(every[first:], first + 1):
        print(json.dumps({"begun": number, "target": target, "call": what, "right": right}), flush=True)
        print(json.dumps({"raised": make_alone(loaded, targets[target], call)}), flush=True)
    print(json.dumps({"all": len(every)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
