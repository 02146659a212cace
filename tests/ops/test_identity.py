"""Both implementations give the same bits for every operation, on any bit pattern, whatever the shape."""

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import mvue_pack24
from tests.ops.cases import ALONG_AN_AXIS, CASES, KEY
from tests.ops.data import adversarial, assert_same_bits, device, from_words

pytestmark = pytest.mark.optimised

SELECTIONS = [case for case in CASES if not case.sums]


@pytest.mark.parametrize("case", SELECTIONS, ids=str)
def test_same_bits_on_adversarial_data(case, dtype):
    if case.name == "mvue24-approximate" and jax.default_backend() == "gpu":
        pytest.skip("XLA's division is not correctly rounded on a GPU; tests/gpu compares with the CPU")
    # 3 x 100 x 420: long enough for several threads, with odd numbers of groups in both axes.
    x = device(adversarial((300, 420), dtype).reshape(3, 100, 420))
    assert_same_bits(case.call(x, "ffi"), case.call(x, "reference"))


# (shape, axis): one group; a contiguous axis with an odd number of groups; inner sizes 17, 70 and 129 around
# the widths of vectors; leading dimensions.
PLACES = [((4,), 0), ((5, 12), 1), ((2, 20, 17), 1), ((3, 68, 70), -2), ((2, 12, 3, 43), 1)]


@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
@pytest.mark.parametrize("name", ALONG_AN_AXIS)
def test_same_bits_along_any_axis(name, shape, axis):
    x = device(adversarial(shape, "bfloat16" if len(shape) % 2 else "float32", seed=1))
    op = ALONG_AN_AXIS[name]
    assert_same_bits(op(x, axis, implementation="ffi"), op(x, axis, implementation="reference"))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ALONG_AN_AXIS)
def test_same_bits_across_tiles_of_finite_data(name, axis, dtype, rng):
    """Several tiles in both axes, of which only a few blocks take the way of NaN and infinity."""
    x = rng.normal(size=(72, 1100))
    x[5, 700], x[70, 3] = np.nan, -np.inf
    op = ALONG_AN_AXIS[name]
    for data in (x[:, :520], x):
        given = device(data, dtype)
        assert_same_bits(op(given, axis, implementation="ffi"), op(given, axis, implementation="reference"))


@pytest.mark.parametrize("name", ["prune24", "pack24", "squared_relu24"])
def test_same_bits_of_bfloat16_subnormals_in_few_elements(name, rng):
    """XLA:CPU compiles a dozen elements to scalar code, where bfloat16 tends to pass through float32."""
    for shape in [(3, 4), (1, 12), (2, 8)]:
        x = device(from_words(rng.integers(0, 128, shape), "bfloat16"))
        op = ALONG_AN_AXIS[name]
        assert_same_bits(op(x, 1, implementation="ffi"), op(x, 1, implementation="reference"))


@pytest.mark.parametrize("exact", [True, False])
def test_fused_estimator_packs_what_the_estimator_gives(dtype, exact):
    for shape, axis in [((40, 36), -1), ((40, 35), 0), ((2, 12, 3, 43), 1)]:
        x = device(adversarial(shape, dtype, seed=2))
        fused = mvue_pack24(KEY, x, axis, exact, implementation="ffi")
        parts = s24.pack24(s24.mvue24(KEY, x, axis, exact, implementation="ffi"), axis, implementation="ffi")
        assert_same_bits(fused, parts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_repeated_calls_give_the_same_bits(case):
    x = case.data((20, 24), seed=4)
    for implementation in ("ffi", "reference") if case.sums else ("ffi",):
        first = case.call(x, implementation)
        for _ in range(3):
            assert_same_bits(case.call(x, implementation), first)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jit_changes_nothing(case):
    x = case.data((20, 24), seed=4)
    expected = case.call(x, "ffi")
    assert_same_bits(jax.jit(lambda x: case.call(x, "ffi"))(x), expected)
    if not case.sums:  # which product runs by default is measured
        assert_same_bits(case.call(x, None), expected)
        assert_same_bits(jax.jit(lambda x: case.call(x, None))(x), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_empty_arrays_give_empty_results(case, implementation):
    for shape in [(0, 8), (3, 4, 0)]:
        result = case.call(device(np.zeros(shape), "float32"), implementation)
        model = jax.ShapeDtypeStruct([n or 8 for n in shape], "float32")
        full = jax.eval_shape(lambda x: case.call(x, implementation), model)
        assert jax.tree.structure(result) == jax.tree.structure(full)
        for leaf, model in zip(jax.tree.leaves(result), jax.tree.leaves(full), strict=True):
            assert leaf.dtype == model.dtype
            assert leaf.ndim == model.ndim
            assert not np.asarray(leaf).any()


def test_numpy_arrays_and_lists_are_arrays(implementation):
    x = np.array([[3.0, -1.0, 2.0, 0.5]], np.float32)
    for given in (x, x.tolist()):
        assert_same_bits(s24.prune24(given, 1, implementation=implementation), np.float32([[3, 0, 2, 0]]))
