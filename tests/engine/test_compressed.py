"""Operands that kernels pack as cuSPARSELt reads them: which programs do so, and what a CPU says to it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.choices import decided_block
from jax_sparse24.dispatch import decision, hardware, operation
from jax_sparse24.dispatch.decision import Decision, decide
from jax_sparse24.dispatch.product import Product
from jax_sparse24.engine import execution
from jax_sparse24.engine.execution import Execution
from jax_sparse24.engine.plan import FFN
from jax_sparse24.methods import FST, SSTE, Activation24
from jax_sparse24.ops import compressed24
from jax_sparse24.ops.compressed24 import Compressed24
from jax_sparse24.ops.packed24 import Packed24
from jax_sparse24.ops.saved import saved_backward
from tests.ops.data import assert_same_bits
from tests.ops.library import order

T, D, F = 256, 64, 128


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """Programs are lowered as if cuSPARSELt could run."""
    monkeypatch.setattr(decision, "library_obstacle", lambda: None)


def calls(method, implementation="cusparselt", width=D, bias=False) -> list[tuple[str, str, str]]:
    """(target, operands, results) of the kernels that value and gradients of an FFN call on CUDA."""
    x, w1, w2 = (jnp.ones(shape, jnp.bfloat16) for shape in ((T, width), (width, F), (F, width)))
    state = {name: method.init(w, name) for name, w in {"w1": w1, "w2": w2}.items()}
    options = {"implementation": implementation, "b1": jnp.ones(F, jnp.bfloat16) if bias else None}

    def loss(x, w1, w2):
        return s24.sparse_ffn(x, w1, w2, method, state, jax.random.key(0), **options).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(x, w1, w2)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @(s24_\w+)\(.*: \((.*)\) -> \(?(.*?)\)?\n", text)


def matrix(rows: int, depth: int) -> str:
    """A compressed matrix, in a program."""
    return f"tensor<{rows + order().rows_behind(rows)}x{depth // 2}xbf16>"


FST_OPERANDS = {("s24_pack_masked_both", matrix(*size)) for size in ((F, D), (D, F))}
# That of dY1 is made with dY1 where a kernel of the default device does so.
DY1 = "s24_slope_mvue" if jax.default_backend() == "gpu" else "s24_mvue_pack", matrix(F, T)
FST_OPERANDS |= {("s24_mvue_pack", matrix(D, T)), DY1}
Y2 = ("s24_squared_relu_pack", matrix(T, F))
# Its non-zeros are counted for a kept Y2 where a kernel of the default device does so in passing.
KEPT_Y2 = ("s24_pack_counted", matrix(T, F)) if jax.default_backend() == "gpu" else Y2


@pytest.mark.parametrize(
    ("method", "packed", "products"),
    [
        (FST(), FST_OPERANDS, 6),
        (SSTE(), {("s24_soft_pack", matrix(F, D)), DY1}, 4),
        (Activation24(token_cut="mvue"), {KEPT_Y2, ("s24_mvue_pack_strided", matrix(F, T))}, 4),
        (Activation24(token_cut="mvue", tokens="consecutive"), {KEPT_Y2, ("s24_mvue_pack", matrix(F, T))}, 4),
        (
            Activation24(backward_mask="redraw"),
            {Y2, ("s24_pack", matrix(T, F)), ("s24_pack_strided", matrix(F, T))},
            4,
        ),
    ],
    ids=["FST", "S-STE", "strided", "consecutive", "redrawn"],
)
def test_products_read_what_kernels_pack(method, packed, products):
    """Nothing is copied in between."""
    found = calls(method)
    made = {(target, part) for target, _, out in found for part in out.split(", ")}
    assert packed <= made
    read = [operands.split(", ")[0] for target, operands, _ in found if target == "s24_cusparselt_matmul"]
    assert len(read) == products
    assert set(read) <= {part for target, part in made if "cusparselt" not in target}
    assert "s24_cusparselt_compress" not in {target for target, *_ in found}
    # Y2, and dY1 at its places; the weights of S-STE, whose values dgrad multiplies.
    unpacked = {operands for target, operands, _ in found if target == "s24_unpack"}
    shapes = [(T, F)] if getattr(method, "backward_mask", "") == "keep" else []
    shapes += [(F, D), (D, F)] if isinstance(method, SSTE) else []
    assert unpacked == {f"{matrix(rows, depth)}, tensor<{rows}x{depth // 8}xui8>" for rows, depth in shapes}


def test_two_passes_make_four_of_them(monkeypatch):
    """Where CUDA is the default platform: one packs Y2 and counts, one over dY2 makes the others."""
    monkeypatch.setattr(operation, "platform", lambda: "cuda")
    found = calls(Activation24())
    targets = [target for target, *_ in found]
    (counted,) = (out for target, _, out in found if target == "s24_pack_counted")
    assert counted == f"{matrix(T, F)}, tensor<{T}x{F // 8}xui8>, tensor<{T // 128}x{F}xui8>"
    (made,) = (out.split(", ") for target, _, out in found if target == "s24_saved_backward")
    assert (made[0], made.count(matrix(F, T))) == (matrix(T, F), 2)
    read = [operands.split(", ")[0] for target, operands, _ in found if target == "s24_cusparselt_matmul"]
    assert sorted(read) == sorted([matrix(T, F), matrix(F, T)] * 2)
    assert not {"s24_cusparselt_compress", "s24_unpack", "s24_gather", "s24_squared_relu_pack"} & set(targets)


@pytest.mark.parametrize("method", [FST(), SSTE()], ids=["FST", "S-STE"])
def test_one_pass_makes_dy1_and_its_estimate(method, monkeypatch):
    """Where CUDA is the default platform: of Y2 and dY2, for B3 and B4."""
    monkeypatch.setattr(operation, "platform", lambda: "cuda")
    found, dense = calls(method), f"tensor<{T}x{F}xbf16>"
    (made,) = ((operands, out) for target, operands, out in found if target == "s24_slope_mvue")
    results = f"{dense}, {matrix(F, T)}, tensor<{F}x{T // 8}xui8>"
    assert made == (f"tensor<2xui32>, {dense}, {dense}", results)
    (other,) = (out for target, _, out in found if target == "s24_mvue_pack")
    assert other.startswith(matrix(D, T))


# What was measured to be faster there. Without `matmul_slope`, `slope_mvue exact` would make dY1.
FASTER = {"matmul_squared_relu", "matmul_slope", "slope_mvue exact"}


@pytest.fixture
def on_h200(monkeypatch):
    """Programs are lowered as on an NVIDIA H200 on which cuSPARSELt won every product; the decisions made."""
    decided = []

    def decide(product, *, forms, **_):
        decided.append(product)
        if forms == ("dense",):
            return Decision("dense", "as the method says")
        return Decision("cusparselt", "measured", "compressed", entry={"dtype": str(product.dtype)})

    monkeypatch.setattr(execution, "decide", decide)
    monkeypatch.setattr(operation, "platform", lambda: "cuda")
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")
    monkeypatch.setattr(hardware, "faster", lambda name, *_: name in FASTER)
    return decided


@pytest.mark.parametrize(("method", "sparse"), [(FST(), 6), (SSTE(), 4)], ids=["FST", "S-STE"])
def test_one_pass_multiplies_and_squares(method, sparse, on_h200, monkeypatch):
    """In place of the library's F1 and of the activation; each product is decided once. Named, the library
    multiplies, and a bias needs Y1."""
    width, f1, b1 = 128, "s24_matmul_squared_relu", "s24_matmul_slope"
    squared = calls(method, None, width)
    ((operands, out),) = [(operands, out) for target, operands, out in squared if target == f1]
    assert (operands, out) == (f"{matrix(F, width)}, tensor<{T}x{width}xbf16>", f"tensor<{T}x{F}xbf16>")
    assert len(on_h200) == 6
    assert (b1 in {t for t, *_ in squared}) == (method == FST())

    def said(width=width, implementation=None):
        block = decided_block(method, (T, width, F), "bfloat16", implementation)
        return "F1 and the activation" in block.shared_kernels()

    assert said() and not said(width // 2) and not said(implementation="cusparselt")
    named = calls(method, width=width)
    library = [[t for t, *_ in found].count("s24_cusparselt_matmul") for found in (squared, named)]
    assert library == [sparse - (2 if method == FST() else 1), sparse]
    assert not {f1, b1} & {t for t, *_ in named}
    assert f1 not in {t for t, *_ in calls(method, None, width, bias=True)}
    assert f1 not in {t for t, *_ in calls(method, None, width // 2)}, "no whole tiles"
    monkeypatch.setattr(hardware, "faster", lambda *_: False)
    assert f1 not in {t for t, *_ in calls(method, None, width)}


def test_one_pass_multiplies_by_the_slope(on_h200):
    """In place of the library's B1 and of the pass that makes dY1, of which the estimate is made then. Named,
    the library multiplies; with a bias, too, Y2 gives the slope."""
    method, width, b1 = FST(), 128, "s24_matmul_slope"
    dense = f"tensor<{T}x{F}xbf16>"
    for bias in (False, True):
        found = calls(method, None, width, bias=bias)
        ((operands, out),) = [(operands, out) for target, operands, out in found if target == b1]
        assert (operands, out) == (f"{matrix(F, width)}, tensor<{T}x{width}xbf16>, {dense}", dense)
        estimates = [operands for target, operands, _ in found if target == "s24_mvue_pack"]
        assert f"tensor<2xui32>, {dense}" in estimates
        assert "s24_slope_mvue" not in {t for t, *_ in found}

    def said(width=width, implementation=None):
        block = decided_block(method, (T, width, F), "bfloat16", implementation)
        slopes = {"B1 and the slope", "dY1 and its estimate for B4"}
        return [phrase for phrase in block.shared_kernels() if phrase in slopes]

    assert said() == ["B1 and the slope"]
    for other in (said(width // 2), said(implementation="cusparselt")):
        assert other == ["dY1 and its estimate for B4"]
    found = {t for t, *_ in calls(method, None, width // 2)}
    assert b1 not in found and "s24_slope_mvue" in found, "no whole tiles"


@pytest.mark.parametrize(
    "method",
    [FST(), SSTE(), Activation24(token_cut="mvue", dense_share=0.25), Activation24(dense_share=0.25)],
    ids=["FST", "S-STE", "Activation24, drawn", "Activation24"],
)
def test_results_are_those_of_the_packed_form(method, documented_cusparselt, monkeypatch):
    """The library reads compressed matrices here, in its own order; elsewhere it compresses them."""
    rng = np.random.default_rng(1)
    x, w1, w2 = (jnp.asarray(rng.normal(size=s) / 8, jnp.bfloat16) for s in ((96, 32), (32, 160), (160, 32)))
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}

    def results(*operands):
        def ffn(*operands):
            return s24.sparse_ffn(*operands, method, state, jax.random.key(0), implementation="cusparselt")

        y, vjp = jax.vjp(ffn, *operands)
        return y, vjp(y)

    got = jax.jit(lambda *a: results(*a))(x, w1, w2)
    assert len(documented_cusparselt) == (6 if method == FST() else 4)  # products
    decide = execution.decide
    packed = lambda *a, **k: dataclasses.replace(decide(*a, **k), form="packed")  # noqa: E731
    monkeypatch.setattr(execution, "decide", packed)
    assert_same_bits(got, jax.jit(lambda *a: results(*a))(x, w1, w2))


def test_other_operands_are_compressed_before_the_product():
    """Such as cuts that have no kernel, of which the decision says so."""
    method = FST(mvue="uniform")
    shapes = {"x": (T, D), "w1": (D, F), "w2": (F, D), "y2": (T, F), "dy1": (T, F), "dy3": (T, D)}
    decided = Execution("test", "ffn", method.ffn_plan(), "cusparselt").decisions(FFN, shapes, jnp.bfloat16)
    forms = {name: decision.form for name, decision in decided.items()}
    assert forms == dict.fromkeys(FFN, "compressed") | dict.fromkeys(("B2", "B4"), "packed")
    found = [target for target, *_ in calls(method)]
    assert found.count("s24_cusparselt_compress") == 2
    assert found.count("s24_cusparselt_matmul") == 6


@pytest.mark.parametrize("tokens", ["strided", "consecutive"])
@pytest.mark.parametrize("rows", [96, 128], ids=["no tiles", "tiles"])
def test_what_follows_from_saved_activations_has_the_form_asked_for(rows, tokens, documented_cusparselt):
    """Also where several steps take the place of CUDA's pass."""
    y1, dy2 = (np.random.default_rng(n).normal(size=(rows, 64)) for n in range(2))
    y2, dy2 = s24.pack24(jnp.asarray(np.maximum(y1, 0), jnp.bfloat16), -1), jnp.asarray(dy2, jnp.bfloat16)
    args = y2, dy2, jnp.asarray([1, 5, 17], jnp.int32), "relu", tokens
    dy1, *along = saved_backward(*args, compressed=(True, False), implementation="cusparselt")
    want = saved_backward(*args, implementation="ffi")
    assert [type(part.packed) for part in along] == [Compressed24, Packed24]
    assert_same_bits((dy1, along[0].packed.plain, along[0].dense, along[1]), (want[0], *want[1], want[2]))


