"""Compiled programs that check whether they repeat their results, and error bounds for products."""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24.patterns import FLOAT8

MOST_TURNS = 64  # smaller arrays stay in the caches


def untuned() -> dict:
    """Compiler options for programs whose time does not matter.

    On a GPU XLA otherwise tries dozens of kernels per product, which takes a second each. Where it may not,
    it takes the first tiling of a Triton kernel, whatever the product, unless products are left to cuBLAS,
    which chooses by size.

    Returns: a dict for `compile(compiler_options=)` of a lowered program.
    Source: openxla/xla, `GetConfigAssignerOptions` in xla/service/gpu/autotuning and
    `TritonBackend::GetDefaultConfig` in xla/backends/gpu/autotuner/triton.cc."""
    gpu = jax.default_backend() == "gpu"
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False} if gpu else {}


class Program:
    """A function compiled for its arguments, with its first result in `result`.

    With `from_memory`, copies of the arguments take turns, each with a result of its own, which is
    overwritten: no call finds in a cache what others have left there, and none takes memory from the system,
    which zeroes every page that malloc gave back.

    function: pure, of arrays.
    args: its arguments.
    timed: whether its speed matters.
    from_memory: whether arguments come from memory, not from a cache, as they do where a larger program calls
        the function on a CPU.
    options: XLA's compiler options, used if it is timed."""

    def __init__(
        self,
        function: Callable,
        *args: Any,
        timed: bool = True,
        from_memory: bool = False,
        options: Mapping[str, Any] | None = None,
    ):
        self._turns = deque()
        self._steady = np.True_
        if not from_memory:
            options = (options or {}) if timed else untuned()
            self._args = args
            self._compiled = jax.jit(function).lower(*args).compile(compiler_options=options)
            self.result = jax.block_until_ready(self())
            return
        over = jax.jit(lambda last, *args: function(*args), donate_argnums=0, keep_unused=True)
        last = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))
        self._compiled = over.lower(last, *args).compile()
        size = sum(x.nbytes for x in jax.tree.leaves((last, args)))
        for _ in range(min(MOST_TURNS, 1 + math.ceil(2 * largest_cache() / max(size, 1)))):
            self._turns.append([*jax.block_until_ready(jax.tree.map(jnp.copy, (last, *args)))])
        self.result = jax.block_until_ready(jax.tree.map(jnp.copy, self()))

    def __call__(self) -> Any:
        if not self._turns:
            return self._compiled(*self._args)
        turn = self._turns[0]
        self._turns.rotate(-1)
        turn[0] = self._compiled(*turn)
        return turn[0]

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of arguments, results and temporaries as XLA plans them, without the kernels' own."""
        plan = self._compiled.memory_analysis()
        if plan is None:
            return {}
        names = ("argument", "output", "temp")
        found = {name: int(getattr(plan, f"{name}_size_in_bytes")) for name in names}
        found["argument"] -= int(plan.alias_size_in_bytes)  # the last result is counted as output
        return found

    def check(self, results: Iterable) -> None:
        """Compares results with the first one, bit for bit; see `repeats_itself`.

        results: trees of arrays that calls of this program have returned."""
        for result in results:
            if jax.default_backend() == "cpu":
                self._steady = self._steady and _same_bytes(result, self.result)
            else:  # on the device: fetching a result takes longer than computing it
                self._steady = _still(self._steady, result, self.result)
        jax.block_until_ready(self._steady)

    def repeats_itself(self) -> bool:
        """Whether another call, and all calls that were checked, gave the first result, bit for bit."""
        self.check([self()])
        return bool(self._steady)


@functools.cache
def largest_cache() -> int:
    """Bytes of the processor's largest cache as Linux reports it; elsewhere a common size of servers."""
    sizes = [
        path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(size[:-1]) << 10 for size in sizes if size[-1:] == "K"), default=32 << 20)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees of arrays have the same structure, dtypes, shapes and bits.

    a, b: the trees."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    if any((jnp.result_type(x), jnp.shape(x)) != (jnp.result_type(y), jnp.shape(y)) for x, y in pairs):
        return False
    return bool(_still(True, a, b))


@jax.jit
def _still(steady, a, b):
    """Whether `steady` is true and two trees of the same structure have the same bits."""

    def equal(x, y):
        if x.dtype != jnp.bool_:
            integers = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
            x, y = (jax.lax.bitcast_convert_type(a, integers) for a in (x, y))
        return jnp.array_equal(x, y)

    return jnp.stack([jnp.asarray(steady), *jax.tree.leaves(jax.tree.map(equal, a, b))]).all()


