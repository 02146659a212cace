"""What every command shares: a mistake of the user, or a disk that is full, ends in one message and status 2,
not in a traceback."""

import ctypes
import functools
import importlib.metadata
import os
import signal
import sys

from experiments.errors import REFUSALS, UserError

STOPPED = os.EX_TEMPFAIL  # 75: a signal stopped the run, which was saved; call it again with --resume


def command(main):
    """Decorate a main function: print a UserError, or what the system refuses, as `error: ...` on stderr and
    exit with status 2; be silent where the reader of stdout has left, as `head` does."""

    @functools.wraps(main)
    def run(argv=None):
        keep_memory()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see experiments/__init__.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            try:
                return main(argv)
            finally:
                sys.stdout.flush()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except BrokenPipeError:
            # Python flushes once more at its end, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            print(f"error: {refusal(error)}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return run


def refusal(error: OSError) -> str:
    """What the system refused, in words, with the file if it is known."""
    return error.strerror + (f": {error.filename}" if error.filename else "")


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
