"""`explain`: what it prints of methods and models."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.dispatch import table as tables
from jax_sparse24.engine.execution import Execution
from jax_sparse24.measure.products import product_of

TRANSPOSABLE = "transposable mask"


def table(text):
    """The rows of the last table in a text, as dicts by column heading."""
    lines = text.splitlines()
    start = max(i for i, line in enumerate(lines) if line.startswith("product "))
    headings = re.split(r"\s{2,}", lines[start].strip())
    places = [lines[start].index(h) for h in headings]
    rows = []
    for line in lines[start + 1 :]:
        if line == "Dense linear layers:":
            break
        cells = [line[a:b].strip() for a, b in zip(places, [*places[1:], None], strict=True)]
        rows.append(dict(zip(headings, cells, strict=True)))
    return rows


def columns(text, *names):
    return [tuple(row[n] for n in names) for row in table(text)]


FACTS = ("product", "in an FFN", "computes", "sparse operand", "by", "groups along")


def test_explain_prints_the_table_of_fst(capsys):
    s24.explain(s24.methods.FST())
    out = capsys.readouterr().out
    assert columns(out, *FACTS) == [
        ("fwd", "F1/F2", "X W", "w", TRANSPOSABLE, "d"),
        ("dgrad", "B3/B1", "dY Wᵀ", "w", TRANSPOSABLE, "f"),
        ("wgrad", "B4/B2", "Xᵀ dY", "dy", "MVUE, exact", "T"),
    ]
    assert all(row["implementation"] for row in table(out))


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        (
            s24.methods.Dense(),
            [("fwd", "none", "", ""), ("dgrad", "none", "", ""), ("wgrad", "none", "", "")],
        ),
        (
            s24.methods.STE(),
            [
                ("fwd", "w", "top-2 of 4", "d"),
                ("dgrad", "w", "values of top-2 of 4, dense product", "d"),
                ("wgrad", "none", "", ""),
            ],
        ),
        (
            s24.methods.FST(mvue="approximate"),
            [
                ("fwd", "w", TRANSPOSABLE, "d"),
                ("dgrad", "w", TRANSPOSABLE, "f"),
                ("wgrad", "dy", "MVUE, approximate", "T"),
            ],
        ),
        (
            s24.methods.FST(mvue=None),
            [("fwd", "w", TRANSPOSABLE, "d"), ("dgrad", "w", TRANSPOSABLE, "f"), ("wgrad", "none", "", "")],
        ),
    ],
    ids=str,
)
def test_explain_prints_the_table_of_every_method(method, rows, capsys):
    s24.explain(method, implementation="reference")
    out = capsys.readouterr().out
    assert columns(out, "product", "sparse operand", "by", "groups along") == rows
    for row in table(out):
        dense = row["sparse operand"] == "none" or "dense product" in row["by"]
        assert row["implementation"] == ("XLA dense product" if dense else "reference: asked for")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernels run on CPU")
def test_explain_names_the_implementation_and_the_reason(capsys):
    s24.explain(s24.methods.FST(), implementation="ffi")
    assert set(columns(capsys.readouterr().out, "implementation")) == {("ffi: asked for",)}
    s24.explain(s24.methods.FST(), dtype=jnp.float64)
    assert "float64" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="float64"):
        s24.explain(s24.methods.FST(), dtype=jnp.float64, implementation="ffi")
    with pytest.raises(RuntimeError, match="cusparselt"):
        s24.explain(s24.methods.FST(), implementation="cusparselt")
    with pytest.raises(ValueError, match="'fast' is unknown"):
        s24.explain(s24.methods.FST(), implementation="fast")


def test_explain_of_a_method_whose_ffn_differs_prints_both_tables(capsys):
    from jax_sparse24.engine.plan import FFN, Plan, Row
    from jax_sparse24.engine.sparsifiers import Top2
    from jax_sparse24.methods.base import Method

    class Activations(Method):
        def ffn_plan(self):
            return Plan.of(FFN, F2=Row("y2", Top2()), B2=Row("y2", Top2()), B4=Row("dy1", Top2()))

    s24.explain(Activations())
    rows = columns(capsys.readouterr().out, "product", "sparse operand", "by", "groups along")
    assert rows == [
        *((product, "none", "", "") for product in ("fwd", "dgrad", "wgrad", "F1")),
        ("F2", "y2", "top-2 of 4", "f"),
        ("B1", "none", "", ""),
        ("B2", "y2", "top-2 of 4", "T"),
        ("B3", "none", "", ""),
        ("B4", "dy1", "top-2 of 4", "T"),
    ]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([s24.nn.FFN(16, 24, method=s24.methods.FST(), rngs=rngs) for _ in range(2)])
        self.head = s24.nn.Linear(16, 8, method=s24.methods.STE(), rngs=rngs)
        self.plain = nnx.Linear(16, 16, rngs=rngs)
        self.dense = s24.nn.Linear(16, 16, rngs=rngs)


def test_explain_lists_the_sparse_layers_of_a_model_by_method(capsys):
    model = Net(nnx.Rngs(0))
    s24.explain(model)
    out = capsys.readouterr().out
    assert re.search(r"4 layers with FST\(", out)
    assert re.search(r"1 layers? with STE\(\)", out)
    for line in ("blocks.0.up: kernel (16, 24)", "blocks.1.down: kernel (24, 16)", "head: kernel (16, 8)"):
        assert f"  {line}\n" in out
    sparse, _, dense = out.partition("Dense linear layers:\n")
    assert "  plain:" not in sparse
    assert dense.splitlines() == [
        "  dense: kernel (16, 16): its method is Dense",
        "  plain: kernel (16, 16): no rule of s24.sparsify has taken it",
    ]
    assert "dense mode" not in out
    assert [r[0] for r in columns(out, "product")] == ["fwd", "dgrad", "wgrad"]
    assert len(re.findall("^product  ", out, re.MULTILINE)) == 2

    s24.nn.set_sparse(model.head, False)
    s24.explain(model)
    out = capsys.readouterr().out
    assert re.search(r"head: kernel \(16, 8\).*dense mode", out)
    assert out.count("dense mode") == 1


def test_explain_of_a_single_layer_and_of_a_dense_model(capsys):
    s24.explain(s24.nn.Linear(16, 8, method=s24.methods.FST(), rngs=nnx.Rngs(0)))
    assert "(the model): kernel (16, 8)" in capsys.readouterr().out
    s24.explain(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    assert capsys.readouterr().out == (
        "No sparse layers: every product is dense.\nDense linear layers:\n"
        "  (the model): kernel (4, 4): no rule of s24.sparsify has taken it\n"
    )


@pytest.mark.parametrize("kind", [s24.nn.FFN, s24.nn.Linear])
def test_explain_of_a_layer_with_a_shape_prints_the_measurements_behind_it(kind, capsys):
    layer = kind(16, 24, method=s24.methods.FST(), rngs=nnx.Rngs(0))
    s24.explain(s24.methods.FST(), shape=(32, 16, 24))
    of_method = capsys.readouterr().out
    s24.explain(layer, shape=(32, 16, 24))
    out = capsys.readouterr().out
    assert "layers with FST" in out and "kernel (16, 24)" in out and out.endswith(of_method)
    assert [r["product"] for r in table(out)[:6]] == ["F1", "F2", "B1", "B2", "B3", "B4"]
    with pytest.raises(ValueError, match=r"shape=\(32, 16\) must be \(T, d, f\)"):
        s24.explain(layer, shape=(32, 16))


@pytest.mark.parametrize(
    "shape", [(0, 16, 24), (-4, 16, 24), (32.0, 16, 24), (True, 16, 24), "abc", 5], ids=str
)
def test_explain_refuses_a_shape_that_is_not_three_positive_ints(shape):
    with pytest.raises(ValueError, match=r"explain: shape=.* must be \(T, d, f\), three positive ints"):
        s24.explain(s24.methods.FST(), shape=shape)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((32, 30, 24), r"size 30 .* use 28 or 32"), ((30, 16, 24), r"size 30 .* use 28 or 32")],
)
def test_explain_speaks_of_the_shape_that_does_not_divide(shape, words):
    """It named a function that the caller has not called."""
    with pytest.raises(ValueError, match=rf"^explain: shape={re.escape(str(shape))}: .*{words}"):
        s24.explain(s24.methods.FST(), shape=shape)


@pytest.mark.parametrize("dtype", ["bf16", int, None, jnp.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [None, (32, 16, 24)])
def test_explain_refuses_a_dtype_that_products_do_not_have(dtype, shape):
    with pytest.raises(TypeError, match=r"explain: dtype=.* is none of the supported ones, float32, "):
        s24.explain(s24.methods.FST(), shape=shape, dtype=dtype)


@pytest.mark.parametrize("what", [3, "FST", s24.methods.FST])
def test_explain_says_what_it_takes(what):
    with pytest.raises(TypeError, match=r"explain: needs a method from s24\.methods, an nnx\.Module or"):
        s24.explain(what)


def test_each_product_of_a_block_is_decided_once(monkeypatch, capsys):
    """For the rows of the table and for the kernels that two steps share."""
    asked, decisions = [], Execution.decisions

    def counted(self, products, shapes, dtype):
        asked.extend(products if self.op == "explain" else ())
        return decisions(self, products, shapes, dtype)

    monkeypatch.setattr(Execution, "decisions", counted)
    s24.explain(s24.methods.FST(), shape=(256, 128, 256), implementation="ffi")
    said = capsys.readouterr().out
    assert asked == ["F1", "F2", "B1", "B2", "B3", "B4"]
    assert "W1 packed for F1 and for B3" in said and [row["product"] for row in table(said)][:6] == asked


@pytest.mark.parametrize(("producer_us", "losing"), [(0.4, ""), (1.5, "B2 and B4")])
def test_explain_names_estimates_that_cost_more_than_they_save(producer_us, losing, monkeypatch, capsys):
    shape, entries = (256, 128, 256), []
    for name, operand in (("B2", "dy3"), ("B4", "dy1")):
        product = product_of(name, operand, *shape)
        entry = {"product": product.kind, "sparse": product.side, "shape": list(product.shape)}
        times = {
            "dense_us": 2.0,
            "masked_us": 2.0,
            "packed_us": 1.0,
            "producers_us": {"MVUE, exact": producer_us},
        }
        entries.append(
            {**entry, "pattern": "2:4", "dtype": "float32", "implementation": "ffi", "status": "ok", **times}
        )
    monkeypatch.setattr(tables, "_adopted", tables.Table({"versions": {}, "products": entries}, "here"))
    s24.explain(s24.methods.FST(), shape=shape)
    said = capsys.readouterr().out
    assert said.count("0.80x" if losing else "1.43x") == 2
    assert (
        (f"longer to make than {losing} save by them; mvue=None" in said)
        if losing
        else "mvue=None" not in said
    )
