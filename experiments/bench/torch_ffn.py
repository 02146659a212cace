"""PyTorch's feed-forward blocks for the suite ffn: dense, and with 2:4 weights. Imported where PyTorch is
installed."""

import contextlib
from typing import NamedTuple

import jax
import torch

from experiments.bench.torch_model import feed_forward
from experiments.bench.torch_programs import (
    UNSUPPORTED,
    TorchProgram,
    array,
    as_it_is,
    has_sparse,
    prune_both,
    tensor,
)


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


def sparse(x, w1, w2, dy) -> Block:
    """Both weights pruned to 2:4 along both axes and packed in every step, by PyTorch's own kernel; gradients
    of weights by dense products: what `torchao.sparsity.training` did until it was deleted."""
    x, w1, w2, dy = (tensor(v) for v in (x, w1, w2, dy))
    act, gradient = (torch.compile(f, dynamic=False) for f in (squared_relu, squared_relu_gradient))

    def forward():
        return (act(x @ prune_both(w1)) @ prune_both(w2),)

    def both():
        s1, s2 = prune_both(w1), prune_both(w2)
        y1 = x @ s1
        y2 = act(y1)
        y = y2 @ s2
        dy1 = gradient(y1, dy @ s2.t())
        return y, dy1 @ s1.t(), x.t() @ dy1, y2.t() @ dy

    pruned = tuple(array(prune_both(w).to_dense()) for w in (w1, w2))
    return Block(TorchProgram(forward), TorchProgram(both), pruned)
