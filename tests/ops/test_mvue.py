"""mvue24: two of four, unbiased, with known inclusion probabilities and variance, the same draw everywhere.

random24 draws by other laws, and is unbiased, too.

Monte-Carlo checks allow five standard errors: over keys, a right estimator would fail one of the two thousand
comparisons with probability 1e-3, and the key is fixed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.ops.mvue import key_of_shard, mvue_pack24, random24
from jax_sparse24.ops.reference.philox import philox4x32
from tests.ops import oracle
from tests.ops.data import NUMPY, assert_same_bits, assert_within, device, unit_roundoff, words

KEY = jax.random.key(2203)
SIGMAS = 5
# Common groups, the border of the capped case, capped ones, zeros, very lopsided ones.
GROUPS = np.array(
    [
        [5, 4, 3, -2], [1, 2, -3, 1.5], [1, 1, 1, 1], [-2, 3, -2, 3], [0.5, 4, 1, -3],
        [-3, 1, 1, 1], [1, 3.0625, 1, -1], [-1, 1, 1, 2.9375], [2, 1, 1, 0], [1, 8, -2, 3],
        [9, 0.25, -0.5, 4], [1, 2, -3, 0], [0, 0, 3, -1], [0, -2, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0],
        [1, 1e-4, 1e-4, 1e-4], [1e-2, 0, 0, 0], [1, 1e-3, -1, 1e-3], [100, 3, 1e-3, 1e-6],
    ]
)  # fmt: skip
REPEATS = 20_000


@functools.cache
def sample(dtype: str, exact: bool, implementation: str):
    """(inputs (G, 4), draws (REPEATS, G, 4)), in dtype; every repetition has noise of its own."""
    x = GROUPS.astype(NUMPY[dtype])
    rows = device(np.broadcast_to(x.reshape(1, -1), (REPEATS, x.size)))
    drawn = np.asarray(s24.mvue24(KEY, rows, 1, exact, implementation=implementation))
    return x, drawn.reshape(REPEATS, *x.shape)


@pytest.fixture(params=[True, False], ids=["exact", "approximate"])
def exact(request) -> bool:
    return request.param


def inclusion(x, exact):
    a = np.abs(oracle.wide(x))
    return oracle.optimal_inclusion(a) if exact else np.where(a > 0, oracle.sequential_inclusion(a), 0)


# ---- the law


def test_at_most_two_and_nothing_where_nothing_is(implementation, dtype, exact):
    x, drawn = sample(dtype, exact, implementation)
    nonzero = words(drawn) != 0
    assert (nonzero.sum(-1) <= 2).all()
    assert not nonzero[:, x == 0].any()
    assert np.isfinite(oracle.wide(drawn)).all()
    enough = (x != 0).sum(-1) >= 2
    if exact:  # a fixed-size design
        assert (nonzero[:, enough].sum(-1) == 2).all()


def test_kept_values_are_x_over_probability(implementation, dtype, exact):
    x, drawn = sample(dtype, exact, implementation)
    with np.errstate(divide="ignore", invalid="ignore"):
        want = np.broadcast_to(oracle.wide(x) / inclusion(x, exact), drawn.shape)
    kept = words(drawn) != 0
    tolerance = 32 * 2.0**-24 + 1.01 * unit_roundoff(dtype)
    assert_within(drawn[kept], want[kept], tolerance * np.abs(want[kept]))


def test_inclusion_probabilities(implementation, dtype, exact):
    x, drawn = sample(dtype, exact, implementation)
    pi = inclusion(x, exact)
    share = (words(drawn) != 0).mean(0)
    # Uniforms have 23 bits; sums are float32.
    assert_within(share, pi, SIGMAS * np.sqrt(pi * (1 - pi).clip(0) / REPEATS) + 2.0**-20)


def test_unbiased(implementation, dtype, exact):
    x, drawn = sample(dtype, exact, implementation)
    wide = oracle.wide(drawn)
    pi = inclusion(x, exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviation = np.where(pi > 0, np.abs(oracle.wide(x)) * np.sqrt((1 / pi - 1).clip(0)), 0)
    rounding = (2 * unit_roundoff(dtype) + 2.0**-18) * np.abs(oracle.wide(x))
    assert_within(wide.mean(0), oracle.wide(x), SIGMAS * deviation / np.sqrt(REPEATS) + rounding)


def test_variance_of_the_exact_estimator_is_the_closed_form(implementation):
    """S^2/2 - sum a^2, or T^2 minus the squares of the other three if the largest exceeds their sum T."""
    x, drawn = sample("float32", True, implementation)
    a = np.abs(oracle.wide(x))
    total, top = a.sum(-1), a.max(-1)
    squares, rest = np.square(a).sum(-1), total - top
    closed = np.where(top > rest, rest**2 - (squares - top**2), total**2 / 2 - squares)
    error = np.square(oracle.wide(drawn) - oracle.wide(x)).sum(-1)
    assert_within(error.mean(0), closed, SIGMAS * error.std(0) / np.sqrt(REPEATS) + 1e-5 * squares)


def test_no_unbiased_pair_has_less_variance(implementation):
    _, best = sample("float32", True, implementation)
    x, other = sample("float32", False, implementation)
    x = oracle.wide(x)
    spread = [np.square(oracle.wide(drawn) - x).sum(-1) for drawn in (best, other)]
    slack = SIGMAS * (spread[0].std(0) + spread[1].std(0)) / np.sqrt(REPEATS) + 1e-5 * np.square(x).sum(-1)
    assert (spread[0].mean(0) <= spread[1].mean(0) + slack).all()


def test_capped_entry_passes_unchanged(implementation, dtype):
    x, drawn = sample(dtype, True, implementation)
    a = np.abs(oracle.wide(x))
    capped = np.flatnonzero(a.max(-1) > a.sum(-1) - a.max(-1))
    assert len(capped) >= 5
    for group in capped:
        top = a[group].argmax()
        assert (words(drawn)[:, group, top] == words(x)[group, top]).all()


# ---- the draw


def test_philox_known_answers():
    """The vectors published with Random123, for the oracle, the reference and the native core."""
    from jax_sparse24 import _cpu

    full = 2**32 - 1
    vectors = [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((full, full), (full,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for key, counter, want in vectors:
        assert oracle.philox4x32(key, counter) == want
        assert tuple(_cpu.philox(*key, *counter)) == want
        got = philox4x32([jnp.uint32(k) for k in key], [jnp.uint32(c) for c in counter])
        assert tuple(int(w) for w in got) == want


@pytest.mark.parametrize(("shape", "axis"), [((40, 12), 1), ((12, 30), 0), ((3, 8, 5), 1)])
def test_the_draw_is_a_function_of_key_and_row_major_group(implementation, shape, axis, rng):
    """Systematic sampling with the uniform that Philox gives for (key, index of the group)."""
    x = rng.normal(size=shape).astype(np.float32)
    drawn = np.asarray(s24.mvue24(KEY, device(x), axis, implementation=implementation))
    shifted = (*shape[:axis], shape[axis] // 4, *shape[axis + 1 :])
    index = np.moveaxis(np.arange(np.prod(shifted)).reshape(shifted), axis, -1)
    u = oracle.uniforms(jax.random.key_data(KEY), index.size)[index, 0]
    a = np.abs(oracle.wide(oracle.groups(x, axis)))
    pi = oracle.optimal_inclusion(a)
    capped = (a.max(-1) > a.sum(-1) - a.max(-1))[..., None]
    largest = np.arange(4) == a.argmax(-1)[..., None]
    # Capped: the largest stays and one u places the other among the rest.
    rest = np.where(largest, 0, pi)
    ends = np.cumsum(rest, -1)
    lone = (ends - rest <= u[..., None]) & (u[..., None] < ends)
    want = np.where(capped, largest | lone, oracle.systematic_draw(pi, u))
    # Leave out what float32 may decide otherwise.
    close = np.abs(np.where(capped, ends, np.cumsum(pi, -1) % 1) - u[..., None]).min(-1) < 1e-5
    assert close.mean() < 0.01
    assert_same_bits((words(oracle.groups(drawn, axis)) != 0)[~close], want[~close])


def test_same_key_same_bits_other_key_other_bits(implementation, exact, rng):
    x = device(rng.normal(size=(60, 16)), "float32")
    draw = functools.partial(s24.mvue24, g=x, axis=1, exact=exact, implementation=implementation)
    assert_same_bits(draw(KEY), draw(KEY))
    for other in (jax.random.key(2204), jax.random.fold_in(KEY, 1)):
        assert (words(draw(other)) != words(draw(KEY))).mean() > 0.2


def test_kinds_of_keys(implementation, rng):
    x = device(rng.normal(size=(60, 16)), "float32")
    raw = jax.random.PRNGKey(3)
    typed = jax.random.key(3)
    draw = functools.partial(s24.mvue24, g=x, axis=1, implementation=implementation)
    assert_same_bits(draw(raw), draw(typed))
    assert_same_bits(draw(np.asarray(raw)), draw(typed))
    wide = [jax.random.key(seed, impl="rbg") for seed in (3, 4)]
    assert_same_bits(draw(wide[0]), draw(wide[0]))
    with jax.default_prng_impl("rbg"):
        assert_same_bits(draw(jax.random.PRNGKey(3)), draw(wide[0]))
    assert (words(draw(wide[0])) != words(draw(wide[1]))).any()


@pytest.mark.parametrize("power", [-125, -40, 40, 124])
def test_powers_of_two_scale_the_result(implementation, exact, power, rng):
    """Sums neither overflow nor vanish where the result does not."""
    x = rng.uniform(1, 2, (60, 16)).astype(np.float32) * np.sign(rng.normal(size=(60, 16))).astype(np.float32)
    factor = np.float32(2.0**power)
    plain = np.asarray(s24.mvue24(KEY, device(x), 1, exact, implementation=implementation))
    scaled = s24.mvue24(KEY, device(x * factor), 1, exact, implementation=implementation)
    assert_same_bits(scaled, plain * factor)


def test_huge_tiny_and_subnormal_magnitudes(implementation, exact):
    huge, tiny = [1e38, -1e38, 1e38, 1e38], [1e-37, 0, 0, -1e-37]
    x = device([huge, tiny, [1e38, 1e-38, 1e-37, 1], [1e-38, 0, -1e-39, 1e-40]], "float32")
    drawn = np.asarray(s24.mvue24(KEY, x, 1, exact, implementation=implementation))
    assert np.isfinite(drawn).all()
    assert_within(np.abs(drawn[0][drawn[0] != 0]), np.float64([2e38, 2e38]), 1e33)
    assert_within(drawn[1], np.asarray(x)[1], 1e-42)
    # XLA's division is not correctly rounded on a GPU.
    inexact = implementation == "reference" and not exact and jax.default_backend() == "gpu"
    assert_within(drawn[2, 0], np.float32(1e38), 2e31 if inexact else 0)
    assert not words(drawn)[3].any()  # float32 subnormals count as zero


def test_what_scales_to_just_below_the_least_normal_number_is_zero(implementation, exact):
    """By exponents, however the hardware rounds there: 0.99999994 / 2^127 lies half a unit below 2^-126."""
    almost = np.nextafter(np.float32(1), np.float32(0))
    x = device([[2e38, almost, -almost, almost], [2e38, 1, 0, 0]], "float32")
    drawn = np.asarray(s24.mvue24(KEY, x, 1, exact, implementation=implementation))
    assert not words(drawn)[0, 1:].any()
    assert drawn[1, 1] != 0 or not exact


def test_half_precision_subnormals_are_numbers(implementation, exact):
    x = device(np.array([[3, 0, 0, 5]] * 4, np.uint16).view(np.float16))
    assert_same_bits(s24.mvue24(KEY, x, 1, exact, implementation=implementation), x)


def test_non_finite_groups_are_pruned(implementation, dtype, exact):
    x = device(
        [[1, np.nan, 2, 3], [np.inf, 1, -np.inf, 2], [-np.inf, -4, 1, 2], [np.nan, np.inf, np.nan, 1]], dtype
    )
    drawn = s24.mvue24(KEY, x, 1, exact, implementation=implementation)
    assert_same_bits(drawn, oracle.prune24(np.asarray(x), 1))


def test_zeros_give_positive_zeros(implementation, dtype, exact):
    x = device(-np.zeros((4, 4)), dtype)
    assert not words(s24.mvue24(KEY, x, 1, exact, implementation=implementation)).any()


# ---- transformations


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-2, -1])
def test_shards_draw_what_the_whole_array_draws(implementation, axis, rng):
    """Rows of groups are a multiple of four, or not."""
    if implementation == "reference":
        shapes = [(8, 20)]
        draws = [functools.partial(random24, law="paired")] if axis == -1 else []
        draws += [functools.partial(s24.mvue24, implementation=implementation)] if axis == -2 else []
    else:
        shapes = [(12, 16), (8, 20)]
        options = [{"exact": exact, "implementation": implementation} for exact in (True, False)]
        draws = [functools.partial(s24.mvue24, **o) for o in options]
        draws += [lambda *a, o=o, **k: mvue_pack24(*a, **o, **k).todense() for o in options]
    key = jax.random.key(7)
    for rows, columns in shapes:
        whole = device(rng.normal(size=(2 * rows, 3 * columns)), "float32")
        parts = whole.reshape(2, rows, 3, columns).swapaxes(1, 2)
        for draw in draws:

            def of_shard(part, above, left, draw=draw):
                return draw(key_of_shard(key, above, left, 3), part, axis=axis)

            across = jax.vmap(of_shard, (0, None, 0))
            drawn = jax.vmap(across, (0, 0, None))(parts, jnp.arange(2), jnp.arange(3))
            assert_same_bits(drawn.swapaxes(1, 2).reshape(whole.shape), draw(key, whole, axis=axis))


@pytest.mark.slow
def test_numbers_of_groups_beyond_32_bits(rng):
    """The reference counts in two words, like the kernels: of shards that no machine holds as a whole."""
    x = device(rng.normal(size=(8, 16)), "float32")
    for place in ((2**31 - 1, 5, 2**20), (2**30, 2**19, 2**20)):
        key = key_of_shard(KEY, *(jnp.uint32(n) for n in place))
        reference, kernel = (s24.mvue24(key, x, 0, implementation=i) for i in ("reference", "ffi"))
        assert_same_bits(reference, kernel)


def stacked(draws):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *draws)


@pytest.mark.parametrize(("op", "exact"), [(s24.mvue24, True), (mvue_pack24, False)], ids=["plain", "packed"])
def test_vmap_over_keys_is_a_loop(implementation, op, exact, rng):
    x = rng.normal(size=(3, 4, 8)).astype(np.float32)
    keys = jax.random.split(KEY, 3)

    def draw(key, g):
        return op(key, g, 0, exact, implementation=implementation)

    assert_same_bits(jax.vmap(draw)(keys, x), stacked([draw(k, g) for k, g in zip(keys, x, strict=True)]))
    assert_same_bits(jax.vmap(draw, (0, None))(keys, x[0]), stacked([draw(k, x[0]) for k in keys]))
    assert_same_bits(jax.vmap(draw, (None, 0))(KEY, x), stacked([draw(KEY, g) for g in x]))


def test_nested_vmap(implementation, rng):
    """Keys along one level, arrays along the other, in either order, and both along both."""
    x = device(rng.normal(size=(3, 8)), "float32")
    keys = jax.random.split(KEY, 2)
    draw = functools.partial(s24.mvue24, axis=0, implementation=implementation)
    want = np.stack([[draw(k, g=g) for g in x] for k in keys])
    over_keys = jax.vmap(lambda k: jax.vmap(lambda g: draw(k, g=g))(x))(keys)
    over_arrays = jax.vmap(lambda g: jax.vmap(lambda k: draw(k, g=g))(keys))(x)
    assert_same_bits(over_keys, want)
    assert_same_bits(over_arrays, np.swapaxes(want, 0, 1))
    both = jax.vmap(jax.vmap(lambda k, g: draw(k, g=g)))(
        jnp.broadcast_to(keys[:, None], (2, 3)), jnp.broadcast_to(x, (2, 3, 8))
    )
    assert_same_bits(both, want)


def test_scan_draws_what_a_loop_draws(implementation, rng):
    x = device(rng.normal(size=(4, 6, 8)), "float32")
    keys = jax.random.split(KEY, 4)
    draw = functools.partial(s24.mvue24, axis=1, implementation=implementation)
    _, scanned = jax.lax.scan(lambda c, kx: (c, draw(kx[0], g=kx[1])), 0, (keys, x))
    assert_same_bits(scanned, np.stack([draw(k, g=g) for k, g in zip(keys, x, strict=True)]))


def test_the_draw_under_remat_equals_the_first(implementation, rng):
    x = device(rng.normal(size=(6, 8)), "float32")

    def loss(x, key):
        noise = s24.mvue24(key, jax.lax.stop_gradient(x), 1, implementation=implementation)
        return jnp.sum(jnp.sin(x) * noise)

    plain = jax.jit(jax.grad(loss))(x, KEY)
    assert_same_bits(jax.jit(jax.grad(jax.checkpoint(loss)))(x, KEY), plain)
    noise = s24.mvue24(KEY, x, 1, implementation=implementation)
    assert_within(plain, np.cos(np.asarray(x)) * np.asarray(noise), 1e-5)


@pytest.mark.parametrize(
    "transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,)), lambda f: jax.grad(jax.jit(f))]
)
def test_differentiating_raises(implementation, exact, transform):
    x = jnp.ones((4, 4))
    for op in (s24.mvue24, lambda *a, **k: mvue_pack24(*a, **k).values):

        def f(x, op=op):
            return jnp.sum(op(KEY, x, 1, exact, implementation=implementation))

        with pytest.raises(TypeError, match="no derivative of their own"):
            transform(f)(x)


@pytest.mark.slow
@pytest.mark.parametrize("law", ["uniform", "paired"])
def test_random_cuts_are_unbiased_twos(law, dtype):
    """Five standard errors; each kept value is x over the probability of its law."""
    x = np.array([5, 4, 3, -2, 1, 0, -3, 1.5, 9, 0.25, -0.5, 4, 0, 0, 0, 0]).astype(NUMPY[dtype])
    repeats = 10_000
    drawn = oracle.wide(random24(KEY, jnp.asarray(np.tile(x, (repeats, 1))), 1, law))
    a = np.abs(oracle.wide(x)).reshape(-1, 2)
    total = a.sum(-1, keepdims=True)
    pi = np.full(x.shape, 0.5) if law == "uniform" else (a / np.where(total, total, 1)).ravel()
    kept = drawn != 0
    assert (kept.reshape(repeats, -1, 4).sum(-1) <= 2).all()
    if law == "paired":
        assert (kept.reshape(repeats, -1, 2).sum(-1) == (total > 0).ravel()).all()
    values = oracle.wide(x) / np.where(pi > 0, pi, 1)
    np.testing.assert_allclose(drawn[kept], np.broadcast_to(values, drawn.shape)[kept], rtol=2**-7)
    error = np.sqrt(pi * (1 - pi) / repeats)
    nonzero = x != 0
    assert (np.abs(kept.mean(0) - pi)[nonzero] <= 5 * error[nonzero] + 2**-20).all()


@pytest.mark.parametrize("law", ["uniform", "paired"])
def test_random_cuts_pass_what_is_not_finite(law):
    x = jnp.array([[1.0, jnp.nan, 2.0, 3.0], [jnp.inf, 1.0, -jnp.inf, 0.0]])
    got = random24(KEY, x, 1, law)
    np.testing.assert_array_equal(words(got), words(s24.prune24(x, 1)))


def test_random_cuts_are_checked():
    with pytest.raises(ValueError, match="random24: law 'biased' is unknown; use 'uniform' or 'paired'"):
        random24(KEY, jnp.ones(4), 0, "biased")
    with pytest.raises(TypeError, match="random24: key must be one PRNG key"):
        random24(3, jnp.ones(4), 0, "paired")
    with pytest.raises(TypeError, match="random24 estimate gradients and have no derivative"):
        jax.grad(lambda x: random24(KEY, x, 0, "uniform").sum())(jnp.ones(4))
