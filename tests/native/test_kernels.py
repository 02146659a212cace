"""CUDA kernels as they are written, run thread by thread on a CPU: in every shared case the bits of the CPU's
kernels or of the reference, those of the shared core's definitions, and exact products. Indices, layouts,
synchronisation points and fragments are those of the device."""

import functools
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch.generations import GENERATIONS
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.matmul_pointwise import matmul_slope, matmul_squared_relu
from jax_sparse24.ops.reference.slope import activation_gradient
from jax_sparse24.ops.sampled import SAMPLED_MATMUL
from tests.conftest import compile_plainly
from tests.native.conftest import HERE
from tests.native.derived import random_sizes, templates_of
from tests.native.emulation import at_once
from tests.native.hostile import launched, targets_of, targets_of_the_cpu
from tests.ops import library, not_finite
from tests.ops.cases import COMPRESSED, IDENTICAL
from tests.ops.data import adversarial, assert_same_bits, device
from tests.ops.sizes import SIZED, Sized

PROGRAMS = sorted(path.name for path in HERE.glob("*_test.cc") if "cuda::" in path.read_text())
# What a program reports after the name of a case, and the names of cases, as far as they are written out.
CHECKS = re.compile(r'report\(\w+ \+ "([^"]+)"')
CASES = re.compile(r'_case(?:<.*?>)?\("([^"]+)"')
MOST = 2**18  # elements of an array that is not made at random
SMALL = 2**15  # of one that is aligned no better than XLA promises
# Kernels of products for whole tiles, by the types of their parameters: Hopper's have a tile, others do not.
TILE = re.compile(r"Tiles<.*?Shape<(\d+), (\d+)")
NO_TILE = re.compile(r"P = [{<]s24::MatmulVnmArgs[}>]")
OF_BLOCKS = "s24_vnm_matmul"  # in the name of a call
AT_ENTRIES = "s24_vnm_sampled"
POINTWISE = ("s24_matmul_squared_relu", "s24_matmul_slope")
ON_HOPPER = "s24_matmul_compressed24"
Made = tuple[str, Callable, tuple]  # what a call is, a function of arrays and an implementation, and arrays
# A GPU of each generation for whose cuSPARSELt kernels write metadata.
WITH_LAYOUTS = [row.capabilities[0] for row in GENERATIONS if row.layout]


@pytest.mark.slow
@pytest.mark.parametrize("source", PROGRAMS)
def test_kernels_give_the_defined_results(counts, kernels, source):
    """Every check that the program has was made in some case, every case gave a result, and none is wrong.

    Bits are those of the definitions; products and gated activations are compared with float64."""
    found = counts(source, *kernels)
    text = (HERE / source).read_text()
    assert found
    assert not [check for check in CHECKS.findall(text) if not any(name.endswith(check) for name in found)]
    assert not [case for case in CASES.findall(text) if not any(name.startswith(case) for name in found)]
    found.check()


def array_for(sized: Sized, like: jax.ShapeDtypeStruct, rng: np.random.Generator) -> np.ndarray:
    """Any bits, or small whole numbers."""
    if like.dtype == bool:
        return rng.random(like.shape) < 0.5
    if like.dtype == np.int32:
        return rng.integers(0, 16, like.shape, np.int32)
    if sized.sums:
        return rng.integers(-4, 5, like.shape).astype(like.dtype)
    return adversarial(like.shape, str(like.dtype), int(rng.integers(1 << 30)))


def _calls() -> Iterator[Made]:
    """The shared cases on arrays that are not large, the first shape in all dtypes and others in one, and on
    arrays of other sizes."""
    for case in IDENTICAL:
        shapes = dict.fromkeys(shape for shape, _ in case.places(gpu=True))
        for n, shape in enumerate(shape for shape in shapes if np.prod(shape) <= MOST):
            for dtype in case.dtypes if n == 0 else (case.dtypes[n % len(case.dtypes)],):
                yield f"{case} {shape} {dtype}", case.call, case.given(shape, dtype)
    for n, sized in enumerate(SIZED):
        if sized.only == "cpu" or sized.rounds:
            continue
        own, rng = templates_of(sized, "cuda"), np.random.default_rng(n)
        places = [(dtype, random_sizes(own, "cuda", rng, min(sized.most, MOST))) for dtype in sized.dtypes]
        for dtype, sizes in (*sized.places, *places):
            for call, arrays in (*sized.make(dtype, **sizes), *sized.more(dtype, **sizes)):
                given = tuple(array_for(sized, array, rng) for array in arrays)
                yield f"{sized.targets} {sizes} {dtype}", call, given


