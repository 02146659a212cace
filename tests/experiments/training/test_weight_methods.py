"""Training with a phase that ends when the optimiser says so, and with decay on weights."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_sparse24 as s24
from experiments import config as configs
from experiments.analysis.runs import read_run
from experiments.config import Config, Optim
from experiments.models import decoder
from experiments.training import rundir
from experiments.training.loop import train
from experiments.training.optimiser import optimiser
from tests.experiments.conftest import whole_state

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def settling(shared, tmp_path_factory):
    """A run of STEP whose second moment, of gradients clipped to almost nothing, has settled at step 3."""
    tiny = configs.load(f"{shared / 'tiny.py'}:config")
    config = dataclasses.replace(
        tiny,
        train=dataclasses.replace(tiny.train, monitor_every=0, probe_every=0, eval_every=0),
        model=decoder.Config(layers=1, d=16, f=32, heads=2),
        optim=Optim(warmup=2, clip=1e-5, b2=0.5),
        method=s24.methods.STEP(earliest=0.25, latest=0.75),
    )
    out = tmp_path_factory.mktemp("step") / "run"
    train(config, out, show=False)
    return config, out


def test_the_dense_phase_ends_when_the_moment_has_settled(settling):
    _, out = settling
    phases = [row["phase"] for row in rundir.read_metrics(out) if row["kind"] == "train"]
    assert phases == ["dense"] * 3 + ["sparse"] * 9  # latest would be 9
    assert [(start, end) for start, end, _ in read_run(out, "").phases] == [(0, 3), (3, 12)]
    # The moment of the third step is that of the last one.
    early, late = (whole_state(out, step)["opt"] for step in (5, 12))
    jax.tree.map(np.testing.assert_array_equal, optax.tree.get(early, "nu"), optax.tree.get(late, "nu"))


def test_resume_stays_in_the_phase_and_is_bit_exact(settling, tmp_path):
    config, out = settling
    copy = shutil.copytree(out, tmp_path / "copy")
    for step in ("10", "12"):
        shutil.rmtree(copy / "checkpoints" / step)
    train(config, copy, resume=True, show=False)
    states = [whole_state(folder, 12) for folder in (out, copy)]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize("place", ["gradients", "weights"])
def test_where_decay_acts(place):
    """One update without a gradient. On weights: lr * rate * w, and no moment. On gradients: lr, whatever the
    rate, because of Adam."""
    rate, lr, w = 0.25, 1e-3, {"kernel": jnp.array([[4.0, 2.0]])}
    optim = Optim(lr=lr, warmup=0, weight_decay=0.0)
    tx = optimiser(Config(optim=optim, method=s24.methods.SRSTE(decay=rate, decay_on=place)))
    masks, zero = {"kernel": jnp.array([[True, False]])}, jax.tree.map(jnp.zeros_like, w)
    got, state = tx.update(zero, tx.init(w), w, masks=masks)
    on_weights = place == "weights"
    np.testing.assert_allclose(got["kernel"], [[0, -lr * rate * 2 if on_weights else -lr]], rtol=1e-4)
    assert float(optax.tree.get(state, "nu")["kernel"].sum() == 0) == on_weights
