"""Whether an array is 2:4."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse24 import patterns
from jax_sparse24.dispatch.operation import Kernel, Operation, trailing
from jax_sparse24.ops.reference import prune_check as reference


def prune_check24(x: jax.typing.ArrayLike, axis: int, *, implementation: str | None = None) -> jax.Array:
    """The number of groups of four consecutive elements along an axis with more than two non-zeros.

    Zero says that `x` is 2:4 along the axis, so that `pack24` loses nothing of it. NaN and subnormals are not
    zero, and -0 is. No gradient flows.

    x: any shape whose `axis` is a multiple of 4; float32, bfloat16, float16, or bool, such as a mask.
    axis: along which elements are grouped.
    implementation: as in `mask24`.

    Returns: int32, ().
    Raises: as `mask24`.
    Source: `cusparseLtSpMMAPruneCheck` of cuSPARSELt, which says whether there is such a group."""
    x = patterns.as_array("prune_check24", "x", x, also=(jnp.bool_,))
    axis = patterns.check_grouped("prune_check24", x, axis)
    return PRUNE_CHECK24(lax.stop_gradient(x), axis=axis, implementation=implementation)


PRUNE_CHECK24 = Operation(
    "prune_check24",
    reference.prune_check24,
    kernel=Kernel("s24_prune_check", lambda x, axis: jax.ShapeDtypeStruct((), jnp.int32), trailing),
)