@functools.cache
def calls() -> list[Made]:
    return list(_calls())


def _small_calls() -> Iterator[Made]:
    """As `_calls`, one place of each case: a small one, most often large enough for wide accesses."""
    for n, case in enumerate(IDENTICAL):
        small = [shape for shape, _ in case.places(gpu=True) if np.prod(shape) <= SMALL]
        if small:
            shape, dtype = max(small, key=np.prod), case.dtypes[n % len(case.dtypes)]
            yield f"{case} {shape} {dtype}", case.call, case.given(shape, dtype)
    for n, sized in enumerate(SIZED):
        if sized.only != "cpu" and not sized.rounds:
            rng = np.random.default_rng(n)
            for dtype in sized.dtypes:
                for call, arrays in sized.make(dtype, **sized.sizes):
                    given = tuple(array_for(sized, array, rng) for array in arrays)
                    yield f"{sized.targets} {sized.sizes} {dtype}", call, given


def results_of(made: list[Made], implementation: str | None) -> list:
    """`device_put`, since `jnp.asarray` of an array of NumPy compiles a program for its shape."""
    return [jax.device_get(call(*jax.device_put(arrays), implementation)) for _, call, arrays in made]


def by_the_cpu(made: list[Made], caller, behind: int = 0) -> list:
    with at_once("cpu", caller, targets_of_the_cpu(), behind=behind):
        return results_of(made, None)


def compare(
    made: list[Made], caller, cuda: dict[str, int], behind=(0, 0), expected: list | None = None
) -> None:
    """The calls by kernels of CUDA and by those of the CPU, bit for bit. behind: of both, see `at_once`.
    expected: what `by_the_cpu` gave, if it was asked before."""
    with at_once("cuda", caller, cuda, behind=behind[0]):
        got = results_of(made, "ffi")
    expected = by_the_cpu(made, caller, behind[1]) if expected is None else expected
    wrong = []
    for (name, _, _), found, want in zip(made, got, expected, strict=True):
        try:
            assert_same_bits(found, want)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert made and not wrong, "\n".join(wrong)


@pytest.fixture
def moved_with_all_bits():
    """For processors without instructions for bfloat16, where a transposition that LLVM does not optimise
    makes signalling NaN quiet."""
    compile_plainly(False)  # the next test may do so again
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("moved_with_all_bits")
def test_kernels_give_the_bits_of_other_platforms(caller, cuda_targets, fake_cusparselt):
    """All but the products of blocks and those at entries, which the next tests compare."""
    made = [call for call in calls() if OF_BLOCKS not in call[0] and AT_ENTRIES not in call[0]]
    compare(made, caller, targets_of(cuda_targets, fake_cusparselt))


@pytest.fixture(scope="module")
def products_of_blocks(caller) -> tuple[list[Made], list]:
    """The calls, and what the CPU's kernels give for them, whatever GPU they are compared with. Every
    third of the hundreds launches all the kernels that they launch together."""
    made = [call for call in calls() if OF_BLOCKS in call[0]][::3]
    return made, by_the_cpu(made, caller)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "tiles"), [("8.0", set()), ("9.0", {("128", "256"), ("64", "512"), ("64", "256")})]
)
def test_products_of_blocks(capability, tiles, products_of_blocks, caller, cuda_targets, fake_cusparselt):
    """On Hopper whole tiles have kernels of their own: of 128 rows, and of 64 rows by 512 or 256 columns."""
    made, expected = products_of_blocks
    launched(cuda_targets)
    compare(made, caller, targets_of(cuda_targets, fake_cusparselt, capability), expected=expected)
    ran = "\n".join(launched(cuda_targets))
    assert set(TILE.findall(ran)) == tiles
    assert bool(NO_TILE.search(ran)) == (not tiles)


@pytest.mark.slow
def test_products_at_entries(caller, cuda_targets, fake_cusparselt):
    """Tiles of 128 rows, and of 64 by 512 columns."""
    made = [call for call in calls() if AT_ENTRIES in call[0]]
    launched(cuda_targets)
    compare(made, caller, targets_of(cuda_targets, fake_cusparselt, "9.0"))
    assert set(TILE.findall("\n".join(launched(cuda_targets)))) >= {("128", "256"), ("64", "512")}


