"""How cuSPARSELt's plans are made, kept and used: with a library in its place that watches. What the real one
needs of a plan that is under way, only a GPU can show; here, none is taken away."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent.parent.parent / "ffi/cuda/cusparselt.cc"


def test_plans(counts, fake_cusparselt):
    found = counts(
        "cusparselt_test.cc",
        f'-DS24_FAKE_LIBRARY="{fake_cusparselt}"',
        *("-pthread", str(SOURCE), "-ldl"),
    )
    assert len(found) == 9
    assert not any(found.values()), found
