"""A method that does as another one does and writes down what its sparsifiers were given."""

import dataclasses
from typing import Any

from jax_sparse24.engine import Plan, Row
from jax_sparse24.methods.base import Method


class Log(dict):
    """product -> (operand array, axis, key) of its last execution; hashed by identity, to be static."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


@dataclasses.dataclass(frozen=True)
class Spy:
    of: Any
    product: str
    log: Log

    @property
    def divides(self):
        return self.of.divides

    @property
    def stochastic(self):
        return self.of.stochastic

    @property
    def needs(self):
        return self.of.needs

    def __call__(self, x, axis, state, key, implementation):
        self.log[self.product] = (x, axis, key)
        return self.of(x, axis, state, key, implementation)


@dataclasses.dataclass(frozen=True)
class Spied(Method):
    """`of`, observed. Run it outside jit, so that the log holds arrays."""

    of: Method
    log: Log

    def _observed(self, plan: Plan) -> Plan:
        return Plan(tuple((name, Row(row.operand, Spy(row.by, name, self.log))) for name, row in plan.rows))

    def linear_plan(self):
        return self._observed(self.of.linear_plan())

    def ffn_plan(self):
        return self._observed(self.of.ffn_plan())

    def init(self, w):
        return self.of.init(w)
