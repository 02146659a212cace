"""SLoPe: its masks, its three products, its adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.methods import SLoPe
from tests.engine import oracle

T, d, f = 8, 16, 24


def twice(w, mask):
    """The masked weight pruned along `out` by the oracle."""
    return oracle.top2(np.where(mask, oracle.wide(w), 0), 1)


def operands(seed=0):
    return oracle.matrices(seed, "float32", (T, d), (d, f), (T, f))


@pytest.mark.parametrize("kind", ["magnitude", "random"])
def test_products_are_those_of_two_masks(kind, implementation):
    """Y and dW are those of jax.grad through the masked dense weight, dX that of the weight pruned twice."""
    x, w, dy = operands()
    method = SLoPe(mask=kind)
    state = method.init(w)
    mask = np.asarray(state["mask"])
    dot = lambda x, w: s24.sparse_dot(x, w, method, state, implementation=implementation)  # noqa: E731
    y, vjp = jax.vjp(dot, x, w)
    dx, dw = vjp(dy)
    want_y, masked = jax.vjp(lambda x, w: x @ jnp.where(mask, w, 0), x, w)
    np.testing.assert_allclose(y, want_y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, masked(dy)[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, oracle.wide(dy) @ twice(w, mask).T, rtol=1e-4, atol=1e-4)
    assert not np.asarray(dw)[~mask].any() and np.asarray(dw)[mask].all()
    assert (mask.reshape(d // 4, 4, f).sum(1) == 2).all()
    assert (mask == np.asarray(s24.mask24(w, 0))).all() == (kind == "magnitude")


def test_products_of_an_ffn():
    x, w1, _ = operands()
    w2, dy3 = oracle.matrices(1, "float32", (f, d), (T, d))
    method = SLoPe(rank=0)
    state = {"w1": method.init(w1), "w2": method.init(w2)}
    y, vjp = jax.vjp(lambda *a: s24.sparse_ffn(*a, method, state, activation="relu"), x, w1, w2)
    dx, dw1, dw2 = vjp(dy3)
    m1, m2 = (np.asarray(state[name]["mask"]) for name in ("w1", "w2"))
    cuts = {("F1", "w1"): oracle.masked(m1), ("F2", "w2"): oracle.masked(m2)}
    cuts |= {("B1", "w2"): lambda a, _: twice(a, m2), ("B3", "w1"): lambda a, _: twice(a, m1)}
    want = oracle.ffn(x, w1, w2, None, dy3, "relu", cuts)
    for name, got in {"y": y, "dx": dx}.items():
        oracle.assert_close(got, want[name], "float32", K=f, roundings=8, name=name)
    for got, name, mask in ((dw1, "dw1", m1), (dw2, "dw2", m2)):
        np.testing.assert_allclose(got, np.where(mask, want[name].value, 0), rtol=1e-4, atol=1e-4)


def test_the_first_mask_stays_and_the_second_follows_the_weight():
    w, later = oracle.matrices(2, "float32", (512, 256), (512, 256))
    method = SLoPe()
    old, new = (state := method.init(w)), method.refresh(state, later)
    np.testing.assert_array_equal(new["mask"], old["mask"])
    for state, values in ((old, w), (new, later)):
        kept = np.asarray(state["twice"])
        np.testing.assert_array_equal(np.where(kept, values, 0), twice(values, state["mask"]).astype("f4"))
        # 3/32 of the entries go beyond the half that the first mask takes (section 2.1).
        assert kept.mean() == pytest.approx(0.5 - 3 / 32, abs=0.004)
    again = method.init(w)
    np.testing.assert_array_equal(again["mask"], old["mask"])


def test_random_masks_differ_by_weight_and_not_by_magnitude():
    a, b = (SLoPe(mask="random").init(w)["mask"] for w in oracle.matrices(3, "float32", (64, 64), (64, 64)))
    assert 0.4 < float(jnp.mean(a ^ b)) < 0.6


@pytest.mark.parametrize(("rank", "want"), [(0.0625, 1), (0.25, 4), (3, 3), (1e-6, 1)])
def test_adapters(rank, want):
    """x L R / rank; nothing at first; merged, they and the masked weight are the dense one."""
    layer = s24.nn.Linear(d, f, method=SLoPe(rank=rank), rngs=nnx.Rngs(0))
    x = operands()[0]
    left, right = layer.adapters["left"], layer.adapters["right"]
    assert (left.shape, right.shape) == ((d, want), (want, f))
    first = layer(x)
    s24.nn.set_adapting(layer, False)
    np.testing.assert_array_equal(layer(x), first)
    s24.nn.set_adapting(layer, True)
    right[...] = jnp.ones_like(right[...])
    np.testing.assert_allclose(layer(x), first + x @ left[...] @ right[...] / want, rtol=1e-4, atol=1e-4)
    adapted = layer(x)
    s24.nn.merge_adapters(layer)
    np.testing.assert_allclose(x @ layer.kernel[...] + layer.bias[...], adapted, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(layer(x), x @ layer.kernel[...] + layer.bias[...])
    assert {path[0] for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))} == {"kernel", "bias"}


def test_adapters_get_a_gradient_only_when_they_take_part():
    ffn = s24.nn.FFN(d, f, method=SLoPe(), rngs=nnx.Rngs(0))
    x = operands()[0]
    for adapting in (False, True):
        s24.nn.set_adapting(ffn, adapting)
        grads = nnx.jit(nnx.grad(lambda ffn: (ffn(x) ** 2).sum()))(ffn)
        assert bool(jnp.any(grads.up.adapters["right"][...] != 0)) == adapting
        assert not np.asarray(grads.up.kernel[...])[~np.asarray(ffn.up.state["mask"][...])].any()


@pytest.mark.parametrize(
    ("method", "total", "want"),
    [
        (SLoPe(), 400, [("sparse", 396, False), ("adapters", 4, True)]),
        (SLoPe(), 12, [("sparse", 11, False), ("adapters", 1, True)]),
        (SLoPe(adapter_share=1.0), 12, [("adapters", 12, True)]),
        (SLoPe(rank=0), 12, [("sparse", 12, False)]),
    ],
)
def test_adapters_come_last(method, total, want):
    phases = method.schedule(total).phases
    assert [(p.name, p.steps, p.adapters) for p in phases] == want
    assert all(phase.sparse for phase in phases)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": "first"}, "mask='first' is unknown; use one of 'magnitude', 'random'"),
        ({"rank": -1}, "rank=-1 must be a whole number >= 0 or a share"),
        ({"rank": 1.5}, "rank=1.5 must be a whole number >= 0 or a share"),
        ({"rank": True}, "rank=True must be"),
        ({"adapter_share": 0.0}, r"adapter_share=0.0 must lie in \(0, 1\]; rank=0 for none"),
        ({"refresh_every": 0}, "refresh_every=0 must be a whole number"),
    ],
)
def test_bad_options(arguments, message):
    with pytest.raises(ValueError, match=f"SLoPe: {message}"):
        SLoPe(**arguments)


def test_a_rank_beyond_the_weight():
    with pytest.raises(
        ValueError, match=r"SLoPe: rank=40 exceeds the smaller side of a weight of shape \(16"
    ):
        s24.nn.Linear(d, f, method=SLoPe(rank=40), rngs=nnx.Rngs(0))


def test_the_table_says_that_the_result_is_masked(capsys):
    s24.explain(SLoPe())
    wgrad = next(line for line in capsys.readouterr().out.split("\n") if line.startswith("wgrad"))
    assert "none" in wgrad and "masked result" in wgrad
