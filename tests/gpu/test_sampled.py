"""Products at the entries of V:2:M activations on Hopper: against float64, repeated, in graphs, in a block.

Sizes are those of the kernel for whole tiles: 64 rows by 512 kept columns with 3 stages of 64 (V = 64), or
128 by 256 with 4 (V = 128 and 256); 32 groups are the least, and a block of a multiprocessor takes several
tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from jax_sparse24.dispatch import hardware
from jax_sparse24.measure import Program
from jax_sparse24.ops.matmul import gather
from jax_sparse24.ops.sampled import SAMPLED_MATMUL, sampled_matmul
from tests.ops.cases import HALVES

pytestmark = pytest.mark.skipif(hardware.capability() != "9.0", reason="a kernel of Hopper")
REPEATS = 200


def operands(v, m, rows, k, groups, dtype, seed=8):
    """a (rows, k), b (groups * m, k) and a support."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (rows, k), (groups * m, k), (rows, groups * m)
    a, b, x = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
    return a, b, s24.pack_vnm(x, v, m)


def assert_right(a, b, support, repeats=0):
    """The values are those of float64 at the entries, and all repeats of the call have the same bits."""
    options = {"v": support.v, "m": support.m}
    assert SAMPLED_MATMUL.in_one_pass(a, b, support.metadata, support.columns, **options)
    program = Program(lambda a, b, s: sampled_matmul(a, b, s, implementation="ffi"), a, b, support)
    got, places = program.result, np.arange(b.shape[0], dtype=np.float32)
    # The column of each value, by its value in a matrix whose entries are the numbers of their columns.
    columns = gather(jnp.broadcast_to(places, support.shape), support, None)
    columns = np.asarray(columns).astype(int)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    scale = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64)).T
    rows = np.arange(a.shape[0])[:, None]
    unit = float(jnp.finfo(a.dtype).eps) / 2
    bound = a.shape[1] * 2.0**-24 * scale[rows, columns] + 1.01 * unit * np.abs(exact[rows, columns])
    error = np.abs(np.asarray(got, np.float64) - exact[rows, columns])
    assert (error <= bound + 2.0**-24).all()
    program.check(program() for _ in range(repeats))
    assert program.repeats_itself()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("v", [64, 128, 256])
@pytest.mark.parametrize(("stages", "m"), [(1, 4), (2, 8), (3, 16), (4, 32), (5, 5), (6, 16), (11, 31)])
def test_few_stages(stages, m, v, dtype):
    """Fewer than a block holds, as many and more, odd and even numbers."""
    assert_right(*operands(v, m, 2 * v, 64 * stages, 32, dtype))


@pytest.mark.parametrize("v", [64, 128, 256])
@pytest.mark.parametrize("groups", [32, 64, 96, 128, 160, 192, 224, 416])
def test_tiles_that_are_partial(groups, v):
    assert_right(*operands(v, 8, 3 * v, 192, groups, "bfloat16"))


@pytest.mark.parametrize("v", [64, 128])
def test_more_tiles_than_multiprocessors(v):
    """The last round is not full."""
    assert_right(*operands(v, 16, 137 * v, 256, 160, "bfloat16"), repeats=REPEATS)


def test_a_large_product_repeats_beside_another():
    """Two streams, if XLA gives them, or one after the other."""
    given = operands(64, 16, 8192, 2048, 512, "bfloat16")

    def both(a, b, support):
        return sampled_matmul(a, b, support, implementation="ffi"), a @ b.T

    program = Program(both, *given)
    alone = sampled_matmul(*given, implementation="ffi")
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint16) for x in (program.result[0], alone)))
    program.check(program() for _ in range(REPEATS))


def test_batches():
    many = [operands(64, 8, 128, 128, 64, "bfloat16", seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *many)

    def call(a, b, support):
        return sampled_matmul(a, b, support, implementation="ffi")

    got = jax.jit(jax.vmap(call))(*stacked)
    for n, one in enumerate(many):
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint16) for x in (got[n], call(*one))))


def test_what_is_not_finite_stays_in_its_column():
    a, b, support = operands(64, 8, 128, 128, 64, "bfloat16")
    b = b.at[5].set(jnp.nan).at[77].set(jnp.inf)
    got = np.asarray(sampled_matmul(a, b, support, implementation="ffi"), np.float32)
    columns = np.asarray(
        gather(jnp.broadcast_to(jnp.arange(512, dtype=jnp.float32), support.shape), support, None)
    )
    np.testing.assert_array_equal(~np.isfinite(got), np.isin(columns, (5, 77)))


@pytest.mark.parametrize("v", [64, 128])
def test_gradients_of_a_block(v):
    """B1 at entries beside the reference; dense weights, so that all multiply the same values."""
    method = s24.methods.Venom(v=v, m=8, clusters=4, weights="dense", dense_operand="dense")
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (512, 256)).astype(jnp.bfloat16)
    w1 = (jax.random.normal(keys[1], (256, 1024)) / 16).astype(jnp.bfloat16)
    w2 = (jax.random.normal(keys[2], (1024, 256)) / 32).astype(jnp.bfloat16)
    target = jax.random.normal(keys[3], (512, 256)).astype(jnp.bfloat16)
    state = {name: method.init(w, name) for name, w in (("w1", w1), ("w2", w2))}

    def gradients(implementation):
        def loss(x, w1, w2):
            y = s24.sparse_ffn(x, w1, w2, method, state, implementation=implementation)
            return jnp.sum(y.astype(jnp.float32) * target)

        run = jax.jit(jax.grad(loss, (0, 1, 2)))
        return run, run(x, w1, w2)

    run, got = gradients("ffi")
    assert "s24_vnm_sampled" in str(jax.make_jaxpr(run)(x, w1, w2))
    for ours, theirs in zip(got, gradients("reference")[1], strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) <= 0.02 * np.linalg.norm(theirs)
