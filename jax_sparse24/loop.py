"""What a training loop must do in which order, once: phases, arrangement, refreshes, keys, masks, moments."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from jax_sparse24.dispatch.shards import TOKENS
from jax_sparse24.methods.base import Method, check_positive_state
from jax_sparse24.nn.linear import noting
from jax_sparse24.nn.sharding import rests
from jax_sparse24.nn.state import set_sparse
from jax_sparse24.nn.view import View, view_of
from jax_sparse24.optim import StepAdamState, permute_moments, settled
from jax_sparse24.patterns import as_list, check_flag, check_size
from jax_sparse24.schedule import Phase, Schedule, due

State = dict[str, Any]
OWN = ("step", "params", "sparse", "opt")  # entries of the state that the loop itself makes
_MULTI_STEPS = (
    "Loop: tx is or holds an optax.MultiSteps, whose optimiser steps less often than the loop counts, so "
    "that phases, masks and noise would follow another number. Leave it out: give the loop the optimiser "
    "inside it, and Loop(..., accumulate=) the number of micro-batches."
)


class Loop:
    """The order of a training loop with sparse products, around a loss and an optimiser that are the user's.

        loop = s24.Loop(model, loss, tx, steps)
        state = loop.init()
        for step in range(steps):
            state, metrics = loop.advance(state, next(batches), step)
        losses = loop.evaluate(state, validation)

    Before each step `advance` does what is due, in this order: where a sparse phase begins, the neurons are
    put into the order that the method asks for, Adam's moments follow them, and masks are computed anew;
    masks are computed anew at multiples of the method's period. Then the compiled step records the step in
    every layer, so that noise is new, folds the noise key with the index of each micro-batch, takes the mean
    of the gradients, and gives the masks in use to the optimiser.

    The state is a dict of pytrees, and all of it belongs in a checkpoint: "step" (int32, of the next step),
    "params", "sparse" (masks, keys, modes, ages) and "opt" (the optimiser's state). Entries that a user adds
    are carried along and handed to the loss. The mode of a phase is static: one step is compiled for each.

    model: an NNX module with layers of `s24.nn`, or an Equinox module of `s24.sparsify`, which is left as it
        is; or a `s24.Tree` of parameters without a module, or a `s24.Function` of parameters of any library.
        With shapes in place of values (`nnx.eval_shape`) all but `init` works.
    loss: a function of (model, micro-batch) that returns a scalar; what other entries the state has, it takes
        by name. The model is an NNX or Equinox module, for a tree a `TreeModel`, and for a function a
        `FunctionModel`.
    tx: an optax transformation, such as `s24.optim.for_method` makes, or an `nnx.Optimizer`.
    schedule: an `s24.Schedule`, or the number of optimiser steps, for the method's own schedule.
    accumulate: number of micro-batches of a step; the leading axis of each array of a batch is split.
    sum_over: mesh axes over which gradients are summed once per step, after all micro-batches, such as
        ("dp", "fsdp"); the examples of every micro-batch are cut over them, in the mesh in the context
        (`jax.set_mesh`). Noise is that of one device, but for layers under `jax.vmap`, which do not know the
        places of their tokens; groups of tokens, and scales of 8 bits, are those of each shard.
        Parameters that rest in pieces over one of them, by the logical axes that they declare, are gathered
        once, before the first micro-batch, and their gradients are scattered. What JAX cuts over devices by
        rules of its own, such as cuDNN's attention, must lie in a `jax.shard_map` over the other axes of the
        mesh. Without micro-batches, or a mesh in the context, it changes nothing.
    debug: whether every step is followed by `check`, which waits for the step to end.
    jit: compiles a function whose first argument, the state, may be donated; None for `jax.jit`.
    method: that of the layers whose phases, and order of neurons, the loop follows, where they have several;
        masks are computed anew at the period of each. None where they have one.

    Raises: TypeError and ValueError for arguments of another kind, a model without sparse layers, or with
        layers of several methods none of which is `method`, or with variables that a step would change and
        this loop does not carry, such as those of dropout."""

    def __init__(
        self,
        model: Any,
        loss: Callable[..., jax.Array],
        tx: optax.GradientTransformation,
        schedule: Schedule | int,
        *,
        accumulate: int = 1,
        sum_over: Sequence[str] = (),
        debug: bool = False,
        jit: Callable | None = None,
        method: Method | None = None,
    ):
        if not callable(loss):
            raise TypeError(f"Loop: loss must be a function of (model, batch), got {type(loss).__name__}.")
        check_size("Loop", "accumulate", accumulate)
        check_flag("Loop", "debug", debug)
        if not isinstance(schedule, Schedule | int | np.integer):
            raise TypeError(
                f"Loop: schedule must be an s24.Schedule, or the number of optimiser steps, got {schedule!r}."
            )
        if not isinstance(schedule, Schedule):
            check_size("Loop", "schedule", schedule)
        if not (jit is None or callable(jit)):
            raise TypeError(f"Loop: jit must be a function such as jax.jit, or None for that, got {jit!r}.")
        sum_over = as_list("Loop", "sum_over", sum_over, "names of mesh axes")
        if isinstance(tx, nnx.Optimizer):
            tx = tx.tx
        if isinstance(tx, optax.MultiSteps):
            raise TypeError(_MULTI_STEPS)
        if not isinstance(tx, optax.GradientTransformation):
            raise TypeError(
                f"Loop: tx must be an optax transformation or an nnx.Optimizer, got {type(tx).__name__}."
            )
        self.view: View = view_of(model, method)
        self.method: Method = self.view.method
        self.schedule = schedule if isinstance(schedule, Schedule) else self.method.schedule(int(schedule))
        self.loss, self.tx = loss, optax.with_extra_args_support(tx)
        self.accumulate, self.sum_over, self.debug = accumulate, tuple(sum_over), debug
        self.jit = jit or functools.partial(jax.jit, donate_argnums=0)
        self._steps: dict[tuple[bool, bool], Callable] = {}
        self._refreshes: dict[frozenset[Method], Callable] = {}
        self._number: tuple[Any, int] = (None, 0)  # of the state that `advance` returned last

    # ---- what a step consists of

    def init(self) -> State:
        """Makes the state before the first step.

        Returns: the state, with copies of the model's arrays.
        Raises: TypeError if `tx` holds an `optax.MultiSteps`; ValueError for `s24.optim.step_adamw` in a
            schedule that begins sparse."""
        params, sparse = self.view.split()
        opt = self.tx.init(params)
        if _holds(opt, optax.MultiStepsState):
            raise TypeError(_MULTI_STEPS)
        if self.schedule.phases[0].sparse and _holds(opt, StepAdamState):
            name = type(self.method).__name__
            raise ValueError(
                "Loop: tx holds s24.optim.step_adamw, whose second moment is that of a dense phase before "
                "the sparse one, but this schedule begins sparse. Take both from the method of the layers: "
                f"{name}().schedule(steps) and s24.optim.for_method({name}(), ...)."
            )
        held = set(map(id, jax.tree.leaves(params)))

        def own(x):  # some optimisers keep the first parameters, and no buffer can be donated twice
            if id(x) in held and isinstance(x, jax.Array):
                return jnp.copy(x)
            held.add(id(x))
            return x

        return {"step": jnp.int32(0), "params": params, "sparse": sparse, "opt": jax.tree.map(own, opt)}

    def advance(self, state: State, batch: Any, step: int) -> tuple[State, dict[str, jax.Array]]:
        """One optimiser step, with all that is due before it. The state is donated: use what is returned.

        state: of `init`, of a step, or from a checkpoint.
        batch: a pytree of arrays, whose leading axis is that of the examples.
        step: number of the step, an int: that of the state, known to the host without waiting for a device.

        Returns: the new state and a dict of scalars: "loss"; "grad_norm"; and "predicted", the change of the
            loss that the update makes to first order.
        Raises: ValueError for a step outside the schedule or of another number than the state's, a state that
            was donated before, a batch that `accumulate` and the shards of `sum_over` do not divide, or names
            in `sum_over` of other axes than the mesh has; TypeError for a batch of no arrays, or a loss that
            returns no scalar."""
        _check_entries("Loop.advance", state)
        _check_kept("Loop.advance", state["params"])
        batch = self.micro_batches(batch)
        self._check_step(state, step)
        state, phase = self.prepare(state, step)
        run = self._steps.get((phase.sparse, phase.adapters))
        if run is None:
            run = self._steps[phase.sparse, phase.adapters] = self.jit(
                self.pure_step(phase.sparse, phase.adapters)
            )
        state, metrics = run(state, batch)
        self._number = state["step"], step + 1
        if self.debug:
            self.check(state, step)
        return state, metrics

    def _check_step(self, state: State, step: int) -> None:
        """ValueError unless `step` is the number of the state. That of the state which `advance` has just
        returned is known; that of any other is read from it, and that of a traced one cannot be."""
        array, number = self._number
        if isinstance(state["step"], jax.core.Tracer):
            return
        if state["step"] is not array:
            number = int(state["step"])
        if step != number:
            raise ValueError(
                f"Loop: step {step!r} is not that of the state, which has made {number} steps. Advance with "
                f"step={number}, in order: phases, masks and noise follow this number."
            )

    def prepare(self, state: State, step: int) -> tuple[State, Phase]:
        """Does what is due before a step on the host, and says in which phase the step is.

        state, step: as in `advance`; the state is donated.

        Returns: the state and the phase."""
        phase = self.phase(state, step)
        early = phase.sparse and not self.schedule.phase_at(step).sparse  # the dense phase has settled
        if self.begins(step) or (early and not self._was_sparse(state, step - 1)):
            state = self.begin(state, due(self.method, step, "arrange"))
        elif phase.sparse and (now := self.due_at(step) - self.within):
            state = self.refreshing(now)(state)
        return state, phase

    def due_at(self, step: int) -> frozenset[Method]:
        """Which methods of the model's layers have masks that are due at a step.

        step: number of the step, an int.

        Returns: the methods."""
        return frozenset(method for method in self.view.methods if due(method, step))

    @functools.cached_property
    def within(self) -> frozenset[Method]:
        """The methods whose masks are due in every step, so that the compiled step itself computes them."""
        return self.due_at(0) & self.due_at(1)

    def phase(self, state: State, step: int) -> Phase:
        """The phase of a step; one that is `until_settled` asks the optimiser's state.

        state: as in `advance`.
        step: number of the step, an int.

        Returns: the phase.
        Raises: ValueError for a step outside the schedule."""
        phase = self.schedule.phase_at(step)
        if phase.until_settled:
            phase = self.schedule.phase_at(step, settled=bool(settled(state["opt"])))
        return phase

    def _was_sparse(self, state: State, step: int) -> bool:
        """Whether a step was sparse, of the state after it. Of the steps of a phase that is `until_settled`,
        and so may have ended before them, the layers tell."""
        if step < 0:
            return False
        phase = self.schedule.phase_at(step)
        if not phase.until_settled:
            return phase.sparse
        marks = self.view.entries(state["sparse"], "dense_from").values()
        return bool(marks) and not any(bool((mark != 0).any()) for mark in marks)

    @property
    def arranges(self) -> bool:
        """Whether the method puts neurons into an order before its first sparse step."""
        return self.method.router is not None

    @property
    def refreshes_within(self) -> bool:
        """Whether the compiled step itself computes all masks that are ever due."""
        return self.due_at(0) == self.within

    def begins(self, step: int) -> bool:
        """Whether `prepare` calls `begin` at this step: there a sparse phase begins after other steps or with
        neurons to be put in order, or the period of the order is over.

        step: number of the step, an int."""
        starts = [start for start, _, phase in self.schedule.boundaries() if phase.sparse]
        again = self.schedule.phase_at(step).sparse and due(self.method, step, "arrange")
        return again or (step in starts and bool(step or self.arranges))

    def begin(self, state: State, again: bool = False) -> State:
        """The state as a sparse phase begins.

        Masks are computed anew, which were left alone while products were dense. Neurons are put into the
        method's order together with their moments, if they are not in one yet, or `again`.

        state: as in `advance`; it is donated.
        again: whether neurons that are in an order already are put into a new one.

        Returns: the new state.
        Raises: ValueError for weights with NaN or Inf, if neurons are to be put in order."""
        if self.arranges and (again or not self.arranged(state)):
            params, sparse, moves = self.view.arrange(state["params"], state["sparse"])
            opt = permute_moments(self.tx, state["opt"], params, moves)
            state = state | {"params": params, "sparse": sparse, "opt": opt}
        return self.refreshed(state)

    def arranged(self, state: State) -> bool:
        """Whether the neurons of every block are in an order of the method.

        state: as in `advance`."""
        flags = self.view.entries(state["sparse"], "arranged")
        return bool(flags) and all(bool(flag.all()) for flag in flags.values())

    @functools.cached_property
    def refreshed(self) -> Callable[[State], State]:
        """Compiled `state -> state` with all masks computed anew; the state is donated."""
        return self.jit(self.pure_refresh)

    def refreshing(self, methods: frozenset[Method]) -> Callable[[State], State]:
        """Compiles a refresh of the masks of some methods, once.

        methods: whose masks are computed anew.

        Returns: a function `state -> state`, which donates the state."""
        if methods == self.due_at(0):
            return self.refreshed
        if methods not in self._refreshes:
            self._refreshes[methods] = self.jit(functools.partial(self.pure_refresh, methods=methods))
        return self._refreshes[methods]

    def pure_refresh(self, state: State, methods: frozenset[Method] | None = None) -> State:
        """Computes masks anew, in a function that can be compiled.

        state: as in `advance`.
        methods: whose masks are computed anew; None for all.

        Returns: the state with these masks."""
        due = True if methods is None else methods
        own = self.view.refresh(state["params"], state["sparse"], state["step"], sparse=True, due=due)
        return state | {"sparse": own}

    def pure_step(self, sparse: bool, adapters: bool = True) -> Callable:
        """The function that `advance` compiles for a phase, for who compiles it in another way.

        sparse, adapters: of the phase.

        Returns: `(state, batch) -> (state, metrics)`, where arrays of the batch have a leading axis of
            micro-batches. It computes masks only of a method that does so in every step.
        Raises: TypeError, as the function is traced, for a loss that returns no scalar."""
        view = self.view

        def loss_and_grad(state, params, own, batch, index):
            seen, noise = view.statistics(view.fold(own, index))
            extra = {name: value for name, value in state.items() if name not in OWN}

            def objective(params, seen):
                model = view.model(params, view.join(seen, noise), sparse, adapters)
                watched = sparse and view.ran is not None
                with noting(view.ran) if watched else nullcontext():
                    loss = self.loss(model, batch, **extra)
                if watched:
                    self._warn_of_idle_layers()
                _check_scalar(loss)
                return jnp.asarray(loss).astype(jnp.promote_types(jnp.result_type(loss), jnp.float32))

            return jax.value_and_grad(objective, (0, 1))(params, seen)

        def mean_over(state, params, own, batch):
            parts = jax.tree.leaves(batch)[0].shape[0]
            if parts == 1:
                return loss_and_grad(state, params, own, jax.tree.map(lambda x: x[0], batch), 0)

            def add(total, part):
                loss, grads = loss_and_grad(state, params, own, *part)
                return jax.tree.map(jnp.add, total, grads), loss

            seen, _ = view.statistics(own)
            zero = jax.tree.map(jnp.zeros_like, (params, seen))
            total, losses = jax.lax.scan(add, zero, (batch, jnp.arange(parts)))
            return jax.tree.map(lambda x: x / parts, (losses.sum(), total))

        mean = _summed_once(mean_over, self.sum_over)

        def step(state, batch):
            params, own = state["params"], state["sparse"]
            own = view.refresh(params, own, state["step"], sparse=sparse, due=sparse and self.within)
            masks = view.masks(params, own, sparse)
            loss, (grads, seen) = mean(state, params, own, batch)
            own = view.observe(own, seen)
            updates, opt = self.tx.update(grads, state["opt"], params, masks=masks, frozen=sparse)
            predicted = optax.tree.sum(jax.tree.map(_dot, grads, updates))
            state = state | {
                "step": state["step"] + 1,
                "params": optax.apply_updates(params, updates),
                "sparse": own,
                "opt": opt,
            }
            return state, {"loss": loss, "grad_norm": optax.tree.norm(grads), "predicted": predicted}

        return step

    def _warn_of_idle_layers(self) -> None:
        """Of a step that was just traced, once: layers that it did not call, whose products are dense."""
        idle = [path for path in self.view.paths if path not in self.view.ran]
        self.view.ran.update(idle)
        if idle:
            warnings.warn(
                f"Loop: {len(idle)} sparse layers did not run in the loss: {', '.join(idle)}. The model "
                "multiplies their kernels itself, in dense products, or does not use them. Let it call each "
                "layer, as in layer(x), or leave them out, by s24.Rule(path, None).",
                stacklevel=2,
            )

    def micro_batches(self, batch: Any) -> Any:
        """Splits a batch into micro-batches.

        batch: a pytree of arrays (examples, ...).

        Returns: the batch with arrays (accumulate, examples / accumulate, ...).
        Raises: TypeError for a batch without arrays, or with something else; ValueError if the number of
            micro-batches does not divide the examples."""

        def split(path, x):
            if not isinstance(x, jax.Array | np.ndarray) or not x.ndim:
                raise TypeError(
                    "Loop: a batch is a pytree of arrays with a leading axis of examples, but "
                    f"batch{jax.tree_util.keystr(path)} is {x!r}. Put nothing but arrays into it."
                )
            if x.shape[0] % self.accumulate:
                raise ValueError(
                    f"Loop: a batch of {x.shape[0]} examples does not split into "
                    f"accumulate={self.accumulate} micro-batches of one size."
                )
            shape = self.accumulate, x.shape[0] // self.accumulate, *x.shape[1:]
            there = jax.typeof(x).sharding
            if not there.mesh.explicit_axes:
                return x.reshape(shape)
            return jnp.reshape(x, shape, out_sharding=PartitionSpec(None, *there.spec))

        if not jax.tree.leaves(batch):
            raise TypeError(f"Loop: a batch is a pytree of arrays, got {batch!r}, which has none.")
        return jax.tree_util.tree_map_with_path(split, batch)

    # ---- evaluation, checkpoints, the finished model

    def evaluate(self, state: State, batches: Iterable, loss: Callable | None = None) -> dict[str, float]:
        """The mean loss with dense and with sparse products, at masks computed for the weights as they are.

        The state stays as it is. The sparse loss is no language model's where `method.causal` is False.

        state: as in `advance`.
        batches: an iterable of batches, at least one.
        loss: as in `Loop`; None for the loss that is trained with.

        Returns: {"dense": float, "sparse": float}.
        Raises: TypeError for an array or a dict in place of several batches, or a loss that returns no
            scalar; ValueError for no batch, or a state that was donated to `advance`."""
        _check_entries("Loop.evaluate", state, ("params", "sparse"))
        _check_kept("Loop.evaluate", state["params"])
        if isinstance(batches, jax.Array | np.ndarray | dict | str) or not isinstance(batches, Iterable):
            kind = "array" if hasattr(batches, "dtype") else type(batches).__name__
            raise TypeError(
                f"Loop.evaluate: batches must be an iterable of batches, such as [batch], got one {kind}."
            )
        if not (loss is None or callable(loss)):
            raise TypeError(f"Loop.evaluate: loss must be a function of (model, batch), got {loss!r}.")
        batches = list(batches)
        if not batches:
            raise ValueError("Loop.evaluate: batches must hold at least one batch, got none.")
        loss = loss or self.loss
        if (found := self._evaluations.get(loss)) is None:

            def run(sparse, state, batch):
                own = state["sparse"]
                if sparse:
                    own = self.view.refresh(state["params"], own, None, sparse=True, due=True)
                extra = {name: value for name, value in state.items() if name not in OWN}
                model = self.view.model(state["params"], own, sparse, True)
                with noting(self.view.ran) if loss is self.loss else nullcontext():
                    value = loss(model, batch, **extra)
                _check_scalar(value)
                return value

            found = self._evaluations[loss] = jax.jit(run, static_argnums=0)
        values = {name: [found(name == "sparse", state, b) for b in batches] for name in ("dense", "sparse")}
        # NumPy adds up numbers of bfloat16 in bfloat16, in which a sum of many stops to grow.
        return {name: float(np.mean(jax.device_get(v), dtype=np.float64)) for name, v in values.items()}

    @functools.cached_property
    def _evaluations(self) -> dict[Callable, Callable]:
        return {}

    def restore(self, state: State) -> State:
        """Compares a state from a checkpoint with this loop.

        state: with the structure of `init`.

        Returns: the state.
        Raises: TypeError for what is no such state. ValueError if it has other entries, or arrays of other
            shapes or dtypes; belongs to a step outside the schedule; was written in another kind of phase
            than that of the step before, or in a sparse phase by a run that never put the neurons in order;
            or holds a scale that is not finite and greater than 0."""
        _check_entries("Loop.restore", state)
        want, got = jax.eval_shape(self.init), {name: state[name] for name in OWN if name in state}
        where = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(want)}
        there = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(got)}
        for name, like in where.items():
            x = there.get(name)
            found = f"{x.dtype} {x.shape}" if hasattr(x, "dtype") else "absent" if x is None else repr(x)
            if found != f"{like.dtype} {like.shape}":
                raise ValueError(
                    f"Loop: state{name} of the checkpoint is {found}; this loop needs "
                    f"{like.dtype} {like.shape}. Restore into loop.init(), of the same model and optimiser."
                )
        if more := [name for name in there if name not in where]:
            raise ValueError(
                f"Loop: the checkpoint has state{more[0]}{f' and {len(more) - 1} more' * (len(more) > 1)}, "
                "which this loop has not. Restore into loop.init(), of the same model, method and optimiser."
            )
        step = int(state["step"])
        if not 0 <= step <= self.schedule.total_steps:
            raise ValueError(
                f"Loop: the checkpoint is of step {step}, outside [0, {self.schedule.total_steps}]."
            )
        self._check_mode(state, step - 1)
        self.check_values(state)
        if self.arranges and self._was_sparse(state, step - 1) and not self.arranged(state):
            raise ValueError(
                f"Loop: the checkpoint is of a sparse phase of {type(self.method).__name__}, but the neurons "
                "were never arranged, so that no such run wrote it."
            )
        return state

    def check_values(self, state: State) -> None:
        """Compares the numbers of a state from a checkpoint with what methods can have made.

        state: with the structure of `init`.

        Raises: ValueError for a scale that is not finite and greater than 0."""
        for path, value in jax.tree_util.tree_leaves_with_path(state["sparse"]):
            *place, name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            if "state" not in place:
                continue
            layer = place[: len(place) - 1 - place[::-1].index("state")]
            if name in self.view.method_of(".".join(map(str, layer))).positive:
                what = f"Loop: state['sparse']{jax.tree_util.keystr(path)} of the checkpoint"
                check_positive_state(what, value, "restore another checkpoint")

    def _check_mode(self, state, step: int) -> None:
        if step < 0 or (self.schedule.phase_at(step).until_settled and settled(state["opt"])):
            return  # such a phase may have ended at this step or before it
        sparse = self.schedule.phase_at(step).sparse
        for path, mark in self.view.entries(state["sparse"], "dense_from").items():
            if bool((mark != 0).any()) == sparse:
                kinds = ("dense", "sparse") if sparse else ("sparse", "dense")
                raise ValueError(
                    f"Loop: {path} says that step {step} was {kinds[0]}, but by this schedule it was "
                    f"{kinds[1]}: give the loop the schedule that the run had."
                )

    def check(self, state: State, step: int) -> None:
        """Raises RuntimeError unless what must hold after a step does; it waits for the step to end.

        In a sparse phase the masks of a layer must be younger than the period of its method, every layer must
        have been told this step, so that its noise was new, and neurons must be in order.

        state: what `advance` returned for the step.
        step: number of the step."""
        if not self._was_sparse(state, step):
            return
        for path, age in self.view.entries(state["sparse"], "refreshed").items():
            method, old = self.view.method_of(path), step - np.asarray(age)
            if (np.asarray(age) < 0).any() or (old >= method.refresh_every).any():
                raise RuntimeError(
                    f"Loop: the masks of {path} are {old.max()} steps old at step {step}; "
                    f"{type(method).__name__} refreshes them every {method.refresh_every} steps."
                )
        for path, told in self.view.entries(state["sparse"], "step").items():
            if (np.asarray(told) != step).any():
                raise RuntimeError(
                    f"Loop: {path} was told step {np.asarray(told).max()}, but this is step {step}: its "
                    "noise is not new. Advance with the number of the state's step."
                )
        if self.arranges and not self.arranged(state):
            raise RuntimeError(
                "Loop: neurons are not in the order that the method asks for; see s24.nn.arrange."
            )

    def model(self, state: State, sparse: bool | None = None) -> Any:
        """The model with the values of a state, for generation or export.

        state: as in `advance`.
        sparse: whether products run as the method says, with masks computed for the weights as they are. None
            for dense products, but where the last step was by sparse weights, as those of `STE` are to the
            end: dense products of their kernels would be another model.

        Returns: what the loss gets.
        Raises: TypeError if `sparse` is None inside of jit, where the number of steps is not known;
            ValueError for a state that was donated to `advance`."""
        _check_kept("Loop.model", state["params"])
        if sparse is None:
            if isinstance(state["step"], jax.core.Tracer):
                raise TypeError("Loop.model: inside of jit say sparse=True or sparse=False, not None.")
            sparse = self.by_sparse_weights(state)
        check_flag("Loop.model", "sparse", sparse)
        state = jax.tree.map(jnp.copy, state)
        if sparse:
            state = self.refreshed(state)
        model = self.view.model(state["params"], state["sparse"], sparse, True)
        of_modules = self.view.ran is not None  # their state tells that they are dense, too
        return set_sparse(model, False) if of_modules and not sparse else model

    def by_sparse_weights(self, state: State) -> bool:
        """Whether the last optimiser step was by sparse weights.

        state: as in `advance`, or as a checkpoint has it.

        Returns: False before the first step."""
        sparse = self._was_sparse(state, int(state["step"]) - 1)
        return sparse and any(method.sparse_weights for method in self.view.methods)

    def write(self, state: State, model: nnx.Module, optimizer: nnx.Optimizer | None = None) -> None:
        """Gives the values of a state to the module, and to the `nnx.Optimizer`, that the loop was made with.

        state: as in `advance`.
        model, optimizer: are changed in place.

        Raises: ValueError for a state that was donated to `advance`."""
        _check_kept("Loop.write", state["params"])
        nnx.update(model, jax.tree.map(jnp.copy, state["params"]), jax.tree.map(jnp.copy, state["sparse"]))
        if optimizer is not None:
            nnx.update(optimizer.opt_state, nnx.state(nnx.as_pure(jax.tree.map(jnp.copy, state["opt"]))))
            optimizer.step[...] = jnp.asarray(state["step"], optimizer.step.dtype)


def _dot(a, b):
    # optax.tree.vdot makes a row of each array, for which the pieces of one that is cut are gathered.
    if jax.typeof(a).sharding.mesh.explicit_axes:
        return jnp.sum(a * b)
    return jnp.tensordot(a, b, axes=a.ndim, precision=jax.lax.Precision.HIGHEST)


def _names(axes) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _holds(opt, kind: type) -> bool:
    """Whether the state of an optimiser is or holds one of a kind."""
    leaves = jax.tree.leaves(opt, is_leaf=lambda x: isinstance(x, kind))
    return any(isinstance(x, kind) for x in leaves)


def _check_entries(op: str, state, names: Sequence[str] = OWN) -> None:
    """TypeError for what is no state of a loop, or has not these entries."""
    missing = [name for name in names if not isinstance(state, Mapping) or name not in state]
    if missing:
        raise TypeError(
            f"{op}: state must be the dict of loop.init(), or of a step; this {type(state).__name__} has no "
            f"{missing[0]!r}."
        )


def _check_kept(op: str, tree) -> None:
    """ValueError for a part of a state whose arrays were donated, as the first tells of all."""
    first = next(iter(jax.tree.leaves(tree)), None)
    if isinstance(first, jax.Array) and not isinstance(first, jax.core.Tracer) and first.is_deleted():
        raise ValueError(
            f"{op}: the arrays of this state are gone: an earlier call of advance took them for its result. "
            "Use the state that it returned, state, metrics = loop.advance(state, batch, step), or give it a "
            "copy, jax.tree.map(jnp.copy, state), where both states are needed."
        )


def _check_scalar(loss) -> None:
    """TypeError for what is no scalar."""
    if not isinstance(loss, jax.Array | float | np.number) or jnp.shape(loss) != ():
        kind = f"shape {loss.shape}" if isinstance(loss, jax.Array | np.ndarray) else type(loss).__name__
        raise TypeError(
            f"Loop: loss must return a scalar, got {kind}. Give the mean; what is measured besides, compute "
            "in another function."
        )


def _summed_once(mean: Callable, sum_over: tuple[str, ...]) -> Callable:
    """A mean over micro-batches whose shards of tokens are summed over devices once, after all of them.

    mean: (state, params, own, batch) -> (loss, (gradients, what was seen))."""

    def run(state, params, own, batch):
        mesh, parts = jax.sharding.get_abstract_mesh(), jax.tree.leaves(batch)[0].shape[0]
        over = tuple(axis for axis in sum_over if mesh.shape.get(axis, 1) > 1)
        if parts == 1 or mesh.empty:
            return mean(state, params, own, batch)
        _check_shards(sum_over, over, mesh, batch)
        if not over:
            return mean(state, params, own, batch)

        cuts = jax.tree.map(lambda x, spec: _dividing(x.shape, spec, mesh), params, rests(params))

        def local(*arguments):
            with TOKENS(over):
                loss, (grads, seen) = mean(*arguments)
            grads = jax.tree.map(lambda x, spec: _mean_of_piece(x, spec, over, mesh), grads, cuts)
            return jax.lax.pmean(loss, over), (grads, jax.lax.pmean(seen, over))

        specs = *(PartitionSpec(),) * 3, PartitionSpec(None, over)
        pieces = jax.tree.map(lambda spec: _along(spec, over), cuts)
        results = PartitionSpec(), (pieces, PartitionSpec())
        options = {"out_specs": results, "axis_names": set(over), "check_vma": False}
        of_shards = jax.shard_map(local, in_specs=specs, **options)
        if mesh.explicit_axes:  # along those that the shard_map leaves alone it would gather
            named = jax.tree.map(lambda spec: _along(spec, mesh.explicit_axes), cuts)
            results = PartitionSpec(), (named, PartitionSpec())
            of_shards = jax.sharding.auto_axes(of_shards, axes=mesh.explicit_axes, out_sharding=results)
        return of_shards(state, params, own, batch)

    return run


def _check_shards(sum_over: tuple[str, ...], over: tuple[str, ...], mesh, batch) -> None:
    """ValueError for mesh axes that the mesh does not have, or over which a `jax.shard_map` runs, and for
    micro-batches that do not divide into shards."""
    for axis in sum_over:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"Loop: sum_over names the mesh axis {axis!r}, but the mesh in the context has "
                f"{', '.join(map(repr, mesh.axis_names))}. Name those of these that cut examples."
            )
        if axis in mesh.manual_axes:
            raise ValueError(
                f"Loop: sum_over names the mesh axis {axis!r}, over which this step runs in a jax.shard_map "
                "already. Leave it out of sum_over, and take the mean of gradients over it there."
            )
    n, along = math.prod(mesh.shape[axis] for axis in over), [f"{axis} = {mesh.shape[axis]}" for axis in over]
    for x in jax.tree.leaves(batch):
        if x.shape[1] % n:
            raise ValueError(
                f"Loop: a micro-batch of {x.shape[1]} examples does not divide into the {n} shards of "
                f"sum_over ({' * '.join(along)}). Give batches of a multiple of {x.shape[0] * n} examples, "
                "or name fewer mesh axes in sum_over."
            )


def _dividing(shape, spec: PartitionSpec, mesh) -> PartitionSpec:
    """How an array is cut; it is whole along axes that their mesh axes do not divide."""
    found = []
    for size, axes in zip(shape, spec, strict=False):
        axes = [axis for axis in _names(axes) if mesh.shape[axis] > 1 and axis not in mesh.manual_axes]
        divides = size % math.prod(mesh.shape[axis] for axis in axes) == 0
        found.append(tuple(axes) if axes and divides else None)
    return PartitionSpec(*found)


def _along(spec: PartitionSpec, over) -> PartitionSpec:
    """How an array is cut over some of the mesh axes of a spec."""
    return PartitionSpec(*(tuple(axis for axis in _names(axes) if axis in over) or None for axes in spec))


def _mean_of_piece(x, spec: PartitionSpec, over: tuple[str, ...], mesh):
    """The mean over the shards along some mesh axes; of a parameter that is cut by `spec` over these, only
    this shard's piece."""

    def reduced(x):
        left = over
        for axis, axes in enumerate(_along(spec, over)):
            if axes:
                x = jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)
                left = tuple(name for name in left if name not in _names(axes))
        return jax.lax.psum(x, left) if left else x

    others = {axis for axes in spec for axis in _names(axes)} - set(over)
    if others:  # left to XLA, they are gathered before, and with jaxlib 0.10.2 the pieces were wrong
        cut = _along(spec, others)
        reduced = jax.shard_map(reduced, in_specs=cut, out_specs=cut, axis_names=others, check_vma=False)
    return reduced(x) / math.prod(mesh.shape[axis] for axis in over)
