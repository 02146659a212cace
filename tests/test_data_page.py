"""The commands and names of docs/data.md."""

import re
import shlex
from pathlib import Path

import pytest

from experiments import config as configs
from experiments import launch
from experiments.data import tokens

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/data.md").read_text()
COMMANDS = re.findall(r"^    python -m experiments\.launch (.+)$", PAGE, re.M)


def test_there_are_commands():
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_the_launcher_understands_it(command):
    arguments = shlex.split(command)
    parsed = launch.parse(arguments).config
    if "--data.tokenizer" in arguments:
        assert parsed.data.tokenizer == arguments[arguments.index("--data.tokenizer") + 1]


def test_the_other_commands_have_these_options():
    for line in re.findall(r"^    python -m experiments\.(export|import_model) (.+)$", PAGE, re.M):
        options = set(re.findall(r"--[a-z]+", line[1]))
        assert options <= set(re.findall(r"\"(--[a-z]+)\"", (ROOT / f"experiments/{line[0]}.py").read_text()))
    assert "import_model exported" in PAGE


def test_every_dataset_and_option_is_there():
    assert all(f"| `{name}`" in PAGE for name in configs.components("data"))
    options = {
        f"--data.{field}"
        for kind in configs.components("data").values()
        for field in kind.__dataclass_fields__
    }
    assert options - {"--data.batch"} == set(re.findall(r"--data\.[a-z]+", PAGE))
    assert f"{tokens.SAMPLE_BYTES // 10**6} MB of the training text" in PAGE
