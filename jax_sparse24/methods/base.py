"""What a method is: a plan, its state and its hooks."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_sparse24.engine.operand import Routing
from jax_sparse24.engine.plan import LINEAR, Plan, ffn_plan
from jax_sparse24.patterns import check_size
from jax_sparse24.schedule import Phase, Schedule


@dataclasses.dataclass(frozen=True)
class Decay:
    """Masked decay: the pruned weights times a rate are added to what the optimiser works on (2404.01847).

    rate: 0 for none. on: the "gradients", which both Adam moments see; the "momentum", the smoothed gradient;
    or the "weights", after Adam and times the learning rate. rise: optimiser steps within which the rate of
    decay on the momentum rises from 0."""

    rate: float = 0.0
    on: Literal["gradients", "momentum", "weights"] = "gradients"
    rise: int = 0


@dataclasses.dataclass(frozen=True)
class Freeze:
    """Adam's second moment is that of the dense phases in the sparse ones: `s24.optim.step_adamw`, whose
    arguments these are."""

    settles: Literal["arithmetic", "geometric"] | None
    earliest: int


@dataclasses.dataclass(frozen=True)
class Training:
    """What a method asks of a training loop besides its products.

    decay: masked decay, for the optimiser. freeze: what becomes of Adam's second moment; None for plain
    AdamW. loss: called with the cross entropy (a scalar), the logits (B, L, V) and those of the teacher (None
    without one), it returns the loss to train with; None for the cross entropy. teacher: the option of the
    method, 0 where there is none, that asks for the dense model which training started from as a teacher; ""
    for none."""

    decay: Decay = Decay()
    freeze: Freeze | None = None
    loss: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array] | None = None
    teacher: str = ""


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of all methods: frozen and hashable, so it is static under jit. This base itself is dense.

    A paper subclasses it with its table (`linear_plan`, or `ffn_plan` if the two matrices of an FFN differ),
    its state (`init`, `refresh`, `refresh_every`) and what it asks of the training loop (`training`,
    `schedule`). State is a dict of arrays per weight matrix.

    refresh_every: optimiser steps between refreshes; 0 if there is nothing to refresh; see `s24.due`.
    arrange_every: optimiser steps of a sparse phase between rearrangements of neurons; 0 for only once.
    when: for whom the method is, in a sentence.
    """

    refresh_every: ClassVar[int] = 0
    arrange_every: ClassVar[int] = 0
    when: ClassVar[str] = ""

    def linear_plan(self) -> Plan:
        """Rows for the products fwd, dgrad, wgrad of `Y = X W`."""
        return Plan.of(LINEAR)

    def ffn_plan(self) -> Plan:
        """Rows for F1, F2, B1 to B4; by default both matrices as in `linear_plan`."""
        return ffn_plan(self.linear_plan())

    def init(self, w: jax.Array, role: str = "w") -> dict[str, jax.Array]:
        """State for a weight (..., in, out). role: its name in the plan, "w1" or "w2" in an FFN."""
        return {}

    def state_shapes(self, shape: tuple[int, ...], role: str = "w") -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the state that `init` makes for a weight of `shape` (..., in, out).

        Every call of an engine compares its state with them. A method that says them spares the tracing of
        `init`, which may be a search; by default it is traced.
        Who overrides `init` of such a method overrides this, too."""
        if type(self).init is Method.init:
            return {}
        w = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.eval_shape(partial(self.init, role=role), w)

    def refresh(self, state: dict[str, jax.Array], w: jax.Array, role: str = "w") -> dict[str, jax.Array]:
        """State recomputed from the current weight; see `where_finite` for a weight with NaN or Inf."""
        return state

    def adapters(self, w: jax.Array, role: str = "w") -> dict[str, jax.Array]:
        """Initial low-rank adapters of a weight (..., in, out), trained besides it; {} for none."""
        return {}

    def adapt(self, x: jax.Array, adapters: dict[str, jax.Array]) -> jax.Array:
        """What adapters add to the product of `x` (..., in) with their weight: (..., out), linear in x."""
        raise NotImplementedError(f"{type(self).__name__} has no adapters.")

    def fresh_mask(self, w: jax.Array) -> jax.Array | None:
        """The mask the method would choose for `w` now (for monitors), or None if it masks no weight."""
        return None

    def arrange(self, w1: jax.Array) -> tuple | None:
        """The neurons of an FFN in a new order, and the state of w1 that goes with it; None if the order does
        not matter. w1: (in, out). Runs on the host, see `s24.nn.arrange`."""
        return None

    router: ClassVar[int] = 0  # clusters of a learned router, a parameter (d, clusters) of the FFN

    def teach(self, y: jax.Array, router: jax.Array, x: jax.Array, w1: jax.Array) -> jax.Array:
        """The output `y` with a gradient for a learned router; x: (T, d)."""
        return y

    observed: ClassVar[tuple[str, ...]] = ()  # entries of w1's state that are statistics of activations

    def observe(self, y: jax.Array, state, x: jax.Array, w1: jax.Array) -> jax.Array:
        """The output `y`, with what these tokens add to the statistics `observed` as their gradients.

        state: of w1; x: (T, d)."""
        return y

    def route(self, x: jax.Array, w1: jax.Array, state) -> Routing | None:
        """How the products see the tokens of `x` (T, d); None for the order in which they come."""
        return None

    @property
    def causal(self) -> bool:
        """Whether the sparse forward pass at a token depends on no later token of the flattened batch. Where
        it does, masks tell the model of what it is to predict, and a sparse loss is no language model's."""
        return True

    @property
    def token_multiple(self) -> int:
        """What the number of tokens must be a multiple of in training."""
        return 4

    @property
    def stochastic(self) -> bool:
        """Whether products draw random numbers, so that calls need a key."""
        return self.linear_plan().stochastic or self.ffn_plan().stochastic

    def training(self, total_steps: int) -> Training:
        """What a run of `total_steps` optimiser steps changes in its optimiser and its loss."""
        return Training()

    def schedule(self, total_steps: int) -> Schedule:
        """Phases of a run of `total_steps` optimiser steps. Raises TypeError or ValueError for another thing
        than a number of steps."""
        check_size(f"{type(self).__name__}.schedule", "total_steps", total_steps, least=0)
        return Schedule((Phase("train", total_steps, sparse=bool(self.ffn_plan().rows)),))


