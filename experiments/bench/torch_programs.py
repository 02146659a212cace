"""PyTorch's products as further columns, where PyTorch is installed: dense, 2:4 and dense FP8.

Each is a program as `jax_sparse24._products.measure` takes it: called, it computes; `result` is its first
result.
What the device or this PyTorch cannot run has no program, and its column says "not measured".
"""

import functools
import warnings

import jax
import jax.numpy as jnp

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

    def __init__(self, compute, oracle=None):
        self.compute, self.oracle = compute, oracle
        self.result = array(compute())

    def __call__(self):
        return self.compute()

    def wait(self, out):
        if out.is_cuda:
            torch().cuda.synchronize()

    def repeats_itself(self) -> bool:
        return same_bits(array(self.compute()), self.result)


def array(x) -> jax.Array:
    """A torch tensor as a JAX array on the same device."""
    return jnp.from_dlpack(x.contiguous())


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
    own = {} if a.dtype == FLOAT8 else {"torch dense": TorchProgram(lambda: left @ right)}
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
        oracle = Oracle(array(a.float()), array(b.float()), unit=roundoff(FLOAT8))
        return {"torch dense fp8": TorchProgram(compute, oracle)}
    except RuntimeError:
        return {}


def sparse(form: str, pruned, y, axis: int, y_axis: int, left: bool) -> dict:
    """PyTorch's 2:4 product of a pruned operand and `y`, where this device and dtype have one."""
    if form != "2:4" or device() != "cuda" or pruned.dtype not in (jnp.float16, jnp.bfloat16):
        return {}
    p, d = tensor(pruned), tensor(y)
    p = (p if axis == -1 else p.T).contiguous()  # (R, K): PyTorch takes the sparse operand first
    d = d if y_axis == -2 else d.T  # (K, N)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it announces itself as a prototype
            packed = torch().sparse.to_sparse_semi_structured(p)
        return {"torch 2:4": TorchProgram(lambda: packed @ d if left else (packed @ d).T)}
    except (RuntimeError, NotImplementedError):  # the device, the size or the layout is not supported
        return {}
