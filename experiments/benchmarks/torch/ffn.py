"""PyTorch's feed-forward blocks for the suite ffn: dense, and with 2:4 weights. Imported where PyTorch is
installed."""

import contextlib
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch

import jax_sparse24 as s24
from experiments.benchmarks.torch.model import feed_forward
from experiments.benchmarks.torch.programs import UNSUPPORTED, TorchProgram, as_it_is, has_sparse, tensor


class Block(NamedTuple):
    """`forward` gives (y,), `both` (y, dx, dw1, dw2); weights: those that products read, as JAX arrays."""

    forward: TorchProgram
    both: TorchProgram
    weights: tuple[jax.Array, jax.Array]


def blocks(x, w1, w2, dy) -> dict[str, Block]:
    """Those that this device and dtype can run, by name. Raises RuntimeError where PyTorch cannot compile."""
    torch.compiler.reset()  # one function is compiled for a few sizes only, then no more
    found = {"torch dense": dense(x, w1, w2, dy)}
    if has_sparse(x.dtype):
        with contextlib.suppress(*UNSUPPORTED), as_it_is():
            found["torch 2:4"] = sparse(x, w1, w2, dy)
            found["torch 2:4, compressed before"] = sparse(x, w1, w2, dy, before=True)
    return found


def dense(x, w1, w2, dy) -> Block:
    args = [tensor(v) for v in (x, w1, w2)]
    leaves, ct = [v.clone().requires_grad_() for v in args], tensor(dy)
    run = torch.compile(feed_forward, dynamic=False)

    def forward():
        with torch.no_grad():
            return (run(*args),)

    def both():
        y = run(*leaves)
        return y, *torch.autograd.grad(y, leaves, ct)

    return Block(TorchProgram(forward), TorchProgram(both), (w1, w2))


def squared_relu(y1):
    return torch.relu(y1).square()


def squared_relu_gradient(y1, dy2):
    return dy2 * (2 * torch.relu(y1))


def sparse(x, w1, w2, dy, before: bool = False) -> Block:
    """Both weights pruned by a transposable mask and compressed along both axes in every step, by cuSPARSELt
    as PyTorch calls it; gradients of weights by dense products. before: they are pruned and compressed once,
    before all steps."""
    masks = [s24.transposable_mask24(w) for w in (w1, w2)]
    pruned = tuple(jnp.where(mask, w, 0) for w, mask in zip((w1, w2), masks, strict=True))
    x, w1, w2, dy, *masks = (tensor(v) for v in (x, w1, w2, dy, *masks))
    pack = torch.sparse.to_sparse_semi_structured  # of (out, in), for (out, in) @ (in, T)
    compiled = partial(torch.compile, dynamic=False)
    act, gradient, cut = map(compiled, (squared_relu, squared_relu_gradient, both_ways))

    def packed_both_ways():
        return [[pack(v) for v in cut(w, m)] for w, m in zip((w1, w2), masks, strict=True)]

    def packed_for_forward():
        return [pack(cut(w, m)[1]) for w, m in zip((w1, w2), masks, strict=True)]

    once = packed_both_ways() if before else None

    def forward():
        w1t, w2t = [own[1] for own in once] if before else packed_for_forward()
        return ((w2t @ act(w1t @ x.t())).t(),)

    def both():
        (w1s, w1t), (w2s, w2t) = once or packed_both_ways()
        y1t = w1t @ x.t()
        y2t = act(y1t)
        dy1t = gradient(y1t, w2s @ dy.t())
        return (w2t @ y2t).t(), (w1s @ dy1t).t(), (dy1t @ x).t(), y2t @ dy

    return Block(TorchProgram(forward), TorchProgram(both), pruned)


def both_ways(w, mask):
    """A pruned weight, and its transpose, each in rows."""
    pruned = w * mask
    return pruned, pruned.t().contiguous()
