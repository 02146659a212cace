"""CUDA kernels as they are written, run thread by thread on a CPU: the bits of the shared core's definitions,
and exact products. Indices, layouts, synchronisation points and fragments are those of the device."""

import re

import pytest

from tests.native.conftest import HERE

PROGRAMS = sorted(path.name for path in HERE.glob("*_test.cc") if "cuda::" in path.read_text())
# What a program reports after the name of a case, and the names of cases, as far as they are written out.
CHECKS = re.compile(r'report\(\w+ \+ "([^"]+)"')
CASES = re.compile(r'_case(?:<.*?>)?\("([^"]+)"')


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
