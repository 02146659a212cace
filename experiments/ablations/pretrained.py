"""An ablation whose first arm is a model that was trained before: a run of the launcher or of another
ablation, or one that `experiments.import_model` made."""

import dataclasses
from pathlib import Path

from experiments.ablations.ablation import Named
from experiments.config import Config
from experiments.errors import require
from experiments.training import rundir
from experiments.training.start import place_of

# Updates of this size are below the last bit of every weight.
UNCHANGED = 1e-30
HOW = ("dtype", "attention", "remat")  # fields that say how a model is computed, not which one it is


def started(named: Named, source: Path) -> Named:
    """The ablation with a trained model in place of its first arm, from which the others start.

    All arms have the model and the tokenizer of that run, and what their size says of the rest. The first arm
    takes one step, which changes nothing, so that it is evaluated like the others.

    source: a finished run's folder, or one of its checkpoints.

    Raises: UserError for an ablation whose arms do not start from the first one, and for what is no such run.
    """
    before = named.ablation
    require(
        bool(before.start),
        f"The arms of {named.paper}/{named.claim} do not start from a trained model: leave out --start.",
    )
    source = source.resolve()
    run, step = place_of(source)
    config = _with_own_words(rundir.open_run(run), run)
    step = config.train.steps if step is None else step
    require(
        (run / "checkpoints" / str(step)).is_dir(),
        f"The run {run} has no checkpoint of step {step}, so nothing can start from it. Finish it, or name "
        f"one that is there: {run}/checkpoints/STEP.",
    )
    base = before.arms[before.start]
    arms = {name: _on(config, arm, base) for name, arm in before.arms.items()}
    arms[before.start] = _as_it_is(arms[before.start], source)
    return dataclasses.replace(
        named, ablation=dataclasses.replace(before, arms=arms, pretrained=_words(config, run, step))
    )


def _with_own_words(config: Config, run: Path) -> Config:
    """The run's config, whose tokens are those of its own tokenizer.json, where it has one."""
    words, path = rundir.vocabulary(run), rundir.own_tokenizer(run)
    if not path.is_file():
        return config
    model = dataclasses.replace(config.model, vocabulary=config.model.vocabulary or words.size)
    data = dataclasses.replace(config.data, tokenizer=str(path))
    return dataclasses.replace(config, model=model, data=data)


def _on(config: Config, arm: Config, base: Config) -> Config:
    """An arm with the model and the tokens of a run, but for what makes it differ from the first arm."""
    own = {field.name for field in dataclasses.fields(config.model)}
    fields = {name: getattr(arm.model, name) for name in HOW if name in own}
    for field in dataclasses.fields(arm.model):
        value = getattr(arm.model, field.name)
        if value != getattr(base.model, field.name):
            require(
                field.name in own,
                f"An arm has model.{field.name}={value!r}, which the model of the run does not have.",
            )
            fields[field.name] = value
    return dataclasses.replace(
        arm,
        model=dataclasses.replace(config.model, **fields),
        data=dataclasses.replace(arm.data, tokenizer=config.data.tokenizer),
    )


def _as_it_is(arm: Config, source: Path) -> Config:
    never = dict.fromkeys(("monitor_every", "probe_every", "checkpoint_every", "least_speed"), 0)
    return dataclasses.replace(
        arm,
        optim=dataclasses.replace(arm.optim, lr=UNCHANGED, warmup=0),
        train=dataclasses.replace(arm.train, steps=1, start_from=str(source), **never),
    )


def _words(config: Config, run: Path, step: int) -> str:
    """What the model is, without the folders of a machine."""
    sizes, shape = config.model.sizes(), ""
    if sizes:
        several = "s" * (sizes.layers != 1)
        shape = f", {sizes.layers} block{several} of d = {sizes.d} and f = {sizes.f}"
    imported = not (run / "metrics.jsonl").exists()
    data = config.data
    how = "imported" if imported else f"after {step} steps of {data.batch} x {data.seq} tokens"
    return f"{config.name} by {type(config.method).__name__}{shape}, {how}"
