"""What tests/engine/eight_devices checks on eight devices, a test each; all run in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import made_once
from tests.engine.eight_devices.checks import CHECKS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    def run(folder):
        warned = ["-W", "error:Loop:UserWarning"]  # such as one of layers that the loss does not call
        command = [sys.executable, *warned, "-m", "tests.engine.eight_devices"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        options = {"cwd": Path(__file__).parents[2], "env": environment, "timeout": 600}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stderr
        (folder / "outcomes.json").write_text(done.stdout.splitlines()[-1])

    return json.loads((made_once(tmp_path_factory, "eight_devices", run) / "outcomes.json").read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_on_eight_devices(outcomes, check):
    assert not outcomes[check], outcomes[check]
