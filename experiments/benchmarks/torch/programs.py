"""What PyTorch has to compare with, where it is installed: dense, 2:4 and dense FP8 products, packing.

Each is a program as `jax_sparse24.measure.interleaved` takes it: called, it computes; `result` is its first
result. What the device or this PyTorch cannot run has no program, and is not measured.
"""

import contextlib
import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.benchmarks.check import is_pruned
from jax_sparse24 import prune24
from jax_sparse24.measure import Oracle, roundoff, same_bits
from jax_sparse24.patterns import FLOAT8

NAMES = ("torch dense", "torch 2:4", "torch dense fp8")


@functools.cache
def torch():
    """The module, or None."""
    try:
        import torch
    except ImportError:
        return None
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # float32 sums, as in XLA
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = True  # as XLA multiplies float32
    return torch


def device() -> str | None:
    """The torch device on which JAX computes, or None if PyTorch cannot use it."""
    if torch() is None:
        return None
    if jax.default_backend() == "cpu":
        return "cpu"
    return "cuda" if jax.default_backend() == "gpu" and torch().cuda.is_available() else None


def where_possible(what: str, build) -> dict:
    """`build()`; nothing where PyTorch is not installed, or cannot compile, of which it warns."""
    return {} if device() is None else or_warn(f"PyTorch's {what}", build)


def or_warn(what: str, build) -> dict:
    """`build()`; nothing where the program cannot be compiled or run, of which it warns."""
    try:
        return build()
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        warnings.warn(f"{what} is not measured, it cannot be built: {first}", stacklevel=2)
        return {}


class TorchProgram:
    """`compute()` gives tensors on the device, or a tree of them; `oracle`: what a product must be, if not
    that of its inputs."""

    bytes: dict = {}  # noqa: RUF012  XLA plans nothing here

    def __init__(self, compute, oracle=None):
        self.compute, self.oracle = compute, oracle
        self.result = jax.tree.map(array, compute())

    def __call__(self):
        return self.compute()

    def wait(self, out):
        wait()

    def repeats_itself(self) -> bool:
        return same_bits(jax.tree.map(array, self.compute()), self.result)


def wait():
    """Until PyTorch has computed what it was given."""
    if device() == "cuda":
        torch().cuda.synchronize()


def array(x) -> jax.Array:
    """A torch tensor as a JAX array on the same device."""
    return jnp.from_dlpack(x.detach().contiguous())


def tensor(x):
    """A JAX array as a torch tensor on the same device."""
    if x.dtype != FLOAT8:
        return torch().from_dlpack(x)
    return torch().from_dlpack(jax.lax.bitcast_convert_type(x, jnp.uint8)).view(torch().float8_e4m3fn)


def dense(a, b, axes) -> dict:
    """PyTorch's dense products of `a` and `b`, contracted along `axes`."""
    if device() is None:
        return {}
    ta, tb = tensor(a), tensor(b)
    left = ta if axes[0] == -1 else ta.T
    right = tb if axes[1] == -2 else tb.T
    return _fp8(left, right) if a.dtype == FLOAT8 else {"torch dense": TorchProgram(lambda: left @ right)}


def _fp8(left, right) -> dict:
    """Dense e4m3 with a scale of 1 per operand."""
    if not left.is_cuda or torch().cuda.get_device_capability() < (8, 9):
        return {}
    a, b = left.contiguous(), right.T.contiguous().T  # column-major, as the kernel wants it
    one = torch().ones((), device=left.device)

    def compute():
        return torch()._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch().bfloat16)

    try:
        oracle = Oracle(array(a.float()), array(b.float()), unit=roundoff(FLOAT8))
        return {"torch dense fp8": TorchProgram(compute, oracle)}
    except RuntimeError:
        return {}


def sparse(form: str, pruned, y, axis: int, y_axis: int, left: bool) -> dict:
    """PyTorch's 2:4 product of a pruned operand and `y`, where this device and dtype have one."""
    if form != "2:4" or not has_sparse(pruned.dtype):
        return {}
    p, d = tensor(pruned), tensor(y)
    p = (p if axis == -1 else p.T).contiguous()  # (R, K): PyTorch takes the sparse operand first
    d = d if y_axis == -2 else d.T  # (K, N)
    try:
        with as_it_is():
            packed = torch().sparse.to_sparse_semi_structured(p)
        return {"torch 2:4": TorchProgram(lambda: packed @ d if left else (packed @ d).T)}
    except UNSUPPORTED:
        return {}


UNSUPPORTED = (RuntimeError, NotImplementedError, AttributeError)  # device, size, layout or version


def has_sparse(dtype) -> bool:
    """Whether PyTorch may have 2:4 products of that dtype here."""
    return device() == "cuda" and dtype in (jnp.float16, jnp.bfloat16)


@contextlib.contextmanager
def as_it_is():
    """PyTorch announces its 2:4 tensors as a prototype; nobody need hear that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def prune_both(x):
    """(r, c) pruned to 2:4 along both axes and packed for products along either, by the kernel that PyTorch
    has for training."""
    return torch().sparse.SparseSemiStructuredTensorCUSPARSELT.prune_dense_static_sort(x)


class Packing(NamedTuple):
    """What packs, whether it holds what it packed, bytes of its arguments and results."""

    program: TorchProgram
    right: bool
    bytes: int


def packing(x) -> dict[tuple[str, int | None], Packing]:
    """PyTorch's packing of a matrix, by name and axis (None: both, in 4x4 tiles)."""
    made = {}
    if has_sparse(x.dtype):
        for place, pack in PACKING.items():
            with contextlib.suppress(*UNSUPPORTED), as_it_is():
                made[place] = pack(x)
    return made


def _pack_pruned(x) -> Packing:
    pruned = prune24(x, -1)
    given, pack = tensor(pruned), torch().sparse.to_sparse_semi_structured
    made = pack(given)
    right = bool(jnp.all(array(made.to_dense()) == pruned))
    return Packing(TorchProgram(lambda: pack(given).packed), right, x.nbytes + made.packed.nbytes)


def _pack_both(x) -> Packing:
    given = tensor(x)
    made = prune_both(given)
    kept, other = array(made.to_dense()), array(made.t().to_dense())
    right = is_pruned(kept, x) and bool(jnp.all(kept == other.T))

    def run():
        made = prune_both(given)
        return made.packed, made.packed_t

    return Packing(TorchProgram(run), right, x.nbytes + made.packed.nbytes + made.packed_t.nbytes)


PACKING = {
    ("torch pack24 of a pruned matrix", -1): _pack_pruned,
    ("torch transposable_pack24", None): _pack_both,
}
