"""What the suites compare with besides XLA: rows of other programs, and PyTorch's where it is installed."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from experiments import docs
from experiments.benchmarks import check, dense_e4m3, pages, rows, xla_programs
from experiments.benchmarks.settings import Case, Settings
from experiments.benchmarks.suites import ffn, producers, train_step
from experiments.benchmarks.torch import programs as torch_programs
from experiments.training.step import abstract_model
from jax_sparse24.engine.float8 import Float8
from jax_sparse24.measure import Program

pytestmark = pytest.mark.slow

CASE = Case(64, 16, 32)


def block(args, function=ffn.dense_block, weights=None):
    *inputs, dy = args
    return SimpleNamespace(
        forward=Program(lambda *inputs: (function(*inputs),), *inputs),
        both=Program(ffn.forward_backward(function), *inputs, dy),
        weights=weights or args[1:3],
    )


def wrong(x, w1, w2):
    return jnp.square(jax.nn.relu(x @ w1)) @ w2 * 1.01


@pytest.fixture
def small(monkeypatch):
    """One method, and of XLA's dense programs the default alone, as on a GPU too."""
    monkeypatch.setattr(xla_programs, "variants", lambda *args: {})
    return Settings(method=("STE",), repeats=1, seconds=1e-6)


def test_rows_of_other_blocks(monkeypatch, small):
    """After the dense one, with the dense time; a wrong one without its time; no parts, which are unknown."""
    names = {"torch dense": ffn.dense_block, "torch other": wrong}
    monkeypatch.setattr(torch_programs, "device", lambda: "cpu")
    monkeypatch.setattr(ffn, "rival_blocks", lambda *args: {n: block(args, f) for n, f in names.items()})
    found = ffn.measure_case(CASE, "float32", small)
    assert [row["method"] for row in found] == ["Dense", "torch dense", "torch other", "STE"]
    _, same, other, _ = found
    assert same["implementation"] == "torch" and set(same["status"].values()) == {"ok"}
    assert {"both", "dense both"} <= set(same["ms"])
    assert other["status"]["both"] == "wrong" and "both" not in other["ms"]
    text = ffn.table(found)
    assert "torch dense" in text and "WRONG" in text
    assert ffn.rest(same) is None and ffn.rest(found[0]) is not None


@pytest.mark.parametrize("hopper", [True, False])
def test_methods_in_8_bits_are_compared_with_dense_products_in_8_bits(small, monkeypatch, hopper):
    """Which are measured beside them, in turn, and for them alone. Where hardware has no such products, two
    simulations were measured, which say nothing about speed, and a weight keeps its bytes."""
    if hopper:
        monkeypatch.setattr(dense_e4m3, "dense_float8_obstacle", lambda: None)
        monkeypatch.setattr(ffn, "dense_float8_obstacle", lambda: None)
    assert list(small.methods) == ["Dense", "STE"]
    settings = dataclasses.replace(small, method=("STE", "FST-e4m3"), parts=False)
    assert list(settings.methods) == ["Dense", "Dense-e4m3", "STE", "FST-e4m3"]
    found = {row["method"]: row for row in ffn.measure_case(Case(64, 64, 128), "float32", settings)}
    own, rival, ste = (found[name]["ms"] for name in ("FST-e4m3", "Dense-e4m3", "STE"))
    assert own["e4m3 dense both"] == rival["both"] and own["dense both"] == ste["dense both"]
    assert not any(name.startswith("e4m3") for name in (*rival, *ste))
    shown = over_dense_e4m3(ffn, found)
    ratio = rows.ratio(found["FST-e4m3"], "e4m3 dense both", "both")
    assert shown["FST-e4m3"].startswith(f"{ratio:.2f}x" if hopper else "-") and shown["STE"] == "-"
    dense, e4m3 = (found[name]["bytes"] for name in ("Dense-e4m3", "FST-e4m3"))
    assert dense["packed"] * (4 if hopper else 1) == pytest.approx(dense["dense"], rel=1e-3)
    # A byte for two of four elements, and half a byte where they stand.
    assert e4m3["packed"] * (16 / 2.5 if hopper else 1) == pytest.approx(dense["dense"], rel=1e-3)


def over_dense_e4m3(suite, found) -> dict:
    """What a suite's table says of each method's speed over dense products in 8 bits."""
    lines = [line.split(" | ") for line in suite.table(list(found.values())).splitlines()]
    column = [cell.strip() for cell in lines[0]].index("over dense e4m3")
    return {line[0].strip("| "): line[column].strip() for line in lines[2:]}


