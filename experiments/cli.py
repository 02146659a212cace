"""What every command shares: a mistake of the user ends in one message and status 2, not in a traceback."""

import ctypes
import functools
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
    """Keep freed memory in this process where the C library is glibc.

    XLA allocates large buffers anew in every call on a CPU. Given back and mapped again they cost a page
    fault per 4 kB: a tenth of the time of a feed-forward block, dense or sparse."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(parameter, 2**31 - 1)
