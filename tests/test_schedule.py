"""Phases and their boundaries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse24 as s24

A, B, C = s24.Phase("warm", 2, False), s24.Phase("sparse", 5, True), s24.Phase("dense", 1, False)
SCHEDULE = s24.Schedule((A, B, C))


def test_every_step_belongs_to_one_phase():
    assert SCHEDULE.total_steps == 8
    assert SCHEDULE.boundaries() == ((0, 2, A), (2, 7, B), (7, 8, C))
    assert [SCHEDULE.phase_at(i) for i in range(8)] == [A] * 2 + [B] * 5 + [C]


@pytest.mark.parametrize("step", [-1, 8, 100])
def test_steps_outside_raise(step):
    with pytest.raises(ValueError, match=rf"step {step} is outside \[0, 8\)"):
        SCHEDULE.phase_at(step)


@pytest.mark.parametrize("steps", [0, -3, 2.0, True, "5", None])
def test_steps_must_be_a_positive_whole_number(steps):
    with pytest.raises(ValueError, match=r"Phase 'x': steps=.*whole number of optimiser steps, >= 1"):
        s24.Phase("x", steps, sparse=True)


@pytest.mark.parametrize("flag", ["sparse", "until_settled", "adapters"])
def test_flags_are_true_or_false(flag):
    """A word would count as true: Phase("warm", 2, sparse="dense") ran sparse."""
    for value in ("dense", 1, None):
        with pytest.raises(ValueError, match=rf"Phase 'x': {flag}={value!r} must be True or False"):
            s24.Phase("x", 2, **{"sparse": True, flag: value})
    with pytest.raises(ValueError, match=r"Phase: name=3 must be a string"):
        s24.Phase(3, 2, sparse=True)


def test_what_cannot_be_hashed_is_no_schedule():
    for phases in ([A, B], A, (A, "dense"), {A: 1}, None):
        with pytest.raises(ValueError, match=r"Schedule: phases=.* must be a tuple of Phase.*hashed"):
            s24.Schedule(phases)


def test_steps_are_whole_and_on_the_host():
    assert SCHEDULE.phase_at(np.int32(3)) == SCHEDULE.phase_at(jnp.int32(3)) == B
    for step in (2.5, "2", None):
        with pytest.raises(TypeError, match=r"step=.* must be an int on the host"):
            SCHEDULE.phase_at(step)
    with pytest.raises(TypeError, match=r"ask before jit"):
        jax.jit(lambda step: SCHEDULE.phase_at(step).steps)(1)


def test_a_schedule_needs_a_phase():
    with pytest.raises(ValueError, match="at least one Phase"):
        s24.Schedule(())
    for method in (s24.methods.FST(), s24.methods.Venom(), s24.methods.SLoPe()):
        with pytest.raises(ValueError, match="schedule: total_steps=0 must be at least 1"):
            method.schedule(0)


def test_phases_and_schedules_are_static_values():
    assert s24.Schedule((A, B, C)) == SCHEDULE
    assert hash(s24.Schedule((A, B, C))) == hash(SCHEDULE)
    assert s24.Schedule((A, C, B)) != SCHEDULE
    with pytest.raises(dataclasses.FrozenInstanceError):
        A.steps = 3


def test_a_refresh_is_due_at_multiples_of_the_period():
    method = s24.methods.FST(refresh_every=4)
    assert [step for step in range(13) if s24.due(method, step)] == [0, 4, 8, 12]
    assert not any(s24.due(method, step, "arrange") for step in range(3))
    assert not any(s24.due(s24.methods.STE(), step) for step in range(3))  # masks are chosen in every call
    venom = s24.methods.Venom(v=16, m=8, arrange_every=3)
    assert [step for step in range(7) if s24.due(venom, step, "arrange")] == [0, 3, 6]
    traced = jax.jit(lambda step: s24.due(method, step))
    assert [bool(traced(step)) for step in (3, 4)] == [False, True]


@pytest.mark.parametrize("step", [-1, 1.5, None, True])
def test_due_wants_a_step(step):
    with pytest.raises(ValueError, match=r"due: step=.* must be the number of the optimiser step"):
        s24.due(s24.methods.FST(), step)


def test_due_wants_a_known_occasion():
    with pytest.raises(ValueError, match="due: what='draw' is unknown"):
        s24.due(s24.methods.FST(), 0, "draw")


def test_layers_refresh_when_it_is_due(monkeypatch):
    """`s24.refresh` asks `due`, so that nothing else decides."""
    from flax import nnx

    from jax_sparse24 import schedule

    asked = []
    monkeypatch.setattr(schedule, "due", lambda method, step: asked.append(int(step)) or step == 3)
    layer = s24.nn.Linear(8, 8, method=s24.methods.FST(refresh_every=2), rngs=nnx.Rngs(0))
    s24.refresh(layer, 1, due=True)
    layer.kernel[...] = -layer.kernel[...][::-1]
    before = np.asarray(layer.mask())
    s24.refresh(layer, 2)
    np.testing.assert_array_equal(layer.mask(), before)
    s24.refresh(layer, 3)
    assert asked == [2, 3] and (np.asarray(layer.mask()) != before).any()


def test_methods_are_called_and_have_a_step():
    with pytest.raises(
        TypeError, match=r"due: method must be one of s24.methods, such as FST\(\), got the class FST"
    ):
        s24.due(s24.methods.FST, 0)
    with pytest.raises(TypeError, match=r"due: method must be .*, got 'FST'"):
        s24.due("FST", 0)
    with pytest.raises(ValueError, match="total_steps"):
        s24.methods.STE().schedule(0)


def test_what_draws_parameters_is_named():
    with pytest.raises(TypeError, match=r"rngs must be nnx.Rngs, such as nnx.Rngs\(0\), got 0"):
        s24.nn.FFN(8, 8, method=s24.methods.FST(), rngs=0)