def test_steps_in_8_bits_with_projections_are_compared_with_dense_ones(small, monkeypatch):
    """In which the same products are in e4m3, of FFNs and of projections, and which alone is compared."""
    monkeypatch.setattr(dense_e4m3, "dense_float8_obstacle", lambda: None)
    settings = dataclasses.replace(
        small, method=("FST-e4m3", "FST-projections-e4m3"), layers=1, suites=("train-step",)
    )
    names = ["Dense", "Dense-e4m3", "Dense-projections-e4m3", "FST-e4m3", "FST-projections-e4m3"]
    assert list(settings.arms) == names
    case = Case(64, 64, 128)
    rounded = {name: products_in_e4m3(case, settings.arms[name]) for name in names}
    assert rounded["Dense"] == {} and len(rounded["FST-e4m3"]) == 1
    assert rounded["Dense-e4m3"] == rounded["FST-e4m3"]
    assert set(rounded["FST-projections-e4m3"]) == {"ffn", "attention/out", "attention/qkv"}
    assert rounded["Dense-projections-e4m3"] == rounded["FST-projections-e4m3"]

    found = {row["method"]: row for row in train_step.measure_case(case, "float32", settings)}
    shown = over_dense_e4m3(train_step, found)
    for name in ("FST-e4m3", "FST-projections-e4m3"):
        own, rival = found[name]["ms"], found[name.replace("FST", "Dense")]["ms"]
        assert own["e4m3 dense step"] == rival["step"] and own["e4m3 dense ffn"] == rival["ffn"]
        assert own.get("e4m3 dense projections") == rival.get("projections")
        assert not any(part.startswith("e4m3") for part in rival)
        assert shown[name].startswith(f"{rows.ratio(found[name], 'e4m3 dense step', 'step'):.2f}x")
    assert shown["Dense"] == "-" and own["dense step"] == found["Dense"]["ms"]["step"]
    assert own["projections"] and "projections" not in found["FST-e4m3"]["ms"]
    assert found["FST-projections-e4m3"]["loss"] != found["FST-e4m3"]["loss"]
    assert found["Dense-projections-e4m3"]["loss"] != found["Dense-e4m3"]["loss"]
    assert {row["status"]["step"] for row in found.values()} == {"ok"}


def test_methods_with_delayed_scales_have_a_rival_with_delayed_scales(small, monkeypatch):
    """Whose steps remember what they have seen, too."""
    monkeypatch.setattr(dense_e4m3, "dense_float8_obstacle", lambda: None)
    settings = dataclasses.replace(small, method=("FST-e4m3-delayed",), layers=1, suites=("train-step",))
    assert list(settings.arms) == ["Dense", "Dense-e4m3-delayed", "FST-e4m3-delayed"]
    case = Case(64, 64, 128)
    rounded = {name: products_in_e4m3(case, arm) for name, arm in settings.arms.items()}
    assert rounded["Dense-e4m3-delayed"] == rounded["FST-e4m3-delayed"] != {}
    found = {row["method"]: row for row in train_step.measure_case(case, "float32", settings)}
    own, rival = found["FST-e4m3-delayed"]["ms"], found["Dense-e4m3-delayed"]["ms"]
    assert own["e4m3 dense step"] == rival["step"]
    steps = train_step.Steps(
        train_step.config_of(case, "float32", settings.arms["Dense-e4m3-delayed"].method, 1), None
    )
    steps()
    seen = [v for v in jax.tree.leaves(steps.state["sparse"]) if v.shape == (256,)]
    assert len(seen) == 4 and all(v.any() for v in seen)


def products_in_e4m3(case, arm):
    """The names of the products whose operands are rounded, with format and scales, by the layer's place."""
    model = abstract_model(train_step.config_of(case, "float32", arm.method, 1, **arm.model))
    attention = model.blocks[0].attention
    plans = {"ffn": model.blocks[0].ffn.up.method.ffn_plan()} | {
        f"attention/{name}": layer.method.linear_plan()
        for name, layer in (("out", attention.out), ("qkv", attention.qkv))
        if isinstance(layer, s24.nn.Linear)
    }
    by_place = {
        place: {
            name: {(by.format, by.scales) for by in (row.by, row.other)}
            for name, row in plan.rows
            if isinstance(row.by, Float8)
        }
        for place, plan in plans.items()
    }
    return {place: rows for place, rows in by_place.items() if rows}


@pytest.mark.parametrize("good", [True, False])
def test_blocks_with_pruned_weights_are_checked_with_them(good):
    """Against the dense block of what they multiply, which must be 2:4 along both axes."""
    operands = ffn.data(CASE, "float32")
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    cut = s24.transposable_mask24 if good else lambda w: s24.mask24(w, -1)
    pruned = tuple(w * cut(w) for w in args[1:3])
    rival = block([args[0], *pruned, args[3]], weights=pruned)
    found = [ffn.rival_verdict(rival, part, args, None, "float32", CASE) for part in ("forward", "both")]
    assert found == ["ok" if good else "wrong"] * 2


def test_a_pruned_matrix_is_told_from_others():
    w = jnp.asarray(np.random.default_rng(0).standard_normal((16, 32)), jnp.float32)
    pruned = w * s24.transposable_mask24(w)
    assert check.is_pruned(pruned, w)
    assert not check.is_pruned(w, w)
    assert not check.is_pruned(pruned.at[:4, :4].set(pruned[:4, :4] * 2), w)
    assert not check.is_pruned(jnp.zeros_like(w), w)
    assert not check.is_pruned(s24.prune24(w, -1), w)


class OtherSteps:
    temp_bytes = None

    def __init__(self, metrics):
        self.metrics = metrics

    def first_two(self):
        return self.metrics

    def __call__(self):
        return self.metrics[0]["loss"]


