"""`s24.tune` and `measure.ensure`: what they measure, how they store it, and what they leave alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import table, table_file
from jax_sparse24.measure import products, tuning
from jax_sparse24.ops.matmul import contract
from jax_sparse24.patterns import VNM
from tests.measure.tables import stored

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernels run on CPU")
FAST = {"repeats": 1, "seconds": 1e-6}


def fake_entry(job, packed=50.0) -> dict:
    kind, side, _, shape = job.key
    return {
        **{"product": kind, "sparse": side, "pattern": "2:4", "dtype": job.dtype, "shape": list(shape)},
        **{"implementation": "ffi", "status": "ok", "producers_us": {}},
        **{"dense_us": 90.0, "masked_us": 100.0, "packed_us": packed},
    }


@pytest.fixture
def measured(monkeypatch):
    """Jobs are noted instead of measured; `measured.before(count)` is called before each."""

    class Noted:
        jobs, packed = [], 50.0

        @staticmethod
        def before(count):
            pass

        def __init__(self, repeats, seconds):
            self.repeats = repeats

        def of(self, job):
            self.before(len(self.jobs))
            self.jobs.append(job)
            return [fake_entry(job, self.packed)]

    monkeypatch.setattr(tuning, "Entries", Noted)
    Noted.jobs = []
    return Noted


# ---- what is measured


def test_the_default_is_every_shape_and_the_quick_form_one(measured):
    s24.tune(show=None)
    shapes = {(job.shape, job.dtype) for job in measured.jobs}
    assert shapes == {(s, d) for d, many in tuning.SHAPES["cpu"].items() for s in many}
    del measured.jobs[:]
    s24.tune(quick=True, show=None)
    assert {(job.shape, job.dtype) for job in measured.jobs} == {((2048, 512, 2048), "float32")}
    assert {job.patterns for job in measured.jobs} == {(VNM(64, 16),)}
    assert not any(job.whole for job in measured.jobs)
    assert len(measured.jobs) == 10, "nine products with one operand sparse, and B1 at entries"


def test_a_shape_with_d_equal_to_f_measures_each_product_once(measured):
    s24.tune([(64, 32, 32)], ["float32"], show=None)
    products = [job.key for job in measured.jobs]
    assert len(set(products)) == len(products) == 7
    assert {job.sparse for job in measured.jobs} >= {"y2", "dy1"}, "of the same product, the one with blocks"


def test_a_budget_leavesproducts_out_and_says_which(measured, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: clock[0])

    def before(count):
        clock[0] += 30.0

    measured.before = staticmethod(before)
    lines = []
    s24.tune([(64, 32, 48), (64, 32, 96)], ["float32"], budget=100, show=lines.append)
    assert len(measured.jobs) == 4
    assert lines[0].startswith(
        "tune: 1 of 20, 2:4 1.80x dense: F1 with w1 sparse, T=64 d=32 f=48 float32; 30 s"
    )
    assert lines[0].endswith("about 570 s left")
    del measured.jobs[:]
    s24.tune([(64, 32, 48), (64, 32, 96)], ["float32"], budget=100, show=None)
    assert [str(job) for job in measured.jobs][:2] == [
        "B2 with dy3 sparse, T=64 d=32 f=48 float32",
        "B2 with y2 sparse, T=64 d=32 f=48 float32",
    ], "it goes on"
    assert (
        "after 120 s 16 products are left for another call, of T=64 d=32 f=48 float32, T=64 d=32 f=96"
        in lines[4]
    )


def test_a_result_that_differs_in_one_timed_call_is_not_repeatable(monkeypatch, tmp_path):
    """All others, the last one included, have the bits of the first."""
    calls = []

    def planted(a, b, i, j, *, decision=None):
        y = contract(a, b, i, j, decision=decision)
        if decision is None or decision.runs != "ffi":
            return y

        def factor():
            calls.append(None)
            return np.float32(1 + 2**-23 * (len(calls) == 5))

        return y * jax.pure_callback(factor, jax.ShapeDtypeStruct((), jnp.float32))

    monkeypatch.setattr(products, "contract", planted)
    monkeypatch.setattr(tuning, "SPARSE_OPERANDS", (("F1", "w1"),))
    s24.tune([(16, 8, 12)], ["float32"], patterns=(), folder=tmp_path / "t", show=None, **FAST)
    (entry,) = [e for e in stored(tmp_path / "t")["products"] if e["sparse"] == "right"]
    assert len(calls) > 6 and entry["status"] == "not repeatable"


# ---- how it is stored


def test_what_was_measured_before_stays_unless_measured_again(measured, own):
    s24.tune([(64, 32, 48)], ["float32"], show=None)
    first = stored(own)["products"]
    s24.tune([(512, 256, 384)], ["float32"], show=None)
    assert len(stored(own)["products"]) == 2 * len(first)
    measured.packed = 20.0
    s24.tune([(64, 32, 48)], ["float32"], show=None)
    content = stored(own)
    assert len(content["products"]) == 2 * len(first)
    again = [e for e in content["products"] if 64 in e["shape"]]
    assert {e["packed_us"] for e in again} == {20.0}
    assert content["format"] == 3 and "random" in content["order"]


def test_a_table_of_other_versions_is_replaced(measured, own):
    s24.tune([(64, 32, 48)], ["float32"], show=None)
    (path,) = own.iterdir()
    path.write_text(json.dumps(stored(own) | {"versions": {"jaxlib": "0.0.1"}}))
    s24.tune([(512, 256, 384)], ["float32"], show=None)
    assert not [e for e in stored(own)["products"] if 64 in e["shape"]]


def test_an_interruption_costs_one_product(measured, own):
    def before(count):
        if count == 3:
            raise KeyboardInterrupt

    measured.before = staticmethod(before)
    with pytest.raises(KeyboardInterrupt):
        s24.tune([(64, 32, 48)], ["float32"], show=None)
    assert len(stored(own)["products"]) == 3


def test_of_two_tunings_at_once_the_last_leaves_its_own_table(measured, own):
    """One runs from beginning to end while the other measures its fourth product."""

    def before(count):
        if count == 3:
            measured.before = staticmethod(lambda count: None)
            measured.packed = 20.0
            s24.tune([(64, 32, 48)], ["float32"], show=None)
            assert {e["packed_us"] for e in stored(own)["products"]} == {20.0}, (
                "it ended, and has all its own"
            )
            measured.packed = 50.0

    measured.before = staticmethod(before)
    s24.tune([(64, 32, 48)], ["float32"], show=None)
    content = stored(own)
    assert {e["packed_us"] for e in content["products"]} == {50.0} and len(content["products"]) == 10


def test_two_writers_do_not_share_a_file(tmp_path, monkeypatch):
    path, replace = tmp_path / "table.json", table_file.os.replace
    contents = [{"format": 3, "products": [{"by": name}] * 3} for name in "ab"]

    def meanwhile(*args):
        monkeypatch.setattr(table_file.os, "replace", replace)
        table_file.write(contents[1], path)
        replace(*args)

    monkeypatch.setattr(table_file.os, "replace", meanwhile)
    table_file.write(contents[0], path)
    assert json.loads(path.read_text()) == contents[0]
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(measured, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match=r"tune: .*file/tuning cannot be written; give a folder="):
        s24.tune([(64, 32, 48)], ["float32"], folder=tmp_path / "file" / "tuning", show=None)
    assert not measured.jobs


# ---- before a run


@pytest.mark.slow
def test_ensure_measures_what_a_run_needs_once(own):
    methods = [s24.methods.FST(), s24.methods.Venom(v=16, m=8, clusters=2)]
    lines = []
    path = tuning.ensure([(64, 32, 48)], ["float32"], methods, show=lines.append)
    found = {(e["product"], e["sparse"], e["pattern"], tuple(e["shape"])) for e in stored(own)["products"]}
    plan = {("fwd", "right", "2:4", (64, 32, 48)), ("dgrad", "result", "16:2:8", (64, 32, 48))}
    assert found >= plan and path.parent == own
    assert "they are measured once" in lines[0] and len(lines) > 5
    assert tuning.ensure([(64, 32, 48)], ["float32"], methods, show=lines.append) is None
    table._stored.cache_clear()
    table._adopted = None  # as in another process
    assert tuning.ensure([(64, 32, 48)], ["float32"], methods) is None
    assert tuning.missing((64, 32, 48 * 64), "float32", methods[:1]), "nothing is near"
    assert not tuning.missing((64, 32, 48), "float32", [s24.methods.Dense()])


def test_ensure_measures_onlyproducts_of_the_plan(measured):
    tuning.ensure([(64, 32, 48)], ["float32"], [s24.methods.SSTE()], show=None)
    plan = s24.methods.SSTE().ffn_plan()
    packed = {name for name, row in plan.rows if str(row.by) and "dense" not in str(row.by)}
    assert {job.name for job in measured.jobs} == packed
    assert not any(job.whole for job in measured.jobs)


def test_ensure_measures_the_three_products_of_a_linear_layer(measured):
    tuning.ensure([(64, 32, 48)], ["float32"], [s24.methods.FST()], linear=True, show=None)
    found = {job.key for job in measured.jobs}
    shapes = {"fwd": (64, 32, 48), "dgrad": (64, 48, 32), "wgrad": (32, 64, 48)}
    assert found == {(kind, "right", "float32", shape) for kind, shape in shapes.items()}


@pytest.mark.slow
def test_patterns_that_do_not_fit_are_not_asked_for_again(own):
    """64 rows share columns: 48 tokens do not divide."""
    method = s24.methods.Venom(v=64, m=16, clusters=2)
    tuning.ensure([(48, 32, 64)], ["float32"], [method], show=None)
    assert tuning.ensure([(48, 32, 64)], ["float32"], [method], show=None) is None


def test_ensure_goes_on_where_nothing_can_be_stored(measured, tmp_path):
    (tmp_path / "file").write_text("")
    lines = []
    folder = tmp_path / "file" / "tuning"
    tuning.ensure([(64, 32, 48)], ["float32"], [s24.methods.FST()], folder=folder, show=lines.append)
    assert "serve this process alone" in lines[-1]
    assert not tuning.missing((64, 32, 48), "float32", [s24.methods.FST()])


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn"])
def test_what_no_kernel_multiplies_is_not_measured(measured, dtype):
    assert tuning.ensure([(64, 32, 48)], [dtype], [s24.methods.FST()], show=None) is None


def test_products_in_8_bits_are_measured_where_the_library_takes_them(documented_cusparselt, measured):
    def in_8_bits(shape, method, linear=False):
        found = tuning.missing(shape, "bfloat16", [method], linear)
        return [job.name for job in found if job.dtype == "float8_e4m3fn"]

    assert in_8_bits((128, 64, 128), s24.methods.FST(fp8="tensor")) == ["F1", "B3", "F2", "B1"]
    assert in_8_bits((128, 64, 128), s24.methods.SSTE(fp8="tensor")) == ["F1", "F2"]
    assert in_8_bits((128, 32, 64), s24.methods.FST(fp8="tensor")) == ["B3", "F2"]  # K is 32 in the others
    assert not in_8_bits((128, 64, 128), s24.methods.FST())
    # A linear layer's table has one weight, whose products are named as those of W1.
    assert in_8_bits((128, 64, 128), s24.methods.FST(fp8="tensor"), linear=True) == ["F1", "B3"]
    assert in_8_bits((128, 64, 128), s24.methods.SSTE(fp8="tensor"), linear=True) == ["F1"]


def test_ensure_refuses_shapes_that_do_not_divide():
    with pytest.raises(ValueError, match=r"ensure: shapes\[0\]=\(16, 10, 12\) must be .* multiples of 4"):
        tuning.ensure([(16, 10, 12)], ["float32"], [s24.methods.FST()])


SHAPE, METHOD = (64, 32, 48), s24.methods.FST()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shapes": SHAPE}, r"shapes\[0\]=64 must be \(T, d, f\)"),
        ({"shapes": [(64.0, 32, 48)]}, r"shapes\[0\]=\(64\.0, 32, 48\) must be"),
        ({"shapes": "64"}, "shapes='64' must be a list of shapes"),
        ({"dtypes": "float32"}, "dtypes='float32' must be a list of names of dtypes"),
        ({"dtypes": ["bf16"]}, "dtype='bf16' is none of the supported ones"),
        ({"dtypes": ["int8"]}, "dtype='int8' is none of the supported ones"),
        ({"budget": -1}, "budget=-1 must be 0 or positive"),
        ({"budget": float("nan")}, "budget=nan must be 0 or positive"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused(measured, change, words):
    """One name for a list was read letter by letter, and numbers of bytes were measured."""
    for name, options in (("tune", {}), ("ensure", {"methods": [METHOD]})):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: {words}"):
            getattr(tuning, name)(
                **{"shapes": [SHAPE], "dtypes": ["float32"], "show": None, **options, **change}
            )
    assert not measured.jobs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quick": "yes"}, "quick must be True or False"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"seconds": "1"}, "seconds must be a number"),
        ({"patterns": ["64:2:16"]}, "patterns must be VNM"),
    ],
    ids=str,
)
def test_tune_refuses_options_of_another_kind(measured, options, words):
    with pytest.raises((TypeError, ValueError), match=f"tune: {words}"):
        s24.tune([SHAPE], ["float32"], show=None, **options)
    assert not measured.jobs


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (METHOD, "must be a list"),
        ([type(METHOD)], r"call it: FST\(\)"),
        (["FST"], "must be one of s24.methods"),
    ],
    ids=str,
)
def test_ensure_takes_a_list_of_methods(measured, methods, words):
    with pytest.raises(TypeError, match=f"ensure: .*{words}"):
        tuning.ensure([SHAPE], ["float32"], methods, show=None)
