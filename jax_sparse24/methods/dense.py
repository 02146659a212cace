"""No sparsity: the baseline, and the phase that any schedule may end with."""

import dataclasses

from jax_sparse24.methods.base import Method


@dataclasses.dataclass(frozen=True)
class Dense(Method):
    """Every product is dense."""

    when = "The baseline; what every other method has to beat at equal time."
