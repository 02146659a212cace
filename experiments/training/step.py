"""The training step: refresh masks, where that is due; accumulate gradients and update, which is compiled.

The state of a run is one dictionary: step (int32), params, sparse (masks, keys, clocks), opt (moments), and
for a method that distils teacher (parameters, a second copy that stays). A phase of the method's schedule is
static, so each has its own compiled step. `s24.Loop` has the step and what is done as a phase begins; this
module compiles them for the devices of a run.

Shapes: A micro-batches, B sequences per micro-batch, L tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_sparse24 as s24
from experiments.config import Config, Train
from experiments.errors import UserError, require
from experiments.models.base import LanguageModel
from experiments.models.parts import Copies, shards, summed_over_rows, widened, with_copies
from experiments.training import mesh as meshes
from experiments.training.optimiser import optimiser
from jax_sparse24.nn.view import Modules

# Above this vocabulary, logits of a micro-batch that are more than so many are made in parts of a sequence.
VOCABULARY_AT_ONCE = 4096
LOGITS_AT_ONCE = 2**26  # 256 MiB in float32


def loss_of(model, tokens_BL):
    """Mean cross entropy in nats of each token given those before it.

    Where logits are many (`VOCABULARY_AT_ONCE`, `LOGITS_AT_ONCE`), those of some positions at a time, so that
    all of them never stand in memory."""
    if not isinstance(model, LanguageModel):
        return cross_entropy(model(tokens_BL[:, :-1]), tokens_BL)
    model = with_copies(model)
    x_BLd = model.features(tokens_BL[:, :-1])
    batch, *rest = jax.eval_shape(model.logits, x_BLd).shape
    parts = parts_of(batch // shards("batch"), *rest)
    if parts == 1:
        return cross_entropy(model.logits(x_BLd), tokens_BL)

    # Parameters that the logits are made of are arguments, so that their gradients are summed after the loop.
    graphdef, leaves, rest = nnx.split(model, (nnx.Param, Copies), ...)
    leaves, tree = jax.tree.flatten(leaves, is_leaf=lambda x: isinstance(x, nnx.Variable))

    def logits(leaves, x_BCd):
        return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves), rest).logits(x_BCd)

    jaxpr = jax.make_jaxpr(logits)(leaves, x_BLd).jaxpr
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    used = [n for n in range(len(leaves)) if id(jaxpr.invars[n]) in read]

    def logits_of(own, x_BCd):
        now = list(leaves)
        for n, leaf in zip(used, own, strict=True):
            now[n] = leaf
        return logits(now, x_BCd)

    targets_BL = tokens_BL[:, 1:]
    mean = _mean_in_parts(logits_of, parts, targets_BL.size)
    return summed_over_rows(mean, [leaves[n] for n in used], x_BLd, targets_BL)


def _mean_in_parts(logits_of, parts: int, tokens: int):
    """A function of (parameters, features (B, L, d), targets (B, L)): the sum of the cross entropy divided by
    `tokens`. `logits_of(parameters, features)` is called for parts of the sequences.

    Its gradient is made beside the loss, part by part, so that the backward pass does not make the logits
    again."""

    def share(logits_BCV, targets_BC):
        return optax.softmax_cross_entropy_with_integer_labels(logits_BCV, targets_BC).sum() / tokens

    @jax.custom_vjp
    def mean(own, x_BLd, targets_BL):
        each = in_parts((x_BLd, targets_BL), parts)
        return jax.lax.map(lambda one: share(logits_of(own, one[0]), one[1]), each).sum()

    def with_gradient(own, x_BLd, targets_BL):
        def part(sums, one):
            x_BCd, targets_BC = one
            logits_BCV, back = jax.vjp(logits_of, own, x_BCd)
            loss, dlogits_BCV = jax.value_and_grad(share)(logits_BCV, targets_BC)
            down, dx_BCd = back(dlogits_BCV)
            return jax.tree.map(jnp.add, sums, down), (loss, dx_BCd)

        each = in_parts((x_BLd, targets_BL), parts)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), own)
        sums, (losses, dx_PBCd) = jax.lax.scan(part, zeros, each)
        sums = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, own)
        return losses.sum(), (sums, jnp.moveaxis(dx_PBCd, 0, 1).reshape(x_BLd.shape))

    def gradient(made, g):
        return *jax.tree.map(lambda each: each * g.astype(each.dtype), made), None

    mean.defvjp(with_gradient, gradient)
    return mean


def in_parts(arrays, parts: int):
    """Arrays (B, L, ...) as (parts, B, L / parts, ...)."""

    def cut(x):
        return jnp.moveaxis(x.reshape(len(x), parts, -1, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, arrays)


def features_of(model, tokens_BL):
    """What the logits of a model are made of, position by position: of other models the logits themselves."""
    return model.features(tokens_BL) if isinstance(model, LanguageModel) else model(tokens_BL)


def over_logits(function, models, features, *arrays):
    """`function(logits, arrays)` of models with their features (`features_of`) and of arrays (B, L, ...), by
    parts of the sequences: results (parts, ...). Where logits are many, those of some positions at a time
    stand in memory, and are made again for the backward pass."""

    def logits_of(model, x):
        return model.logits(x) if isinstance(model, LanguageModel) else x

    def part(one):
        own, arrays = one
        return function([logits_of(*pair) for pair in zip(models, own, strict=True)], arrays)

    batch, *rest = jax.eval_shape(lambda x: logits_of(models[0], x), features[0]).shape
    parts = parts_of(batch // shards("batch"), *rest)
    if parts == 1:
        return jax.tree.map(lambda x: x[None], part((features, arrays)))
    return jax.lax.map(jax.checkpoint(part), in_parts((features, arrays), parts))


def parts_of(batch: int, length: int, vocabulary: int) -> int:
    """In how many parts of a sequence logits (batch, length, vocabulary) are made for the loss."""
    if vocabulary <= VOCABULARY_AT_ONCE:
        return 1
    least = -(-batch * length * vocabulary // LOGITS_AT_ONCE)
    return next((parts for parts in range(least, length) if length % parts == 0), length)


def cross_entropy(logits_BLV, tokens_BL):
    return losses_of(logits_BLV, tokens_BL[:, 1:]).mean()


def losses_of(logits_BLV, targets_BL):
    """Cross entropy in nats (B, L) of each target."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, targets_BL)


