"""Programs for CUDA lower on a machine without one, and programs for CPU call the kernels."""

import jax
import jax.numpy as jnp
import pytest

import jax_sparse24 as s24
from tests.ops.cases import CASES

X = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)


def lowered(f, *platforms) -> str:
    return jax.jit(f).trace(X).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_gets_the_reference(case):
    text = lowered(lambda x: case.call(x, None), "cuda")
    assert "s24_" not in text
    assert "custom_call" not in text


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_calls_the_kernel(case):
    text = lowered(lambda x: case.call(x, "ffi" if case.sums else None), "cpu")
    assert f"@{case.target}(" in text


def test_the_reference_calls_no_kernel():
    for case in CASES:
        assert "s24_" not in lowered(lambda x, case=case: case.call(x, "reference"), "cpu")


def test_one_program_for_both_platforms():
    text = lowered(lambda x: s24.prune24(x, 1), "cpu", "cuda")
    assert "@s24_prune(" in text
    assert "platform_index" in text


def test_gradients_lower_for_cuda():
    def loss(x):
        y = s24.matmul(s24.pack24(s24.soft24(x, 1), 1), x.T)
        return jnp.sum(s24.squared_relu24(y).todense()) + jnp.sum(s24.double_prune24(x, 0) * x)

    assert "s24_" not in lowered(jax.grad(loss), "cuda")
