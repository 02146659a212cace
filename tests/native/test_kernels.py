"""CUDA kernels as they are written, run thread by thread on a CPU: the bits of the shared core's definitions,
and exact products. Indices, layouts, synchronisation points and fragments are those of the device."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report(counts) -> dict[str, int]:
    return counts("kernel_test.cc", f"-I{HERE / 'emulated'}")


def of(report, *words) -> dict[str, int]:
    return {name: wrong for name, wrong in report.items() if all(word in name for word in words)}


@pytest.mark.parametrize("operation", ["packs", "masks", "unpacks", "masked packs", "searched"])
def test_vnm_kernels_give_the_defined_bits(report, operation):
    found = of(report, operation)
    assert len(found) >= 6
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(d, ":2:") for d in ("bfloat16", "float16", "float32")] + [(d, " 2:4") for d in ("bfloat16", "float32")],
)
def test_products_are_exact_in_every_layout(report, dtype, kind):
    found = of(report, dtype, kind, "product")
    assert found
    assert not any(found.values()), found
