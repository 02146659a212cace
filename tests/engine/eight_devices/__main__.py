"""Runs the checks that arguments name; without any all of them.

The last line that is printed is a JSON object of their tracebacks, "" where all is well. `--write` writes the
table of collectives into docs/scaling.md; `--all-meshes` compares every method on every mesh with one device,
which takes minutes and is no test."""

import gc
import json
import os
import sys
import time
import traceback

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

from tests import contexts
from tests.engine.eight_devices import communication, every_method
from tests.engine.eight_devices.checks import CHECKS


def main(names) -> None:
    gc.set_threshold(50_000, 20, 100)  # as in tests/conftest.py
    contexts.share()
    if names == ["--write"]:
        communication.PAGE.write_text(communication.written(communication.PAGE.read_text()))
        return
    if names == ["--all-meshes"]:
        print("\n".join(every_method.all_meshes()))
        return
    outcomes = {}
    for name in names or CHECKS:
        begun = time.process_time()
        try:
            CHECKS[name]()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        print(f"{time.process_time() - begun:5.1f} s  {name}", file=sys.stderr)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
