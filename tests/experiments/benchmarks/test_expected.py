"""How the suites find out what results must be: programs are compiled side by side; none runs meanwhile."""

import dataclasses
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24
from experiments.benchmarks import check
from experiments.benchmarks.settings import Case
from experiments.benchmarks.suites import ffn, train_step
from experiments.training import step
from jax_sparse24.engine import execution
from jax_sparse24.engine.execution import Execution

CASE = Case(64, 16, 32)
METHODS = {"STE": s24.methods.STE(), "FST": s24.methods.FST(), "Venom": s24.methods.Venom(v=16)}


class Watch:
    """Three compilers, which must be at work at once, and the programs that ran before all had ended."""

    def __init__(self):
        self.all_at_once, self.lock = threading.Barrier(3, timeout=120), threading.Lock()
        self.working, self.disturbed = 0, []

    def compiles(self, work=lambda: None):
        with self.lock:
            self.working += 1
        made = work()
        time.sleep(0.2 * self.all_at_once.wait())  # one after the other
        with self.lock:
            self.working -= 1
        return made

    def runs(self, name):
        self.disturbed += [name] if self.working else []


def expected_metrics(arms):
    """Of the arms that are sparse."""
    steps = check.compiled(train_step.references(arms))
    return {name: train_step.up_to_choices(own, arms[name]) for name, own in steps.items()}


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    return Watch()


def test_of_steps(watch, monkeypatch):
    class Steps:
        def __init__(self, config, implementation, options):
            assert implementation == "reference"
            self.name = type(config.method).__name__
            watch.compiles()

        def first_two(self, noise=0.0, seed=0):
            watch.runs(self.name)
            return [{"loss": 5.0, "grad_norm": 1.0, "predicted": float(len(self.name))}] * 2

    monkeypatch.setattr(train_step, "Steps", Steps)
    arms = {n: train_step.config_of(CASE, "float32", method, 2) for n, method in METHODS.items()}
    arms["Dense"] = train_step.config_of(CASE, "float32", s24.methods.Dense(), 2)
    found = expected_metrics(arms)
    assert {name: own.metrics[0]["predicted"] for name, own in found.items()} == {n: len(n) for n in METHODS}
    assert not watch.disturbed


def test_nothing_runs_before_all_steps_are_compiled(watch, monkeypatch):
    """What is measured, what it must give, and other dense programs."""
    said = []

    class Steps:
        temp_bytes = 0

        def __init__(self, config, implementation, options=None):
            self.name = type(config.method).__name__
            watch.compiles()

        @property
        def metrics(self):
            return self.first_two()

        def first_two(self, noise=0.0, seed=0):
            watch.runs(self.name)
            return [{"loss": np.float32(5.0), "grad_norm": np.float32(1.0)}] * 2

        def __call__(self):
            return np.zeros(1)

        refreshing = __call__

    monkeypatch.setattr(train_step, "Steps", Steps)
    methods = {"Dense": s24.methods.Dense(), "STE": METHODS["STE"], "FST": METHODS["FST"]}
    arms = {name: train_step.config_of(CASE, "bfloat16", method, 1) for name, method in methods.items()}
    variants = train_step.dense_variants(arms["Dense"], False)
    found = train_step.compare(arms, "auto", 1, 1e-6, said.append, variants)
    assert not watch.disturbed
    assert [row["method"] for row in found] == ["Dense", "Dense: float32", "STE", "FST"]
    first, *run = [line.partition("bfloat16: ")[2] for line in said]
    assert first == "6 programs of steps are compiled"
    assert run[:2] == [f"{name} runs with masked-dense products, 9 times" for name in ("STE", "FST")]
    assert run[2] == "Dense is checked"


def test_of_blocks(watch, monkeypatch):
    lower = jax.stages.Lowered.compile

    def compile_slowly(lowered, **options):
        compiled = watch.compiles(lambda: lower(lowered, **options))

        def run(*args):
            watch.runs(lowered)
            return compiled(*args)

        return run

    operands = ffn.data(CASE, "float32")
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    states = {name: ffn.state_of(method, operands) for name, method in METHODS.items()}
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_slowly)
    assert list(ffn.expected(CASE, "float32", METHODS, states, args)) == list(METHODS)
    assert not watch.disturbed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("FST", {"attention_method": "FST"}), ("Venom", {})])
def test_of_scanned_blocks_are_those_of_unrolled_ones(name, model):
    """Loss and gradient norm of two steps."""
    config = train_step.config_of(CASE, "float32", METHODS[name], 2, **model)
    (expected,) = expected_metrics({name: config}).values()
    unrolled = train_step.Steps(config, "reference").first_two()
    assert train_step.alike(unrolled, expected), (unrolled, expected)
    assert not train_step.alike([*reversed(unrolled)], expected)


def with_wrong_b4(change):
    """`Execution.multiply` whose product B4 is changed, from its operands and its result."""
    multiply = Execution.multiply

    def run(self, name, operands, *args, **options):
        if name != "B4":
            return multiply(self, name, operands, *args, **options)
        return change(operands, lambda operands: multiply(self, name, operands, *args, **options))

    return run


