"""Without the extra `train` the commands say what to install."""

import subprocess
import sys

import pytest

HIDE = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else find(name, *rest)
sys.argv = ["launch", "configs/demo.py:fst"]
runpy.run_module("experiments.launch", run_name="__main__")
"""


@pytest.mark.parametrize("package", ["grain", "tyro"])
def test_a_missing_package_names_itself_and_its_extra(package):
    done = subprocess.run(
        [sys.executable, "-c", HIDE.format(package=package)], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"experiments needs {package}" in done.stderr and "pip install -e '.[train]'" in done.stderr
