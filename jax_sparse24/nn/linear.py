"""The sparse linear layer."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from jax.sharding import PartitionSpec

from jax_sparse24 import schedule
from jax_sparse24.dispatch.decision import check_implementation
from jax_sparse24.dispatch.shards import check_declared
from jax_sparse24.engine.linear import sparse_dot
from jax_sparse24.engine.plan import LINEAR, LINEAR_IN_FFN
from jax_sparse24.methods import Dense
from jax_sparse24.methods.base import Method, check_positive_state
from jax_sparse24.nn import sharding
from jax_sparse24.patterns import check_input, check_size, key_of

# Names of a weight in a plan: "w" of a layer alone, "w1" and "w2" of the first and second one in an FFN.
ROLES = ("w", *LINEAR_IN_FFN)
DUE = -1  # the step of the last refresh where state is due
_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()
_Call = TypeVar("_Call", bound=Callable[..., Any])


class SparseState(nnx.Variable):
    """What changes in a sparse layer besides its parameters: masks, noise key, step. It belongs in the
    checkpoint."""


class Statistic(SparseState):
    """A running statistic of activations. Its gradient is no gradient but what one step has observed, see
    `s24.nn.observe`."""


class History(Statistic):
    """What the last steps have seen of an operand of a product, for how many steps more it is remembered."""


# Where the paths of sparse layers that run are noted, by a loop that looks for those which do not.
RAN: ContextVar[set[str] | None] = ContextVar("RAN", default=None)


@contextlib.contextmanager
def noting(ran: set[str] | None):
    """Inside, the paths of sparse layers that run, or are traced, are added to a set.

    ran: the set; None to note nothing."""
    before = RAN.set(ran)
    try:
        yield
    finally:
        RAN.reset(before)


def naming_its_layer(call: _Call) -> _Call:
    """`__call__` of a module with a `path`, with which the message of a wrong argument begins, and with an
    array as input, which may be given as `inputs`, as layers of Flax call it."""

    @functools.wraps(call)
    def run(self, *args, **options):
        try:
            for name in ("x", "inputs"):
                if not args and name in options:
                    args = (options.pop(name),)
            if args:
                check_input(self.path or type(self).__name__, args[0])
            return call(self, *args, **options)
        except (TypeError, ValueError) as error:
            told = not self.path or str(error).startswith(self.path)
            if told or type(error) not in (TypeError, ValueError):  # others are made from more than a text
                raise
            raise type(error)(f"{self.path}: {error}") from error

    return run


def variables_of(held: nnx.Dict) -> dict[str, nnx.Variable]:
    """The variables in a dict that a layer holds, by name.

    `held.items()` fails within Flax's `nnx.tabulate`, which replaces it and puts a number beside them."""
    return {name: value for name in held if isinstance(value := held[name], nnx.Variable)}


