"""Mistakes that a user can correct."""


class UserError(ValueError):
    """A mistake that the user can correct: shown as one message, without a traceback."""


def require(condition: bool, message: str):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)