def where_finite(w: jax.Array, new: dict[str, jax.Array], old: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The `new` state of every matrix of `w` (..., in, out) whose weights are all finite, the `old` one of
    the others: NaN and Inf would choose masks that outlive them. For `Method.refresh`; works under jit."""
    finite = jnp.isfinite(w).all((-2, -1))

    def decide(name):
        ahead = finite.reshape(finite.shape + (1,) * (new[name].ndim - finite.ndim))
        return jnp.where(ahead, new[name], old[name])

    return {name: decide(name) for name in new}


def mask_like(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A mask of weights of `shape`, for `Method.state_shapes`."""
    return jax.ShapeDtypeStruct(shape, bool)


def scale_like(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A float32 number for every matrix of weights of `shape`, for `Method.state_shapes`."""
    return jax.ShapeDtypeStruct(shape[:-2], jnp.float32)


def check_field(method: Method, field: str, good: bool, rule: str) -> None:
    """Raises ValueError with the method, the field, its value and the rule, unless `good`."""
    if not good:
        raise ValueError(f"{type(method).__name__}: {field}={getattr(method, field)!r} {rule}.")


def check_choice(method: Method, field: str, *choices) -> None:
    value, named = getattr(method, field), ", ".join(map(repr, choices))
    known = isinstance(value, str | None) and value in choices
    check_field(method, field, known, f"is unknown; use one of {named}")


def is_number(value) -> bool:
    """Whether an option is a finite number, and no bool or array: a method is static, so it is hashed."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def check_positive(method: Method, field: str) -> None:
    value = getattr(method, field)
    check_field(method, field, is_number(value) and value >= 0, "must be 0 or positive, a finite number")


def check_share(method: Method, field: str) -> None:
    value = getattr(method, field)
    check_field(method, field, is_number(value) and 0 <= value <= 1, "must lie in [0, 1], a number")


def check_flag(method: Method, field: str) -> None:
    check_field(method, field, isinstance(getattr(method, field), bool), "must be True or False")


def check_whole(method: Method, field: str, least: int = 1, of: str = "optimiser steps") -> None:
    value = getattr(method, field)
    whole = isinstance(value, int) and not isinstance(value, bool)
    check_field(method, field, whole and value >= least, f"must be a whole number of {of}, >= {least}")


def phases(**steps: int) -> Schedule:
    """The phases that have steps, in order; those whose names begin with "dense" are dense."""
    return Schedule(
        tuple(Phase(name, n, sparse=not name.startswith("dense")) for name, n in steps.items() if n)
    )
