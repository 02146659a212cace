"""Methods in 8 bits on Hopper: what runs is what was decided, and its results are the simulated ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from experiments.benchmarks.dense_e4m3 import DenseE4M3
from tests.gpu.test_matmul import FLOAT8_SUMS
from tests.ops.data import assert_same_bits

FST8, ROWS, DELAYED = (s24.methods.FST(fp8=scales, mvue=None) for scales in ("tensor", "row", "delayed"))
TOP2 = s24.methods.FST(fp8="row", mvue=None, mask="top-2")
SSTE8 = s24.methods.SSTE(fp8="tensor", fp8_backward="e4m3", mvue=None)
T, d, f = 256, 128, 384


@pytest.fixture(autouse=True)
def float8(cusparselt):
    if cusparselt.float8_problem():
        pytest.skip(cusparselt.float8_problem())


def draw(dtype, *shapes):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, dtype) for shape in shapes]


def calls(text: str) -> list[str]:
    """The dtypes of the operands of cuSPARSELt's products in a lowered program."""
    return re.findall(r"custom_call @s24_cusparselt_matmul\(.*?: \(tensor<\d+x\d+x(\w+)>", text)


def near(got, want, rounding: float):
    got, want = (np.asarray(x, np.float64) for x in (got, want))  # squares of the largest overflow float32
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error <= rounding, error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("method", "packed"),
    [
        *((FST8, 2), (ROWS, 2), (DELAYED, 2), (TOP2, 1), (SSTE8, 1)),
        *((DenseE4M3(scales), 0) for scales in ("tensor", "row", "delayed")),
    ],
    ids=["tensor", "row", "delayed", "top-2", "S-STE", "dense", "dense, row", "dense, delayed"],
)
def test_a_layer_is_its_simulation(method, packed, dtype):
    """The forward product and the input gradient, of the same rounded operands, by cuSPARSELt or by XLA. The
    simulation rounds the operands to the dtype once more; a product in 8 bits rounds its scaled sums."""
    x, w, dy = draw(dtype, (T, d), (d, f), (T, f))

    def run(implementation):
        def both(x, w, dy):
            options = {"implementation": implementation}
            y, vjp = jax.vjp(lambda x: s24.sparse_dot(x, w, method, method.init(w), **options), x)
            return y, *vjp(dy)

        return jax.jit(both).lower(x, w, dy)

    with jax.default_matmul_precision("highest"):
        programs = {name: run(name) for name in ("cusparselt", "ffi")}
        results = {name: program.compile()(x, w, dy) for name, program in programs.items()}
    rounding = max(2 * float(jnp.finfo(dtype).eps), 8 * FLOAT8_SUMS)
    for got, want in zip(results["cusparselt"], results["ffi"], strict=True):
        near(got, want, rounding)
    assert calls(programs["cusparselt"].as_text()) == ["f8E4M3FN"] * packed
    assert not calls(programs["ffi"].as_text())


@pytest.mark.parametrize("activation", ["squared_relu", "gelu"])
@pytest.mark.parametrize(
    ("mvue", "scales"), [(None, "tensor"), ("exact", "tensor"), (None, "row"), (None, "delayed")]
)
def test_a_block_forward_and_backward(mvue, scales, activation):
    """Four products of e4m3, and of MVUE two of bfloat16. Operands that differ by the rounding of bfloat16
    may be rounded to neighbouring numbers of 8 bits: a share of about 2^-4, by 2^-3.5 of their size, which is
    2^-5.5 of a norm. (With the library of `documented_cusparselt` norms differ by 2^-5.1 at most; gradients
    of weights by 2^-7, and 2^-4.2 where draws differ, too.)"""
    method = s24.methods.FST(fp8=scales, mvue=mvue)
    x, w1, w2, dy = draw("bfloat16", (T, d), (d, f), (f, d), (T, d))
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}

    def run(implementation):
        def both(x, w1, w2, dy):
            options = {"implementation": implementation, "activation": activation}
            key = jax.random.key(1) if mvue else None
            y, vjp = jax.vjp(lambda *a: s24.sparse_ffn(*a, method, state, key, **options), x, w1, w2)
            return y, *vjp(dy)

        return jax.jit(both).lower(x, w1, w2, dy)

    programs = {name: run(name) for name in ("cusparselt", "reference")}
    compiled = programs["cusparselt"].compile()
    got, want = compiled(x, w1, w2, dy), programs["reference"].compile()(x, w1, w2, dy)
    assert sorted(calls(programs["cusparselt"].as_text())) == ["bf16"] * 2 * bool(mvue) + ["f8E4M3FN"] * 4
    of_weights = 2**-3 if mvue else 2**-5
    for a, b, rounding in zip(got, want, (2**-4, 2**-4, of_weights, of_weights), strict=True):
        near(a, b, rounding)
    for a, b in zip(compiled(x, w1, w2, dy), got, strict=True):
        assert_same_bits(a, b)


