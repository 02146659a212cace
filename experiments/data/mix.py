"""Several datasets, of which training reads by weights: each has its share of the tokens."""

import dataclasses
import hashlib
import math
from pathlib import Path

from experiments.data import base
from experiments.errors import UserError, require


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
    """Which datasets, with which weights."""

    parts: tuple[str, ...] = ("text:stdlib=1",)
    """NAME:PLACE=WEIGHT of each: a dataset, its first option, and its share of the tokens, such as
    linux:/usr/src=0.7 'files:/data/*.parquet=0.3'; further options follow the place, such as
    'files:/data/*.parquet,column=content,validation=0.01=0.3'"""

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.parts), "data.parts is empty: give at least one, such as text:stdlib=1.")

    def records(self) -> base.Records:
        """The records of all parts. Raises UserError for a part that is none, or where one has no text."""
        chosen = [part_of(spec, self) for spec in self.parts]
        weights = [weight for _, weight in chosen]
        found = [_records(spec, part) for spec, (part, _) in zip(self.parts, chosen, strict=True)]
        content = "\0".join(f"{part.fingerprint} {w}" for part, w in zip(found, weights, strict=True))
        name = f"mix-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        train, validation = (
            base.Mixture([getattr(part, split) for part in found], weights)
            for split in ("train", "validation")
        )
        return base.Records(
            " + ".join(part.name for part in found),
            train,
            validation,
            fingerprint=name,
            folder=Path(self.root).resolve() / "mixtures" / name,
            parts=tuple(found),
        )


def _kinds() -> dict[str, type]:
    """What a part may be: the datasets of this package by name, but for mixtures."""
    found = base.configs_in(__package__, base.Config)
    return {name: kind for name, kind in found.items() if kind is not Config}


def part_of(spec: str, mix: base.Config) -> tuple[base.Config, float]:
    """The dataset and the weight of one part. Raises UserError where it names none."""
    dataset, _, share = spec.rpartition("=")
    name, _, rest = dataset.partition(":")
    place, *words = rest.split(",")
    try:
        weight = float(share)
    except ValueError:
        weight = math.nan
    require(
        bool(place) and 0 < weight < math.inf,
        f"data.parts: {spec!r} is not NAME:PLACE=WEIGHT with a positive weight, such as text:stdlib=0.5.",
    )
    kind = _kinds().get(name)
    require(
        kind is not None,
        f"data.parts: {spec!r} names no dataset that --data knows: {name!r}. Use one of "
        f"{', '.join(_kinds())}.",
    )
    common = {field.name: getattr(mix, field.name) for field in dataclasses.fields(base.Config)}
    own = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in common}
    return kind(
        **common, **{next(iter(own)): place}, **dict(option(spec, word, own) for word in words)
    ), weight


def _records(spec: str, part: base.Config) -> base.Records:
    """The records of a part. Raises UserError where it has none, which says how its options are written."""
    try:
        return part.records()
    except UserError as error:
        dataset, _, share = spec.rpartition("=")
        example = f"{dataset.partition(',')[0]},NAME=VALUE={share}"
        raise UserError(
            f"data.parts: {spec!r}: {error} In a mixture --data.NAME VALUE is written so: {example!r}."
        ) from error


def option(spec: str, word: str, own: dict) -> tuple[str, object]:
    """The name and the value of an option of a part. Raises UserError for one that the dataset has not."""
    name, equals, value = word.partition("=")
    simple = {key: type(default) for key, default in own.items() if isinstance(default, str | int | float)}
    try:
        require(bool(equals) and name in simple, f"it has {', '.join(simple)}")
        return name, simple[name](value)
    except ValueError as error:
        raise UserError(f"data.parts: {word!r} in {spec!r} is no option of that dataset: {error}.") from error