@pytest.mark.slow
@pytest.mark.parametrize("v", [64, 128])
def test_products_at_entries_of_any_bytes(v, caller, cuda_targets, fake_cusparselt):
    """Columns beyond M count as the last one, nibbles are any, places and operands may have a batch of their
    own, and what no row keeps, or no block, leaves no trace where it is not finite."""
    m, groups, depth, rng = 8, 160, 128, np.random.default_rng(v)

    def at(seed):
        given, parts = np.random.default_rng(seed), ((2 * v, groups // 2), (2, groups, 4))
        return [given.integers(0, 256, shape, np.uint8) for shape in parts]

    def call(a, b, metadata, columns, implementation):
        options = {"v": v, "m": m, "implementation": implementation}
        return SAMPLED_MATMUL(a, b, metadata, columns, **options)

    a, b = (rng.integers(-4, 5, (rows, depth)).astype("bfloat16") for rows in (2 * v, groups * m))
    b[5], b[m * groups - 1] = np.nan, np.inf
    made = [("any bytes", call, (a, b, *at(0)))]
    for axes in ((None, None, 0, 0), (0, None, None, None), (None, 0, None, 0)):
        given = zip((a, b, *at(1)), axes, strict=True)
        stacked = [np.stack([x, x[::-1]]) if axis == 0 else x for x, axis in given]

        def mapped(*arrays, axes=axes):
            *arrays, implementation = arrays
            return jax.vmap(functools.partial(call, implementation=implementation), axes)(*arrays)

        made.append((f"mapped {axes}", mapped, tuple(stacked)))
    launched(cuda_targets)
    compare(made, caller, targets_of(cuda_targets, fake_cusparselt, "9.0"))
    ran = TILE.findall("\n".join(launched(cuda_targets)))
    assert set(ran) == {("128", "256") if v == 128 else ("64", "512")}


@pytest.mark.slow
@pytest.mark.parametrize("target", [*POINTWISE, ON_HOPPER])
@pytest.mark.parametrize(("capability", "runs"), [("8.0", False), ("9.0", True)])
def test_products_and_what_follows_them(target, capability, runs, caller, cuda_targets, fake_cusparselt):
    """On Hopper one kernel multiplies and squares, or multiplies by a slope; others take two steps."""
    made = [call for call in calls() if target in call[0]][::3]
    targets = targets_of(cuda_targets, fake_cusparselt, capability)
    launched(cuda_targets)
    with at_once("cuda", caller, targets, capability=capability) as ran:
        for _, call, arrays in made:
            call(*arrays, "ffi")
    assert ran >= ({target, "s24_cusparselt_compress"} if runs else {"s24_matmul"})
    assert ("s24_matmul" in ran) != runs
    assert any("start_clusters" in types for types in launched(cuda_targets)) == runs


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["squared_relu", "relu"])
def test_slopes_of_any_numbers(activation, caller, cuda_targets, fake_cusparselt):
    """In dY2 numbers so small that its product with a slope is subnormal, zeros of both signs, Inf and NaN,
    beside each other, too; in what was saved any. W2 is such that dY2 is four times dY3, twice."""
    rng = np.random.default_rng(2)
    numbers = rng.integers(0, 1 << 16, (264, 128), np.uint16).view("bfloat16")
    finite = np.where(np.isfinite(numbers.astype(np.float32)), numbers, np.zeros_like(numbers))
    w = np.tile(4 * np.eye(128, dtype=np.float32), (2, 1)).astype("bfloat16")
    saved = rng.integers(0, 1 << 16, (264, 256), np.uint16).view("bfloat16")
    saved[::2] = np.abs(rng.normal(size=(132, 256))).astype("bfloat16")
    scales = rng.choice(
        np.float32([0, 1, 2.0**-100, 2.0**125, np.nan]), (264, 1), p=[0.3, 0.3, 0.2, 0.1, 0.1]
    )
    mixed = (scales * rng.normal(size=(264, 128)).astype(np.float32)).astype("bfloat16")
    each = rng.choice(np.float32([0, 1, 2.0**-62, 2.0**-66, 2.0**-100]), (264, 128))
    each = (each * rng.normal(size=(264, 128)).astype(np.float32)).astype("bfloat16")
    for dy3 in (finite, mixed, each, np.full_like(finite, -0.0)):
        targets = targets_of(cuda_targets, fake_cusparselt, "9.0")
        with at_once("cuda", caller, targets, capability="9.0") as ran:
            got = matmul_slope(dy3, s24.pack24(w, -1), saved, activation, implementation="ffi")
        assert "s24_matmul_slope" in ran
        with np.errstate(over="ignore"):
            sums = np.tile(4 * dy3.astype(np.float32), (1, 2)) + np.float32(0)  # none is -0
            sums = sums.astype("bfloat16")
        assert_same_bits(got, activation_gradient(jnp.asarray(saved), jnp.asarray(sums), activation))


@pytest.mark.slow
@pytest.mark.parametrize("kind", not_finite.OPERANDS)
def test_squares_of_products_of_what_is_not_finite(kind, caller, cuda_targets, fake_cusparselt):
    """Inf and NaN reach what a kept weight takes them to, and neither the rest of a tile nor another one."""
    x, w = not_finite.OPERANDS[kind]()
    targets = targets_of(cuda_targets, fake_cusparselt, "9.0")
    with at_once("cuda", caller, targets, capability="9.0") as ran:
        got = matmul_squared_relu(x, s24.pack24(w, -2), implementation="ffi")
    assert "s24_matmul_squared_relu" in ran
    assert not not_finite.misfits(x, w, got)
    assert np.isnan(got).any() and np.isposinf(got).any() and (got == 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("target", [*POINTWISE, ON_HOPPER, AT_ENTRIES])
def test_what_hopper_alone_computes_is_refused_elsewhere(target, caller, cuda_targets, fake_cusparselt):
    """By a GPU of another generation, and where a driver compiles PTX in place of the machine code."""
    _, call, arrays = next(call for call in calls() if target in call[0] and "'D': 0" not in call[0])
    for where in (("8.0",), ("9.0", "8.0")):
        targets = targets_of(cuda_targets, fake_cusparselt, *where)
        with (
            at_once("cuda", caller, targets),
            pytest.raises(
                (AssertionError, jax.errors.JaxRuntimeError), match="needs a GPU of compute capability"
            ),
        ):
            call(*arrays, "ffi")


@pytest.mark.slow
@pytest.mark.parametrize(("ptx", "has_tiles"), [("9.0", True), ("8.0", False)])
def test_products_of_blocks_from_older_ptx(ptx, has_tiles, caller, cuda_targets, fake_cusparselt):
    """A driver that compiles PTX in place of the machine code for Hopper gets no kernel that needs it."""
    (call, *_) = (c for c in calls() if OF_BLOCKS in c[0] and "'v': 128, 'groups': 128" in c[0])
    launched(cuda_targets)
    compare([call], caller, targets_of(cuda_targets, fake_cusparselt, "9.0", ptx))
    ran = "\n".join(launched(cuda_targets))
    assert bool(TILE.search(ran)) == has_tiles
    assert bool(NO_TILE.search(ran)) != has_tiles


@pytest.mark.slow
@pytest.mark.usefixtures("moved_with_all_bits")
def test_arrays_may_begin_where_xla_lets_them_begin(caller, cuda_targets, fake_cusparselt):
    """On a GPU at a multiple of 16 bytes, on a CPU anywhere. No access is wider than the place of an array
    allows: the emulation ends the process at one that is. Others are refused, see `hostile.misplaced`."""
    compare(list(_small_calls()), caller, targets_of(cuda_targets, fake_cusparselt), behind=(16, 4))


@pytest.mark.slow
@pytest.mark.parametrize("capability", WITH_LAYOUTS)
@pytest.mark.parametrize("shape", [(256, 256), (128, 96), (128, 576)], ids=str)
def test_matrices_for_cusparselt_are_those_of_the_library(
    shape, capability, caller, cuda_targets, fake_cusparselt
):
    """Metadata in parts of its tiles of 64 rows and 512 columns, and in whole ones."""
    _, call, _, dtypes, _ = COMPRESSED
    x = np.random.default_rng(9).normal(size=shape)
    arrays = [np.asarray(device(x, dtype)) for dtype in dtypes]
    targets = targets_of(cuda_targets, fake_cusparselt, capability)
    with at_once("cuda", caller, targets, capability=capability):
        got = jax.device_get([call(x, None) for x in arrays])
    with at_once("cpu", caller, targets_of_the_cpu(), library.kernel_call, capability=capability):
        assert_same_bits(got, jax.device_get([call(x, None) for x in arrays]))


@pytest.mark.slow
@pytest.mark.parametrize("capability", WITH_LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(16, 64), (80, 192), (72, 576), (192, 1024)], ids=str)
def test_metadata_in_the_order_of_the_library(
    shape, dtype, capability, caller, cuda_targets, fake_cusparselt
):
    packed = s24.pack24(jnp.asarray(np.random.default_rng(9).normal(size=shape), dtype), -1)
    targets = targets_of(cuda_targets, fake_cusparselt, capability)
    with at_once("cuda", caller, targets, capability=capability) as ran:
        got = compressed24.compress(packed)
        want = library.compress(packed)
    assert ran == {"s24_cusparselt_compress"}
    assert_same_bits(words_of_bytes(got), words_of_bytes(want))


def words_of_bytes(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)
