"""CUDA kernels as they are written, run thread by thread on a CPU: in every shared case the bits of the CPU's
kernels or of the reference, those of the shared core's definitions, and exact products. Indices, layouts,
synchronisation points and fragments are those of the device."""

import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from tests.native.conftest import HERE
from tests.native.derived import random_sizes
from tests.native.emulation import at_once
from tests.native.hostile import targets_of, targets_of_the_cpu
from tests.ops.cases import IDENTICAL
from tests.ops.data import adversarial, assert_same_bits
from tests.ops.sizes import SIZED, Sized

PROGRAMS = sorted(path.name for path in HERE.glob("*_test.cc") if "cuda::" in path.read_text())
# What a program reports after the name of a case, and the names of cases, as far as they are written out.
CHECKS = re.compile(r'report\(\w+ \+ "([^"]+)"')
CASES = re.compile(r'_case(?:<.*?>)?\("([^"]+)"')
MOST = 2**18  # elements of an array that is not made at random
PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("source", PROGRAMS)
def test_kernels_give_the_defined_results(counts, kernels, source):
    """Every check that the program has was made in some case, every case gave a result, and none is wrong.

    Bits are those of the definitions; products and gated activations are compared with float64."""
    found = counts(source, *kernels)
    text = (HERE / source).read_text()
    assert found
    assert not [check for check in CHECKS.findall(text) if not any(name.endswith(check) for name in found)]
    assert not [case for case in CASES.findall(text) if not any(name.startswith(case) for name in found)]
    found.check()


def array_for(sized: Sized, like: jax.ShapeDtypeStruct, rng: np.random.Generator) -> np.ndarray:
    """Any bits, or small whole numbers."""
    if like.dtype == bool:
        return rng.random(like.shape) < 0.5
    if like.dtype == np.int32:
        return rng.integers(0, 16, like.shape, np.int32)
    if sized.sums:
        return rng.integers(-4, 5, like.shape).astype(like.dtype)
    return adversarial(like.shape, str(like.dtype), int(rng.integers(1 << 30)))


def calls() -> Iterator[tuple[str, Callable, tuple]]:
    """What it is, a function of arrays and an implementation, and arrays: the shared cases on arrays that are
    not large, and on arrays of other sizes."""
    for case in IDENTICAL:
        for shape, dtype in case.places(gpu=True):
            if np.prod(shape) <= MOST:
                yield f"{case} {shape} {dtype}", case.call, case.given(shape, dtype)
    for n, sized in enumerate(SIZED):
        if sized.only == "cpu" or sized.rounds:
            continue
        rng = np.random.default_rng(n)
        places = [(dtype, random_sizes(sized, "cuda", rng, min(sized.most, MOST))) for dtype in sized.dtypes]
        for dtype, sizes in (*sized.places, *places):
            for call, arrays in sized.make(dtype, **sizes):
                given = tuple(array_for(sized, array, rng) for array in arrays)
                yield f"{sized.targets} {sizes} {dtype}", call, given


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_give_the_bits_of_other_platforms(part, caller, cuda_targets, fake_cusparselt):
    made = list(calls())[part::PARTS]
    with at_once("cuda", caller, targets_of(cuda_targets, fake_cusparselt)):
        got = [jax.device_get(call(*arrays, "ffi")) for _, call, arrays in made]
    wrong = []
    with at_once("cpu", caller, targets_of_the_cpu()):
        for (name, call, arrays), found in zip(made, got, strict=True):
            try:
                assert_same_bits(found, call(*arrays, None))
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
    assert made and not wrong, "\n".join(wrong)
