"""Runs side by side."""

from pathlib import Path

from experiments.analysis import comparison
from experiments.analysis.runs import Run
from experiments.config import Config


def test_the_report_explains_its_rows():
    """All but those that say what they are: the method, its steps, bits in place of nats."""
    rows = [row.split(" (")[0] for row in comparison.summary(Run("a", Path(), Config(), {}))]
    explained = [line for line in comparison.NOTES.splitlines() if line.startswith("- **")]
    names = [line.split("**")[1] for line in explained]
    plain = ("method", "steps", "bits per byte")
    lacking = [row for row in rows if not row.startswith((*names, *plain))]
    assert len(names) >= 10 and not lacking
