"""What every command shares: a mistake of the user ends in one message and status 2, not in a traceback."""

import ctypes
import functools
import importlib.metadata
import os
import sys

from experiments.config import UserError


def command(main):
    """Decorate a main function: print a UserError as `error: ...` on stderr and exit with status 2."""

    @functools.wraps(main)
    def run(argv=None):
        keep_memory()
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return run


def keep_memory() -> None:
    """Keep freed memory in this process where the C library is glibc. Before JAX starts its threads.

    XLA allocates large buffers anew in every call on a CPU. Given back and mapped again they cost a page
    fault per 4 kB: a tenth of the time of a feed-forward block and more, dense or sparse. Threads have heaps
    of at most 64 MB, beyond which malloc maps whatever its thresholds are: on a CPU all share the main one.
    (Not with an accelerator: many threads compile for it, and the memory of the host takes little time.)"""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(parameter, 2**31 - 1)
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not importlib.metadata.entry_points(group="jax_plugins"):
        mallopt(-8, 1)  # M_ARENA_MAX
