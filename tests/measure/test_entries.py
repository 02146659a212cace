"""Entries of a table: products found right, wrong or unsteady, blocks, 8 bits, cuSPARSELt's algorithms."""

import itertools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import decision, table, table_file
from jax_sparse24.dispatch.hardware import Hardware
from jax_sparse24.engine import fusions
from jax_sparse24.measure import entries, nvml, products, tuning
from jax_sparse24.ops.matmul import contract
from jax_sparse24.patterns import VNM
from tests.dispatch.tables import runs_packed
from tests.measure.tables import stored

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernels run on CPU")
FAST = {"repeats": 1, "seconds": 1e-6}


def tune(monkeypatch, folder, operands=(("F1", "w1"),), **options):
    """Measures few small products of one dtype."""
    monkeypatch.setattr(tuning, "SPARSE_OPERANDS", operands)
    options = {
        "shapes": [(16, 8, 12)],
        "dtypes": ["float32"],
        "repeats": 1,
        "seconds": 1e-6,
        "show": None,
    } | options
    path = s24.tune(folder=folder, **options)
    return json.loads(path.read_text())


@pytest.mark.slow
def test_tune_stores_a_table_that_decides_at_once_and_later(monkeypatch):
    content = tune(monkeypatch, None)
    (found,) = content["products"]
    assert (found["product"], found["sparse"], found["shape"]) == ("fwd", "right", [16, 8, 12])
    assert found["status"] == "ok"
    assert all(found[f"{name}_us"] > 0 for name in ("dense", "masked", "packed"))
    assert {"top-2 of 4", "stored mask", "MVUE, exact"} < set(found["producers_us"])
    assert content["versions"] == table.versions()
    expected = found["masked_us"] / found["packed_us"] >= table.AS_FAST
    assert runs_packed(shape=(16, 8, 12)) == expected
    monkeypatch.setattr(table, "_adopted", None)  # as in another process
    assert runs_packed(shape=(16, 8, 12)) == expected


def test_tune_measures_8_bits_of_products_of_weights_only(monkeypatch, tmp_path):
    operands = (("F1", "w1"), ("F2", "y2"), ("B1", "w2"), ("B2", "dy3"))
    found = tune(monkeypatch, tmp_path, operands=operands, dtypes=["float8_e4m3fn"])["products"]
    assert [entry["product"] for entry in found] == ["fwd", "dgrad"]
    for entry in found:
        assert (entry["dtype"], entry["sparse"], entry["status"]) == ("float8_e4m3fn", "right", "ok")
        assert all(entry[f"{name}_us"] > 0 for name in ("dense", "masked", "packed"))


@pytest.mark.slow
def test_tune_measures_blocks_of_activations(monkeypatch, tmp_path):
    operands = (("F2", "y2"), ("B1", "w2"), ("B2", "y2"))
    content = tune(monkeypatch, tmp_path, operands=operands, shapes=[(64, 4, 32)], patterns=[VNM(32, 16)])
    found = {(e["product"], e["sparse"], e["pattern"]): e for e in content["products"]}
    assert set(found) == {
        *(("fwd", "left", pattern) for pattern in ("2:4", "32:2:16")),
        ("dgrad", "right", "2:4"),
        *(("wgrad", "left", pattern) for pattern in ("2:4", "32:2:16")),
        ("dgrad", "result", "32:2:16"),
    }
    assert found["dgrad", "result", "32:2:16"]["status"] == "ok"
    blocks = found["wgrad", "left", "32:2:16"]
    assert blocks["status"] == "ok" and blocks["shape"] == [32, 64, 4]
    assert all(blocks[f"{name}_us"] > 0 for name in ("dense", "masked", "packed"))
    assert list(blocks["producers_us"]) == ["pack_vnm 32:2:16"]
    assert content["format"] == table_file.FORMAT == 3


def plant(monkeypatch, spoil):
    """A packed product whose result passes through `spoil`, and which is very fast otherwise."""

    def planted(a, b, i, j, *, decision=None, **options):
        result = contract(a, b, i, j, decision=decision, **options)
        return spoil(result) if decision is not None and decision.runs == "ffi" else result

    monkeypatch.setattr(products, "contract", planted)


@pytest.mark.slow
def test_a_product_found_wrong_is_stored_as_wrong(monkeypatch, tmp_path):
    plant(monkeypatch, lambda y: y.at[3, 2].add(1e-3))
    (found,) = tune(monkeypatch, tmp_path)["products"]
    assert found["status"] == "wrong"
    assert found["packed_us"] is None
    assert not runs_packed(shape=(16, 8, 12))


def test_a_product_found_unsteady_is_stored_as_not_repeatable(monkeypatch, tmp_path):
    calls = itertools.count()

    def spoil(y):
        tiny = jax.ShapeDtypeStruct((), jnp.float32)
        return y * jax.pure_callback(lambda: np.float32(1 + 2**-23 * (next(calls) % 97)), tiny)

    plant(monkeypatch, spoil)
    (found,) = tune(monkeypatch, tmp_path)["products"]
    assert found["status"] == "not repeatable"
    assert not runs_packed(shape=(16, 8, 12))


def test_wrong_values_at_entries_are_stored_as_wrong(monkeypatch, tmp_path):
    right = fusions.sampled_matmul
    monkeypatch.setattr(
        fusions, "sampled_matmul", lambda *a, **options: right(*a, **options).at[3, 1].add(1e-3)
    )
    content = tune(monkeypatch, tmp_path, operands=(), shapes=[(64, 4, 32)], patterns=[VNM(32, 16)])
    (found,) = content["products"]
    assert (found["sparse"], found["status"], found["packed_us"]) == ("result", "wrong", None)