def test_which_products_read_it():
    def form(dtype, shape, implementation):
        return decide(Product((-1, -2), "right", jnp.dtype(dtype), shape), implementation=implementation).form

    assert form("bfloat16", (16, 32, 16), "cusparselt") == "compressed"
    for dtype, shape, implementation in (
        ("bfloat16", (16, 32, 16), "ffi"),
        ("bfloat16", (16, 32, 16), None),  # measured on this machine, which has no GPU
        ("bfloat16", (16, 48, 16), "cusparselt"),
        ("bfloat16", (16, 0, 16), "cusparselt"),
        ("float32", (16, 32, 16), "cusparselt"),
        ("float8_e4m3fn", (32, 64, 32), "cusparselt"),
    ):
        assert form(dtype, shape, implementation) != "compressed"


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_compressed_matrix_and_its_parts(axis):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(96, 160)), jnp.bfloat16)
    plain = s24.pack24(x, axis)
    rows, half = plain.values.shape
    behind = jnp.ones((order().rows_behind(rows), half), jnp.bfloat16)
    made = Compressed24(jnp.concatenate([plain.values, behind]), plain.metadata, axis)
    assert jax.eval_shape(lambda: made) == jax.eval_shape(lambda: compressed24.pack(x, axis))
    for name in ("shape", "K", "dtype", "pattern"):
        assert getattr(made, name) == getattr(plain, name)
    assert_same_bits(made.plain.values, plain.values)
    assert_same_bits(made.with_values(-plain.values).compressed, jnp.concatenate([-plain.values, behind]))
    if jax.default_backend() != "cpu":
        return
    for target, run in {"unpack": made.todense, "pack": lambda: compressed24.pack(x, axis)}.items():
        why = f"s24_{target}: (values has shape .* expected|leading dimensions of values and metadata)"
        with pytest.raises(jax.errors.JaxRuntimeError, match=why):
            run()
