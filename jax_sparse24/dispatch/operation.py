"""Operations, declared once: what each means, which kernels compute it, and its derivative.

    PRUNE = Operation(
        "prune24",
        reference=reference.prune24,                       # (x, axis) -> array
        kernel=Kernel("s24_prune", like, trailing),
        jvp=_prune_jvp,
    )
    y = PRUNE(x, axis=-1, implementation=None)

An operation takes arrays (its operands) and static options. What runs is decided when it is traced, and on
which platform when the program is lowered. `Kernel` is the only thing that calls native code, so that what
every call needs (an operand with the place of a shard, casts under `shard_map`) is written there once."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse24.dispatch import decision, native, shards
from jax_sparse24.dispatch.decision import Decision
from jax_sparse24.dispatch.hardware import platform


def like(x: jax.Array, *_, **__) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a result that has those of the first operand."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def mask_like(x: jax.Array, *_, **__) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a mask of the first operand."""
    return jax.ShapeDtypeStruct(x.shape, jnp.bool_)


def trailing(axis: int, **_) -> dict[str, int]:
    """The attribute by which kernels are told an axis.

    It is the number of axes behind it, which `vmap` does not change."""
    return {"trailing": -1 - axis}


def _none(**_) -> dict[str, int]:
    return {}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A native kernel, called with the operands and options of an operation.

    target: the name under which ffi/ registers it.
    types: (*operands, **options) -> shape and dtype of the result, or a tuple of them.
    attributes: (**options) -> the integers and flags that the kernel takes."""

    target: str
    types: Callable[..., Any]
    attributes: Callable[..., Mapping[str, int]] = _none

    def __call__(self, *operands, types=None, **options):
        """Calls the kernel.

        operands: arrays.
        types: shapes and dtypes of the results in place of the kernel's own, where it writes the same result
            in another layout; None for its own.
        options: those of the operation.

        Returns: an array, or a tuple of them."""
        types = self.types(*operands, **options) if types is None else types
        results = native.call(self.target, types, *operands, **self.attributes(**options))
        return tuple(results) if isinstance(types, tuple) else results


class Reverse(NamedTuple):
    """A derivative in reverse mode.

    saves: (operands, results, **options) -> what the backward pass needs.
    backward: (saved, cotangents, implementation=, **options) -> a cotangent for every operand, None where
        there is none."""

    saves: Callable[..., Any]
    backward: Callable[..., tuple]


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An operation; call it with its operands, its options and `implementation`.

    name: of the public function, in messages.
    reference: (*operands, **options) -> results, in jnp: the definition.
    composed: (*operands, implementation=, **options) -> results, of other operations; in place of a
        reference.
    kernel: (*operands, **options) -> results, a `Kernel` or a function that calls some; None if there is no
        kernel, or if other operations or the reference do elsewhere what `cpu` and `cuda` do.
    cpu, cuda: as `kernel`, on that platform alone: one pass in place of several.
    fits: (platform, *operands, **options) -> whether that pass is taken.
    library: as `kernel`, for implementation="cusparselt"; None for the kernel.
    measured: (dtype, **options) -> whether a kernel was measured to be faster here than what XLA fuses of the
        same, so that implementation=None takes it; None for operations whose kernel is always taken.
    missing: platform -> "no ... kernel" and why, for platforms that `kernel` does not run on.
    jvp: (primals, tangents, implementation=, **options) -> results and their tangents.
    vjp: a derivative in reverse mode. Without either, the operation is not differentiable."""

    name: str
    reference: Callable[..., Any] | None = None
    composed: Callable[..., Any] | None = None
    kernel: Callable[..., Any] | None = None
    cpu: Callable[..., Any] | None = None
    cuda: Callable[..., Any] | None = None
    fits: Callable[..., bool] = lambda *_, **__: True
    library: Callable[..., Any] | None = None
    measured: Callable[..., bool] | None = None
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    jvp: Callable[..., Any] | None = None
    vjp: Reverse | None = None

    def __call__(self, *operands, implementation: str | None = None, **options):
        operands = shards.whole(self.name, operands)
        return self._call((implementation, tuple(sorted(options.items()))), *shards.alike(operands))

    def decide(self, dtype, implementation: str | None = None, **options) -> Decision:
        """What runs the operation.

        dtype: of its operands.
        implementation: None, or the name that the caller was given.
        options: those of a call; only `measured` reads them.

        Raises: as `decision.decide`."""
        if implementation is None and self.measured is not None and not self.measured(dtype, **options):
            return Decision("reference", "XLA fuses it, and no kernel was measured to be faster here")
        return decision.decide(self.name, dtype, implementation, missing=self._missing)

    def in_one_pass(self, *operands, implementation: str | None = None, **options) -> bool:
        """Whether a call with these arguments runs one pass in place of several on this machine.

        operands, options: those of the call; of operands only shapes and dtypes matter.
        implementation: as of the call.

        Returns: whether it does.
        Raises: as `decision.decide`."""
        # The kernel of what other operations compose is such a pass, too.
        kernel = self.composed is not None and self.kernel is not None and platform() not in self.missing
        if not kernel and platform() not in self._passes(operands, options):
            return False
        return self.decide(_dtype(operands), implementation, **options).runs != "reference"

    @property
    def _missing(self) -> Mapping[str, str]:
        return self.missing if self.kernel or self.cpu or self.cuda else {"every platform": "no kernel"}

    @functools.cached_property
    def _call(self) -> Callable[..., Any]:
        """(static, *operands): static is the implementation and the options as sorted pairs."""

        def run(static, *operands):
            implementation, options = static
            return shards.varying_as(self._run(operands, implementation, dict(options)), operands)

        run.__name__ = self.name.split()[0]
        call = jax.jit(run, static_argnums=0, inline=True)
        if self.jvp is not None:
            call = jax.custom_jvp(call, nondiff_argnums=(0,))

            @call.defjvp
            def _(static, primals, tangents):
                return self.jvp(primals, tangents, implementation=static[0], **dict(static[1]))

        elif self.vjp is not None:
            call = jax.custom_vjp(call, nondiff_argnums=(0,))

            def forward(static, *operands):
                results = self._call(static, *operands)
                return results, self.vjp.saves(operands, results, **dict(static[1]))

            def backward(static, saved, cotangents):
                return self.vjp.backward(saved, cotangents, implementation=static[0], **dict(static[1]))

            call.defvjp(forward, backward)
        return call

    def _run(self, operands, implementation: str | None, options: dict[str, Any]):
        dtype = _dtype(operands)
        runs = self.decide(dtype, implementation, **options).runs
        if runs == "reference":
            return self._steps(implementation, options)(*operands)
        if runs == "cusparselt" and self.library is not None:
            return self.library(*operands, **options)
        kernel = self._kernel(operands, implementation, options)
        if runs != "auto":
            return kernel(*operands)
        kernels = dict.fromkeys(decision.platforms(self.name, dtype, self._missing), kernel)
        steps = self._steps("reference", options)

        def reference(*operands):  # a result that is the same for all operands of a shape would not vary
            return shards.varying_as(steps(*operands), operands)

        return jax.lax.platform_dependent(*operands, **kernels, default=reference)

    def _steps(self, implementation: str | None, options) -> Callable[..., Any]:
        """What computes the operation without a kernel of its own."""
        if self.composed is not None:
            return partial(self.composed, implementation=implementation, **options)
        return partial(self.reference, **options)

    def _kernel(self, operands, implementation: str | None, options) -> Callable[..., Any]:
        steps = self._steps(implementation, options)
        kernel = steps if self.kernel is None else partial(self.kernel, **options)
        passes = self._passes(operands, options)
        if not passes:
            return kernel
        return lambda *operands: jax.lax.platform_dependent(*operands, **passes, default=kernel)

    def _passes(self, operands, options) -> dict[str, Callable[..., Any]]:
        """The pass of each platform that has one for these arguments."""
        passes = {"cpu": self.cpu, "cuda": self.cuda}
        return {
            name: partial(run, **options)
            for name, run in passes.items()
            if run is not None and self.fits(name, *operands, **options)
        }


def _dtype(operands):
    """The dtype by which kernels are chosen: that of the first operand of floats, else of the first."""
    leaves = jax.tree.leaves(operands)
    return next((x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)), leaves[0].dtype)
