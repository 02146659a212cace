"""Lowering without a new context of MLIR for each program."""

from jax._src.interpreters import mlir

PROGRAMS = 64  # in one context: what it remembers of them makes many more slower again


def share() -> None:
    """Programs that are lowered one after the other share a context. jax makes one for each, and loads all
    dialects into it, which takes a fifth of the time of tests of small programs. Where jax has no such
    function any more, nothing is changed."""
    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    shared, left = None, 0

    def context():
        nonlocal shared, left
        if left <= 0:
            shared, left = make(), PROGRAMS
        left -= 1
        return shared

    mlir.make_ir_context = context
