"""The compiled training step and its parts."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_sparse24 as s24
from experiments.config import Config, Optim, Train
from experiments.data import text
from experiments.errors import UserError
from experiments.models import decoder
from experiments.training.monitor import Monitor, Probe, Watched
from experiments.training.optimiser import decayed, learning_rate, optimiser
from experiments.training.step import Program
from jax_sparse24.nn import view

NOISELESS = s24.methods.FST(mvue=None, refresh_every=3)


def small(method=s24.methods.Dense(), **train):  # noqa: B008
    return Config(
        model=decoder.Config(layers=2, d=16, f=32, heads=2, scan=True),
        data=text.Config(seq=16, batch=8),
        optim=Optim(warmup=1),
        train=Train(steps=20, **train),
        method=method,
    )


def ffn_kernels(tree) -> list:
    """The kernels of the feed-forward blocks, in a tree like the parameters of `small()`."""
    return Watched(nnx.eval_shape(small().create_model))(tree)


def batch(seed=0, sequences=8, length=17):
    return np.random.default_rng(seed).integers(0, 256, (sequences, length)).astype(np.int32)


@functools.cache
def program_of(config):
    """One program, hence one compilation, for all tests that use a config."""
    return Program(config)


@functools.cache
def _initial(program):
    return program.initial_state()


def initial_state(program):
    """A copy that a step may consume."""
    return jax.tree.map(jnp.copy, _initial(program))


def advance(program, state, tokens, sparse):
    state = program.prepare(state, int(state["step"])) if sparse else state
    return program.step(sparse)(state, program.batch(tokens))


@pytest.mark.slow
def test_accumulation_is_the_whole_batch():
    """Without noise, two micro-batches give the update of one batch, up to rounding."""
    results = []
    for parts in (1, 2):
        program = program_of(small(NOISELESS, accumulate=parts))
        state = initial_state(program)
        for seed in range(3):
            state, metrics = advance(program, state, batch(seed), True)
        results.append((state["params"], metrics["loss"], metrics["grad_norm"]))
    for one, other in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)


def test_every_micro_batch_draws_its_own_noise(monkeypatch):
    """The loss of micro-batch i sees keys folded with i; the keys that are kept are not folded."""
    program, folded, fold = program_of(small(s24.methods.FST(), accumulate=2)), [], s24.nn.fold_key
    monkeypatch.setattr(view, "fold_key", lambda state, index: folded.append(index) or fold(state, index))
    state = program.abstract_state()
    tokens = jax.ShapeDtypeStruct((2, 4, 17), jnp.int32)
    jaxpr = str(jax.make_jaxpr(program.loop.pure_step(True))(state, tokens))
    assert len(folded) == 1 and isinstance(
        folded[0], jax.core.Tracer
    )  # traced once, in the scan over micro-batches
    assert "random_fold_in" in jaxpr


def test_masks_refresh_at_multiples_of_optimiser_steps():
    program = program_of(small(NOISELESS, accumulate=2))
    state, masks = initial_state(program), []
    for seed in range(7):
        state, _ = advance(program, state, batch(seed), True)
        leaves = jax.tree_util.tree_leaves_with_path(state["sparse"])
        masks.append([np.asarray(leaf) for path, leaf in leaves if "mask" in jax.tree_util.keystr(path)])
    pairs = itertools.pairwise(masks)
    changed = [any((a != b).any() for a, b in zip(*pair, strict=True)) for pair in pairs]
    assert changed == [False, False, True, False, False, True]  # at steps 3 and 6


@pytest.mark.slow
def test_dense_phase_touches_neither_masks_nor_decay():
    """In a dense phase the step is that of the dense method. Two programs round differently on some CPUs."""
    programs = [program_of(small(method)) for method in (s24.methods.FST(decay=1.0), s24.methods.Dense())]
    results = []
    for program in programs:
        state = initial_state(program)
        for seed in range(2):
            state, _ = advance(program, state, batch(seed), False)
        results.append(state["params"])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, *results)


def test_masked_decay_acts_after_clipping_and_before_adam():
    """With a zero gradient, the first moment holds the decay of the pruned weights and nothing else."""
    config = small(s24.methods.FST(decay=0.5))
    program = program_of(config)
    state = initial_state(program)
    model = nnx.merge(program.graphdefs[True], state["params"], state["sparse"])
    s24.refresh(model)
    grads = jax.tree.map(jnp.zeros_like, state["params"])
    masks = s24.nn.masks(model)
    _, opt = jax.jit(optimiser(config).update)(grads, state["opt"], state["params"], masks=masks)
    moments = ffn_kernels(optax.tree.get(opt, "mu"))
    kernels = ffn_kernels(state["params"])
    masks = [s24.transposable_mask24(w) for w in kernels]
    assert len(moments) == 2
    for moment, w, mask in zip(moments, kernels, masks, strict=True):
        np.testing.assert_allclose(moment, 0.1 * 0.5 * jnp.where(mask, 0, w), rtol=1e-5, atol=1e-9)


def test_runs_that_differ_in_their_seed_alone_are_compiled_once():
    runs = [Program(dataclasses.replace(small(), seed=seed)) for seed in (0, 1, 0)]
    assert len({id(run.step(False)) for run in runs}) == len({id(run.loss) for run in runs}) == 1
    one, other, again = (ffn_kernels(run.initial_state()["params"])[0] for run in runs)
    assert (one != other).any() and (one == again).all()
    longer = Program(dataclasses.replace(small(), train=Train(steps=21)))
    assert longer.step(False) is not runs[0].step(False)


def test_weight_decay_spares_the_norms():
    config = small()
    params = initial_state(program_of(config))["params"]
    named = jax.tree_util.tree_leaves_with_path(decayed(params))
    spared = {str(path[-2].key) for path, flag in named if not flag}
    assert spared == {"scale"}


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_learning_rate(schedule):
    optim = Optim(lr=1e-2, final=0.1, warmup=10, schedule=schedule, decay_share=0.25)
    rate = np.array([float(learning_rate(optim, 100)(step)) for step in range(101)])
    assert rate[0] == 0 and rate[10] == pytest.approx(1e-2) and rate[100] == pytest.approx(1e-3)
    assert (np.diff(rate[:11]) > 0).all() and (np.diff(rate[10:]) <= 1e-9).all()
    if schedule == "wsd":
        np.testing.assert_allclose(rate[10:76], 1e-2, rtol=1e-6)
        assert rate[80] < 1e-2


@pytest.mark.parametrize("method", [s24.methods.Dense(), s24.methods.FST()])
def test_monitor(method):
    program = program_of(small(method))
    monitor = Monitor(program)
    params = initial_state(program)["params"]
    kernels = ffn_kernels(params)
    masks = monitor.masks(params)
    assert [mask.shape for mask in masks] == [w.shape for w in kernels] == [(2, 32, 16), (2, 16, 32)]
    same = monitor.compare(masks, masks, masks, params)
    assert same["flip_rate"] == 0
    flipped = [masks[0].at[0, 0].set(~masks[0][0, 0]), masks[1]]
    moved = monitor.compare(masks, flipped, masks, params)
    assert float(moved["flip_rate"]) == pytest.approx(16 / sum(w.size for w in kernels))
    kept = sum(float(abs(w[m]).sum()) for w, m in zip(kernels, masks, strict=True))
    total = sum(float(abs(w).sum()) for w in kernels)
    assert float(same["kept_share"]) == pytest.approx(kept / total, rel=1e-5)


def test_the_ruler_of_a_method_without_masks():
    """STE and a dense run that is watched through top-2 masks see the same masks; others are transposable."""
    params = initial_state(program_of(small()))["params"]
    one, other, transposable = (
        monitor.masks(params)
        for monitor in (
            Monitor(program_of(small(s24.methods.STE()))),
            Monitor(program_of(small(monitor_mask="top-2"))),
            Monitor(program_of(small())),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert any((a != b).any() for a, b in zip(one, transposable, strict=True))


def test_predicted_and_actual_change_of_a_small_step():
    """With a small learning rate the loss of the same batch changes as the first order says."""
    config = dataclasses.replace(small(NOISELESS), optim=Optim(lr=1e-5, warmup=0))
    program = program_of(config)
    monitor = Monitor(program)
    state, tokens = initial_state(program), batch(0)
    state, metrics = advance(program, state, tokens, True)
    change = monitor.descent(metrics, program.loss(True, state, program.batch(tokens)))
    assert change["predicted_change"] < 0 and change["rising"] == 0
    assert change["loss_change"] == pytest.approx(change["predicted_change"], rel=0.1)
    up = monitor.descent({"loss": 1.0, "predicted": -0.5}, 1.25)
    assert up == {"predicted_change": -0.5, "loss_change": 0.25, "rising": 1.0}


def test_the_loss_after_a_step_is_that_of_the_next_step():
    """Also where the next step refreshes its masks (period 3), and with micro-batches."""
    program = program_of(small(NOISELESS, accumulate=2))
    state, tokens = initial_state(program), program.batch(batch(0))
    for step in range(4):
        expected = float(program.loss(True, state, tokens))
        state, metrics = program.step(True)(program.prepare(state, step), tokens)
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", [NOISELESS, s24.methods.FST()], ids=("without noise", "with noise"))
def test_probe(method):
    config = small(method)
    program = program_of(config)
    state, tokens = initial_state(program), jnp.asarray(batch(0))
    values = Probe(program, tokens)(state["params"], state["sparse"], True)
    assert 0 < values["cosine"] < 1
    assert (values["noise"] > 0.001) == method.stochastic
    alike = dict.fromkeys((True, False), program.graphdefs[False])
    same = Probe(SimpleNamespace(config=config, graphdefs=alike, once=lambda name, make: make()), tokens)
    dense = same(state["params"], state["sparse"], True)
    assert dense["cosine"] == pytest.approx(1, abs=1e-5) and dense["noise"] == 0
    only = same(state["params"], state["sparse"], False)  # in a dense phase: the activations
    layers = [only.pop(f"density_{n}") for n in range(config.model.layers)]
    assert all(0.2 < density < 0.8 for density in layers)  # about half, untrained
    assert only == {"density": pytest.approx(np.mean(layers))}


@pytest.mark.slow
@pytest.mark.parametrize("method", [s24.methods.FST(), s24.methods.Activation24(dense_warmup=2)])
def test_a_probe_keeps_no_more_activations_than_a_step(method):
    """Where there are many tokens, those are nearly all of the memory."""
    config = small(method)
    program = program_of(
        dataclasses.replace(config, data=dataclasses.replace(config.data, seq=256, batch=16))
    )
    state, tokens = program.abstract_state(), jnp.zeros((16, 257), jnp.int32)
    step = program.step(False).memory_analysis().temp_size_in_bytes
    gradient = Probe(program, tokens)._gradient
    for sparse in (False, True):
        lowered = gradient.lower(sparse, state["params"], state["sparse"], tokens, 0)
        assert lowered.compile().memory_analysis().temp_size_in_bytes < 1.1 * step


def test_masks_are_fresh_when_a_sparse_phase_begins():
    """At a step that is no multiple of the refresh period, after dense steps that moved the weights."""
    program = program_of(small(NOISELESS))
    state = initial_state(program)
    for seed in range(4):
        state, _ = advance(program, state, batch(seed), False)
    expected = [s24.transposable_mask24(w) for w in ffn_kernels(state["params"])]

    def masks(state):
        leaves = jax.tree_util.tree_leaves_with_path(state["sparse"])
        return [np.asarray(leaf) for path, leaf in leaves if "mask" in jax.tree_util.keystr(path)]

    assert any((a != b).any() for a, b in zip(masks(state), expected, strict=True))
    jax.tree.map(np.testing.assert_array_equal, masks(program.loop.refreshed(state)), expected)


def test_errors_come_before_any_work():
    with pytest.raises(UserError, match=r"This model cannot be built: .*30.*multiple of 4"):
        config = small(s24.methods.FST())
        Program(dataclasses.replace(config, model=dataclasses.replace(config.model, f=30)))
    with pytest.raises(UserError, match=r"This training step cannot be built: .*multiple of 4"):
        config = small(s24.methods.FST())
        odd = dataclasses.replace(config, data=text.Config(seq=15, batch=3))
        Program(odd).step(True)


def test_a_step_decides_nothing_on_the_device():
    """A GPU's host would wait for it, and could not prepare the next step meanwhile."""
    program = program_of(small(NOISELESS))
    assert NOISELESS.refresh_every > 1
    assert "conditional(" not in program.step(True).as_text()
    assert (
        "conditional("
        in program.loss.lower(True, program.abstract_state(), program.batch(batch(0))).compile().as_text()
    )
