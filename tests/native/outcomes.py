"""What became of the calls of `hostile.py`, made in processes of their own, so that a crash is a failure with
its name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# What XLA says before a handler is reached.
BINDING = re.compile(r"Wrong number of (arguments|results|attributes)|Wrong (attribute|scalar data) type")


def outcomes(*libraries) -> dict:
    """What every call did, in as many processes as it takes to come to the end. The libraries are the caller
    and, for other targets than the CPU's, those that have them."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    made, head, number = [], None, 0
    while True:
        command = [sys.executable, "-m", "tests.native.hostile", str(number), *map(str, libraries)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, done.stderr
        head = lines[0]
        for line in lines[1:]:
            if "begun" in line:
                made.append(line | {"raised": None})
                number = line["begun"]
            elif "raised" in line:
                made[-1]["raised"] = line["raised"]
        if "all" in lines[-1]:
            assert len(made) == lines[-1]["all"]
            return head | {"calls": made}
        assert made and made[-1]["raised"] is None, done.stderr
        made[-1]["status"] = done.returncode


def check(found: dict, least: int) -> None:
    """Every call did what it must. least: number of calls, as CONTRIBUTING.md says it."""
    assert not found["missing"], f"targets that no case of tests/ops calls: {found['missing']}"
    wrong = []
    for call in found["calls"]:
        name, raised = f"{call['target']}: {call['call']}", call["raised"]
        if raised is None:
            wrong.append(f"{name}: the process ended with {call['status']}")
        elif call["right"] and raised:
            wrong.append(f"{name}: refused: {raised}")
        elif not call["right"] and not raised:
            wrong.append(f"{name}: accepted")
        elif raised and call["target"] not in raised and not BINDING.search(raised):
            wrong.append(f"{name}: names nothing: {raised}")
    counted = len(found["calls"])
    print(f"{counted} calls of {len(found['targets'])} targets")
    assert counted > least
    assert not wrong, f"{len(wrong)} of {counted} calls\n" + "\n".join(wrong)
