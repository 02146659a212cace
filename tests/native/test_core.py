"""The shared core compiled for the CPU: what CUDA kernels decide."""

import pytest

from tests.ops.oracle import philox4x32


@pytest.fixture(scope="module")
def report(counts) -> dict[str, int]:
    """Wrong cases by check, as core_test.cc counts them; random words by draw and group."""
    return counts("core_test.cc", "-O1", "-Werror")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "what",
    [
        "largest",
        "largest of two",
        "masked",
        "squared",
        "drawn exactly",
        "drawn in sequence",
        "drawn by definition",
        "unpacked",
        "tiles",
    ],
)
def test_packed_groups_are_what_masks_keep(report, dtype, what):
    assert report[f"{dtype} {what}"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("what", ["softened", "softened by definition", "rounded otherwise"])
def test_soft_thresholds_of_two_groups_at_once(report, dtype, what):
    """Right wherever they say so, which is on all common groups. Differences are rounded once, not twice."""
    assert report[f"{dtype} {what}"] == 0


@pytest.mark.parametrize("draw", [0, 1])
def test_a_group_takes_its_word_of_four(report, draw):
    """As in the definition: word g % 4 of the call for g // 4."""
    for group in range(9):
        words = philox4x32((0x12345678, 0x9ABCDEF0), (group // 4, 0, draw, 0))
        assert report[f"word {draw} {group}"] == words[group % 4]