def _same_bytes(a, b) -> bool:
    """Whether two trees have the same bits, compared on the host, which saves starting a program of XLA."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    flat = [[np.asarray(x).reshape(-1).view(np.uint8) for x in pair] for pair in pairs]
    words = [[x.view(np.uint64) if x.size % 8 == 0 else x for x in pair] for pair in flat]
    return all(np.array_equal(x, y) for x, y in words)


class Oracle:
    """The exact result of a product of two matrices, computed in float64, with an error bound for every
    element.

    The bound of element (i, j) is `8 u ‖a_i‖ ‖b_j‖`, u the roundoff of the products and sums, plus one
    rounding to the result's dtype. On random data a sum of K products of rms size s is about `sqrt(K) s`, so
    its rounding errors add up to at most about `u K s = u ‖a_i‖ ‖b_j‖`; a single misplaced term, of size s,
    exceeds the bound for every K below a million.

    If the product has more than LARGE multiplications, only some rows are computed, which lie evenly all over
    the result, so that no tile of a kernel is left out. On an accelerator these are computed in float32, in
    which a sum of K terms errs by an eighth of the bound at most (a host would take minutes).

    a, b: (M, K) and (K, N).
    unit: roundoff of the sums, where it is not what `roundoff` says."""

    LARGE, ROWS = 2**36, 512

    def __init__(self, a: Any, b: Any, unit: float | None = None):
        self.unit = unit
        self.rows = slice(None)
        large = a.size * b.shape[1] > self.LARGE
        if large:
            step = max(1, a.shape[0] // self.ROWS)
            self.rows = np.arange(0, a.shape[0], step) + np.random.default_rng(0).integers(0, step)
            self.rows = self.rows[self.rows < a.shape[0]]
        if large and jax.default_backend() != "cpu":
            wide = [jnp.asarray(x).astype(jnp.float32) for x in (a[self.rows], b)]
            self.exact, self.scale = _in_float32()(*wide)
        else:
            a, b = (np.asarray(x).astype(np.float64) for x in (a[self.rows], b))
            self.exact = a @ b
            self.scale = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)[None, :]

    def excess(self, result: jax.typing.ArrayLike) -> float:
        """The largest error over its bound; above 1 a result is wrong.

        result: (M, N).

        Returns: the ratio, 0 or more."""
        rounding = float(jnp.finfo(result.dtype).eps) / 2
        unit = roundoff(result.dtype) if self.unit is None else self.unit
        if isinstance(self.exact, np.ndarray):
            xp, found = np, np.asarray(result[self.rows]).astype(np.float64)
        else:  # a host would take seconds
            xp, found = jnp, result[self.rows].astype(jnp.float32)
        bound = 8 * unit * self.scale + 1.01 * rounding * xp.abs(self.exact)
        with np.errstate(invalid="ignore"):
            error = xp.abs(found - self.exact)
        worst = xp.max(error / xp.maximum(bound, xp.finfo(bound.dtype).tiny), initial=0.0)
        return float(worst) if xp.isfinite(worst) else math.inf


@functools.cache
def _in_float32() -> Callable:
    """A compiled function of a product and the scale of its elements' bounds."""

    def product(a, b):
        scale = jnp.linalg.norm(a, axis=1)[:, None] * jnp.linalg.norm(b, axis=0)[None, :]
        return jnp.matmul(a, b, precision="highest"), scale

    return jax.jit(product, compiler_options=untuned())


def roundoff(dtype: jax.typing.DTypeLike) -> float:
    """Unit roundoff of products and sums of operands of a dtype.

    XLA multiplies float32 as TF32 on a GPU and as bfloat16 on a TPU; Hopper's FP8 tensor cores keep about 14
    bits of a sum (2412.19437, section 3.3.2).

    dtype: of both operands.

    Returns: the largest relative error of one rounding."""
    if jnp.dtype(dtype) == FLOAT8:
        return 2.0**-13 if jax.default_backend() == "gpu" else 2.0**-24
    if jnp.dtype(dtype) == jnp.float32:
        return {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(jax.default_backend(), 2.0**-24)
    return 2.0**-24


def random(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, seed: int) -> jax.Array:
    """Standard normal numbers.

    An accelerator draws them itself, which is faster, and gets other numbers than a host.

    shape: of the array.
    dtype: of the array; the numbers are drawn in float32 and rounded to it.
    seed: of the draw.

    Returns: an array of that shape and dtype."""
    if jax.default_backend() != "cpu":
        return jax.random.normal(jax.random.key(seed), shape).astype(dtype)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def random_words(count: int, seed: int) -> jax.Array:
    """Random words, drawn on the device on which `random` draws.

    count: how many.
    seed: of the draw.

    Returns: uint32 (count,)."""
    if jax.default_backend() != "cpu":
        return jax.random.bits(jax.random.key(seed), (count,), jnp.uint32)
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, count, np.uint32))
