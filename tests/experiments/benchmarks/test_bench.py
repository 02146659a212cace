"""The benchmark command: structure of what it writes and the checks it makes. Never how long it takes."""

import dataclasses
import datetime
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jax_sparse24 as s24
from experiments import bench
from experiments.bench import main
from experiments.benchmarks import check, lead, pages, rows, select, session, shown, stored, xla_programs
from experiments.benchmarks.settings import METHODS, PRESETS, Case, Settings
from experiments.benchmarks.suites import ffn, gated, gemm, mesh, producers, train_step
from experiments.config import Mesh
from experiments.errors import UserError
from jax_sparse24.engine import fusions
from jax_sparse24.measure import Times, products, timing
from jax_sparse24.ops.packed_vnm import PackedVNM

pytestmark = pytest.mark.slow


def columns(out: str) -> list[str]:
    (header,) = [line for line in out.splitlines() if line.startswith("| ") and "dtype" in line]
    return [cell.strip() for cell in header.strip("|").split("|")]


def check_file(result, suite):
    assert result["suite"] == suite
    assert set(result["hardware"]) == {"name", "description", "platform", "isa", "cores"}
    assert result["packages"]["jax"] == jax.__version__
    assert {"commit", "tree", "python", "load_before", "settings", "began", "seed", "scheme"} <= set(result)
    assert result["format"] == 2 and result["complete"] and not result["failed"]
    for row in result["rows"]:
        assert set(row["status"].values()) == {"ok"}
        for t in row["ms"].values():
            assert 0 < t["low"] <= t["median"] <= t["high"]
            assert len(t["rounds"]) >= 3 and min(t["rounds"]) <= t["median"] <= max(t["rounds"])


def two_products(*case):
    return [p for p in products_of(*case) if (p.name, p.operand) in {("F1", "w1"), ("B2", "y2")}]


products_of = gemm.ffn_products


def test_gemm(bench, monkeypatch):
    monkeypatch.setattr(gemm, "ffn_products", two_products)
    status, result, out, _ = bench("gemm")
    assert status == 0
    check_file(result, "gemm")
    assert [(row["product"], row["operand"]) for row in result["rows"]] == [("F1", "w1"), ("B2", "y2")]
    for row in result["rows"]:
        assert {"dense", "2:4", "2:4 with packing", "2:4 masked"} <= set(row["ms"])
        assert row["bytes"]["packed"] * 32 == row["bytes"]["dense"] * 17  # float32: 17/32
        assert row["xla_bytes"]["dense"]["argument"] > 0
        assert row["default"] in ("packed", "masked dense") and row["default_reason"]
    names = columns(out)
    assert names.index("packed") < names.index("with packing") < names.index("dense ms"), "ratios first"
    assert "PyTorch" in out or "torch" in out


def test_blocks_are_measured_where_they_fit(bench, monkeypatch):
    """In products of activations, and as producers along both axes."""
    monkeypatch.setattr(gemm, "ffn_products", two_products)
    monkeypatch.setattr(producers, "PRODUCERS", ())
    sizes = ["--shape", "8,32", "--tokens", "64", "--vnm", "32,16", "--vnm", "64,8", "--vnm", "64,12"]
    status, result, out, _ = bench("gemm", *sizes)
    assert status == 0
    check_file(result, "gemm")
    # B2 contracts 64 tokens of (tokens, 32): blocks of 64 rows or 12 columns do not fit.
    forms = [(row["product"], row["format"]) for row in result["rows"]]
    assert forms == [("F1", "2:4"), ("B2", "2:4"), ("B2", "32:2:16")]
    row = result["rows"][-1]
    assert {"dense", "32:2:16", "32:2:16 with packing", "32:2:16 masked"} <= set(row["ms"])
    assert row["bytes"]["packed"] == 32 * (8 * 4 + 2) + 4 * 4
    assert "32:2:16" in out


def test_producers_of_blocks(bench, monkeypatch):
    monkeypatch.setattr(producers, "PRODUCERS", ())
    sizes = ["--shape", "8,32", "--tokens", "64", "--vnm", "32,16", "--vnm", "64,8"]
    status, result, _, _ = bench("producers", *sizes)
    assert status == 0
    check_file(result, "producers")
    measured = {(row["producer"], row["axis"]): row["bytes"] for row in result["rows"]}
    size = 64 * 32
    assert measured == {
        ("pack_vnm 32:2:16", -1): 4 * size + 4 * size // 8 + size // 32 + 2 * 2 * 4,
        ("pack_vnm 32:2:16", -2): 4 * size + 4 * size // 8 + size // 32 + 4 * 4,
        ("pack_vnm 64:2:8", -1): 4 * size + size + size // 16 + 4 * 4,
    }


def test_a_wrong_product_is_reported_without_its_time(bench, monkeypatch):
    contract = products.contract

    def planted(a, b, i, j, *, decision=None):
        y = contract(a, b, i, j, decision=decision)
        return y.at[1, 1].add(0.01) if decision else y

    monkeypatch.setattr(products, "contract", planted)
    monkeypatch.setattr(gemm, "ffn_products", lambda *case: two_products(*case)[:1])
    status, result, out, err = bench("gemm")
    assert status == 1
    (row,) = result["rows"]
    assert row["status"] == {"dense": "ok", "2:4": "wrong", "2:4 with packing": "wrong", "2:4 masked": "ok"}
    assert "2:4" not in row["ms"] and "2:4 with packing" not in row["ms"]
    assert out.count("WRONG") == 3  # both ratios and the time
    assert "2:4 was wrong" in err and "product=F1" in err
    assert "1 of 1 rows hold a wrong result" in pages.page(
        {"x": {"gemm": stored.merged([result | {"file": "f"}])}}
    )


