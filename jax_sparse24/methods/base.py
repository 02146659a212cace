"""The base of all methods: a plan of products, a state per weight, hooks for layers and training loops."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.engine.plan import LINEAR, Plan, ffn_plan
from jax_sparse24.engine.tiles import total
from jax_sparse24.methods.routing import Router
from jax_sparse24.patterns import check_size
from jax_sparse24.schedule import Phase, Schedule


@dataclasses.dataclass(frozen=True)
class Decay:
    """Masked decay: the pruned weights times a rate are added to what the optimiser works on.

    rate: factor of the pruned weights; 0 for no decay.
    on: what they are added to: the "gradients", which both Adam moments see; the "momentum", which is the
        smoothed gradient; or the "weights", after Adam and times the learning rate.
    rise: optimiser steps within which the rate of decay on the momentum rises from 0.

    Source: 2404.01847, section 4."""

    rate: float = 0.0
    on: Literal["gradients", "momentum", "weights"] = "gradients"
    rise: int = 0


@dataclasses.dataclass(frozen=True)
class Freeze:
    """Sparse steps use the second moment of Adam that the dense phases found, see `s24.optim.step_adamw`.

    settles, earliest: arguments of `s24.optim.step_adamw`."""

    settles: Literal["arithmetic", "geometric"] | None
    earliest: int


@dataclasses.dataclass(frozen=True)
class Training:
    """What a method asks of a training loop besides its products.

    decay: masked decay, for the optimiser.
    freeze: how Adam's second moment is frozen; None for plain AdamW.
    loss: a function of the cross entropy (a scalar), the logits (B, L, V) and the teacher's logits (None
        without a teacher) that returns the loss to train with, a mean over tokens: the trainer calls it for
        parts of the sequences where logits are many. None for the cross entropy.
    teacher: name of the method's option that asks for a teacher, the dense model that training started from;
        an option of 0 asks for none. "" for a method without such an option."""

    decay: Decay = Decay()
    freeze: Freeze | None = None
    loss: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array] | None = None
    teacher: str = ""


@dataclasses.dataclass(frozen=True)
class Method:
    """Base class of all methods; this base itself is dense.

    It is frozen and hashable, so that a method is static under jit. A method subclasses it with its plan
    (`linear_plan`, or `ffn_plan` if the two matrices of an FFN differ), its state (`init`, `refresh`,
    `refresh_every`) and what it asks of the training loop (`training`, `schedule`). The state is a dict of
    arrays per weight matrix.

    refresh_every: optimiser steps between refreshes of the state; 0 if there is nothing to refresh; see
        `s24.due`.
    when: whom the method is for, in a sentence.
    router: puts the tokens and the neurons of an FFN into an order; None for the order in which they come.
    tiles: rows and columns of the tiles of a weight, each of which alone decides what `refresh` and
        `fresh_mask` say of it, but for sums over the weight, which go through `engine.tiles.total`; so they
        run on the shards of a weight that is cut over a mesh. 0 for an axis that must be whole there; None
        for a method that needs all of the weight, which is then gathered.
    state_axes: for entries of the state whose shape is not the weight's, but has one of its sizes: with
        which axis of the weight, -2 or -1, each of their axes is cut over a mesh; None for an axis that the
        products need whole.
    adapter_axes: the same of adapters: with which axis of the weight each of their axes is cut.
    positive: names of entries of the state whose numbers are finite and greater than 0, whatever the weight
        is. Layers that have others refuse to run, where they are known.
    token_blocks: into how many blocks of equal size the tokens of a call are cut. Tokens are sorted, and
        their groups found, within each, so that one device computes what as many shards of tokens compute.
        With 1 every shard is a block; else it is a multiple of the number of shards.
    feature_blocks: into how many blocks of equal size a method that puts the columns of a weight into an
        order cuts them. Columns change places within each block alone, so that over a mesh that cuts them
        into as many shards, or fewer, a device needs no columns of another.
    """

    # Not annotated: a subclass may have them as fields. The others belong to the class.
    refresh_every = 0
    token_blocks = 1
    feature_blocks = 1
    when: ClassVar[str] = ""
    router: ClassVar[Router | None] = None
    tiles: ClassVar[tuple[int, int] | None] = None
    state_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = MappingProxyType({})
    adapter_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = MappingProxyType({})
    positive: ClassVar[tuple[str, ...]] = ()

    def linear_plan(self) -> Plan:
        """The plan of the products fwd, dgrad and wgrad of a single layer `Y = X W`.

        Returns: a `Plan`, made by `Plan.of(LINEAR, ...)`."""
        return Plan.of(LINEAR)

    def ffn_plan(self) -> Plan:
        """The plan of the products F1, F2 and B1 to B4 of an FFN.

        Returns: a `Plan`, made by `Plan.of(FFN, ...)`; by default both matrices follow `linear_plan`."""
        return ffn_plan(self.linear_plan())

    @property
    def sparse_weights(self) -> bool:
        """Whether, in sparse steps, the forward pass multiplies sparse weights."""
        row = self.ffn_plan().row("F1")
        return row is not None and row.operand == "w1"

    def init(self, w: jax.Array, role: str = "w") -> dict[str, jax.Array]:
        """The initial state of a weight.

        w: (..., in, out), any floating dtype.
        role: the weight's name in the plan: "w" alone, "w1" or "w2" in an FFN.

        Returns: a dict of arrays; {} for a method without state."""
        return {}

    def state_shapes(self, shape: tuple[int, ...], role: str = "w") -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the state that `init` makes.

        Every call of an engine compares its state with them. By default `init` is traced to find them, once
        for a method, shape and role. A method whose `init` is slow to trace, such as a search, states them
        here instead. Whoever overrides `init` of such a method overrides this, too.

        shape: of the weight, (..., in, out).
        role: as in `init`.

        Returns: a `jax.ShapeDtypeStruct` for every entry of the state, by name."""
        if type(self).init is Method.init:
            return {}
        return dict(_traced_shapes(self, tuple(shape), role, jax.config.jax_enable_x64))

    def refresh(self, state: dict[str, jax.Array], w: jax.Array, role: str = "w") -> dict[str, jax.Array]:
        """The state recomputed from the current weight.

        A weight with NaN or Inf should keep its old state, see `where_finite`.

        state: as `init` made it.
        w, role: as in `init`.

        Returns: a dict like `state`."""
        return state

    def adapters(self, w: jax.Array, role: str = "w") -> dict[str, jax.Array]:
        """Initial low-rank adapters, which are trained beside a weight.

        w, role: as in `init`.

        Returns: a dict of arrays; {} for none."""
        return {}

    @property
    def trains_adapters(self) -> bool:
        """Whether the method trains low-rank adapters beside weights."""
        return type(self).adapters is not Method.adapters

    def adapt(self, x: jax.Array, adapters: dict[str, jax.Array]) -> jax.Array:
        """What adapters add to the product of an input with their weight; linear in x.

        x: (..., in).
        adapters: as `adapters` made them, in x's dtype.

        Returns: (..., out)."""
        raise NotImplementedError(f"{type(self).__name__} has no adapters.")

    def fresh_mask(self, w: jax.Array) -> jax.Array | None:
        """The mask that the method would choose now, for monitors.

        w: (..., in, out).

        Returns: bool, w's shape; None if the method masks no weight."""
        return None

    @property
    def causal(self) -> bool:
        """Whether the sparse forward pass at a token depends on no later token of the flattened batch,
        whatever the tokens and the state are.

        Where it can depend on later ones, masks or scales tell the model about the tokens that it is to
        predict, and the loss of the sparse model is no language model's loss."""
        return True

    @property
    def token_multiple(self) -> int:
        """In training, the number of tokens must be a multiple of this."""
        return 4

    @property
    def needs_block(self) -> bool:
        """Whether a feed-forward block has sparse products, but a single linear layer has none."""
        return bool(self.ffn_plan().rows) and not self.linear_plan().rows

    @property
    def stochastic(self) -> bool:
        """Whether products draw random numbers, so that calls need a key."""
        return self.linear_plan().stochastic or self.ffn_plan().stochastic

    @property
    def histories(self) -> tuple[str, ...]:
        """Names of the entries of a weight's state in which `s24.nn.observe` keeps the magnitudes that the
        last steps have seen; running statistics of a router are not among them."""
        return ()

    def training(self, total_steps: int) -> Training:
        """What the method changes in optimiser and loss.

        total_steps: optimiser steps of the whole training.

        Returns: a `Training`."""
        return Training()

    def schedule(self, total_steps: int) -> Schedule:
        """The phases of a whole training.

        total_steps: optimiser steps of the whole training.

        Returns: a `Schedule` of `total_steps` steps.
        Raises: TypeError or ValueError if `total_steps` is no positive int, or leaves a phase of the method
            without a step."""
        check_size(f"{type(self).__name__}.schedule", "total_steps", total_steps)
        return Schedule((Phase("train", total_steps, sparse=bool(self.ffn_plan().rows)),))


