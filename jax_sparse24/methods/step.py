"""STEP: Adam's second moment from dense steps, for sparse ones (2302.01172)."""

import dataclasses
from typing import Literal

from jax_sparse24.methods.base import Freeze, Training, check_field, check_share, is_number
from jax_sparse24.methods.ste import STE
from jax_sparse24.patterns import check_size
from jax_sparse24.schedule import Phase, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class STEP(STE):
    """A dense phase in which Adam's second moment settles, then `STE` with that moment frozen, to the end.

    It needs `s24.optim.step_adamw`.

    switch: the share of the steps that are dense; or the mean that tells when the moment has settled,
        "arithmetic" or "geometric" (the paper's options I and II).
    earliest, latest: shares of the steps between which the dense phase ends, as soon as `s24.optim.settled`
        says so (10 % and 50 % in the paper); used where `switch` is a mean.

    Raises: ValueError for an option outside these.
    Source: 2302.01172."""

    when = "A 2:4 model with Adam where STE falls behind; to compare with: its first steps are dense."

    switch: float | Literal["arithmetic", "geometric"] = "arithmetic"
    earliest: float = 0.1
    latest: float = 0.5

    def __post_init__(self):
        if is_number(self.switch):
            check_share(self, "switch")
        else:
            known = isinstance(self.switch, str) and self.switch in ("arithmetic", "geometric")
            check_field(self, "switch", known, "must be 'arithmetic', 'geometric' or a share of the steps")
        check_share(self, "earliest")
        check_share(self, "latest")
        check_field(self, "latest", self.earliest <= self.latest, f"is before earliest={self.earliest!r}")

    @property
    def settles(self) -> Literal["arithmetic", "geometric"] | None:
        """The mean that decides when to switch, or None for a given share."""
        return self.switch if isinstance(self.switch, str) else None

    def training(self, total_steps):
        return Training(freeze=Freeze(self.settles, round(self.earliest * total_steps)))

    def schedule(self, total_steps):
        check_size(f"{type(self).__name__}.schedule", "total_steps", total_steps)
        field = "latest" if self.settles else "switch"
        dense = round(total_steps * getattr(self, field))
        rule = f"leaves no dense or no sparse step in a run of {total_steps} steps"
        check_field(self, field, 0 < dense < total_steps, rule)
        first = Phase("dense", dense, sparse=False, until_settled=self.settles is not None)
        return Schedule((first, Phase("sparse", total_steps - dense, sparse=True)))