def test_another_rule_with_measurements_is_measured_and_explained(monkeypatch, tmp_path, capsys):
    """By being in `fusions.MEASURED`, and nowhere else."""

    class Other(fusions.SampledB1):
        part = "At Entries by Another Rule"

    monkeypatch.setattr(fusions, "MEASURED", (Other(),))
    shape, pattern, told = (64, 4, 32), VNM(32, 16), []
    content = tune(monkeypatch, tmp_path, operands=(), shapes=[shape], patterns=[pattern], show=told.append)
    assert [entry["sparse"] for entry in content["products"]] == ["result"]
    assert "B1 at entries by another rule" in told[0]
    s24.explain(s24.methods.Venom(v=pattern.v, m=pattern.m, clusters=1), shape=shape, implementation="ffi")
    assert "At Entries by Another Rule" in capsys.readouterr().out


def test_tune_refuses_shapes_that_do_not_divide():
    with pytest.raises(ValueError, match=r"\(16, 10, 12\) must be .* multiples of 4"):
        s24.tune([(16, 10, 12)])


# ---- algorithms of cuSPARSELt


def test_the_fastest_algorithms_are_measured_in_turn(monkeypatch):
    """All are searched at the first product of a layout, those that were fast there at the next."""
    monkeypatch.setattr(entries, "platform", lambda: "cuda")
    monkeypatch.setattr(tuning, "platform", lambda: "cuda")
    monkeypatch.setattr(entries, "_algorithms", lambda product, dtype: list(range(-1, 20)))
    monkeypatch.setattr(entries, "SEARCHED", 2)
    asked = []

    def search(product, dtype, algorithms):
        asked.append(list(algorithms))
        times = {("cusparselt", a): 1.0 + 0.02 * abs(a - 7) for a in algorithms}
        return {("ffi", None): 2.0} | times

    monkeypatch.setattr(entries, "_search", search)
    maker, product = entries.Entries(3, 0.4), products.product_of("F1", "w1", 64, 32, 48)
    forms = maker._candidates(product, jnp.dtype("bfloat16"))
    assert [form.algorithm for form in forms] == [7, 6] and forms[0].also == ("masked",) != forms[1].also
    maker._candidates(product, jnp.dtype("bfloat16"))
    assert asked == [list(range(-1, 20)), [6, 7]]


def test_algorithms_in_the_products_of_a_table(monkeypatch, documented_cusparselt, own):
    """cuSPARSELt in jnp; algorithm 5 is refused by the library."""
    monkeypatch.setattr(entries, "platform", lambda: "cuda")
    monkeypatch.setattr(tuning, "platform", lambda: "cuda")
    monkeypatch.setattr(entries, "_algorithms", lambda product, dtype: [1, 5, 9])
    monkeypatch.setattr(entries, "CLOSE", 100.0)
    right = entries.contract

    def refusing(a, b, i, j, *args, decision=None):
        if decision is not None and decision.algorithm == 5:
            raise RuntimeError("not supported")
        return right(a, b, i, j, *args, decision=decision)

    monkeypatch.setattr(entries, "contract", refusing)
    monkeypatch.setattr(tuning, "SPARSE_OPERANDS", (("F1", "w1"),))
    monkeypatch.setattr(tuning, "SHAPES", {"cuda": {"bfloat16": ()}})
    s24.tune([(32, 64, 96)], ["bfloat16"], patterns=(), show=None, **FAST)
    (entry,) = [e for e in stored(own)["products"] if e["sparse"] == "right"]
    assert entry["status"] == "ok" and entry.get("algorithm") in (None, 1, 9)
    assert (entry["implementation"] == "cusparselt") == ("algorithm" in entry)


@pytest.mark.slow
def test_on_a_gpu_entries_hold_joules_clock_and_seed(monkeypatch, documented_cusparselt, own):
    """The way of a GPU on a CPU: settled samples in a queue, a fake gauge, cuSPARSELt in jnp."""
    here = Hardware("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", "gpu", "", 8, "9.0")
    started = time.perf_counter()

    class Gauge:
        def read(self):
            at = time.perf_counter()
            return nvml.Reading(at, 1365.0, 700 * (at - started))

    monkeypatch.setattr(nvml, "gauge", lambda: (Gauge(), ""))
    monkeypatch.setattr(table, "hardware", lambda: here)
    monkeypatch.setattr(tuning, "hardware", lambda: here)
    monkeypatch.setattr(decision, "platform", lambda: "cpu")  # where programs really run
    monkeypatch.setattr(entries, "platform", lambda: "cuda")
    monkeypatch.setattr(tuning, "platform", lambda: "cuda")
    monkeypatch.setattr(entries, "_algorithms", lambda product, dtype: [-1, 3])
    monkeypatch.setattr(tuning, "SHAPES", {"cuda": {"bfloat16": ((64, 64, 128),)}})
    monkeypatch.setattr(tuning, "SPARSE_OPERANDS", (("F2", "y2"),))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    s24.tune(patterns=[VNM(64, 16)], seconds=0.05, show=None)
    content = stored(own)
    assert content["capability"] == "9.0" and "50 ms of it" in content["order"]
    found = {e["pattern"]: e for e in content["products"] if e["sparse"] == "left"}
    assert set(found) == {"2:4", "64:2:16"}
    for entry in found.values():
        assert entry["status"] == "ok" and entry["seed"] >= 0
        assert set(entry["mhz"].values()) == {1365.0}
        for name, joules in entry["joules"].items():
            assert joules == pytest.approx(700e-6 * entry[f"{name}_us"], rel=0.1)
    assert "pack_vnm 64:2:16" in found["64:2:16"]["producers_us"]
