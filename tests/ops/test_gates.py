"""Which devices and versions the kernels and cuSPARSELt are for: explicit lists, mocked here."""

import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import cusparselt, decision, hardware, native
from jax_sparse24.dispatch.generations import GENERATIONS, HOPPER
from jax_sparse24.dispatch.product import Product
from tests.ops.library import DEVICES, ORDERS

FLOAT8 = {"dtype": "float8_e4m3fn"}


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(capability)`: the default device looks like that GPU; the CUDA module and cuSPARSELt are there."""

    def pretend(capability):
        device = types.SimpleNamespace(compute_capability=capability, device_kind="mock")
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda *a: [device])
        monkeypatch.setitem(native._loaded, "cuda", (object(), None))
        monkeypatch.setattr(cusparselt, "problem", lambda: "")

    return pretend


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(hardware, "capability", lambda: "9.0")


@pytest.mark.parametrize("capability", DEVICES)
def test_capabilities(gpu, capability):
    gpu(capability)
    kernels, layout = DEVICES[capability]
    for implementation, runs in (("ffi", kernels), ("cusparselt", layout is not None)):
        if runs:
            found = decision.decide("pack24", jnp.bfloat16, implementation)
            assert (found.runs, found.reason) == (implementation, "asked for")
        else:
            with pytest.raises(
                RuntimeError,
                match=rf"'{implementation}' cannot run: this GPU has compute capability "
                rf"{capability}; .*9\.0",
            ):
                decision.decide("pack24", jnp.bfloat16, implementation)
    found, tried = decision.decide("pack24", jnp.bfloat16), kernels and float(capability) < 10
    assert found.runs == ("auto" if tried else "reference")
    assert tried or capability in found.reason
    assert (kernels and not tried) == ("never ran; implementation='ffi' runs them" in found.reason)
    product = decision.decide(Product((-1, -2), "right", jnp.dtype("bfloat16"), (64, 64, 64), "2:4"))
    assert tried or (product.runs == "dense" and capability in product.reason)
    assert layout in (None, cusparselt.layout().name)


@pytest.mark.parametrize("layout", [row.layout for row in GENERATIONS if row.layout], ids=lambda x: x.name)
def test_layouts_are_those_of_the_kernels(layout):
    """By name and padding; the emulated kernels show that their orders are."""
    text = (Path(__file__).parents[2] / "ffi/cuda/metadata_order.cuh").read_text()
    (rows,) = re.findall(rf"^struct {layout.name} {{\n  static constexpr int kRows = (\d+);", text, re.M)
    assert layout.rows == int(rows) == ORDERS[layout.name].rows
    assert re.search(rf"with_order_of\(f, .*\b{layout.name}\(\)", text)


def test_other_accelerators(gpu, monkeypatch):
    gpu("gfx90a")
    assert decision.platform() == "gpu"
    with pytest.raises(RuntimeError, match="run on CPU and CUDA and the default backend is gpu"):
        decision.decide("pack24", jnp.bfloat16, "ffi")


def test_module_that_is_not_built(gpu, monkeypatch):
    gpu("9.0")
    monkeypatch.setitem(native._loaded, "cuda", (None, "the native module jax_sparse24._cuda is not built"))
    for implementation in ("ffi", "cusparselt"):
        with pytest.raises(RuntimeError, match="_cuda is not built"):
            decision.decide("pack24", jnp.bfloat16, implementation)
    assert decision.decide("pack24", jnp.bfloat16, None).runs == "reference"


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ((0, 7, 1), "0.7.1 is too old, it must be 0.8.1 or newer; pip install"),
        ((0, 8, 0), "0.8.0 is too old, it must be 0.8.1 or newer; pip install"),
        ((0, 0, 0), "does not start"),
    ],
)
def test_versions_that_are_refused(version, why):
    assert why in cusparselt.gate(version)


@pytest.mark.parametrize("version", [(0, 8, 1), (0, 9, 0), (0, 10, 0)])
def test_versions_that_are_taken(version, hopper, monkeypatch):
    assert cusparselt.gate(version) == ""
    monkeypatch.setattr(cusparselt, "version", lambda: version)
    product = cusparselt.Descriptor(64, 64, 64, True, True, "bfloat16", "bfloat16")
    assert product.preferred == (17 if version in HOPPER.algorithms else -1)


def test_library_that_is_not_installed(monkeypatch):
    module = types.SimpleNamespace(load_cusparselt=lambda path: "cuSPARSELt does not open: no such file")
    monkeypatch.setitem(native._loaded, "cuda", (module, None))
    assert cusparselt.problem.__wrapped__() == (
        "cuSPARSELt does not open: no such file; pip install 'nvidia-cusparselt-cu13>=0.8.1' (or -cu12)"
    )


@pytest.mark.parametrize(
    ("changed", "out", "why"),
    [
        ({"rows": 24}, "bfloat16", "rows of the packed operand must be a multiple of 16, got 24"),
        ({"depth": 48}, "bfloat16", "K must be a multiple of 32, got 48"),
        ({"cols": 12}, "bfloat16", "columns of the dense operand must be a multiple of 8, got 12"),
        ({"dtype": "float32"}, "float32", "bfloat16, float16 or float8_e4m3fn, not float32"),
        ({}, "float32", "its result of bfloat16 is bfloat16, not float32"),
        (FLOAT8, "float64", "its result of float8_e4m3fn is bfloat16 or float16 or float32, not float64"),
        ({"rows": 80} | FLOAT8, "bfloat16", "rows of the packed operand must be a multiple of 32, got 80"),
        ({"depth": 96} | FLOAT8, "float32", "K must be a multiple of 64, got 96"),
        ({"cols": 24} | FLOAT8, "float16", "columns of the dense operand must be a multiple of 16, got 24"),
    ],
)
def test_products_that_do_not_fit(changed, out, why):
    sizes = {"rows": 64, "depth": 64, "cols": 64, "dtype": "bfloat16"} | changed
    product = cusparselt.Descriptor(dense_k_last=True, out_packed_last=True, out_dtype=out, **sizes)
    assert why in product.misfit()


@pytest.mark.parametrize("version", [(0, 8, 1), (0, 9, 1), (0, 10, 0), (0, 11, 0)])
def test_what_was_verified_in_some_versions_only(version, hopper, monkeypatch):
    """8-bit products and epilogues: in other versions refused, and left to XLA."""
    monkeypatch.setattr(cusparselt, "version", lambda: version)
    taken = version == (0, 10, 0)
    here = ".".join(map(str, version))
    product = cusparselt.Descriptor(64, 64, 64, True, True, "float8_e4m3fn", "bfloat16")
    why = "" if taken else f"float8_e4m3fn were verified with cuSPARSELt 0.10.0, here is {here}"
    assert product.misfit().endswith(why)
    assert (product.misfit() == "") == taken
    assert product.preferred == (16 if taken else -1)
    product = cusparselt.Descriptor(64, 64, 64, True, True, "bfloat16", "bfloat16")
    assert product.applies(jnp.ones(64), None) == product.applies(None, "relu") == taken
    assert not product.applies(jnp.ones(64), "gelu")
    for out, known in (("bfloat16", True), ("float16", False)):
        product = cusparselt.Descriptor(64, 64, 64, True, True, "float8_e4m3fn", out)
        assert product.applies(None, "gelu") == (taken and known)
    assert not product.applies(None, None)


def test_algorithms_that_end_the_process_are_never_tried(hopper, monkeypatch):
    module = types.SimpleNamespace(cusparselt_needs=lambda *a: (0, 0, 52))
    monkeypatch.setitem(native._loaded, "cuda", (module, None))
    product = cusparselt.Descriptor(64, 64, 64, True, True, "float16", "float16")
    assert product.algorithms() == [-1, *range(36)]


@pytest.fixture
def refusing(gpu, monkeypatch):
    """A library that refuses algorithm 17 if K is no multiple of 64 or an activation follows, and anything
    empty; it has 512 bytes of workspace for what it takes."""

    def needs(rows, depth, cols, k_last, packed_last, dtype, out_dtype, activation, algorithm):
        if 0 in (rows, depth, cols) or (algorithm == 17 and (depth % 64 or activation)):
            raise RuntimeError("cuSPARSELt: MatmulPlanInit returned status 10")
        return 512, 0, 52

    gpu("9.0")
    monkeypatch.setitem(native._loaded, "cuda", (types.SimpleNamespace(cusparselt_needs=needs), None))
    monkeypatch.setattr(cusparselt, "version", lambda: (0, 10, 0))


def test_a_measured_algorithm_that_the_library_refuses_is_left_to_it(refusing, monkeypatch):
    """Tables speak for other sizes, too, and no algorithm was measured with an activation."""
    entry = {"implementation": "cusparselt", "algorithm": 17}
    found = types.SimpleNamespace(packed=True, reason="faster", entry=entry)
    monkeypatch.setattr(decision.table, "look_up", lambda *_: found)
    monkeypatch.setattr(decision.table, "find", lambda product: (None, entry))
    monkeypatch.setattr(decision.table, "same_library", lambda _: True)
    for depth, taken in ((128, 17), (96, -1)):
        product = Product((-1, -2), "right", jnp.dtype(jnp.bfloat16), (64, depth, 64))
        for name in (None, "cusparselt"):
            assert decision.decide(product, implementation=name).algorithm == taken
    product = cusparselt.Descriptor(64, 128, 64, True, True, "bfloat16", "bfloat16")
    assert [product.accepted(17, activation) for activation in (None, "relu")] == [17, -1]
    assert product.accepted(None) is None
    with pytest.raises(RuntimeError, match="status 10"):  # of an algorithm that is named
        cusparselt.Descriptor(64, 96, 64, True, True, "bfloat16", "bfloat16").workspace(17)


@pytest.mark.parametrize("sizes", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_the_library_is_not_asked_of_an_empty_product(refusing, sizes):
    """Its handler multiplies nothing."""
    product = cusparselt.Descriptor(*sizes, True, True, "bfloat16", "bfloat16")
    assert product.workspace(17) == 16
    assert product.accepted(17) == 17


def test_a_product_that_does_not_fit_says_so(monkeypatch):
    monkeypatch.setattr(decision, "library_obstacle", lambda: None)
    x = jnp.ones((8, 16), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"cuSPARSELt does not run this product: rows .* multiple of 16, got 8"
    ):
        s24.matmul(s24.pack24(x, 1), x.T, implementation="cusparselt")
