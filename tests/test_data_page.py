"""The names of docs/data.md; tests/test_pages.py reads its commands."""

import re
from pathlib import Path

from experiments import config as configs
from experiments.data import tokens

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/data.md").read_text()


def test_every_dataset_and_option_is_there():
    assert all(f"| `{name}`" in PAGE for name in configs.components("data"))
    options = {
        f"--data.{field}"
        for kind in configs.components("data").values()
        for field in kind.__dataclass_fields__
    }
    assert options - {"--data.batch"} == set(re.findall(r"--data\.[a-z]+", PAGE))
    assert f"{tokens.SAMPLE_BYTES // 10**6} MB of the training text" in PAGE
