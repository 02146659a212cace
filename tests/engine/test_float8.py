"""What 8-bit products do behind the product, and how large or small their operands may be."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.engine.float8 import unscaled

LARGE, SMALL = 448 / 2.0**-100, 448 / 2.0**120  # scales of the smallest and the largest operands
SHAPES = {"tensor": ((1, 1), (1, 1)), "row": ((32, 1), (1, 48))}


@pytest.mark.optimised
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "middle", [(2.0**66, 2.0**66), (LARGE, SMALL), (SMALL, LARGE), (SMALL, 448.0), (448.0, SMALL)]
)
def test_scales_are_divided_out_without_overflow(rng, shapes, middle):
    """Where the result is a normal number it is right to a few roundings, whatever lies between."""
    out = jnp.asarray(rng.uniform(1, 2, (32, 48)) * 2e5, jnp.bfloat16)
    scales = [
        jnp.asarray(mid * rng.uniform(0.5, 1, shape), jnp.float32)
        for mid, shape in zip(middle, shapes, strict=True)
    ]
    got = jax.jit(unscaled)(out, *scales)
    want = np.float64(out) / np.float64(scales[0]) / np.float64(scales[1])
    assert np.finfo(np.float32).tiny < want.min() and want.max() < np.finfo(np.float32).max
    np.testing.assert_allclose(np.float64(got), want, rtol=2.0**-21)


def test_infinite_and_missing_operands_stay(rng):
    """The scale of an operand with Inf is 0, and that of one with NaN is NaN."""
    out = jnp.asarray([[1.0, -1.0, 0.0]])
    got = unscaled(out, jnp.asarray([[0.0]]), jnp.asarray([[2.0]]))
    np.testing.assert_array_equal(got, [[np.inf, -np.inf, np.nan]])
    assert jnp.isnan(unscaled(out, jnp.asarray([[np.nan]]), jnp.asarray([[2.0]]))).all()


@pytest.mark.optimised
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_scales_are_divided_out_in_one_pass(shapes):
    """The result alone has its size in the compiled program."""
    arguments = [jax.ShapeDtypeStruct((32, 48), jnp.bfloat16)]
    arguments += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.jit(lambda *a: unscaled(*a).astype(jnp.bfloat16)).lower(*arguments).compile().as_text()
    entry = program.split("ENTRY")[1]
    made = re.findall(r"= \w+\[32,48\]\S* (\w+)\(", entry)
    assert sorted(made) == ["fusion", "parameter"], entry


@pytest.mark.optimised
@pytest.mark.parametrize("sizes", [(1e-18, 1e-18), (1e-25, 1e-11), (1e35, 1e-28), (1e-28, 1e35)], ids=str)
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_layer_of_small_operands(documented_cusparselt, rng, scales, sizes):
    """A product in 8 bits is linear in its operands: their size is that of the result, and nothing else."""
    jax.clear_caches()  # operations that were traced without the library
    method = s24.methods.FST(fp8=scales, mvue=None)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 64), (64, 96)))
    run = jax.jit(lambda x, w: s24.sparse_dot(x, w, method, method.init(w), implementation="cusparselt"))
    want = run(x, w)
    # By powers of two, which leave the digits of operands as they are.
    a, b = (2.0 ** np.round(np.log2(size)) for size in sizes)
    got = np.float64(run(x * a, w * b)) / a / b
    assert documented_cusparselt and np.abs(want).min() > 0
    large = np.abs(want) > 2.0**-3  # the others are subnormal
    np.testing.assert_allclose(got[large], np.float64(want)[large], rtol=2.0**-20)