def without_rows(operands, multiply):
    return multiply(operands).at[:8].set(0)


def without_tokens(operands, multiply):
    return multiply(dataclasses.replace(operands, left=operands.left.at[:64].set(0)))


@pytest.fixture(scope="module")
def choosing():
    """A config in which roundings choose, and what its steps must give."""
    config = train_step.config_of(Case(1024, 64, 256), "float32", s24.methods.Activation24(), 1)
    (expected,) = expected_metrics({"Activation24": config}).values()
    return config, expected


@pytest.mark.slow
def test_what_rounding_chooses_is_no_wrong_step(choosing):
    """Parameters that are off by a quarter of what roundings may be stand for other roundings."""
    config, expected = choosing
    case = train_step.case_of(config)
    steps, tolerance = train_step.Steps(config, "reference"), check.tolerance("float32", max(case))
    found = [steps.first_two(tolerance / 4, seed) for seed in range(100, 106)]
    assert all(train_step.alike(own, expected) for own in found)
    of_rounding = train_step.up_to_rounding(expected.metrics, "float32", case)
    assert not all(train_step.alike(own, of_rounding) for own in found)


@pytest.mark.slow
@pytest.mark.parametrize("change", [without_rows, without_tokens])
def test_a_wrong_gradient_is_a_wrong_step(change, choosing, monkeypatch):
    """Without 8 of 64 rows, or 64 of 1024 tokens, of the gradient of w1. A single row moves the norm of all
    by 3e-6 to 3e-5 of it, less than rounding may: norms cannot tell it."""
    config, expected = choosing
    monkeypatch.setattr(Execution, "multiply", with_wrong_b4(change))
    step._made.cache_clear()  # what is compiled
    found = train_step.Steps(config, "reference").first_two()
    step._made.cache_clear()
    assert not train_step.alike(found, expected), (found, expected)


@pytest.mark.slow
def test_a_wrong_update_is_a_wrong_step(choosing):
    """By two per cent, which the first step does not tell."""
    config, expected = choosing
    optim = dataclasses.replace(config.optim, lr=1.02 * config.optim.lr)
    found = train_step.Steps(dataclasses.replace(config, optim=optim), "reference").first_two()
    assert train_step.alike(
        found[:1], expected._replace(metrics=expected.metrics[:1], near=expected.near[:1])
    )
    assert not train_step.alike(found, expected), (found, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong(value):
    metrics = [{"loss": value, "grad_norm": 1.0}] * 2
    assert not train_step.alike(metrics, train_step.up_to_rounding(metrics, "float32", CASE))


def test_masked_dense_steps_reach_the_projections_of_attention(monkeypatch):
    asked, decide = [], execution.decide

    def spy(product, **options):
        asked.append((product.shape, options["implementation"]))
        return decide(product, **options)

    monkeypatch.setattr(execution, "decide", spy)
    config = train_step.config_of(CASE, "float32", METHODS["FST"], 1, attention_method="FST")
    train_step.Steps(config, "reference")
    T, d, _ = CASE
    assert {((T, d, 3 * d), "reference"), ((T, d, d), "reference")} < set(asked)
    assert {by for _, by in asked} == {"reference"}


def test_steps_run_nothing_until_they_are_asked():
    config = train_step.config_of(CASE, "float32", s24.methods.Dense(), 1)
    steps = train_step.Steps(config, None)
    assert "state" not in vars(steps) and "metrics" not in vars(steps)
    assert jnp.isfinite(steps()["loss"]) and jnp.isfinite(steps.metrics[1]["loss"])


def test_the_first_two_steps_hold_one_state(monkeypatch):
    steps = train_step.Steps(train_step.config_of(CASE, "float32", s24.methods.Dense(), 1), None)
    initial, held = steps.program.initial_state, []

    def initial_state():
        held.append("state" in vars(steps))
        return initial()

    monkeypatch.setattr(steps.program, "initial_state", initial_state)
    assert steps.first_two() == steps.first_two()
    assert held == [False, False]


def test_masks_are_no_constants_of_a_block():
    """XLA's compiler would compute with them, and a training step could not."""
    method, case = s24.methods.FST(), Case(64, 64, 128)
    operands = ffn.data(case, "float32")
    args = [operands[name] for name in ("x", "w1", "w2", "dy3")]
    run = ffn.forward_backward(ffn.block(method, "reference"))
    largest = max(map(np.size, jax.make_jaxpr(run)(*args, ffn.state_of(method, operands)).consts))
    assert largest <= ffn.KEY.size


def test_a_dense_variant_that_cannot_run_is_left_out(monkeypatch):
    def fail(self):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(train_step.Steps, "first_two", fail)
    config = train_step.config_of(CASE, "bfloat16", s24.methods.Dense(), 1)
    (name, make), *_ = train_step.dense_variants(config, False).items()
    steps = make()
    with pytest.warns(UserWarning, match="Dense: float32, is not measured.*RESOURCE_EXHAUSTED"):
        assert train_step.or_left_out(name, lambda: steps.metrics and steps) == {}
