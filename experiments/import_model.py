"""A run made of a Hugging Face folder: `python -m experiments.import_model FOLDER --out RUN`.

The run counts as finished, with the parameters of the folder: `experiments.generate` and
`experiments.evaluate` take it, and others start from it by `--train.start-from RUN`.
"""

import argparse
import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.cli import command
from experiments.config import Config, Optim, Train
from experiments.data import text, vocabulary
from experiments.errors import UserError, require
from experiments.models import decoder, huggingface
from experiments.training import rundir
from experiments.training.checkpoint import Checkpoints
from experiments.training.step import Program


def read(folder: Path, out: Path, *, seq: int = 1024, name: str = "") -> Config:
    """Make a run of a folder; its config. Raises UserError for what is no such folder."""
    try:
        from jax_sparse24.huggingface import read_tensors
    except ModuleNotFoundError as error:
        raise UserError("Importing needs safetensors: pip install -e '.[huggingface]'.") from error
    path = folder / "config.json"
    require(
        path.is_file(),
        f"{folder} is no folder of Hugging Face: it has no config.json. Give one that save_pretrained of "
        "transformers wrote, or a downloaded snapshot.",
    )
    words = folder / "tokenizer.json"
    require(
        words.is_file(),
        f"{folder} has no tokenizer.json. If it has another file of a tokenizer, such as tokenizer.model, "
        f"transformers writes one: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(...).",
    )
    try:
        model = huggingface.model_of(_json(path))
        tensors = read_tensors(folder)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{folder}: {error}") from error
    tokens = vocabulary.read(words, rows=model.vocabulary)
    config = Config(
        name=name or out.name,
        model=model,
        data=text.Config(seq=seq, tokenizer=str(words)),
        optim=Optim(warmup=0),
        train=Train(steps=1),
    )
    rundir.check_new(out, config, resume=False)
    program = Program(config)
    places = nnx.to_flat_state(program.abstract_state()["params"])
    like = {".".join(map(str, place)): value for place, value in places}
    try:
        params = huggingface.params_of(model, tensors, like)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    filled = [
        (place, value.replace(jnp.asarray(array, value.dtype)))
        for (place, value), array in zip(places, (params[own] for own in like), strict=True)
    ]
    state = program.initial_state() | {"params": nnx.from_flat_state(filled), "step": jnp.int32(1)}
    # A run is there with its checkpoint or not at all: without one, it would be trained from its start.
    out = out.resolve()
    partial = out.with_name(f".{out.name}.importing")
    with rundir.alone(out):
        rundir.check_new(out, config, resume=False)  # another process may have begun meanwhile
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            rundir.create(partial, config, tokens)
            with Checkpoints(partial / "checkpoints", keep=1) as checkpoints:
                checkpoints.save(1, jax.device_put(state, program.shardings))
            shutil.rmtree(out, ignore_errors=True)  # holds nothing, by check_new
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return config


def _json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path.name} is no JSON: {error}.") from error


def overrides(model: decoder.Config) -> list[str]:
    """The options of the launcher that give a config this model."""
    words = []
    for field in dataclasses.fields(model):
        value, option = getattr(model, field.name), field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--model.{option if value else f'no-{option}'}")
        elif value not in (None, ""):
            words += [f"--model.{option}", str(value)]
    return words


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.import_model", description=__doc__.split(":")[0] + "."
    )
    parser.add_argument("folder", type=Path, help="config.json, tokenizer.json and *.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="the run's folder, which is made")
    parser.add_argument("--seq", type=int, default=1024, help="tokens seen at once (default: %(default)s)")
    args = parser.parse_args(argv)
    require(args.seq > 0, f"--seq must be positive, got {args.seq}.")
    config = read(args.folder, args.out, seq=args.seq)
    print(f"{args.out}: a finished run with these parameters. To train from it, with any method:")
    command = ["python", "-m", "experiments.launch", "configs/dense.py", "--method", "AST"]
    command += ["--train.start-from", str(args.out)]
    command += ["--data.tokenizer", str(rundir.own_tokenizer(args.out)), *overrides(config.model)]
    print(f"  {shlex.join(command)}")
    print("To judge what AST makes of them:")
    command = ["python", "-m", "experiments.ablate", "configs/ast/retraining.py", "--start", str(args.out)]
    print(f"  {shlex.join(command)}")


if __name__ == "__main__":
    main()
