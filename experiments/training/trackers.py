"""Programs that show numbers of runs, beside metrics.jsonl, which stays the record.

A tracker has two methods: `write(step, numbers)`, with floats by names such as train/loss, and `close()`.
Another one is a class here, its option in `Train`, and a line in `opened`.
"""

import secrets
from pathlib import Path

import jax

from experiments import config as configs
from experiments import files
from experiments.config import Config, Train
from experiments.errors import UserError


class TensorBoard:
    """Events in the folder `tensorboard` of a run."""

    def __init__(self, out: Path):
        self.events = summary_writer()(str(out / "tensorboard"))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.events.add_scalar(name, value, step)

    def close(self) -> None:
        self.events.close()


class Wandb:
    """A run of Weights & Biases, which a resumed run goes on with: its id is kept in the run's folder."""

    def __init__(self, config: Config, out: Path):
        path = out / "wandb.id"
        if not path.exists():
            files.write(path, secrets.token_hex(8))
        try:
            self.run = wandb().init(
                project=config.train.wandb,
                name=config.name,
                id=path.read_text(),
                resume="allow",
                dir=str(out),
                config=configs.to_dict(config),
            )
        except Exception as error:  # of its own, such as for a server that does not answer
            raise UserError(f"{_reason(error)} Then continue with --resume {out}.") from error

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


def check(train: Train) -> None:
    """UserError for a tracker whose package is missing, and where nobody is logged in."""
    if train.tensorboard:
        summary_writer()
    if train.wandb:
        package = wandb()
        if jax.process_index() == 0:
            try:
                package.login()  # says nothing where WANDB_MODE is offline
            except Exception as error:
                raise UserError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """What an error of Weights & Biases says first, and what to do."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"train.wandb: {said:.200} Give a key by `wandb login` or WANDB_API_KEY, or set WANDB_MODE=offline "
        "and send the run later by `wandb sync`."
    )


def opened(config: Config, out: Path) -> list:
    """The trackers that a config asks for (process 0 only)."""
    if jax.process_index() != 0:
        return []
    found = [TensorBoard(out)] if config.train.tensorboard else []
    return [*found, Wandb(config, out)] if config.train.wandb else found


def summary_writer():
    """The class tensorboardX.SummaryWriter; UserError when the package is missing."""
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError(
            "train.tensorboard needs tensorboardX: pip install -e '.[tensorboard]', or set it to False."
        ) from error
    return SummaryWriter


def wandb():
    """The package wandb; UserError when it is missing."""
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise UserError(
            "train.wandb needs wandb: pip install -e '.[wandb]', or leave the option out."
        ) from error
    return wandb