def test_producers_that_are_named(bench):
    names = ("mask24", "pack24 with mask", "transposable_mask24", "saved_backward")
    status, result, _, _ = bench("producers", *(word for name in names for word in ("--producer", name)))
    assert status == 0
    check_file(result, "producers")
    size = 8 * 16
    bytes_moved = {(row["producer"], row["axis"]): row["bytes"] for row in result["rows"]}
    assert bytes_moved == {
        ("mask24", -1): 5 * size,
        ("mask24", -2): 5 * size,
        ("pack24 with mask", -1): 4 * size + size + 2 * size + size // 8,
        ("pack24 with mask", -2): 4 * size + size + 2 * size + size // 8,
        ("pack24 with mask", "both"): 4 * size + size + 2 * (2 * size + size // 8),
        ("transposable_mask24", None): 5 * size,
        ("saved_backward", -2): 4 * size + 3 * (2 * size + size // 8) + 2 * size,
    }


def test_producers_that_are_not_there_are_refused(bench, capsys, tmp_path):
    for suite, name, words in (
        ("producers", "mask42", "'mask42' is unknown; there are mask24, "),
        ("ffn", "mask24", "--producer is for the suite producers: name that"),
    ):
        with pytest.raises(SystemExit):
            bench(suite, "--producer", name)
        assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transposed", [False, True])
def test_gated_activations_as_producers(transposed):
    """The reference in place of the kernel; a result that differs in one element is wrong."""
    settings, case = Settings(repeats=1, seconds=1e-6), Case(8, 4, 16)
    found = [
        row
        for operation in gated.OPERATIONS
        for row in producers.measure_gated(case, "bfloat16", operation, transposed, settings, "reference")
    ]
    for row in found:
        assert set(row["status"].values()) == {"ok"}
        assert {"kernel", "reference", "copy"} == set(row["ms"])
    size = 8 * 16 * 2
    assert [row["bytes"] for row in found] == [3 * size, 5 * size, 6 * size + size // 8]
    assert producers.table(found).count("gated backward + packing") == 1
    forward = gated.OPERATIONS[0]

    def planted(*args):
        return forward.run(*args).at[3, 5].add(0.1)

    assert not gated.programs(case, "bfloat16", forward._replace(run=planted), transposed, "reference")[2]


def test_a_producer_that_differs_in_one_bit_is_wrong(bench, monkeypatch):
    def run(x, m, axis, implementation):
        y = s24.prune24(x, axis, implementation=implementation)
        return -y if implementation == "ffi" else y  # zeros get a sign

    monkeypatch.setattr(producers, "PRODUCERS", [producers.Producer("planted", run, (-1,))])
    if producers.kernels() == "ffi":
        status, result, out, _ = bench("producers")
        assert status == 1
        assert result["rows"][0]["status"]["kernel"] == "wrong"
        assert "WRONG" in out


def test_dy1_and_its_estimate_as_one_producer(bench, monkeypatch):
    """As where one pass makes both: by itself against two, and in a block, where it is a part of B4."""
    monkeypatch.setattr(fusions.SlopeMVUE, "matches", lambda self, run, *_: run.plan.row("B4") is not None)
    made, one_pass = [], fusions.SlopeMVUE.run
    monkeypatch.setattr(fusions.SlopeMVUE, "run", lambda *a, **k: made.append(a[2]) or one_pass(*a, **k))
    status, result, _, _ = bench("ffn", "--method", "FST")
    assert status == 0
    check_file(result, "ffn")
    fst = result["rows"][-1]
    assert set(fst["parts_ms"]["producer"]) == set(fst["parts_ms"]["product"])
    assert {run.activation for run in made} == {"squared_relu"} and {run.op for run in made} > {"bench"}
    case, settings = Case(8, 4, 16), Settings(repeats=1, seconds=1e-6)
    assert producers.slope_producers(case, "bfloat16") == []  # no pass on a CPU
    (row,) = producers.measure_producer(case, "bfloat16", producers.SLOPED, -2, settings)
    size = 8 * 16 * 2
    assert (row["status"]["kernel"], row["bytes"]) == ("ok", 3 * size + size // 2 + size // 16)


@pytest.mark.parametrize(("rule", "name"), [("Squared", "F1"), ("Sloped", "B1")])
def test_a_product_and_what_follows_it_as_one_product(rule, name, bench, monkeypatch):
    """As where one pass does both, in the block and by itself. With dY1 of B1 its estimate alone is made
    for B4, although a pass could make both."""
    monkeypatch.setattr(fusions.SlopeMVUE, "matches", lambda self, run, *_: run.plan.row("B4") is not None)
    rule = getattr(fusions, rule)
    monkeypatch.setattr(rule, "matches", lambda self, run, *_: run.plan.row(name) is not None)
    made, both, one_pass, slope_mvue = [], [], rule.run, fusions.SlopeMVUE.run
    monkeypatch.setattr(rule, "run", lambda *a: made.append(a[1]) or one_pass(*a))
    monkeypatch.setattr(fusions.SlopeMVUE, "run", lambda *a, **k: both.append(a) or slope_mvue(*a, **k))
    status, result, _, _ = bench("ffn", "--method", "FST", "--dtype", "bfloat16", "--implementation", "ffi")
    assert status == 0
    check_file(result, "ffn")
    fst = result["rows"][-1]
    assert fst["parts_ms"]["product"][name] > 0 and fst["parts_ms"]["producer"]["B4"] > 0
    assert {run.op for run in made} == {"bench", "sparse_ffn"}
    assert bool(both) == (name == "F1")


def test_ffn(bench):
    status, result, out, _ = bench("ffn", "--method", "FST")
    assert status == 0
    check_file(result, "ffn")
    assert [row["method"] for row in result["rows"]] == ["Dense", "FST"]
    dense, fst = result["rows"]
    assert (
        set(fst["parts_ms"]["producer"])
        == set(fst["parts_ms"]["product"])
        == {"F1", "F2", "B1", "B2", "B3", "B4"}
    )
    assert dense["parts_ms"]["producer"] == {}
    assert fst["bytes"]["packed"] < fst["bytes"]["dense"] == dense["bytes"]["packed"]
    assert columns(out)[5] == "forward + backward"


def test_train_step(bench):
    """Of an arm that blocks do not have, whose projections are measured alone as well."""
    sizes = ["--shape", "16,32", "--tokens", "64", "--layers", "1"]
    status, result, out, _ = bench("train-step", "--method", "FST-projections", *sizes)
    assert status == 0
    check_file(result, "train-step")
    for row in result["rows"]:
        assert {"step", "ffn", "projections"} <= set(row["ms"]) and np.isfinite(row["loss"]).all()
        assert {"dense step", "dense ffn", "dense projections"} <= set(row["ms"])
    assert columns(out)[6] == "step" and "FST-projections" in lead.table(
        {"train-step": stored.merged([result | {"file": "f"}])}
    )
    assert list(Settings(suites=("train-step",), method=("FST-projections",)).methods) == ["Dense"]


@pytest.mark.parametrize("suites", [(), ("ffn",), ("train-step", "ffn")])
def test_a_method_that_a_suite_does_not_have(suites):
    """It would be left out, and nothing would say so."""
    with pytest.raises(
        UserError, match="FST-projections: the suite ffn does not have it, but train-step and"
    ):
        Settings(suites=suites, method=("FST", "FST-projections"))


def test_what_is_expected_of_a_step_counts_what_was_measured_alone():
    def row(**ms):
        return {"layers": 2, "ms": {name: {"median": value} for name, value in ms.items()}}

    dense = {"dense step": 10.0, "dense ffn": 2.0, "dense projections": 1.5}
    assert train_step.expected(row(**dense, ffn=1.5)) == pytest.approx(10 / 9)
    assert train_step.expected(row(**dense, ffn=1.5, projections=1.0)) == pytest.approx(10 / 8)
    assert train_step.expected(row(**dense)) is None and train_step.share(row(ffn=1.0)) is None
    assert train_step.share(row(**dense)) == pytest.approx(0.4)


class StepsOverMeshes:
    """In place of the steps of the suite mesh, whose own are the launcher's: sizes and losses alone."""

    def __init__(self, monkeypatch, failing=()):
        self.made, self.failing = [], failing
        monkeypatch.setattr(jax, "device_count", lambda: 4)
        monkeypatch.setattr(mesh, "steps_on", self.steps_on)
        monkeypatch.setattr(mesh, "oracle", self.oracle)

    def steps_on(self, over, case, dtype, method, layers, implementation):
        self.made.append((over, type(method).__name__))
        over = Mesh(dp=1) if isinstance(over, int) else over
        if (over.tp, type(method).__name__, "compiled") in self.failing:
            raise RuntimeError("out of registers")
        runs = (over.tp, type(method).__name__, "run") not in self.failing
        sizes = [jax.ShapeDtypeStruct((4096 // over.fsdp,), np.float32)]
        wrong = over.tp == 2
        return self.steps([{"loss": 5.0}, {"loss": 4.9 if wrong else 4.02}], runs, sizes)

    def oracle(self, over, case, dtype, method, layers, implementation):
        self.made.append(("oracle", mesh.shards(over), type(method).__name__))
        return self.steps([{"loss": 5.0}, {"loss": 4.0}], True)

    @staticmethod
    def steps(two, runs, sizes=()):
        class Call:
            program = SimpleNamespace(abstract_state=lambda: sizes, compiler_options={"xla_of_steps": 1})
            temp_bytes, checked = 1000, False

            @property
            def metrics(self):
                if not runs:
                    raise RuntimeError("out of memory")
                self.checked = True
                return two

            def __call__(self):
                assert self.checked, "steps are timed before their losses are known"
                return np.zeros(1)

            def refreshing(self):
                return np.zeros(1)

        return Call()


def meshes_one_by_one(settings):
    """Rows of the suite mesh, and what was raised, per mesh."""
    found = []
    for _, measure in mesh.run(settings, lambda text: None):
        try:
            found.append((measure(), {}))
        except session.Partly as partly:
            found.append((partly.rows, partly.errors))
    return found


def of_meshes(*meshes):
    return Settings(
        **{"suites": ("mesh",), "method": ("FST",), "mesh": meshes, "repeats": 3, "seconds": 1e-6},
        **{"shape": ("128,256",), "tokens": (64,), "dtype": ("float32",)},
    )


def test_steps_over_meshes(monkeypatch):
    """What is computed from times and sizes."""
    fake = StepsOverMeshes(monkeypatch)
    (first, _), (second, _), (third, _) = meshes_one_by_one(of_meshes("fsdp=4", "dp=2,tp=2", "dp=4"))
    assert fake.made == [
        *(*((device, "Dense") for device in range(4)), (Mesh(dp=1, fsdp=4), "Dense"), ("oracle", 4, "Dense")),
        *(*((device, "FST") for device in range(4)), (Mesh(dp=1, fsdp=4), "FST"), ("oracle", 4, "FST")),
        *((Mesh(dp=2, tp=2), "Dense"), ("oracle", 2, "Dense")),
        *((Mesh(dp=2, tp=2), "FST"), ("oracle", 2, "FST")),
        *((Mesh(dp=4), "Dense"), (Mesh(dp=4), "FST")),
    ], "each device alone, and what a batch must give, are made once"
    found = [*first, *second, *third]
    names = ["one device", "fsdp 4", "dp 2, tp 2", "dp 4"]
    assert [(row["mesh"], row["method"]) for row in found] == [
        (name, method) for name in names for method in ("Dense", "FST")
    ]
    assert [row["state_bytes"] for row in found] == [16384, 16384, 4096, 4096, *[16384] * 4]
    assert [mesh.share_of_state(row, found) for row in found] == [1, 1, 0.25, 0.25, 1, 1, 1, 1]
    assert mesh.show_share(found[2], second) == "-"
    # Draws of FST may differ, dense products may not.
    status = [row["status"]["step"] for row in found]
    assert status == ["ok", "ok", "wrong", "ok", "wrong", "wrong", "wrong", "ok"]
    parts = {"step", "dense step", "one device step", "slowest device step"}
    assert all(set(row["ms"]) >= parts for row in found)
    together = [row["mesh"] for row in found if "devices together step" in row["ms"]]
    assert together == ["fsdp 4", "fsdp 4", "dp 4", "dp 4"], "where each device has tokens of its own"
    assert all(row["compiler options"] == {"xla_of_steps": 1} for row in found)
    assert len({stored.identity(row) for row in found}) == 8
    first, *_, last = [line.split("|")[1:] for line in mesh.table(found).splitlines()[2:]]
    assert [cell.strip() for cell in first[:2]] == ["one device", "Dense"]
    assert [cell.strip() for cell in last[:2]] == ["dp 4", "FST"]
    assert list(Settings(suites=("mesh",)).meshes) == ["dp 4", "fsdp 4", "tp 2"]


def test_a_result_and_its_pages_have_the_flags_of_xla_and_nccl(monkeypatch, tmp_path):
    StepsOverMeshes(monkeypatch)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("NCCL_VERSION", "2.28.3-1")  # an image's word, which sets nothing
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    bench.run_suite("mesh", dataclasses.replace(of_meshes("dp=4"), out=tmp_path, torch=False))
    (result,) = stored.files(tmp_path)
    shown = "NCCL_MAX_NCHANNELS=8 XLA_FLAGS=--xla_force_host_platform_device_count=4"
    assert rows.show_flags(result) == shown and rows.show_flags({}) == ""
    results = stored.load(Settings().folder)
    assert f"; with `{shown}`" not in pages.page(results)
    results["nvidia-h200"]["train-step"]["sources"][0]["flags"] = result["flags"]
    assert pages.page(results).count(f"; with `{shown}`") == 1


def test_the_slowest_is_of_the_devices_of_the_mesh(monkeypatch):
    """Of dp 2 the second device, though a third one, which a later mesh has, is slower yet."""
    StepsOverMeshes(monkeypatch)
    taken = {"one device": 2.0, "device 1": 3.0, "device 2": 9.0, "device 3": 1.0, "devices together": 7.0}

    def measured(programs, *_):
        joules = {"joules": 5.0}
        return {key: {"median": taken.get(key[0], 4.0), "rounds": [1.0], **joules} for key in programs}

    monkeypatch.setattr(mesh, "rows_of_times", lambda measure, rows_of: rows_of(measured(measure.args[0])))
    monkeypatch.setattr(mesh.rows, "amortised", lambda usual, rare, every: usual)
    (first, _), (second, _) = meshes_one_by_one(of_meshes("dp=2", "dp=4"))
    slowest = [row["ms"]["slowest device step"] for row in (*first, *second)]
    assert [own["median"] for own in slowest] == [2, 2, 3, 3, 9, 9]
    together = [row["ms"].get("devices together step") for row in (*first, *second)]
    assert [own and own["median"] for own in together] == [None, None, 7, 7, 7, 7]
    assert "joules" not in slowest[-1] and first[0]["ms"]["step"]["joules"] == 5


@pytest.mark.parametrize(
    ("backend", "suites", "dtype", "wanted"),
    [
        ("cpu", ("mesh",), (), ("float32",)),
        ("cpu", ("mesh",), ("bfloat16",), ("bfloat16",)),
        ("gpu", ("mesh",), (), ("float32", "bfloat16")),
        ("cpu", ("ffn",), (), ("float32", "bfloat16")),
    ],
)
def test_meshes_of_cpus_have_float32_unless_another_dtype_is_asked_for(
    backend, suites, dtype, wanted, monkeypatch
):
    """The launcher refuses bfloat16 there."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert Settings(suites=suites, dtype=dtype).dtypes == wanted


def test_a_mesh_has_the_tokens_that_its_rows_name(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    settings = dataclasses.replace(of_meshes("dp=2"), tokens=(1028,))
    with pytest.raises(UserError, match="--tokens 1028 are no whole number of sequences of 256"):
        next(mesh.run(settings, lambda text: None))
    for tokens in (64, 252, 1024):
        next(mesh.run(dataclasses.replace(settings, tokens=(tokens,)), lambda text: None))


@pytest.mark.parametrize(
    ("shape", "over", "words"),
    [
        (
            "64,128",
            "tp=2",
            "--mesh tp=2: tp 2 does not divide the heads of --shape 64,128, one for each 64 of d: 1. "
            "Give --shape with a multiple of 128 for d, or another --mesh",
        ),
        (
            "192,384",
            "dp=2,tp=2",
            "--mesh dp=2,tp=2: tp 2 does not divide the heads of --shape 192,384, .*: 3. Give",
        ),
        (
            "192,260",
            "tp=3",
            "tp 3 does not divide the f of --shape 192,260 into fours. Give --shape with a multiple of 12",
        ),
        (
            "100,200",
            "fsdp=3",
            "fsdp 3 does not divide the d of --shape 100,200. Give .* a multiple of 3 for d",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_a_shape_is_told_before_anything_runs(shape, over, words, monkeypatch):
    """With what bench has options for: the number of heads is none."""
    fake = StepsOverMeshes(monkeypatch)
    settings = dataclasses.replace(of_meshes("dp=2", over), shape=("384,768", shape))
    with pytest.raises(UserError, match=words):
        next(mesh.run(settings, lambda text: None))
    assert not fake.made


@pytest.mark.parametrize("when", ["compiled", "run"])
def test_what_is_measured_of_a_mesh_is_stored_where_one_arm_fails(when, monkeypatch, tmp_path, capsys):
    StepsOverMeshes(monkeypatch, failing=[(2, "Dense", when)])
    settings = dataclasses.replace(of_meshes("tp=2", "dp=4"), out=tmp_path, torch=False)
    lines = bench.run_suite("mesh", settings)
    assert sum("Dense on tp 2 could not be measured: RuntimeError: out of" in line for line in lines) == 1
    (result,) = stored.files(tmp_path)
    found = {(row["mesh"], row["method"]): row for row in result["rows"]}
    assert [*found] == [
        *(("one device", "Dense"), ("one device", "FST"), ("tp 2", "FST")),
        *(("dp 4", "Dense"), ("dp 4", "FST")),
    ]
    beside = {"step", "one device step", "one device dense step", "slowest device step"}
    assert set(found["tp 2", "FST"]["ms"]) == beside
    assert set(found["dp 4", "FST"]["ms"]) == beside | {"dense step", "devices together step"}
    assert result["complete"] and len(result["failed"]) == 1
    assert "out of" in capsys.readouterr().err


def test_a_mesh_of_which_nothing_can_be_measured_raises_what_the_first_arm_raised(monkeypatch):
    failing = [(over, name, "compiled") for over in (1, 2) for name in ("Dense", "FST")]
    StepsOverMeshes(monkeypatch, failing)
    with pytest.raises(RuntimeError, match="out of registers"):
        meshes_one_by_one(of_meshes("tp=2"))


def test_steps_that_search_masks_are_counted_at_their_rate():
    step = {"median": 10.0, "low": 9.0, "high": 11.0, "rounds": [9.0, 10.0, 11.0], "joules": 2.0, "mhz": 1.0}
    mean = rows.amortised(step, {"median": 50.0, "joules": 6.0}, every=40)
    assert mean.pop("rounds") == [10.0, 11.0, 12.0]
    assert mean == {"median": 11.0, "low": 10.0, "high": 12.0, "joules": 2.1, "mhz": 1.0}


# ---- checks


def test_a_wrong_block_is_found():
    case = Case(8, 8, 16)
    good = ffn.float64_block(
        *(
            np.random.default_rng(i).standard_normal(s)
            for i, s in enumerate([(8, 8), (8, 16), (16, 8), (8, 8)])
        )
    )
    expected = ffn.up_to_rounding(good, "float32", case)
    assert ffn.verdict(good, expected) == "ok"
    for place in range(4):
        bad = list(good)
        bad[place] = bad[place] * 1.1
        assert ffn.verdict(bad, expected) == "wrong"


def test_products_in_tf32_are_not_allowed_any_error(monkeypatch):
    """The rounding of operands does not add up with the number of terms; a tolerance of 1 refuses nothing."""
    monkeypatch.setattr(check, "roundoff", lambda dtype: 2.0**-11)
    assert check.tolerance("float32", 16384) < 0.01


@pytest.mark.parametrize("name", ["Venom", "Activation24"])
def test_what_rounding_chooses_is_no_error_and_what_is_wrong_is_one(name):
    """XLA leaves out roundings of a block in bfloat16, so that other elements of nearly equal size stay."""
    case, method = Case(256, 128, 512), METHODS[name]
    operands = ffn.data(case, "bfloat16")
    args = [operands[key] for key in ("x", "w1", "w2", "dy3")]
    states = {name: ffn.state_of(method, operands)}
    expected = ffn.expected(case, "bfloat16", {name: method}, states, args)[name]
    wide = [v.astype("float32") for v in args]
    as_written, unrounded = (
        jax.jit(ffn.forward_backward(ffn.block(method, by)))(*given, states[name])
        for by, given in ((None, args), ("reference", wide))
    )
    assert ffn.verdict(as_written, expected) == ffn.verdict(unrounded, expected) == "ok"
    if name == "Venom":
        assert check.distance(unrounded[2], expected.results[2]) > 10 * check.tolerance("bfloat16", max(case))
    for place in range(4):
        bad = list(as_written)
        eighth = len(bad[place]) // 8
        bad[place] = bad[place].at[:eighth].set(bad[place][-eighth:])
        assert ffn.verdict(bad, expected) == "wrong"
    other = s24.methods.Venom(m=8, weights="soft" if name == "Venom" else "dense")
    y = jax.jit(ffn.block(other, None))(*args[:3], ffn.state_of(other, operands))
    assert ffn.verdict((y,), expected) == "wrong"


def test_packing_along_tokens_is_timed_without_the_tokens(monkeypatch):
    """B2 and B4 of Venom read dY3 and X where they lie; what returned them, too, would copy them."""
    case, method, programs = Case(256, 128, 1024), METHODS["Venom"], {}
    operands, take = ffn.data(case, "float32"), ffn.interleaved
    monkeypatch.setattr(ffn, "interleaved", lambda p, *a, **k: programs.update(p) or take(p, *a, **k))
    settings = Settings(repeats=1, seconds=1e-6)
    found = ffn.parts(case, method, operands, ffn.state_of(method, operands), "ffi", settings)
    for name in ("B2", "B4"):
        assert [type(made) for made in programs["producer", name].result] == [PackedVNM]
        assert found["product"][name] > 0


def test_rows_of_a_block_choose_together():
    case = Case(256, 512, 2048)
    assert ffn.choices(s24.methods.Venom(v=64, m=16), case) == 256 * 2048 // (64 * 16)
    for method in (s24.methods.Activation24(), s24.methods.FST()):
        assert ffn.choices(method, case) == 256 * 2048 // 4
    # Where moved weights chose nothing else, one choice of 512 may differ: by its block, and no more.
    least, one = check.tolerance("bfloat16", max(case)), 1 / 512**0.5
    allowed = check.tolerance_of_choices(least, 0.0, 512)
    assert one < allowed < 2.5 * one


# ---- command line and page


def test_help_names_suites_and_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for word in (
        "gemm",
        "producers",
        "ffn",
        "train-step",
        "report",
        "--shape",
        "--dtype",
        "--method",
        "--tokens",
        "--vnm",
    ):
        assert word in out
    assert all(name in out for name in PRESETS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shape", "gpt2-124"], "Did you mean gpt2-124m?"),
        (["--shape", "10,16"], "multiples of 4"),
        (["--tokens", "6"], "multiple of 4"),
        (["--method", "FTS"], "Did you mean FST?"),
        (["report", "gemm"], "run it alone"),
        (["--repeats", "0"], "at least 1"),
        (["--vnm", "64"], "V,M, such as 64,16"),
        (["--vnm", "48,8"], "v=48 is not supported"),
        (["ffn", "--dtype", "float8_e4m3fn"], "for the suite gemm alone"),
        (["gemm", "--dtype", "float8_e4m3fn"], "cuSPARSELt"),
        (["mesh"], "needs several devices"),
    ],
)
def test_mistakes_are_one_message(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_default_sweeps_cover_widths_and_tokens():
    cases = Settings().cases("gemm")
    assert len({case.T for case in cases}) > 2 and len({case.d for case in cases}) > 2
    assert Settings(shape=("gpt2-124m",), tokens=(64, 128)).cases("ffn") == [
        (64, 768, 3072),
        (128, 768, 3072),
    ]


def test_the_committed_page_is_what_the_results_give():
    folder = Settings().folder
    assert pages.PAGE.read_text() == pages.page(stored.load(folder), stored.files(folder)), (
        "docs/benchmarks.md differs from its results: run `python -m experiments.bench report`"
    )


def test_report_writes_page_and_plots(bench, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    page, images = tmp_path / "page.md", tmp_path / "images"
    monkeypatch.setattr(pages, "PAGE", page)
    monkeypatch.setattr(pages, "IMAGES", images)
    results = tmp_path / "results"
    results.mkdir()
    result = fake_ffn_result()
    (results / "a_ffn_2026-01-01.json").write_text(
        json.dumps(result | {"date": "2026-01-01", "commit": "c0ffee"})
    )
    (results / "a_ffn_2026-01-02.json").write_text(json.dumps(result))
    assert main(["report", "--out", str(results)]) == 0
    text = page.read_text()
    assert "a_ffn_2026-01-02.json" in text and "c0ffee" not in text
    assert "1.25x" in text and "a machine" in text
    assert {p.name for p in images.iterdir()} == {
        "bench-a-lead.png",
        "bench-a-width.png",
        "bench-a-tokens.png",
        "bench-a-cost.png",
    }
    assert all(f"images/{p.name}" in text for p in images.iterdir())


def test_what_is_older_is_marked_in_plots(monkeypatch, tmp_path):
    plots, found = pytest.importorskip("experiments.benchmarks.plots"), []
    monkeypatch.setattr(plots, "save", lambda figure, path: found.append(figure))
    result = fake_ffn_result()
    for scheme in (stored.ROTATING, session.SCHEME):
        own = [row | {"scheme": scheme} for row in result["rows"]]
        for kind in ("width", "cost"):
            plots.write({"ffn": result | {"rows": own}}, tmp_path / f"bench-a-{kind}.png")
    old, new = ([line.get_markerfacecolor() for line in figure.axes[0].get_lines()] for figure in found[::2])
    assert "white" in old and "white" not in new
    assert ["hollow" in figure.get_supxlabel() for figure in found[::2]] == [True, False]
    marked = [[label.get_text()[-1] == "*" for label in f.axes[0].get_yticklabels()] for f in found[1::2]]
    assert all(marked[0]) and not any(marked[1])
    assert ["older" in figure.axes[0].get_xlabel() for figure in found[1::2]] == [True, False]


def test_newer_results_replace_their_rows_alone(tmp_path):
    """A GPU is measured shape by shape, on several days."""
    result = fake_ffn_result()
    *both, last = result["rows"]
    older = result | {"date": "2026-01-01", "rows": [*both, last | {"bytes": {"dense": 1, "packed": 1}}]}
    newer = result | {"date": "2026-01-02", "rows": [last, last | {"T": 256}]}
    for content in (newer, older):
        (tmp_path / f"a_ffn_{content['date']}.json").write_text(json.dumps(content))
    first = newer | {"rows": [last | {"bytes": {"dense": 2, "packed": 2}}]}  # of the same day
    (tmp_path / "a_ffn_2026-01-02.json").write_text(json.dumps(first))
    (tmp_path / "a_ffn_2026-01-02-a.json").write_text(json.dumps(newer))
    found = stored.load(tmp_path)["a"]["ffn"]
    as_old = {"scheme": "rotating order", "sessions": []}
    assert found["rows"] == [row | as_old for row in (*both, last, last | {"T": 256})]
    assert [(source["began"], len(source["rows"])) for source in found["sources"]] == [
        ("2026-01-01", 2),
        ("2026-01-02", 2),
    ]
    text = pages.page({"a": {"ffn": found}})
    assert "- 32 x 128 in float32, 64 x 256 in float32 (FST): 2026-01-01" in text
    assert "- 64 x 256 in float32 (FST): 2026-01-02" in text


def fake_ffn_result():
    def row(T, d):
        t = {"median": 8.0, "low": 7.0, "high": 9.0, "samples": 3}
        return {
            **{"T": T, "d": d, "f": 4 * d, "dtype": "float32", "method": "FST", "implementation": "auto"},
            "status": {"both": "ok", "dense both": "ok", "forward": "ok", "dense forward": "ok"},
            "ms": {"both": t, "dense both": t | {"median": 10.0}, "forward": t, "dense forward": t},
            "parts_ms": {"producer": {"F1": 1.0}, "product": {"F1": 5.0}},
            "bytes": {"dense": 32, "packed": 17},
            "xla_bytes": {"both": {"temp": 64}},
        }

    return {
        "suite": "ffn",
        "date": "2026-01-02",
        "hardware": {"name": "a", "description": "a machine"},
        "packages": {"jax": "1", "torch": None},
        "commit": "0123456789abcdef",
        "tree": "clean",
        "load_before": 0.1,
        "settings": {"repeats": 3},
        "rows": [row(64, 32), row(64, 64), row(128, 64)],
    }


def test_report_of_nothing_and_of_something_else(tmp_path):
    assert "no results yet" in pages.page(stored.load(tmp_path))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(Exception, match="is not a result"):
        stored.load(tmp_path)


def test_rows_are_data_of_the_method_and_not_of_the_clock():
    row = fake_ffn_result()["rows"][0]
    assert rows.show_ratio(row, "dense both", "both") == "1.25x"
    assert rows.show_ms(row, "both") == "8 (7-9)"
    row["status"]["both"] = "not repeatable"
    del row["ms"]["both"]
    assert rows.show_ratio(row, "dense both", "both") == rows.show_ms(row, "both") == "NOT REPEATABLE"
    (found,) = rows.times({"both": Times((3e-3, 1e-3, 2e-3))}).values()
    assert found == {"median": 2.0, "low": 1.5, "high": 2.5, "rounds": [3.0, 1.0, 2.0]}


# ---- sessions


def products_are(monkeypatch, count=2):
    monkeypatch.setattr(gemm, "ffn_products", lambda *case: two_products(*case)[:count])


def test_no_session_overwrites_another(bench, monkeypatch, tmp_path):
    """Also of the same second."""
    products_are(monkeypatch, 1)
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    monkeypatch.setattr(
        session,
        "datetime",
        SimpleNamespace(
            datetime=SimpleNamespace(now=lambda zone: now), UTC=None, timedelta=datetime.timedelta
        ),
    )
    for seed in ("1", "2"):
        status, *_ = bench("gemm", "--seed", seed)
        assert status == 0
    found = {path.name.rpartition("_")[2]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert [found[f"20260102T03040{second}Z.json"]["seed"] for second in (5, 6)] == [1, 2]


def test_a_run_that_is_killed_leaves_what_it_measured(bench, monkeypatch, tmp_path):
    products_are(monkeypatch)
    measure = gemm.rows_of_product

    def killed(case, dtype, product, settings):
        if product.name == "B2":
            raise KeyboardInterrupt
        return measure(case, dtype, product, settings)

    monkeypatch.setattr(gemm, "rows_of_product", killed)
    with pytest.raises(SystemExit):
        bench("gemm")
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert [row["product"] for row in result["rows"]] == ["F1"] and not result["complete"]
    assert "stopped before it was complete" in pages.page(stored.load(tmp_path))


def interrupted(interleaved, measurements=1):
    """`interleaved` that is interrupted after its first rounds, the last of so many times."""
    left = iter(range(measurements - 1))

    def run(*args):
        times = interleaved(*args)
        if next(left, None) is None:
            raise timing.Interrupted(times)
        return times

    return run


def test_steps_that_are_interrupted_leave_what_was_measured(bench, monkeypatch, tmp_path):
    """As by `timeout -s INT`: the rows of all arms, and no further case."""
    monkeypatch.setattr(train_step, "interleaved", interrupted(train_step.interleaved))
    sizes = ["--shape", "8,16", "--tokens", "8", "--tokens", "16"]
    with pytest.raises(SystemExit) as stop:
        bench("train-step", "--method", "FST", "--layers", "1", *sizes)
    assert stop.value.code == 130
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert not result["complete"]
    assert [(row["method"], row["T"]) for row in result["rows"]] == [("Dense", 8), ("FST", 8)]
    for row in result["rows"]:
        assert row["status"]["step"] == "ok" and {"step", "ffn", "dense step"} <= set(row["ms"])
    assert "stopped before it was complete" in pages.page(stored.load(tmp_path))


def test_meshes_that_are_interrupted_leave_what_was_measured(monkeypatch):
    StepsOverMeshes(monkeypatch)
    monkeypatch.setattr(mesh, "interleaved", interrupted(mesh.interleaved))
    with pytest.raises(session.Stopped) as stop:
        meshes_one_by_one(of_meshes("fsdp=4"))
    found = [(row["mesh"], row["method"]) for row in stop.value.rows]
    assert found == [(place, name) for place in (mesh.ONE, "fsdp 4") for name in ("Dense", "FST")]
    assert all({"step", "dense step"} <= set(row["ms"]) for row in stop.value.rows)


def test_what_cannot_be_measured_does_not_stop_the_rest(bench, monkeypatch, tmp_path):
    products_are(monkeypatch)
    measure = gemm.rows_of_product

    def broken(case, dtype, product, settings):
        if product.name == "F1":
            raise RuntimeError("out of memory\nand a trace")
        return measure(case, dtype, product, settings)

    monkeypatch.setattr(gemm, "rows_of_product", broken)
    status, result, _, err = bench("gemm")
    assert status == 1 and [row["product"] for row in result["rows"]] == ["B2"]
    assert "F1 with w1 sparse could not be measured: RuntimeError: out of memory" in err
    assert "out of memory" in pages.page(stored.load(tmp_path)), "the page says it"


def test_nothing_is_left_by_a_mistake(tmp_path):
    with pytest.raises(SystemExit):
        main(["gemm", "--dtype", "float8_e4m3fn", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


# ---- sound ratios


def test_packing_that_takes_no_time_is_a_contradiction(bench, monkeypatch):
    """The measurement is unsound: shown instead of the ratios, and the exit status is 1."""
    products_are(monkeypatch, 1)
    interleaved = products.interleaved

    def planted(functions, *args, **options):
        times = interleaved(functions, *args, **options)
        packed = Times((2.0, 2.1, 2.2, 2.0, 2.1, 2.2))
        return times | {"2:4": packed, "2:4 with packing": Times(tuple(s * 0.9 for s in packed.samples))}

    monkeypatch.setattr(products, "interleaved", planted)
    status, result, out, err = bench("gemm")
    assert status == 1
    assert out.count("CONTRADICTORY") == 2 and "CONTRADICTORY, with packing" in err
    text = pages.page({"x": {"gemm": stored.merged([result | {"file": "f"}])}})
    assert "1 of 1 rows contradict themselves" in text and "no valid result" in text
    (row,) = result["rows"]
    row["ms"]["2:4 with packing"]["rounds"][0] = 3e3
    assert not gemm.contradictory(row), "five of six may be chance"


def timed(*rounds, **others):
    return {
        **dict(zip(("low", "median", "high"), sorted(rounds)[-3:], strict=False)),
        "rounds": [*rounds],
        **others,
    }


def test_ratios_are_paired_and_to_the_fastest_dense_program():
    drift = [1.0, 4.0, 2.0, 8.0, 1.0, 3.0]
    row = {
        "status": {},
        "ms": {
            "dense": timed(*(3.0 * x for x in drift)),
            "dense: cublasLt": timed(*(2.0 * x for x in drift), joules=3.0, watts=700.2, mhz=1300.0),
            "torch dense": timed(*(2.5 * x for x in drift)),
            "2:4": timed(*drift, joules=1.5, watts=650.0, mhz=1400.0),
            "torch 2:4": timed(*(0.5 * x for x in drift)),
        },
    }
    assert rows.show_ratio(row, "dense", "2:4") == "2.00x (2.00-2.00)"
    assert rows.against(row, "dense") == "XLA, cublasLt"
    assert rows.energy(row, "dense", "2:4") == ["3", "1.5", "700, 1300", "650, 1400"]
    row["ms"]["torch dense"] = timed(*drift)
    assert rows.show_ratio(row, "dense", "2:4") == "1.00x (1.00-1.00)"
    assert rows.against(row, "dense") == "PyTorch"
    older = {"status": {}, "ms": {name: {"median": t["median"]} for name, t in row["ms"].items()}}
    assert rows.show_ratio(older, "dense", "2:4") == "3.00x", "as it was published"


def test_dense_programs_besides_the_default(monkeypatch):
    """On a CPU float32 stands in for 16 bits; on a GPU XLA's flags, and what it does not know is said."""
    assert xla_programs.variants("float32") == {}
    assert xla_programs.variants("bfloat16")["float32"].dtype == "float32"
    monkeypatch.setattr(xla_programs.jax, "default_backend", lambda: "gpu")
    assert list(xla_programs.variants("bfloat16", exhaustive=True)) == ["cublasLt", "exhaustive"]
    monkeypatch.setattr(xla_programs, "CUBLASLT", {"xla_no_such_flag": True})
    args = [jax.numpy.ones((4, 4))] * 4
    with pytest.warns(UserWarning, match="dense block, cublasLt, is not measured.*xla_no_such_flag"):
        assert ffn.dense_variants(args, "float32", False) == {}


def test_the_flags_are_known_to_xla():
    for options in (xla_programs.CUBLASLT, xla_programs.EXHAUSTIVE):
        ffn.Program(lambda x: x @ x, jax.numpy.ones((4, 4)), options=options)


def test_what_is_left_of_a_whole_may_be_negative():
    row = fake_ffn_result()["rows"][0]
    row["parts_ms"] = {"producer": {"F1": 3.0}, "product": {"F1": 6.5}}
    assert ffn.rest(row) == -1.5 and "| -1.5 " in ffn.table([row])


def test_pytorchs_block_that_compresses_once_in_40_steps():
    t = fake_ffn_result()["rows"][0]["ms"]["both"] | {"rounds": [7.0, 8.0, 9.0]}
    both = [("torch 2:4", 48.0), ("torch 2:4, compressed before", 8.0)]
    found = [{"method": name, "ms": {"forward": t, "both": t | {"median": ms}}} for name, ms in both]
    *_, made = ffn.with_amortised(found)
    assert made["method"] == "torch 2:4, compressed once in 40" and made["ms"]["both"]["median"] == 9.0
    assert ffn.with_amortised(found[:1]) == found[:1]


def test_rows_in_random_order_stand_beside_their_sessions_and_before_older_ones(tmp_path):
    """The newest counts; how far sessions differ is said; what was measured in a rotating order is so
    called, and goes where the same was measured again, whatever its date."""
    old = fake_ffn_result()
    fast = {"median": 8.0, "low": 8.0, "high": 8.0, "rounds": [8.0] * 6}

    def again(began, ratio):
        row = old["rows"][0]
        ms = dict.fromkeys(row["ms"], fast) | {"dense both": fast | {"rounds": [8.0 * ratio] * 6}}
        head = {"format": 2, "scheme": session.SCHEME, "began": began, "seed": 7, "complete": True}
        return old | head | {"rows": [row | {"ms": ms}]}

    results = [old, again("2026-01-01T00:00:00+00:00", 1.5), again("2026-01-03T00:00:00+00:00", 1.25)]
    results += [again("2026-01-02T00:00:00+00:00", 1.4)]
    for number, result in enumerate(results):
        (tmp_path / f"a_ffn_{number}.json").write_text(json.dumps(result))
    found = stored.load(tmp_path)["a"]["ffn"]
    assert [row["scheme"] for row in found["rows"]] == [session.SCHEME, *["rotating order"] * 2]
    text = pages.page({"a": {"ffn": found}})
    new, _, older = text.partition("#### Rotating order")
    assert "| 1.25x (1.25-1.25) " in new and "| 1.25x to 1.50x (3) " in new and ", seed 7," in new
    assert "FST: 1.25x dense" in new, "the summary has no rows of a rotating order"
    assert older.count("| FST ") == 2


def test_old_and_new_ratios_of_a_product_side_by_side():
    """With what ran before each in the rotation, from stored files alone."""

    def product(form, ms):
        names = ("dense", "torch dense", form, f"{form} with packing")
        times = {name: {"median": t, "rounds": [t] * 6} for name, t in zip(names, ms, strict=True)}
        place = {"T": 8, "d": 8, "f": 16, "dtype": "bfloat16", "product": "B4", "operand": "dy1"}
        return place | {"format": form, "status": dict.fromkeys(names, "ok"), "ms": times}

    def result(scheme, found):
        if scheme != session.SCHEME:
            for row in found:
                row["ms"] = {name: {"median": t["median"]} for name, t in row["ms"].items()}
        hardware = {"name": "g", "description": "a GPU", "platform": "gpu"}
        return {"suite": "gemm", "scheme": scheme, "hardware": hardware, "file": scheme[:3], "rows": found}

    old = [product("2:4", (1.2, 1.3, 1.0, 0.9)), product("64:2:16", (1.2, 1.3, 0.5, 0.6))]
    both = [result("rotating order", old), result(session.SCHEME, [product("2:4", (1.5, 1.6, 1.0, 1.1))])]
    text = pages.comparison.table(both)
    cells = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    assert cells[5:10] == ["1.20x", "1.50x (1.50-1.50)", "XLA", "64:2:16 with packing", "torch dense"]
    assert "1 were faster than without in rotating order, and 0 by more than noise" in text
    assert pages.comparison.table(both[:1]) == ""


def test_plots_never_mix_orders(tmp_path):
    """Of what was measured in a random order these rows alone; the cost of parts where they were measured."""
    old = fake_ffn_result()["rows"]
    new = {**old[0], "scheme": session.SCHEME}
    del new["parts_ms"]
    suites = {"ffn": {"hardware": {"name": "a"}, "rows": [new, *old]}}
    assert select.current(suites, "ffn") == [new]
    assert select.with_parts(suites) == old
    assert list(shown.images(suites)) == ["bench-a-lead.png", "bench-a-cost.png"], "one width is no sweep"
    assert select.current({"ffn": {"rows": old}}, "ffn") == old


def test_parts_are_added_up_alike_by_every_python():
    """`sum` of floats rounds once from Python 3.12 on, and after each term before."""
    times = dict.fromkeys(map(str, range(10)), 0.1)
    row = {"ms": {"both": {"median": 1.5}}, "parts_ms": {"producer": times, "product": {"F1": 0.5}}}
    assert ffn.part(row, "producer") == 1 and ffn.rest(row) == 0


def test_each_width_is_shown_once():
    """At the tokens of the sweep, or else at the most that its blocks were measured with."""
    sweep = [(16, 8, 32), (16, 16, 64)]
    blocks = [*sweep, (32, 8, 32), (64, 2, 8), (128, 2, 8)]
    suites = {
        suite: {"rows": [dict(zip("Tdf", case, strict=True)) for case in cases]}
        for suite, cases in {"ffn": blocks, "gemm": [*sweep, (256, 2, 8)]}.items()
    }
    assert select.block_of_each_width(suites) == [*sweep, (128, 2, 8)]
