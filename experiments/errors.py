"""Mistakes that a user can correct, and what the system refuses."""

import errno
import importlib.util

# What the system refuses for no fault of the program.
REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EMFILE),
    errno.ENFILE,
}


class UserError(ValueError):
    """A mistake that the user can correct: shown as one message, without a traceback."""


def installed(*packages: str) -> bool:
    """Whether all of these packages can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in packages)


def require(condition: bool, message: str):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)