def graphdefs_of(config: Config) -> dict:
    """The model's structure with dense (False) and with sparse (True) products; computes nothing."""
    view = Modules(abstract_model(config))
    return {sparse: view.graphdef(sparse) for sparse in (False, True)}


def abstract_model(config: Config):
    """The model with shapes in place of values; UserError if it cannot be built."""
    _ = config.data.vocabulary  # its own mistakes are not those of the model
    try:
        return nnx.merge(*_structure_and_shapes(config))
    except (ValueError, TypeError) as error:
        raise UserError(f"This model cannot be built: {error}") from error


@functools.lru_cache(maxsize=8)
def _structure_and_shapes(config: Config):
    """Of the model, traced once for all who ask."""
    return nnx.split(nnx.eval_shape(config.create_model))


@functools.lru_cache(maxsize=8)
def _made(config: Config, tokens: int, options: tuple, devices: int | tuple | None) -> dict:
    """What programs share, see `Program.once`."""
    return {}


def _compiled_alike(config: Config) -> Config:
    """The config with defaults in all fields that no compiled function reads; runs whose configs are then
    equal share what is compiled."""
    fields = ("steps", "accumulate", "dense_first", "monitor_mask")
    train = Train(**{name: getattr(config.train, name) for name in fields})
    return dataclasses.replace(config, name="run", seed=0, train=train)


