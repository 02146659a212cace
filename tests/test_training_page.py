"""docs/training.md runs as it stands, and what it promises holds."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "training.md").read_text()


@pytest.mark.slow
def test_the_page_trains_by_each_method():
    scope = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(code, scope)
    for name in ("losses", "activation_losses", "venom_losses", "tree_losses"):
        values = scope[name]
        assert sum(values[-2:]) < 0.95 * sum(values[:2]), name


def test_the_transformer_is_short_and_is_not_ours():
    code = re.findall(r"```python\n(.*?)```", PAGE, re.S)[0]
    assert len(code.split("def loss")[0].strip().splitlines()) <= 60
    assert "experiments" not in code


def test_files_and_sections_that_the_page_names_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (Path(__file__).parent.parent / "docs" / target).exists(), target
