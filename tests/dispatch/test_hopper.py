"""Which products our kernel for Hopper gets, and what becomes of others near a
measurement of it."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import cusparselt, decision, hardware, hopper, native, operation, table
from jax_sparse24.dispatch.decision import decide
from jax_sparse24.dispatch.generations import AMPERE, HOPPER
from jax_sparse24.dispatch.product import Product

SHAPE = 768, 4096, 3072
PRODUCT = Product((-2, -2), "right", jnp.dtype(jnp.bfloat16), SHAPE)
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")


@pytest.fixture
def generation(monkeypatch):
    """Sets that of a GPU, with kernels and the library, for which a table has the product by our kernel."""
    entry = {
        "product": "wgrad",
        "sparse": "right",
        "pattern": "2:4",
        "dtype": "bfloat16",
        "shape": list(SHAPE),
    }
    times = {"dense_us": 150.0, "masked_us": 160.0, "packed_us": 100.0, "status": "ok"}
    content = {"products": [entry | times | {"implementation": "ffi"}], "versions": {}}
    monkeypatch.setattr(table, "_adopted", table.Table(content, "measured in this test"))

    def use(row):
        jax.clear_caches()
        for module in (decision, hardware, operation):
            monkeypatch.setattr(module, "platform", lambda: "cuda")
        for module in (decision, hardware):
            monkeypatch.setattr(module, "capability", lambda: row.capabilities[0])
            monkeypatch.setattr(module, "generation", lambda: row)
        monkeypatch.setitem(native._loaded, "cuda", (object(), None))
        monkeypatch.setattr(cusparselt, "problem", lambda: "")

    yield use
    jax.clear_caches()


def test_sizes_types_and_layouts(generation, monkeypatch):
    generation(HOPPER)
    assert not hopper.misfit(PRODUCT)
    for change, says in (
        ({"shape": (768, 4096 + 64, 3072)}, "K must be a multiple of 128.*4160"),
        ({"shape": (768, 4096, 3072 + 16)}, "rows of the packed operand.*64.*3088"),
        ({"shape": (772, 4096, 3072)}, "columns of the dense operand.*8.*772"),
        ({"shape": (768, 0, 3072)}, "K must be.*got 0"),
        ({"dtype": jnp.dtype(jnp.float32)}, "not float32 and float32"),
        ({"out_dtype": jnp.dtype(jnp.float16)}, "bfloat16.*float16"),
        ({"out_dtype": jnp.dtype(jnp.float32)}, "bfloat16.*float32"),
        ({"pattern": "64:2:16"}, "not 2:4"),
    ):
        assert re.search(says, hopper.misfit(dataclasses.replace(PRODUCT, **change)))
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "1")
    assert hopper.misfit(PRODUCT) == "the kernel is Hopper's"


def test_a_measurement_of_it_speaks_for_no_other_kernel(generation, monkeypatch):
    """What it does not take goes to the library if that may be slower and still pays, and where there is none
    runs dense; but on other GPUs the table's kernel is another one."""
    generation(HOPPER)
    found = decide(PRODUCT)
    assert (found.runs, found.form, found.reads_strided) == ("ffi", "compressed", True)
    near, packed = dataclasses.replace(PRODUCT, shape=(768, 4096 + 32, 3072)), {"forms": ("dense", "packed")}
    for product, options, why in (
        (near, {}, "but here K must be a multiple of 128"),
        (PRODUCT, packed, "but here its operand is not compressed"),
    ):
        found = decide(product, **options)
        assert found.runs == "cusparselt" and not found.reads_strided
        assert why in found.reason
    monkeypatch.setitem(table._adopted.content["products"][0], "dense_us", 135.0)
    found = decide(near)
    assert found.runs == "dense" and "cuSPARSELt may be slower" in found.reason
    assert decide(PRODUCT).runs == "ffi"
    monkeypatch.setattr(cusparselt, "problem", lambda: "no library")
    found = decide(near)
    assert found.runs == "dense" and found.reason.endswith("no library")
    assert decide(PRODUCT).runs == "ffi"
    generation(AMPERE)
    assert (decide(near).runs, decide(near).form) == ("auto", "packed")


