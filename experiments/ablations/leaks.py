"""Which losses of a result are no language model's, by the config that was stored with it."""

import ast

from experiments import config as configs
from experiments.analysis.comparison import LEAKS
from experiments.config import Config


def config_of(result: dict, arm: str) -> Config:
    """The config of an arm: that of the first one, with what `result["arms"]` says of the difference."""
    flat = configs.flatten(result["config"])
    for line in result["arms"][arm]:
        key, change = line.split(": ", 1)
        flat[key] = _value(change.split(" -> ", 1)[1])
    nested = {}
    for key, value in flat.items():
        if value == "absent":
            continue
        *path, name = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return configs.from_dict(nested)


def _value(word: str):
    """A value from the words that `str` makes of it."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def leaking(result: dict) -> dict[str, frozenset[str]]:
    """arm -> those of its metrics that are losses under masks or scales that may depend on later tokens."""
    found = {}
    for arm in result["arms"]:
        config = config_of(result, arm)
        # Before leaks were measured, columns="cluster" were those of the first token of a block, and which
        # one that is depends on all tokens of the batch.
        earlier = getattr(config.method, "columns", None) == "cluster" and not any(
            "leak" in metrics for metrics in result["metrics"][arm].values()
        )
        found[arm] = _losses(config) if earlier or not config.method.causal else frozenset()
    return found


def _losses(config: Config) -> frozenset[str]:
    """The losses, among `outcome.METRICS`, of which some or all are taken with sparse products."""
    steps = config.train.steps
    sparse = [(begin, end) for begin, end, phase in config.schedule.boundaries() if phase.sparse]
    return frozenset(
        {"val_sparse", "sparse_gap"}
        | {"val_loss" for _, end in sparse if end == steps}
        | {"early_loss" for begin, _ in sparse if begin < 0.25 * steps}
        | {"train_loss" for _, end in sparse if end > 0.9 * steps}
    )


def marked(arm: str, metric: str, leaks: dict) -> str:
    """What has to stand beside a metric of an arm: "" for a language model's loss, or for no loss."""
    return LEAKS if metric in leaks.get(arm, ()) else ""
