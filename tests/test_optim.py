"""Masked decay: its arithmetic, its place in a chain, its arguments; and moments of neurons that move."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24

RATE = 6e-5
G = {"kernel": jnp.array([[1.0, -2.0, 0.5, 0.0]]), "bias": jnp.array([0.25, -0.25])}
W = {"kernel": jnp.array([[3.0, -0.1, 0.7, 1000.0]]), "bias": jnp.array([1.0, 2.0])}
M = {"kernel": jnp.array([[True, False, False, False]]), "bias": jnp.ones((), bool)}


def decayed(rate, g, w, mask):
    """rate (1 - M) w in float32, the sum in float32, then the dtype of g: each rounding where it belongs."""
    g32, w32 = np.asarray(g).astype(np.float32), np.asarray(w).astype(np.float32)
    pull = np.where(np.asarray(mask), np.float32(0), np.float32(rate) * w32)
    return (g32 + pull).astype(np.asarray(g).dtype)


@pytest.mark.parametrize("rate", [RATE, 0.1, 1])
@pytest.mark.parametrize("jit", [False, True])
def test_the_arithmetic_is_exact_in_float32(rate, jit):
    tx = s24.optim.masked_decay(rate)
    state = tx.init(W)
    update = lambda g, w, m: tx.update(g, state, w, masks=m)[0]  # noqa: E731
    got = (jax.jit(update) if jit else update)(G, W, M)
    for name in G:
        want = decayed(rate, G[name], W[name], M[name])
        if jit:  # a fused multiply-add rounds once less
            np.testing.assert_allclose(got[name], want, rtol=2**-23)
        else:
            np.testing.assert_array_equal(got[name], want)
    np.testing.assert_array_equal(got["bias"], G["bias"])  # kept: not touched
    assert float(got["kernel"][0, 0]) == 1.0
    assert float(got["kernel"][0, 3]) == pytest.approx(rate * 1000)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gradients", ["float32", None])
def test_16_bit_parameters_are_decayed_in_float32(dtype, gradients):
    """In 16 bits the gradient 1 would swallow a pull of 2e-3 or be rounded twice."""
    rng = np.random.default_rng(0)
    g = jnp.asarray(rng.normal(size=(16, 16)), gradients or dtype)
    w = jnp.asarray(rng.normal(size=(16, 16)), dtype)
    mask = s24.transposable_mask24(w)
    tx = s24.optim.masked_decay(0.3)
    got, _ = tx.update(g, tx.init(w), w, masks=mask)
    assert got.dtype == g.dtype
    np.testing.assert_array_equal(got, decayed(0.3, g, w, mask))


def test_kept_weights_are_left_alone_even_when_broken():
    """A kept Inf or NaN does not reach the gradient of its weight; a pruned one does: nothing hides it."""
    tx = s24.optim.masked_decay(0.1)
    w = jnp.array([jnp.inf, jnp.nan, jnp.inf, jnp.nan])
    got, _ = tx.update(jnp.ones(4), tx.init(w), w, masks=jnp.array([True, True, False, False]))
    np.testing.assert_array_equal(got, [1, 1, np.inf, np.nan])


@pytest.mark.parametrize("masks", [None, {}])
@pytest.mark.parametrize("params", [W, None])
def test_a_dense_phase_adds_nothing(masks, params):
    tx = s24.optim.masked_decay(RATE)
    got, _ = tx.update(G, tx.init(W), params, masks=masks)
    jax.tree.map(np.testing.assert_array_equal, got, G)


def test_a_rate_of_zero_adds_nothing():
    tx = s24.optim.masked_decay(0.0)
    got, _ = tx.update(G, tx.init(W), W, masks=M)
    jax.tree.map(np.testing.assert_array_equal, got, G)


@pytest.mark.parametrize("rate", [-1e-4, float("nan")])
def test_rates_must_not_be_negative(rate):
    with pytest.raises(ValueError, match=r"masked_decay: rate=.* must be 0 or positive"):
        s24.optim.masked_decay(rate)


def test_parameters_are_needed():
    tx = s24.optim.masked_decay(RATE)
    with pytest.raises(
        ValueError, match=r"masked_decay: needs the parameters; call update\(grads, state, params"
    ):
        tx.update(G, tx.init(W), masks=M)


def test_forgotten_masks_raise_instead_of_switching_the_decay_off():
    tx = s24.optim.masked_decay(0.1)
    with pytest.raises(ValueError, match=r"needs the masks.*masks=None in a dense phase"):
        tx.update(G, tx.init(W), W)


def test_masks_must_be_a_tree_like_the_parameters():
    tx = s24.optim.masked_decay(RATE)
    with pytest.raises(
        ValueError, match=r"masked_decay: masks must be a tree like the gradients.*filter_state"
    ):
        tx.update(G, tx.init(W), W, masks={"kernel": M["kernel"]})


def test_a_part_of_a_model_is_trained_with_its_part_of_the_masks():
    method = s24.methods.FST(decay=0.1)
    wrt = nnx.All(nnx.Param, nnx.PathContains("up"))
    model = s24.nn.FFN(8, 16, method=method, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, s24.optim.for_method(method, 1e-2, 10), wrt=wrt)
    grads, masks = nnx.state(model, wrt), s24.nn.masks(model)
    with pytest.raises(ValueError, match=r"nnx.filter_state\(s24.nn.masks\(model\), wrt\)"):
        optimizer.update(model, grads, masks=masks, frozen=True)
    down = model.down.kernel[...]
    optimizer.update(model, grads, masks=nnx.filter_state(masks, wrt), frozen=True)
    np.testing.assert_array_equal(model.down.kernel[...], down)


# ---- in a chain

BETAS = {"b1": 0.9, "b2": 0.95}


def test_both_moments_see_the_decay():
    """After clipping, before Adam: m and v are those of clip(g) + pull, whatever the learning rate."""
    limit = 0.1
    clipped = optax.clip_by_global_norm(limit)
    small, _ = clipped.update(G, clipped.init(W))
    np.testing.assert_allclose(optax.tree.norm(small), limit, rtol=1e-6)
    pulled = {n: decayed(0.01, small[n], W[n], M[n]) for n in G}
    for lr in (1e-3, 1.0):
        tx = optax.chain(clipped, s24.optim.masked_decay(0.01), optax.adam(lr, **BETAS))
        _, state = tx.update(G, tx.init(W), W, masks=M)
        adam = state[2][0]
        for name in G:
            np.testing.assert_allclose(adam.mu[name], 0.1 * pulled[name], rtol=1e-5)
            np.testing.assert_allclose(adam.nu[name], 0.05 * pulled[name] ** 2, rtol=1e-5)
    # The pull of 10 is far above the clipping limit: it was not clipped.
    assert float(jnp.abs(adam.mu["kernel"]).max()) > 0.9


def test_the_chain_is_the_paper_step_by_step():
    """g <- clip(grad) + rate (1 - M) w; Adam with bias correction; decoupled weight decay on all weights."""
    lr, rate, wd, eps, limit = 1e-2, 0.05, 0.1, 1e-8, 1.0
    tx = optax.chain(
        optax.clip_by_global_norm(limit),
        s24.optim.masked_decay(rate),
        optax.adamw(lr, eps=eps, weight_decay=wd, **BETAS),
    )
    rng = np.random.default_rng(1)
    w = rng.normal(size=(8, 8))
    params, state = jnp.asarray(w, jnp.float32), tx.init(jnp.asarray(w, jnp.float32))
    update = jax.jit(lambda g, state, w, m: tx.update(g, state, w, masks=m))
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t in range(1, 5):
        gradient = rng.normal(size=w.shape)
        mask = np.asarray(s24.transposable_mask24(params))
        updates, state = update(jnp.asarray(gradient, jnp.float32), state, params, mask)
        params = optax.apply_updates(params, updates)
        g = gradient * min(1, limit / np.linalg.norm(gradient)) + rate * (1 - mask) * w
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + eps)
        w = w - lr * (step + wd * w)
        np.testing.assert_allclose(params, w, rtol=1e-4, atol=1e-5)


def test_pruned_weights_are_drawn_to_zero_without_a_gradient():
    tx = optax.chain(s24.optim.masked_decay(0.5), optax.sgd(0.1))
    params = W
    state = tx.init(params)
    for _ in range(200):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, G), state, params, masks=M)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["bias"], W["bias"])
    assert float(params["kernel"][0, 0]) == 3.0
    assert np.abs(params["kernel"][0, 1:]).max() < 0.1


def test_masks_pass_through_a_named_chain():
    named = optax.named_chain(("decay", s24.optim.masked_decay(0.1)), ("sgd", optax.sgd(1.0)))
    got, _ = named.update(G, named.init(W), W, masks=M)
    for name in G:
        np.testing.assert_array_equal(got[name], -decayed(0.1, G[name], W[name], M[name]))


def test_accumulated_gradients_are_decayed_once():
    """Inside MultiSteps the pull is added to the mean of the micro-batches, not to each."""
    tx = optax.MultiSteps(optax.chain(s24.optim.masked_decay(0.5), optax.sgd(1.0)), every_k_schedule=2)
    state = tx.init(W)
    nothing, state = tx.update(jax.tree.map(lambda g: 3 * g, G), state, W, masks=M)
    got, _ = tx.update(G, state, W, masks=M)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, np.zeros_like(u)), nothing)
    for name in G:
        np.testing.assert_allclose(got[name], -decayed(0.5, 2 * G[name], W[name], M[name]), rtol=1e-6)


# ---- inside optax.masked and optax.partition, with schedules

KERNELS = {"kernel": True, "bias": False}
LABELS = {"kernel": "sparse", "bias": "rest"}
DECAYS = {
    "masked_decay": s24.optim.masked_decay,
    "adam_masked_decay": s24.optim.adam_masked_decay,
}


def run_steps(tx, masks, steps=3, params=W, jit=False):
    """The updates and states of some steps with gradients of fixed seeds."""
    state, seen = tx.init(params), []
    update = (jax.jit if jit else lambda f: f)(lambda g, s, p, m: tx.update(g, s, p, masks=m))
    for step in range(steps):
        rng = np.random.default_rng(step)
        g = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype), params)  # noqa: B023
        updates, state = update(g, state, params, masks)
        seen.append(updates)
    return seen, state


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("masked_extra", [False, True])
def test_inside_masked_it_sees_its_own_parameters_only(name, masked_extra):
    """Parameters that `optax.masked` leaves out pass through, whether their masks are handed over or not."""
    alone, _ = run_steps(DECAYS[name](0.1), M)
    tx = optax.masked(DECAYS[name](0.1), KERNELS, mask_compatible_extra_args=masked_extra)
    within, _ = run_steps(tx, M)
    for step, (got, expected) in enumerate(zip(within, alone, strict=True)):
        np.testing.assert_array_equal(got["kernel"], expected["kernel"])
        rng = np.random.default_rng(step)
        plain = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype), W)  # noqa: B023
        np.testing.assert_array_equal(got["bias"], plain["bias"])


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("masked_extra", [False, True])
def test_inside_partition_every_part_has_its_own_decay(name, masked_extra):
    parts = {"sparse": DECAYS[name](0.1), "rest": DECAYS[name](0.0)}
    tx = optax.partition(parts, LABELS, mask_compatible_extra_args=masked_extra)
    got, _ = run_steps(tx, M)
    for label, rate in (("kernel", 0.1), ("bias", 0.0)):
        expected, _ = run_steps(DECAYS[name](rate), M)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a[label], b[label])


@pytest.mark.parametrize("name", DECAYS)
def test_a_schedule_is_asked_with_the_count_of_earlier_updates(name):
    """Also in a dense phase the count goes on."""
    rate = lambda count: 0.1 * (count + 1)  # noqa: E731
    scheduled, _ = run_steps(DECAYS[name](rate), M)
    first, _ = run_steps(DECAYS[name](rate(0)), M)
    for leaf in W:
        np.testing.assert_allclose(scheduled[0][leaf], first[0][leaf], rtol=1e-6)
    tx = DECAYS[name](rate)
    state = tx.init(W)
    _, state = tx.update(G, state, W, masks=None)
    pulled, state = tx.update(jax.tree.map(jnp.zeros_like, G), state, W, masks=M)
    assert int(optax.tree.get(state, "count")) == 2
    if name == "masked_decay":
        np.testing.assert_allclose(pulled["kernel"], 0.2 * jnp.where(M["kernel"], 0, W["kernel"]), rtol=1e-6)


def test_a_number_needs_no_state():
    assert s24.optim.masked_decay(0.1).init(W) == optax.EmptyState()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masks", [None, {}, "scalars"])
def test_without_masks_the_momentum_form_is_adam_bit_for_bit(masks, dtype, jit):
    params = jax.tree.map(lambda w: jnp.tile(w.astype(dtype), 64), W)
    if masks == "scalars":
        masks = jax.tree.map(lambda _: jnp.asarray(True), W)
    ours, state = run_steps(s24.optim.adam_masked_decay(0.3, 0.9, 0.95), masks, 6, params, jit)
    adam = optax.with_extra_args_support(optax.scale_by_adam(0.9, 0.95))
    theirs, expected = run_steps(adam, masks, 6, params, jit)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize(
    "rate", [-1e-4, float("nan"), float("inf"), "0.1", None, True, jnp.float32(0.1), np.ones(2)], ids=repr
)
def test_rates_are_refused_where_they_are_written(name, rate):
    with pytest.raises(ValueError, match=rf"^{name}: rate=[\s\S]* must be 0 or positive.*schedule"):
        DECAYS[name](rate)


@pytest.mark.parametrize("name", DECAYS)
def test_masks_that_do_not_fit_are_refused(name):
    tx = DECAYS[name](0.1)
    update = lambda mask: tx.update(G, tx.init(W), W, masks=M | {"kernel": mask})  # noqa: E731
    for mask in (jnp.ones((4, 1), bool), jnp.ones((2, 4), bool), jnp.ones((1, 1, 4), bool)):
        with pytest.raises(ValueError, match=rf"{name}: a mask of shape .* parameter of shape \(1, 4\)"):
            update(mask)
    for mask in (jnp.ones((1, 4)), optax.MaskedNode()):
        with pytest.raises(TypeError, match=rf"{name}: the mask .* must be bool, got"):
            update(mask)


@pytest.mark.parametrize("field, value", [("b1", 1.0), ("b2", 1.0), ("b2", float("nan")), ("eps", -1e-8)])
def test_moments_that_cannot_be(field, value):
    with pytest.raises(ValueError, match=rf"adam_masked_decay: {field}="):
        s24.optim.adam_masked_decay(0.1, **{field: value})


@pytest.mark.parametrize(
    "rate", [-1e-3, float("nan"), "a", None, np.ones(1), True, jnp.complex64(1)], ids=repr
)
def test_learning_rates_are_refused_where_they_are_written(rate):
    with pytest.raises(
        ValueError, match=r"^for_method: learning_rate=[\s\S]* must be 0 or positive.*schedule"
    ):
        s24.optim.for_method(s24.methods.FST(), rate, 10)


def test_learning_rates_may_be_arrays_schedules_and_traced():
    for rate in (0, jnp.float32(1e-3), np.float64(1e-3), optax.constant_schedule(1e-3)):
        s24.optim.for_method(s24.methods.FST(), rate, 10)
    injected = optax.inject_hyperparams(
        lambda learning_rate: s24.optim.for_method(s24.methods.FST(), learning_rate, 9)
    )
    jax.jit(injected(1e-3).init)({"w": jnp.ones((4, 4))})


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["FST", "AST", "STEP"])
def test_hyperparameters_of_for_method_are_injected(name, jit):
    """`AST` and `STEP` could not be, and messages about steps and b2 did not say what to do."""
    method, params, static = getattr(s24.methods, name)(), {"w": jnp.ones((4, 4))}, ["steps"]

    def run(static):
        tx = optax.inject_hyperparams(s24.optim.for_method, static_args=static)(method, 1e-3, 9)
        init = jax.jit(tx.init) if jit else tx.init

        def update(grads, state):
            return tx.update(grads, state, params, masks={}, frozen=False)

        return init(params), jax.jit(update) if jit else update

    with pytest.raises(TypeError, match=r"for_method: steps must be an int, got .* static_args='steps'\)"):
        run([])
    if name == "STEP":
        with pytest.raises(ValueError, match=r"step_adamw: b2=.* must be a number, .*=\('steps', 'b2'\)\)"):
            run(static)
        static = ["steps", "b2"]
    state, update = run(static)
    one, _ = update(params, state)
    state.hyperparams["learning_rate"] *= 2
    two, _ = update(params, state)
    np.testing.assert_allclose(two["w"], 2 * one["w"], rtol=1e-6)
    want, _ = (tx := s24.optim.for_method(method, 1e-3, 9)).update(
        params, tx.init(params), params, masks={}, frozen=False
    )
    np.testing.assert_allclose(one["w"], want["w"], rtol=1e-5)


@pytest.mark.parametrize(
    "field, value", [("clip", 0.0), ("clip", -1), ("clip", "1"), ("b1", 1.0), ("b2", -0.1)]
)
def test_options_of_adamw_are_refused_where_they_are_written(field, value):
    """A norm of 0 made all gradients 0, and a negative one turned their signs."""
    with pytest.raises(ValueError, match=rf"^for_method: {field}="):
        s24.optim.for_method(s24.methods.FST(), 1e-3, 10, **{field: value})


# ---- neurons that change places


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(1e-2),
        optax.adafactor(1e-2, min_dim_size_to_factor=8),
        optax.masked(optax.adam(1e-2), lambda params: jax.tree.map(lambda w: w.ndim > 1, params)),
        optax.contrib.muon(1e-2),
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    ],
    ids=["adam", "adafactor", "masked", "muon", "multi-steps"],
)
def test_moments_follow_neurons(tx):
    """Means of Adafactor over an axis got the shape of another one, and what a mask leaves out had none."""
    venom = s24.methods.Venom(v=16, m=8, clusters=4)
    model = s24.nn.FFN(16, 32, method=venom, use_bias=True, rngs=nnx.Rngs(0))
    before = nnx.state(model, nnx.Param)
    grads = [
        jax.tree.map(lambda w, n=n: jnp.cos(n + jnp.arange(w.size)).reshape(w.shape), before) for n in (1, 2)
    ]
    tx = optax.with_extra_args_support(tx)
    _, state = tx.update(grads[0], tx.init(before), before)
    want, _ = tx.update(grads[1], state, before)
    moves = s24.nn.arrange(model)

    def moved(tree):
        flat = [
            (path, v.replace(moves.get(".".join(path), lambda x: x)(v[...])))
            for path, v in nnx.to_flat_state(tree)
        ]
        return nnx.from_flat_state(flat)

    assert set(moves) == {"up.kernel", "up.bias", "down.kernel"}
    after = nnx.state(model, nnx.Param)
    got, _ = tx.update(moved(grads[1]), s24.optim.permute_moments(tx, state, after, moves), after)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, moved(want))


def test_a_state_in_which_neurons_cannot_be_told_is_refused():
    model = s24.nn.FFN(32, 32, method=s24.methods.Venom(v=16, m=8, clusters=4), rngs=nnx.Rngs(0))
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    state, moves = tx.init(nnx.state(model, nnx.Param)), s24.nn.arrange(model)
    with pytest.raises(ValueError, match=r"permute_moments: .* array of shape \(32,\) for .*kernel of shape"):
        s24.optim.permute_moments(tx, state, nnx.state(model, nnx.Param), moves)


@pytest.mark.parametrize("wrapped", [False, True])
def test_several_arrays_for_one_parameter_are_refused(wrapped):
    """SM3 has one for each axis; JAX said that two trees differ."""
    model = s24.nn.FFN(16, 32, method=s24.methods.Venom(v=16, m=8, clusters=4), rngs=nnx.Rngs(0))
    params, tx = nnx.state(model, nnx.Param), optax.sm3(1e-2)
    state = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state if wrapped else tx.init(params)
    with pytest.raises(
        ValueError, match=r"array of shape \(32,\) at \['down'\].*\[0\], where params has none"
    ):
        s24.optim.permute_moments(tx, state, params, s24.nn.arrange(model))
