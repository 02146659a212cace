"""Several processes of one run: who goes first, and where all wait."""

import contextlib

import jax
from jax.experimental import multihost_utils


def wait_for_all(name: str):
    """Return when every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def first_process_first(name: str):
    """Process 0 does the block before the others do, so that they find the files that it made."""
    if jax.process_index() != 0:
        wait_for_all(name)
    yield
    if jax.process_index() == 0:
        wait_for_all(name)
