"""Scales of 8-bit operands by the magnitudes that earlier steps have seen."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24 import linen
from jax_sparse24.engine.float8 import REMEMBERED, All, Float8, delayed_scale, remembered, seen
from jax_sparse24.engine.operand import Request
from tests.engine import oracle
from tests.methods.test_weight_methods import delayed, in_8_bits

FST = s24.methods.FST(fp8="delayed", mvue=None)
T, d, f = 32, 16, 48


def history(**of) -> dict:
    """A state's histories, each of the exponents given by name, such as tops_x=(0, 3)."""
    found = {name: np.zeros(256, np.float32) for name in ("tops_x", "tops_dy")}
    for name, exponents in of.items():
        found[name][127 + np.asarray(exponents)] = 1
    return jax.tree.map(jnp.asarray, found)


@pytest.mark.parametrize(
    ("value", "exponent"),
    [
        *((1.0, 127), (1.99, 127), (-2.0, 128), (3e38, 254), (1.2e-38, 1)),
        *((0, 0), (1e-40, 0), (np.inf, 255), (np.nan, 255)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_seen_of_an_operand_is_its_largest_exponent(value, exponent, dtype):
    """Zeros, NaN and Inf are seen, and not remembered."""
    x = jnp.zeros((4, 8), dtype).at[2, 3].set(value)
    found = np.asarray(seen(x))
    assert found.dtype == np.float32 and found.shape == (256,)
    assert list(np.flatnonzero(found)) == [exponent]
    known = np.flatnonzero(remembered(jnp.zeros(256), found))
    assert list(known) == ([exponent] if 0 < exponent < 255 else [])


def test_a_magnitude_is_remembered_for_sixteen_steps():
    """What two shards or micro-batches have seen may be summed or averaged."""
    one, large = (seen(jnp.full((1, 1), value)) for value in (1.0, 1024.0))
    first = remembered(jnp.zeros(256), (one + large) / 2)
    top = [int(np.flatnonzero(first).max()) - 127]
    own = first
    for _ in range(REMEMBERED):
        own = remembered(own, one)
        top.append(int(np.flatnonzero(own).max()) - 127)
    assert top == [10] * REMEMBERED + [0] and own[127] == REMEMBERED
    for value in (0, jnp.inf) * (REMEMBERED // 2):
        own = remembered(own, seen(jnp.full((1, 1), value)))
    assert not own.any()


@pytest.mark.parametrize("top", [1.0, 1.75, 1.99, 0.3, 1e-30, 3e38, 0.0, np.nan])
def test_the_scale_of_a_first_step_is_by_its_own_magnitude(top):
    """It takes the largest magnitude to between 128 and 256, so that nothing saturates."""
    scale = np.float32(delayed_scale(jnp.zeros(256), jnp.float32(top), "e4m3"))
    assert np.frexp(scale)[0] == 0.5
    assert not top > 0 or 128 <= np.float32(top) * scale < 256
    known = delayed_scale(history(tops_x=(-3, 2))["tops_x"], jnp.float32(top), "e4m3")
    assert known == (scale if top < 2.0**-6 else 2.0**5)


def test_what_grows_beyond_history_saturates_and_the_next_step_follows():
    """Neither NaN nor Inf is hidden by that."""
    by = Float8(All(), -1, scales="delayed", history="tops_x")
    x = jnp.asarray([[1.0, 1.75, 3.5, 100.0, -100.0, jnp.inf, -jnp.inf, jnp.nan]])
    request = Request(history(tops_x=(0,)), None, None)
    rounded, scale = by.quantised(x, -1, request)
    assert scale.shape == (1, 1) and scale == 128 and rounded.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.float32(rounded), [[128, 224, 448, 448, -448, *[np.nan] * 3]])
    np.testing.assert_array_equal(by(x, -1, request), [[1, 1.75, 3.5, 3.5, -3.5, *[np.nan] * 3]])
    after = remembered(request.state["tops_x"], seen(x[:, :5]))
    _, scale = by.quantised(x, -1, Request({"tops_x": after}, None, None))
    assert scale == 2.0  # 100 becomes 200


def test_magnitudes_that_fall_far_below_the_remembered_ones_are_not_zero():
    """Up to a fall by 2^8, scales are those of the largest remembered magnitude; beyond, an operand scales by
    itself, as in a first step, until that is forgotten."""
    by = Float8(All(), -1, scales="delayed", history="tops_x")
    tops = remembered(history(tops_x=(0,))["tops_x"], seen(jnp.full((1, 1), 2.0**20)))
    for top, exponent in ((2.0**12, 20), (2.0**12 - 1, 11), (1.5, 0), (2.0**30, 20)):
        x = jnp.asarray([[top, -top / 500]])
        rounded, scale = by.quantised(x, -1, Request({"tops_x": tops}, None, None))
        assert scale == 2.0 ** (7 - exponent), top
        assert (rounded != 0).all(), top
    for step in range(REMEMBERED + 1):
        x = jnp.asarray([[2.0**12, 8.0, 8.1]])  # from 8 on 2^-17 of what is remembered
        found = by(x, -1, Request({"tops_x": tops}, None, None))
        np.testing.assert_array_equal(found[0, 1:], [8, 8] if step == REMEMBERED else [0, 16])
        tops = remembered(tops, seen(x))


METHODS = {"FST": FST, "SSTE": s24.methods.SSTE(fp8="delayed", fp8_backward="e4m3", mvue=None)}


@pytest.mark.parametrize("name", METHODS)
def test_no_earlier_token_is_told_of_later_ones_but_in_a_first_step_and_after_outliers(rng, name):
    """There is no knowing before a step whether it is such a one, in an evaluation neither; with scales per
    row there is none."""
    x = jnp.asarray(rng.normal(size=(T, d)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(d, f)), jnp.float32)
    other = x.at[T // 2 :].multiply(2.0**7)  # earlier tokens lie within the fall
    usual = int(jnp.floor(jnp.log2(jnp.abs(other).max())))

    def told(method, **tops):
        """Whether earlier tokens change with later ones, by a state with these histories."""
        state = {**method.init(w), **tops}
        one, two = (s24.sparse_dot(x, w, method, state)[: T // 2] for x in (x, other))
        return bool((one != two).any())

    method = METHODS[name]
    found = {exponent: told(method, **history(tops_x=(exponent,))) for exponent in (usual, 40)}
    assert found == {usual: False, 40: True}
    assert told(method) and not method.causal
    row, tensor = (dataclasses.replace(method, fp8=scales) for scales in ("row", "tensor"))
    assert (told(row), row.causal) == (False, True)
    assert (told(tensor), tensor.causal) == (True, False)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("outlier", [1e15, 1e4, 1e-15])
def test_a_step_of_another_magnitude_leaves_those_after_it_as_they_were(rng, method, outlier):
    """Output and gradients of a block whose histories hold one batch times a factor."""
    block = s24.nn.FFN(d, f, method=method, rngs=nnx.Rngs(0))
    x, dy = (jnp.asarray(rng.normal(size=(T, d)), jnp.float32) for _ in range(2))

    def step(x, dy):
        graphdef, own, params, rest = nnx.split(block, s24.nn.Statistic, nnx.Param, ...)
        y, vjp = jax.vjp(lambda own, params, x: nnx.merge(graphdef, own, params, rest)(x), own, params, x)
        found, *grads = vjp(dy)
        nnx.update(block, s24.nn.observe(own, found))
        return jax.tree.leaves((y, grads))

    before = [step(x, dy) for _ in range(2)][1]
    step(outlier * x, outlier * dy)
    for a, b in zip(step(x, dy), before, strict=True):
        assert jnp.linalg.norm(a - b) <= 0.1 * jnp.linalg.norm(b)


@pytest.mark.parametrize("implementation", ["reference", None])
def test_operands_are_scaled_by_the_history_of_their_product(rng, implementation):
    """Forward that of the input, backward that of the output's gradient; the weight has its own scale. The
    gradient of the state is what was seen."""
    x, w, dy = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((T, d), (d, f), (T, f)))
    mask, tops = s24.transposable_mask24(w), history(tops_x=(0, -2), tops_dy=(3,))

    def product(x, w, tops):
        return s24.sparse_dot(x, w, FST, {"mask": mask, **tops}, implementation=implementation)

    y, vjp = jax.vjp(product, x, w, tops)
    mask = oracle.masked(mask)
    values = in_8_bits("e4m3", cut=mask)
    cuts = {("fwd", "w"): values, ("dgrad", "w"): values}
    cuts |= {("fwd", "x"): delayed(0), ("dgrad", "dy"): delayed(3)}
    want = oracle.linear(x, w, dy, cuts)
    dx, dw, observed = vjp(dy)
    # A GPU sums products of 8 bits in some 14 bits of the largest of them.
    near = 1e-6 if jax.default_backend() == "cpu" else 2**-12
    for got, name in ((y, "y"), (dx, "dx"), (dw, "dw")):
        largest = np.abs(want[name].value).max()
        np.testing.assert_allclose(got, want[name].value, rtol=1e-5, atol=near * largest)
    np.testing.assert_array_equal(observed["tops_x"], seen(x))
    np.testing.assert_array_equal(observed["tops_dy"], seen(dy))


@pytest.mark.parametrize("activation", ["squared_relu", "gelu"])
def test_a_block_observes_the_operands_of_its_four_products(rng, activation):
    x, w1, w2, dy = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((T, d), (d, f), (f, d), (T, d)))
    state = {"w1": FST.init(w1, "w1"), "w2": FST.init(w2, "w2")}
    act = {"squared_relu": lambda y: jnp.square(jax.nn.relu(y)), "gelu": jax.nn.gelu}[activation]

    def block(tops, x=x):
        own = {w: {**state[w], **tops[w]} for w in state}
        return s24.sparse_ffn(x, w1, w2, FST, own, activation=activation)

    before = {w: {n: v for n, v in own.items() if n in FST.histories} for w, own in state.items()}
    (found,) = jax.vjp(block, before)[1](dy)
    rounded = in_8_bits("e4m3"), delayed()
    w1_8, w2_8 = (rounded[0](np.where(state[n]["mask"], w, 0), None) for n, w in (("w1", w1), ("w2", w2)))
    y1 = jnp.asarray(rounded[1](x, None) @ w1_8)
    y2, vjp = jax.vjp(act, y1)
    (dy1,) = vjp(jnp.asarray(rounded[1](dy, None) @ w2_8.T))
    tops = {"w1": {"tops_x": x, "tops_dy": dy1}, "w2": {"tops_x": y2, "tops_dy": dy}}
    for weight, entries in tops.items():
        for name, operand in entries.items():
            np.testing.assert_array_equal(found[weight][name], seen(operand), f"{weight} {name}")
    # A step after that multiplies by what was observed, and not by what it sees itself.
    np.testing.assert_array_equal(block(found), block(before))
    largest = [np.abs(block(known, 64 * x)).max() for known in (found, before)]
    assert largest[0] < largest[1] / 8


def test_a_gated_block_observes_its_three_layers(rng):
    """In one differentiation rule and in three, which say the same."""
    block = s24.nn.GatedFFN(d, f, method=FST, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(T, d)), jnp.float32)
    found = {}
    for implementation in ("reference", None):
        for name in ("gate", "up", "down"):
            getattr(block, name).implementation = implementation
        graphdef, own, rest = nnx.split(block, s24.nn.Statistic, ...)

        def loss(own, graphdef=graphdef, rest=rest):
            return (nnx.merge(graphdef, own, rest)(x) ** 2).sum()

        found[implementation] = nnx.to_flat_state(jax.grad(loss)(own))
    assert len(found[None]) == 6
    for (path, a), (_, b) in zip(found[None], found["reference"], strict=True):
        assert a[...].sum() == 1, path
        np.testing.assert_array_equal(a[...], b[...], str(path))


class Net(nnx.Module):
    """Two blocks, one after the other or scanned."""

    def __init__(self, scan: bool, remat: bool = False):
        blocks = [s24.nn.FFN(d, f, method=s24.methods.FST(fp8="delayed"), rngs=nnx.Rngs(n)) for n in (0, 1)]
        self.scan, self.remat = scan, remat
        if scan:
            graphdef, *_ = nnx.split(blocks[0])
            stacked = jax.tree.map(lambda *v: jnp.stack(v), *map(nnx.state, blocks))
            self.blocks = nnx.merge(graphdef, stacked)
        else:
            self.blocks = nnx.List(blocks)

    def __call__(self, x):
        if not self.scan:
            for block in self.blocks:
                x = x + block(x)
            return x
        graphdef, state = nnx.split(self.blocks)
        run = lambda x, state: (x + nnx.merge(graphdef, state)(x), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(run) if self.remat else run, x, state)[0]


def loss_of(model, x):
    return jnp.mean((model(x) - jnp.roll(x, 1, -1)) ** 2)


def trained(steps, *, scan=False, remat=False, accumulate=1, state=None, start=0):
    model = Net(scan, remat)
    tx = s24.optim.for_method(s24.methods.FST(), 3e-3, 12)
    loop = s24.Loop(model, loss_of, tx, 12, accumulate=accumulate)
    state, losses = state or loop.init(), []
    for step in range(start, start + steps):
        x = jnp.asarray(np.random.default_rng(step).normal(size=(T, d)), jnp.float32)
        state, metrics = loop.advance(state, x, step)
        losses.append(float(metrics["loss"]))
    return SimpleNamespace(state=state, losses=losses, loop=loop)


def tops(run) -> np.ndarray:
    """All histories of a run's state, by name and layer."""
    found = {name: run.loop.view.entries(run.state["sparse"], name) for name in ("tops_x", "tops_dy")}
    return {n: np.concatenate([np.atleast_2d(v) for v in own.values()]) for n, own in found.items()}


def test_a_loop_remembers_in_stacked_layers_and_micro_batches_too():
    one = trained(6)
    for own in tops(one).values():
        assert own.shape == (4, 256) and own.max() == REMEMBERED and ((own > 0).sum(1) >= 1).all()
    stacked = trained(6, scan=True, remat=True)
    np.testing.assert_allclose(stacked.losses, one.losses, rtol=1e-5)
    by_name = [np.sort(np.concatenate(list(tops(run).values())), axis=0) for run in (one, stacked)]
    np.testing.assert_array_equal(*by_name)
    parts = trained(6, accumulate=2)
    assert any(
        (a > 0).sum() > (b > 0).sum() for a, b in zip(tops(parts).values(), tops(one).values(), strict=True)
    )
    np.testing.assert_allclose(parts.losses, one.losses, rtol=0.2)  # other draws


def test_a_run_goes_on_from_its_state_bit_for_bit():
    """The histories are in it: without them the next step would scale by its own magnitudes."""
    whole, half = trained(8), trained(4)
    rest = trained(4, state=jax.tree.map(jnp.copy, half.state), start=4)
    assert half.losses + rest.losses == whole.losses
    jax.tree.map(np.testing.assert_array_equal, rest.state, whole.state)


def test_what_a_step_did_not_observe_stays(rng):
    """A dense phase in a loop of one's own, which has no product in 8 bits. A step of zeros is observed."""
    block = s24.nn.FFN(d, f, method=FST, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(T, d)), jnp.float32)

    def observing(x):
        graphdef, own, rest = nnx.split(block, s24.nn.Statistic, ...)
        found = jax.grad(lambda own: jnp.sum(nnx.merge(graphdef, own, rest)(x) ** 2))(own)
        nnx.update(block, s24.nn.observe(own, found))
        return np.stack(jax.tree.leaves(nnx.state(block, s24.nn.Statistic)))

    first = observing(x)
    assert first.shape == (4, 256) and (first.max(1) == REMEMBERED).all()
    s24.nn.set_sparse(block, False)
    for _ in range(2):
        np.testing.assert_array_equal(observing(x), first)
    s24.nn.set_sparse(block, True)
    np.testing.assert_array_equal(observing(0 * x), np.maximum(first - 1, 0))
    one = jnp.stack([seen(x), jnp.zeros(256)])  # of two stacked layers
    np.testing.assert_array_equal(remembered(first[:2], one)[1], first[1])


def test_a_dense_phase_leaves_histories_alone_and_refreshing_keeps_them():
    run = trained(12)  # the last two steps are dense
    np.testing.assert_array_equal(tops(run)["tops_x"], tops(trained(10))["tops_x"])
    w = jnp.asarray(np.random.default_rng(0).normal(size=(d, f)), jnp.float32)
    state = FST.init(w) | history(tops_x=(1,))
    fresh = FST.refresh(state, -w[::-1])
    assert (fresh["mask"] != state["mask"]).any()
    np.testing.assert_array_equal(fresh["tops_x"], state["tops_x"])
    soft = s24.methods.SSTE(fp8="delayed", fp8_backward="e4m3", scale="dynamic")
    np.testing.assert_array_equal(
        soft.refresh(soft.init(w) | history(tops_x=(1,)), 2 * w)["tops_x"], state["tops_x"]
    )


def test_who_does_not_observe_refuses():
    x, key = jnp.ones((T, d)), jax.random.key(0)
    with pytest.raises(
        ValueError, match=r"earlier steps have seen, which this layer does not observe; use s24.nn"
    ):
        linen.Dense(f, method=FST).init(key, x)
    tree = {"w1": jnp.ones((d, f)), "w2": jnp.ones((f, d))}
    with pytest.raises(ValueError, match=r"trains or observes more than w1 and w2; use s24.nn.FFN"):
        s24.Tree(tree, FST, [""], key)
    with pytest.raises(ValueError, match=r'which this view does not observe; use s24.nn, or fp8="tensor"'):
        s24.Function(lambda p, x: x @ p["w1"], tree, FST, (x,))
    assert dataclasses.replace(FST, fp8="tensor").histories == ()
