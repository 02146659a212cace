"""What every command shares."""

import ctypes
import errno
import os
import signal
import subprocess
import sys

import pytest

from experiments.cli import command
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


def run(main, *arguments):
    """Run a main function as a command does; its exit status."""
    try:
        return command(main)(list(arguments))
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left on device: runs/x/metrics.jsonl"),
        (errno.EROFS, "Read-only file system: runs/x/metrics.jsonl"),
        (errno.EACCES, "Permission denied: runs/x/metrics.jsonl"),
        (errno.EEXIST, "File exists: runs/x/metrics.jsonl"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(capsys, code, words):
    def main(argv):
        raise OSError(code, os.strerror(code), "runs/x/metrics.jsonl")

    assert run(main) == 2
    assert capsys.readouterr().err == f"error: {words}\n"


def test_a_mistake_of_this_program_keeps_its_traceback():
    def main(argv):
        raise ConnectionResetError("a service that answers wrongly")

    with pytest.raises(ConnectionResetError):
        command(main)([])


def test_ctrl_c_while_a_command_is_imported_prints_no_traceback(tmp_path, capfd):
    """Here by a module that is imported. Then, and only then, it ends the process by itself."""
    (tmp_path / "tyro.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)}
    command_line = [sys.executable, "-m", "experiments.launch", "--help"]
    done = subprocess.run(command_line, cwd=REPOSITORY, env=environment, timeout=120)
    assert done.returncode == -signal.SIGINT and not any(capfd.readouterr())
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        assert run(lambda argv: signal.getsignal(signal.SIGINT)) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["experiments.ablate --list", "experiments.launch --help", "experiments.evaluate --help"]
)
def test_a_reader_that_leaves_breaks_nothing(arguments):
    """As `| head` does, here before the first line."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments.split()],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) in (0, 128 + signal.SIGPIPE)  # 0: argparse ignores it
    assert errors == ""
