"""Which tests `make test-fast` leaves out, and the limit that `make test` sets for all others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import subprocess, sys, time
import pytest

BURN = "import time\\nwhile time.process_time() < 0.8: pass"


def burn():
    end = time.process_time() + 0.8
    while time.process_time() < end:
        pass


def test_cheap():
    time.sleep(0.8)


def test_costly():
    burn()


def test_costly_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)


@pytest.mark.slow
def test_marked():
    burn()


@pytest.mark.slow_where(kind=("large", None))
@pytest.mark.parametrize("kind", ["large", None, "small"])
def test_kinds(kind):
    if kind != "small":
        burn()
"""


@pytest.fixture
def outcomes(tmp_path):
    """Runs a suite under the conftest of this one: what is printed, and the outcome of every test."""
    (tmp_path / "test_suite.py").write_text(SUITE)

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-v", "--rootdir", str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("test_suite.py::")]
        return done.stdout, {line[0].partition("::")[2]: line[1] for line in lines}

    return run


MARKED = ("test_marked", "test_kinds[large]", "test_kinds[None]")
UNMARKED = ("test_cheap", "test_costly", "test_costly_child", "test_kinds[small]")


@pytest.mark.slow
def test_only_tests_marked_slow_may_be_costly(outcomes):
    """A limit counts the CPU seconds of a test and of its child processes, not the time that it waits."""
    printed, found = outcomes("--limit", "0.5")
    costly = {"test_costly", "test_costly_child"}
    assert found == {name: "FAILED" if name in costly else "PASSED" for name in (*MARKED, *UNMARKED)}
    assert "s of CPU time and is not marked slow, the limit being 0.5 s" in printed


@pytest.mark.slow
def test_the_fast_tier_leaves_out_what_is_marked_slow(outcomes):
    """There is no limit unless one is given."""
    assert outcomes("-m", "not slow")[1] == dict.fromkeys(UNMARKED, "PASSED")