# Of a measured product that took the library 100 us: what else it took, where, and what runs without it.
@pytest.mark.parametrize(
    ("change", "gpu", "runs"),
    [
        ({}, "nvidia-h200", "ffi"),
        ({"dense_us": 111.0}, "nvidia-h200", "dense"),
        ({"dense_us": 113.0}, "nvidia-h200", "ffi"),
        ({"dense_us": 113.0}, "nvidia-h100-80gb-hbm3", "dense"),
        ({"dense_us": 124.0}, "nvidia-h100-80gb-hbm3", "ffi"),
        ({"status": "wrong"}, "nvidia-h200", "dense"),
    ],
)
@pytest.mark.parametrize("alternative", ["dense", "masked"])
@pytest.mark.parametrize(
    ("axes", "kind"), [((-2, -2), "wgrad"), ((-1, -2), "fwd"), ((-1, -1), "dgrad")], ids=str
)
def test_it_stands_in_for_the_library(generation, monkeypatch, change, gpu, runs, alternative, axes, kind):
    """Where the library is missing or another release, if what was measured leaves room for our kernel."""
    generation(HOPPER)
    named = types.SimpleNamespace(name=gpu)
    monkeypatch.setattr(hardware, "hardware", lambda: named)
    product = dataclasses.replace(PRODUCT, axes=axes, dtype=jnp.dtype(jnp.float16))
    (entry,) = table._adopted.content["products"]
    library = {"implementation": "cusparselt", "algorithm": 17, "product": kind, "dtype": "float16"}
    measured = entry | library | change
    measured["masked_us"] = measured["dense_us"]
    content = {"products": [measured], "versions": {"cusparselt": "0.10.0"}}
    monkeypatch.setattr(table, "_adopted", table.Table(content, "measured in this test"))
    monkeypatch.setattr(table, "versions", lambda: {"cusparselt": "0.10.0"})
    wrong = "status" in change
    assert decide(product, alternative=alternative).runs == ("dense" if wrong else "cusparselt")
    for problem, version in (("no library", "none"), ("", "0.11.0")):
        monkeypatch.setattr(cusparselt, "problem", lambda problem=problem: problem)
        monkeypatch.setattr(table, "versions", lambda version=version: {"cusparselt": version})
        found = decide(product, alternative=alternative)
        assert (found.runs, found.form) == (runs, "compressed" if runs == "ffi" else "dense")
        assert wrong or f"here is {version}; run s24.tune()" in found.reason
        assert ("our kernel for Hopper" in found.reason) == (runs == "ffi")
        if runs == "ffi":  # what is told of it is no more than is known
            assert found.entry["packed_us"] == pytest.approx(112)
        parts = dataclasses.replace(product, shape=(768, 4096, 3072 + 64))
        assert decide(parts, alternative=alternative).runs == "dense"
        assert decide(product, alternative=alternative, forms=("dense", "packed")).runs == "dense"
    generation(AMPERE)
    assert decide(product, alternative=alternative).runs == "dense"


def test_an_operand_is_packed_for_any_platform_where_our_kernels_are_named(generation):
    generation(HOPPER)
    found = decide(PRODUCT, implementation="ffi")
    assert (found.runs, found.form) == ("ffi", "packed")


@pytest.mark.parametrize("axes", [(0, 0, None), (None, 0, 0), (0, None, None), (0, 0, 0)], ids=str)
def test_a_batch_has_one_workspace(axes, generation):
    """And the kernel adds the bias."""
    generation(HOPPER)
    shapes = (3, 128, 256), (3, 256, 64), (3, 128)
    given = (
        jax.ShapeDtypeStruct(s[axis is None :], jnp.bfloat16) for s, axis in zip(shapes, axes, strict=True)
    )

    def product(a, b, bias):
        packed = s24.pack24(a, -1, implementation="ffi")
        return s24.matmul(packed, b, bias=bias, implementation="ffi")

    run = jax.jit(jax.vmap(product, axes)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    (operands, results) = re.findall(r"@s24_matmul_compressed24\(.*: \((.*)\) -> (.*)", run)[0]
    assert f"tensor<3x128x64xbf16>, tensor<{hopper.WORKSPACE}xui8>" in results
    assert operands.endswith(f"tensor<{'3' if axes[2] == 0 else '1'}x128xbf16>")
    assert "stablehlo.add" not in run
