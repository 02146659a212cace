"""A method that does as another one does and writes down what its sparsifiers were given."""

import dataclasses
from typing import Any

from jax_sparse24.engine.operand import Sparsifier
from jax_sparse24.engine.plan import Plan
from jax_sparse24.methods.base import Method


class Log(dict):
    """product -> (operand array, axis, key) of its last execution; hashed by identity, to be static."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


@dataclasses.dataclass(frozen=True)
class Spy(Sparsifier):
    of: Any
    product: str
    log: Log

    @property
    def stochastic(self):
        return self.of.stochastic

    @property
    def pattern(self):
        return self.of.pattern

    @property
    def group(self):
        return self.of.group

    @property
    def forms(self):
        return tuple(form for form in self.of.forms if form != "compressed")

    def check(self, op, shape, axis, what):
        self.of.check(op, shape, axis, what)

    def __call__(self, x, axis, request):
        self.log[self.product] = (x, axis, request.key)
        return self.of(x, axis, request)


@dataclasses.dataclass(frozen=True)
class Spied(Method):
    """`of`, observed. Run it outside jit, so that the log holds arrays."""

    of: Method
    log: Log

    def _observed(self, plan: Plan) -> Plan:
        rows = ((name, dataclasses.replace(row, by=Spy(row.by, name, self.log))) for name, row in plan.rows)
        return dataclasses.replace(plan, rows=tuple(rows))

    def linear_plan(self):
        return self._observed(self.of.linear_plan())

    def ffn_plan(self):
        return self._observed(self.of.ffn_plan())

    def init(self, w, role="w"):
        return self.of.init(w, role)
