"""What every command shares."""

import ctypes
import os
import subprocess
import sys

import pytest

from experiments.config import REPOSITORY

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.mark.skipif(not GLIBC, reason="mallopt is glibc's")
def test_commands_keep_freed_memory():
    """Few page faults in a program whose temporaries, 80 MB, fit in no heap of a thread."""
    code = """if True:
        import resource
        from experiments.cli import keep_memory
        keep_memory()
        import jax, jax.numpy as jnp
        run = jax.jit(lambda a, b, c: a @ b @ c)
        args = jnp.ones((5000, 8)), jnp.ones((8, 4096)), jnp.ones((4096, 1))
        for call in range(30):
            if call == 10:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            run(*args).block_until_ready()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    options = {"cwd": REPOSITORY, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
    done = subprocess.run([sys.executable, "-c", code], **options, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200_000, "20 calls need 20000 pages each; now and then a heap grows"
