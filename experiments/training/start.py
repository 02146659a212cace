"""Where a run starts: at fresh parameters, or at those of another run (`train.start_from`)."""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jax_sparse24 as s24
from experiments.config import Config, Mesh
from experiments.errors import UserError, require
from experiments.training import rundir
from experiments.training.step import Program
from experiments.training.stored import load_state


def initial_state(program: Program):
    """The state before the first step. From another run come the parameters; masks and adapters are made for
    them, and moments start at zero. Raises UserError if there is no such run or its parameters do not fit.
    With `train.perturb` every parameter is off by that much, at random, relative to its size."""
    state, noise = _unperturbed(program), program.config.train.perturb
    return perturbed(state, program, noise, program.config.seed) if noise else state


def perturbed(state, program: Program, noise: float, seed: int):
    """The state with parameters that are off at random, by `noise` (standard deviation) relative to each."""
    leaves, tree = jax.tree.flatten(state["params"])
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [
        leaf * (1 + noise * jax.random.normal(key, leaf.shape, leaf.dtype))
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.device_put(state | {"params": jax.tree.unflatten(tree, moved)}, program.shardings)


def _unperturbed(program: Program):
    check_method(program.config)
    state, source = program.initial_state(), program.config.train.start_from
    if not source:
        return state
    model = nnx.merge(program.graphdefs[True], _fitted(source, program, state["params"]), state["sparse"])
    teacher = {"teacher": jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))} if "teacher" in state else {}
    s24.nn.reset(model)
    _, params, sparse = nnx.split(model, nnx.Param, s24.nn.SparseState)
    state = state | {"params": params, "sparse": sparse} | teacher
    return jax.device_put(state, program.shardings)


def check_start(config: Config, vocabulary) -> None:
    """UserError for a start from nowhere, see `check_method`, or from a run with other tokens. Compiles
    nothing."""
    check_method(config)
    if not config.train.start_from:
        return
    source, _ = place_of(Path(config.train.start_from))
    theirs = rundir.vocabulary(source)
    if theirs.fingerprint == vocabulary.fingerprint:
        return
    said = "bytes" if theirs.unit == "byte" else rundir.own_tokenizer(source)
    raise UserError(
        f"train.start_from: the run {source} was trained on other tokens than this one "
        f"({theirs.fingerprint}, not {vocabulary.fingerprint}), so its embedding would be of no use. "
        f"Give this run the same: --data.tokenizer {said}."
    )


def check_method(config: Config) -> None:
    """UserError for a method that needs a trained model where none is named."""
    method, option = config.method, config.method.training(config.train.steps).teacher
    require(
        bool(config.train.start_from) or not option,
        f"{type(method).__name__} with {option}={getattr(method, option, None)} learns from a trained dense "
        f"model: name its run with --train.start-from RUN, or set --method.{option} 0.",
    )


def _fitted(source: str, program: Program, params):
    """`params` with the values of the run; adapters, which the run lacks, as they are."""
    config, found = _parameters(Path(source), program.config.mesh)
    found = dict(nnx.to_flat_state(found))
    wanted = nnx.to_flat_state(params)
    own = {path for path, _ in wanted if "adapters" in path and path not in found}
    theirs = {path: found[path].shape for path in sorted(found, key=str)}
    ours = {path: value.shape for path, value in wanted if path not in own}
    for path in [*ours, *theirs]:
        sides = [str(side.get(path, "absent")) for side in (theirs, ours)]
        require(
            sides[0] == sides[1],
            f"train.start_from: the parameter {'.'.join(map(str, path))} is {sides[0]} in {source} and "
            f"{sides[1]} in this model. Give this run the same model fields: {config.model}.",
        )
    return nnx.from_flat_state(
        [(path, value.replace(found[path][...]) if path in ours else value) for path, value in wanted]
    )


def place_of(source: Path) -> tuple[Path, int | None]:
    """The run, and the step of the checkpoint if one is named."""
    named = source.parent.name == "checkpoints" and source.name.isdigit()
    return (source.parents[1], int(source.name)) if named else (source, None)


def step_of_start(config: Config) -> int | None:
    """The step of the checkpoint that `train.start_from` names now; None where there is none."""
    run, step = place_of(Path(config.train.start_from))
    there = [int(path.name) for path in (run / "checkpoints").glob("[0-9]*") if path.name.isdigit()]
    return max(there, default=None) if step is None else step if step in there else None


def has_start(config: Config, out: Path) -> bool:
    """Whether the run in a folder can still read the parameters that it started from: the run that has them
    may be gone, or be longer by now."""
    if not config.train.start_from:
        return True
    now = step_of_start(config)
    rows = rundir.read_metrics(out) if (out / "metrics.jsonl").exists() else []
    return now is not None and now == next((r["started_from"] for r in rows if "started_from" in r), now)


def _parameters(source: Path, mesh: Mesh) -> tuple[Config, nnx.State]:
    run, step = place_of(source)
    config, _, newest, state = load_state(run, step, mesh)
    require(
        step is not None or newest == config.train.steps,
        f"train.start_from: the run {run} has not finished, its newest checkpoint is of step {newest} of "
        f"{config.train.steps}. Finish it, or name a checkpoint: {run}/checkpoints/{newest}.",
    )
    return config, state["params"]
