"""PyTorch's products as further columns, where PyTorch is installed: dense, 2:4 and dense FP8.

Each is a program as `jax_sparse24.tune.measure` takes it: called, it computes; `result` is its first result.
What the device or this PyTorch cannot run has no program, and its column says "not measured".
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse24._measure import Oracle, roundoff, same_bits
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
    return torch


def device() -> str | None:
    """The torch device on which JAX computes, or None if PyTorch cannot use it."""
    if torch() is None:
        return None
    if jax.default_backend() == "cpu":
        return "cpu"
    return "cuda" if jax.default_backend() == "gpu" and torch().cuda.is_available() else None


class TorchProgram:
    """`compute()` gives a matrix on the device; `oracle`: what it must be, if not its inputs' product."""

    bytes: dict = {}  # noqa: RUF012  XLA plans nothing here

    def __init__(self, compute, dtype, oracle=None):
        self.compute, self.dtype, self.oracle = compute, dtype, oracle
        self.result = self._host()

    def _host(self):
        return np.asarray(self.compute().float().cpu().numpy(), self.dtype)

    def __call__(self):
        return self.compute()

    def wait(self, out):
        if out.is_cuda:
            torch().cuda.synchronize()

    def repeats_itself(self) -> bool:
        return same_bits(self._host(), self.result)


def tensor(x, where: str):
    """A JAX array as a torch tensor of the same dtype."""
    wide = torch().from_numpy(np.array(x, np.float32))
    return wide.to(where, getattr(torch(), str(x.dtype)))


def dense(a, b, axes) -> dict:
    """PyTorch's dense products of `a` and `b`, contracted along `axes`."""
    where = device()
    if where is None:
        return {}
    ta, tb = tensor(a, where), tensor(b, where)
    left = ta if axes[0] == -1 else ta.T
    right = tb if axes[1] == -2 else tb.T
    own = {} if a.dtype == FLOAT8 else {"torch dense": TorchProgram(lambda: left @ right, a.dtype)}
    return own | _fp8(left, right)


def _fp8(left, right) -> dict:
    """Dense FP8 with a scale of 1 per operand; inputs are rounded to e4m3 before."""
    if not left.is_cuda or torch().cuda.get_device_capability() < (8, 9):
        return {}
    if left.dtype not in (torch().bfloat16, torch().float8_e4m3fn):
        return {}
    a = left.contiguous().to(torch().float8_e4m3fn)
    b = right.T.contiguous().to(torch().float8_e4m3fn).T  # column-major, as the kernel wants it
    one = torch().ones((), device=left.device)

    def compute():
        return torch()._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch().bfloat16)

    try:
        oracle = Oracle(a.float().cpu().numpy(), b.float().cpu().numpy(), unit=roundoff(FLOAT8))
        return {"torch dense fp8": TorchProgram(compute, jnp.bfloat16, oracle)}
    except RuntimeError:
        return {}


def sparse(form: str, pruned, y, axis: int, y_axis: int, left: bool) -> dict:
    """PyTorch's 2:4 product of a pruned operand and `y`, where this device and dtype have one."""
    if form != "2:4" or device() != "cuda" or pruned.dtype not in (jnp.float16, jnp.bfloat16):
        return {}
    p, d = tensor(pruned, "cuda"), tensor(y, "cuda")
    p = (p if axis == -1 else p.T).contiguous()  # (R, K): PyTorch takes the sparse operand first
    d = d if y_axis == -2 else d.T  # (K, N)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it announces itself as a prototype
            packed = torch().sparse.to_sparse_semi_structured(p)
        return {"torch 2:4": TorchProgram(lambda: packed @ d if left else (packed @ d).T, pruned.dtype)}
    except (RuntimeError, NotImplementedError):  # the device, the size or the layout is not supported
        return {}