class Linear(nnx.Module):
    """`y = x @ kernel + bias` whose three products run as `method` says; it replaces `nnx.Linear`.

    Parameters have the names, shapes and dtypes of `nnx.Linear`: `kernel` (in_features, out_features) and
    `bias` (out_features,). A method with low-rank adapters adds them as parameters in `adapters`. Everything
    else is `SparseState`: `state` (what `method.init` returned), `key` (uint32 (2,), if the method draws
    noise), `step` (int32, the last optimiser step that `s24.refresh` was told), and

    - `dense_from` (uint32), for a sparse method: 0 in sparse mode; in dense mode a checksum of the kernel
      with which it was entered;
    - `refreshed` (int32), if the method refreshes its state: the step at which it was last computed; -1 where
      it is due whatever the step, which is so before the first refresh and after steps in dense mode;
    - `checksum` (uint32), if the method refreshes its state or draws noise: of the kernel when `s24.refresh`
      was last told a step.

    Layers that `nnx.vmap` stacks have the axes of the stack first in every variable, parameters too
    (`out_axes=0`). Functions of a model, such as `s24.refresh`, refuse other stacks. Of as many layers as
    `in_features`, parameters along axis 1 have the shapes that they would have along axis 0; then the bias
    tells (unless `out_features` are as many, too), or the name that `nnx.PARTITION_NAME` puts among `axes`,
    or, outside of jit and until the kernel moves, the checksum below. Where none of these is there, such a
    stack is taken for one along axis 0.

    A call takes x, (..., in_features), and maybe the sharding of its result, `out_sharding`, as that of
    `nnx.Linear` does; it returns (..., out_features), and is pure. Noise depends on the key, the step and the
    product, so two calls of one layer in one step draw the same noise unless
    `s24.nn.fold_key` separates them. Where the kernel has moved since `s24.refresh` was last told a step,
    noise depends on the kernel in place of the step, so that it advances in a loop that tells none.

    in_features, out_features: widths; multiples of 4 where the method's groups lie along them.
    method: from `s24.methods`; None for dense products.
    use_bias: whether the layer has a bias.
    dtype: of the products; None for the promoted dtype of input and parameters.
    param_dtype: of kernel and bias.
    kernel_init, bias_init: initialisers, as in `nnx.Linear`.
    implementation: None to choose, or "reference", "ffi" or "cusparselt".
    role: the weight's name in the method's plan: "w" alone, "w1" or "w2" as first or second layer of an FFN.
    axes: names of the logical axes of the kernel, such as ("embed", "mlp"); products are then cut over the
        mesh in the context by the rules of `s24.sharding`, and `nnx.get_named_sharding` knows how parameters
        and masks lie. None for those that the kernel brings along, in the `out_sharding` of its metadata or
        as it lies on a mesh; without any nothing is cut.
    tokens: name of the logical axis that comes first in the input.
    kernel_metadata, bias_metadata: of the parameters, as in `nnx.Linear`.
    precision, preferred_element_type: as in `nnx.Linear`, for a layer without sparse products that is not cut
        over a mesh.
    promote_dtype: as in `nnx.Linear`.
    dot_general: `jax.lax.dot_general`, because the method says how the layer multiplies.
    rngs: draws the initial parameters and the noise key.

    Raises: TypeError (method, types of the widths), ValueError (widths, role, implementation, a method that
        has no plan for a single linear layer; with a mesh in the context, axes without a rule, or that the
        mesh does not have or does not divide, and a mesh axis that no rule names); a call raises as
        `s24.sparse_dot`. A call outside of jit raises ValueError where the state was written in a dense
        phase, but the layer is in sparse mode, where masks are those of the initial kernel, but the kernel
        is another one by now, and for a scale that is not finite and greater than 0."""

    axes: tuple[sharding.Name, sharding.Name] | None = None
    stacked_axes: tuple[sharding.Name, ...] = ()
    tokens = "batch"
    precision: jax.lax.PrecisionLike = None
    preferred_element_type: jax.typing.DTypeLike | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        method: Method | None = None,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: jax.nn.initializers.Initializer = _KERNEL_INIT,
        bias_init: jax.nn.initializers.Initializer = _BIAS_INIT,
        implementation: str | None = None,
        role: str = "w",
        axes: tuple[sharding.Name, sharding.Name] | None = None,
        tokens: str = "batch",
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        promote_dtype: Callable = dtypes.promote_dtype,
        dot_general: Callable = jax.lax.dot_general,
        rngs: nnx.Rngs,
    ):
        method = Dense() if method is None else method
        check_method("Linear", method)
        if dot_general is not jax.lax.dot_general:
            raise ValueError(
                f"Linear: dot_general={dot_general!r}: the method says how the layer multiplies, forward and "
                "backward. Leave it out, or use nnx.Linear for a product of your own."
            )
        self.precision, self.preferred_element_type = precision, preferred_element_type
        self.promote_dtype = promote_dtype
        if self.of_dense_products and method.ffn_plan().rows:
            raise ValueError(
                f"Linear: {self.of_dense_products} with {method}: sparse products add up in float32, and "
                "their results have the promoted dtype. Leave it out, or use method=None."
            )
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_size("Linear", name, size)
        if role not in ROLES:
            raise ValueError(f"Linear: role {role!r} is unknown; use one of {', '.join(map(repr, ROLES))}.")
        check_implementation("Linear", implementation)
        check_fit(method, in_features, out_features, role)
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.param_dtype = dtype, param_dtype
        self.axes, self.tokens = check_axes(axes), tokens
        sharding.check_fits("Linear", self.axes, (in_features, out_features))
        kernel_metadata = {**sharding.metadata(self.axes), **kernel_metadata}
        bias_metadata = {**sharding.metadata(self.axes and self.axes[1:]), **bias_metadata}
        shape = in_features, out_features
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"Linear: rngs must be nnx.Rngs, such as nnx.Rngs(0), got {rngs!r}.")
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **kernel_metadata)
        bias = bias_init(rngs.params(), shape[1:], param_dtype) if use_bias else None
        self.bias = nnx.Param(bias, **bias_metadata) if use_bias else None
        # The key is drawn for every method, so that models which differ only in their methods start from
        # the same parameters.
        self.prepare(method, role, implementation, rngs.params())

    def prepare(self, method: Method, role: str, implementation: str | None, noise_key: jax.Array) -> None:
        """Gives the layer, whose parameters are there, all else that its method keeps.

        The layer may be a stack of layers, whose parameters have leading axes.

        method, role, implementation: as in `Linear`.
        noise_key: a PRNG key."""
        self.method, self.role, self.implementation = method, role, implementation
        self.sparse = True
        self.path = ""  # in the model, for messages, where a loop has told it
        self._take_axes()
        if self.axes is not None:
            sharding.check_named(self.tokens, *self.rests)
        weight = self.weight
        lead = weight.shape[:-2]
        kinds = dict.fromkeys(method.router.observed if method.router else (), Statistic)
        kinds |= dict.fromkeys(method.histories, History)
        cut = sharding.metadata(self.rests)
        self.state = nnx.Dict(
            {
                name: kinds.get(name, SparseState)(value, **(cut if value.shape == weight.shape else {}))
                for name, value in self._initial(method.init).items()
            }
        )
        if method.stochastic:
            self.key = SparseState(jax.random.bits(noise_key, (*lead, 2), jnp.uint32))
        self.step = SparseState(jnp.zeros(lead, jnp.int32))
        if method.ffn_plan().rows:
            self.dense_from = SparseState(jnp.zeros(lead, jnp.uint32))
        if self.ages:
            self.refreshed = SparseState(jnp.full(lead, DUE, jnp.int32))
        if self.ages or method.stochastic:
            self.checksum = SparseState(checksum(weight))
        adapters = self._initial(method.adapters)
        self.adapters = nnx.Dict({name: nnx.Param(value) for name, value in adapters.items()})
        self.adapting = True

    def _take_axes(self) -> None:
        """The logical axes that the kernel brings along, where none are given."""
        if (names := sharding.declared(self.kernel)) is None:
            return
        *stacked, rows, columns = self.names_of_weight(names)
        if self.axes not in (None, (rows, columns)) and "out_sharding" in self.kernel.get_metadata():
            raise ValueError(
                f"Linear: axes={self.axes!r}, but the kernel has out_sharding={(rows, columns)!r}: leave out "
                "one of them, or name the same axes in both."
            )
        if self.axes is None:
            self.axes, self.stacked_axes = (rows, columns), tuple(stacked) if any(stacked) else ()

    def names_of_weight(self, names: tuple[sharding.Name, ...]) -> tuple[sharding.Name, ...]:
        """The names of the axes of `weight`.

        names: of the axes of the kernel.

        Returns: a name for each axis."""
        return names

    def _initial(self, made: Callable) -> dict[str, jax.Array]:
        """What a method makes for the kernel: `init`, or `adapters`."""
        return sharding.of_whole(lambda w: made(w, self.role), self.weight)

    @property
    def weight(self) -> jax.Array:
        """The kernel as the matrix that the products take, (..., in, out)."""
        return of_jax(self.kernel[...])

    @property
    def rests(self) -> tuple[sharding.Name, ...] | None:
        """Names of the logical axes of `weight`, its last ones; None for a weight that is never cut."""
        return self.stacked_axes + (self.axes or (None, None)) if self.stacked_axes else self.axes

    def like_kernel(self, matrix: jax.Array) -> jax.Array:
        """An array like `weight` in the shape of the kernel.

        matrix: (..., in, out).

        Returns: an array of the kernel's shape."""
        return matrix

    @property
    def active(self) -> bool:
        """Whether the products run as the method says (see `s24.nn.set_sparse`)."""
        return self.sparse and bool(self.method.ffn_plan().rows)

    @property
    def trained_sparse(self) -> bool:
        """Whether the layer multiplies a sparse weight in its present mode, and was trained: its last step is
        not the first one, as far as that is known."""
        if not (self.active and self.method.sparse_weights):
            return False
        step = self.step[...]
        return isinstance(step, jax.core.Tracer) or bool(step.any())

    @property
    def ages(self) -> bool:
        """Whether the layer has state that the method refreshes."""
        return bool(self.method.refresh_every and variables_of(self.state))

    @property
    def adapted(self) -> bool:
        """Whether the layer has adapters that are on (see `s24.nn.set_adapting`)."""
        return self.adapting and bool(variables_of(self.adapters))

    def adapt(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """What the adapters add to the output.

        x: (..., in_features).

        like: what it is added to, (..., out_features).

        Returns: (..., out_features), of the promoted dtype of x and adapters."""
        own = jax.typeof(like).sharding

        def cut(name, value):  # XLA might gather tokens where that is cheaper than to add up products
            axes = self.method.adapter_axes.get(name, ())
            names = (None if axis is None else self.axes[axis] for axis in axes)
            return sharding.in_products(value, self.tokens, *names)

        def adapt(x, adapters):
            if self.axes is not None:
                adapters = {name: cut(name, value) for name, value in adapters.items()}
            return self.method.adapt(x, adapters)

        if own.mesh.explicit_axes:
            adapt = jax.sharding.auto_axes(adapt, axes=own.mesh.explicit_axes, out_sharding=own.spec)
        return adapt(x, {name: v[...].astype(x.dtype) for name, v in variables_of(self.adapters).items()})

    @property
    def of_dense_products(self) -> str:
        """The options that are given and only XLA's dense product has, for messages; "" without."""
        names = "precision", "preferred_element_type"
        return ", ".join(
            f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None
        )

    def noise_key(self) -> jax.Array | None:
        """The PRNG key of this step's noise.

        Returns: a key; None if the method draws none.
        Raises: ValueError for a stack of layers."""
        if self.weight.ndim > 2:
            raise ValueError(
                f"Linear: this is a stack of layers, whose kernels have shape {self.weight.shape}, and each "
                "is called by itself: call it inside of a vmap or a scan over the stack, such as nnx.vmap or "
                "nnx.scan."
            )
        if not self.method.stochastic:
            return None
        now, step = checksum(self.weight), self.step[...].astype(jnp.uint32)
        told = jnp.where(now == self.checksum[...], step, now)
        return jax.random.fold_in(key_of(self.key[...]), told)

    def method_state(self) -> dict[str, jax.Array]:
        """What the method keeps for this layer.

        Returns: a dict of arrays, by name."""
        self._note()
        return {name: value[...] for name, value in variables_of(self.state).items()}

    def mask(self) -> jax.Array | None:
        """The mask in use: the stored one, or the one that the method chooses for the kernel as it is.

        Returns: bool, the kernel's shape; None if the method masks no weight."""
        if "mask" in self.state:
            return self.like_kernel(self.state["mask"][...])
        fresh = sharding.by_tiles(self.method.fresh_mask, self.method.tiles, self.rests, self.weight)
        return None if fresh is None else self.like_kernel(fresh)

    @naming_its_layer
    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        return self.product(x, bias, out_sharding)

    def product(self, x: jax.Array, bias: jax.Array | None, out_sharding: Any = None) -> jax.Array:
        """The input times `weight`, with what the adapters add.

        x: (..., in_features).
        bias: (out_features,), or None to add none.
        out_sharding: of the result, as in `nnx.Linear`; None to leave it to JAX.

        Returns: (..., out_features).
        Raises: as a call."""
        if x.size:
            self.check_current()
        x, w, bias = self.promote_dtype((x, self.weight, bias), dtype=self.dtype)
        specs = specs_of("Linear", w=("", self))
        if specs is not None and self.of_dense_products:
            raise ValueError(
                f"Linear: {self.of_dense_products}: products that are cut over a mesh add up in float32, and "
                "their results have the promoted dtype. Leave it out, or give the layer no axes."
            )
        if self.active and not self.method.needs_block:
            state, key = self.method_state(), self.noise_key()
            options = {"bias": bias, "implementation": self.implementation, "specs": specs}
            y = sparse_dot(x, w, self.method, state, key, **options)
        elif specs is not None:  # left to itself, XLA may gather tokens
            y = sparse_dot(x, w, Dense(), bias=bias, specs=specs)
        else:
            options = {"precision": self.precision, "preferred_element_type": self.preferred_element_type}
            y = jnp.matmul(x, w, out_sharding=out_sharding, **options)
            y = y if bias is None else y + bias
        y = y + self.adapt(x, y) if self.adapted else y
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)

    def set_sparse(self, sparse: bool) -> None:
        """Switches the mode and records it in the state, see `s24.nn.set_sparse`.

        Of a model without values (`nnx.eval_shape`) only the mode is switched.

        sparse: as in `s24.nn.set_sparse`."""
        self.sparse = sparse
        abstract = isinstance(self.kernel.get_raw_value(), jax.ShapeDtypeStruct)
        if abstract or not self.method.ffn_plan().rows:
            return
        kernel, was = self.weight, self.dense_from[...]
        self._record_mode(kernel)
        if sparse and self.ages:
            moved = (was != 0) & (was != checksum(kernel))
            self.refreshed[...] = jnp.where(moved, DUE, self.refreshed[...])

    def reset(self) -> None:
        """Gives the layer the state and adapters of a new layer with its kernel, see `s24.nn.reset`."""
        for own, made in ((self.state, self.method.init), (self.adapters, self.method.adapters)):
            for name, value in self._initial(made).items():
                own[name][...] = sharding.laid_like(value, own[name][...])
        if self.ages:
            self._record(self.refreshed, DUE)
            self.checksum[...] = checksum(self.weight)

    def refresh(self, step: jax.typing.ArrayLike | None = None, due: bool | None = None) -> None:
        """Records the step and recomputes the method's state if it is due, see `s24.refresh`.

        The layer may be a stack of layers, whose variables have leading axes.

        step, due: as in `s24.refresh`."""
        kernel = self.weight
        if step is not None:
            self._record(self.step, step)
            if "checksum" in vars(self):
                self.checksum[...] = checksum(kernel)
            if self.method.ffn_plan().rows:
                self._record_mode(kernel)
        if not self.ages:
            return
        if not self.sparse:
            self._record(self.refreshed, DUE)
            return
        if due is None:
            due = self._is_due(step)
        old = self.method_state(), self.refreshed[...]
        if isinstance(due, jax.core.Tracer):
            new = jax.lax.cond(due, self._refreshed, _unchanged, *old, kernel)
        else:
            new = self._refreshed(*old, kernel) if due else old
        for name, value in new[0].items():
            self.state[name][...] = value
        self.refreshed[...] = new[1]

    def _is_due(self, step):
        """Whether the state is to be recomputed before a step; a traced bool, unless all is known here."""
        if step is None:
            return True
        scheduled = schedule.due(self.method, step)
        age = self.refreshed[...]
        if scheduled is True:
            return True
        if isinstance(age, jax.core.Tracer) or isinstance(scheduled, jax.core.Tracer):
            return jnp.logical_or(scheduled, (age < 0).any())
        return bool((np.asarray(age) < 0).any())

    def _record(self, variable, step) -> None:
        # Every variable has its own buffer: one that stands in the state twice could not be donated.
        variable[...] = jnp.broadcast_to(jnp.array(step, jnp.int32), variable.shape)

    def _record_mode(self, kernel) -> None:
        was = self.dense_from[...]
        self.dense_from[...] = (
            jnp.zeros_like(was) if self.sparse else jnp.where(was == 0, checksum(kernel), was)
        )

    def _refreshed(self, state, refreshed, kernel):
        def refresh(kernel, state):
            return self.method.refresh(state, kernel, self.role)

        state = sharding.by_tiles(refresh, self.method.tiles, self.rests, kernel, state)
        return state, jnp.copy(self.step[...])

    def check_current(self) -> None:
        """Raises ValueError outside of jit where the layer would use what belongs to another phase or kernel.

        Under jit, where the state is not known, nothing is checked."""
        if not self.active:
            return
        self._note()
        self.check_mode()
        self.check_arranged()
        self.check_values()
        if not self.ages:
            return
        found = self.refreshed[...], self.checksum[...], self.weight
        if any(isinstance(value, jax.core.Tracer) for value in found):
            return
        refreshed, then, kernel = found
        with jax.ensure_compile_time_eval():
            stale = (np.asarray(refreshed) < 0).any() and (np.asarray(checksum(kernel)) != then).any()
        if stale:
            raise ValueError(
                f"Linear: the masks of this layer, with a kernel of shape {kernel.shape}, are those of "
                "another kernel: weights were loaded, or trained in dense mode, since they were computed. "
                "Call s24.refresh(model) first."
            )

    def _note(self) -> None:
        if (ran := RAN.get()) is not None:
            ran.add(self.path)

    def check_arranged(self, path: str = "") -> None:
        """Raises ValueError outside of jit if the method routes tokens, but the neurons have no order yet.

        path: of the layer in the model, for the message."""
        arranged = self.state["arranged"][...] if self.active and "arranged" in self.state else True
        if not isinstance(arranged, jax.core.Tracer) and not np.asarray(arranged).all():
            raise ValueError(
                f"Linear: {path or 'this layer'}, with a kernel of shape {self.kernel.shape}, routes tokens "
                f"by clusters of neurons, which {type(self.method).__name__} has not put in order yet: "
                "call s24.nn.arrange(model) before the first sparse step, or train dense until then, with "
                "s24.nn.set_sparse(model, False)."
            )

    def check_stack(self, path: str = "") -> None:
        """Raises ValueError for a stack of layers whose axes do not come first in every variable.

        The step is a scalar of each layer, and so has the axes of the stack alone. Where the kernel's shape
        would also be that of a stack in its first axes, as with as many layers as `in_features`, other things
        have to tell: bias and adapters, the names of the kernel's axes, or, outside of jit and before the
        kernel moves, its checksum.

        path: of the layer in the model, for the message."""
        lead = self.step.shape
        if not lead or isinstance(self.kernel.get_raw_value(), jax.ShapeDtypeStruct):
            return
        shapes = {".".join(map(str, name)): v.shape for name, v in nnx.to_flat_state(nnx.state(self))}
        wrong = [name for name, shape in shapes.items() if shape[: len(lead)] != lead]
        if wrong or self._lies_otherwise(lead):
            name, layers = (wrong or ["kernel"])[0], " x ".join(map(str, lead))
            raise ValueError(
                f"Linear: {name} of {path or 'this layer'}, of shape {shapes[name]}, does not have the axes "
                f"of the stack of {layers} layers ({self.in_features}, {self.out_features}) first, as every "
                "variable must. Stack parameters and all else along axis 0, as nnx.vmap does with "
                "out_axes=0, and run the stack along that axis."
            )

    def _lies_otherwise(self, lead: tuple[int, ...]) -> bool:
        """Whether it is known that the axes of a stack do not come first in the kernel.

        lead: their sizes."""
        weight, sizes = self.weight, (*lead, self.in_features, self.out_features)
        if weight.shape != sizes:
            return True
        names = self.kernel.get_metadata().get("out_sharding")
        named = self.axes is not None and isinstance(names, tuple) and len(names) == self.kernel.ndim
        names = self.names_of_weight(names) if named else ()
        then = self.checksum[...] if "checksum" in vars(self) else None
        known = then is not None and not any(isinstance(x, jax.core.Tracer) for x in (weight, then))
        known = known and weight.is_fully_addressable
        for first in itertools.permutations(range(weight.ndim), len(lead)):
            order = (*first, *(axis for axis in range(weight.ndim) if axis not in first))
            if order == tuple(range(weight.ndim)) or tuple(weight.shape[axis] for axis in order) != sizes:
                continue
            if named and names[-2:] != self.axes == tuple(names[axis] for axis in order[-2:]):
                return True
            if known:
                with jax.ensure_compile_time_eval():
                    now, moved, then = map(
                        np.asarray, (checksum(weight), checksum(weight.transpose(order)), then)
                    )
                if (now != then).any() and (moved == then).all():
                    return True
        return False

    def check_values(self, path: str = "") -> None:
        """Raises ValueError outside of jit for a number of the state that the method cannot have made.

        path: of the layer in the model, for the message."""
        names = [name for name in self.method.positive if self.active and name in self.state]
        for name in names:
            value, like = self.state[name][...], self.method.state_shapes(self.weight.shape, self.role)[name]
            what = f"Linear: state[{name!r}] of {path or 'this layer'}"
            fix = "restore the state that the layer was trained with"
            if value.shape != like.shape:
                raise ValueError(
                    f"{what} is {value.dtype} {value.shape}, a kernel of shape {self.weight.shape} needs "
                    f"{like.dtype} {like.shape}: {fix}."
                )
            what = f"{what}, with a kernel of shape {self.weight.shape},"
            anew = "or, if the kernel is finite, call s24.nn.reset(model) to compute it anew"
            check_positive_state(what, value, f"{fix}, {anew}")

    def check_mode(self, path: str = "") -> None:
        """Raises ValueError if the state was written in a dense phase, but the layer is in sparse mode.

        path: of the layer in the model, for the message."""
        was = self.dense_from[...] if self.active else 0
        if not isinstance(was, jax.core.Tracer) and np.asarray(was).any():
            raise ValueError(
                f"Linear: the state of {path or 'this layer'}, with a kernel of shape {self.kernel.shape}, "
                "was written in a dense phase, but the layer is in sparse mode, as every new model is. After "
                "a restore, call s24.nn.set_sparse(model, False) to go on dense, or s24.nn.set_sparse(model, "
                "True) to begin a sparse phase."
            )


