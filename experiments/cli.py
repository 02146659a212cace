"""What every command shares: a mistake of the user ends in one message and status 2, not in a traceback."""

import functools
import sys

from experiments.config import UserError


def command(main):
    """Decorate a main function: print a UserError as `error: ...` on stderr and exit with status 2."""

    @functools.wraps(main)
    def run(argv=None):
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return run
