"""Products at the kept entries of a V:2:M array, against float64 products."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import native
from jax_sparse24.engine.fusions import SAMPLED_B1
from jax_sparse24.ops.sampled import SAMPLED_MATMUL, sampled_matmul
from tests.native.derived import on_platform
from tests.ops.data import NUMPY, assert_same_bits, assert_within, device, unit_roundoff

# (R, K, N, v, m): K below, at and above a block of sums, N / M odd and beyond what a task takes, V below and
# above a panel. The last two are those of the kernel for Hopper.
SHAPES = [
    (16, 4, 4, 16, 4),
    (96, 130, 80, 32, 16),
    (160, 257, 35, 32, 7),
    (128, 128, 1064, 64, 8),
    (256, 40, 96, 128, 32),
    (256, 64, 65, 256, 5),
    (128, 192, 1024, 64, 32),
    (256, 128, 384, 128, 4),
]


@pytest.fixture
def by(implementation):
    if implementation != "reference" and SAMPLED_MATMUL.decide(jnp.float32).runs != "auto":
        pytest.skip("sampled_matmul has no kernel here")
    return implementation


def sampled(a, b, support, by):
    """`sampled_matmul`, where a kernel that is asked for takes the operands."""
    if by == "ffi" and not SAMPLED_MATMUL.in_one_pass(a, b, v=support.v, m=support.m):
        pytest.skip("no kernel takes these operands here")
    return sampled_matmul(a, b, support, implementation=by)


def operands(rng, r, k, n, v, m, dtype):
    """a (R, K) and b (N, K), and a support of (R, N)."""
    a, b = (rng.normal(size=(rows, k)).astype(NUMPY[dtype]) for rows in (r, n))
    return a, b, s24.pack_vnm(device(rng.normal(size=(r, n)).astype(NUMPY[dtype])), v, m)


def expected(a, b, support):
    """The exact values, and the bound of float32 sums and a rounding to `dtype`."""
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    at = places(support)
    exact, scale = (a @ b.T)[at], (np.abs(a) @ np.abs(b).T)[at]
    return exact, lambda dtype: a.shape[1] * 2.0**-24 * scale + 1.01 * unit_roundoff(dtype) * np.abs(exact)


def places(support):
    """Row and column of each value."""
    nibbles = np.asarray(support.metadata)[..., None] >> np.array([0, 4]) & 15
    groups = support.shape[1] // support.m
    nibbles = nibbles.reshape(support.shape[0], -1)[:, :groups]
    four = np.repeat(np.asarray(support.columns), support.v, axis=0).astype(int)
    kept = [np.take_along_axis(four, (nibbles >> shift & 3)[..., None], -1)[..., 0] for shift in (0, 2)]
    columns = np.stack(kept, -1) + np.arange(groups)[:, None] * support.m
    columns = columns.reshape(support.shape[0], -1)
    return np.arange(support.shape[0])[:, None], columns


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_at_the_kept_entries(by, shape, dtype, rng):
    a, b, support = operands(rng, *shape, dtype)
    got = sampled(device(a), device(b), support, by)
    exact, bound = expected(a, b, support)
    assert got.dtype == dtype
    assert_within(got, exact, bound(dtype))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="CPU kernels")
@pytest.mark.parametrize("isa", native.module("cpu").isas() if native.module("cpu") else [])
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_every_instruction_set(isa, shape, rng):
    a, b, support = operands(rng, *shape, "bfloat16")
    exact, bound = expected(a, b, support)
    native.module("cpu").use_isa(isa)
    try:
        assert_within(
            sampled_matmul(device(a), device(b), support, implementation="ffi"), exact, bound("bfloat16")
        )
    finally:
        native.module("cpu").use_isa(native.module("cpu").isas()[0])


def test_it_is_the_product_gathered(by, rng):
    """`dataclasses.replace` makes the product cut to the support of it."""
    a, b, support = operands(rng, 64, 24, 48, 16, 12, "float32")
    values = sampled(device(a), device(b), support, by)
    cut = dataclasses.replace(support, values=values).todense(implementation="reference")
    kept = np.asarray(dataclasses.replace(support, values=jnp.ones_like(values)).todense()) != 0
    np.testing.assert_allclose(cut, np.where(kept, a @ b.T, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)], ids=str)
def test_vmap(by, mapped, rng):
    """Over any of the operands, as one call each."""
    shape = (64, 20, 48, 16, 8)
    many = [operands(rng, *shape, "float32") for _ in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *many)
    args = [stacked[i] if axis == 0 else many[0][i] for i, axis in enumerate(mapped)]

    def call(a, b, support):
        return sampled(a, b, support, by)

    got = jax.vmap(call, in_axes=mapped)(*args)
    for n in range(3):
        one = call(*(many[n][i] if axis == 0 else many[0][i] for i, axis in enumerate(mapped)))
        np.testing.assert_allclose(got[n], one, rtol=1e-6, atol=1e-6)


def test_what_is_dropped_does_not_matter(by, rng):
    """Rows of b that no block keeps may hold anything."""
    a, b, _ = operands(rng, 32, 24, 32, 16, 8, "float32")
    x = np.ones((32, 32), np.float32)
    x[:, 4::8] = 0.0
    support = s24.pack_vnm(device(x), 16, 8)
    b[4::8] = np.nan
    assert np.isfinite(np.asarray(sampled(device(a), device(b), support, by))).all()


def test_repeated_calls_have_the_same_bits(by, rng):
    a, b, support = operands(rng, *SHAPES[3], "float32")
    first = sampled(device(a), device(b), support, by)
    for _ in range(3):
        assert_same_bits(sampled(device(a), device(b), support, by), first)


@pytest.mark.parametrize(("r", "k", "n"), [(16, 0, 8), (0, 4, 8), (16, 4, 0)])
def test_empty(by, r, k, n):
    support = s24.pack_vnm(jnp.zeros((r, n)), 16, 8)
    got = sampled(jnp.zeros((r, k)), jnp.zeros((n, k)), support, by)
    assert_same_bits(got, np.zeros((r, n // 4), np.float32))


def test_errors(rng):
    a, b, support = operands(rng, 32, 24, 48, 16, 8, "float32")
    wrong = s24.pack_vnm(jnp.ones((48, 32)), 16, 8, axis=-2)
    for args, error, text in (
        ((a, b.astype(np.float16), support), TypeError, "a is float32 and b is float16"),
        (
            (a.astype(np.int32), b.astype(np.int32), support),
            TypeError,
            "a has dtype int32; supported are float32",
        ),
        ((a[:, :20], b, support), ValueError, r"a \(32, 20\) and b \(48, 24\)"),
        ((a, b[:40], support), ValueError, r"support \(32, 48\) packed along axis -1 do not fit"),
        ((a, b, wrong), ValueError, "packed along axis -1"),
        ((a, b, jnp.ones((32, 48))), TypeError, "needs a PackedVNM"),
    ):
        with pytest.raises(error, match=text):
            sampled_matmul(*args)


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "runs"),
    [
        ("9.0", "bfloat16", (64, 64, 512, 64, 16), True),
        ("9.0", "float16", (128, 128, 160, 128, 5), True),
        ("8.0", "bfloat16", (64, 64, 512, 64, 16), False),
        ("9.0", "float32", (64, 64, 512, 64, 16), False),
        ("9.0", "bfloat16", (64, 64, 512, 32, 16), False),
        ("9.0", "bfloat16", (64, 32, 512, 64, 16), False),
        ("9.0", "bfloat16", (64, 64, 256, 64, 16), False),
    ],
)
def test_on_a_gpu_hopper_has_a_kernel_for_whole_tiles(capability, dtype, shape, runs):
    """Elsewhere the whole product is made, and who asks for a kernel is told that there is none."""
    r, k, n, v, m = shape
    a, b = (jax.ShapeDtypeStruct((rows, k), dtype) for rows in (r, n))
    with on_platform("cuda", native.call, capability):
        support = jax.eval_shape(lambda x: s24.pack_vnm(x, v, m), jax.ShapeDtypeStruct((r, n), dtype))
        assert ("s24_vnm_sampled" in str(jax.make_jaxpr(sampled_matmul)(a, b, support))) == runs
        named = functools.partial(sampled_matmul, implementation="ffi")
        refused = pytest.raises(
            RuntimeError, match="sampled_matmul: implementation 'ffi' cannot run: no kernel"
        )
        with contextlib.nullcontext() if runs else refused:
            assert "s24_vnm_sampled" in str(jax.make_jaxpr(named)(a, b, support))
        found = SAMPLED_B1.kernel((r, k, n), dtype, f"{v}:2:{m}")
    assert (found.runs == "auto") == runs
    assert runs or found.reason == "no kernel of this GPU takes its dtype and sizes"
