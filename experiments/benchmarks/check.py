"""What results of whole blocks are compared with, and how far they may be from it."""

import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.measure import roundoff

MOVE = 2.0**-8  # half an eps of bfloat16
REPLICATES, RARE = 8, 5.04  # see `tolerance_of_replicates`


def compiled(make: Mapping[Hashable, Callable]) -> dict:
    """What the functions give, by name: programs, which they compile at the same time, in threads, and do not
    run. When the first ones ran while others were compiled, a session ended with "operation failed due to a
    previous error during capture". The cause was found by reading and not tried on a GPU: XLA's compiler
    waits for the whole GPU as it gives back a handle of cuDNN, which ends what another thread captures.

    There are a quarter as many threads as cores. That number is not measured; what bounds it was read in
    openxla/xla. Where kernels are tuned, each program compiles those that it tries in a pool of as many
    threads as there are cores (`OptimizeHloModule`), and keeps operands and results of the product that it
    tries in the GPU's memory. Only one program at a time measures (`GpuProfiler::Execute` holds a
    lock), so that programs wait for each other and disturb no times. More threads can only win where a
    program has one core, in XLA's passes and in LLVM; tracing is Python, one program at a time."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        return dict(zip(make, pool.map(lambda name: make[name](), make), strict=True))


def or_error(make: Callable):
    """What a function gives, or what it raises."""
    try:
        return make()
    except Exception as error:
        return error


def tolerance(dtype, depth: int) -> float:
    """Largest relative error (of norms) of a chain of a few products with sums of `depth` terms.

    A sum of K products carries a relative rounding error of about `u sqrt(K)`, u the roundoff of float32
    sums, and that of its operands, which does not grow with K where they are multiplied as TF32; 16 of the
    larger one bound the few stages of a block. XLA may keep an intermediate value of a 16-bit block in
    float32 in one program and round it in the other, each time half an eps at most."""
    error = max(roundoff(dtype), 2.0**-24 * math.sqrt(depth))
    return 16 * error + float(jnp.finfo(dtype).eps)


def tolerance_of_replicates(tolerance: float, value: float, replicates: Sequence[float]) -> float:
    """The tolerance, relative to `value`, of a number that errors of `tolerance` may move by more than that.

    Such is the gradient's norm in the second step. Which of four is cut, or drawn, is decided by rounding
    where values are nearly equal: errors e decide a share of about e of all groups, which moves a gradient by
    about sqrt(e) of its norm. AdamW's first update has the signs of the gradient and all but forgets its
    sizes, so that a share of about sqrt(e) of the entries, those near zero, changes by two updates; the
    second step, whose weights are off by that, cuts in other places again. How much of this a norm sees
    depends on method and data, and is measured: `replicates` are REPLICATES values by the same program, from
    weights that are off at random by `tolerance`, more than what is checked may be. If all are off by normal
    errors of one size, one error over the root mean square of n others has Student's distribution with n
    degrees of freedom, beyond RARE once in a thousand times.

    Few choices are not normal. But those of weights that are off by `tolerance` are 16 x as many as those of
    one product's rounding: where none of n replicates shows one, what is checked has one in a share of
    1 / (16 n e) = 0.3 % of all cases at most."""
    errors = [(float(other) - float(value)) / float(value) for other in replicates]
    return max(tolerance, RARE * math.sqrt(math.fsum(error**2 for error in errors) / len(errors)))


def moved(w, seed: int):
    """A weight whose elements are off by random shares of at most MOVE."""
    share = MOVE * np.random.default_rng(seed).uniform(-1, 1, w.shape).astype(np.float32)
    return (w.astype(jnp.float32) * (1 + share)).astype(w.dtype)


def tolerance_of_choices(tolerance: float, distance: float, choices: int) -> float:
    """The tolerance of a result that depends on choices (elements cut by magnitude, or drawn) among values
    that carry an error of `tolerance`.

    Where two elements of a group, or two columns of a block, are nearly equal, rounding chooses between
    them, and what is chosen differs altogether. The number of such choices is proportional to the error, so
    that the distance of the results grows with its root. Its size depends on method and data, and is
    measured: distance is that between two results by masked-dense products, of the weights and of `moved`
    ones. Activations and gradients are then off by about 1.7 times as much as where XLA leaves out their
    rounding, so that distances of about 0.76 of that are expected; twice as much is allowed. The data decide
    about single choices, of `choices`: one more may differ. It is of a group of four, or of a block in which
    all rows of V:N:M keep the same columns; one of c has about the share 1 / c of the squared norm."""
    expected = math.sqrt((distance**2 + 1 / choices) * tolerance / (2 * MOVE))
    return max(tolerance, 1.5 * expected)


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