def test_rows_of_other_steps(monkeypatch, small):
    """Checked by the dense step's loss and gradient norm, both of them also after an update."""

    def rivals(config, dense):
        still = [dense.metrics[0], {**dense.metrics[1], "loss": dense.metrics[0]["loss"]}]
        return {"torch dense": OtherSteps(dense.metrics), "torch other": OtherSteps(still)}

    monkeypatch.setattr(train_step, "rival_steps", rivals)
    found = train_step.measure_case(CASE, "float32", dataclasses.replace(small, method=("Dense",)))
    assert [row["method"] for row in found] == ["Dense", "torch dense", "torch other"]
    assert [row["status"]["step"] for row in found] == ["ok", "ok", "wrong"]
    assert "step" in found[1]["ms"] and "step" not in found[2]["ms"] and "ffn" not in found[1]["ms"]
    assert "WRONG" in train_step.table(found)


def test_rows_of_other_producers(monkeypatch):
    x = jnp.ones((8, 16))
    made = torch_programs.Packing(Program(jnp.copy, x), True, 2 * x.nbytes)
    packing = {("torch pack", -1): made, ("torch both", None): made._replace(right=False)}
    monkeypatch.setattr(torch_programs, "packing", lambda x: packing)
    found = producers.measure_torch(Case(8, 4, 16), "float32", Settings(repeats=1, seconds=1e-6))
    assert [row["status"]["kernel"] for row in found] == ["ok", "wrong"]
    assert found[0]["implementation"] == "torch" and found[0]["bytes"] == 2 * x.nbytes
    assert not rows.bad(found[1]), "no error of ours"
    assert "WRONG" in producers.table(found)


def test_what_cannot_be_compiled_is_said_and_not_measured(monkeypatch):
    def build():
        raise RuntimeError("no C++ compiler\nand so on")

    assert torch_programs.device() is not None or torch_programs.where_possible("step", build) == {}
    monkeypatch.setattr(torch_programs, "device", lambda: "cpu")
    with pytest.warns(UserWarning, match="step is not measured.*no C\\+\\+ compiler$"):
        assert torch_programs.where_possible("step", build) == {}


def test_pages_tell_other_programs_from_methods():
    """The choice of a method is among ours; the summary of the benchmarks has both."""
    dense, fast = {"median": 2.0}, {"median": 1.0}
    row = {
        "T": 8,
        "d": 8,
        "f": 8,
        "dtype": "float32",
        "ms": {"dense both": dense, "both": fast},
        "status": {},
    }
    both = [
        row | {"method": "FST", "implementation": "auto"},
        row | {"method": "torch dense", "implementation": "torch"},
    ]
    suites = {"ffn": {"rows": both}}
    times = docs.time({"a": suites})
    assert "FST" in times and "torch" not in times
    assert "float32, torch dense: 2.00x" in pages.summary(suites)


# ---- PyTorch itself


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_blocks(torch, dtype):
    operands = ffn.data(CASE, dtype)
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    truth = ffn.float64_block(*args)
    found = ffn.rival_blocks(*args)
    assert "torch dense" in found
    for rival in found.values():
        for part in ("forward", "both"):
            assert ffn.rival_verdict(rival, part, args, truth, dtype, CASE) == "ok"


@pytest.mark.parametrize("before", [False, True])
def test_torch_blocks_with_sparse_weights(torch, monkeypatch, before):
    """What they compute, with compression left out, which needs a GPU."""
    from experiments.benchmarks.torch import ffn as torch_ffn

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda w: w)
    operands = ffn.data(CASE, "bfloat16")
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    rival = torch_ffn.sparse(*args, before=before)
    for part in ("forward", "both"):
        assert ffn.rival_verdict(rival, part, args, None, "bfloat16", CASE) == "ok"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_steps(torch, dtype, monkeypatch):
    config = train_step.config_of(CASE, dtype, s24.methods.Dense(), 2)
    dense = train_step.Steps(config, None)
    (steps,) = train_step.rival_steps(config, dense).values()
    expected = train_step.up_to_rounding(dense.metrics, dtype, CASE)
    assert train_step.verdict(steps, expected, bitwise=False) == "ok"
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    assert train_step.verdict(steps, expected, bitwise=False) == "not repeatable"
    steps.metrics = steps.first_two()
    assert train_step.verdict(steps, expected, bitwise=False) == "wrong"


def test_suites_with_torch(torch, bench):
    status, result, out, _ = bench("ffn", "--method", "STE")
    assert status == 0
    methods = [row["method"] for row in result["rows"] if row["implementation"] != "xla"]
    assert methods == ["Dense", "torch dense", "STE"]
    assert "PyTorch: not measured" not in out


@pytest.mark.parametrize("name", [entry.name for entry in s24.methods.list()])
def test_a_step_is_of_a_run_in_which_every_method_is_sparse(name):
    config = train_step.config_of(CASE, "float32", getattr(s24.methods, name)(), 2)
    assert any(phase.sparse for phase in config.schedule.phases) or name == "Dense"
