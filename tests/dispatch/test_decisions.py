"""`implementation=None` decides by what `s24.tune` measured; a wrong or unsteady product is never chosen."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.choices import decided_block
from jax_sparse24.dispatch import table as tables
from jax_sparse24.dispatch import table_file
from jax_sparse24.dispatch.hardware import Hardware, hardware
from jax_sparse24.dispatch.product import Product
from jax_sparse24.engine import fusions
from jax_sparse24.engine.execution import Execution
from jax_sparse24.measure import tuning
from jax_sparse24.measure.products import SPARSE_OPERANDS, product_of
from tests.dispatch.tables import KINDS, entry, runs_packed, store, table

SHIPPED = tables.SHIPPED
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernels run on CPU")


def test_without_measurements_products_run_masked_dense():
    assert not runs_packed()
    assert runs_packed(implementation="ffi")


@pytest.mark.parametrize(
    ("packed", "expected"), [(50.0, True), (100.0, True), (100.1, False), (300.0, False)]
)
def test_packed_runs_where_it_was_measured_to_be_as_fast(folders, packed, expected):
    store(folders[0], table(entry(packed=packed)))
    assert runs_packed() == expected


def test_a_named_implementation_is_always_honoured(folders):
    store(folders[0], table(entry(packed=300.0)))
    assert runs_packed(implementation="ffi")
    store(folders[0], table(entry(packed=1.0)))
    tables._stored.cache_clear()
    assert not runs_packed(implementation="reference")


def test_each_product_side_dtype_and_shape_has_its_own_decision(folders):
    store(
        folders[0],
        table(
            entry("fwd", "right"),
            entry("fwd", "left", packed=300.0),
            entry("wgrad", "right", packed=300.0),
            entry("fwd", "right", shape=(64, 512, 512), packed=300.0),
        ),
    )
    assert runs_packed("fwd", "right")
    assert not runs_packed("fwd", "left")
    assert not runs_packed("wgrad", "right")
    assert not runs_packed("dgrad", "right"), "never measured"
    assert not runs_packed(dtype=jnp.bfloat16), "never measured"
    assert runs_packed(shape=(128, 64, 48)), "nearest is the small one"
    assert not runs_packed(shape=(64, 256, 512)), "nearest is the large one"
    assert not runs_packed(shape=(64, 32, 48 * 64)), "nothing is near"


def test_each_pattern_has_its_own_decision(folders):
    blocks = entry("fwd", "left", shape=(64, 32, 48), packed=50.0, pattern="64:2:16")
    store(folders[0], table(blocks, entry("fwd", "left", packed=300.0, pattern="2:4")))
    x, w = jnp.ones((64, 32)), jnp.ones((32, 48))

    def packed(v, m):
        text = str(jax.make_jaxpr(lambda x, w: s24.matmul(s24.pack_vnm(x, v, m), w))(x, w))
        return "s24_vnm_matmul" in text

    assert packed(64, 16)
    assert not packed(64, 8), "never measured"
    assert not packed(32, 16), "never measured"
    assert not runs_packed("fwd", "left")


@pytest.mark.slow
def test_b1_is_made_at_entries_of_y2_where_that_was_fastest(folders):
    """For V:2:M activations: against the whole product by dense weights, and by packed ones."""
    method = s24.methods.Venom(v=16, m=8, clusters=2)
    shape, weights = (64, 32, 48), {"w1": jnp.ones((32, 48)), "w2": jnp.ones((48, 32))}
    state = {name: method.init(w, name) for name, w in weights.items()}

    def sampled(*entries):
        store(folders[0], table(*entries))
        tables._stored.cache_clear()
        run = lambda x: s24.sparse_ffn(x, *weights.values(), method, state).sum()  # noqa: E731
        return "s24_vnm_sampled" in str(jax.make_jaxpr(jax.grad(run))(jnp.ones(shape[:2])))

    at_entries = entry("dgrad", "result", shape, pattern="16:2:8")
    assert sampled(at_entries)
    assert sampled(at_entries, entry("dgrad", "right", shape, packed=60.0)), "packed weights take longer"
    assert sampled(at_entries, entry("dgrad", "right", shape, packed=41.0)), "10 more to take the entries"
    assert not sampled(at_entries, entry("dgrad", "right", shape, packed=39.0)), "packed weights take less"
    smaller, larger = (64, 16, 24), (64, 64, 96)  # a quarter of the work, and four times as much
    assert sampled(at_entries, entry("dgrad", "right", smaller, packed=15.0)), "15 us would be 60 here"
    assert not sampled(
        entry("dgrad", "result", smaller, pattern="16:2:8", packed=25.0),
        entry("dgrad", "right", shape, packed=50.0),
    ), "15 us more than to take the entries would be 60 here"
    assert sampled(
        entry("dgrad", "result", larger, pattern="16:2:8", packed=90.0),
        entry("dgrad", "right", shape, packed=50.0),
    ), "80 us more would be 20 here"
    assert not sampled(entry("dgrad", "result", shape, pattern="16:2:8", packed=120.0))
    assert not sampled(entry("dgrad", "result", shape, pattern="16:2:8", status="wrong"))
    assert not sampled(entry("dgrad", "result", shape, pattern="16:2:16")), "another pattern"


def test_b1_of_packed_weights_is_multiplied_by_the_library_that_is_asked_for(documented_cusparselt):
    """Only dense weights have their values taken at entries then: there is nothing for cuSPARSELt."""
    for weights, runs in ("soft", "cusparselt"), ("dense", fusions.SAMPLED_B1.part):
        method = s24.methods.Venom(v=64, m=8, clusters=2, weights=weights)
        block = decided_block(method, (128, 64, 256), "bfloat16", "cusparselt")
        assert {choice.product: choice.runs for choice in block.choices()}["B1"] == runs


BLOCK = (64, 32, 48)
METHODS = {
    "FST": s24.methods.FST(),
    "Activation24": s24.methods.Activation24(),
    "Venom": s24.methods.Venom(v=16, m=8, clusters=2),
    "SSTE": s24.methods.SSTE(),
}


def everything(**times):
    """An entry for every product of a block of this shape, of both patterns."""
    sizes = {"fwd": ("left", "right"), "dgrad": ("left", "right", "result"), "wgrad": ("left", "right")}
    return [
        entry(product, side, BLOCK, pattern=pattern, **times)
        for product, sides in sizes.items()
        for side in sides
        for pattern in ("2:4", "16:2:8")
    ]


def trace_of(method):
    w1, w2 = jnp.ones((32, 48)), jnp.ones((48, 32))
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}
    run = lambda x: s24.sparse_ffn(x, w1, w2, method, state, jax.random.key(0)).sum()  # noqa: E731
    jax.make_jaxpr(jax.grad(run))(jnp.ones((64, 32)))


@pytest.mark.parametrize("name", METHODS)
def test_the_table_is_asked_once_for_each_sparse_operand(folders, monkeypatch, name):
    """Packed or dense, forward and backward, also where a fused pass could have made the operand."""
    find, asked = tables.find, []
    monkeypatch.setattr(tables, "find", lambda product: asked.append(product) or find(product))
    weights_win = [*everything(packed=60.0), entry("dgrad", "right", BLOCK, packed=20.0)]
    for entries in (everything(packed=50.0), everything(packed=200.0), weights_win):
        store(folders[0], table(*entries))
        tables._stored.cache_clear()
        asked.clear()
        trace_of(METHODS[name])
        assert len(set(asked)) == len(asked), asked
        assert len(asked) == {"FST": 6, "Activation24": 4, "Venom": 7, "SSTE": 4}[name]


def test_a_weight_is_packed_both_ways_where_both_of_its_products_are_packed(folders, monkeypatch):
    w = jnp.ones((32, 48))
    method = s24.methods.FST(mvue=None)
    state = method.init(w)

    def packs(**packed):
        shapes = {"fwd": (64, 32, 48), "dgrad": (64, 48, 32)}
        store(folders[0], table(*(entry(k, shape=shapes[k], packed=us) for k, us in packed.items())))
        tables._stored.cache_clear()
        run = lambda x, w: s24.sparse_dot(x, w, method, state).sum()  # noqa: E731
        text = str(jax.make_jaxpr(jax.grad(run, (0, 1)))(jnp.ones((64, 32)), w))
        return text.count("s24_pack_masked_both"), text.count("s24_pack_masked")

    cpu_and_cuda = packs(fwd=50.0, dgrad=200.0)[1]
    assert packs(fwd=50.0, dgrad=200.0) == packs(fwd=200.0, dgrad=50.0) == (0, cpu_and_cuda)
    assert packs(fwd=200.0, dgrad=200.0) == (0, 0)
    assert packs(fwd=50.0, dgrad=50.0) == (0, 2 * cpu_and_cuda), "one pass was not measured to be faster"
    monkeypatch.setattr(fusions, "both_ways_faster", lambda dtype: True)
    assert packs(fwd=50.0, dgrad=50.0) == (cpu_and_cuda, cpu_and_cuda)


@pytest.mark.parametrize("name", METHODS)
def test_explain_says_what_runs(folders, monkeypatch, name):
    """Also where a product is faster than the masked dense one, and slower than the dense one."""
    multiply, ran = Execution.multiply, {}
    monkeypatch.setattr(
        Execution,
        "multiply",
        lambda self, name, operands, *args, **options: (
            ran.update({name: operands.decision}) or multiply(self, name, operands, *args, **options)
        ),
    )
    for packed, masked in ((50.0, 100.0), (100.0, 110.0), (200.0, 100.0)):  # 90 us dense
        store(folders[0], table(*everything(packed=packed, masked=masked)))
        tables._stored.cache_clear()
        ran.clear()
        trace_of(METHODS[name])
        said = {choice.product: choice for choice in decided_block(METHODS[name], BLOCK, "float32").choices()}
        entries_only = {p for p, choice in said.items() if choice.runs == "only at entries of Y2"}
        assert ran.keys() | entries_only == said.keys()
        assert {p: said[p].decision for p in ran if said[p].decision} == {
            p: decision for p, decision in ran.items() if said[p].decision
        }


@pytest.mark.parametrize("status", ["wrong", "not repeatable"])
def test_a_wrong_or_unsteady_product_is_never_chosen(folders, status):
    store(folders[0], table(entry(packed=1.0, status=status)))
    assert not runs_packed()


def test_the_table_of_another_machine_decides_nothing(folders):
    store(folders[1], table(entry(packed=10.0)), "other-machine")
    assert not runs_packed()


def test_own_table_then_the_shipped_one_of_this_hardware(folders, capsys):
    own, shipped = folders
    store(shipped, table(entry(packed=98.0)))
    assert runs_packed()
    store(own, table(entry(packed=300.0)))
    tables._stored.cache_clear()
    assert not runs_packed()
    store(own, table(entry(packed=300.0), versions={"jax_sparse24": "0.0.1", "jaxlib": "0.0.1"}))
    tables._stored.cache_clear()
    assert runs_packed(), "of other versions, so passed over"
    s24.explain(s24.methods.STE(), shape=(64, 32, 48))
    assert "run s24.tune() again" in capsys.readouterr().out


def test_explain_prints_the_call_that_measures_its_shape(folders, capsys):
    store(folders[0], table(entry()))
    s24.explain(s24.methods.STE(), shape=(4096, 1024, 4096), dtype="bfloat16")
    assert 'near this shape; run s24.tune([(4096, 1024, 4096)], ["bfloat16"])' in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 3}', '{"format": 999, "products": []}'])
def test_a_broken_file_is_passed_over_and_named(folders, text, capsys):
    store(folders[0], text)
    assert not runs_packed()
    s24.explain(s24.methods.STE(), shape=(64, 32, 48))
    assert str(folders[0]) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"packed_us": "fast"}, "'packed_us' is 'fast' and must be a positive finite number"),
        ({"packed_us": 0}, "'packed_us' is 0 and must be a positive finite number"),
        ({"dense_us": float("nan")}, "'dense_us' is nan and must be a positive finite number"),
        ({"masked_us": float("inf")}, "'masked_us' is inf and must be a positive finite number"),
        ({"masked_us": None}, "'masked_us' is None and must be a positive finite number"),
        ({"dense_us": 10**400}, "'dense_us' is 1000"),
        ({"shape": [64, 32]}, "'shape' is [64, 32] and must be three positive whole numbers"),
        ({"shape": [64, 32.0, 48]}, "'shape' is [64, 32.0, 48] and must be"),
        ({"shape": [64, 0, 48]}, "'shape' is [64, 0, 48] and must be"),
        ({"shape": None}, "'shape' is None and must be"),
        ({"status": "fine"}, "'status' is 'fine' and must be 'ok', 'wrong', 'not repeatable' or"),
        ({"status": ["ok"]}, "'status' is ['ok'] and must be"),
        ({"implementation": "magic"}, "'implementation' is 'magic' and must be 'ffi' or 'cusparselt'"),
        ({"algorithm": "3"}, "'algorithm' is '3' and must be a whole number"),
        ({"product": "F1"}, "'product' is 'F1' and must be 'fwd', 'dgrad' or 'wgrad'"),
        ({"sparse": 3}, "'sparse' is 3 and must be 'left', 'right' or 'result'"),
        ({"pattern": "64:2"}, "'pattern' is '64:2' and must be '2:4' or such as '64:2:16'"),
        ({"dtype": {}}, "'dtype' is {} and must be a text"),
        ({"producers_us": [1.0]}, "'producers_us' is [1.0] and must be an object"),
        ({"producers_us": {"top-2 of 4": "x"}}, "'producers_us' is {'top-2 of 4': 'x'} and must be"),
    ],
)
def test_a_damaged_entry_is_refused_with_a_sentence(folders, changed, words, capsys):
    """It names the file, the entry, the field and what it must be; nothing is decided by such a table."""
    store(folders[0], table(entry(), entry("dgrad") | changed))
    assert not runs_packed() and not runs_packed("dgrad")
    s24.explain(s24.methods.STE(), shape=(64, 32, 48))
    s24.info()
    for out in capsys.readouterr().out.split("jax_sparse24 ", 1):
        assert f"{hardware().name}.json is damaged: entry 1: {words}" in out
        assert "run s24.tune() again" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"versions": ["0.1"]}, "'versions' is ['0.1'] and must be an object of texts"),
        ({"format": 1}, "'format' is 1 and must be 2 or 3; run s24.tune() again"),
        ({"products": {}}, "'products' is {} and must be a list"),
        ({"products": [3]}, "entry 0 is 3 and must be an object"),
        ({"products": [{}]}, "entry 0: 'product' is missing and must be"),
    ],
)
def test_so_is_a_damaged_head(folders, content, words, capsys):
    store(folders[0], table() | content)
    assert not runs_packed()
    s24.info()
    assert words in capsys.readouterr().out


def test_a_file_of_nested_lists_is_unreadable(folders, capsys):
    store(folders[0], "[" * 100_000)
    s24.info()
    assert "is unreadable" in capsys.readouterr().out


def test_shipped_tables_are_sound(monkeypatch):
    tables = [*Path(table_file.__file__).parent.parent.glob("tuning/*.json")]
    assert len(tables) >= 3
    for path in tables:
        content, problem = table_file.read(path)
        assert not problem
        assert not path.name.startswith("nvidia") or content["capability"]


def test_an_own_table_is_asked_first_and_the_shipped_one_for_the_rest(folders):
    own, shipped = folders
    store(shipped, table(entry(packed=1.0), entry("dgrad", packed=1.0)))
    store(own, table(entry(packed=300.0)))
    assert not runs_packed()
    assert runs_packed("dgrad")


@pytest.fixture
def hopper(monkeypatch):
    """This machine is a GPU of the given name and capability, as far as tables are concerned."""

    def be(name, capability="9.0"):
        here = Hardware(name, name.upper(), "gpu", "", 8, capability)
        monkeypatch.setattr(tables, "hardware", lambda: here)
        tables._stored.cache_clear()

    return be


def decided():
    return tables.look_up(Product((-1, -2), "right", "float32", (64, 32, 48)))


def test_an_unknown_gpu_borrows_the_table_nearest_by_name_of_its_capability(folders, hopper):
    for name, capability in (
        ("nvidia-h200", "9.0"),
        ("nvidia-h100-80gb-hbm3", "9.0"),
        ("nvidia-a100", "8.0"),
    ):
        store(folders[1], table(entry(), hardware=name.upper(), capability=capability), name)
    for here, origin in (
        ("nvidia-h100-pcie", "NVIDIA-H100-80GB-HBM3"),
        ("nvidia-gh200-480gb", "NVIDIA-H200"),
        ("nvidia-h200-nvl", "NVIDIA-H200"),
    ):
        hopper(here)
        decision = decided()
        assert decision.packed and f"measured on {origin}, borrowed" in decision.reason
        assert "compute capability 9.0; s24.tune() measures this GPU" in decision.reason
    hopper("nvidia-b200", "10.0")
    assert not decided().packed
    hopper("nvidia-h200")
    assert "borrowed" not in decided().reason
    store(folders[1], table(entry("dgrad"), capability="9.0"), "nvidia-h200")
    hopper("nvidia-h200")
    assert "borrowed" in decided().reason, "its own table knows nothing of this product"


@pytest.mark.parametrize(("packed", "expected"), [(80.0, True), (85.0, False)])
def test_a_borrowed_measurement_must_gain_by_more(folders, hopper, packed, expected):
    store(folders[1], table(entry(packed=packed), capability="9.0"), "nvidia-h200")  # 90 us dense
    hopper("nvidia-h100-pcie")
    assert decided().packed == expected
    hopper("nvidia-h200")
    assert decided().packed


@pytest.mark.parametrize("path", sorted(tables.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("alternative", ["dense", "masked"])
def test_no_shipped_table_chooses_what_it_measured_to_be_slower(path, alternative, monkeypatch):
    content, problem = table_file.read(path)
    assert content is not None, problem
    monkeypatch.setattr(tables, "tables", lambda: ((tables.Table(content, "shipped"),), ""))
    monkeypatch.setattr(tables, "versions", lambda: content["versions"])
    for measured in content["products"]:
        product = Product(
            KINDS[measured["product"]],
            measured["sparse"],
            measured["dtype"],
            measured["shape"],
            measured["pattern"],
        )
        found = tables.look_up(product, alternative)
        assert found.entry is measured
        faster = measured["status"] == "ok" and measured[f"{alternative}_us"] >= measured["packed_us"]
        assert found.packed == faster, measured


def test_of_a_borrowed_table_other_versions_of_cusparselt_decide_nothing(folders, hopper):
    by_library = entry(implementation="cusparselt", algorithm=3)
    store(folders[1], table(by_library, capability="9.0", versions={"cusparselt": "0.8.1"}), "nvidia-h200")
    hopper("nvidia-h100-pcie")
    assert not decided().packed and "measured with cuSPARSELt 0.8.1" in decided().reason


# Of attention: the output features over the width of the model. Queries, keys and values are one product.
PROJECTIONS = {"qkv": 3, "out": 1}


def products_of_projection(T, d, wide):
    """Those of a linear layer from d to wide features."""
    sizes = {"fwd": (T, d, wide), "dgrad": (T, wide, d), "wgrad": (d, T, wide)}
    return [Product(KINDS[kind], "right", jnp.dtype("bfloat16"), shape) for kind, shape in sizes.items()]


@pytest.mark.parametrize("T", [16384, 32768])
@pytest.mark.parametrize("d", [2048, 4096])
def test_the_shipped_table_packs_the_projections_of_attention_of_wide_models(folders, hopper, T, d):
    shutil.copy(SHIPPED / "nvidia-h200.json", folders[1])
    hopper("nvidia-h200")
    for wide in PROJECTIONS.values():
        for product in products_of_projection(T, d, d * wide):
            entry = tables.look_up(product).entry
            assert entry["dense_us"] / entry["packed_us"] >= tables.AS_FAST, (product, entry)


@pytest.mark.parametrize("T", [16384, 32768])
def test_the_shipped_table_leaves_small_output_projections_dense(folders, hopper, T):
    """A product of width 768 gains nothing by packing, and larger ones do not speak for it."""
    shutil.copy(SHIPPED / "nvidia-h200.json", folders[1])
    hopper("nvidia-h200")
    assert {tables.look_up(product).entry for product in products_of_projection(T, 768, 768)} == {None}


@pytest.mark.parametrize("T", [16384, 32768])
@pytest.mark.parametrize("d", [1024, 2048, 4096])
def test_what_is_tuned_by_default_speaks_for_projections_of_attention(T, d):
    kinds = {(-1, -2): "fwd", (-1, -1): "dgrad", (-2, -2): "wgrad"}
    measured = [
        entry(kinds[product.axes], shape=product.shape, dtype="bfloat16", pattern="2:4")
        for T_there, d_there, f in tuning.SHAPES["cuda"]["bfloat16"]
        for ends in ((d_there, f), (f, d_there))
        for product in products_of_projection(T_there, *ends)
    ]
    known = tables.Table({"products": measured}, "a test")
    for wide in PROJECTIONS.values():
        assert all(known.nearest(product) for product in products_of_projection(T, d, d * wide))


BLOCKS_ON_A_CPU = [
    (2048, 128, 512),
    (2048, 512, 2048),
    (2048, 1024, 4096),
    (256, 512, 2048),
    (1024, 512, 2048),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", BLOCKS_ON_A_CPU, ids=str)
def test_what_is_tuned_by_default_speaks_for_the_blocks_of_the_benchmarks(block, dtype):
    """Of any dtype: in bfloat16 blocks of 256 tokens ran dense and paid for what they cut."""

    def products(shape):
        return [product_of(name, operand, *shape).key(dtype) for name, operand in SPARSE_OPERANDS]

    measured = [
        entry(product.kind, product.side, product.shape, dtype=dtype)
        for shape in tuning.SHAPES["cpu"][dtype]
        for product in products(shape)
    ]
    known = tables.Table({"products": measured}, "a test")
    assert all(known.nearest(product) for product in products(block))


def test_cpus_borrow_nothing(folders):
    """Two processors with AVX-512 and as many cores differ by a factor of two."""
    store(folders[1], table(entry(packed=1.0)), "another-processor-with-the-same-instructions")
    assert not runs_packed()


def test_both_routes_multiply_the_same_values(folders, rng):
    x, w = rng.standard_normal((2, 64, 64)).astype(np.float32)
    results = []
    for packed in (1.0, 1000.0):
        store(folders[0], table(entry(shape=(64, 64, 64), packed=packed)))
        tables._stored.cache_clear()
        assert runs_packed(shape=(64, 64, 64)) == (packed == 1.0)

        def loss(w):
            return jnp.sum(s24.matmul(x, s24.pack24(w, -2)) ** 2)

        results.append(jax.value_and_grad(loss)(w))
    for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert not np.any(np.asarray(results[0][1])[~np.asarray(s24.mask24(w, -2))])


def test_explain_shows_the_decision_and_its_numbers(folders, capsys):
    store(folders[0], table(entry(shape=(64, 32, 128)), entry(shape=(64, 128, 32), packed=400.0)))
    s24.explain(s24.methods.STE(), shape=(64, 32, 128))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1] in "FB"}
    assert "packed " in lines["F1"] and "1.64x" in lines["F1"] and "0.05" in lines["F1"]  # 90 / (50 + 5)
    assert "masked dense" in lines["F2"] and "0.23x dense" in lines["F2"]
    assert "XLA dense product" in lines["B1"] and "XLA dense product" in lines["B4"]


@pytest.mark.parametrize(
    ("method", "pattern", "expected"),
    [
        (s24.methods.Venom(v=16, m=8, clusters=2), "16:2:8", {"F2", "B2", "B3", "B4"}),
        (s24.methods.Activation24(), "2:4", {"F2"}),
    ],
    ids=["Venom", "Activation24"],
)
def test_vnm_activations_are_compared_with_what_unpacks_them(folders, capsys, method, pattern, expected):
    """Packed products are slower here than dense ones, and faster than those of unpacked operands."""
    kinds = ("fwd", "left", (64, 128, 32)), ("wgrad", "left", (128, 64, 32)), ("dgrad", "left", (64, 128, 32))
    kinds += (("wgrad", "right", (32, 64, 128)),)
    store(folders[0], table(*(entry(*kind, packed=95.0, pattern=pattern) for kind in kinds)))
    s24.explain(method, shape=(64, 32, 128))
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "FB"]
    assert {line[:2] for line in lines if "1.05x masked" in line and " packed " in line} == expected
    assert {line[:2] for line in lines if "0.95x dense" in line} == {"B2", "B3", "B4"} - expected


def test_explain_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"\(T, d, f\)"):
        s24.explain(s24.methods.STE(), shape=(64, 32))
    with pytest.raises(TypeError, match="needs a method"):
        s24.explain(nnx.Linear, shape=(64, 32, 128))


def test_a_measurement_speaks_for_four_times_its_size_and_for_half_of_it():
    """Packing gains less in smaller products: at d, f = 768, 3072 not what it gains at 2048, 8192."""
    measured = tables.Table(table(entry(shape=(64, 32, 48))), "here")
    product = partial(Product, (-1, -2), "right", jnp.dtype("float32"))
    for shape in (64, 32, 48), (256, 128, 192), (32, 16, 24), (256, 16, 48):
        assert measured.nearest(product(shape)) is not None, shape
    for shape in (260, 32, 48), (64, 132, 48), (28, 32, 48), (64, 32, 20):
        assert measured.nearest(product(shape)) is None, shape


def test_a_lower_v_speaks_for_a_higher_one_that_was_not_measured(monkeypatch):
    """Its kernels read more; the other way round, and of another M, nothing is known. A product's own V
    speaks first, in any table, and `s24.ensure` measures a V of which there is none."""
    own, shipped = (
        tables.Table(table(*(entry(pattern=f"{v}:2:16", packed=us) for v, us in times.items())), "here")
        for times in ({16: 150.0, 32: 60.0}, {64: 50.0, 256: 40.0})
    )
    monkeypatch.setattr(tables, "tables", lambda: ((own, shipped), ""))
    product = partial(Product, (-1, -2), "right", jnp.dtype("float32"), (64, 32, 48))
    said = {
        pattern: tables.look_up(product(pattern=pattern)) for pattern in ("32:2:16", "64:2:16", "128:2:16")
    }
    assert [found.entry["packed_us"] for found in said.values()] == [60.0, 50.0, 50.0]
    assert "x dense for 64:2:16 at " in said["128:2:16"].reason and "x dense at " in said["64:2:16"].reason
    assert tables.find(product(pattern="128:2:16")) is None
    for pattern in "128:2:8", "8:2:16":
        assert tables.look_up(product(pattern=pattern)).entry is None
    ampere = dataclasses.replace(tables.hardware(), capability="8.0")
    monkeypatch.setattr(tables, "hardware", lambda: ampere)
    assert tables.look_up(product(pattern="128:2:16")).entry is None, "mma.sp was slower at a higher V"


def test_no_measurement_is_near_an_empty_product():
    measured = tables.Table(table(entry()), "here")
    product = partial(Product, (-1, -2), "right", jnp.dtype("float32"))
    assert measured.nearest(product((64, 32, 48))) is not None
    for shape in (0, 32, 48), (64, 0, 48), (64, 32, 0):
        assert measured.nearest(product(shape)) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("by", ["cusparselt", "ffi"])
def test_8_bit_products_run_where_a_table_says_so(monkeypatch, documented_cusparselt, by, dtype):
    entry = {
        **{"product": "fwd", "sparse": "right", "pattern": "2:4", "dtype": "float8_e4m3fn"},
        **{"shape": [32, 64, 96], "implementation": by, "algorithm": 3, "status": "ok"},
        **{"dense_us": 3.0, "masked_us": 4.0, "packed_us": 1.0, "producers_us": {}},
    }
    content = {"versions": tables.versions(), "products": [entry], "hardware": "mock"}
    monkeypatch.setattr(tables, "_adopted", tables.Table(content, "here"))
    method = s24.methods.SSTE(fp8="tensor", mvue=None)
    w = jax.random.normal(jax.random.key(1), (64, 96)).astype(dtype)
    jax.clear_caches()  # float32 and float16 have the same 8-bit product
    s24.sparse_dot(jnp.ones((32, 64), dtype), w, method, method.init(w))
    assert len(documented_cusparselt) == (by == "cusparselt")


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("fp8", [None, "tensor"])
def test_16_bit_products_run_by_cusparselt_where_a_table_says_so(
    monkeypatch, documented_cusparselt, fp8, measured
):
    """A layer of FST, in whose table cuSPARSELt won all three products: each decision has its entry, and only
    those of an option in 8 bits have 8 bits. Weights are packed both ways at once where that was measured."""
    T, d, f = 128, 64, 192
    sizes = {"fwd": (T, d, f), "dgrad": (T, f, d), "wgrad": (d, T, f)}
    found = {
        name: entry(name, "right", shape=shape, packed=50.0)
        | {"dtype": dtype, "implementation": "cusparselt", "algorithm": 3}
        for name, shape in sizes.items()
        for dtype in ("bfloat16",)
    }
    content = table(*found.values()) | {"versions": tables.versions()}
    monkeypatch.setattr(tables, "_adopted", tables.Table(content, "here"))
    monkeypatch.setattr(fusions, "both_ways_faster", lambda dtype: measured)
    method = s24.methods.FST(fp8=fp8)
    x, w = jnp.ones((T, d), jnp.bfloat16), jnp.ones((d, f), jnp.bfloat16)
    state, key = method.init(w), jax.random.key(0)
    shapes = {"x": x.shape, "w": w.shape, "dy": (T, f)}
    execution = Execution("test", "linear", method.linear_plan(), None)
    decisions = execution.decisions(sizes, shapes, x.dtype)
    assert decisions["wgrad"].entry == found["wgrad"] and not decisions["wgrad"].eight_bits
    assert fp8 or (decisions["fwd"].entry == found["fwd"] and not decisions["fwd"].eight_bits)
    jax.clear_caches()
    run = lambda x, w: s24.sparse_dot(x, w, method, state, key).astype(jnp.float32).sum()  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(run, (0, 1)))(x, w))
    assert ("s24_pack_masked_both" in text) == (measured and not fp8)