def of_jax(x: jax.typing.ArrayLike) -> jax.Array:
    """An array of JAX in place of one of NumPy, as a variable may hold it.

    x: an array, or its shape and dtype, which stays as it is."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def check_axes(axes) -> tuple[sharding.Name, sharding.Name] | None:
    """The names of a kernel's logical axes.

    axes: from a caller, any object.

    Raises: ValueError unless they are two, or None."""
    if axes is None:
        return None
    named = isinstance(axes, tuple | list) and len(axes) == 2
    if not named or any(name is not None and not isinstance(name, str | tuple) for name in axes):
        raise ValueError(
            f"Linear: axes={axes!r} must be the names of the kernel's two logical axes, such as "
            "('embed', 'mlp'), each a string or None."
        )
    return tuple(axes)


def block_axes(block: str, options: dict[str, Any]) -> tuple[sharding.Name, sharding.Name] | None:
    """Takes the names of a block's logical axes out of the options of its layers.

    block: its name, for the message.
    options: of the layers; those without `axes` are left.

    Returns: as `check_axes`.
    Raises: ValueError for metadata of kernels that says how all of them are cut, whose axes are others."""
    if "out_sharding" in options.get("kernel_metadata", {}):
        raise ValueError(
            f"{block}: kernel_metadata has out_sharding={options['kernel_metadata']['out_sharding']!r} for "
            "all kernels of the block, but each has other axes. Name those of the block, such as "
            "axes=('embed', 'mlp'), in place of it."
        )
    return check_axes(options.pop("axes", None))


def specs_of(block: str, **layers: tuple[str, Linear]) -> dict[str, PartitionSpec] | None:
    """How the operands of an engine are cut, as `sharding.specs` says of the layers' logical axes.

    block: the layer, for messages.
    layers: by the name of its weight in the engine, each layer with its path in the block.

    Returns: as `sharding.specs`.
    Raises: as `sharding.specs`, and ValueError for a kernel that is cut in another way."""
    tokens = next(iter(layers.values()))[1].tokens
    found = sharding.specs(tokens, **{name: layer.axes for name, (_, layer) in layers.items()})
    for name, (path, layer) in layers.items() if found else ():
        check_declared(block, f"{path}.kernel".removeprefix("."), found[name], layer.weight)
    return found


def check_alike(block: str, **layers: Linear) -> None:
    """Raises unless the layers of a block have the same method, implementation, dtypes and axis of tokens.

    One plan and one differentiation rule serve the whole block, so the layers must agree on these.

    block: the block's name, for messages.
    layers: the layers by their names in the block.

    Raises: TypeError for a layer that is no `s24.nn.Linear`, ValueError where layers differ."""
    for name, layer in layers.items():
        if not isinstance(layer, Linear):
            raise TypeError(
                f"{block}: {name} must be an s24.nn.Linear, got {type(layer).__name__}; write "
                f"a block of other layers as a module of your own."
            )
    for what in ("method", "implementation", "dtype", "promote_dtype", "tokens"):
        values = {name: getattr(layer, what) for name, layer in layers.items()}
        if what == "dtype":
            values = {name: value and jnp.dtype(value) for name, value in values.items()}
        if len(set(values.values())) > 1:
            found = ", ".join(f"{name}.{what} is {value}" for name, value in values.items())
            raise ValueError(
                f"{block}: {found}; its layers run as one, so all must have the same {what}: replace all of "
                f"them, or use s24.nn.set_sparse to make one dense."
            )


def _unchanged(state, refreshed, kernel):
    return state, refreshed


def checksum(kernel: jax.Array) -> jax.Array:
    """A number that says whether a kernel has moved.

    It reads max(in, out) entries of every matrix, at least one of each row and column.

    kernel: (..., in, out), any floating dtype.

    Returns: uint32 (...), not 0."""
    *_, rows, columns = kernel.shape
    at = jnp.arange(max(rows, columns))
    own = jax.typeof(kernel).sharding
    out = jax.sharding.PartitionSpec(*own.spec[:-2], None) if own.mesh.explicit_axes else None
    entries = kernel.at[..., at % rows, at % columns].get(out_sharding=out)
    entries = jax.lax.stop_gradient(entries).astype(jnp.float32)
    words = jax.lax.bitcast_convert_type(entries, jnp.uint32) * (2 * at.astype(jnp.uint32) + 1)
    return jnp.sum(words, axis=-1, dtype=jnp.uint32) | jnp.uint32(1)


def check_method(op: str, method) -> None:
    """Raises TypeError unless a method is an instance of `s24.methods`.

    op: the layer or function, for messages.
    method: as the caller gave it."""
    if isinstance(method, type):
        raise TypeError(f"{op}: method must be an instance, got the class; call it: {method.__name__}().")
    if not isinstance(method, Method):
        raise TypeError(f"{op}: method must be one of s24.methods, such as FST(), got {method!r}.")


def check_fit(method: Method, in_features: int, out_features: int, role: str = "w") -> None:
    """Raises ValueError unless a method has a plan for a layer of these widths.

    method, in_features, out_features, role: as in `Linear`."""
    if role == "w" and method.needs_block:
        raise ValueError(
            f"Linear: {method} makes activations sparse and has no table for a single linear layer, "
            f"nor for a block with a gate; use s24.nn.FFN."
        )
    for name, row in method.linear_plan().rows:
        if row.operand == "w":
            contracted = dict(LINEAR[name])["w"]
            row.by.check("Linear", (in_features, out_features), contracted, "kernel")
