"""Operations by handlers of any platform, those of CUDA run thread by thread on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.dispatch.operation import Operation
from tests.native.derived import CAPABILITY, on_platform
from tests.native.hostile import allocated, make, opened


@contextmanager
def at_once(
    platform: str,
    caller: Path,
    handlers: dict[str, int],
    around: Callable | None = None,
    behind: int = 0,
    capability: str = CAPABILITY,
) -> Iterator[set[str]]:
    """Operations compute what they are called with, outside of any program, by handlers of a platform; the
    names of those that ran. around: what is called in place of them, with them as its first argument.
    behind: bytes from a multiple of 128 to the begin of each array. capability: of a GPU."""
    loaded, ran = opened(str(caller)), set()

    def whole(self, *operands, implementation=None, **options):
        return self._run(operands, implementation, options)

    def run(target, types, attributes, ranks, *operands):
        """ranks: of the operands, without a batch."""
        operands, given = [np.asarray(operand) for operand in operands], []
        leading = (x.shape[: x.ndim - rank] for x, rank in zip(operands, ranks, strict=True))
        batch = np.broadcast_shapes(*leading)
        for operand in operands:
            given.append(allocated(operand.shape, operand.dtype.name, behind))
            given[-1][...] = operand
        results = [allocated((*batch, *t.shape), np.dtype(t.dtype).name, behind) for t in types]
        for result in results:
            result.reshape(-1).view(np.uint8)[...] = 7  # what nobody writes is not zero
        message = make(loaded, handlers[target], [*given, *results], len(given), attributes)
        assert not message, message
        ran.add(target)
        return results

    def call(target, types, *operands, **attributes):
        leaves, attributes = jax.tree.leaves(types), {name: int(n) for name, n in attributes.items()}
        made = partial(run, target, leaves, attributes, [jnp.ndim(operand) for operand in operands])
        if any(isinstance(operand, jax.core.Tracer) for operand in operands):
            results = jax.pure_callback(made, leaves, *operands, vmap_method="expand_dims")
        else:
            results = jax.device_put(made(*operands))
        return results if isinstance(types, tuple | list) else results[0]

    kernels = call if around is None else partial(around, call)
    with on_platform(platform, kernels, capability), mock.patch.object(Operation, "__call__", whole):
        yield ran
