"""V:N:M activations with routed tokens, against 2602.06183's table written in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from jax_sparse24.methods import Dense, Venom
from jax_sparse24.methods.routing import (
    cluster_neurons,
    four_largest,
    in_blocks,
    neuron_order,
    padded_rows,
    responses,
    sort_by_cluster,
)
from tests.engine import oracle

T, d, f, V, M, K = 64, 16, 64, 16, 8, 4
KEY = jax.random.key(5)


def operands(seed=0):
    x, w1, w2, dy = oracle.matrices(seed, "float32", (T, d), (d, f), (f, d), (T, d))
    return x, w1 / 4, w2 / 4, dy


def state_of(method, w1, w2, arranged=True):
    state = {"w1": method.init(w1, "w1"), "w2": method.init(w2, "w2")}
    if arranged:
        state["w1"] |= method.router.arrange(w1)[1]
    return state


def run(method, x, w1, w2, dy, state=None, implementation=None):
    @jax.jit
    def both(x, w1, w2, dy):
        def block(x, w1, w2):
            return s24.sparse_ffn(x, w1, w2, method, state, implementation=implementation)

        y, vjp = jax.vjp(block, x, w1, w2)
        return y, *vjp(dy)

    return [np.asarray(v, np.float64) for v in both(x, w1, w2, dy)]


def blocks(a, axis):
    """The fast rule: four columns of largest L1 norm, of these two per row."""
    a = a if axis == 1 else a.T
    tiles = a.reshape(a.shape[0] // V, V, a.shape[1] // M, M)
    norms = np.abs(tiles).sum(1)
    columns = np.argsort(-norms, axis=-1, kind="stable")[..., :4]
    allowed = np.zeros(norms.shape, bool)
    np.put_along_axis(allowed, columns, True, -1)
    size = np.where(allowed[:, None], np.abs(tiles), -1)
    keep = np.zeros(tiles.shape, bool)
    np.put_along_axis(keep, np.argsort(-size, axis=-1, kind="stable")[..., :2], True, -1)
    cut = np.where(keep, tiles, 0).reshape(a.shape)
    return cut if axis == 1 else cut.T


def formulas(x, w1, w2, dy, forward1, forward2):
    """Tokens in their order; forward1, forward2: the weights that F1, B3 and F2, B1 multiply."""
    x, dy, w1, w2 = (np.asarray(v, np.float64) for v in (x, dy, forward1, forward2))
    relu = np.maximum(x @ w1, 0)
    y2 = blocks(relu**2, 1)
    dy1 = np.where(y2 != 0, (dy @ w2.T) * 2 * relu, 0)
    tokens = np.arange(T).reshape(M, T // M).T.ravel()  # T / M apart
    neurons = np.arange(f).reshape(f // M, M).T.ravel()  # of one cluster side by side
    cut = [np.empty_like(a) for a in (y2, dy1)]
    for uncut, into in zip((y2, dy1), cut, strict=True):
        into[np.ix_(tokens, neurons)] = blocks(uncut[np.ix_(tokens, neurons)], 0)
    return [y2 @ w2, dy1 @ w1.T, x.T @ cut[1], cut[0].T @ dy]


@pytest.mark.slow_where(implementation=None)
@pytest.mark.parametrize("implementation", [None, "reference", "ffi"])
@pytest.mark.parametrize("weights", ["soft", "dense"])
def test_all_products_follow_the_table(weights, implementation):
    x, w1, w2, dy = operands()
    method = Venom(v=V, m=M, clusters=K, weights=weights)
    state = state_of(method, w1, w2)
    w1_used, w2_used = w1, w2
    if weights == "soft":
        w1_used = s24.soft24(w1, 0) * state["w1"]["scale"]
        w2_used = s24.soft24(w2, 1) * state["w2"]["scale"]
    order = np.argsort(np.argmax(np.asarray(x) @ np.asarray(state["w1"]["centroids"]), 1), kind="stable")
    want = formulas(x[order], w1, w2, dy[order], w1_used, w2_used)
    back = np.argsort(order)
    want[0], want[1] = want[0][back], want[1][back]
    for got, expected in zip(run(method, x, w1, w2, dy, state, implementation), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def test_dense_values_in_f2_and_b3_on_request():
    x, w1, w2, dy = operands()
    method = Venom(v=V, m=M, clusters=K, routing="none", dense_operand="dense")
    state = state_of(method, w1, w2)
    y = run(method, x, w1, w2, dy, state)[0]
    soft1 = np.asarray(s24.soft24(w1, 0) * state["w1"]["scale"], np.float64)
    want = blocks(np.maximum(np.asarray(x, np.float64) @ soft1, 0) ** 2, 1) @ np.asarray(w2, np.float64)
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_a_block_that_loses_nothing_is_dense():
    """Each cluster of tokens fires one neuron of every group of M."""
    w1 = np.full((d, f), -1.0, np.float32)
    x = np.zeros((T, d), np.float32)
    for cluster in range(K):
        x[cluster::K, cluster] = 1 + np.arange(T // K) / T
        w1[cluster, cluster::M] = 1 + np.arange(f // M) / f
    _, _, w2, dy = operands()
    method = Venom(v=V, m=M, clusters=f // M, weights="dense")
    centroids = np.eye(d, f // M, dtype=np.float32)
    state = {"w1": {"centroids": centroids, "arranged": jnp.asarray(True)}, "w2": {}}
    want = run(Dense(), x, w1, w2, dy)
    for got, expected in zip(run(method, x, w1, w2, dy, state), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_clusters_are_balanced_and_find_planted_ones(metric):
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(d, K))
    planted = rng.permutation(np.arange(f) % K)
    w1 = directions[:, planted] + 0.05 * rng.normal(size=(d, f))
    found = cluster_neurons(w1, K, metric)
    assert (np.bincount(found.assignment) == f // K).all()
    pairs = set(zip(planted, found.assignment, strict=True))
    assert len(pairs) == K
    again = cluster_neurons(w1, K, metric)
    np.testing.assert_array_equal(found.assignment, again.assignment)
    np.testing.assert_array_equal(found.centroids, again.centroids)


def test_clusters_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="3 clusters do not divide 64 neurons"):
        cluster_neurons(np.ones((d, f)), 3)
    with pytest.raises(ValueError, match="NaN or Inf"):
        cluster_neurons(np.full((d, f), np.nan), K)
    assert np.isfinite(cluster_neurons(np.zeros((d, f)), K).centroids).all()


def test_layouts():
    assignment = np.arange(f) // (f // K)  # sorted clusters
    spread = neuron_order(assignment, M, "spread")
    assert sorted(spread) == list(range(f))
    # Every group of M holds the same number of neurons of every cluster.
    counts = [np.bincount(assignment[spread].reshape(-1, M)[g], minlength=K) for g in range(f // M)]
    np.testing.assert_array_equal(counts, M // K)
    np.testing.assert_array_equal(
        neuron_order(assignment[::-1], M, "adjacent")[: f // K], f - f // K + np.arange(f // K)
    )
    np.testing.assert_array_equal(neuron_order(assignment, M, "none"), np.arange(f))


def test_routing_sorts_tokens_by_their_nearest_centroid():
    x = jnp.asarray([[0, 1.0], [1, 0], [0, 2], [-3, -3], [2, 1]])
    order, cluster = sort_by_cluster(x, jnp.eye(2))
    np.testing.assert_array_equal(cluster, [0, 0, 0, 1, 1])  # a tie goes to the first
    np.testing.assert_array_equal(order, [1, 3, 4, 0, 2])


class Net(nnx.Module):
    def __init__(self, rngs, method):
        self.blocks = nnx.List([s24.nn.FFN(d, f, method=method, use_bias=True, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.slow
def test_arranging_changes_no_output_and_no_training():
    """Loss and further dense steps are those of the model that was not arranged: moments move too."""
    x, *_, dy = operands()
    method = Venom(v=V, m=M, clusters=K)
    tx = optax.adam(1e-2)
    losses = []
    for arranged in (False, True):
        net = Net(nnx.Rngs(0), method)
        s24.nn.set_sparse(net, False)
        graphdef, params, rest = nnx.split(net, nnx.Param, ...)
        opt, trace = tx.init(params), []

        @jax.jit
        def step(params, rest, opt, graphdef=graphdef):
            def loss(params):
                return jnp.mean((nnx.merge(graphdef, params, rest)(x) - dy) ** 2)

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt = tx.update(grads, opt)
            return optax.apply_updates(params, updates), opt, value

        for count in range(6):
            if arranged and count == 3:
                model = nnx.merge(graphdef, params, rest)
                moves = s24.nn.arrange(model)
                assert set(moves) == {
                    f"blocks.{n}.{p}" for n in (0, 1) for p in ("up.kernel", "up.bias", "down.kernel")
                }
                assert any((move.order != jnp.arange(f)).any() for move in moves.values())
                _, params, rest = nnx.split(model, nnx.Param, ...)
                opt = s24.optim.permute_moments(tx, opt, params, moves)
            params, opt, value = step(params, rest, opt)
            trace.append(float(value))
        losses.append(trace)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_arranging_stacked_layers_is_arranging_each():
    method = Venom(v=V, m=M, clusters=K)
    layers = [s24.nn.FFN(d, f, method=method, rngs=nnx.Rngs(n)) for n in range(2)]
    graphdef = nnx.graphdef(layers[0])
    stacked = nnx.merge(graphdef, jax.tree.map(lambda *a: jnp.stack(a), *map(nnx.state, layers)))
    s24.nn.arrange(stacked)
    for layer in layers:
        s24.nn.arrange(layer)
    apart = jax.tree.map(lambda *a: jnp.stack(a), *map(nnx.state, layers))
    for a, b in zip(jax.tree.leaves(nnx.state(stacked)), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(a, b)
    assert bool(stacked.up.state["arranged"][...].all())


def allowed_neurons(method, x, w1, state):
    """bool (T, f): the neurons that the cluster of each token keeps, in numpy."""
    centroids = np.asarray(state["w1"]["centroids"])
    norms = np.asarray(state["w1"]["norms"] if "norms" in state["w1"] else centroids.T @ np.asarray(w1))
    groups = norms.reshape(K, -1, M)
    allowed = np.zeros(groups.shape, bool)
    np.put_along_axis(allowed, np.argsort(-groups, axis=-1, kind="stable")[..., :4], True, -1)
    return allowed.reshape(K, f)[np.argmax(np.asarray(x) @ centroids, 1)]


@pytest.mark.slow_where(implementation=None)
@pytest.mark.parametrize("implementation", [None, "reference", "ffi"])
@pytest.mark.parametrize("columns", ["cluster", "statistic"])
def test_columns_of_the_token_alone(columns, implementation):
    """F2 and B3 take the two largest of the neurons that a token's own cluster keeps, whatever else is in the
    batch, for any number of tokens, with a bias that wakes the rows of padding."""
    x, w1, w2, dy = operands()
    method = Venom(v=V, m=M, clusters=K, weights="dense", columns=columns)
    state = state_of(method, w1, w2)
    if columns == "statistic":
        state["w1"]["norms"] = jax.random.uniform(KEY, (K, f))
    b1 = jnp.full(f, 0.1)

    @jax.jit
    def both(x, dy):
        def block(x, w1, w2):
            return s24.sparse_ffn(x, w1, w2, method, state, b1=b1, implementation=implementation)

        y, vjp = jax.vjp(block, x, w1, w2)
        return y, *vjp(dy)

    for tokens in (T, T - 7, 1):
        y, dx, *weights = both(x[:tokens], dy[:tokens])
        wide = [np.asarray(a, np.float64) for a in (x[:tokens], w1, w2, dy[:tokens])]
        relu = np.maximum(wide[0] @ wide[1] + 0.1, 0)
        allowed = allowed_neurons(method, x[:tokens], w1, state)
        groups = np.where(allowed, relu**2, -1).reshape(tokens, -1, M)
        keep = np.zeros(groups.shape, bool)
        np.put_along_axis(keep, np.argsort(-groups, axis=-1, kind="stable")[..., :2], True, -1)
        keep = keep.reshape(tokens, f) & allowed
        dy1 = np.where(keep, (wide[3] @ wide[2].T) * 2 * relu, 0)
        for got, want in ((y, np.where(keep, relu**2, 0) @ wide[2]), (dx, dy1 @ wide[1].T)):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
        assert all(jnp.isfinite(dw).all() and jnp.any(dw != 0) for dw in weights)


@pytest.mark.slow
def test_stats_of_padded_tokens_count_the_tokens_alone():
    x, w1, w2, _ = operands()
    method = Venom(v=V, m=M, clusters=K, weights="dense", columns="cluster")
    state = state_of(method, w1, w2)
    stats = s24.activation_stats(x, w1, method, state, b1=jnp.full(f, 0.1))
    y2 = np.square(np.maximum(np.asarray(x, np.float64) @ np.asarray(w1) + 0.1, 0))
    np.testing.assert_allclose(stats["density"], np.mean(y2 != 0), rtol=1e-5)
    groups = np.where(allowed_neurons(method, x, w1, state), y2, 0).reshape(T, -1, M)
    kept = np.sort(groups, -1)[..., -2:]
    np.testing.assert_allclose(stats["F2_lost_energy"], 1 - (kept**2).sum() / (y2**2).sum(), rtol=1e-4)


@pytest.mark.parametrize(
    "counts", [(64, 0, 0, 0), (0, 16, 0, 48), (1, 1, 1, 1), (17, 15, 16, 33), (0, 0, 1, 0)]
)
def test_blocks_of_one_cluster(counts):
    tokens = sum(counts)
    rng = np.random.default_rng(1)
    cluster = rng.permutation(np.repeat(np.arange(K), counts)).astype(np.int32)
    order = np.argsort(cluster, kind="stable").astype(np.int32)
    padded, of_block = in_blocks(jnp.asarray(order), jnp.asarray(cluster[order]), K, V, M)
    assert padded.size == padded_rows(tokens, K, V, M) == of_block.size * V
    assert padded.size % V == 0 and padded.size % M == 0
    real = np.asarray(padded) < tokens
    np.testing.assert_array_equal(np.asarray(padded)[real], order)
    np.testing.assert_array_equal(np.repeat(of_block, V)[real], cluster[order])


def test_columns_of_a_cluster():
    w1 = jnp.eye(M)  # neuron j responds to input j
    centroids = jnp.asarray([[1.0, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]).T
    allowed = four_largest(responses(w1, centroids), M)
    np.testing.assert_array_equal(allowed, [[0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(four_largest(jnp.zeros((1, M)), M), [[1, 1, 1, 1, 0, 0, 0, 0]])


@pytest.mark.slow
def test_a_statistic_gains_what_every_cluster_activates():
    x, _, _, dy = operands()
    ffn = s24.nn.FFN(d, f, method=Venom(v=V, m=M, clusters=K, columns="statistic"), rngs=nnx.Rngs(0))
    s24.nn.arrange(ffn)
    graphdef, seen, rest = nnx.split(ffn, s24.nn.Statistic, ...)
    (before,) = jax.tree.leaves(seen)
    centroids, w1 = (np.asarray(v, np.float64) for v in (ffn.up.state["centroids"][...], ffn.up.kernel[...]))
    np.testing.assert_allclose(before, np.square(np.maximum(centroids.T @ w1, 0)), rtol=1e-4, atol=1e-6)

    gradient = jax.grad(lambda s, scale: scale * jnp.vdot(nnx.merge(graphdef, s, rest)(x), dy))
    some = np.asarray(x[::16], np.float64)
    want = np.zeros((K, f))
    np.add.at(want, np.argmax(some @ centroids, 1), np.square(np.maximum(some @ w1, 0)))
    for scale in (1.0, 1e-3):  # it does not depend on the loss
        (got,) = jax.tree.leaves(gradient(seen, scale))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    (remat,) = jax.tree.leaves(
        jax.grad(lambda s: jnp.vdot(jax.checkpoint(lambda s: nnx.merge(graphdef, s, rest)(x))(s), dy))(seen)
    )
    np.testing.assert_array_equal(remat, got)
    nnx.update(ffn, s24.nn.observe(nnx.state(ffn, s24.nn.Statistic), gradient(seen, 1.0)))
    after = ffn.up.state["norms"][...]
    np.testing.assert_allclose(after, 0.99 * before + want, rtol=1e-4, atol=1e-6)
    s24.nn.set_sparse(ffn, False)  # nothing is observed, and nothing forgotten
    graphdef, seen, rest = nnx.split(ffn, s24.nn.Statistic, ...)
    dense = jax.grad(lambda s: jnp.vdot(nnx.merge(graphdef, s, rest)(x), dy))(seen)
    nnx.update(ffn, s24.nn.observe(seen, dense))
    np.testing.assert_array_equal(ffn.up.state["norms"][...], after)


def test_what_a_router_learns_is_of_activations_with_their_bias():
    """The bias was left out, so that neurons counted as active which it had silenced."""
    x, _, _, dy = operands()
    method = Venom(v=V, m=M, clusters=K, columns="statistic", routing="learned")
    with_bias, shifted = (
        s24.nn.FFN(d, f, method=method, use_bias=bias, rngs=nnx.Rngs(0)) for bias in (True, False)
    )
    bias = jax.random.normal(jax.random.key(1), (f,))
    # The last feature of every token is 1, so that a row of the kernel is another bias.
    x = x.at[:, -1].set(1)
    for ffn in (with_bias, shifted):
        ffn.up.kernel[...] = ffn.up.kernel[...].at[-1].set(0)
        s24.nn.arrange(ffn)
    with_bias.up.bias[...] = bias
    shifted.up.kernel[...] = shifted.up.kernel[...].at[-1].set(bias)
    found = []
    for ffn in (with_bias, shifted):
        graphdef, learners, rest = nnx.split(ffn, lambda path, _: path[-1] in ("norms", "router"), ...)
        found.append(jax.grad(lambda s, g=graphdef, r=rest: jnp.vdot(nnx.merge(g, s, r)(x), dy))(learners))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)


def test_zero_and_nan_activations():
    x, w1, w2, dy = operands()
    method = Venom(v=V, m=M, clusters=K, weights="dense")
    state = state_of(method, w1, w2)
    for value in run(method, x, jnp.zeros_like(w1), w2, dy, state):
        assert (value == 0).all()
    y = run(method, x.at[3, 2].set(jnp.nan), w1, w2, dy, state)[0]
    assert np.isnan(y[3]).any()


BAD = {
    "v": ({"v": 48}, "v=48 is not supported"),
    "m": ({"m": 64}, "m=64 is not supported"),
    "search": ({"m": 32, "exact": True}, "limited to m=16"),
    "metric": ({"metric": "l1"}, "metric='l1' is unknown; use one of 'cosine', 'l2'"),
    "clusters": ({"clusters": 0}, "clusters=0"),
    "columns": ({"columns": "cluster", "routing": "none"}, "needs tokens to be routed"),
    "share": ({"sparse_share": 2.0}, r"sparse_share=2.0 must lie in \[0, 1\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_fields(case):
    fields, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        Venom(**fields)


def test_bad_shapes_and_states():
    x, w1, w2, _ = operands()
    method = Venom(v=V, m=M, clusters=K)
    # Without a gradient any number of tokens will do; a gradient needs whole blocks.
    state = state_of(method, w1, w2)
    for tokens in (8, 40):
        assert s24.sparse_ffn(x[:tokens], w1, w2, method, state).shape == (tokens, d)
    gradient = jax.grad(lambda w1, x: s24.sparse_ffn(x, w1, w2, method, state).sum())
    with pytest.raises(ValueError, match=r"8 tokens along axis -2, fewer than v=16: use more tokens"):
        gradient(w1, x[:8])
    few = w1[:, :8], w2[:8]
    wide = Venom(v=V, m=M, clusters=2)
    with pytest.raises(ValueError, match=r"operand y2 .* 8 neurons along axis -1.*: use more neurons"):
        jax.grad(lambda w1: s24.sparse_ffn(x, w1, few[1], wide, state_of(wide, *few)).sum())(few[0])
    with pytest.raises(ValueError, match="not a multiple of 16"):
        gradient(w1, x[:40])
    for columns in ("data", "statistic", "cluster"):
        groups = Venom(v=V, m=M, clusters=1, columns=columns)
        odd = w1[:, : M + 4], w2[: M + 4]
        with pytest.raises(ValueError, match=f"size {M + 4} along axis -1.* not a multiple of {M}"):
            s24.sparse_ffn(x, *odd, groups, state_of(groups, *odd))
    with pytest.raises(ValueError, match=r"state\['w1'\]\['arranged'\] is missing"):
        s24.sparse_ffn(x, w1, w2, method, {"w1": {"scale": jnp.float32(1)}, "w2": {"scale": jnp.float32(1)}})
    with pytest.raises(ValueError, match="nor for a block with a gate"):
        s24.nn.GatedFFN(d, f, method=method, rngs=nnx.Rngs(0))


def test_schedule():
    phases = Venom(dense_warmup=10, sparse_share=0.25).schedule(50).phases
    assert [(p.name, p.steps, p.sparse) for p in phases] == [
        ("dense_warmup", 10, False),
        ("sparse", 10, True),
        ("dense", 30, False),
    ]
    with pytest.raises(ValueError, match="no sparse step in a run of 900 steps"):
        Venom().schedule(900)


@pytest.mark.slow
def test_a_learned_router_starts_from_the_centroids_and_learns_what_tokens_fire():
    """Gradients of everything else are those of the same routing without learning."""
    x, _, _, dy = operands()
    learned = s24.nn.FFN(d, f, method=Venom(v=V, m=M, clusters=K, routing="learned"), rngs=nnx.Rngs(0))
    fixed = s24.nn.FFN(d, f, method=Venom(v=V, m=M, clusters=K), rngs=nnx.Rngs(0))
    for ffn in (learned, fixed):
        s24.nn.arrange(ffn)
    np.testing.assert_array_equal(learned.router[...], fixed.up.state["centroids"][...])

    @nnx.jit
    def gradient(ffn):
        return nnx.grad(lambda ffn: jnp.vdot(ffn(x), dy))(ffn)

    got, want = gradient(learned), gradient(fixed)
    np.testing.assert_array_equal(got["up"]["kernel"][...], want["up"]["kernel"][...])

    some = x[::16]
    mass = jnp.square(jax.nn.relu(some @ learned.up.kernel[...]))
    by_cluster = np.asarray(mass).reshape(-1, f // M, M).transpose(0, 2, 1).reshape(len(some), K, -1).sum(-1)

    def loss(router):
        return (
            0.01 * optax.softmax_cross_entropy_with_integer_labels(some @ router, by_cluster.argmax(1)).mean()
        )

    expected = jax.grad(loss)(learned.router[...])
    np.testing.assert_allclose(got["router"][...], expected, rtol=1e-4, atol=1e-8)
    for _ in range(300):
        learned.router[...] -= 100 * gradient(learned)["router"][...]
    assert (np.argmax(some @ learned.router[...], 1) == by_cluster.argmax(1)).all()
    with pytest.raises(ValueError, match="leaves clusters without a place"):
        Venom(routing="learned", layout="none")
