"""Products without memory for their scratch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.conftest import compile_to

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import jax, jax.numpy as jnp
import jax_sparse24 as s24
from jax_sparse24.ops.sampled import sampled_matmul

x = jnp.ones((64, 64), jnp.bfloat16)
products = {
    "s24_matmul": lambda: s24.matmul(s24.pack24(x, -1), x, implementation="ffi"),
    "s24_vnm_matmul": lambda: s24.matmul(s24.pack_vnm(x, 32, 8), x, implementation="ffi"),
    "s24_vnm_sampled": lambda: sampled_matmul(x, x, s24.pack_vnm(x, 32, 8), implementation="ffi"),
}
for target, product in products.items():
    try:
        jax.block_until_ready(product())
        print("no error")
    except jax.errors.JaxRuntimeError as error:
        print(f"{target}: no memory for 2097152 bytes of scratch" in str(error))
"""


def test_products_say_that_there_is_no_memory(compiler, tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs LD_PRELOAD")
    library = compile_to(
        tmp_path / "none.so", *compiler, "-shared", "-fPIC", ROOT / "tests/native/no_scratch.cc", "-ldl"
    )
    environment = os.environ | {"LD_PRELOAD": str(library), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 3
