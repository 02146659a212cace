"""Lowering without a new context of MLIR for each program."""

import threading

from jax._src.interpreters import mlir

PROGRAMS = 64  # in one context: what it remembers of them makes many more slower again


def share() -> None:
    """Programs that a thread lowers one after the other share a context.

    jax makes one for each, and loads all dialects into it, which takes a fifth of the time of tests of small
    programs. Where jax has no such function any more, nothing is changed."""
    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    own = threading.local()  # a context is not made for several threads

    def context():
        if getattr(own, "left", 0) <= 0:
            own.shared, own.left = make(), PROGRAMS
        own.left -= 1
        return own.shared

    mlir.make_ir_context = context