def test_one_token_sums_in_float32():
    """Two products of 448, which no float16 holds, and whose sum it does."""
    x, w = jnp.full((1, 2), 448.0), jnp.asarray([[448.0], [-448.0]])
    out = s24.matmul(*(a.astype(jnp.float8_e4m3fn) for a in (x, w)), preferred_element_type=jnp.float16)
    assert out.item() == 0


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("tokens", [1, 4])
def test_tokens_that_xla_cuts_over_devices(tokens):
    """Without `specs`, as in generation over a mesh: one row of a product is left on every device."""
    P, (x, w) = jax.sharding.PartitionSpec, draw("bfloat16", (2, tokens, d), (d, f))
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    cut = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("dp")))
    run = jax.jit(lambda x: s24.sparse_dot(x, w, FST8, FST8.init(w)))
    near(run(cut), run(x), 2**-6)


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("product", ["forward", "input gradient"])
def test_sums_of_dense_products_have_float32(product, scales):
    """With operands of 1 and 2 the sum of 2^15 products is a multiple of the product of the scales, which the
    14 bits of tensor cores cannot hold: from 2^14 on they lose products of 1. Float32 can, and what is left
    is the rounding of a few partial sums, of the scales and of the result."""
    rng, K = np.random.default_rng(5), 2**15
    left, right = (jnp.asarray(rng.integers(1, 3, size=(128, K)), jnp.float32) for _ in range(2))
    method = DenseE4M3(scales)
    run = jax.jit(lambda x, w: s24.sparse_dot(x, w, method))
    with jax.default_matmul_precision("default"):
        if product == "forward":
            got = run(left, right.T)
        else:
            (got,) = jax.jit(lambda w, dy: jax.vjp(lambda x: run(x, w), jnp.ones((128, 128)))[1](dy))(
                right, left
            )
    exact = np.float64(left) @ np.float64(right).T
    error = np.abs(np.float64(got) - exact).max() / exact.min()
    assert error <= 2.0**-10, error


def test_a_dense_block_is_multiplied_in_8_bits():
    """By cuBLASLt from 8-bit operands, and not by XLA after a conversion to 16 bits."""
    x, w = draw("bfloat16", (T, d), (d, f))
    method = DenseE4M3()
    program = jax.jit(lambda x, w: s24.sparse_dot(x, w, method)).lower(x, w)
    assert re.search(r"dot_general.*xf8E4M3FN", program.as_text())
    text = program.compile().as_text()
    assert "cublas$lt$matmul$f8" in text, text


def test_histories_see_what_they_see_on_a_cpu():
    """The exponents of the four operands of a block, and how a step after that is scaled by them."""
    x, w1, w2, dy = draw("bfloat16", (T, d), (d, f), (f, d), (T, d))
    masks = {"w1": s24.transposable_mask24(w1), "w2": s24.transposable_mask24(w2)}
    empty = {w: {name: jnp.zeros(256) for name in DELAYED.histories} for w in masks}

    def run(tops, x, implementation):
        state = {w: {"mask": masks[w], **tops[w]} for w in masks}
        return s24.sparse_ffn(x, w1, w2, DELAYED, state, implementation=implementation)

    found = {}
    for implementation in ("cusparselt", "reference"):
        gradient = jax.jit(lambda x, i=implementation: jax.vjp(lambda t: run(t, x, i), empty)[1](dy)[0])
        found[implementation] = gradient(x)
    exponents = [jax.tree.leaves(jax.tree.map(np.argmax, tops)) for tops in found.values()]
    assert min(exponents[0]) > 0
    assert max(abs(a - b) for a, b in zip(*exponents, strict=True)) <= 1  # Y2 and dY1 are rounded otherwise
    known = found["reference"]
    for size in (1, 64):  # 64 times as large saturates
        got, want = (run(known, size * x, implementation) for implementation in ("cusparselt", "reference"))
        near(got, want, 2**-4)


def test_zeros_and_the_largest_numbers():
    x, w, dy = draw("bfloat16", (T, d), (d, f), (T, f))
    run = lambda x, w: s24.sparse_dot(x, w, FST8, FST8.init(w), implementation="cusparselt")  # noqa: E731
    assert not run(jnp.zeros_like(x), w).any()
    (dx,) = jax.vjp(lambda x: run(x, w), x)[1](jnp.zeros_like(dy))
    assert not dx.any()
    large = float(jnp.finfo(jnp.bfloat16).max) / 4
    near(run(x.at[0, 0].set(large), w)[0], jnp.where(FST8.init(w)["mask"][0], large * w[0], 0), 2**-3)
