"""CUDA kernels as they are written, run thread by thread on a CPU: the bits of the shared core's definitions,
and exact products. Indices, layouts, synchronisation points and fragments are those of the device."""

import pytest

from tests.native.conftest import Counts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(counts, kernels) -> Counts:
    return counts("kernel_test.cc", *kernels)


@pytest.fixture(scope="module")
def tiles(counts, kernels) -> Counts:
    return counts("transposable_test.cc", *kernels)


@pytest.fixture(scope="module")
def metadata(counts, kernels) -> Counts:
    return counts("compressed24_test.cc", *kernels)


@pytest.mark.parametrize(
    ("operation", "cases"),
    [(" packs 2:4", 8), ("unpacks 2:4", 8), ("gathers 2:4", 8), ("groupwise", 12), (" checked", 15)],
)
def test_kernels_of_groups_give_the_defined_bits(report, operation, cases):
    """Estimates too: groups that share a call of Philox draw the words that are theirs."""
    found = report.of(operation)
    assert len(found) == cases
    found.check()


@pytest.mark.parametrize("operation", ["transposable", "pruned", "both ways"])
def test_kernels_of_tiles_give_the_defined_bits(tiles, operation):
    found = tiles.of(operation)
    assert len(found) == 3
    found.check()


@pytest.mark.parametrize("operation", ["packs", "masks", "unpacks", "masked packs", "searched"])
def test_vnm_kernels_give_the_defined_bits(report, operation):
    found = report.of(":2:", operation)
    assert len(found) >= 6
    found.check()


def test_blocks_of_squares(report):
    found = report.of(":2:", "squares")
    assert len(found) == 2
    found.check()


def test_blocks_packed_again_along_the_other_axis(report):
    """The bits of unpacking, moving and packing."""
    found = report.of("again")
    assert len(found) == 10
    found.check()


@pytest.mark.parametrize("width", ["16 bit", "8 bit"])
def test_metadata_for_cusparselt(metadata, width):
    found = metadata.of(f"metadata {width}")
    assert len(found) == 4
    found.check()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(d, ":2:") for d in ("bfloat16", "float16", "float32")] + [(d, " 2:4") for d in ("bfloat16", "float32")],
)
def test_products_are_exact_in_every_layout(report, dtype, kind):
    found = report.of(dtype, kind, "product")
    assert found
    found.check()


def test_gated_activations_in_either_order_of_memory(counts, kernels):
    """Values against float64; packed gradients have the bits that packing them by itself gives."""
    found = counts("gated_test.cc", *kernels)
    assert len(found) == 8
    found.check()


def test_what_follows_from_saved_activations(counts, kernels):
    """How they are packed and counted; dY1 along features, both cut along tokens, their dense features, and
    how these are chosen, also of scores that should not be there."""
    found = counts("saved_test.cc", *kernels)
    assert len(found) == 16
    found.check()
