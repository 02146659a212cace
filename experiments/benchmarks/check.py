"""How far results of whole blocks may differ from the masked-dense computation."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.measure import roundoff


def tolerance(dtype, depth: int) -> float:
    """Largest relative error (of norms) of a chain of a few products with sums of `depth` terms.

    A sum of K products carries a relative rounding error of about `u sqrt(K)`, u the roundoff of float32
    sums; 16 of them bound the few stages of a block. XLA may keep an intermediate value of a 16-bit block
    in float32 in one program and round it in the other, each time half an eps at most."""
    return 16 * roundoff(dtype) * math.sqrt(depth) + float(jnp.finfo(dtype).eps)


def tolerance_of_estimate(tolerance: float) -> float:
    """The tolerance of a product with a random operand drawn from values that carry an error of `tolerance`.

    A uniform number falls between the two running sums that differ in about 4 x the error's share of all
    groups, which then draw other entries altogether; the squared error of the result grows by as much."""
    return math.sqrt(8 * tolerance)


def tolerance_of_selection(tolerance: float) -> float:
    """The tolerance of a product with an operand cut by magnitude from values that carry an error of
    `tolerance`.

    In about that share of all groups rounding decides between two elements of nearly equal size, and the
    squared error of the result grows by as much."""
    return math.sqrt(tolerance)


def distance(result, truth) -> float:
    """Norm of the difference over the norm of the truth; infinite for what is not finite."""
    if jax.default_backend() != "cpu":  # float32 is enough for the tolerance, and a host takes seconds
        result, truth = (jnp.asarray(x, jnp.float32) for x in (result, truth))
        error = jnp.linalg.norm(result - truth) / jnp.maximum(
            jnp.linalg.norm(truth), jnp.finfo("float32").tiny
        )
        return float(error) if jnp.isfinite(result).all() else math.inf
    result, truth = (np.asarray(x).astype(np.float64) for x in (result, truth))
    if not np.isfinite(result).all():
        return math.inf
    return float(np.linalg.norm(result - truth) / max(np.linalg.norm(truth), np.finfo(np.float64).tiny))


def is_pruned(pruned, w) -> bool:
    """Whether `pruned` is w with at most two of four left along both axes, and 40 % of all at least."""
    kept = pruned != 0
    rows, columns = (kept.reshape(shape) for shape in ((-1, 4), (len(w) // 4, 4, -1)))
    most = max(int(rows.sum(1).max()), int(columns.sum(1).max()))
    return bool(jnp.all(pruned == jnp.where(kept, w, 0))) and most <= 2 and float(kept.mean()) >= 0.4
