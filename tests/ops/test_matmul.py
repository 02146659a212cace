"""matmul with either operand packed, in every layout the engine uses, against float64 products."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.matmul import contract
from tests.ops import oracle
from tests.ops.data import NUMPY, assert_same_bits, assert_within, device, unit_roundoff, words

# (rows of the packed operand, K, columns of the other): 1 and odd sizes, K of 4, multiples of 8 and not, more
# than one block of the kernel in every dimension.
SHAPES = [(1, 4, 1), (3, 12, 5), (17, 24, 1), (1, 100, 33), (70, 196, 130), (150, 40, 17)]


def operands(rng, rows, k, n, dtype):
    """Packed operand as (rows, K) with its 2:4 support, and a dense one (K, n), rounded to dtype."""
    p = rng.normal(size=(rows, k)).astype(NUMPY[dtype])
    return oracle.prune24(p, -1), rng.normal(size=(k, n)).astype(NUMPY[dtype])


def product(p, d):
    """The exact product, and a bound of a float32 sum of its K/2 terms plus the rounding of the result."""
    p, d = oracle.wide(p), oracle.wide(d)
    terms = p.shape[-1] // 2
    scale = np.abs(p) @ np.abs(d)
    return p @ d, lambda dtype: terms * 2.0**-24 * scale + (1 + 2**-8) * unit_roundoff(dtype) * np.abs(p @ d)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(s, "float32") for s in SHAPES] + [(s, d) for s in SHAPES[1::3] for d in ("bfloat16", "float16")],
    ids=str,
)
def test_product_of_either_side(implementation, dtype, shape, rng):
    p, d = operands(rng, *shape, dtype)
    exact, bound = product(p, d)
    left = s24.matmul(s24.pack24(device(p), -1), device(d), implementation=implementation)
    right = s24.matmul(device(d.T), s24.pack24(device(p.T), -2), implementation=implementation)
    for got, want in ((left, exact), (right.T, exact)):
        assert got.dtype == p.dtype
        assert_within(got, want, bound(dtype))


@pytest.mark.parametrize("dense_axis", [-1, -2])
@pytest.mark.parametrize("side", ["left", "right"])
def test_all_layouts(implementation, dtype, side, dense_axis, rng):
    """The dense operand is contracted along either axis; the packed one may stand for the transpose."""
    p, d = operands(rng, 37, 52, 70, dtype)
    dense = device(d if dense_axis == -2 else d.T)
    exact, bound = product(p, d)
    for packed, packed_axis in ((s24.pack24(device(p), -1), -1), (s24.pack24(device(p.T), -2), -2)):
        args = (
            (packed, dense, packed_axis, dense_axis)
            if side == "left"
            else (dense, packed, dense_axis, packed_axis)
        )
        got = contract(*args, implementation=implementation)
        assert_within(got if side == "left" else got.T, exact, bound(dtype))


@pytest.mark.parametrize("groups", [*range(1, 18), 31, 33])
def test_any_number_of_groups(implementation, groups, rng):
    """Kernels that take several groups at once leave none out, and read none that is not there."""
    p, d = operands(rng, 9, 4 * groups, 70, "bfloat16")
    exact, bound = product(p, d)
    packed = s24.pack24(device(p), -1)
    for got in (
        s24.matmul(packed, device(d), implementation=implementation),
        contract(packed, device(d.T), -1, -1, implementation=implementation),
    ):
        assert_within(got, exact, bound("bfloat16"))


@pytest.mark.parametrize("shape", [(70, 1096, 130), (33, 512, 64), (16, 1540, 40), (33, 508, 64)], ids=str)
def test_bfloat16_over_several_blocks(implementation, shape, rng):
    """Kernels that multiply whole tiles of bfloat16 fill up the last ones, in each dimension and layout, and
    add to the sums of the blocks before."""
    p, d = operands(rng, *shape, "bfloat16")
    exact, bound = product(p, d)
    for k_last in (False, True):
        dense, axis = (device(d.T), -1) if k_last else (device(d), -2)
        left = contract(s24.pack24(device(p), -1), dense, -1, axis, implementation=implementation)
        right = contract(dense, s24.pack24(device(p.T), -2), axis, -2, implementation=implementation)
        assert_within(left, exact, bound("bfloat16"))
        assert_within(right.T, exact, bound("bfloat16"))


def test_sums_are_float32(implementation, rng):
    """Sums of 16-bit operands keep bits that 16-bit partial sums would lose."""
    p, d = operands(rng, 5, 1024, 3, "bfloat16")
    packed = s24.pack24(device(p), -1)
    got = s24.matmul(packed, device(d), implementation=implementation, preferred_element_type=jnp.float32)
    exact, bound = product(p, d)
    assert got.dtype == jnp.float32
    assert_within(got, exact, bound("float32"))


@pytest.mark.parametrize(
    ("left", "right", "asked", "result"),
    [
        ("bfloat16", "bfloat16", None, "bfloat16"),
        ("bfloat16", "float32", None, "float32"),
        ("float32", "float16", None, "float32"),
        ("bfloat16", "float16", None, "float32"),
        ("float16", "float16", "float32", "float32"),
        ("float16", "float16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float16", "float16"),
    ],
)
def test_result_dtype(implementation, left, right, asked, result, rng):
    p, d = operands(rng, 5, 12, 7, "bfloat16")
    p, d = p.astype(np.float32).astype(NUMPY[left]), d.astype(np.float32).astype(NUMPY[right])
    for a, b in ((s24.pack24(device(p), 1), device(d)), (device(p), s24.pack24(device(d), 0))):
        got = s24.matmul(a, b, implementation=implementation, preferred_element_type=asked)
        assert got.dtype == result
        dense = [v.todense() if isinstance(v, s24.Packed24) else v for v in (a, b)]
        exact, bound = product(*dense)
        assert_within(got, exact, bound(result) + 12 * 2.0**-24 * np.abs(exact))


def test_leading_dimensions(implementation, rng):
    p = np.stack([operands(rng, 6, 12, 1, "float32")[0] for _ in range(6)]).reshape(2, 3, 6, 12)
    d = rng.normal(size=(2, 3, 12, 5)).astype(np.float32)
    for a, b in ((p, d), (p[0, 0], d), (p, d[1, 2])):
        exact, bound = product(a, b)
        left = s24.matmul(s24.pack24(device(a), -1), device(b), implementation=implementation)
        assert_within(left, exact, bound("float32"))

        def flip(v):
            return device(np.swapaxes(v, -1, -2))

        right = s24.matmul(flip(b), s24.pack24(flip(a), -2), implementation=implementation)
        assert_within(right, np.swapaxes(exact, -1, -2), np.swapaxes(bound("float32"), -1, -2))


def test_masked_operand_with_stored_zeros(implementation, rng):
    w = rng.normal(size=(20, 16)).astype(np.float32)
    mask = rng.random(w.shape) < 0.2
    mask &= np.asarray(s24.mask24(np.where(mask, w, 0), 1))
    packed = s24.pack24(device(w), 1, jnp.asarray(mask))
    exact, bound = product(np.where(mask, w, 0), np.eye(16))
    assert_within(s24.matmul(packed, jnp.eye(16), implementation=implementation), exact, bound("float32"))


def test_non_finite_values_stay_in_their_row_and_column(implementation, dtype, rng):
    """Padding of blocks must not carry a NaN over."""
    p, d = operands(rng, 7, 20, 9, dtype)
    p[2, np.flatnonzero(p[2])[0]] = np.nan
    d[:, 4] = np.inf
    for got in (
        s24.matmul(s24.pack24(device(p), 1), device(d), implementation=implementation),
        s24.matmul(device(d.T), s24.pack24(device(p.T), 0), implementation=implementation).T,
    ):
        finite = np.isfinite(np.asarray(got, np.float32))
        assert not finite[2].any()
        assert not finite[:, 4].any()
        assert np.delete(np.delete(finite, 2, 0), 4, 1).all()


def test_pruned_non_finite_values_leave_no_trace(implementation):
    x = device([[np.inf, -np.inf, np.inf, 1], [3, 2, 1, 0]], "float32")
    packed = s24.pack24(x, 1, jnp.array([[0, 0, 0, 1], [1, 1, 0, 0]], bool))
    assert_same_bits(
        s24.matmul(packed, jnp.ones((4, 2)), implementation=implementation), np.float32([[1, 1], [5, 5]])
    )


def test_no_contraction_gives_zeros(implementation):
    packed = s24.pack24(jnp.zeros((3, 0)), 1)
    assert_same_bits(
        s24.matmul(packed, jnp.zeros((0, 5)), implementation=implementation), np.zeros((3, 5), np.float32)
    )


def test_dense_operands_are_a_plain_product(rng):
    a, b = (rng.normal(size=s).astype(np.float32) for s in ((2, 5, 8), (8, 3)))
    assert_within(s24.matmul(a, b), a.astype(float) @ b, 8 * 2.0**-24 * (np.abs(a) @ np.abs(b)))


def test_by_default_it_runs_what_pays(rng):
    p, d = operands(rng, 64, 128, 48, "float32")
    exact, bound = product(p, d)
    assert_within(s24.matmul(s24.pack24(device(p), 1), device(d)), exact, 2 * bound("float32"))


_DIGEST = """
import hashlib, jax, numpy as np, jax_sparse24 as s24
rng = np.random.default_rng(5)
x = rng.normal(size=(300, 400)).astype(np.float32)
out = [
    s24.matmul(s24.pack24(x, 1), x.T, implementation="ffi"),
    s24.mvue24(jax.random.key(1), x, 0, implementation="ffi"),
]
print(hashlib.sha256(b"".join(np.asarray(o).tobytes() for o in out)).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_number_of_threads_does_not_matter():
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    alone, usual = (
        subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for code in (one + _DIGEST, _DIGEST)
    )
    assert len(alone) > 60
    assert alone == usual


# ---- gradients


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_are_those_of_the_masked_dense_product(implementation, dtype, side, rng):
    """With respect to the dense array behind the packed operand, and to the other operand."""
    w = rng.normal(size=(13, 20)).astype(NUMPY[dtype])
    mask = oracle.mask24(w, 1)
    d = rng.normal(size=(20, 7)).astype(NUMPY[dtype])
    c = rng.normal(size=(13, 7)).astype(NUMPY[dtype])

    def loss(w, d):
        if side == "left":
            y = s24.matmul(s24.pack24(w, 1), d, implementation=implementation)
        else:
            y = s24.matmul(d.T, s24.pack24(w.T, 0), implementation=implementation).T
        return jnp.sum(y.astype(jnp.float32) * c.astype(jnp.float32))

    dw, dd = jax.jit(jax.grad(loss, (0, 1)))(device(w), device(d))
    assert dw.dtype == w.dtype
    assert dd.dtype == d.dtype
    wide_w, wide_d, wide_c = (oracle.wide(v) for v in (np.where(mask, w, 0), d, c))
    for got, want, scale in (
        (dw, np.where(mask, wide_c @ wide_d.T, 0), np.abs(wide_c) @ np.abs(wide_d.T)),
        (dd, wide_w.T @ wide_c, np.abs(wide_w.T) @ np.abs(wide_c)),
    ):
        assert_within(got, want, 20 * 2.0**-24 * scale + 1.01 * unit_roundoff(dtype) * np.abs(want))
    assert not words(dw)[~mask].any()


def test_gradients_with_a_shared_packed_weight(implementation, rng):
    """A weight without leading dimensions collects the gradient of all of them."""
    w, x, c = (rng.normal(size=s) for s in ((12, 5), (2, 3, 7, 12), (2, 3, 7, 5)))
    mask = oracle.mask24(w, 0)

    def loss(w, x):
        return jnp.sum(s24.matmul(x, s24.pack24(w, 0), implementation=implementation) * c.astype(np.float32))

    dw, dx = jax.jit(jax.grad(loss, (0, 1)))(device(w, "float32"), device(x, "float32"))
    want_w = np.where(mask, np.einsum("abtk,abtn->kn", x, c), 0)
    scale_w = np.einsum("abtk,abtn->kn", np.abs(x), np.abs(c))
    assert_within(dw, want_w, 50 * 2.0**-24 * scale_w)
    want_x = c @ np.where(mask, w, 0).T
    assert_within(dx, want_x, 8 * 2.0**-24 * (np.abs(c) @ np.abs(w).T))


def test_gradient_of_packed_values(implementation, rng):
    p, d = operands(rng, 9, 16, 5, "float32")
    packed = s24.pack24(device(p), 1)
    c = rng.normal(size=(9, 5)).astype(np.float32)

    def loss(values):
        replaced = s24.Packed24(values, packed.metadata, packed.axis)
        return jnp.sum(s24.matmul(replaced, device(d), implementation=implementation) * c)

    got = jax.jit(jax.grad(loss))(packed.values)
    want = oracle.gather24(c.astype(float) @ d.T, packed.metadata, -1)
    assert_within(
        got, want, 8 * 2.0**-24 * oracle.gather24(np.abs(c) @ np.abs(d.T).astype(float), packed.metadata, -1)
    )


def test_second_derivatives(implementation, rng):
    """Reverse over reverse: of a quadratic in the dense operand, through packing and product."""
    p, d = operands(rng, 6, 8, 4, "float32")
    packed = s24.pack24(device(p), 1)
    v = rng.normal(size=d.shape).astype(np.float32)

    def loss(d):
        return 0.5 * jnp.sum(s24.matmul(packed, d, implementation=implementation) ** 2)

    got = jax.jit(jax.grad(lambda d: jnp.sum(jax.grad(loss)(d) * v)))(device(d))
    a = np.abs(p).astype(float)
    assert_within(got, p.T.astype(float) @ (p @ v), 16 * 2.0**-24 * (a.T @ (a @ np.abs(v))))