class Program:
    """Everything of a run that is compiled: initial state and one training step per kind of phase. Runs of
    one process that differ in their seed, their start or in what is recorded alone share it, so that seeds of
    an arm are compiled once.

    Over the mesh of all devices of all processes that `config.mesh` describes: `shardings` says where each
    array of the state lies, `rows` where the sequences of a batch do. What is traced, here and by others, is
    traced `inside()`, so that layers cut their products (docs/scaling.md).
    compiler_options: XLA's for the steps, beside those of the mesh.
    devices: those of the mesh, in place of all; for a number of them nothing can be compiled.
    """

    def __init__(
        self,
        config: Config,
        compiler_options: dict | None = None,
        *,
        devices: int | Sequence[jax.Device] | None = None,
    ):
        self.config, self.mesh = config, meshes.make(config.mesh, devices)
        self.compiler_options = meshes.compiler_options(self.mesh) | (compiler_options or {})
        over = devices if isinstance(devices, int | None) else tuple(devices)
        options, tokens = tuple(self.compiler_options.items()), config.data.vocabulary.size
        self._made = _made(_compiled_alike(config), tokens, options, over)
        self.training = config.method.training(config.train.steps)
        self.rows, self.whole = meshes.rows(self.mesh), meshes.whole(self.mesh)
        self.loop = self.once("loop", self._loop)
        self.tx, self.graphdefs = self.loop.tx, {on: self.loop.view.graphdef(on) for on in (False, True)}
        self._lowered, self._compiled = self.once("lowered", dict), self.once("compiled", dict)

    def once(self, name, make: Callable):
        """`make()`, called once for all programs of this process that are compiled alike, of which it keeps
        the eight used last. What is measured later changes no product of a program that is compiled.

        name: hashable, of what is made."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _loop(self) -> s24.Loop:
        return s24.Loop(
            abstract_model(self.config),
            self._objective,
            optimiser(self.config),
            self.config.schedule,
            sum_over=meshes.TOKENS if self.config.mesh.gather == "step" else ("dp",),
            jit=self._compile_refresh,
            method=self.config.method,
        )

    def inside(self):
        """The context in which functions of this run are traced."""
        return meshes.inside(self.mesh)

    def _initial(self, keys=None, params=None):
        model = self.config.create_model(keys)
        if params is not None:
            nnx.update(model, params)
            s24.nn.reset(model)
        _, params, sparse = nnx.split(model, nnx.Param, s24.nn.SparseState)
        state = {"step": jnp.int32(0), "params": params, "sparse": sparse, "opt": self.tx.init(params)}
        return state | ({"teacher": jax.tree.map(jnp.copy, params)} if self.training.teacher else {})

    def initial_state(self):
        """The state before the first step, by the seed alone (see start.py)."""
        return self.begin(self.config.keys)

    @property
    def begin(self):
        """Compiled `keys -> state`. Parameters are compiled by themselves: beside what a method computes from
        them, XLA may round them in another way, and all arms start from the same."""

        def compiled():
            keys, where = self.config.keys, self.shardings
            params = jax.jit(lambda keys: self._initial(keys)["params"], out_shardings=where["params"])
            params = params.lower(keys).compile()
            state = jax.jit(self._initial, out_shardings=where)
            state = state.lower(keys, self.abstract_state()["params"]).compile()
            return lambda keys: state(keys, params(keys))

        return self.once("initial state", compiled)

    @property
    def shardings(self):
        """Where each array of the state lies, a tree like the state. Raises UserError for a width that the
        mesh does not divide."""
        return self.once("shardings", lambda: meshes.shardings(self._shapes, self.mesh))

    @property
    def _shapes(self):
        return self.once("shapes", lambda: jax.eval_shape(self._initial))

    def abstract_state(self):
        """Shapes, dtypes and shardings of the state; computes nothing."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self._shapes,
            self.shardings,
        )

    def prepare(self, state, step: int):
        """The state with what is due before a step, see `s24.Loop.prepare`; it is donated. The host decides:
        a GPU's host would wait for a step that decides itself."""
        try:
            return self.loop.prepare(state, step)[0]
        except ValueError as error:
            raise UserError(f"The neurons cannot be arranged: {error}") from error

    def check_arranged(self, state):
        """Raises UserError in the middle of a sparse phase whose neurons were never arranged."""
        require(
            not self.loop.arranges or self.loop.arranged(state),
            f"This checkpoint is of a sparse phase of {type(self.config.method).__name__}, but the neurons "
            "were never arranged: it was not written by such a run. Continue from a checkpoint of the dense "
            "warm-up, or of the run that made these weights.",
        )

    def check_values(self, state):
        """Raises UserError for a number of the state that no run of this method has written."""
        try:
            self.loop.check_values(state)
        except ValueError as error:
            raise UserError(str(error)) from error

    def batch(self, tokens):
        """int32 (A * B, L + 1), the same in every process, as a global array (A, B, L + 1)."""
        parts = self.config.train.accumulate
        tokens_ABL = tokens.reshape(parts, tokens.shape[0] // parts, tokens.shape[1])
        return meshes.place(tokens_ABL, meshes.rows(self.mesh, leading=1))

    def is_compiled(self, sparse: bool, adapters: bool = True) -> bool:
        return self._mode(sparse, adapters) in self._compiled

    def _mode(self, sparse: bool, adapters: bool) -> tuple[bool, bool]:
        return sparse, adapters or not self.config.method.trains_adapters

    def step(self, sparse: bool, adapters: bool = True):
        """The compiled `(state, tokens_ABL) -> (state, metrics)` with masks as they are, but for those of a
        method that computes them in every step; the state is donated.

        Metrics are the loss, the gradient's norm, and `predicted`: the change of the loss on these tokens
        that the update makes to first order, <gradient, update>.
        """
        mode = self._mode(sparse, adapters)
        if mode not in self._compiled:
            self.check(sparse, adapters)
            if sparse and not self.loop.refreshes_within:
                self.loop.refreshed  # noqa: B018 - compiled now, not in the middle of the steps
            lowered = self._lowered.pop(mode)
            self._compiled[mode] = lowered.compile(compiler_options=self.compiler_options)
        return self._compiled[mode]

    def check(self, sparse: bool, adapters: bool = True):
        """UserError if `step` cannot be built for such a phase. Compiles nothing."""
        mode = self._mode(sparse, adapters)
        if mode in self._lowered or mode in self._compiled:
            return
        meshes.check(self.config, self.mesh)
        data, parts = self.config.data, self.config.train.accumulate
        shape, rows = (parts, data.batch // parts, data.seq + 1), meshes.rows(self.mesh, leading=1)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
        step = self.loop.pure_step(*mode)
        run = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, self.whole))
        try:
            with self.inside():
                self._lowered[mode] = run.lower(self.abstract_state(), tokens)
        except (ValueError, TypeError, RuntimeError) as error:
            hint = (
                " Write --model.attention xla where there is no NVIDIA GPU." if "cuDNN" in str(error) else ""
            )
            raise UserError(f"This training step cannot be built: {error}{hint}") from error

    def _objective(self, model, tokens_BL, teacher=None):
        if self.training.loss is None:
            return loss_of(model, tokens_BL)
        models = [model]
        if teacher is not None:
            own = nnx.state(model, s24.nn.SparseState)
            models.append(nnx.merge(self.loop.view.graphdef(False, adapters=False), teacher, own))

        def loss(logits, arrays):
            (own_BCV, *taught), (targets_BC,) = logits, arrays
            crossed = losses_of(own_BCV, targets_BC).mean()
            return self.training.loss(crossed, own_BCV, *(taught or [None]))

        models = [with_copies(one) for one in models]
        features = [features_of(one, tokens_BL[:, :-1]) for one in models]
        models[0] = widened(models[0])  # a teacher has no gradient
        return over_logits(loss, models, features, tokens_BL[:, 1:]).mean()

    def _compile_refresh(self, refresh):
        with self.inside():
            run = jax.jit(refresh, donate_argnums=0, out_shardings=self.shardings)
            compiled = run.lower(self.abstract_state()).compile()
        return lambda state: compiled(jax.device_put(state, self.shardings))

    @property
    def loss(self):
        """Compiled `(sparse, state, tokens_ABL)` -> the loss that a step from this state would report."""

        def run(sparse_phase, state, tokens_ABL):
            model = nnx.merge(self.graphdefs[sparse_phase], state["params"], state["sparse"])
            if sparse_phase:
                s24.refresh(model, step=state["step"])
            graphdef, variables = nnx.split(model)
            teacher = {"teacher": state["teacher"]} if "teacher" in state else {}

            def one(part):  # copies, for models with an `nnx.scan`
                return self._objective(nnx.merge(graphdef, variables, copy=True), part, **teacher)

            return jax.lax.map(one, tokens_ABL).mean()

        return self.once("loss", lambda: jax.jit(run, static_argnums=0))
