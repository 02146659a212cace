"""The dense rivals of methods whose products are in 8 bits."""

import dataclasses

from jax_sparse24.dispatch.decision import dense_float8_obstacle
from jax_sparse24.engine.float8 import HISTORY_AXES, Scales, histories, in_float8
from jax_sparse24.engine.plan import LINEAR, Plan
from jax_sparse24.methods.base import Method, begun


@dataclasses.dataclass(frozen=True)
class DenseE4M3(Method):
    """Dense products of weights in e4m3, forward and for the input gradient.

    Operands are rounded as those of `FST(fp8=scales)`, by the same code, and the weight gradient keeps the
    model's dtype as there.

    scales: see `FST`."""

    when = "What 2:4 products in 8 bits have to beat."

    state_axes = HISTORY_AXES

    scales: Scales = "tensor"

    @property
    def causal(self):
        return self.scales == "row"

    def init(self, w, role="w"):
        return begun(histories(self.scales, w.shape[:-2]))

    @property
    def histories(self):
        return tuple(histories(self.scales, ()))

    def linear_plan(self):
        return Plan.of(LINEAR, **in_float8({}, self.scales, dict.fromkeys(("fwd", "dgrad"), "e4m3")))


METHODS = {
    "Dense-e4m3": DenseE4M3(),
    "Dense-e4m3-rows": DenseE4M3("row"),
    "Dense-e4m3-delayed": DenseE4M3("delayed"),
}
# Of whole steps, whose projections of attention are in 8 bits, too.
WITH_PROJECTIONS = {"Dense-projections-e4m3": DenseE4M3()}
NAMES = (*METHODS, *WITH_PROJECTIONS)


def rival(method: Method, projections: bool = False) -> str:
    """The name of the rival of a method that multiplies sparse operands in 8 bits; "" for another method.

    projections: whether it multiplies those of attention, too, which its rival then has in 8 bits as well."""
    rows = [row for _, row in method.ffn_plan().rows if "packed" in row.eight_bits]
    scales = {row.other.scales for row in rows}
    known = WITH_PROJECTIONS if projections else METHODS
    return next((name for name, dense in known.items() if dense.scales in scales), "")


def simulated(rival: str) -> dict[str, str]:
    """What a row of a method in 8 bits says where hardware has no such products: "simulated", and why. There
    its time and its rival's are those of two simulations, whose ratio says nothing.

    rival: the name of the method's; "" for one without."""
    obstacle = dense_float8_obstacle()
    return {"simulated": obstacle} if obstacle and rival else {}


def named(part: str) -> str:
    """The name of a part of the rival in the "ms" of another row."""
    return f"e4m3 dense {part}"