@functools.lru_cache(maxsize=1024)
def _traced_shapes(method: Method, shape: tuple[int, ...], role: str, x64: bool):
    """The shapes and dtypes of a method's `init`, which with 64-bit types may be others."""
    w = jax.ShapeDtypeStruct(shape, jnp.float32)
    state = jax.eval_shape(functools.partial(method.init, role=role), w)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in state.items()}


def where_finite(w: jax.Array, new: dict[str, jax.Array], old: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The new state of every matrix without NaN and Inf, and the old state of the others.

    It is for `Method.refresh`: a mask that NaN or Inf chose would outlive them. It works under jit.

    w: (..., in, out).
    new, old: dicts of arrays with the leading axes of w.

    Returns: a dict like `new`."""
    finite = jnp.isfinite(w).all((-2, -1))
    finite = total((~finite).astype(jnp.int32)) == 0

    def decide(name):
        ahead = finite.reshape(finite.shape + (1,) * (new[name].ndim - finite.ndim))
        return jnp.where(ahead, new[name], old[name])

    return {name: decide(name) for name in new}


def mask_like(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a mask of weights, for `Method.state_shapes`.

    shape: of the weights, (..., in, out).

    Returns: bool, (..., in, out)."""
    return jax.ShapeDtypeStruct(shape, bool)


def scale_like(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one float32 number per matrix of weights, for `Method.state_shapes`.

    shape: of the weights, (..., in, out).

    Returns: float32, (...)."""
    return jax.ShapeDtypeStruct(shape[:-2], jnp.float32)


def check_positive_state(what: str, value: jax.Array, fix: str) -> None:
    """Raises ValueError for an entry of a state that is not finite and greater than 0.

    Under jit, where it is not known, nothing is checked.

    what: the function and the entry, for the message.
    value: floats of any shape.
    fix: what the caller can do."""
    if isinstance(value, jax.core.Tracer):
        return
    if getattr(value, "is_fully_addressable", True):
        value = np.asarray(value)  # operations on a device would wait for all that it has yet to do
    with jax.ensure_compile_time_eval():
        good = (value > 0) & (value < np.inf)
        if not good.all():
            found = float(jnp.max(jnp.where(good, -jnp.inf, value)))
            raise ValueError(f"{what} is {found}, but must be finite and greater than 0: {fix}.")


def begun(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Entries of a state that begin with zeros.

    shapes: of the entries, by name.

    Returns: a dict of arrays."""
    return {name: jnp.zeros(like.shape, like.dtype) for name, like in shapes.items()}


def check_field(method: Method, field: str, good: bool, rule: str) -> None:
    """Raises ValueError with the method, the field, its value and the rule that it breaks.

    method: the method that is made.
    field: name of its field.
    good: whether the value is allowed; then nothing is raised.
    rule: what the value must be, to follow it in the message."""
    if not good:
        raise ValueError(f"{type(method).__name__}: {field}={getattr(method, field)!r} {rule}.")


def check_choice(method: Method, field: str, *choices: str | None) -> None:
    """Raises ValueError unless a field has one of the values that are allowed.

    method, field: as in `check_field`.
    choices: the values, strings or None."""
    value, named = getattr(method, field), ", ".join(map(repr, choices))
    known = isinstance(value, str | None) and value in choices
    check_field(method, field, known, f"is unknown; use one of {named}")


def is_number(value: Any) -> bool:
    """Whether an option is a finite number, neither a bool nor an array; arrays are not hashable.

    value: of the option."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def check_positive(method: Method, field: str) -> None:
    """Raises ValueError unless a field is a finite number, 0 or positive.

    method, field: as in `check_field`."""
    value = getattr(method, field)
    check_field(method, field, is_number(value) and value >= 0, "must be 0 or positive, a finite number")


def check_share(method: Method, field: str) -> None:
    """Raises ValueError unless a field is a number in [0, 1].

    method, field: as in `check_field`."""
    value = getattr(method, field)
    check_field(method, field, is_number(value) and 0 <= value <= 1, "must lie in [0, 1], a number")


def check_flag(method: Method, field: str) -> None:
    """Raises ValueError unless a field is True or False.

    method, field: as in `check_field`."""
    check_field(method, field, isinstance(getattr(method, field), bool), "must be True or False")


def check_whole(method: Method, field: str, least: int = 1, of: str = "optimiser steps") -> None:
    """Raises ValueError unless a field is a whole number that is large enough.

    method, field: as in `check_field`.
    least: the smallest number that is allowed.
    of: what the number counts, for the message."""
    value = getattr(method, field)
    whole = isinstance(value, int) and not isinstance(value, bool)
    check_field(method, field, whole and value >= least, f"must be a whole number of {of}, >= {least}")


def phases(**steps: int) -> Schedule:
    """The schedule of the phases that have steps, in order.

    steps: number of steps of each phase, by its name; a phase whose name begins with "dense" is dense.

    Returns: a `Schedule`."""
    return Schedule(
        tuple(Phase(name, n, sparse=not name.startswith("dense")) for name, n in steps.items() if n)
    )
