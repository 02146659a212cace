"""The training step: refresh masks, where that is due; accumulate gradients and update, which is compiled.

The state of a run is one dictionary: step (int32), params, sparse (masks, keys, clocks), opt (moments), and
for a method that distils teacher (parameters, a second copy that stays). A phase of the method's schedule is
static, so each has its own compiled step.

Shapes: A micro-batches, B sequences per micro-batch, L tokens.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_sparse24 as s24
from experiments.config import Config
from experiments.errors import UserError, require
from experiments.training.optimiser import optimiser
from jax_sparse24.methods import Method


def loss_of(model, tokens_BL):
    """Mean cross entropy in nats of each token given those before it."""
    return cross_entropy(model(tokens_BL[:, :-1]), tokens_BL)


def cross_entropy(logits_BLV, tokens_BL):
    return losses_of(logits_BLV, tokens_BL).mean()


def losses_of(logits_BLV, tokens_BL):
    """Cross entropy in nats (B, L) of each of `tokens_BL` (B, L + 1) but the first."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, tokens_BL[:, 1:])


def graphdefs_of(config: Config, adapting: bool = True) -> dict:
    """The model's structure with dense (False) and with sparse (True) products; computes nothing."""
    try:
        model = nnx.eval_shape(config.create_model)
    except (ValueError, TypeError) as error:
        raise UserError(f"This model cannot be built: {error}") from error
    graphdefs = {}
    s24.nn.set_adapting(model, adapting)
    for sparse in (False, True):
        s24.nn.set_sparse(model, sparse)
        graphdefs[sparse] = nnx.graphdef(model)
    return graphdefs


