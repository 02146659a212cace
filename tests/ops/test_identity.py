"""All implementations give the same bits for every operation, on any bit pattern, whatever the shape: the
reference, which defines them, the kernels of the CPU and, where there is a GPU, its kernels. This is the one
place that says so of small arrays; `cases.py` says of which."""

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import native
from jax_sparse24.ops.mvue import mvue_pack24
from tests.ops import cases
from tests.ops.cases import ALONG_AN_AXIS, CASES, KEY
from tests.ops.data import adversarial, assert_same_bits, device, from_words

GPU = jax.default_backend() == "gpu"


def on(kind, f, *args):
    """`f` of arrays on the first device of a kind, as one program; each platform runs its own kernels."""
    where = jax.devices(kind)[0]
    with jax.default_device(where):
        return jax.device_get(jax.jit(f)(*jax.device_put(args, where)))


def assert_identical(call, *arrays):
    """The reference on a CPU defines the bits."""
    if not GPU:
        arrays = jax.tree.map(device, arrays)
        assert_same_bits(call(*arrays, "ffi"), call(*arrays, "reference"))
        return
    want = on("cpu", lambda *a: call(*a, "reference"), *arrays)
    for kind in ("cpu", "cuda"):
        assert_same_bits(on(kind, lambda *a: call(*a, None), *arrays), want)


def places():
    for case in cases.IDENTICAL:
        for shape, dtype in case.places(GPU):
            first = case.shapes[:1] == (shape,)
            # XLA keeps sums of bfloat16 in float32 where it likes, so it is the one that users' XLA compiles.
            by_users = first and dtype in ("bfloat16", *case.dtypes[1:])[:1]
            slow = not (first and dtype == case.dtypes[0]) or np.prod(shape) > 2**20
            marks = [pytest.mark.slow] * bool(slow) + [pytest.mark.optimised] * by_users
            yield pytest.param(case, shape, dtype, marks=marks, id=f"{case}-{shape}-{dtype}")


@pytest.mark.parametrize(("case", "shape", "dtype"), list(places()))
def test_same_bits(case, shape, dtype):
    assert_identical(case.call, *case.given(shape, dtype))


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="about the kernels of the CPU; test_lowering.py has those of CUDA")
def test_every_target_of_the_cpu_is_called_by_a_case():
    found = cases.called("cpu", lambda f, *arrays: jax.eval_shape(f, *arrays))
    assert not set(native.module("cpu").registrations()) - found


@pytest.mark.optimised
@pytest.mark.slow_where(name="mvue24")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ALONG_AN_AXIS)
def test_same_bits_across_tiles_of_finite_data(name, axis, dtype, rng):
    """Several tiles in both axes, of which only a few blocks take the way of NaN and infinity."""
    x = rng.normal(size=(72, 1100))
    x[5, 700], x[70, 3] = np.nan, -np.inf
    given = np.asarray(device(x, dtype))
    assert_identical(lambda x, impl: ALONG_AN_AXIS[name](x, axis, implementation=impl), given)


@pytest.mark.optimised
@pytest.mark.parametrize("name", ["prune24", "pack24", "squared_relu24"])
def test_same_bits_of_bfloat16_subnormals_in_few_elements(name, rng):
    """XLA:CPU compiles a dozen elements to scalar code, where bfloat16 tends to pass through float32."""
    for shape in [(3, 4), (1, 12), (2, 8)]:
        x = from_words(rng.integers(0, 128, shape), "bfloat16")
        assert_identical(lambda x, impl: ALONG_AN_AXIS[name](x, 1, implementation=impl), x)


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