class Program:
    """Everything of a run that is compiled: initial state and one training step per kind of phase.

    Data-parallel over all devices of all processes: the state is replicated, micro-batches are split.
    compiler_options: XLA's, for the steps.
    """

    def __init__(self, config: Config, compiler_options: dict | None = None):
        self.config, self.compiler_options = config, compiler_options
        self.tx, self.training = optimiser(config), config.method.training(config.train.steps)
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.split = NamedSharding(mesh, PartitionSpec(None, "data"))
        self._lowered, self._compiled = {}, {}
        micro = config.data.batch // config.train.accumulate
        require(
            micro % jax.device_count() == 0,
            f"A micro-batch (data.batch / train.accumulate = {micro} sequences) must be a multiple "
            f"of the number of devices, {jax.device_count()}.",
        )
        self.graphdefs = graphdefs_of(config)

    @functools.cached_property
    def without_adapters(self) -> dict:
        """`graphdefs` in which the method's adapters, if it has some, take no part."""
        return graphdefs_of(self.config, adapting=False)

    def _initial(self):
        _, params, sparse = nnx.split(self.config.create_model(), nnx.Param, s24.nn.SparseState)
        state = {"step": jnp.int32(0), "params": params, "sparse": sparse, "opt": self.tx.init(params)}
        return state | ({"teacher": jax.tree.map(jnp.copy, params)} if self.training.teacher else {})

    @functools.cached_property
    def initial_state(self):
        """Compiled `() -> state` before the first step, by the seed alone (see start.py)."""
        return jax.jit(self._initial, out_shardings=self.replicated)

    def abstract_state(self):
        """Shapes, dtypes and shardings of the state; computes nothing."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.replicated),
            jax.eval_shape(self._initial),
        )

    @property
    def arranges(self) -> bool:
        """Whether the method puts neurons into an order before its first sparse step."""
        return self.config.method.router is not None

    def enter_sparse(self, state, again: bool = False):
        """The state as a sparse phase begins: masks computed anew, which were left alone while the products
        were dense; neurons put into the method's order together with their moments, if they are not in one
        yet, or `again`."""
        if not self.arranges or (self._arranged(state) and not again):
            return self.refreshed(state)
        model = nnx.merge(self.graphdefs[True], state["params"], state["sparse"])
        try:
            moves = s24.nn.arrange(model)
        except ValueError as error:
            raise UserError(f"The neurons cannot be arranged: {error}") from error
        _, params, sparse = nnx.split(model, nnx.Param, s24.nn.SparseState)
        opt = s24.optim.permute_moments(self.tx, state["opt"], params, moves)
        state = state | {"params": params, "sparse": sparse, "opt": opt}
        return self.refreshed(jax.device_put(state, self.replicated))

    def check_arranged(self, state):
        """Raises UserError in the middle of a sparse phase whose neurons were never arranged."""
        require(
            not self.arranges or self._arranged(state),
            f"This checkpoint is of a sparse phase of {type(self.config.method).__name__}, but the neurons "
            "were never arranged: it was not written by such a run. Continue from a checkpoint of the dense "
            "warm-up, or of the run that made these weights.",
        )

    def _arranged(self, state) -> bool:
        flags = [v[...] for path, v in nnx.to_flat_state(state["sparse"]) if path[-1] == "arranged"]
        return bool(flags) and all(bool(flag.all()) for flag in flags)

    def batch(self, tokens):
        """This process's int32 (A * B, L + 1) as a global array (A, B, L + 1)."""
        parts = self.config.train.accumulate
        tokens_ABL = tokens.reshape(parts, tokens.shape[0] // parts, tokens.shape[1])
        return jax.make_array_from_process_local_data(self.split, tokens_ABL)

    def is_compiled(self, sparse: bool, adapters: bool = True) -> bool:
        return self._mode(sparse, adapters) in self._compiled

    def _mode(self, sparse: bool, adapters: bool) -> tuple[bool, bool]:
        return sparse, adapters or type(self.config.method).adapters is Method.adapters

    def advance(self, state, tokens_ABL, step: int, sparse: bool, adapters: bool = True, fresh: bool = False):
        """(state, metrics) after optimiser step number `step`; the state is donated. Masks that are due are
        computed anew before, unless they are `fresh`. Whether they are is decided here: a GPU's host would
        wait for a step that decides itself."""
        if sparse and not fresh and not self.refreshes_within and s24.due(self.config.method, step):
            state = self.refreshed(state)
        return self.step(sparse, adapters)(state, tokens_ABL)

    def step(self, sparse: bool, adapters: bool = True):
        """The compiled `(state, tokens_ABL) -> (state, metrics)` of `advance` with masks as they are, but for
        those of a method that computes them in every step; the state is donated.

        Metrics are the loss, the gradient's norm, and `predicted`: the change of the loss on these tokens
        that the update makes to first order, <gradient, update>.
        """
        mode = self._mode(sparse, adapters)
        if mode not in self._compiled:
            self.check(sparse, adapters)
            if sparse and self.config.method.refresh_every and not self.refreshes_within:
                self.refreshed  # noqa: B018 - compiled now, not in the middle of the steps
            lowered = self._lowered.pop(mode)
            self._compiled[mode] = lowered.compile(compiler_options=self.compiler_options)
        return self._compiled[mode]

    def check(self, sparse: bool, adapters: bool = True):
        """UserError if `step` cannot be built for such a phase. Compiles nothing."""
        mode = self._mode(sparse, adapters)
        if mode in self._lowered or mode in self._compiled:
            return
        graphdefs = self.graphdefs if mode[1] else self.without_adapters
        data, parts = self.config.data, self.config.train.accumulate
        tokens = jax.ShapeDtypeStruct(
            (parts, data.batch // parts, data.seq + 1), jnp.int32, sharding=self.split
        )
        run = jax.jit(self._step(graphdefs[sparse], sparse), donate_argnums=0, out_shardings=self.replicated)
        try:
            self._lowered[mode] = run.lower(self.abstract_state(), tokens)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"This training step cannot be built: {error}") from error

    @property
    def refreshes_within(self) -> bool:
        """Whether masks are due in every step, so that the compiled step itself computes them."""
        return all(s24.due(self.config.method, step) for step in (0, 1))

    def _objective(self, model, state, tokens_BL):
        logits_BLV, taught_BLV = model(tokens_BL[:, :-1]), None
        if "teacher" in state:
            teacher = nnx.merge(self.without_adapters[False], state["teacher"], state["sparse"])
            taught_BLV = teacher(tokens_BL[:, :-1])
        loss = cross_entropy(logits_BLV, tokens_BL)
        return self.training.loss(loss, logits_BLV, taught_BLV) if self.training.loss else loss

    def _step(self, graphdef, sparse_phase: bool):
        def loss_and_grad(state, params, sparse, tokens_BL, index):
            seen, noise = nnx.split_state(s24.nn.fold_key(sparse, index), s24.nn.Statistic, ...)

            def objective(params, seen):
                return self._objective(nnx.merge(graphdef, params, seen, noise), state, tokens_BL)

            return jax.value_and_grad(objective, (0, 1))(params, seen)

        def mean_over(state, params, sparse, tokens_ABL):
            parts = tokens_ABL.shape[0]
            if parts == 1:
                return loss_and_grad(state, params, sparse, tokens_ABL[0], 0)

            def add(total, part):
                return jax.tree.map(jnp.add, total, loss_and_grad(state, params, sparse, *part)), None

            seen = nnx.filter_state(sparse, s24.nn.Statistic)
            zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, (params, seen)))
            total, _ = jax.lax.scan(add, zero, (tokens_ABL, jnp.arange(parts)))
            return jax.tree.map(lambda x: x / parts, total)

        def step(state, tokens_ABL):
            model = nnx.merge(graphdef, state["params"], state["sparse"])
            masks = {}
            if sparse_phase:
                s24.refresh(model, step=state["step"], due=self.refreshes_within)
                masks = s24.nn.masks(model)
            _, params, sparse = nnx.split(model, nnx.Param, s24.nn.SparseState)
            loss, (grads, seen) = mean_over(state, params, sparse, tokens_ABL)
            sparse = s24.nn.observe(sparse, seen) if sparse_phase else sparse
            updates, opt = self.tx.update(grads, state["opt"], params, masks=masks, frozen=sparse_phase)
            state = state | {
                "step": state["step"] + 1,
                "params": optax.apply_updates(params, updates),
                "sparse": sparse,
                "opt": opt,
            }
            predicted = optax.tree.vdot(grads, updates)
            return state, {"loss": loss, "grad_norm": optax.tree.norm(grads), "predicted": predicted}

        return step

    @functools.cached_property
    def refreshed(self):
        """Compiled `state -> state` with all masks computed anew; the state is donated."""

        def run(state):
            model = nnx.merge(self.graphdefs[True], state["params"], state["sparse"])
            s24.refresh(model)
            return state | {"sparse": nnx.state(model, s24.nn.SparseState)}

        program = jax.jit(run, donate_argnums=0, out_shardings=self.replicated)
        return program.lower(self.abstract_state()).compile()

    @functools.cached_property
    def loss(self):
        """Compiled `(sparse, state, tokens_ABL)` -> the loss that a step from this state would report."""

        def run(sparse_phase, state, tokens_ABL):
            model = nnx.merge(self.graphdefs[sparse_phase], state["params"], state["sparse"])
            if sparse_phase:
                s24.refresh(model, step=state["step"])
            graphdef, variables = nnx.split(model)
            one = lambda part: self._objective(nnx.merge(graphdef, variables), state, part)  # noqa: E731
            return jax.lax.map(one, tokens_ABL).mean()

        return jax.jit(run, static_argnums=0)
